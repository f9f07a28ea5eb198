"""Each test starts without values, whatever the traceback of a failed one holds."""

import pytest

from remat._base.context import here
from remat._scope import api
from remat._torch.autograd import suspend_hooks


@pytest.fixture(autouse=True)
def _no_values_before() -> None:
    suspend_hooks()
    here().block_pack = None
    api._BLOCKS = api._Blocks()
