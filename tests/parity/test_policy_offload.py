"""What JAX's tests say of policies that offload: items 55 to 57 of their survey."""

import pytest
import torch
from support.policies import MATRIX, assert_runs, points
from support.transforms import some
from torch.func import jvp

from remat import checkpoint_name, remat
from remat._graph import residual as _residual
from remat._offload import offload as _offload
from remat._partial.cache import CACHES
from remat.policies import (
    offload_dot_with_no_batch_dims,
    save_and_offload_only_these_names,
)
from remat.testing import assert_same


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


def test_dots_without_a_batch_are_offloaded_and_others_recomputed(store):
    """57."""

    def plain(x):
        y = (x @ x).sin()
        stack = torch.stack([y, 2 * y])
        return (stack @ stack.mT).sin()

    fn = remat(plain, policy=offload_dot_with_no_batch_dims(offload_dst="disk"))
    for _ in range(3):
        assert_runs(fn, plain, MATRIX, calls=1, mm=2, bmm=3, sin=1)
        assert store.taken() == ([(2, 2)], [(2, 2)])


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
