"""A policy is a value that says which results may be kept, and where."""

import copy
import itertools
import pickle
import re
from dataclasses import replace

import pytest
import torch
from support.operations import (
    DISK,
    MM,
    OFFLOAD,
    OPS,
    RECOMPUTE,
    SAVE,
    SIN,
    aten,
    custom,
    op,
    saves,
    torch_saves,
    value,
)
from support.policies import keys_of

from remat import policies
from remat.policies import (
    Decision,
    Op,
    as_policy,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    offload_dot_with_no_batch_dims,
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


MANY = {
    "nothing_saveable": nothing_saveable,
    "everything_saveable": everything_saveable,
    "dots_saveable": dots_saveable,
    "save_collectives": policies.save_collectives,
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


@pytest.mark.parametrize("text", MANY)
def test_a_policy_is_a_value_that_prints_as_the_expression_that_makes_it(text):
    policy = MANY[text]
    assert repr(policy) == text
    scope = {"torch": torch, "re": re, **vars(policies), **globals()}
    assert eval(text, scope) == policy
    assert all(type(policy(o)) is Decision for o in OPS)
    field = next(iter(vars(policy)), "a")
    with pytest.raises(AttributeError, match="cannot assign to field"):
        setattr(policy, field, 0)
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


@pytest.mark.parametrize(
    ("operator", "decision"),
    [
        (torch.ops._c10d_functional.all_reduce.default, SAVE),
        (torch.ops._c10d_functional.reduce_scatter_tensor, SAVE),
        (torch.ops._c10d_functional_autograd.all_gather_into_tensor.default, SAVE),
        (torch.ops.c10d.allreduce_.default, SAVE),
        (torch.ops._c10d_functional.wait_tensor.default, RECOMPUTE),
        (torch.ops.c10d.send.default, RECOMPUTE),
        (MM, RECOMPUTE),
    ],
)
def test_collectives_are_known(operator, decision):
    assert policies.save_collectives(Op(operator)) is decision


def test_the_names_that_a_policy_mentions():
    assert keys_of(save_only_these_names("a", "b")) == {"a", "b"}
    assert keys_of(save_any_names_but_these("a")) == {"a"}
    assert keys_of(dots_saveable - save_only_these_names("a")) == {"a"}
    both = save_only_these_names("a").but_offload(save_any_names_but_these("b"))
    assert keys_of(both) == {"a", "b"}
    assert not keys_of(dots_saveable | save_names_matching("a"))


# --- Each policy ---


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
    assert keys_of(policy) == {"a", "b", "c"}


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


# --- Operations ---


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


# --- Decisions are ordered, and policies combine by that order ---


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
def test_the_laws_of_a_lattice_hold(kind):
    for decisions in itertools.product(ALL, repeat=3):
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
def test_complements_and_differences_obey_their_laws(kind):
    for decisions in itertools.product(ALL, repeat=2):
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
@pytest.mark.parametrize("to", ["pinned_host", "disk"])
def test_offloading_moves_what_both_keep_and_drops_nothing(to, kind):
    for decisions in itertools.product(ALL, repeat=2):
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
    assert everything | as_policy(OFFLOAD) is everything
    assert p | everything is everything
    assert p & nothing is nothing
    assert nothing & p is nothing


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


def test_a_policy_combines_with_a_stand_in():
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
