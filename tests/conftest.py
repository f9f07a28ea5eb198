"""What every test gets: a fixed torch seed and one thread."""

import hypothesis
import pytest
import torch


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
