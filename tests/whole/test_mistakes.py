"""What people are told who make a mistake: `mistakes.txt` has the programs."""

import pytest
from support.mistakes import outcome, rows


ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=[row.title for row in ROWS])
def test_a_mistake_is_told_what_to_write(row):
    assert outcome(row.program) == row.told


def test_the_table_has_each_program_once():
    assert len({row.program for row in ROWS}) == len(ROWS)
    assert len({row.title for row in ROWS}) == len(ROWS)
