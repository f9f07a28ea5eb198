"""Random numbers as functions of a key, as in `jax.random`."""

from remat.random._key import (
    Key as Key,
    clone as clone,
    fold_in as fold_in,
    key as key,
    key_data as key_data,
    split as split,
    wrap_key_data as wrap_key_data,
)
from remat.random._reuse import check_key_reuse as check_key_reuse
from remat.random._samplers import (
    bernoulli as bernoulli,
    normal as normal,
    uniform as uniform,
)
