"""Torch's own database of operators and modules: plain against remat.

Each operator is called with the samples that torch tests it with, between a product by
one and a sine: so there is always something to recompute, and it is on the way to the
gradient. One remat object is called three times (the first call records, the others
follow), each time with plain's bits as result and gradient; of one call more, the
operations are counted. Where plain raises, remat has to raise too.
"""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.operators import (
    BETTER,
    DRAWN_IN_PLACE,
    NO_VALUES,
    NOTHING,
    QUIET,
    RAISES,
    REPLACED,
    ROUNDED,
    UNCOUNTED,
    Case,
    cases,
    differentiable,
    name_of,
    parts,
    scalar,
    seed,
)
from support.pruning import total
from support.zoo import plainly
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from remat import policies, remat
from remat.testing import assert_same, count_ops


pytestmark = [pytest.mark.opinfo, *QUIET]
pytest.importorskip("expecttest", reason="torch's database imports it")
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402


# The import froze torch's flags, which other tests of this process set.
torch.backends.__allow_nonbracketed_mutation_flag = True

# How many samples, by the type of numbers.
ONE = {torch.float64: 1}
SOME = {torch.float64: 2, torch.complex128: 1}
MANY = {**SOME, torch.float32: 1}
CALLS = 3


# --- Transforms: each gives a pytree of tensors ---


def backward(fn: Any, leaves: list[Tensor]) -> Any:
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = fn(*leaves)
    ends = [t for t in out[1] if t.requires_grad]
    torch.autograd.backward(ends, [cotangent(t) for t in ends])
    return out, ["no gradient" if x.grad is None else x.grad for x in leaves]


def cotangent(t: Tensor) -> Tensor:
    """Any, but not the same everywhere."""
    steps = torch.arange(1, t.numel() + 1, dtype=torch.float64).cos()
    return steps.reshape(t.shape).to(t.dtype)


def func_grad(fn: Any, leaves: list[Tensor]) -> Any:
    return torch.func.grad(scalar(fn), tuple(range(len(leaves))))(*leaves)


def vmap_grad(fn: Any, leaves: list[Tensor]) -> Any:
    grad = torch.func.grad(scalar(fn), tuple(range(len(leaves))))
    batched = [torch.stack([x, x * 1.001]) for x in leaves]
    return torch.func.vmap(grad, randomness="different")(*batched)


def without_levels(transform: Any, case: Case) -> Any:
    """What `func_grad` or `vmap_grad` would give, by plain autograd."""

    def grads(*leaves: Tensor) -> tuple[Tensor, ...]:
        leaves = tuple(x.clone().requires_grad_() for x in leaves)
        return torch.autograd.grad(scalar(case.fn)(*leaves), leaves)

    if transform is func_grad:
        return grads(*case.leaves)
    rows = grads(*case.leaves), grads(*(x * 1.001 for x in case.leaves))
    return tuple(map(torch.stack, zip(*rows, strict=True)))


# --- The comparison ---


def run(transform: Any, case: Case, wrap: Any = plainly) -> Any:
    """What a transform gives, and where the random stream stands then."""
    seed(1)
    return transform(wrap(case.fn), case.leaves), torch.rand(2)


def deviation(
    transform: Any, case: Case, wrap: Any, want: Any, name: str
) -> tuple[str, int]:
    """Say in what remat deviates from plain; and how many operations a call runs."""
    ours, rounded = wrap(case.fn), name in ROUNDED.get(transform.__name__, ())
    for call in range(CALLS):
        try:
            got = run(transform, case, lambda _: ours)
            assert_same(got, want, reassociated=rounded)
        except Exception as error:  # noqa: BLE001
            return f"call {call}: {type(error).__name__}: {error}", 0
    # Not compared: under a mode torch has other formulas for some derivatives.
    with count_ops() as ops:
        run(transform, case, lambda _: ours)
    return "", total(ops)


def miscount(transform: Any, case: Case, ran: int, more: Any) -> str:
    """Say where remat ran no more than plain, or no less than `more`."""
    ours = more(case.fn) if more else case.fn
    if more:
        run(transform, case, lambda _: ours)  # it records
    with count_ops() as ops:
        run(transform, case, lambda _: ours)
    fewer, most = (ran, total(ops)) if more else (total(ops), ran)
    return "" if fewer < most else f"{fewer} operations where {most} are more"


def same(one: Any, other: Any) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


def attempt(transform: Any, case: Case, wrap: Any) -> Any:
    """What a run gives, or raises."""
    try:
        return run(transform, case, wrap)
    except Exception as error:  # noqa: BLE001
        return error


def check(transform, op, amounts, *, wrap=remat, call=None, more=None):
    """Fail with all that deviates; skip what can't be compared.

    `call` stands in for the operator. `more` runs more operations than `wrap`; without
    it, `wrap` runs more than plain.
    """
    name, kind = name_of(op), transform.__name__
    if name in NO_VALUES:
        pytest.skip(NO_VALUES[name])
    found, errors, compared = {}, [], 0
    for sample, case in cases(op, call or REPLACED.get(name, op.op), amounts):
        want = attempt(transform, case, plainly)
        if not isinstance(want, Exception):
            if not same(run(transform, case), want):
                continue
            compared += 1
            said, ran = deviation(transform, case, wrap, want, name)
            if not said and name not in UNCOUNTED.get(kind, ()):
                said = miscount(transform, case, ran, more)
            found[sample] = said
            continue
        errors.append(want)
        got = attempt(transform, case, wrap)
        if name in BETTER.get(kind, ()):
            assert_same(got[0], without_levels(transform, case), reassociated=True)
        elif not isinstance(got, Exception):
            found[sample] = f"plain raises {type(want).__name__}: {want}"
    lines = [f"{sample}: {text}" for sample, text in found.items() if text]
    assert not lines, "\n".join(lines)
    if not compared:
        reason = RAISES[kind].get(name) if errors else NOTHING
        assert reason, f"plain raises, and is not in the list of that: {errors[0]}"
        pytest.skip(reason)


operators = pytest.mark.parametrize("op", op_db, ids=name_of)
writing = [op for op in op_db if op.inplace_variant and op.supports_inplace_autograd]


@operators
def test_backward(op):
    check(backward, op, MANY)


@operators
def test_func_grad(op):
    check(func_grad, op, SOME)


@operators
def test_vmap_grad(op):
    check(vmap_grad, op, ONE)


@operators
def test_pruned(op):
    check(backward, op, ONE, wrap=remat(prune=True))


@operators
def test_everything_saveable(op):
    """What may be kept is kept, and not computed again."""
    keeping = remat(policy=policies.everything_saveable)
    more = None if name_of(op) in DRAWN_IN_PLACE else remat
    check(backward, op, ONE, wrap=keeping, more=more)


@pytest.mark.parametrize("op", writing, ids=name_of)
def test_in_place(op):
    check(backward, op, ONE, call=op.inplace_variant)


def test_an_identity_fails():
    (mul,) = (op for op in op_db if name_of(op) == "mul")
    with pytest.raises(AssertionError, match="operations where"):
        check(backward, mul, ONE, wrap=plainly)


def test_values_that_differ_fail():
    (mul,) = (op for op in op_db if name_of(op) == "mul")
    off = lambda fn: lambda *leaves: fn(*(x * (1 + 1e-15) for x in leaves))
    with pytest.raises(AssertionError, match="differs in value"):
        check(backward, mul, ONE, wrap=off)


# --- Modules ---


def trained(module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
    """The result, the gradients of inputs and parameters, and the buffers."""
    seed(1)
    flat, treedef = tree_flatten((args, kwargs))
    flat = [
        x.detach().clone().requires_grad_(x.requires_grad) if differentiable(x) else x
        for x in flat
    ]
    args, kwargs = treedef.unflatten(flat)
    module.zero_grad()
    out = call(*args, **kwargs)
    ends = [t for t in tree_leaves(out) if differentiable(t) and t.requires_grad]
    torch.autograd.backward([t.sin() for t in ends], [cotangent(t) for t in ends])
    leaves = [x for x in flat if differentiable(x) and x.requires_grad]
    grads = [x.grad for x in [*leaves, *module.parameters()]]
    grads = ["no gradient" if grad is None else grad.clone() for grad in grads]
    return out, grads, [buffer.clone() for buffer in module.buffers()]


class Around(nn.Module):
    """A module between a product by one and a sine of what it returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = [x * 1 if differentiable(x) else x for x in args]
        out = self.module(*args, **kwargs)
        return out, [t.sin() for t in parts(out) if differentiable(t)]


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_module(info):
    """Each of torch's modules in training, called three times by one remat object."""
    if torch.float64 not in info.supported_dtypes("cpu"):
        pytest.skip("not for double precision")
    seed(0)
    samples = info.module_inputs_func(
        info, "cpu", torch.float64, requires_grad=True, training=True
    )
    for sample in samples[:2]:
        made, given = sample.constructor_input, sample.forward_input
        torch.manual_seed(0)
        inner = info.module_cls(*made.args, **made.kwargs).double().train()
        one, other = Around(inner), Around(copy.deepcopy(inner))
        ours = remat(other)
        for call in range(CALLS):
            with count_ops() if call == CALLS - 1 else nullcontext() as ops:
                want = trained(one, one, given.args, given.kwargs)
            with count_ops() if call == CALLS - 1 else nullcontext() as more:
                got = trained(other, ours, given.args, given.kwargs)
            assert_same(got, want)
        assert total(more) > total(ops)
