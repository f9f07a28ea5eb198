"""What the shims of `levels` expect of torch.

Invariant: a check fails where a name of it is missing or does something else.
Rejected: `torch.func.grad` in a check. It imports Dynamo, which takes seconds.
"""

import torch
from support.shims import expects, leaf, same

from remat._torch import autograd, levels


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


@expects("JVP", "lifted")
def test_forward_levels_are_known():
    x = torch.ones(2)
    with levels.eager_transforms.jvp_increment_nesting():
        layer = levels.current_layer()
        assert layer is not None
        assert levels.kind_of(layer) == levels.JVP
        (up,) = levels.lifted(layer, levels.JVP, [x])
        assert levels.maybe_get_level(up) == layer.level()


@expects("push_forward", "taken_apart_at_jvp", "unpack_dual")
def test_dual_numbers_are_pushed_forward():
    x, tangent = torch.ones(2), torch.full((2,), 3.0)

    def fn(x, tangent):
        # Not by `make_dual`, which imports rules that take a second.
        return torch._VF._make_dual(x, tangent, level=0), x, None

    outs, (found, *others) = levels.push_forward(fn, [x, tangent], [], [])
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
        assert levels.call_below_vmap(levels.is_of_level_above, t) is True
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
    *("VMAP", "batch", "batched", "batched_again", "batched_here", "call_below_vmap"),
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
        assert levels.call_below_vmap(levels.current_layer) is None
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
