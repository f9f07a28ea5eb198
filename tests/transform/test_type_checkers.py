"""What type checkers tell a user of remat: a script, and the lines that they refuse."""

import re
import subprocess
import sys

import pytest


# A line with a mark is refused: by every checker, or by one that reads torch's types.
SCRIPT = """
from typing import assert_type

from torch import Tensor

from remat import policies, remat


@remat
def block(w: Tensor, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return (w @ x).sin() * scale


@remat(policy=policies.dots_saveable)
def with_a_policy(x: Tensor) -> tuple[Tensor, int]:
    return x.sin(), 1


class Layer:
    @remat
    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        return x.sin() * times

    @remat(policy=policies.everything_saveable, prune=True)
    def other(self, x: Tensor) -> int:
        return 1


def use(w: Tensor, layer: Layer) -> None:
    assert_type(block(w, w, scale=2.0), Tensor)
    assert_type(with_a_policy(w), tuple[Tensor, int])
    assert_type(layer.forward(w, times=2), Tensor)
    assert_type(layer.other(w), int)
    assert_type(Layer.other(layer, w), int)
    assert_type(remat(layer.other)(w), int)
    block(w)  # refused
    block(w, w, scale="2")  # refused
    layer.forward(w, time=3)  # refused
    layer.forward("x")  # refused: a Tensor
    remat(block, policy="dots")  # refused: a Callable or a CheckpointPolicy
    remat(block, prune="never")  # refused
    remat(3)  # refused: a Module
"""
MYPY = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*]
# Its types take mypy a minute. Without them a Tensor is anything.
follow_imports = skip
"""


def marked(pattern):
    lines = SCRIPT.splitlines()
    return {k for k, line in enumerate(lines, 1) if re.search(pattern, line)}


def refused_by(folder, *command):
    (folder / "script.py").write_text(SCRIPT)
    run = [sys.executable, "-m", *command, "script.py"]
    result = subprocess.run(
        run, capture_output=True, text=True, cwd=folder, check=False
    )
    found = re.findall(
        r"script\.py:(\d+):\d+(?:: error|-|$)", result.stdout, re.MULTILINE
    )
    assert found, result.stdout + result.stderr
    return {int(line) for line in found}


def test_mypy_keeps_the_signature_of_a_function_and_of_a_method(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(MYPY)
    options = "--show-column-numbers", "--cache-dir", str(tmp_path)
    assert refused_by(tmp_path, "mypy", *options) == marked("# refused$")


def test_pyrefly_keeps_the_signature_of_a_function_and_of_a_method(tmp_path):
    pytest.importorskip("pyrefly")
    options = "--preset", "strict", "--output-format", "min-text"
    interpreter = "--python-interpreter-path", sys.executable
    refused = refused_by(tmp_path, "pyrefly", "check", *options, *interpreter)
    assert refused == marked("# refused")
