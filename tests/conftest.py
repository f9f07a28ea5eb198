"""What every test gets: a fixed torch seed, one thread, and no record of a call."""

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from remat._partial.cache import CACHES


# On Intel's processors MKL adds up a transposed product in another order. What these
# tests compare bit for bit are operations, not how a library computes one.
# MKL reads it at the first product.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# Two workers share two cores; and sums do not depend on the number of threads.
torch.set_num_threads(1)

# Tensors made while test modules are imported, the same in each worker.
torch.manual_seed(0)

# Wall-clock limits per example only measure how busy the machine is.
hypothesis.settings.register_profile(
    "remat", deadline=None, print_blob=True, derandomize=True
)
hypothesis.settings.load_profile("remat")


@pytest.fixture(autouse=True)
def _seed() -> None:
    # pytest-randomly seeds random and NumPy; torch needs its own.
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _first_calls() -> None:
    # What a call does depends on those of its signature before it.
    CACHES.clear()


@pytest.fixture(autouse=True)
def _no_modes_left() -> Iterator[None]:
    # A mode that stays, such as a default device, fails other tests much later.
    yield
    assert not torch._C._len_torch_function_stack()
    assert not torch._C._len_torch_dispatch_stack()
