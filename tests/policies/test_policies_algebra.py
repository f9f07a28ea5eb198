"""Decisions are ordered, and policies combine by that order."""

import itertools

import pytest
import torch
from support.operations import MM, OPS, op, saves, torch_saves

from remat.policies import (
    Decision,
    as_policy,
    dots_saveable,
    everything_saveable,
    nothing_saveable,
    save_from_both_policies,
    save_only_these_names,
    save_ops,
)


aten = torch.ops.aten
SAVE, OFFLOAD = Decision.SAVE, Decision.OFFLOAD
DISK, RECOMPUTE = Decision.OFFLOAD_TO_DISK, Decision.RECOMPUTE


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
