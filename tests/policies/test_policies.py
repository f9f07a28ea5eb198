"""A policy is a value that says which results may be kept, and where."""

import copy
import functools
import itertools
import pickle
import re
import threading
from dataclasses import dataclass, replace
from inspect import signature

import pytest
import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from remat import policies
from remat.policies import (
    Decision,
    Op,
    Policy,
    Value,
    as_policy,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    offload_dot_with_no_batch_dims,
    register_dot,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_from_both_policies,
    save_larger_than,
    save_names_matching,
    save_only_these_names,
    save_ops,
    save_smaller_than,
)
from remat.policies._dots import _DOTS
from remat.policies._functions import PUBLIC
from remat.policies._selective import call_of, stand_in


aten = torch.ops.aten
SAVE, OFFLOAD = Decision.SAVE, Decision.OFFLOAD
DISK, RECOMPUTE = Decision.OFFLOAD_TO_DISK, Decision.RECOMPUTE
MM, SIN = aten.mm.default, aten.sin.default


def value(*shape, dtype=torch.float32, device="cpu"):
    return Value(shape, dtype, torch.device(device))


def op(func=SIN, *shapes, names=(), out=None, rest=()):
    """An operation on tensors of these shapes, and on other arguments."""
    outputs = () if out is None else (value(*out),)
    args = (*(value(*shape) for shape in shapes), *rest)
    return Op(func, args, (), outputs, frozenset(names), "model.py:7, in f")


def saves(op):
    """A user's policy."""
    return op.packet is aten.sin


def torch_saves(ctx, op, *args, **kwargs):
    """A policy of torch's selective checkpointing."""
    return op is MM


OPS = [
    op(),
    op(MM, (2, 3), (3, 4), out=(2, 4)),
    op(aten.bmm.default, (5, 2, 3), (5, 3, 4), out=(5, 2, 4)),
    op(names={"a"}, out=(64,)),
    op(names={"b"}),
    op(MM, (2, 3), (3, 4), names={"a", "b"}),
    op(aten.convolution.default, (1, 2, 8), (4, 2, 3), rest=(None, (1,))),
]
MANY = {
    "nothing_saveable": nothing_saveable,
    "everything_saveable": everything_saveable,
    "dots_saveable": dots_saveable,
    "dots_with_no_batch_dims_saveable": dots_with_no_batch_dims_saveable,
    "dots_with_no_batch_dims_saveable.but_offload(to='pinned_host')": (
        offload_dot_with_no_batch_dims()
    ),
    "save_only_these_names('a', 'b')": save_only_these_names("b", "a"),
    "save_any_names_but_these('a')": save_any_names_but_these("a"),
    "~save_only_these_names('a')": save_anything_except_these_names("a"),
    "(save_only_these_names('a') | "
    "save_only_these_names('b').but_offload(to='disk'))": (
        save_and_offload_only_these_names(
            names_which_can_be_saved=["a"],
            names_which_can_be_offloaded=["b"],
            offload_dst="disk",
        )
    ),
    "save_names_matching('[ab]')": save_names_matching("[ab]"),
    "save_names_matching(re.compile('A', re.IGNORECASE))": save_names_matching(
        re.compile("A", re.IGNORECASE)
    ),
    "save_ops(torch.ops.aten.bmm, torch.ops.aten.mm.default)": save_ops(MM, aten.bmm),
    "save_larger_than(100)": save_larger_than(100),
    "save_smaller_than(100.5)": save_smaller_than(100.5),
    "as_policy(saves)": as_policy(saves),
    "as_policy(torch_saves)": as_policy(torch_saves),
    "as_policy(Decision.OFFLOAD)": as_policy(OFFLOAD),
    "((dots_saveable | save_only_these_names('a')) & ~save_larger_than(8))": (
        (dots_saveable | save_only_these_names("a")) - save_larger_than(8)
    ),
    "(~dots_saveable).but_offload(save_larger_than(8), to='disk')": (
        (~dots_saveable).but_offload(save_larger_than(8), to="disk")
    ),
    "~dots_saveable.but_offload(to='disk')": ~dots_saveable.but_offload(to="disk"),
    "(dots_saveable | as_policy(saves)).but_offload(to='disk')": (
        (dots_saveable | saves).but_offload(to="disk")
    ),
}
each_policy = pytest.mark.parametrize("text", MANY)


# --- A policy is a value ------------------------------------------------------------


@each_policy
def test_a_policy_prints_as_the_expression_that_makes_it(text):
    assert repr(MANY[text]) == text
    scope = {"torch": torch, "re": re, **vars(policies), **globals()}
    assert eval(text, scope) == MANY[text]


@each_policy
def test_a_policy_survives_pickling_and_copying(text):
    policy = MANY[text]
    for twin in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert twin == policy
        assert hash(twin) == hash(policy)
        assert [twin(o) for o in OPS] == [policy(o) for o in OPS]


def test_policies_that_are_made_differently_differ():
    assert len(set(MANY.values())) == len(MANY)
    assert save_only_these_names("a", "b") == save_only_these_names("b", "a", "a")
    assert save_only_these_names("a") != save_any_names_but_these("a")
    assert save_ops(aten.mm) != save_ops(MM)
    assert as_policy(lambda op: True) != as_policy(lambda op: True)


@each_policy
def test_a_policy_cannot_be_changed(text):
    field = next(iter(vars(MANY[text])))
    with pytest.raises(AttributeError, match="cannot assign to field"):
        setattr(MANY[text], field, 0)


@each_policy
def test_every_answer_is_a_decision(text):
    assert all(type(MANY[text](o)) is Decision for o in OPS)


def test_the_names_that_a_policy_mentions():
    assert save_only_these_names("a", "b").names == {"a", "b"}
    assert save_any_names_but_these("a").names == {"a"}
    assert (dots_saveable - save_only_these_names("a")).names == {"a"}
    both = save_only_these_names("a").but_offload(save_any_names_but_these("b"))
    assert both.names == {"a", "b"}
    assert not (dots_saveable | save_names_matching("a")).names


def test_the_list_of_public_policies_is_complete():
    """It is what a string is compared with."""
    instances = {k for k, v in vars(policies).items() if isinstance(v, Policy)}
    makers = {k for k in vars(policies) if k.startswith(("save_", "offload_"))}
    assert instances | makers == set(PUBLIC)


# --- Each policy --------------------------------------------------------------------


def without_address(value):
    """Name a parameter; tests run in parallel need the same names in each process."""
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


@pytest.mark.parametrize("o", OPS)
def test_the_constants(o):
    assert everything_saveable(o) is SAVE
    assert nothing_saveable(o) is RECOMPUTE


def test_names_are_saved_as_in_jax():
    plain, a, b, both = (op(names=n) for n in ((), "a", "b", "ab"))
    table = {
        save_only_these_names("a"): (0, 1, 0, 1),
        save_only_these_names(): (0, 0, 0, 0),
        save_any_names_but_these("a"): (0, 0, 1, 1),
        save_any_names_but_these(): (0, 1, 1, 1),
        save_anything_except_these_names("a"): (1, 0, 1, 0),
        save_anything_except_these_names(): (1, 1, 1, 1),
        save_names_matching("a|c.*"): (0, 1, 0, 1),
    }
    for policy, want in table.items():
        got = [policy(o) for o in (plain, a, b, both)]
        assert got == [SAVE if w else RECOMPUTE for w in want], policy


@pytest.mark.parametrize(
    ("pattern", "name", "matched"),
    [
        *(("q", "q", True), ("q", "qkv", False), ("q", "aq", False)),
        *((r"layer\d/.*", "layer3/q", True), ("", "q", False)),
        *((re.compile("Q", re.IGNORECASE), "q", True), ("a|qk", "qkv", False)),
    ],
)
def test_a_pattern_matches_whole_names(pattern, name, matched):
    assert bool(save_names_matching(pattern)(op(names={name}))) == matched


@pytest.mark.parametrize(("to", "far"), [("pinned_host", OFFLOAD), ("disk", DISK)])
def test_names_are_saved_and_offloaded(to, far):
    policy = save_and_offload_only_these_names(
        names_which_can_be_saved=["a"],
        names_which_can_be_offloaded=("b", "c"),
        offload_src="device",
        offload_dst=to,
    )
    got = [policy(op(names=n)) for n in ("a", "b", "c", "d", "ab", "")]
    assert got == [SAVE, far, far, RECOMPUTE, SAVE, RECOMPUTE]
    assert policy.names == {"a", "b", "c"}


def test_sizes_are_the_bytes_of_all_outputs():
    outputs = value(8), value(8, dtype=torch.int64)
    two = Op(aten.topk.default, outputs=outputs)
    assert two.nbytes == 96
    got = [save_larger_than(n)(two) for n in (0, 95, 95.5, 96, 97)]
    assert got == [SAVE, SAVE, SAVE, RECOMPUTE, RECOMPUTE]
    got = [save_smaller_than(n)(two) for n in (0, 95, 96, 96.5, 97, float("inf"))]
    assert got == [RECOMPUTE, RECOMPUTE, RECOMPUTE, SAVE, SAVE, SAVE]
    assert (~save_larger_than(96))(two) is SAVE


def test_operators_are_saved_by_overload_or_all_overloads():
    assert save_ops(MM)(op(MM)) is SAVE
    assert save_ops(MM)(op(aten.mm.out)) is RECOMPUTE
    assert save_ops(aten.mm)(op(aten.mm.out)) is SAVE
    assert save_ops(aten.mm)(op(aten.addmm.default)) is RECOMPUTE
    assert save_ops(aten.sin, aten.cos.default)(op()) is SAVE
    assert save_ops()(op()) is RECOMPUTE


def test_higher_order_and_custom_operators_are_saved():
    cond = torch.ops.higher_order.cond
    assert save_ops(cond)(Op(cond)) is SAVE
    assert save_ops(cond)(op()) is RECOMPUTE
    assert dots_saveable(Op(cond)) is RECOMPUTE
    assert repr(save_ops(cond)) == "save_ops(torch.ops.higher_order.cond)"
    gemm = custom("saved")
    assert save_ops(gemm)(op(torch.ops.remat_tests.saved.default)) is SAVE
    assert save_ops(gemm) == save_ops(torch.ops.remat_tests.saved.default)


# --- Dots ---------------------------------------------------------------------------


def custom(name):
    """A new operator, which takes two tensors."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    return torch.library.custom_op(f"remat_tests::{name}", product, mutates_args=())


class Recorder(TorchDispatchMode):
    """Makes an `Op` of each operation, as a record would."""

    def __init__(self):
        super().__init__()
        self.ops, self.calls = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        call = described(args), described(tuple(kwargs.items()))
        self.ops.append(Op(func, *call, described(tuple(tree_leaves(out)))))
        self.calls.append((args, kwargs))
        return out


def described(arg):
    """An argument with values for tensors and tuples for lists."""
    if isinstance(arg, list | tuple):
        return tuple(map(described, arg))
    if not isinstance(arg, torch.Tensor):
        return arg
    shape, stride, offset = tuple(arg.shape), arg.stride(), arg.storage_offset()
    return Value(shape, arg.dtype, arg.device, stride, offset)


def recorded(fn, *args):
    with Recorder() as mode:
        fn(*args)
    return mode.ops


def dots(fn, *shapes):
    """The operations of `fn` that are dots, and those that are without batch."""
    ops = recorded(fn, *(torch.ones(s, requires_grad=True) for s in shapes))
    few = dots_with_no_batch_dims_saveable
    return sum(map(bool, map(dots_saveable, ops))), sum(map(bool, map(few, ops)))


def einsum(equation):
    return functools.partial(torch.einsum, equation)


batched_mm = torch.vmap(torch.mm)
unbatched_mm = torch.vmap(torch.mm, in_dims=(0, None))
REAL = {
    "matrix": (torch.mm, [(2, 3), (3, 4)], (1, 1)),
    "folded": (torch.matmul, [(2, 5, 3), (3, 4)], (1, 1)),
    "vector": (torch.matmul, [(2, 3), (3,)], (1, 1)),
    "dot": (torch.dot, [(3,), (3,)], (1, 1)),
    "inner": (torch.inner, [(2, 3), (4, 3)], (1, 1)),
    "addmm": (torch.addmm, [(4,), (2, 3), (3, 4)], (1, 1)),
    "addmv": (torch.addmv, [(2,), (2, 3), (3,)], (1, 1)),
    "linear": (nn.functional.linear, [(2, 5, 3), (4, 3), (4,)], (1, 1)),
    "bilinear": (nn.functional.bilinear, [(2, 3), (2, 3), (5, 3, 3)], (1, 1)),
    "einsum of matrices": (einsum("ij,jk->ik"), [(2, 3), (3, 4)], (1, 1)),
    "einsum of tokens": (einsum("btd,de->bte"), [(2, 5, 3), (3, 4)], (1, 1)),
    "einsum of batches": (einsum("bij,bjk->bik"), [(2, 5, 3), (2, 3, 4)], (1, 0)),
    "batched": (torch.bmm, [(5, 2, 3), (5, 3, 4)], (1, 0)),
    "broadcast": (torch.matmul, [(5, 2, 3), (5, 3, 4)], (1, 0)),
    "added": (torch.baddbmm, [(4,), (5, 2, 3), (5, 3, 4)], (1, 0)),
    "summed": (torch.addbmm, [(2, 4), (5, 2, 3), (5, 3, 4)], (1, 1)),
    "of one": (torch.bmm, [(1, 2, 3), (1, 3, 4)], (1, 1)),
    "added to one": (torch.baddbmm, [(2, 4), (1, 2, 3), (1, 3, 4)], (1, 1)),
    "vmap of both": (batched_mm, [(5, 2, 3), (5, 3, 4)], (1, 0)),
    "vmap of one": (unbatched_mm, [(5, 2, 3), (3, 4)], (1, 1)),
    "conv1d": (nn.functional.conv1d, [(1, 2, 8), (4, 2, 3)], (1, 0)),
    "conv2d": (nn.functional.conv2d, [(1, 2, 8, 8), (4, 2, 3, 3)], (1, 0)),
    "transposed": (
        nn.functional.conv_transpose2d,
        [(1, 2, 8, 8), (2, 4, 3, 3)],
        (1, 0),
    ),
    "attention": (
        nn.functional.scaled_dot_product_attention,
        [(1, 2, 4, 8)] * 3,
        (1, 0),
    ),
    "outer": (torch.outer, [(3,), (4,)], (0, 0)),
    "pointwise": (lambda x: (x * x).exp().sum().sin(), [(3,)], (0, 0)),
    "norm": (lambda x: nn.functional.layer_norm(x, (3,)).softmax(-1), [(2, 3)], (0, 0)),
}


@pytest.mark.parametrize(("fn", "shapes", "want"), REAL.values(), ids=REAL)
def test_the_dots_that_torch_runs_are_known(fn, shapes, want):
    assert dots(fn, *shapes) == want


def test_all_that_torch_counts_flops_of_is_a_dot():
    for packet in flop_counter.flop_registry:
        assert dots_saveable(Op(packet)) is SAVE, packet


@pytest.mark.parametrize(
    "known",
    [
        *("mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "_scaled_mm"),
        *("_grouped_mm", "_int_mm", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_efficient_attention", "_scaled_grouped_mm"),
        *("_scaled_dot_product_cudnn_attention", "convolution_backward"),
        "_scaled_dot_product_fused_attention_overrideable",
    ],
)
def test_dots_of_all_devices_are_known(known):
    overload = getattr(aten, known).default
    assert dots_saveable(Op(overload)) is SAVE
    inputs = value(2, 3, 4), value(2, 4, 5), value(2, 4, 5)
    few = dots_with_no_batch_dims_saveable(Op(overload, inputs))
    matrix = {"mm", "addmm", "mv", "_scaled_mm", "_int_mm"}
    assert few is (SAVE if known in matrix else RECOMPUTE)


def test_dots_in_place_and_into_an_output_are_dots():
    for overload in (aten.addmm_.default, aten.mm.out, aten.baddbmm_.default):
        assert dots_saveable(op(overload)) is SAVE
    assert dots_with_no_batch_dims_saveable(op(aten.addmm_.default)) is SAVE


def test_grouped_products_of_tokens_have_no_batch():
    grouped = functools.partial(op, aten._grouped_mm.default)
    few = dots_with_no_batch_dims_saveable
    assert few(grouped((64, 8), (4, 8, 16), (4,))) is SAVE
    assert few(grouped((4, 64, 8), (4, 8, 16))) is RECOMPUTE


def test_the_table_of_dots_names_operators_that_exist():
    """A slip of the pen would be a dot that is never saved."""
    for dot in _DOTS:
        namespace, base = dot.split(".")
        assert namespace != "aten" or hasattr(aten, base), dot


def test_a_dot_of_ones_own_is_registered():
    custom("mine")
    packet = torch.ops.remat_tests.mine
    o = op(packet.default, (2, 3), (3, 4))
    assert dots_saveable(o) is RECOMPUTE
    register_dot(packet)
    assert dots_saveable(o) is SAVE
    assert dots_with_no_batch_dims_saveable(o) is SAVE


def test_a_dot_with_batch_dimensions_is_registered():
    register_dot(custom("batched"), batched=True)
    o = op(torch.ops.remat_tests.batched.default, (2, 3), (3, 4))
    assert dots_saveable(o) is SAVE
    assert dots_with_no_batch_dims_saveable(o) is RECOMPUTE


def test_registering_again_changes_nothing_or_is_refused():
    twice = custom("twice")
    for _ in range(2):
        register_dot(twice)
    register_dot(aten.mm)
    register_dot(aten.bmm.default, batched=True)
    with pytest.raises(ValueError, match=r"remat_tests\.twice is a dot already"):
        register_dot(twice, batched=True)
    with pytest.raises(
        ValueError, match=r"aten\.mm is a dot already, and batched=False"
    ):
        register_dot(aten.mm, batched=True)
    assert dots_with_no_batch_dims_saveable(op(MM)) is SAVE


def test_a_dot_is_registered_by_many_threads_once():
    """One of two kinds wins, whole, and the other is refused in each thread."""
    raced = custom("raced")
    start, refused = threading.Barrier(8), []

    def register(batched):
        start.wait()
        try:
            register_dot(raced, batched=batched)
        except ValueError:
            refused.append(batched)

    threads = [threading.Thread(target=register, args=(i % 2 == 0,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 4
    assert len(set(refused)) == 1


@pytest.mark.parametrize("bad", ["mm", torch.mm, None, 3])
def test_only_operators_are_registered_as_dots(bad):
    with pytest.raises(TypeError, match="register_dot takes operators"):
        register_dot(bad)


# --- The order of decisions, and combinations ---------------------------------------


def constant(decision):
    """A policy that no simplification knows."""
    return as_policy(lambda op: decision)


def equal(p, q):
    return all(p(o) is q(o) for o in OPS)


ALL = list(Decision)
nothing, everything = nothing_saveable, everything_saveable
kinds = pytest.mark.parametrize("kind", [constant, as_policy], ids=["asked", "known"])


def test_decisions_are_ordered_by_how_near_the_result_is():
    assert ALL == [RECOMPUTE, DISK, OFFLOAD, SAVE]
    for i, j in itertools.product(range(4), repeat=2):
        assert ALL[i] | ALL[j] is ALL[max(i, j)]
        assert ALL[i] & ALL[j] is ALL[min(i, j)]
    assert [~d for d in ALL] == [SAVE, RECOMPUTE, RECOMPUTE, RECOMPUTE]
    assert [bool(d) for d in ALL] == [False, True, True, True]
    assert [d.offloads for d in ALL] == [False, True, True, False]


@kinds
@pytest.mark.parametrize("decisions", [*itertools.product(ALL, repeat=3)])
def test_the_laws_of_a_lattice_hold(decisions, kind):
    p, q, r = map(kind, decisions)
    assert equal(p | q, q | p)
    assert equal(p & q, q & p)
    assert equal(p | (q | r), (p | q) | r)
    assert equal(p & (q & r), (p & q) & r)
    assert equal(p | (p & q), p)
    assert equal(p & (p | q), p)
    assert equal(p & (q | r), (p & q) | (p & r))
    assert equal(p | (q & r), (p | q) & (p | r))
    assert equal(p - (q | r), (p - q) - r)


@kinds
@pytest.mark.parametrize("decisions", [*itertools.product(ALL, repeat=2)])
def test_complements_and_differences_obey_their_laws(decisions, kind):
    p, q = map(kind, decisions)
    assert equal(~(p | q), ~p & ~q)
    assert equal(~(p & q), ~p | ~q)
    assert equal(p - q, p & ~q)
    assert equal(p & ~p, nothing)
    assert equal(~~~p, ~p)
    assert equal(~~p, p) == (not decisions[0].offloads)
    assert all((p | ~p)(o) for o in OPS)
    # What p keeps is split in two by q, and nothing moves.
    assert equal((p - q) | (p - ~q), p)


@kinds
@pytest.mark.parametrize("decision", ALL)
def test_nothing_and_everything_are_neutral(decision, kind):
    p = kind(decision)
    assert equal(p | nothing, p)
    assert equal(p & everything, p)
    assert equal(p | everything, everything)
    assert equal(p & nothing, nothing)
    assert equal(p - nothing, p)
    assert equal(p - everything, nothing)
    assert equal(p | p, p)
    assert equal(p & p, p)


@kinds
@pytest.mark.parametrize("to", ["pinned_host", "disk"])
@pytest.mark.parametrize("decisions", [*itertools.product(ALL, repeat=2)])
def test_offloading_moves_what_both_keep_and_drops_nothing(decisions, to, kind):
    p, q = map(kind, decisions)
    place = {"pinned_host": OFFLOAD, "disk": DISK}[to]
    got, kept = p.but_offload(q, to=to), decisions[0]
    for o in OPS:
        assert got(o) is (place if all(decisions) else kept)
        assert p.but_offload(to=to)(o) is (place if kept else RECOMPUTE)
    assert equal(p.but_offload(nothing, to=to), p)
    assert equal(got.but_offload(q, to=to), got)


def test_a_combination_that_changes_nothing_is_the_policy_itself():
    """So nested calls under one policy share what is known of it."""
    p, other = dots_saveable, save_only_these_names("a")
    assert p | p is p
    assert p & p is p
    assert p | None is p
    assert nothing | p is p
    assert p & everything is p
    assert everything & p is p
    assert (p | other) != p
    assert everything_saveable | as_policy(OFFLOAD) != everything_saveable


def test_combinations_on_operations():
    mm, named, both = OPS[1], OPS[3], OPS[5]
    names = save_only_these_names("a")
    assert [(dots_saveable | names)(o) for o in (OPS[0], mm, named)] == [
        *(RECOMPUTE, SAVE, SAVE)
    ]
    assert [(dots_saveable & names)(o) for o in (mm, named, both)] == [
        *(RECOMPUTE, RECOMPUTE, SAVE)
    ]
    away = dots_saveable.but_offload(names)
    assert [away(o) for o in (mm, named, both)] == [SAVE, RECOMPUTE, OFFLOAD]
    assert save_from_both_policies(dots_saveable, names) == dots_saveable | names
    assert save_from_both_policies(away, away.but_offload(to="disk"))(both) is OFFLOAD


def test_what_stands_for_a_policy_combines_with_one():
    p = dots_saveable
    assert (p | saves) == (p | as_policy(saves))
    assert (saves | p) == (as_policy(saves) | p)
    assert ([MM] & p) == (save_ops(MM) & p)
    assert (p & {MM}) == (p & save_ops(MM))
    assert (p - torch_saves) == (p & ~as_policy(torch_saves))
    assert (saves - p) == (as_policy(saves) & ~p)
    assert p.but_offload([MM]) == p.but_offload(save_ops(MM))
    assert save_from_both_policies([MM], saves)(op()) is SAVE


@pytest.mark.parametrize(
    "combine",
    [
        *(lambda p: p | 3, lambda p: 3 | p, lambda p: p & "dots", lambda p: 3.0 & p),
        *(lambda p: p - True, lambda p: b"x" - p, lambda p: p.but_offload(3)),
        lambda p: save_from_both_policies(p, 3),
        lambda p: save_from_both_policies(3, p),
    ],
)
def test_only_policies_combine(combine):
    with pytest.raises(TypeError, match="remat: not a policy"):
        combine(dots_saveable)


# --- What else may stand for a policy -----------------------------------------------


@pytest.mark.parametrize(
    ("obj", "policy"),
    [
        (None, nothing_saveable),
        (dots_saveable, dots_saveable),
        (SAVE, everything_saveable),
        (RECOMPUTE, nothing_saveable),
        ([MM], save_ops(MM)),
        ((MM, aten.bmm), save_ops(MM, aten.bmm)),
        ({MM}, save_ops(MM)),
        (frozenset(), save_ops()),
        (CheckpointPolicy.MUST_SAVE, everything_saveable),
        (CheckpointPolicy.PREFER_SAVE, everything_saveable),
        (CheckpointPolicy.MUST_RECOMPUTE, nothing_saveable),
        (CheckpointPolicy.PREFER_RECOMPUTE, nothing_saveable),
    ],
    ids=without_address,
)
def test_what_stands_for_a_policy(obj, policy):
    assert as_policy(obj) == policy


def test_torchs_offloading_is_to_pinned_memory():
    for member in CheckpointPolicy:
        if "OFFLOAD" in member.name:
            assert as_policy(member)(op()) is OFFLOAD


@pytest.mark.parametrize("answer", [*Decision, *CheckpointPolicy, True, False])
def test_a_function_answers_with_a_decision_or_a_bool(answer):
    want = {True: SAVE, False: RECOMPUTE}.get(answer, answer)
    if isinstance(answer, CheckpointPolicy):
        want = as_policy(answer)(op())
    assert as_policy(lambda op: answer)(op()) is want
    assert as_policy(lambda ctx, op, *args, **kwargs: answer)(op()) is want


@dataclass(frozen=True)
class Larger:
    """A policy as a user's object."""

    than: int

    def __call__(self, op):
        """Save what is larger."""
        return op.nbytes > self.than


@pytest.mark.parametrize(
    "fn",
    [
        Larger(100),
        Larger(100).__call__,
        lambda op: op.nbytes > 100,
        lambda op, than=100: op.nbytes > than,
        lambda *ops: ops[0].nbytes > 100,
        lambda op, *rest, **options: op.nbytes > 100,
        functools.partial(lambda than, op: op.nbytes > than, 100),
        functools.partial(lambda op, than: op.nbytes > than, than=100),
    ],
)
def test_a_function_of_one_argument_is_asked_of_the_operation(fn):
    assert as_policy(fn)(op(out=(26,))) is SAVE
    assert as_policy(fn)(op(out=(25,))) is RECOMPUTE


def test_functions_that_are_equal_are_equal_policies():
    assert as_policy(Larger(8)) == as_policy(Larger(8))
    assert hash(as_policy(Larger(8))) == hash(as_policy(Larger(8)))
    assert as_policy(Larger(8)) != as_policy(Larger(9))


@pytest.mark.parametrize(
    ("obj", "advice"),
    [
        ("dots", r"'dots', a str. Do you mean remat.policies.dots_saveable\?"),
        ("nothing", "remat.policies.nothing_saveable"),
        ("save_only_these_name", "remat.policies.save_only_these_names"),
        ("dots_savable", "remat.policies.dots_saveable"),
        ("full", "a str. A policy is one of remat.policies, None"),
        ("", "a str. A policy is one of"),
        (True, "remat.policies.everything_saveable"),
        (False, "remat.policies.nothing_saveable"),
        (1, "1, a int. A policy is"),
        ({"policy": 1}, "a dict. A policy is"),
        (MM, "Do you mean a list of it"),
        (Larger, "It is a class: pass an instance"),
        (save_only_these_names, r"It makes policies: pass save_only_these_names\("),
        (save_ops, r"It makes policies: pass save_ops\("),
        (
            functools.partial(create_selective_checkpoint_contexts, [MM]),
            "Pass what it is called with",
        ),
        (lambda: True, "neither as policy"),
        (lambda ctx, op: True, "neither as policy"),
    ],
    ids=without_address,
)
def test_what_is_no_policy_is_refused_with_advice(obj, advice):
    with pytest.raises(TypeError, match=rf"^remat: (not a )?policy.*{advice}"):
        as_policy(obj)


def test_a_function_that_is_not_hashable_is_refused():
    @dataclass
    class Mutable:
        than: int

        def __call__(self, op):
            return True

    with pytest.raises(TypeError, match=r"not hashable.*frozen dataclass"):
        as_policy(Mutable(3))


@pytest.mark.parametrize("answer", [None, 1, "save", torch.tensor(True), [True]])
def test_an_answer_that_is_no_decision_is_refused(answer):
    def broken(op):
        return answer

    want = (
        r"policy as_policy\(.*broken\) returned .* for aten.sin.default at model.py:7"
    )
    for policy in (as_policy(broken), dots_saveable | broken, ~as_policy(broken)):
        with pytest.raises(TypeError, match=want):
            policy(op())


def test_an_error_in_a_function_reaches_the_user():
    def broken(op):
        raise KeyError(op.source)

    with pytest.raises(KeyError, match=r"model\.py"):
        (dots_saveable | broken)(op())


# --- Arguments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        save_only_these_names,
        save_any_names_but_these,
        save_anything_except_these_names,
    ],
)
def test_names_are_strings(make):
    with pytest.raises(TypeError, match=rf"{make.__name__}.* a list: unpack it"):
        make(["a", "b"])
    with pytest.raises(TypeError, match=rf"{make.__name__}: a name is a string; got 3"):
        make("a", 3)


def test_names_are_saved_or_offloaded_not_both():
    make = save_and_offload_only_these_names
    with pytest.raises(ValueError, match="'b' can be saved and can be offloaded"):
        make(names_which_can_be_saved=["a", "b"], names_which_can_be_offloaded=["b"])
    with pytest.raises(TypeError, match="takes a list of names; got 'abc'"):
        make(names_which_can_be_saved="abc", names_which_can_be_offloaded=[])
    with pytest.raises(TypeError, match="a name is a string; got 1"):
        make(names_which_can_be_saved=[], names_which_can_be_offloaded=[1])


@pytest.mark.parametrize("dst", ["cpu", "unpinned_host", None, "Disk", ["disk"]])
def test_a_place_to_offload_to_exists(dst):
    match = r"offloads to one of 'pinned_host', 'disk'; got"
    with pytest.raises(ValueError, match=f"but_offload {match}"):
        dots_saveable.but_offload(to=dst)
    with pytest.raises(ValueError, match=f"offload_dot_with_no_batch_dims {match}"):
        offload_dot_with_no_batch_dims("device", dst)
    with pytest.raises(ValueError, match=match):
        save_and_offload_only_these_names(
            names_which_can_be_saved=(),
            names_which_can_be_offloaded=(),
            offload_dst=dst,
        )


def test_offloading_starts_on_the_device():
    with pytest.raises(ValueError, match="offloads from 'device'; got 'pinned_host'"):
        offload_dot_with_no_batch_dims("pinned_host", "device")
    with pytest.raises(ValueError, match="offloads from 'device'; got 'cuda'"):
        save_and_offload_only_these_names(
            names_which_can_be_saved=(),
            names_which_can_be_offloaded=(),
            offload_src="cuda",
        )


@pytest.mark.parametrize(
    ("bad", "advice"),
    [
        ("aten::mm", r"Do you mean torch.ops.aten.mm\?"),
        ("mm", r"Do you mean torch.ops.aten.mm\?"),
        (torch.mm, r"Do you mean torch.ops.aten.mm\?"),
        (nn.functional.linear, r"Do you mean torch.ops.aten.linear\?"),
        ("no such thing", "got 'no such thing', a str"),
        (3, "got 3, a int"),
        ([MM], "a list"),
    ],
    ids=without_address,
)
def test_operators_are_what_torch_ops_holds(bad, advice):
    with pytest.raises(TypeError, match=f"save_ops takes operators.*{advice}"):
        save_ops(bad)
    with pytest.raises(TypeError, match="save_ops takes operators"):
        as_policy([MM, bad])


def test_a_pattern_is_a_regular_expression():
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        save_names_matching("(")
    for bad in (3, None, b"a", re.compile(b"a")):
        with pytest.raises(TypeError, match="takes a regular expression; got"):
            save_names_matching(bad)


@pytest.mark.parametrize("make", [save_larger_than, save_smaller_than])
def test_a_size_is_a_number_of_bytes(make):
    for bad in ("1M", None, True, torch.tensor(3)):
        with pytest.raises(TypeError, match=f"{make.__name__} takes a number of bytes"):
            make(bad)
    for bad in (-1, float("nan")):
        with pytest.raises(ValueError, match=f"{make.__name__} takes a number of byte"):
            make(bad)


# --- torch's selective checkpointing ------------------------------------------------


def wide_matmuls(ctx, func, *args, **kwargs):
    """As those who save by shape do."""
    if func in {MM, aten.addmm.default} and args[-1].shape[1] > 3:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def by_output(ctx, func, *args, **kwargs):
    """As those who save by size do."""
    out = ctx.op_output
    if not isinstance(out, torch.Tensor):
        return CheckpointPolicy.PREFER_RECOMPUTE
    assert not ctx.is_recompute
    return out.numel() * out.element_size() > 64


def casts(ctx, func, *args, **kwargs):
    """As those who keep copies between devices and dtypes do."""
    if func is aten._to_copy.default and "dtype" in kwargs:
        assert args[0].device.type == "cpu"
        return args[0].dtype != kwargs["dtype"]
    return False


def by_arguments(ctx, func, *args, **kwargs):
    """Reads everything there is."""
    if func is aten.cat.default:
        return len(args[0]) == 2 and args[0][1].size(0) == 3
    if func is aten.convolution.default:
        return args[2] is None and args[3] == [2] and args[1].stride(-1) == 1
    if func is aten.addmm.default:
        return not kwargs
    if func is aten.sum.dim_IntList:
        return list(args[1]) == [1]
    return func is aten._softmax.default and args[1] == 1


# Older versions of torch do not tell a policy what the operation returned.
TELLS_OUTPUT = "op_output" in signature(SelectiveCheckpointContext).parameters


def everything_torch(ctx, func, *args, **kwargs):
    return CheckpointPolicy.PREFER_SAVE


def model(x, w):
    y = nn.functional.linear(x, w.T, w[0]).sin() @ w.T
    y = torch.cat([y, y[:3].double().float()]).softmax(1)
    z = nn.functional.conv1d(y[None], torch.ones(2, y.shape[0], 2), stride=2)
    return (z.sum(1) * 2).exp().sum() + y.t().detach().clone().sum(1).max()


@pytest.mark.parametrize(
    "policy",
    [
        *(wide_matmuls, casts, by_arguments, everything_torch, torch_saves),
        *([by_output] if TELLS_OUTPUT else []),
        [MM, aten.addmm.default, aten.exp.default],
        [],
    ],
    ids=lambda p: getattr(p, "__name__", str(p)),
)
def test_torchs_policies_decide_as_under_torch(policy):
    asked = []

    def spy(ctx, func, *args, **kwargs):
        listed = isinstance(policy, list)
        answer = func in policy if listed else policy(ctx, func, *args, **kwargs)
        if isinstance(answer, CheckpointPolicy):
            answer = "SAVE" in answer.name
        asked.append((func, answer))
        return answer

    gen = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=gen, requires_grad=True)
    w = torch.randn(4, 4, generator=gen, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, spy)
    checkpoint(model, x, w, use_reentrant=False, context_fn=contexts)
    ours = as_policy(policy)
    ops = recorded(model, x, w)
    functions = [func for func, _ in asked]
    seen = [o for o in ops if o.func in functions]
    assert [o.func for o in seen] == functions
    assert [bool(ours(o)) for o in seen] == [answer for _, answer in asked]
    assert not any(ours(o) for o in ops if o.func not in functions)


def test_a_policy_of_torch_that_saves_everything_is_not_asked_of_detach():
    assert as_policy(everything_torch)(op(aten.detach.default)) is RECOMPUTE
    assert as_policy(everything_torch)(op(aten.clone.default)) is SAVE


def test_a_policy_of_torch_may_read_metadata_and_not_values():
    def reads(ctx, func, *args, **kwargs):
        return args[0].sum() > 0

    with pytest.raises(TypeError, match=r"shape, dtype, device.*not what it holds"):
        as_policy(reads)(op(SIN, (2, 3)))


def test_stand_ins_have_the_metadata_of_what_they_stand_for():
    far = Value((2, 3), torch.bfloat16, torch.device("cuda", 1), (1, 2), 5)
    x = stand_in(far)
    assert isinstance(x, torch.Tensor)
    assert (x.shape, x.stride(), x.storage_offset()) == ((2, 3), (1, 2), 5)
    assert (x.dtype, x.device, x.is_cuda) == (torch.bfloat16, far.device, True)
    assert (x.numel(), x.dim(), x.nbytes) == (6, 2, 12)
    assert stand_in(value()).shape == ()
    assert stand_in(value(2, 3)).stride() == (3, 1)


def seen(arg):
    """What can be told of an argument: the class and length of lists, say."""
    if isinstance(arg, list | tuple):
        return type(arg), [*map(seen, arg)]
    return described(arg)


CALLS = {
    "keyword": lambda x: torch.add(x, x, alpha=2),
    "keyword tensor": lambda x: torch.searchsorted(x, x, sorter=x.argsort()),
    "list": lambda x: torch.cat([x, x[:1]], 0),
    "two lists": lambda x: torch._foreach_addcmul([x, x[:1]], [x, x[:1]], [x, x[:1]]),
    "optional list": lambda x: x[:, torch.tensor([0, 2])],
    "optional list at the end": lambda x: x[torch.tensor([0, 2])],
    "left out": lambda x: torch.clamp(x, max=x),
    "not left out": lambda x: torch.clamp(x, x, x),
    "no bias": lambda x: nn.functional.conv1d(x, x[:, :, None]),
    "bias": lambda x: nn.functional.conv1d(x, x[:, :, None], x[:, 0]),
    "no tensor": lambda x: torch.zeros(2, 3, dtype=torch.half),
    "dtype": lambda x: x.to(torch.double),
    "scalars": lambda x: x.mul(2).div(3.0).sum([0], keepdim=True),
    "written": lambda x: torch.mm(x, x, out=torch.empty(4, 4)),
}


@pytest.mark.parametrize("fn", CALLS.values(), ids=CALLS)
def test_a_call_is_put_together_as_it_was(fn):
    with Recorder() as mode:
        fn(torch.arange(16.0).view(4, 4))
    for o, (args, kwargs) in zip(mode.ops, mode.calls, strict=True):
        got, options = call_of(o)
        assert seen(got) == seen(args)
        assert seen([*options.items()]) == seen([*kwargs.items()])
        tensors = [a for a in tree_leaves((args, kwargs)) if torch.is_tensor(a)]
        assert o.inputs == described(tuple(tensors))
        assert hash(o) == hash(replace(o))


def test_an_operator_of_higher_order_gets_its_tuples_back():
    cond = torch.ops.higher_order.cond
    args, kwargs = call_of(Op(cond, (True, saves, saves, (value(1),))))
    assert seen(args) == seen((True, saves, saves, (torch.empty(1),)))
    assert kwargs == {}


# --- Operations ---------------------------------------------------------------------


def test_operations_compare_hash_and_pickle():
    x = value(2, 3)
    make = lambda alpha: Op(aten.add.Tensor, (x, (x, 2)), (("alpha", alpha),), (x,))
    assert make(2) == make(2) != make(3)
    assert hash(make(2)) == hash(make(2))
    plain = replace(make(2), func="aten.add")  # torch's overloads do not pickle
    assert pickle.loads(pickle.dumps(plain)) == plain


def test_the_inputs_of_an_operation_are_its_tensors_in_order():
    a, b, c, d = (value(n) for n in range(4))
    o = Op(SIN, (a, None, (b, (2, c))), (("out", d), ("alpha", 2)))
    assert o.inputs == (a, b, c, d)
    assert Op(SIN).inputs == ()


def test_an_operation_of_higher_order_is_its_own_packet():
    cond = torch.ops.higher_order.cond
    assert Op(cond).packet is cond
    assert op(MM).packet is aten.mm
    assert as_policy(saves)(Op(cond)) is RECOMPUTE
