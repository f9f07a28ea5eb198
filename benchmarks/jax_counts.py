"""What a forward and a backward run: `remat`, beside `jax.checkpoint`.

The programs are those of the golden table, which the tests hold remat to
(``tests/support/golden.py``). Those of JAX are written again in ``_jax_counts.py``, and
counted in its jaxprs. remat's are counted as they run, with ``prune=True``: the second
call of each, which follows the record of the first. Reproduce with

    python benchmarks/jax_counts.py

It uses the jax that is installed, or that of ``JAX_PYTHON=/path/to/python``. Without
one, JAX's counts are those that the golden table holds, and the title says so.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from _jax import counted_by_jax
from _results import Results

from remat.testing import count_ops


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.golden import ROWS, compared, table


COUNTER = Path(__file__).with_name("_jax_counts.py")
Both = tuple[Counter[str], Counter[str]]  # forward and backward


def by_jax() -> tuple[str, dict[str, Both]]:
    """Return the version of JAX and its counts, or those of the golden table."""
    found = counted_by_jax(COUNTER)
    if found is None:
        noted = {name: (table(row[2]), table(row[3])) for name, row in ROWS.items()}
        return "0.10.2, not run: as the golden table has it", noted
    counts = {name: tuple(map(Counter, both)) for name, both in found["rows"].items()}
    return f"{found['version']}, run here", counts


def by_remat(fn: Any) -> Both:
    """Count the second call."""
    for _ in range(2):
        w, x = (torch.eye(3).add(0.1 * k).requires_grad_() for k in (1, 2))
        with count_ops() as forward:
            out = fn(w, x)
        with count_ops() as backward:
            out.backward(torch.ones_like(out))
    return forward, backward


def text(counts: Counter[str]) -> str:
    """Return counts as the golden table writes them."""
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"


def about(counts: Counter[str], row: str) -> str:
    """Return the operations that a row is about."""
    return text(compared(counts, row))


def main() -> None:
    """Count and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args()
    torch.set_num_threads(1)
    results = Results(__file__)
    version, jax = by_jax()
    columns = "JAX, forward", "remat, forward", "JAX, backward", "remat, backward"
    title = f"Operations of a forward and a backward (JAX {version})"
    cells = results.table("golden", title, "program", columns)
    for name, (_, fn, *_) in ROWS.items():
        ours, theirs = by_remat(fn), jax[name]
        pairs = zip(theirs, ours, strict=True)
        found = [about(counts, name) for pair in pairs for counts in pair]
        cells.add(name, *found)
        met = found[0] == found[1] and found[2] == found[3]
        cells.aim(name, "as JAX", "the same" if met else "others", met)
    results.show(cells)
    results.finish()


if __name__ == "__main__":
    main()
