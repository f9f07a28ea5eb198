"""Random numbers as functions of a key, as in `jax.random`."""

# In: a key. Out: numbers, by operators that graphs hold and that draw the same again.
#
#     _philox     the stream of a key: blocks of words, and numbers of these
#     _ops        operators that draw from it, in graphs, under vmap, on each device
#     _key        keys, and what tells of each that it is consumed
#     _draw       what samplers share: shapes, parameters, draws of DTensors
#     _samplers, _continuous, _choices, _dropout    what users draw
#
#     _reuse      finds keys that are consumed twice
#     _bind       has torch's own functions draw from a key, by the rules of
#     _rerouted
#
# Called by users.

import typing as _typing

from remat._base.package import advise as _advise, later as _later
from remat.random._key import (
    Key as Key,
    clone as clone,
    fold_in as fold_in,
    key as key,
    key_data as key_data,
    split as split,
    wrap_key_data as wrap_key_data,
)


# Keys are imported with remat: they register operators and a class, which programs and
# files name that another process saved.
if _typing.TYPE_CHECKING:
    from remat.random._bind import bind as bind
    from remat.random._choices import (
        categorical as categorical,
        choice as choice,
        permutation as permutation,
    )
    from remat.random._continuous import (
        exponential as exponential,
        gumbel as gumbel,
        laplace as laplace,
        truncated_normal as truncated_normal,
    )
    from remat.random._dropout import dropout as dropout
    from remat.random._reuse import (
        check_key_reuse as check_key_reuse,
        debug_key_reuse as debug_key_reuse,
    )
    from remat.random._samplers import (
        bernoulli as bernoulli,
        bits as bits,
        normal as normal,
        rademacher as rademacher,
        randint as randint,
        uniform as uniform,
    )
else:
    __getattr__, __dir__ = _later(
        __name__,
        {
            "remat.random._bind": ("bind",),
            "remat.random._choices": ("categorical", "choice", "permutation"),
            "remat.random._continuous": (
                *("exponential", "gumbel", "laplace", "truncated_normal"),
            ),
            "remat.random._dropout": ("dropout",),
            "remat.random._reuse": ("check_key_reuse", "debug_key_reuse"),
            "remat.random._samplers": (
                *("bernoulli", "bits", "normal", "rademacher", "randint", "uniform"),
            ),
        },
    )

_advise(__name__)
