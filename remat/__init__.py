"""JAX's rematerialization for PyTorch."""

from remat._api import remat as remat
from remat._errors import (
    CaptureError as CaptureError,
    MutationError as MutationError,
    RecomputeError as RecomputeError,
    RematError as RematError,
)


checkpoint = remat
