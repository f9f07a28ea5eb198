"""What the shims of `autograd` and `tensors` expect of torch."""

from typing import Any

import torch
from support.shims import expects, leaf, same
from torch import Tensor, nn
from torch.autograd import Function, forward_ad, graph
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import GraphExecGroup

from remat._torch import autograd, tensors
from remat.testing import count_ops


@expects("set_grad_enabled", "grad_mode")
def test_grad_mode_is_switched():
    with autograd.grad_mode(False):
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    autograd.set_grad_enabled(False)
    assert not torch.is_grad_enabled()
    torch.set_grad_enabled(True)


@expects("base_dual_level_active", "dual_level_active", "is_forward_ad_enabled")
def test_dual_levels_are_seen():
    assert autograd.dual_level_active() is False
    with forward_ad.dual_level():
        assert autograd.dual_level_active() is True
        assert autograd.base_dual_level_active() is True
    with forward_ad._set_fwd_grad_enabled(False):
        assert autograd.is_forward_ad_enabled() is False
    assert autograd.is_forward_ad_enabled() is True


def _read_twice():
    out = leaf().sin().sum()
    out.backward()
    out.backward()


def _change_what_was_saved():
    x = leaf() * 1
    out = x.sin().sum()
    x.add_(1)
    out.backward()


def _use_a_batch_that_has_ended():
    kept = []
    torch.vmap(lambda x: kept.append(x) or x)(torch.ones(2, 3))
    kept[0].sin()


def _read_what_has_no_memory():
    with tensors.fake_mode():
        torch.ones(2).data_ptr()


ERRORS = {
    "a write to a leaf": lambda: leaf().add_(1),
    "a saved tensor that changed": _change_what_was_saved,
    "a graph that is gone": _read_twice,
    "a level that has ended": _use_a_batch_that_has_ended,
    "a tensor without memory": _read_what_has_no_memory,
}


@expects("tells_of")
def test_errors_are_told_by_their_texts():
    assert autograd._TEXTS.keys() == ERRORS.keys()
    for what, run in {**ERRORS, "nothing": lambda: leaf().view(9)}.items():
        try:
            run()
        except RuntimeError as error:
            found = [each for each in ERRORS if autograd.tells_of(each, error)]
            assert found == [what] * (what in ERRORS)
        else:
            raise AssertionError(what)


@expects("execution_group")
def test_groups_of_backwards_are_seen():
    assert autograd.execution_group() is None
    with GraphExecGroup() as group:
        assert autograd.execution_group() is group


@expects("pull_back")
def test_the_engine_returns_gradients():
    x = leaf()
    ones = (torch.ones(2),)
    (grad,) = autograd.pull_back((x * x,), ones, (x,), create_graph=True)
    assert grad is not None
    assert grad.requires_grad
    assert same(grad, 2 * x)
    assert x.grad is None


def _refuse(_):
    raise AssertionError("a hook on saved tensors ran")


@expects(
    *("hooks_here", "pop_hooks", "push_hooks", "resume_hooks", "suspend_hooks"),
    *("top_hooks", "without_hooks"),
)
def test_hooks_are_suspended():
    x = leaf()
    with graph.saved_tensors_hooks(_refuse, _refuse):
        hooks = autograd.top_hooks(True)
        assert hooks == (_refuse, _refuse)
        autograd.pop_hooks()
        assert autograd.top_hooks(True) is None
        autograd.push_hooks(*hooks)
        out = autograd.without_hooks(torch.sin, x)
        assert autograd.hooks_here() == [hooks]
        suspended = autograd.suspend_hooks()
        assert autograd.top_hooks(True) is None
        autograd.resume_hooks(suspended)
        assert autograd.top_hooks(True) == hooks
    assert same(out, x.sin())


@expects("are_hooks_allowed", "leave_hooks_on")
def test_hooks_are_left_on():
    manager = graph.disable_saved_tensors_hooks
    (cell,) = manager.__closure__
    before = cell.cell_contents  # remat's own, after its import
    asked = [*autograd._HARMLESS]
    assert autograd.are_hooks_allowed() is True
    try:
        for harmless in (True, False):
            cell.cell_contents = manager.__wrapped__
            autograd.leave_hooks_on(_always if harmless else bool)
            assert autograd.are_hooks_left_on() is harmless
            with manager("refused"):
                assert autograd.are_hooks_allowed() is harmless
    finally:
        cell.cell_contents = before
        autograd._HARMLESS[:] = asked


def _always():
    return True


@expects("current_node", "nodes_made")
def test_nodes_are_seen_while_they_run():
    x, found = leaf(), list[int]()
    before = autograd.nodes_made()
    y = x * x
    assert autograd.sequence_number(y.grad_fn) == before
    assert autograd.nodes_made() > before

    def hook(_):
        found.append(autograd.sequence_number(autograd.current_node()))

    class Seen(Function):
        @staticmethod
        def forward(ctx, x) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            hook(grads)
            return grads[0]

    z = Seen.apply(y)
    z.sum().backward()
    assert found == [autograd.sequence_number(z.grad_fn)]
    assert found[0] >= before
    assert autograd.current_node() is None


@expects("current_task", "keeps_graph", "when_done")
def test_a_backward_tells_of_itself():
    x = leaf()
    told: list[Any] = []

    def tell(_):
        told.append((autograd.current_task() >= 0, autograd.keeps_graph()))
        autograd.when_done(note_end)

    def note_end():
        told.append("end")

    x.register_hook(tell)
    out = x.sin().sum()
    for keep in (True, False):
        torch.autograd.grad(out, x, retain_graph=keep)
    assert told == [(True, True), "end", (True, False), "end"]
    assert autograd.current_task() == -1


@expects("reads_what_is_written_late")
def test_rrelu_is_known_to_write_late():
    told: list[bool] = []

    def unpack(t):
        told.append(autograd.reads_what_is_written_late())
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        x = leaf()
        y = torch.nn.functional.rrelu(x * 2.0, training=True)
        out = (y.sum() + x.exp().sum(),)
    torch.autograd.grad(out, x)
    assert True in told
    assert False in told
    assert not autograd.reads_what_is_written_late()


class _Sine(Function):
    @staticmethod
    def forward(ctx, x) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()


@expects("saved_tensors", "saved_by", "unpack_hooks_of")
def test_nodes_tell_what_they_saved():
    x = leaf() * 1
    for out in (x.sin(), _Sine.apply(x)):
        saved = autograd.saved_by(out.grad_fn)
        assert [s.data_ptr() for s in saved] == [x.data_ptr()]
    with graph.saved_tensors_hooks(_pack, _unpack):
        assert autograd.unpack_hooks_of(x.sin().grad_fn) == [_unpack]
        assert autograd.unpack_hooks_of(_Sine.apply(x).grad_fn) == [_unpack]
    node = _Sine.apply(x).grad_fn
    with torch.no_grad():
        x.add_(1)
    (changed,) = autograd.saved_tensors(node)
    assert changed.data_ptr() == x.data_ptr()


@expects("pack_saved", "held_by")
def test_a_node_holds_what_brings_its_tensor_back():
    x = leaf() * 1
    out, copy, asked = _Sine.apply(x), x.detach().clone(), []
    node: Any = out.grad_fn

    def pack(saved):
        asked.append(saved)
        return copy.detach

    assert autograd.pack_saved(node, pack) is True
    assert asked[0] is x
    assert autograd.held_by(node) == [copy.detach]
    (found,) = node.saved_tensors
    assert found.data_ptr() == copy.data_ptr()
    assert found.grad_fn is x.grad_fn
    assert autograd.pack_saved(_Sine.apply(x).grad_fn, lambda _: None) is False


def _pack(tensor):
    return tensor


def _unpack(packed):
    return packed


@expects("shared_copy", "is_shared")
def test_clones_are_made_on_write():
    x = torch.ones(2)
    copy = tensors.shared_copy(x)
    assert isinstance(copy, Tensor)
    assert tensors.is_shared(copy) is True
    copy.add_(1)
    assert tensors.is_shared(copy) is False
    assert same(x, torch.ones(2))
    assert tensors.shared_copy(nn.Parameter(x)) is None


@expects("nodes_behind")
def test_nodes_behind_others_are_found_once():
    x = leaf()
    root = (x.sin() * x.cos()).grad_fn
    names = [type(node).__name__ for node in autograd.nodes_behind([root, None])]
    assert names[0] == "MulBackward0"
    assert sorted(names[1:]) == ["AccumulateGrad", "CosBackward0", "SinBackward0"]


@expects("AccumulateGrad", "is_held")
def test_leaves_are_found_in_the_graph():
    held = leaf()
    nodes = (held * 2).grad_fn, (leaf() * 2).grad_fn
    leaves: list[Any] = [node.next_functions[0][0] for node in nodes if node]
    assert {*map(type, leaves)} == {autograd.AccumulateGrad}
    autograd._references_to_unheld.cache_clear()
    with count_ops() as ops:
        assert [*map(autograd.is_held, leaves)] == [True, False]
    assert not ops  # none that a mode of a call takes for what its function does


@expects("is_graph_held", "use_count")
def test_references_are_counted():
    x = leaf()
    before = tensors.use_count(x)
    assert autograd.is_graph_held([x]) is False
    node = x.sin().grad_fn
    assert autograd.is_graph_held([x]) is True
    assert tensors.use_count(x) > before
    del node
    assert tensors.use_count(x) == before


@expects("NODES_ASKING_GRAD_MODE", "pull_in_grad_mode")
def test_some_formulas_ask_for_grad_mode():
    x = leaf()
    for op in (nn.functional.silu, nn.functional.mish, torch.logit):
        assert type(op(x).grad_fn).__name__ in autograd.NODES_ASKING_GRAD_MODE
    out = nn.functional.silu(x)
    autograd.pull_in_grad_mode([out])
    modes: list[bool] = []
    node = out.grad_fn

    def note(_):
        modes.append(torch.is_grad_enabled())

    node.register_prehook(note)
    torch.autograd.grad(out.sum(), x)
    assert modes == [True]
    assert torch.is_grad_enabled()


@expects("sequence_number")
def test_nodes_are_numbered():
    x = leaf()
    first = autograd.sequence_number(x.sin().grad_fn)
    assert first < autograd.sequence_number(x.cos().grad_fn)


@expects("StorageRef", "storage_id")
def test_storages_are_referred_to():
    x = torch.ones(2)
    ref = tensors.StorageRef(x.untyped_storage())
    assert ref.address == x.untyped_storage()._cdata == tensors.storage_id(x)
    assert tensors.storage_id(x) == tensors.storage_id(x.view(1, 2))
    assert tensors.storage_id(x) != tensors.storage_id(x.clone())
    before = ref.count()
    view = x.view(1, 2)
    assert ref.count() > before > 0
    del x, view
    assert ref.get() is None
    assert ref.count() == 0


@expects("preserved_version")
def test_a_change_is_not_counted():
    x = torch.ones(2)
    with tensors.preserved_version(x):
        x.add_(1)
    assert x._version == 0
    assert same(x, torch.full((2,), 2.0))


@expects("once_differentiable_function")
def test_what_is_differentiated_once_is_known():
    rules: dict[str, Any] = {
        "forward": staticmethod(_copied),
        "backward": staticmethod(_as_it_is),
    }
    often = type("Often", (Function,), rules)
    rules["backward"] = staticmethod(once_differentiable(_as_it_is))
    once = type("Once", (Function,), rules)
    nodes = [f.apply(leaf()).grad_fn for f in (often, once)]
    assert [*map(autograd.once_differentiable_function, nodes)] == [None, once]


def _copied(ctx, x):
    del ctx
    return x.clone()


def _as_it_is(ctx, *cotangents):
    del ctx
    return cotangents[0]


@expects("is_for_transforms")
def test_a_function_for_transforms_sets_its_context_up():
    apart = type("Apart", (Function,), {"setup_context": staticmethod(_as_it_is)})
    assert autograd.is_for_transforms(apart)
    assert not autograd.is_for_transforms(Function)


@expects("marked")
def test_marks_are_contexts():
    mark = autograd.marked("here")
    assert type(mark) is torch._C._profiler._RecordFunctionFast
    with mark:
        pass
