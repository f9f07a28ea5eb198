"""Decisions of routers, operators of others, and selective modes that trainers have."""

import time
import warnings
from collections import Counter

import pytest
import torch
from support.operations import MM, RECOMPUTE, SAVE, custom, op, value
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from remat import RecomputeError, compat, explain, remat
from remat.policies import (
    Op,
    as_policy,
    decisions_saveable,
    dots_saveable,
    every_other,
    register_cost,
    register_dot,
    within,
)
from remat.testing import count_ops


aten = torch.ops.aten
FLOATS, INTS = value(8), value(8, dtype=torch.int64)
BOOLS = value(8, dtype=torch.bool)

# What decides, and what does not.
DECIDES = {
    (aten.topk.default, FLOATS, (FLOATS, INTS)): True,
    (aten.argmax.default, FLOATS, (INTS,)): True,
    (aten.sort.default, FLOATS, (FLOATS, INTS)): True,
    (aten.multinomial.default, FLOATS, (INTS,)): True,
    (aten.gt.Scalar, FLOATS, (BOOLS,)): True,
    (aten._to_copy.default, FLOATS, (INTS,)): True,
    (aten.nonzero.default, FLOATS, (INTS,)): True,
    (aten.bincount.default, INTS, (INTS,)): False,
    (aten.sin.default, FLOATS, (FLOATS,)): False,
    (aten.native_dropout.default, FLOATS, (FLOATS, BOOLS)): False,
    (aten.max_pool2d_with_indices.default, FLOATS, (FLOATS, INTS)): False,
    (aten._scaled_dot_product_flash_attention.default, FLOATS, (FLOATS, INTS)): False,
}


@pytest.mark.parametrize(("case", "decides"), DECIDES.items(), ids=str)
def test_a_decision_is_an_integer_of_floating_numbers(case, decides):
    func, given, made = case
    found = decisions_saveable(Op(func, (given,), outputs=made))
    assert found is (SAVE if decides else RECOMPUTE)


class Router(nn.Module):
    """Routes tokens by scores with noise that nobody can see: another in each run."""

    def __init__(self, *, loops):
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)
        )
        self.loops = loops

    def forward(self, x):
        generator = torch.Generator().manual_seed(time.perf_counter_ns() % 2**31)
        noise = torch.randn(len(x), 4, generator=generator)
        weights, ids = (self.gate(x) + noise).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        counts = ids.flatten().bincount(minlength=4).tolist()
        for k, expert in enumerate(self.experts):
            if counts[k] or not self.loops:  # as transformers loops over those hit
                rows, place = torch.where(ids == k)
                out = out.index_add(
                    0, rows, expert(x[rows]) * weights[rows, place, None]
                )
        return out + x


def steps(policy, *, loops, count=8, func=False):
    """Call forwards and backwards, without a warning."""
    torch.manual_seed(0)
    router = Router(loops=loops)
    fn = remat(router, policy=policy)
    for _ in range(count):
        x = torch.randn(6, 8, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if func:
                torch.func.grad(lambda x: fn(x).sum())(x.detach())
            else:
                fn(x).sum().backward()


@pytest.mark.parametrize("func", [False, True])
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize(
    "policy", [decisions_saveable, decisions_saveable | dots_saveable]
)
def test_a_recompute_routes_each_token_where_it_went(policy, loops, func):
    """Requests of NeMo Automodel: 2635, 3140, 3156, 3247."""
    steps(policy, loops=loops, func=func)


@pytest.mark.parametrize("policy", [None, dots_saveable])
def test_without_it_an_error_names_it(policy):
    with pytest.raises(
        RecomputeError, match=r"policy=remat\.policies\.decisions_saveable"
    ):
        steps(policy, loops=False, count=30)


def test_a_decision_takes_few_bytes():
    torch.manual_seed(0)
    router, x = Router(loops=False), torch.randn(64, 8, requires_grad=True)
    found = explain(router, x, policy=decisions_saveable)
    saved = [op for op in found.ops if op.fate == "saved"]
    assert {op.name for op in saved} == {"topk"}
    assert found.saved_bytes < found.plain_bytes / 4


# --- Operators of others ---


def test_an_operator_says_in_one_line_what_it_is_and_costs():
    gemm = custom("costly")
    register_dot(gemm)
    register_cost(gemm, lambda op: 1000.0)

    def f(a, b):
        return torch.ops.remat_tests.costly(a, b).sin()

    torch.library.register_autograd("remat_tests::costly", lambda ctx, g: (g, g))
    x = torch.ones(2, 2, requires_grad=True)
    found = explain(f, x, torch.ones(2, 2), policy=dots_saveable)
    first = found.ops[0]
    assert (first.name, first.flops, first.fate) == ("costly", 1000, "saved")
    assert found.flops == 1000


def test_the_cost_of_what_is_no_operator_is_refused():
    with pytest.raises(TypeError, match="register_cost takes operators"):
        register_cost(torch.mm, lambda op: 1)
    with pytest.raises(TypeError, match="register_cost takes a function; got 3"):
        register_cost(aten.mm, 3)


def layers(x, count=6):
    for _ in range(count):
        x = (x @ x.mT).tanh() @ x
    return x


def run(fn, calls=2):
    for _ in range(calls):
        x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
        with count_ops() as ops:
            fn(x).sum().backward()
    return ops


def test_every_other_product_is_saved():
    """As torchtitan's selective mode does (3674), and NeMo's."""
    none, half, dots = (
        run(remat(layers, policy=policy))["mm"]
        for policy in (None, every_other(dots_saveable), dots_saveable)
    )
    plain = run(layers)["mm"]
    # The last one is never read.
    assert (none - plain, half - plain, dots - plain) == (11, 5, 0)
    saved = [
        op.fate
        for op in explain(
            layers,
            torch.ones(4, 4, requires_grad=True),
            policy=every_other(dots_saveable),
        ).ops
        if op.name == "mm"
    ]
    assert saved == ["saved", "recomputed"] * 5 + ["saved", "dead"]


def test_each_operator_counts_for_itself():
    policy = every_other(dots_saveable)
    assert [policy(Op(MM, nth=i)) for i in range(3)] == [SAVE, RECOMPUTE, SAVE]
    assert policy(Op(aten.sin.default)) is RECOMPUTE
    with pytest.raises(TypeError, match="every_other cannot have within"):
        every_other(within(3))


def torchtitan_contexts():
    """As torchtitan makes them: a counter in a closure, made anew for each call."""
    meta = Counter()

    def policy(ctx, func, *args, **kwargs):
        meta["mm"] += func == MM
        is_saved = func == MM and meta["mm"] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else RECOMPUTED

    return create_selective_checkpoint_contexts(policy)


RECOMPUTED = CheckpointPolicy.PREFER_RECOMPUTE


def test_the_counter_of_a_context_counts_as_with_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = run(
            lambda x: compat.checkpoint(layers, x, context_fn=torchtitan_contexts)
        )
    assert ours["mm"] == run(remat(layers, policy=every_other(dots_saveable)))["mm"]


def test_a_policy_that_counts_is_told():
    asked = []

    def counts(op):
        asked.append(op)
        return op.packet is aten.mm and len(asked) % 2 == 0

    with pytest.warns(
        UserWarning, match="asked twice about one aten.mm.default.*op.nth"
    ):
        run(remat(layers, policy=counts), calls=1)


# --- Policies that JAX users write ---


def test_an_operation_is_no_operator():
    for compare in (
        lambda prim: prim == aten.sin,
        lambda prim: prim != aten.sin.default,
        lambda prim: prim in [aten.cos, aten.sin],
        lambda prim: aten.sin == prim,
    ):
        with pytest.raises(TypeError, match=r"Compare prim\.packet"):
            compare(op())
    assert op() == op() != op(MM)
    assert op() != 3


def test_an_operation_says_what_it_has():
    with pytest.raises(AttributeError, match=r"no 'name'.*op has func, args.*str\(op"):
        _ = op().name
    assert not hasattr(op(), "params")


# --- Recipes ---

# Torchtitan's list of operators to save, and xtuner's units (1980).
OPERATORS = [
    *(aten.mm, aten.addmm, aten.max.default),
    *(aten._scaled_dot_product_efficient_attention, aten._grouped_mm),
    *(aten._scaled_dot_product_flash_attention, torch.ops.higher_order.flex_attention),
    torch.ops._c10d_functional.reduce_scatter_tensor,
]


def test_a_list_of_operators_is_one_policy():
    """Packets are taken, which torch's list did not see (pytorch 176065)."""
    policy = every_other([aten.mm, aten.addmm]) | as_policy(OPERATORS[2:])
    assert policy(Op(MM, nth=1)) is RECOMPUTE
    assert policy(Op(MM, nth=2)) is SAVE
    reduce = torch.ops._c10d_functional.reduce_scatter_tensor.default
    assert policy(Op(reduce, nth=1)) is SAVE
    assert run(remat(layers, policy=policy))["mm"] == 24 + 12 + 5
