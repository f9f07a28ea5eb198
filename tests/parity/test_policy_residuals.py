"""What JAX's tests say of the values that a policy keeps, and of combinations.

Numbers and letters are those of `test_policy_savings.py`.
"""

import pytest
import torch
from support.policies import MATRIX, assert_runs, points, settled
from support.transforms import some
from torch.func import jvp

from remat import checkpoint_name, remat, saved_residuals
from remat._graph import handles as _residual
from remat._offload import offload as _offload
from remat._partial.decide import CACHES
from remat.policies import (
    Decision,
    dots_saveable,
    everything_saveable,
    nothing_saveable,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_from_both_policies,
    save_larger_than,
    save_names_matching,
    save_only_these_names,
    save_smaller_than,
)
from remat.testing import assert_same


aten = torch.ops.aten


# --- 37 to 42: lists of residuals ---


@pytest.mark.parametrize(
    ("fn", "kept"),
    [
        (lambda x: torch.einsum("ii->i", x), []),
        (lambda x: torch.zeros(3, 3) * x, []),
        (lambda x: torch.zeros_like(x) * x, []),
        (lambda x: torch.zeros_like(x) * x.sin(), ["from the argument x"]),
        (lambda x: torch.arange(3.0) * x, []),
    ],
    ids=["diagonal", "zeros", "zeros_like", "zeros_sin", "arange"],
)
@pytest.mark.parametrize("policy", [None, nothing_saveable, dots_saveable], ids=repr)
def test_constants_are_made_again(fn, kept, policy):
    """37."""
    assert settled(remat(fn, policy=policy, prune=True), points(3, 3)) == kept


def constants(x):
    """Three constants with names and one without."""
    y = checkpoint_name(torch.full((3,), 2.0).double() * 2, "y")
    z = checkpoint_name(torch.full((3,), 3.0).double() * 2, "z")
    w = checkpoint_name(torch.full((3,), 4.0).double() * 2, "w")
    u = torch.full((3,), 5.0).double() * 2
    return x * y * z * w * u


@pytest.mark.parametrize("names", ["", "y", "yz", "yzw"])
@pytest.mark.parametrize("by", [save_any_names_but_these, save_only_these_names])
def test_as_many_values_are_kept_as_names_that_may_be_saved(by, names):
    """40 and 41: what has no name is never kept."""
    fn = remat(constants, policy=by(*names), prune=True)
    kept = names if by is save_only_these_names else "yzw"[len(names) :]
    assert settled(fn, points(3)) == [f"named '{name}'" for name in kept]
    assert [r.nbytes for r in saved_residuals(fn, points(3))] == [24] * len(kept)
    assert_runs(fn, constants, points(3), full=4 - len(kept))


# --- d5, d6: policies that combine, and products of others ---


def names_and_dots(x, u):
    h = checkpoint_name((x @ u).sin(), "h")
    return checkpoint_name((h @ u.mT).exp(), "out").sin()


named = save_only_these_names("h")
# A policy, and how many products, sines and exponentials are recomputed under it.
COMBINATIONS = {
    "None": (None, 2, 1, 1),
    "dots": (dots_saveable, 0, 1, 1),
    "h": (named, 2, 0, 1),
    "dots|h": (dots_saveable | named, 0, 0, 1),
    "both": (save_from_both_policies(dots_saveable, named), 0, 0, 1),
    "everything-out": (everything_saveable - save_only_these_names("out"), 0, 0, 1),
    "not_dots": (~dots_saveable, 1, 0, 0),
    "small_dots": (dots_saveable & save_smaller_than(40), 1, 1, 1),
    "large": (save_larger_than(40), 1, 0, 1),
    "matching": (save_names_matching("h|o.*"), 1, 0, 0),
    "but_h": (save_any_names_but_these("h"), 1, 1, 0),
    "except_h": (save_anything_except_these_names("h"), 0, 1, 0),
    "operators": ([aten.mm, aten.sin.default], 0, 0, 1),
    "function": (lambda op: op.packet is aten.exp, 1, 1, 0),
    "SAVE": (Decision.SAVE, 0, 0, 0),
}


@pytest.mark.parametrize(
    ("policy", "dot", "sin", "exp"), COMBINATIONS.values(), ids=list(COMBINATIONS)
)
@pytest.mark.parametrize("prune", ["auto", True])
def test_combinations_save_what_they_say(prune, policy, dot, sin, exp):
    """Beside what is recomputed there are four products of cotangents."""
    if policy is None and prune == "auto":
        pytest.skip("nothing is recorded of so small a call")
    fn = remat(names_and_dots, policy=policy, prune=prune)
    args = MATRIX, points(2, 3)
    assert_runs(fn, names_and_dots, *args, dot=4 + dot, sin=sin, exp=exp)


# --- 55 to 57, offloading ---


class Store:
    """Counts what goes away, and what of that is asked back."""

    def __init__(self, monkeypatch):
        self.away, self.back, self._stored = [], [], []
        take = _offload.Fetched.take

        def counting(put):
            def counted(tensor):
                self.away.append(tuple(tensor.shape))
                self._stored.append(put(tensor))
                return self._stored[-1]

            return counted

        def counted_take(fetched, k):
            known = [t.untyped_storage().data_ptr() for t in self._stored]
            tensor = take(fetched, k)
            if tensor.untyped_storage().data_ptr() in known:
                self.back.append(tuple(tensor.shape))
            return tensor

        for decision, put in [*_residual.OFFLOAD.items()]:
            monkeypatch.setitem(_residual.OFFLOAD, decision, counting(put))
        monkeypatch.setattr(_offload.Fetched, "take", counted_take)

    def taken(self):
        result = self.away, self.back
        self.away, self.back = [], []
        return result


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", str(tmp_path))
    return Store(monkeypatch)


def three_names(x):
    y = checkpoint_name(x.exp(), "y")
    z = checkpoint_name(y[:2].tanh(), "z")
    return checkpoint_name((z @ y.mT).tanh(), "w").sum()


def saved_and_offloaded(saved, offloaded, to):
    return save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_dst=to,
    )


@pytest.mark.parametrize("to", ["disk", "pinned_host"])
def test_what_is_offloaded_is_copied_once_and_brought_back_once(store, to):
    """55: each value goes and comes back once; one that is saved is not copied."""
    fn = remat(three_names, policy=saved_and_offloaded(["y"], ["z"], to))
    x = points(3, 4)
    for _ in range(3):
        assert_runs(fn, three_names, x, calls=1, exp=0, tanh=1)
        assert store.taken() == ([(2, 4)], [(2, 4)])
    CACHES.clear()
    fn = remat(three_names, policy=saved_and_offloaded([], ["y", "z", "w"], to))
    for _ in range(3):
        assert_runs(fn, three_names, x, calls=1, exp=0, tanh=0)
        away, back = store.taken()
        assert away == [(3, 4), (2, 4), (2, 3)]
        assert sorted(back) == sorted(away)


TRANSFORMS = some("grad", "vmap_grad", "grad_vmap", "jacrev", "twice")


@pytest.mark.parametrize("to", ["disk", "pinned_host"])
@pytest.mark.parametrize("how", TRANSFORMS)
def test_offloaded_values_come_back_under_transforms(store, how, to):
    """56: under vmap the batch is one value."""
    transform, x = TRANSFORMS[how], points(3, 4)
    fn = remat(three_names, policy=saved_and_offloaded(["z"], ["y"], to))
    batch = (3,) if transform.batched else ()
    for _ in range(3):
        assert_same(transform(fn, x), transform(three_names, x))
        away, back = store.taken()
        assert away == [(*batch, 3, 4)]
        assert {*back} == {*away}


def test_without_a_backward_nothing_comes_back(store):
    fn = remat(three_names, policy=saved_and_offloaded([], ["y"], "disk"))
    x = points(3, 4)
    fn(x)
    jvp(fn, (x,), (x,))
    assert store.taken() == ([], [])
    fn(x.requires_grad_())
    assert store.taken() == ([(3, 4)], [])


@pytest.mark.gpu
def test_on_a_device_the_copies_are_one_each_way():
    """55, by what the profiler sees."""
    fn = remat(three_names, policy=saved_and_offloaded([], ["y"], "pinned_host"))
    x = points(300, 400).cuda().requires_grad_()
    fn(x).backward()
    with torch.profiler.profile() as profiler:
        fn(x).backward()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    assert sum("Memcpy DtoH" in name for name in names) == 1
    assert sum("Memcpy HtoD" in name for name in names) == 1
