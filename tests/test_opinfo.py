"""Torch's own database of operators and modules: plain against remat.

Each operator is called with the samples that torch tests it with, between a product by
one and a sine: so there is always something to recompute, and it is on the way to the
gradient. One remat object is called three times (the first call records, the others
follow), each time with plain's bits as result and gradient. Where plain raises, remat has
to raise too; where plain is not the same twice, there is nothing to compare.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import plainly
from pruning_helpers import total
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from remat import policies, remat
from remat.testing import assert_same, count_ops


pytestmark = [
    pytest.mark.opinfo,
    # Torch warns of many of its own operators. Only what remat says is an error.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:remat"),
]
pytest.importorskip("expecttest", reason="torch's database imports it")
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402


# The import froze torch's flags, which other tests of this process set.
torch.backends.__allow_nonbracketed_mutation_flag = True

SAMPLES = {torch.float64: 3, torch.float32: 1, torch.complex128: 2}
CALLS = 3


def differentiable(value: Any) -> bool:
    """Whether it is a dense tensor of floating-point or complex numbers."""
    return (
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
    )


class Case:
    """An operator and one of its samples, as a function of what is differentiable."""

    def __init__(self, op: Any, call: Callable[..., Any], sample: Any) -> None:
        flat, treedef = tree_flatten((sample.input, sample.args, sample.kwargs))
        apart = not op.supports_autograd
        which = [
            i
            for i, x in enumerate(flat)
            if differentiable(x) and (apart or x.requires_grad)
        ]
        self.leaves = [flat[i].detach() for i in which]
        constants = [None if i in which else x for i, x in enumerate(flat)]
        process = sample.output_process_fn_grad

        def fn(*leaves: Tensor) -> Any:
            inputs = list(constants)
            for i, leaf in zip(which, leaves, strict=True):
                inputs[i] = leaf * 1
            first, rest, options = tree_unflatten(inputs, treedef)
            out = process(call(first, *rest, **options))
            # What has no gradient is computed beside something that has one.
            curved = [inputs[i] for i in which] if apart else tree_leaves(out)
            return out, [t.sin() for t in curved if differentiable(t)]

        self.fn = fn


def cases(op: Any, call: Callable[..., Any], bound: int = 3) -> Iterator[Any]:
    """Yield the first samples in each type of numbers, with a name for each."""
    for dtype, some in SAMPLES.items():
        if dtype not in supported(op):
            continue
        seed(0)
        samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
        for i, sample in enumerate(itertools.islice(samples, min(some, bound))):
            case = Case(op, call, sample)
            if case.leaves:
                yield f"{dtype}, sample {i}", case


def supported(op: Any) -> Any:
    if op.supports_autograd:
        return op.supported_backward_dtypes("cpu")
    return {torch.float64} & op.supported_dtypes("cpu")


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


# --- Transforms: each gives a pytree of tensors ---


def backward(fn: Any, leaves: list[Tensor]) -> Any:
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = fn(*leaves)
    ends = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.backward(ends, [cotangent(t) for t in ends])
    return out, ["no gradient" if x.grad is None else x.grad for x in leaves]


def cotangent(t: Tensor) -> Tensor:
    """Any, but not the same everywhere."""
    steps = torch.arange(1, t.numel() + 1, dtype=torch.float64).cos()
    return steps.reshape(t.shape).to(t.dtype)


def scalar(fn: Any) -> Any:
    def loss(*leaves: Tensor) -> Tensor:
        curved = fn(*leaves)[1]
        return sum((t.real if t.is_complex() else t).sum() for t in curved)

    return loss


def func_grad(fn: Any, leaves: list[Tensor]) -> Any:
    return torch.func.grad(scalar(fn), tuple(range(len(leaves))))(*leaves)


def vmap_grad(fn: Any, leaves: list[Tensor]) -> Any:
    grad = torch.func.grad(scalar(fn), tuple(range(len(leaves))))
    batched = [torch.stack([x, x * 1.001]) for x in leaves]
    return torch.func.vmap(grad, randomness="different")(*batched)


# --- The comparison ---


def run(transform: Any, fn: Any, leaves: list[Tensor], number: int) -> Any:
    """What a transform gives, and where the random stream stands then."""
    seed(number)
    return transform(fn, leaves), torch.rand(2)


def difference(transform: Any, case: Case, wrap: Any, counts: bool) -> str | None:
    """Say in what remat deviates from plain for one case, or return None."""
    fn, leaves = case.fn, case.leaves
    try:
        wants = [run(transform, fn, leaves, number) for number in range(CALLS)]
    except Exception as error:  # noqa: BLE001
        return must_raise(transform, case, wrap, error)
    if not same(run(transform, fn, leaves, 0), wants[0]):
        return None  # plain is not deterministic
    ours = wrap(fn)
    try:
        for number, want in enumerate(wants):
            if counts and number == CALLS - 1:
                with count_ops() as more:
                    assert_same(run(transform, ours, leaves, number), want)
            else:
                assert_same(run(transform, ours, leaves, number), want)
    except Exception as error:  # noqa: BLE001
        return f"call {number}: {type(error).__name__}: {error}"
    if counts:
        with count_ops() as ops:
            run(transform, fn, leaves, CALLS - 1)
        if total(more) <= total(ops):
            return "nothing was recomputed"
    return None


def same(one: Any, other: Any) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


def must_raise(transform: Any, case: Case, wrap: Any, why: Exception) -> str | None:
    try:
        run(transform, wrap(case.fn), case.leaves, 0)
    except Exception:  # noqa: BLE001
        return None
    return f"plain raises {type(why).__name__}: {why}"


def check(transform, op, *, wrap=remat, call=None, bound=3, counts=False):
    """Fail with all that deviates."""
    found = {
        name: said
        for name, case in cases(op, call or op.op, bound)
        if (said := difference(transform, case, wrap, counts))
    }
    assert not found, "\n".join(f"{name}: {said}" for name, said in found.items())


def name_of(op):
    return f"{op.name}-{op.variant_test_name}" if op.variant_test_name else op.name


operators = pytest.mark.parametrize("op", op_db, ids=name_of)


@operators
def test_backward(op):
    check(backward, op, counts=True)


@operators
def test_func_grad(op):
    check(func_grad, op)


@operators
def test_vmap_grad(op):
    check(vmap_grad, op, bound=1)
