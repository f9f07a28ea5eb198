"""The list of faults that `tests/plant_faults.py` plants fits the code."""

from pathlib import Path

import pytest
from support.faults import FAULTS


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault):
    text = (ROOT / fault.file).read_text()
    assert fault.plant(text) != text
    assert all((ROOT / test).exists() for test in fault.tests)


def test_a_fault_whose_text_is_gone_is_an_error():
    with pytest.raises(ValueError, match="0 of"):
        FAULTS[0].plant("another text")
