"""docs/examples/train_fsdp.py, started by torchrun with two processes on the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import needs_gloo


ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/train_fsdp.py"
LAUNCHER = "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
NUMBER = r"([\d.]+)"
PAIR = f"{NUMBER} / {NUMBER}"
LINE = re.compile(rf"^\| ([^|]+) \| {PAIR} \| {PAIR} \| {NUMBER} \|$", re.MULTILINE)

pytestmark = needs_gloo


def trained(*options):
    """What the example printed: for each way of training, a line of numbers."""
    command = [sys.executable, *LAUNCHER, "--nproc-per-node", "2", EXAMPLE]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [*command, "--steps", "2", *options],
        env={**os.environ, **LOOPBACK, **paths},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert not done.returncode, done.stderr
    lines = LINE.findall(done.stdout)
    return {name: [*map(float, numbers)] for name, *numbers in lines}


def assert_saves_memory(ways, name, than):
    """Each rank holds a tenth of what another way holds, and peaks at half of it."""
    ours, theirs = ways[name], ways[than]
    for rank in range(2):
        (held, peak), (most, highest) = (w[2 * rank :][:2] for w in (ours, theirs))
        assert 0 < held < 0.1 * most, f"rank {rank} holds {held} MB, {than} {most} MB"
        assert peak < 0.6 * highest, f"rank {rank} peaks at {peak} MB, {than} {highest}"
    assert ours[-1] == theirs[-1]


@pytest.mark.slow
def test_the_example_saves_memory_on_each_rank():
    ways = trained()
    assert [*ways] == ["plain", "torch's checkpoint", "remat"]
    assert_saves_memory(ways, "remat", than="plain")
    for rank in range(2):
        assert ways["remat"][2 * rank] <= ways["torch's checkpoint"][2 * rank]


@pytest.mark.slow
def test_the_example_runs_compiled():
    ways = trained("--compile", "--backend", "aot_eager")
    assert len(ways) == 6
    assert_saves_memory(ways, "torch's checkpoint, compiled", than="plain, compiled")
    assert ways["remat, compiled"][-1] == pytest.approx(ways["remat"][-1], abs=1e-5)


def test_what_saves_nothing_is_noticed():
    plain, half = [10.0, 20.0, 10.0, 20.0, 1.0], [0.5, 9.0, 0.5, 9.0, 1.0]
    assert_saves_memory({"a": half, "b": plain}, "a", than="b")
    for wrong in plain, [0.5, 9.0, 0.5, 13.0, 1.0], [0.5, 9.0, 0.5, 9.0, 2.0]:
        with pytest.raises(AssertionError, match=r"rank|=="):
            assert_saves_memory({"a": wrong, "b": plain}, "a", than="b")
