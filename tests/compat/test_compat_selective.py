"""`compat.checkpoint` with selective checkpointing. Items 31 and 32.

See `test_compat_calls.py` for the numbers.
"""

import functools
import gc
import weakref
from collections import Counter

import pytest
import torch
from support.checkpoints import both, both_modules, ours, theirs
from support.compared import leaf, points
from support.tables import rows
from support.zoo import Evaluations, Waves
from torch import nn
from torch.func import grad, vmap
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from remat import compat
from remat.testing import assert_same, count_ops, live_bytes


aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
MM = [aten.mm.default]


def selecting(policy, **options):
    return functools.partial(create_selective_checkpoint_contexts, policy, **options)


def by_decision(ctx, op, *args, **kwargs):
    return SAVE if op is aten.mm.default else RECOMPUTE


def by_bool(ctx, op, *args, **kwargs):
    return op is aten.mm.default


def by_any_arguments(*args, **kwargs):
    return args[1] is aten.mm.default


POLICIES = {
    "list": MM,
    "decision": by_decision,
    "bool": by_bool,
    "any": by_any_arguments,
}
with_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))


def matrices(x, w):
    return ((x @ w).sin() @ w).cos()


def gradients(fn, *, create_graph=False, retained=False):
    x, w = leaf(4, 4), leaf(4, 4)
    out = fn(x, w).sum()
    if retained:
        torch.autograd.grad(out, (x, w), retain_graph=True)
    found = torch.autograd.grad(out, (x, w), create_graph=create_graph)
    if create_graph:
        found = torch.autograd.grad(sum(g.square().sum() for g in found), (x, w))
    return found


# --- 31: FLOPs and memory ---


@both
@with_policies
def test_what_is_selected_is_not_computed_again(checkpoint, policy):
    """31: two products in the forward and four in the backward, in each call."""
    fn = functools.partial(checkpoint, matrices, context_fn=selecting(policy))
    for _ in range(3):
        with count_ops() as ops:
            got = gradients(fn)
        # The derivative of the cosine is a sine, too.
        assert (ops["mm"], ops["sin"]) == (2 + 4, 2 + 1)
    assert_same(got, gradients(matrices))


@with_policies
def test_what_is_selected_is_stored_if_the_backward_reads_it(policy):
    """31: ours stores no product that the backward does not read; torch's does."""
    x, w = torch.randn(2, 32, 32, requires_grad=True).unbind()
    w = w.detach().requires_grad_()
    x = x.detach().requires_grad_()

    def f(x, w):
        return (x @ w).sin() @ w

    def stored(checkpoint):
        fn = functools.partial(checkpoint, f, context_fn=selecting(policy))
        fn(x, w).sum().backward()  # recorded
        return live_bytes(lambda: fn(x, w)) // x.nbytes

    assert live_bytes(lambda: f(x, w)) // x.nbytes == 3
    assert stored(ours) == 2  # the first product, and the result
    assert stored(theirs) == 3


# --- 32: the rest ---


# A function, what is selected besides its sine, and its second argument.
OUTPUTS = {
    "a view of integers": (
        lambda x, index: x.sin() * x[index.view(-1)].exp(),
        *(aten.view.default, torch.tensor([[2, 0, 1]])),
    ),
    "no tensor": (
        lambda x, w: (x.sin() * w.sum().item()).exp(),
        *(aten._local_scalar_dense.default, points(3)),
    ),
    "several": (
        lambda x, w: (x.sin() * (x * w).max(dim=0)[0]).exp(),
        *(aten.max.dim, points(3)),
    ),
}


@both
@rows("f, op, other", OUTPUTS)
def test_any_output_may_be_saved(checkpoint, f, op, other):
    """32: also one that has no autograd graph of its own."""
    context_fn = selecting([op, aten.sin.default])
    x, y = leaf(3), leaf(3)
    with count_ops() as ops:
        checkpoint(f, x, other, context_fn=context_fn).sum().backward()
    assert (ops["sin"], ops["exp"]) == (1, 2)
    f(y, other).sum().backward()
    assert_same(x.grad, y.grad)


@both
def test_the_policy_is_not_asked_about_metadata(checkpoint):
    """32: nor about `detach`; its context says that nothing is recomputed."""
    asked = Evaluations()

    def policy(ctx, op, *args, **kwargs):
        asked.note((op, ctx.is_recompute, type(ctx.op_output)))
        return RECOMPUTE

    def f(x):
        assert x.size(0) == 3
        assert x.stride() == (1,)
        return x.detach() + x.sin().exp()

    x = leaf(3)
    with count_ops() as ops:
        checkpoint(f, x, context_fn=selecting(policy)).sum().backward()
    told = [*asked]
    names = Counter(op for op, _, _ in told)
    assert names == {aten.sin.default: 1, aten.exp.default: 1, aten.add.Tensor: 1}
    assert not any(again for _, again, _ in told)
    assert ops["sin"] == 2


@both_modules
def test_bad_selections_are_refused(api):
    """32: packets, what is no operator, what is neither a list nor a function."""
    select = api.create_selective_checkpoint_contexts
    with pytest.raises(ValueError, match="update the OpOverloadPacket"):
        select([aten.mm])
    with pytest.raises(ValueError, match="to be an OpOverload but got"):
        select(["mm"])
    with pytest.raises(TypeError, match="either a function or a list"):
        select("mm")


def test_an_answer_that_is_none_is_refused():
    """torch's recomputes then, and says nothing."""
    context_fn = selecting(lambda ctx, op, *args, **kwargs: "save")
    with pytest.raises(TypeError, match=r"returned 'save', a str, for aten\.mm"):
        ours(matrices, leaf(4, 4), leaf(4, 4), context_fn=context_fn)


class EverySecond:
    """A policy with a state: it saves every second product of a call."""

    def __init__(self):
        self.products = 0

    def __call__(self, ctx, op, *args, **kwargs):
        self.products += op is aten.mm.default
        return op is aten.mm.default and self.products % 2 == 1


def four_products(x, w):
    for _ in range(4):
        x = (x @ w).sin()
    return x


@both
def test_a_policy_may_have_a_state(checkpoint):
    """32: made anew in each call."""

    def context_fn():
        return create_selective_checkpoint_contexts(EverySecond())

    for _ in range(3):
        with count_ops() as ops:
            got = gradients(
                functools.partial(checkpoint, four_products, context_fn=context_fn)
            )
        assert ops["mm"] == 4 + 2 + 8
    assert_same(got, gradients(four_products))


def test_a_function_is_asked_once_for_calls_of_one_kind():
    """Though torch makes contexts for each call, and from the list a function."""
    asked = Evaluations()

    def policy(ctx, op, *args, **kwargs):
        asked.note(op)
        return by_bool(ctx, op)

    fn = functools.partial(ours, matrices, context_fn=selecting(policy))
    for _ in range(3):
        got = gradients(fn)
    assert len(asked) == 4
    assert_same(got, gradients(matrices))


def test_a_policy_is_not_kept_alive():
    def policy(ctx, op, *args, **kwargs):
        return by_bool(ctx, op)

    with count_ops() as ops:
        gradients(functools.partial(ours, matrices, context_fn=selecting(policy)))
    assert (ops["mm"], ops["sin"]) == (6, 3)
    ref = weakref.ref(policy)
    del policy
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("does", ["nothing", "backward", "retained"])
def test_storage_is_freed(does):
    """32: without a backward, and after one that retains the graph."""

    def run(does=does):
        x, w = leaf(4, 4), leaf(4, 4)
        out = ours(matrices, x, w, context_fn=selecting(MM)).sum()
        if does != "nothing":
            out.backward(retain_graph=does == "retained")

    with count_ops() as ops:
        run("backward")
    assert (ops["mm"], ops["sin"]) == (6, 3)
    assert live_bytes(run) == 0  # which collects no cycles


def changes_what_is_saved(x, w):
    product = x @ w
    product.mul_(w * w)
    return product.exp()


@pytest.mark.parametrize("allowed", [False, True])
def test_a_saved_result_may_be_changed_by_the_function(allowed):
    """32: torch raises unless that is allowed, and is then wrong. Ours is right."""
    options = {"context_fn": selecting(MM, allow_cache_entry_mutation=allowed)}
    want = gradients(changes_what_is_saved)
    if not allowed:
        with pytest.raises(RuntimeError, match="has been mutated"):
            gradients(functools.partial(theirs, changes_what_is_saved, **options))
    with count_ops() as ops:
        for _ in range(3):
            fn = functools.partial(ours, changes_what_is_saved, **options)
            assert_same(gradients(fn), want)
    assert ops["exp"] == 3 * 2


@pytest.mark.parametrize("allowed", [False, True])
def test_a_saved_result_that_is_changed_outside_raises(allowed):
    """32: as in plain code."""
    context_fn = selecting(MM, allow_cache_entry_mutation=allowed)

    def f(x, w):
        product = x @ w
        return product, product.sin()

    with count_ops() as ops:
        product, out = ours(f, leaf(2, 2), leaf(2, 2), context_fn=context_fn)
        with torch.no_grad():
            product.zero_()
        with pytest.raises(RuntimeError, match="changed in place"):
            out.sum().backward()
    assert ops["mm"] == 1


# --- What torch refuses ---


@pytest.mark.parametrize(("how", "more"), [("retained", 2), ("create_graph", 2)])
def test_another_backward(how, more):
    """32: torch's entries are given back once."""
    again, options = {how: True}, {"context_fn": selecting(MM)}
    with pytest.raises(RuntimeError, match="backward an extra time"):
        gradients(functools.partial(theirs, matrices, **options), **again)
    with count_ops() as ops:
        got = gradients(functools.partial(ours, matrices, **options), **again)
    with count_ops() as plain:
        want = gradients(matrices, **again)
    assert ops["mm"] == plain["mm"]
    assert ops["sin"] == plain["sin"] + more
    assert_same(got, want)


@with_policies
@pytest.mark.parametrize("batched", [False, True])
def test_selections_under_torch_func(policy, batched):
    def loss(fn):
        return lambda x, w: fn(x, w).sum()

    def run(fn):
        gradient = grad(loss(fn), argnums=(0, 1))
        gradient = vmap(gradient, (0, None)) if batched else gradient
        x = points(2, 4, 4) if batched else points(4, 4)
        with count_ops() as ops:
            return gradient(x, points(4, 4)), ops["mm"] + ops["bmm"], ops["sin"]

    fn = functools.partial(ours, matrices, context_fn=selecting(policy))
    got, products, sines = run(fn)
    want, plain, plain_sines = run(matrices)
    assert_same(got, want)
    assert sines > plain_sines
    if not batched:
        assert products == plain


# --- Hooks around the call ---


@pytest.mark.parametrize("respect", [None, True, False])
def test_hooks_around_are_given_what_is_saved(respect):
    """Unless the user says no. torch's ignore them, and will not in the future."""
    packed = []

    def pack(t):
        packed.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        x, w = leaf(4, 4), leaf(4, 4)
        out = compat.checkpoint(
            matrices,
            x,
            w,
            context_fn=selecting(MM),
            respect_saved_tensors_hooks=respect,
        )
    inputs = [t for t in packed if t.data_ptr() in (x.data_ptr(), w.data_ptr())]
    assert len(packed) - len(inputs) == (0 if respect is False else 2)
    with count_ops() as ops:
        got = torch.autograd.grad(out.sum(), (x, w))
    assert ops["mm"] == 4
    assert_same(got, gradients(matrices))


def test_contexts_of_a_subclass_are_entered_as_they_are():
    """It may do more than its policy says."""
    seen = Evaluations()

    class Noting(torchs._CachingTorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.note(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def context_fn():
        first, second = create_selective_checkpoint_contexts(MM)
        return Noting(first.policy_fn, first.storage), second

    with count_ops() as ops:
        got = gradients(functools.partial(ours, matrices, context_fn=context_fn))
    assert aten.mm.default in [*seen]
    assert ops["mm"] == 6
    assert_same(got, gradients(matrices))


# --- Modules that are passed another one ---


class Before(Waves):
    """Runs before a module that it is passed."""

    def forward(self, after, x):
        return after(super().forward(x))


def test_layers_that_are_passed_one_module_have_records_of_their_own():
    shared, select = nn.Tanh(), selecting([aten.exp.default])
    layers, found = [Before(1), Before(2)], []
    for layer in layers * 4:
        x = leaf(3)
        with count_ops() as ops:
            out = compat.checkpoint(
                layer, shared, x, use_reentrant=False, context_fn=select
            )
            out.sum().backward()
        found.append(ops["exp"])
    assert found == [1, 2, 1, 1, 1, 1, 1, 1]
