"""Torch's database of operators in forward mode: plain against remat.

Forward mode around reverse mode, within it, and twice. Each operator is called as in
`test_opinfo`: between a product by one and a sine. Where plain gives numbers, remat has
to give the same, from more evaluations of the function.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.operators import NO_VALUES, QUIET, REPLACED, Case, name_of, scalar, seed
from support.zoo import counted, plainly
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from remat import remat


pytestmark = [pytest.mark.opinfo, *QUIET]
pytest.importorskip("expecttest", reason="torch's database imports it")
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402


# The import froze torch's flags, which other tests of this process set.
torch.backends.__allow_nonbracketed_mutation_flag = True

# How many samples of an operator, of the first few; and how many numbers one may have.
SAMPLES, FIRST, NUMBERS = 2, 12, 2000

# What plain can and remat cannot, with the error: there remat runs dual numbers in a
# level of torch.func, where plain fails likewise.
UNABLE = {
    # It reads from memory where to split.
    ("dual_backward", "tensor_split"): "Cannot access data pointer"
}


# --- Transforms: each takes a scalar loss and its tensors ---


def tangent(x: Tensor) -> Tensor:
    """Any, but not the same everywhere."""
    steps = torch.arange(2, x.numel() + 2, dtype=torch.float64).sin()
    return steps.reshape(x.shape).to(x.dtype)


def pushed(fn: Any, xs: tuple[Tensor, ...]) -> Any:
    return jvp(fn, xs, tuple(map(tangent, xs)))


def every(xs: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(range(len(xs)))


def jvp_grad(loss: Any, *xs: Tensor) -> Any:
    return pushed(grad(loss, every(xs)), xs)


def jvp_grad_grad(loss: Any, *xs: Tensor) -> Any:
    def curved(*xs: Tensor) -> Tensor:
        return sum(g.sin().sum() for g in grad(loss, every(xs))(*xs))

    return pushed(grad(curved, every(xs)), xs)


def jvp_jvp_grad(loss: Any, *xs: Tensor) -> Any:
    return pushed(lambda *xs: pushed(grad(loss, every(xs)), xs), xs)


def grad_vmap_jvp(loss: Any, *xs: Tensor) -> Any:
    """The gradient of values and directional derivatives of a batch."""

    def both(*rows: Tensor) -> Tensor:
        value, derivative = pushed(loss, rows)
        return value + derivative

    def summed(*xs: Tensor) -> Tensor:
        return vmap(both, randomness="different")(*xs).sum()

    rows = [torch.stack([x, x * 1.001]) for x in xs]
    return grad(summed, every(xs))(*rows)


def dual_backward(loss: Any, *xs: Tensor) -> Any:
    """The gradient of dual numbers, in plain autograd."""
    leaves = [x.clone().requires_grad_() for x in xs]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, tangent(x)) for x in leaves]
        found = torch.autograd.grad(
            loss(*duals), leaves, allow_unused=True, materialize_grads=True
        )
        pairs = [forward_ad.unpack_dual(x) for x in found]
        return [(x, torch.zeros_like(x) if t is None else t) for x, t in pairs]


TRANSFORMS = (jvp_grad, jvp_jvp_grad, jvp_grad_grad, grad_vmap_jvp, dual_backward)


# --- The comparison ---


def samples(op: Any) -> Iterator[Case]:
    """The first samples that have some numbers in each tensor, but not many."""
    seed(0)
    call = REPLACED.get(name_of(op), op.op)
    inputs = op.sample_inputs("cpu", torch.float64, requires_grad=True)
    first = (Case(op, call, sample) for sample in itertools.islice(inputs, FIRST))
    few = (case for case in first if is_small([x.numel() for x in case.leaves]))
    return itertools.islice(few, SAMPLES)


def is_small(sizes: list[int]) -> bool:
    return bool(sizes) and all(sizes) and sum(sizes) <= NUMBERS


def run(transform: Any, case: Case, wrap: Any = plainly) -> tuple[Any, int]:
    """What a transform gives, and from how many evaluations."""
    fn, calls = counted(case.fn)
    seed(1)
    return transform(scalar(wrap(fn)), *case.leaves), len(calls)


def reference(transform: Any, case: Case) -> Any:
    """What plain gives; None if it raises, or if numbers are missing or vary."""
    try:
        want, evaluations = run(transform, case)
    except Exception:  # noqa: BLE001
        return None
    again, _ = run(transform, case)
    if not all(t.isfinite().all() for t in tree_leaves(want)) or deviation(again, want):
        return None
    return want, evaluations


def deviation(got: Any, want: Any) -> str:
    try:
        assert_close(got, want)
    except AssertionError as error:
        return str(error)
    return ""


def said(transform: Any, case: Case, wrap: Any, want: Any, evaluations: int) -> str:
    """Say in what remat deviates from plain."""
    try:
        got, more = run(transform, case, wrap)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    few = "" if more > evaluations else f"{more} evaluations, and plain {evaluations}"
    return deviation(got, want) or few


def check(transform: Any, op: Any, wrap: Any = remat) -> None:
    """Fail with all that deviates; skip where plain gives nothing to compare with."""
    compared, found = 0, {}
    error = UNABLE.get((transform.__name__, name_of(op)))
    for i, case in enumerate(samples(op)):
        known = reference(transform, case)
        if known is not None:
            compared += 1
            text = said(transform, case, wrap, *known)
            found[i] = "" if error and error in text else text
    assert not error or compared, "plain is not able either"
    lines = [f"sample {i}: {text}" for i, text in found.items() if text]
    assert not lines, "\n".join(lines)
    if not compared:
        pytest.skip("plain raises, or numbers are missing or vary")


def rows() -> Iterator[Any]:
    for transform, op in itertools.product(TRANSFORMS, op_db):
        name = name_of(op)
        known = op.supports_autograd and name not in NO_VALUES
        if known and torch.float64 in op.supported_backward_dtypes("cpu"):
            key = f"{transform.__name__}-{name}"
            yield pytest.param(transform, op, id=key)


@pytest.mark.parametrize(("transform", "op"), [*rows()])
def test_forward(transform, op):
    check(transform, op)


def named(name: str) -> Any:
    return next(op for op in op_db if name_of(op) == name)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_an_identity_fails(transform):
    with pytest.raises(AssertionError, match="evaluations, and plain"):
        check(transform, named("mul"), plainly)


def test_a_lost_tangent_fails():
    class Lost(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, ct):
            return ct

        @staticmethod
        def jvp(ctx, t):
            return 0 * t

    losing = lambda fn: remat(lambda *xs: fn(*map(Lost.apply, xs)))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check(jvp_grad, named("mul"), losing)
