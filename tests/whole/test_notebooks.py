"""Every notebook runs; a cell tagged ``golden`` prints exactly what is stored.

Run as a script, this file runs the notebooks and stores their outputs: all of them, or
those whose names contain one of the arguments.
"""

import os
import sys
import time
from pathlib import Path

import nbclient
import nbformat
import pytest


FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# As in pyproject.toml: torch's own rules for jvp warn, from 2.14 on visibly. The
# other is of tqdm, which transformers imports.
QUIET = (
    "ignore:`torch.jit.script` is deprecated:FutureWarning,ignore:IProgress not found"
)
# Pictures are outputs, also where the variable names a backend without a screen.
INLINE = "module://matplotlib_inline.backend_inline"


def run(path):
    """Return the stored notebook and a freshly run copy of it."""
    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        fresh,
        timeout=300,
        coalesce_streams=True,  # of a progress bar only the last state is stored
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    # One thread: two notebooks at once on two cores would wait for each other.
    settings = {"PYTHONWARNINGS": QUIET, "OMP_NUM_THREADS": "1", "MPLBACKEND": INLINE}
    client.execute(env={**os.environ, **settings})
    return stored, fresh


def text(cell):
    """What a cell printed and returned, without pictures."""
    parts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/png" not in data:
            parts.append(output.get("text", "") or data.get("text/plain", ""))
    return "".join(parts)


def kinds(cell):
    """What a cell shows besides what it printed: text, tables, pictures."""
    outputs = cell.get("outputs", [])
    return {kind for output in outputs for kind in output.get("data", {})}


def golden(notebook):
    tagged = "golden"
    return [c for c in notebook.cells if tagged in c.metadata.get("tags", [])]


# The others take ten seconds to a minute: they compile, search for plans, load models.
SLOW = ("02", "03", "04", "05", "06", "07", "08", "09")
RUN = [
    pytest.param(p, marks=pytest.mark.slow) if p.stem.startswith(SLOW) else p
    for p in NOTEBOOKS
]


# jupyter_client and zmq warn from their own event loop on some platforms.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_the_notebook_runs_and_prints_what_is_stored(path):
    stored, fresh = run(path)
    assert golden(stored), "tag at least one cell golden, or nothing is compared"
    for before, after in zip(golden(stored), golden(fresh), strict=True):
        assert text(after) == text(before)
    assert [*map(kinds, stored.cells)] == [*map(kinds, fresh.cells)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_stored_with_its_outputs(path):
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.source.strip()]
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert all(cell.execution_count is not None for cell in code)


def test_there_are_notebooks():
    assert NOTEBOOKS


def shows(output):
    """Whether it is more than the blank that a finished progress bar leaves."""
    return output.output_type != "stream" or bool(output.text.strip())


def store(names):
    chosen = [p for p in NOTEBOOKS if any(name in p.name for name in names or [""])]
    for path in chosen:
        start = time.perf_counter()
        _, fresh = run(path)
        seconds = time.perf_counter() - start
        print(f"{path.name}: {seconds:.0f} s", flush=True)  # noqa: T201
        for cell in (c for c in fresh.cells if c.cell_type == "code"):
            cell.outputs = [output for output in cell.outputs if shows(output)]
        # The interpreter's version would change in every commit.
        fresh.metadata.pop("language_info", None)
        nbformat.write(fresh, path)


if __name__ == "__main__":
    store(sys.argv[1:])
