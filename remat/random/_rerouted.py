"""Rules for torch's random functions inside `bind`: each draws from a key instead.

A rule is called with `draw`, which returns the next key, and the arguments of the torch
function that it replaces. The numbers have torch's dtypes and defaults.

Invariant: a call that draws nothing takes no key, and runs torch's own kernel.
Rejected: filling `torch.empty(...)` in place. Under vmap the key may be batched when
the empty tensor is not. Rejected: passing a dropout mask to torch's attention kernel.
It takes one, but it warns in every process that this is meant for tests.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from remat.random import _samplers
from remat.random._choices import inverted, noisy, permutation
from remat.random._draw import FORMATS, is_readable, shape_like, wide
from remat.random._dropout import dropout
from remat.random._key import Key


Draw = Callable[[], Key]
Rule = Callable[..., Any]
Sampler = Callable[..., Tensor]


def _check(is_valid: bool, what: str, got: Any) -> None:
    if not is_valid:
        raise ValueError(f"remat: {what}, got {got}.")


def _check_all(holds: Callable[[], Tensor], t: Tensor, what: str) -> None:
    """Check values if reading them is free."""
    if is_readable(t):
        _check(bool(holds().all()), what, t.detach())


def _check_floats(name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"remat: {name} draws floating-point numbers, got {x.dtype}.")


# -- Factories ------------------------------------------------------------------------


def _deliver(
    draw: Draw,
    sample: Callable[[Key, torch.dtype], Tensor],
    default: torch.dtype | None = None,
    *,
    like: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = False,
    requires_grad: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """Call `sample(key, dtype)` and apply the options of a factory function."""
    key = draw()
    _check(layout in (None, torch.strided), "bind draws strided tensors only", layout)
    if out is not None:
        return _into(out, sample(key.to(out.device), out.dtype))
    if like is not None:
        device, default = device or like.device, like.dtype
    # Read from a tensor: Dynamo does not trace torch.get_default_device.
    device = torch.empty(()).device if device is None else torch.device(device)
    value = sample(key.to(device), dtype or default or torch.get_default_dtype())
    if pin_memory:
        value = value.pin_memory()
    if like is not None:
        value = _laid_out(value, like, memory_format)
    if requires_grad:
        value.requires_grad = True  # as torch.rand does, under torch.func too
    return value


def _laid_out(
    value: Tensor,
    like: Tensor,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """Return `value` with the strides that `torch.empty_like(like)` has."""
    is_plain = memory_format in (torch.preserve_format, torch.contiguous_format)
    if is_plain and like.is_contiguous():
        return value
    there: Any = {"device": "meta", "memory_format": memory_format}
    strides = torch.empty_like(like, **there).stride()
    order = sorted(range(like.ndim), key=lambda dim: -strides[dim])
    back = sorted(range(like.ndim), key=order.__getitem__)
    # Not copied into an empty tensor, which under vmap may not be batched.
    return value.permute(order).contiguous().permute(back)


def _into(out: Tensor | None, value: Tensor) -> Tensor:
    if out is not None and out.shape != value.shape:
        out.resize_(value.shape)
    return value if out is None else out.copy_(value)


def _factory(sample: Sampler) -> Rule:
    def rule(draw: Draw, *args: Any, size: Any = None, **options: Any) -> Tensor:
        shape = args if size is None else size
        if len(shape) == 1 and isinstance(shape[0], Sequence):
            (shape,) = shape
        return _deliver(draw, lambda key, dtype: sample(key, shape, dtype), **options)

    return rule


def _like(rule: Rule) -> Rule:
    """Return the rule of a function that takes a tensor in place of a shape."""

    def like(draw: Draw, input: Tensor, *args: Any, **options: Any) -> Tensor:
        return rule(draw, *args, size=shape_like(input), like=input, **options)

    return like


def _randint(
    draw: Draw,
    *args: Any,
    size: Any = None,
    high: Any = None,
    low: Any = None,
    **options: Any,
) -> Tensor:
    left = list(args)
    shape = left.pop() if size is None else size
    high = left.pop() if high is None else high
    low = left.pop() if left else (low or 0)
    # A bound may be a tensor.
    low, high = (int(b) if isinstance(b, Tensor) else b for b in (low, high))

    def sample(key: Key, dtype: torch.dtype) -> Tensor:
        return integers(key, shape, low, high, dtype)

    return _deliver(draw, sample, torch.int64, **options)


def _randperm(draw: Draw, n: int, **options: Any) -> Tensor:
    def sample(key: Key, dtype: torch.dtype) -> Tensor:
        return permutation(key, n).to(dtype)

    return _deliver(draw, sample, torch.int64, **options)


# -- Draws with tensors for parameters ------------------------------------------------


def _constant_in(value: Tensor, *parameters: Any) -> Tensor:
    """Return `value` with a zero gradient to its parameters, as torch gives."""
    for p in parameters:
        if isinstance(p, Tensor) and p.requires_grad:
            value = torch.where(torch.ones_like(p, dtype=torch.bool), value, p)
    return value


def _bernoulli(
    draw: Draw, input: Tensor, p: float | None = None, *, out: Tensor | None = None
) -> Tensor:
    _check_floats("bernoulli", input)
    value = _coins(draw().to(input.device), input, input if p is None else p)
    return _into(out, _constant_in(value, input))


def _normal(
    draw: Draw,
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Any = None,
    *,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    given = [p for p in (mean, std) if isinstance(p, Tensor)]
    if not given:

        def sample(key: Key, dtype: torch.dtype) -> Tensor:
            return _samplers.normal(key, size, dtype, mean, std)

        return _deliver(draw, sample, out=out, **options)
    key = draw()
    if isinstance(std, Tensor):
        _check_all(lambda: std >= 0, std, "a standard deviation is at least 0")
    shape = torch.broadcast_shapes(*(p.shape for p in given))
    loc, scale = (p.detach() if isinstance(p, Tensor) else p for p in (mean, std))
    first = given[0]
    value = _samplers.normal(key.to(first.device), shape, first.dtype, loc, scale)
    return _into(out, _constant_in(value, *given))


def _multinomial(
    draw: Draw,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    _check_floats("multinomial", input)
    ndim, p = input.ndim, input.detach()
    _check(ndim in (1, 2), "multinomial takes weights of 1 or 2 dimensions", ndim)
    _check(num_samples > 0, "multinomial draws at least 1 sample", num_samples)
    key = draw().to(p.device)
    enough = replacement or num_samples <= p.shape[-1]
    _check(enough, f"multinomial has {p.shape[-1]} categories to draw", num_samples)
    _check_all(
        lambda: ((p >= 0) & p.isfinite()).all(-1) & (p.sum(-1) > 0),
        p,
        "multinomial needs finite weights, none negative and not all zero",
    )
    if replacement:
        return _into(out, inverted(key, (*p.shape[:-1], num_samples), p))
    scores = noisy(key, tuple(p.shape), p.to(wide(p.dtype)).log())
    return _into(out, scores.topk(num_samples).indices)


# -- In place -------------------------------------------------------------------------


# `from` is a keyword of Python, so a parameter cannot have that name.
_NAMES = {"from": "low", "to": "high"}


def _in_place(value: Callable[..., Tensor]) -> Rule:
    """Return the rule that writes `value(key, x, *parameters)` to `x`."""

    def rule(draw: Draw, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = {_NAMES.get(name, name): v for name, v in kwargs.items()}
        return x.copy_(value(draw().to(x.device), x, *args, **named))

    return rule


def _uniform(key: Key, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return _samplers.uniform(key, shape_like(x), x.dtype, low, high)


def _gaussian(key: Key, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _samplers.normal(key, shape_like(x), x.dtype, mean, std)


def _coins(key: Key, x: Tensor, p: Any = 0.5) -> Tensor:
    if isinstance(p, Tensor):
        _check_all(lambda: (p >= 0) & (p <= 1), p, "probabilities are between 0 and 1")
    return _samplers.bernoulli(key, p, shape_like(x)).to(x.dtype)


def _exponential(key: Key, x: Tensor, lambd: float = 1.0) -> Tensor:
    _check_floats("exponential_", x)
    _check(lambd > 0, "exponential_ needs lambd > 0", lambd)
    u = _samplers.uniform(key, shape_like(x), wide(x.dtype))
    # Never zero: callers take its logarithm.
    return (-torch.log1p(-u)).clamp_min(torch.finfo(u.dtype).eps / 2) / lambd


def _random(
    key: Key, x: Tensor, *bounds: Any, low: int = 0, high: int | None = None
) -> Tensor:
    if bounds:
        low, high = bounds if len(bounds) > 1 else (0, bounds[0])
    if x.dtype is torch.bool and high is None:
        high = 2
    if high is None:
        # A floating dtype is filled with the integers that it holds, as in torch.
        digits, _ = FORMATS.get(x.dtype, (0, 0))
        high = (2**digits if digits else torch.iinfo(x.dtype).max) + 1
    return integers(key, shape_like(x), low or 0, high, torch.int64).to(x.dtype)


_SMALL = {
    *(torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32)
}


def integers(key: Key, shape: Any, low: Any, high: Any, dtype: Any) -> Tensor:
    """Draw from a range of up to 2**64 integers, in any dtype."""
    _check(low < high, "integers from [low, high) need low < high", (low, high))
    if dtype in _SMALL:
        return _samplers.randint(key, shape, low, high, dtype)
    words = _samplers.words_of(key, shape)
    return (_samplers.modulo(words, high - low) + low).to(dtype)


# -- Dropout --------------------------------------------------------------------------


def _zeroed(x: Tensor, p: float, mask: Tensor) -> Tensor:
    return torch.where(mask, 0.0, x * (1 / (1 - p) if p < 1 else 1.0))


# Minus the limit of selu: Klambauer et al., "Self-Normalizing Neural Networks", 2017.
_ALPHA = 1.7580993408473766


def _saturated(x: Tensor, p: float, mask: Tensor) -> Tensor:
    """Drop to the limit of selu. Then scale and shift to keep mean and variance."""
    if p == 1:
        return x * 0
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    return torch.where(mask, -_ALPHA, x) * scale + _ALPHA * scale * p


def _dropout(plain: Any, name: str) -> Rule:
    of_features, is_in_place = "feature" in name, plain.__name__.endswith("_")

    def rule(draw: Draw, input: Tensor, p: float, train: bool) -> Tensor:
        _samplers.check_probability(p)
        if train is False or p <= 0 or not input.numel():
            return plain(input, p, train)
        if of_features:
            what = "feature dropout needs at least 2 dimensions, batch and features"
            _check(input.dim() > 1, what, input.dim())
        key = draw().to(input.device)
        if name == "dropout":
            out = dropout(key, input, p)
        else:
            ones = (1,) * (input.dim() - 2)
            shape = (*input.shape[:2], *ones) if of_features else tuple(input.shape)
            mask = _samplers.bernoulli(key, p, shape_like(input, shape))
            out = (_saturated if "alpha" in name else _zeroed)(input, p, mask)
        out = _laid_out(out, input)
        return input.copy_(out) if is_in_place else out

    return rule


def _named(plain: Any, in_place: Any, *, is_on: bool) -> Rule:
    """Return the rule of a dropout of `torch.nn.functional`, of the same kernels."""

    def rule(
        draw: Draw,
        input: Tensor,
        p: float = 0.5,
        training: bool = is_on,
        inplace: bool = False,
    ) -> Tensor:
        return RULES[in_place if inplace else plain](draw, input, p, training)

    return rule


# -- Attention ------------------------------------------------------------------------


_torch_attention = functional.scaled_dot_product_attention


def _attention(
    draw: Draw,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run attention as its formula. If nothing is dropped, the result is torch's."""
    _samplers.check_probability(dropout_p)
    if not dropout_p:
        how: Any = {"scale": scale, "enable_gqa": enable_gqa}
        args = query, key, value, attn_mask, dropout_p, is_causal
        return _torch_attention(*args, **how)
    if is_causal:
        what = "scaled_dot_product_attention takes either attn_mask or is_causal=True"
        _check(attn_mask is None, what, "both")
        size = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    # In half precision only the result is rounded to it, as in torch.
    inside = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = (t.to(inside) for t in (query, key, value))
        if enable_gqa:
            times = q.shape[-3] // k.shape[-3]
            k, v = (t.repeat_interleave(times, -3) for t in (k, v))
        weights = _weights(q, k, attn_mask, scale)
        kept = dropout(draw().to(q.device), weights, dropout_p)
        return (kept @ v).to(query.dtype)


def _autocast(*tensors: Any) -> Any:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    left = None, torch.bool, torch.float64
    return [t if getattr(t, "dtype", None) in left else t.to(dtype) for t in tensors]


def _weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, scale: float | None
) -> Tensor:
    # Each side takes the root of the scale, as in torch's formula, against overflow.
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    half = math.sqrt(abs(scale))
    scores = (query * math.copysign(half, scale)) @ (key * half).transpose(-2, -1)
    if attn_mask is None:
        return scores.softmax(-1)
    if attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    else:
        scores = scores + attn_mask
    # A query with every key masked gets zeros, as in torch. So no gradient is NaN.
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


RULES: dict[Any, Rule] = {
    torch.rand: _factory(_samplers.uniform),
    torch.randn: _factory(_samplers.normal),
    torch.rand_like: _like(_factory(_samplers.uniform)),
    torch.randn_like: _like(_factory(_samplers.normal)),
    torch.randint: _randint,
    torch.randint_like: _like(_randint),
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    torch.normal: _normal,
    torch.multinomial: _multinomial,
    Tensor.bernoulli: _bernoulli,
    Tensor.multinomial: _multinomial,
    Tensor.bernoulli_: _in_place(_coins),
    Tensor.exponential_: _in_place(_exponential),
    Tensor.normal_: _in_place(_gaussian),
    Tensor.random_: _in_place(_random),
    Tensor.uniform_: _in_place(_uniform),
    _torch_attention: _attention,
}
for _name in "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout":
    _both = getattr(torch, _name), getattr(torch, _name + "_")
    RULES |= {plain: _dropout(plain, _name) for plain in _both}
    if hasattr(functional, _name):
        RULES[getattr(functional, _name)] = _named(*_both, is_on=_name == "dropout")
