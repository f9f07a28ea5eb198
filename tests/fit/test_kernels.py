"""Steps with kernels that the dispatcher does not see, which write through pointers."""

import copy
import subprocess
import sys

import pytest
import torch
from support.fitted import least, square
from support.kernels import KERNELS, X, blocks, build, gradients_and_launches, launches
from torch import nn

import remat
from remat import policies
from remat.testing import assert_same, count_ops


kernels = pytest.mark.parametrize("name", KERNELS)
both = pytest.mark.parametrize("is_function", [True, False])


def assert_equal_to_plain(model, plain, *, again):
    """Assert plain's gradients, and how many launches there are more than plain's.

    None: as many as plain's.
    """
    found, count = gradients_and_launches(model)
    expected, once = gradients_and_launches(plain)
    assert_same(found, expected)
    assert count == once + (once if again is None else again)


def assert_planned(run, over, *, is_function):
    plain, once = blocks(run, is_function=is_function)
    budget = least(plain, X, loss=square, over=over)
    plan = remat.fit(plain, X, loss=square, budget=budget, over=over)
    assert plan.peak <= budget < plan.plain_peak
    assert all(p.grad is None for p in plain.parameters())
    model = plan.apply(copy.deepcopy(plain))
    with count_ops() as ops:
        found, count = gradients_and_launches(model)
    assert ops["tanh"] + ops["addmm"] > 3 + 7
    expected, count_of_plain = gradients_and_launches(plain)
    assert_same(found, expected)
    assert count_of_plain == once
    # A plan by operations recomputes no kernel; by blocks, all that are in a block.
    assert count == once if over == "step" else once < count <= once + 3


@pytest.mark.one_in(2)
@kernels
@both
def test_steps_with_kernels_are_planned(name, is_function):
    assert_planned(KERNELS[name], "step", is_function=is_function)


SLOW = {*KERNELS} - {"nonzero"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in KERNELS]
)
def test_steps_with_kernels_are_planned_by_blocks(name):
    assert_planned(KERNELS[name], "blocks", is_function=True)


CALLS = {
    "default": {},
    "prune": {"prune": True},
    "dots": {"policy": policies.dots_saveable},
    "everything": {"policy": policies.everything_saveable},
}


def assert_called(run, options, *, again):
    for is_function in (True, False):
        plain, _ = blocks(run, is_function=is_function)
        model = copy.deepcopy(plain)
        for k in range(3):
            model[1][k] = remat.remat(model[1][k], **options)
        for _ in range(4):  # replays may be given up, until plans fit
            gradients_and_launches(model)
        assert_equal_to_plain(model, plain, again=again)


@kernels
@pytest.mark.parametrize("options", CALLS)
@pytest.mark.filterwarnings("ignore:.*3 records did not fit:UserWarning")
def test_calls_with_kernels_equal_plain(name, options):
    # Torch tells nothing of a capsule that is made in C: each replay is given up.
    is_unseen = name == "capsule" and options == "everything"
    assert_called(KERNELS[name], CALLS[options], again=None if is_unseen else 3)


def assert_reported(run):
    model, _ = blocks(run, is_function=True)
    block = remat.remat(model[1][0])
    for report in (remat.explain, remat.saved_residuals):
        assert launches(lambda report=report: str(report(block, X[:, :8]))) > 0


@kernels
def test_reports_launch_kernels(name):
    assert_reported(KERNELS[name])


def in_process(code):
    """Run code in a process of its own, which a kernel on no memory would end."""
    setup = f"import sys; sys.path[:0] = {sys.path}; from support.kernels import *\n"
    setup += "import remat\n"
    done = subprocess.run(
        [sys.executable, "-c", setup + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("over", ["step", "blocks"])
def test_no_kernel_writes_to_address_zero(over):
    code = "model, _ = blocks(KERNELS['pointers'], is_function=True)\n"
    in_process(code + f"remat.fit(model, X, loss=square, budget='1GB', over={over!r})")


def test_a_model_that_is_not_there_is_refused_with_what_to_do():
    with torch.device("meta"):
        model, _ = blocks(KERNELS["numpy"], is_function=False)
    with pytest.raises(RuntimeError, match=r"numpy\(\) is not supported") as raised:
        remat.fit(model, X, loss=square, budget="1GB")
    assert "pass a model and arguments that are there" in raised.value.__notes__[0]


class Copying(nn.Linear):
    def forward(self, x):
        return super().forward(x) + copy.deepcopy(self.bias.detach())


def test_a_tensor_without_memory_is_copied():
    with torch.device("meta"):
        model = Copying(8, 8)
    plan = remat.fit(model, X, loss=square, budget="1GB")
    assert plan.flops > 0


def test_a_function_without_choices_has_a_least_budget():
    with pytest.raises(remat.BudgetError, match=r"The least budget"):
        remat.fit(nn.Linear(20, 20), torch.ones(50, 20), budget="1kB")


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    return build(tmp_path_factory.mktemp("extension"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["typed", "untyped", "accessed", "launched"])
def test_kernels_of_an_extension(extension, name):
    def run(x):
        x = x.detach().sin()
        if name != "launched":
            return getattr(extension, name)(x)
        out = torch.empty_like(x)
        extension.launch(out.data_ptr(), x.data_ptr(), x.numel())
        return out

    before = extension.count()
    plain, once = blocks(run, is_function=True)
    gradients_and_launches(plain)
    assert extension.count() == before + once
    for options in CALLS.values():
        model = copy.deepcopy(plain)
        for k in range(3):
            model[1][k] = remat.remat(model[1][k], **options)
        before = extension.count()
        found, _ = gradients_and_launches(model)
        assert extension.count() == before + once + 3
        assert_same(found, gradients_and_launches(plain)[0])
    for over in ("step", "blocks"):
        budget = least(plain, X, loss=square, over=over)
        plan = remat.fit(plain, X, loss=square, budget=budget, over=over)
        model = plan.apply(copy.deepcopy(plain))
        before = extension.count()
        found, _ = gradients_and_launches(model)
        assert (extension.count() > before + once) == (over == "blocks")
        assert_same(found, gradients_and_launches(plain)[0])
