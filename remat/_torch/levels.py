"""The levels of torch.func: which there are, what is on them, calls below them.

Invariant: a level left is entered again, also after an exception.
Rejected: a HigherOrderOperator, or `Function.apply` under torch.func. They need less
private API, but cost 1.2 and 2.7 million instructions a call where this costs a third
of a million (torch 2.13).
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

# Deleted by: public names for these.
from torch._C._functorch import (
    CGradInterpreterPtr,
    CInterpreter,
    CJvpInterpreterPtr,
    CVmapInterpreterPtr,
    RandomnessType,
    TransformType,
    _unwrap_for_grad as unwrap_for_grad,
    _wrap_for_grad as wrap_for_grad,
    get_interpreter_stack,
    get_single_level_autograd_function_allowed,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor as is_of_torch_func,
    is_legacy_batchedtensor,
    maybe_get_bdim,
    maybe_get_level,
    peek_interpreter_stack as current_layer,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
    set_single_level_autograd_function_allowed,
    unwrap_if_dead as unwrap_dead,
)
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import (
    coerce_cinterpreter,
    retrieve_current_functorch_interpreter,
)
from torch._functorch.vmap import (
    restore_vmap as batch,
    unwrap_batched,
    wrap_batched,
)
from torch.autograd import forward_ad, function

from remat._torch.autograd import (
    MaybeTensors,
    base_dual_level_active,
    dual_level_active,
    is_forward_ad_enabled,
    set_forward_ad,
    set_grad_enabled,
)


# Deleted by: enums that compare as cheaply as integers.
_kinds: Any = TransformType
VMAP: int = _kinds.Vmap.value
GRAD: int = _kinds.Grad.value
JVP: int = _kinds.Jvp.value
_KNOWN = {VMAP, GRAD, JVP}

# Deleted by: gradients with `is_grads_batched` being levels of torch.func.
is_legacy_batch = is_legacy_batchedtensor


def kind_of(layer: CInterpreter) -> int:
    """Return what transform a level of torch.func is of; refuse unknown ones."""
    key: Any = layer.key()
    kind: int = key.value
    if kind not in _KNOWN:
        raise NotImplementedError(f"remat: under {key.name} of torch.func")
    return kind


# Deleted by: a public stack of the transforms that are active.
def kinds_here() -> list[int]:
    """Return the kinds of the levels that are active, outermost first."""
    layers: Any = get_interpreter_stack() or ()
    return [layer.key().value for layer in layers]


# Deleted by: a public `Tensor.unwrap()` for torch.func wrappers.
def base_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor under all torch.func wrappers."""
    while is_of_torch_func(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_of_level_above(tensor: Tensor) -> bool:
    """Say whether a tensor belongs to a level above the innermost active one."""
    tensor = unwrap_dead(tensor)
    if not is_of_torch_func(tensor):
        return False
    layer = current_layer()
    return maybe_get_level(tensor) > (layer.level() if layer is not None else 0)


def without_dead_levels(tensor: Tensor) -> Tensor:
    """Return a tensor without its outermost wrappers of levels that have ended."""
    while (below := unwrap_dead(tensor)) is not tensor:
        tensor = below
    return tensor


# Deleted by: batched tensors of a vmap that has ended saying so.
def is_of_ended_vmap(tensor: Tensor) -> bool:
    """Say so of a tensor without dead levels, as far as can be told.

    A vmap may have the number of one that has ended. Then its size may tell.
    """
    if is_of_level_above(tensor):
        return True
    if not is_batchedtensor(tensor):
        return False
    level = maybe_get_level(tensor)
    layers = [ly for ly in get_interpreter_stack() or () if ly.level() == level]
    if not layers or kind_of(layers[0]) != VMAP:
        return True
    size = CVmapInterpreterPtr(layers[0]).batchSize()
    return get_unwrapped(tensor).shape[maybe_get_bdim(tensor)] != size


def requires_grad_at_any_level(tensor: Tensor) -> bool:
    """Say whether some level, torch.func's or the base, differentiates `tensor`."""
    while not tensor.requires_grad:
        if not is_of_torch_func(tensor):
            return False
        tensor = get_unwrapped(tensor)
    return True


def requires_grad_above(tensor: Tensor, level: int) -> bool:
    """Say whether a level above another one differentiates a tensor.

    To be called where no TorchFunctionMode sees it.
    """
    tensor = unwrap_dead(tensor)
    while is_of_torch_func(tensor) and maybe_get_level(tensor) > level:
        if tensor.requires_grad:
            return True
        tensor = get_unwrapped(tensor)
    return False


def levels_requiring_grad(tensor: Tensor) -> int:
    """Return how many levels, the base included, differentiate a tensor backward."""
    count = int(tensor.requires_grad)
    while is_of_torch_func(tensor):
        tensor = get_unwrapped(tensor)
        count += tensor.requires_grad
    return count


# Deleted by: `Function.apply` sending a call to torch.func's levels only where the
# Function asks for it. (Up to torch 2.13 it also inspects signatures on each call.)
class SingleLevelFunction(function._SingleLevelFunction):
    """A Function whose `apply` makes a node at one level only."""

    apply: Callable[..., Any]

    # For compiled autograd, which asks for it and finds it on `Function` alone.
    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        return (ctx._autograd_function_id,)


# Deleted by: a static single-level Function in functorch.
def apply_at_level(apply: Callable[..., Any], *args: Any) -> Any:
    """Make a node at one level of torch.func, which torch allows only if told so."""
    before = get_single_level_autograd_function_allowed()
    set_single_level_autograd_function_allowed(True)
    try:
        return apply(*args)
    finally:
        set_single_level_autograd_function_allowed(before)


def lifted(layer: CInterpreter, kind: int, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves as tensors of a grad or jvp level.

    Else that level would see tangents of the level below, in what is constant for it.
    """
    level = (CGradInterpreterPtr if kind == GRAD else CJvpInterpreterPtr)(layer)
    return [*map(level.lift, leaves)]


def call_below(layer: Any, kind: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` below the innermost level, in the modes that was entered in."""
    before, forward_ad = torch.is_grad_enabled(), is_forward_ad_enabled()
    if kind == GRAD:
        # Off inside of a level, it is off for all below as well.
        set_grad_enabled(before and CGradInterpreterPtr(layer).prevGradMode())
        changes = not forward_ad
    elif kind == VMAP:
        changes = False
    else:
        changes = forward_ad != CJvpInterpreterPtr(layer).prevFwdGradMode()
    if changes:
        set_forward_ad(not forward_ad)
    popped = pop_dynamic_layer_stack()
    try:
        return fn(*args)
    finally:
        push_dynamic_layer_stack(popped)
        set_grad_enabled(before)
        if changes:
            set_forward_ad(forward_ad)


# Deleted by: `torch.autograd.grad(is_grads_batched=True)` saying that it is at work.
def is_batch_of_cotangents(primals: Sequence[Tensor]) -> bool:
    """Say whether a vmap over the base is the only level, and batches no primal."""
    is_alone = kinds_here() == [VMAP]
    return is_alone and not any(map(is_of_torch_func, primals))


# Deleted by: a public stack of the transforms that are active.
def batch_size() -> int:
    """Return the product of the sizes of all vmaps around."""
    layers = [
        layer for layer in get_interpreter_stack() or () if kind_of(layer) == VMAP
    ]
    levels: list[Any] = [*map(coerce_cinterpreter, layers)]
    return math.prod(level.batch_size() for level in levels)


def transforms() -> tuple[int, ...]:
    """Return the kinds of the levels, outermost first, but for those of `grad`."""
    return (*[kind for kind in kinds_here() if kind != GRAD],)


# Deleted by: a public context below all levels of torch.func, and below the vmap of
# `is_grads_batched`, a mode of its own.
def below_all_levels(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` as if no transform were active."""
    depth = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    if not depth and current_layer() is None:
        return fn(*args)
    popped = []
    while current_layer() is not None:
        popped.append(pop_dynamic_layer_stack())
    for _ in range(depth):
        torch._C._vmapmode_decrement_nesting()
    try:
        return fn(*args)
    finally:
        for _ in range(depth):
            torch._C._vmapmode_increment_nesting()
        for layer in reversed(popped):
            push_dynamic_layer_stack(layer)


# Deleted by: wrappers of torch.func that can be detached from the node they have.
def without_node(tensor: Tensor) -> Tensor:
    """Return a tensor of a torch.func level without its node at that level."""
    level = maybe_get_level(tensor)
    return wrap_for_grad(unwrap_for_grad(tensor, level), level)


Flat: TypeAlias = tuple[Any, ...]
_Found = TypeVar("_Found")


# Deleted by: `torch.func.vmap` returning the out_dims that a function has.
def batched(
    leaves: Sequence[Tensor],
    lower: Callable[[Flat, Flat, int, str], tuple[Flat, Flat, _Found]],
) -> tuple[Flat, _Found]:
    """Send a call below the innermost vmap level.

    `lower(physical, in_dims, batch_size, randomness)` is called there. It returns the
    outputs, their out_dims, and what else it found, which is returned as it is.
    """
    interpreter: Any = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    physical, in_dims = unwrap_batched(tuple(leaves), level)
    if True in map(is_of_torch_func, physical):  # a level may have ended
        physical = (*map(without_dead_levels, physical),)
    size, randomness = interpreter.batch_size(), interpreter.randomness()
    with interpreter.lower():
        outs, dims, found = lower(physical, in_dims, size, randomness)
    return (wrap_batched(outs, dims, level) if outs else ()), found


def are_all_vmaps() -> bool:
    """Say whether no active level differentiates."""
    top: Any = current_layer()
    return (top is None or top.key().value == VMAP) and {*kinds_here()} <= {VMAP}


How: TypeAlias = tuple[Flat, int, str]  # in_dims, batch size, randomness


def unbatched(leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[How]]:
    """Return tensors below all vmap levels, and how `batched_again` puts them back."""
    hows: list[How] = []
    below: Any = tuple(leaves)
    for layer in reversed(get_interpreter_stack() or ()):
        level: Any = coerce_cinterpreter(layer)
        below, in_dims = unwrap_batched(below, level.level())
        hows.append((in_dims, level.batch_size(), level.randomness()))
    return [*below], hows


def batched_again(fn: Callable[..., Any], hows: Sequence[How]) -> Callable[..., Any]:
    """Return a function of tensors below vmap levels, which runs `fn` in such ones."""
    for how in hows:
        fn = batch(fn, *how)
    return fn


def batched_here(leaves: Sequence[Tensor], hows: Sequence[How]) -> list[Tensor]:
    """Undo `unbatched`, below the same levels."""
    batched: Any = tuple(leaves)
    pairs = zip(get_interpreter_stack() or (), reversed(hows), strict=True)
    for layer, (in_dims, _, _) in pairs:
        level: Any = coerce_cinterpreter(layer)
        batched = wrap_batched(batched, in_dims, level.level())
    return [*batched]


# Deleted by: torch.func levels that are lowered keeping inference mode switched off.
def without_grad_mode(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn`, which may switch grad mode on, where it is off.

    Autograd can make a graph there, also below a level in inference mode.
    """
    before = torch.is_grad_enabled()
    if not before and torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
        with torch.inference_mode(False):
            return fn(*args)
    set_grad_enabled(False)
    try:
        return fn(*args)
    finally:
        set_grad_enabled(before)


_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality

# Deleted by: a public way to open a grad level without `torch.func.vjp`'s graph.
grad_level = eager_transforms.grad_increment_nesting


def leaf_at(level: int, tensor: Tensor, *, requires_grad: bool) -> Tensor:
    """Return `tensor` as an argument of the grad level just opened."""
    wrapped = wrap_for_grad(tensor, level)
    if requires_grad:
        with eager_transforms.enable_inplace_requires_grad(True):
            wrapped.requires_grad_()
    return wrapped


# Deleted by: a public way to ask a vmap for its `randomness`, and what it batches.
def is_shared_by_examples(tensor: Tensor) -> bool:
    """Say whether examples of the innermost vmap share a tensor, and are to differ."""
    layer: Any = current_layer()
    if layer is None or layer.key().value != VMAP:
        return False
    if CVmapInterpreterPtr(layer).randomness() != RandomnessType.Different:
        return False
    return not is_batchedtensor(tensor) or maybe_get_level(tensor) != layer.level()


# Deleted by: `torch.func.jvp` telling which outputs have no tangent, and working within
# a `forward_ad.dual_level`.
def call_at_jvp(
    fn: Callable[..., MaybeTensors],
    primals: Sequence[Tensor],
    given: Sequence[int],
    tangents: Sequence[Tensor],
    written: Sequence[int] = (),
) -> tuple[list[Any], list[Any]]:
    """Call `fn` on dual numbers of a new jvp level; return its results, taken apart.

    The arguments with the indices `given` have tangents. What has none has None. A
    level refuses writes to what is not of it: `written` may be written to.
    """
    is_around = dual_level_active()
    may_be_dual = base_dual_level_active()  # one may have a tangent there
    with (
        eager_transforms.jvp_increment_nesting() as level,
        forward_ad._set_fwd_grad_enabled(True),
        contextlib.nullcontext() if is_around else forward_ad.dual_level(),
    ):
        duals = [
            wrap_for_grad(t, level)
            if may_be_dual or is_of_torch_func(t) or i in written
            else t
            for i, t in enumerate(primals)
        ]
        for i in written:  # a constant may have attributes
            duals[i].__dict__ = primals[i].__dict__
        for i, t in zip(given, tangents, strict=True):
            duals[i] = forward_ad.make_dual(primals[i], t)
        pairs = [
            (None, None) if o is None else taken_apart_at_jvp(level, o)
            for o in fn(*duals)
        ]
    return [o for o, _ in pairs], [t for _, t in pairs]


def taken_apart_at_jvp(level: int, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    primal, tangent = unpack_dual(tensor)
    if tangent is None:
        return unwrap_for_grad(tensor, level), None
    return unwrap_for_grad(primal, level), unwrap_for_grad(tangent, level)


def unpack_dual(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a tensor of the innermost level and its tangent, None if it has none."""
    if tensor.is_floating_point() or tensor.is_complex():
        primal, tangent = forward_ad.unpack_dual(tensor)
        if tangent is not None:
            return primal, tangent
    return tensor, None
