"""What the shims of `modes` expect of torch."""

import functools
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from support.shims import expects, leaf, same
from torch import Tensor, overrides
from torch.utils import _python_dispatch

from remat._torch import autograd, batches, levels, modes, operators, tensors, tracing


class _Mode(overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return "seen"


class _Noting(modes.LeanDispatchMode):
    """Notes the operations that it sees, and in a list that it saw one."""

    def __init__(self, seen: list[Any] | None = None):
        super().__init__()
        self.ops: list[Any] = []
        self.seen = [] if seen is None else seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        self.seen.append(self)
        return func(*args, **(kwargs or {}))


class _Class(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "seen"


@expects(
    *("function_mode_count", "function_modes", "under_function_modes", "is_unwatched")
)
def test_function_modes_are_exchanged():
    x, negative = torch.ones(2), -torch.ones(2)
    assert modes.is_unwatched(x) is True
    assert modes.function_mode_count() == 0
    with _Mode() as mode:
        assert modes.function_modes() == [mode]
        assert modes.is_unwatched(x) is False
        plain = modes.under_function_modes([], torch.neg, x)
        assert torch.neg(x) == "seen"
    assert same(plain, negative)
    assert modes.under_function_modes([mode], torch.neg, x) == "seen"
    assert modes.function_mode_count() == 0


@expects("dispatch_mode_count")
def test_dispatch_modes_are_counted():
    assert modes.dispatch_mode_count() == 0
    with modes.LeanDispatchMode():
        assert modes.dispatch_mode_count() == 1


@expects("CHOOSING")
def test_torch_takes_another_algorithm_under_a_mode():
    """And under one of remat's the same as without, as one operation."""
    a = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    a = a @ a.T
    for name in operators.CHOOSING:
        plain = getattr(torch.linalg, name.removeprefix("linalg_"))
        values, seen = plain(a), _Noting()
        with seen:
            ours = plain(a)
        assert same(ours, values)
        assert [*map(str, seen.ops)] == [f"aten.{name}.default"]
        with _OfOthers() as others:
            plain(a)
        assert str(others.ops[0]).startswith("aten._linalg_")


class _OfOthers(_python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@expects("no_torch_function", "no_torch_functions", "torch_functions")
def test_torch_functions_are_switched():
    x = torch.ones(2).as_subclass(_Class)
    with modes.no_torch_functions():
        assert torch.neg(x) != "seen"
        with modes.torch_functions():
            assert torch.neg(x) == "seen"
    silent = type(
        "Silent", (Tensor,), {"__torch_function__": tensors.no_torch_function}
    )
    assert type(torch.neg(torch.ones(2).as_subclass(silent))) is Tensor


@expects("SHARED_COPY")
def test_a_mode_sees_shared_copies():
    with _Noting() as mode:
        tensors.shared_copy(torch.ones(2))
    assert mode.ops[-1] is tensors.SHARED_COPY


@expects("compiled_outside_modes")
def test_what_torch_compiles_is_out_of_sight():
    utils = modes._higher_order
    names = utils._maybe_compile_and_run_fn.__code__.co_names
    assert utils._hop_compile_and_call.__name__ in names
    assert hasattr(utils._hop_compile_and_call, "__wrapped__")
    count = torch._C._len_torch_dispatch_stack
    depth = modes.compiled_outside_modes(count)
    with _Noting():
        assert (count(), depth()) == (1, 0)
        assert modes._read_flags(modes._dispatch)[0] is True
    assert count() == 0


@expects("telling_what_is_read")
def test_modes_that_are_left_are_told_what_is_read():
    told, depth = [], torch._C._len_torch_dispatch_stack

    class Told(_Noting):
        def note_unseen_reads(self, values):
            told.append((any(value is x for value in values), depth()))

    x, flag = torch.ones(3), torch.tensor(True)
    with Told():
        out = torch.cond(flag, lambda y: y * x, lambda y: y + x, (torch.ones(3),))
    assert torch.equal(out, x)
    assert told == [(True, 0)]  # the branches close over it
    chosen = nullcontext(lambda graph, examples: graph.forward)
    tracing.LEFT.modes = [Told()]
    try:
        with tracing.telling_what_is_read(lambda: chosen)() as backend:
            backend(torch.nn.Identity(), [x])(x)
    finally:
        tracing.LEFT.modes = ()
    assert told[1:] == [(True, 0)]


@expects("call_kernel")
def test_kernels_resolve_lazy_bits():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        assert _is_conjugate_excluded()
        assert modes.call_kernel(_is_conjugate_excluded) is False
        assert _is_conjugate_excluded()


def _is_conjugate_excluded():
    key = torch._C.DispatchKey.Conjugate
    return torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def _flags():
    return {k: v for k, v in vars(_python_dispatch).items() if type(v) is bool}


@contextmanager
def _with_flags_down():
    # Modes of two threads that overlap leave one of torch's flags set for good.
    before = _flags()
    vars(_python_dispatch).update(dict.fromkeys(before, False))
    try:
        yield
    finally:
        vars(_python_dispatch).update(before)


@expects(
    *("LeanDispatchMode", "alias", "undisturbed", "unseen", "viewed"),
    "without_dispatch_mode",
)
@_with_flags_down()
def test_dispatch_modes_are_entered_and_left():
    before = _flags()
    with _python_dispatch.TorchDispatchMode():
        inside = _flags()

    class Ignoring(_Noting):
        @classmethod
        def ignore_compile_internals(cls):
            return True

    x, mode = torch.ones(4), _Noting()
    assert isinstance(mode, modes.LeanDispatchMode)
    with Ignoring():
        assert not _python_dispatch.any_torch_dispatch_mode_on_stack()
        assert modes._read_flags(modes._dispatch)[-1] is before[modes._FLAGS[-1]]
    with mode:
        assert _flags() == inside != before
        x.sin()
        alone = functools.partial(modes.without_dispatch_mode, mode)
        for quiet in (modes.undisturbed, modes.unseen, alone):
            with quiet():  # some are at work as soon as they are made
                x.cos()
        view = modes.viewed(x, (2,), (2,), 1)
        other = modes.alias(x)
    assert mode.ops == [torch.ops.aten.sin.default]
    assert (view.shape, view.storage_offset()) == ((2,), 1)
    assert other._base is x
    assert _flags() == before


@expects("outside_all_dispatch_modes", "outside_dispatch_mode")
def test_what_is_entered_inside_of_a_mode_is_left_with_it():
    seen: list[Any] = []
    x = torch.ones(2)
    around, mode, inner = (_Noting(seen) for _ in range(3))
    with around, mode, inner:
        with modes.outside_dispatch_mode(mode):
            x.sin()
        assert seen == [around]
        x.sin()
        assert seen == [around, inner, mode, around]
        seen.clear()
        with modes.outside_all_dispatch_modes():
            x.sin()
            assert not any(_flags().values())
        assert not seen
        x.sin()
        assert seen == [inner, mode, around]


@expects("dispatch_modes", "modes_between", "under_dispatch_modes")
def test_modes_are_put_around_others_and_entered_again():
    seen: list[Any] = []
    x = torch.ones(2)
    mode, outside, inside = (_Noting(seen) for _ in range(3))
    with _with_flags_down():
        before = _flags()
        with mode:
            with modes.modes_between(mode, outside, inside):
                assert modes.dispatch_modes() == [outside, mode, inside]
                x.sin()
            assert seen == [inside, mode, outside]
            assert modes.dispatch_modes() == [mode]
        seen.clear()
        with modes.under_dispatch_modes([outside, mode]):
            x.sin()
            assert _flags() != before or not modes._has_flags
        assert seen == [mode, outside]
        assert (modes.dispatch_modes(), _flags()) == ([], before)


@expects("below_autograd", "detached")
def test_operations_run_below_autograd():
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), modes.below_autograd():
        y = x.sin()
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        without_graph = modes.detached(x)
        detached = x.detach()
    assert not y.requires_grad
    assert product.dtype is not torch.bfloat16
    with torch.no_grad():
        x.add_(1.0)
    assert without_graph._version == x._version == 1
    assert detached._version == 0, "the shim is not needed any more"


@expects("flat_view")
def test_storages_are_seen_as_another_dtype():
    x = torch.ones(3, 2, dtype=torch.complex64)[1:]
    flat = modes.flat_view(x, torch.float32)
    assert (flat.shape, flat.dtype) == ((12,), torch.float32)
    assert flat.data_ptr() == x.untyped_storage().data_ptr()


@expects("leave_dispatch_mode", "leave_function_mode")
@_with_flags_down()
def test_modes_are_left_in_another_order():
    seen: list[Any] = []
    mode, inner = _Noting(seen), _Noting(seen)
    mode.__enter__()
    inner.__enter__()
    try:
        modes.leave_dispatch_mode(mode)
        torch.ones(2)
    finally:
        while torch._C._len_torch_dispatch_stack():
            _python_dispatch._pop_mode()
    assert seen == [inner]
    outer, function_mode = _Mode(), _Mode()
    overrides._push_mode(outer)
    overrides._push_mode(function_mode)
    try:
        modes.leave_function_mode(outer)
        assert modes.function_modes() == [function_mode]
    finally:
        while torch._C._len_torch_function_stack():
            overrides._pop_mode()


# --- Levels ---


def _sine(x):
    """Return a sine whose gradient is twice as much, by which it is known."""
    rules = {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
    function = type("Sine", (levels.SingleLevelFunction,), rules)
    layer = levels.current_layer()
    if layer is None:
        return function.apply(None, x)
    how = layer, levels.kind_of(layer)
    return levels.apply_at_level(function.apply, how, x)


def _forward(ctx, layer, x):
    ctx.save_for_backward(x)
    if layer is None:
        return x.sin()
    level = layer[0].level()
    below = levels.unwrap_for_grad(x, level)
    return levels.wrap_for_grad(levels.call_below(*layer, _sine, below), level)


def _backward(ctx, *cotangents):
    (x,) = autograd.saved_tensors(ctx)
    return None, cotangents[0] * x.cos() * 2


@expects(
    *("SingleLevelFunction", "apply_at_level", "call_below", "current_layer"),
    *("kind_of", "unwrap_for_grad", "wrap_for_grad"),
)
def test_calls_are_recorded_at_each_level():
    x = torch.ones(2)
    with levels.grad_level() as one:
        a = levels.leaf_at(one, x, requires_grad=True)
        with levels.grad_level() as two:
            b = levels.leaf_at(two, a, requires_grad=True)
            first = levels.unwrap_for_grad(_pulled_back(_sine(b), b), two)
        second = levels.unwrap_for_grad(_pulled_back(first, a), one)
        first = levels.unwrap_for_grad(first, one)
    assert same(first, x.cos() * 2)
    assert same(second, -2 * x.sin())
    base = leaf()
    out = _sine(base)
    assert same(_pulled_back(out, base), base.cos() * 2)
    node = out.grad_fn
    assert node._compiled_autograd_key()  # asked for by compiled autograd


def _pulled_back(out, x):
    # Not by `torch.func.grad`, which imports Dynamo.
    ones = (torch.ones_like(out),)
    return autograd.pull_back((out,), ones, (x,), create_graph=True)[0]


@expects("JVP", "kinds_here", "lifted")
def test_forward_levels_are_known():
    x = torch.ones(2)
    with levels.eager_transforms.jvp_increment_nesting():
        layer = levels.current_layer()
        assert layer is not None
        assert levels.kind_of(layer) == levels.JVP
        assert levels.kinds_here() == [levels.JVP]
        (up,) = levels.lifted(layer, levels.JVP, [x])
        assert levels.maybe_get_level(up) == layer.level()


@expects("call_at_jvp", "taken_apart_at_jvp", "unpack_dual")
def test_dual_numbers_are_pushed_forward():
    x, tangent = torch.ones(2), torch.full((2,), 3.0)

    def fn(x, tangent):
        # Not by `make_dual`, which imports rules that take a second.
        return torch._VF._make_dual(x, tangent, level=0), x, None

    outs, (found, *others) = levels.call_at_jvp(fn, [x, tangent], [], [])
    assert outs[0].tolist() == x.tolist()
    assert found is not None
    assert found.tolist() == tangent.tolist()
    assert others == [None, None]
    assert outs[2] is None


@expects(
    *("GRAD", "are_all_vmaps", "base_tensor", "below_all_levels", "grad_level"),
    *("is_of_level_above", "is_of_torch_func", "leaf_at", "unwrap_dead"),
    *("levels_requiring_grad", "without_node"),
)
def test_a_level_is_opened():
    x = torch.ones(2)
    with levels.grad_level() as level:
        t = levels.leaf_at(level, x, requires_grad=True)
        assert t.requires_grad
        assert t is not x
        assert levels.maybe_get_level(t) == level
        assert levels.base_tensor(t) is x
        assert levels.levels_requiring_grad(t) == 1
        assert levels.unwrap_dead(t) is t
        assert levels.is_of_level_above(t) is False
        assert levels.call_below(None, levels.VMAP, levels.is_of_level_above, t) is True
        assert levels.below_all_levels(levels.current_layer) is None
        layer = levels.current_layer()
        assert layer is not None
        assert levels.kind_of(layer) == levels.GRAD
        assert levels.are_all_vmaps() is False
        alone = levels.without_node(t.sin())
        assert alone.grad_fn is None
        assert levels.maybe_get_level(alone) == level
        assert [*map(levels.is_of_torch_func, (t, x))] == [True, False]
    assert levels.unwrap_dead(t) is x
    assert levels.are_all_vmaps() is True
    # The vmap of `is_grads_batched`.
    assert _nesting() == 1
    torch._C._vmapmode_increment_nesting()
    try:
        assert levels.below_all_levels(_nesting) == 1
        assert _nesting() == 2
    finally:
        torch._C._vmapmode_decrement_nesting()


@expects("Wrapping", "unwrapped")
def test_a_tensor_is_wrapped_again():
    x, ones = torch.ones(2, 3), torch.ones(3, 2)
    with levels.grad_level() as level:
        t = levels.wrap_for_grad(x, level)
        assert batches.unwrapped(t) is x
        wrapping = batches.Wrapping.of(t)
        assert wrapping.is_dead is False
        again = wrapping.wrap(ones)
        assert levels.maybe_get_level(again) == level
        assert batches.unwrapped(again) is ones
    assert wrapping.is_dead is True

    def each(t):
        again = batches.Wrapping.of(t).wrap(x)
        assert batches.unwrapped(t) is ones
        assert batches.unwrapped(again) is x
        return again

    assert torch.func.vmap(each, 1)(ones).tolist() == x.T.tolist()


@expects("is_legacy_batch")
def test_the_vmap_of_gradients_makes_batches_of_its_own():
    level = torch._C._vmapmode_increment_nesting()
    try:
        batch = torch._add_batch_dim(torch.ones(3, 2), 0, level)
        assert batch.shape == (2,)
        assert levels.is_legacy_batch(batch) is True
        assert levels.base_tensor(batch) is batch
    finally:
        torch._C._vmapmode_decrement_nesting()
    assert levels.is_legacy_batch(torch.ones(2)) is False


def _nesting():
    depth = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return depth


@expects("requires_grad_at_any_level")
def test_levels_below_are_asked():
    asked: list[bool] = []

    def ask(x):
        asked.append(levels.requires_grad_at_any_level(x))
        return x

    torch.func.vmap(ask)(leaf())
    torch.func.vmap(ask)(torch.ones(2))
    assert asked == [True, False]


@expects(
    *("VMAP", "batch", "batched", "batched_again", "batched_here"),
    *("batch_size", "is_batch_of_cotangents", "transforms", "unbatched"),
)
def test_a_batch_is_sent_below():
    x = torch.ones(2, 3)

    def lower(leaves, dims, size, randomness):
        assert levels.current_layer() is None
        outs, dims = levels.batch(_sine_of, dims, size, randomness)(*leaves)
        return outs, dims, size

    def mapped(t):
        layer = levels.current_layer()
        assert layer is not None
        assert levels.kind_of(layer) == levels.VMAP
        assert levels.call_below(None, levels.VMAP, levels.current_layer) is None
        assert levels.is_batch_of_cotangents([x]) is True
        assert levels.is_batch_of_cotangents([t]) is False
        assert levels.are_all_vmaps() is True
        assert levels.transforms() == (levels.VMAP,)
        assert levels.batch_size() == 3
        below, hows = levels.unbatched([t])
        again = levels.batched_again(_sine_of, hows)
        (outs, dims) = levels.below_all_levels(again, *below)
        assert same(outs[0].movedim(dims[0], 1), x.sin())
        (here,) = levels.batched_here(below, hows)
        assert here.shape == t.shape
        assert levels.base_tensor(here) is below[0]
        (out,), size = levels.batched([t], lower)
        assert out.shape == (2,)
        assert size == 3
        return out

    assert same(torch.func.vmap(mapped, in_dims=1, out_dims=1)(x), x.sin())
    assert levels.is_batch_of_cotangents([x]) is False
    assert levels.transforms() == ()
    assert levels.batch_size() == 1


def _sine_of(x):
    assert x.shape == (2,)
    return (x.sin(),)


@expects("is_shared_by_examples")
def test_maps_tell_their_randomness():
    x = torch.ones(2)
    asked: list[bool] = []

    def ask(t):
        asked.append(levels.is_shared_by_examples(x))
        asked.append(levels.is_shared_by_examples(t))
        return t

    torch.func.vmap(ask, randomness="different")(x)
    torch.func.vmap(ask, randomness="same")(x)
    assert asked == [True, False, False, False]


@expects("without_grad_mode")
def test_grad_mode_is_switched_off():
    assert levels.without_grad_mode(torch.is_grad_enabled) is False
    assert torch.is_grad_enabled()
    with torch.inference_mode(), torch._C._ExcludeDispatchKeyGuard(_AUTOGRAD):
        assert levels.without_grad_mode(torch.is_inference_mode_enabled) is False


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)


@expects("requires_grad_above", "without_dead_levels", "is_of_ended_vmap")
def test_levels_above_and_levels_that_ended_are_told():
    asked, left = [], []

    def within(x):
        def mapped(row):
            product = x * row
            asked.append(levels.requires_grad_above(product, 1))
            asked.append(levels.requires_grad_above(product, 2))
            asked.append(levels.is_of_ended_vmap(row))
            left.append(row)
            return row

        torch.func.vmap(mapped)(torch.ones(3, 2))
        left.append(x)
        return (x * x).sum()

    # The first level is that of the gradient, the second one of the vmap.
    x = torch.ones(2)
    torch.func.grad(within)(x)
    assert asked == [False, False, False]
    assert levels.is_of_ended_vmap(left[0]) is True
    assert levels.without_dead_levels(left[1]) is x


@expects("lowered", "raised")
def test_tensors_of_a_vmap_are_taken_below_it_and_put_back():
    x, found = torch.arange(6.0).view(3, 2), []

    def mapped(row):
        (whole,), dims = batches.lowered([row], [row])
        found.append((whole, dims))
        (again,) = batches.raised([whole + 1], dims, [row])
        return again

    out = torch.func.vmap(mapped)(x)
    ((whole, dims),) = found
    assert whole.shape == (3, 2)
    assert [list(each) for each in dims] == [[0]]
    assert same(out, x + 1)


@expects("as_one_operation")
def test_one_operation_runs_under_our_modes_and_what_is_inside_under_the_others():
    seen = []

    class Ours(modes.LeanDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(("ours", func.name()))
            return self.inside(*args)  # as the kernel of an operation does

    class Theirs(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(("theirs", func.name()))
            return func(*args, **(kwargs or {}))

    x, ours = torch.ones(2), Ours()

    def call(inside):
        ours.inside = inside
        return torch.neg(x)

    with Theirs(), ours:
        out = modes.as_one_operation(call, torch.sin)
    assert seen == [("ours", "aten::neg"), ("theirs", "aten::sin")]
    assert same(out, x.sin())
