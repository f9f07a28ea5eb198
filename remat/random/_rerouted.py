"""Rules for torch's random functions inside `bind`: each draws from a key instead.

A rule is called with `draw` and the arguments of the torch function that it replaces.
`draw()` returns the next key. The numbers have torch's dtypes and defaults: samplers of
this package draw only floats, and have other defaults.

Invariant: a call that draws nothing (dropout in evaluation mode) takes no key, and runs
torch's own kernel. Parameters that torch refuses are refused, if their values can be
read at no cost.
Rejected: filling `torch.empty(...)` in place. Under vmap the key may be batched when
the empty tensor is not. Batched values cannot be written to such a tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat.random import _samplers
from remat.random._choices import permutation
from remat.random._draw import is_readable, shape_like
from remat.random._key import Key


Draw = Callable[[], Key]
Rule = Callable[..., Any]
Sampler = Callable[..., Tensor]


# -- Factories ------------------------------------------------------------------------


def _shape(size: Any) -> tuple[int, ...]:
    is_nested = len(size) == 1 and isinstance(size[0], Sequence)
    return tuple(size[0] if is_nested else size)


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
    if layout not in (None, torch.strided):
        raise ValueError(
            f"remat: bind draws strided tensors only, got layout={layout}. Leave out "
            "`layout` and convert the result."
        )
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
        value = laid_out(value, like, memory_format)
    if requires_grad:
        value.requires_grad = True  # as torch.rand does, under torch.func too
    return value


def _factory(sample: Sampler) -> Rule:
    def rule(draw: Draw, *args: Any, size: Any = None, **options: Any) -> Tensor:
        shape = _shape(args if size is None else size)
        return _deliver(
            draw, lambda key, dtype: sample(key, shape, dtype), None, **options
        )

    return rule


def _like(sample: Sampler) -> Rule:
    def rule(draw: Draw, input: Tensor, **options: Any) -> Tensor:
        shape = shape_like(input)
        return _deliver(
            draw, lambda key, dtype: sample(key, shape, dtype), like=input, **options
        )

    return rule


def laid_out(
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
    return _deliver(
        draw,
        lambda key, dtype: integers(key, shape, low, high, dtype),
        torch.int64,
        **options,
    )


def _randint_like(draw: Draw, input: Tensor, *args: Any, **options: Any) -> Tensor:
    for name in options.keys() & {"low", "high"}:
        options[name] = int(options[name])  # a bound may be a tensor
    size = shape_like(input)
    return _randint(draw, *map(int, args), size=size, like=input, **options)


def _randperm(draw: Draw, n: int, **options: Any) -> Tensor:
    return _deliver(
        draw,
        lambda key, dtype: permutation(key, n).to(dtype),
        torch.int64,
        **options,
    )


# -- In place -------------------------------------------------------------------------


# `from` is a keyword of Python, so a parameter cannot have that name.
_NAMES = {"from": "low", "to": "high"}


def _in_place(value: Callable[..., Tensor]) -> Rule:
    """Return the rule that writes `value(key, x, *parameters)` to `x`."""

    def rule(draw: Draw, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = {_NAMES.get(name, name): v for name, v in kwargs.items()}
        return x.copy_(value(draw().to(x.device), x, *args, **named))

    return rule


# -- Draws with tensors for parameters ------------------------------------------------


def _constant_in(value: Tensor, *parameters: Any) -> Tensor:
    """Return `value` with a zero gradient to its parameters, as torch gives."""
    for p in parameters:
        if isinstance(p, Tensor) and p.requires_grad:
            value = torch.where(torch.ones_like(p, dtype=torch.bool), value, p)
    return value


def _into(out: Tensor | None, value: Tensor) -> Tensor:
    if out is not None and out.shape != value.shape:
        out.resize_(value.shape)
    return value if out is None else out.copy_(value)


def _bernoulli(
    draw: Draw, input: Tensor, p: float | None = None, *, out: Tensor | None = None
) -> Tensor:
    check_floats("bernoulli", input)
    value = coin(draw().to(input.device), input if p is None else p, shape_like(input))
    return _into(out, _constant_in(value.to(input.dtype), input))


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
        return _deliver(
            draw,
            lambda key, dtype: _samplers.normal(key, size, dtype, mean, std),
            None,
            out=out,
            **options,
        )
    key = draw()
    if isinstance(std, Tensor):
        check_all(lambda: std >= 0, std, "a standard deviation is at least 0")
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
    check_floats("multinomial", input)
    check(
        input.ndim in (1, 2),
        "multinomial takes weights of 1 or 2 dimensions",
        input.ndim,
    )
    check(num_samples > 0, "multinomial draws at least 1 sample", num_samples)
    p = input.detach()
    key = draw().to(p.device)
    enough = replacement or num_samples <= p.shape[-1]
    check(enough, f"multinomial has {p.shape[-1]} categories to draw", num_samples)
    check_all(
        lambda: ((p >= 0) & p.isfinite()).all(-1) & (p.sum(-1) > 0),
        p,
        "multinomial needs finite weights, none negative and not all zero",
    )
    pick = _with_replacement if replacement else _without_replacement
    return _into(out, pick(key, p, num_samples))


def _with_replacement(key: Key, p: Tensor, num: int) -> Tensor:
    # Divided by the last sum, so that it becomes exactly one: no draw is beyond it.
    total = p.to(dtype_for_tails(p)).cumsum(-1)
    cumulative = total / total[..., -1:]
    u = _samplers.uniform(key, (*p.shape[:-1], num), cumulative.dtype)
    return torch.searchsorted(cumulative, u, right=True)


def _without_replacement(key: Key, p: Tensor, num: int) -> Tensor:
    # Largest weight over an exponential number, as in torch: Efraimidis and Spirakis,
    # "Weighted random sampling with a reservoir", 2006.
    return (p / exponential_(key, p)).topk(num).indices


# -- Numbers, with the dtypes and defaults of torch ------------------------------------


def integers(key: Key, shape: Any, low: Any, high: Any, dtype: Any) -> Tensor:
    check(low < high, "integers from [low, high) need low < high", (low, high))
    if dtype in _DRAWN:
        return _samplers.randint(key, shape, low, high, dtype)
    # Up to 2**64 of them: `randint` has no uint64.
    return (_samplers.modulo(_samplers.words_of(key, shape), high - low) + low).to(
        dtype
    )


_DRAWN = {
    *(torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32),
}


def dtype_for_tails(x: Tensor) -> torch.dtype:
    """Return the dtype to draw in for a distribution with tails."""
    exact = x.dtype is torch.float64 or not x.is_floating_point()
    return torch.float64 if exact else torch.float32


def check(is_valid: bool, what: str, got: Any) -> None:
    if not is_valid:
        raise ValueError(f"remat: {what}, got {got}.")


def check_all(holds: Callable[[], Tensor], t: Tensor, what: str) -> None:
    """Check values if reading them is free."""
    if is_readable(t):
        check(bool(holds().all()), what, t.detach())


def uniform_(key: Key, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return _samplers.uniform(key, shape_like(x), x.dtype, low, high)


def normal_(key: Key, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _samplers.normal(key, shape_like(x), x.dtype, mean, std)


def bernoulli_(key: Key, x: Tensor, p: Any = 0.5) -> Tensor:
    return coin(key, p, shape_like(x)).to(x.dtype)


def coin(key: Key, p: Any, shape: Any) -> Tensor:
    if isinstance(p, Tensor):
        check_all(lambda: (p >= 0) & (p <= 1), p, "probabilities are between 0 and 1")
    return _samplers.bernoulli(key, p, shape)


def check_floats(name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"remat: {name} draws floating-point numbers, got {x.dtype}.")


def exponential_(key: Key, x: Tensor, lambd: float = 1.0) -> Tensor:
    check_floats("exponential_", x)
    check(lambd > 0, "exponential_ needs lambd > 0", lambd)
    u = _samplers.uniform(key, shape_like(x), dtype_for_tails(x))
    # Never zero: callers take its logarithm.
    least = torch.finfo(u.dtype).eps / 2
    return (-torch.log1p(-u)).clamp_min(least) / lambd


# The bits of the integers with which `random_` fills a floating dtype, as in torch.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def random_(key: Key, x: Tensor, *bounds: int, **named: int) -> Tensor:
    low, high = _bounds(x.dtype, *bounds, **named)
    return integers(key, shape_like(x), low, high, torch.int64).to(x.dtype)


def _bounds(
    dtype: torch.dtype, *bounds: int | None, low: int = 0, high: int | None = None
) -> tuple[int, int]:
    if len(bounds) == 1:
        high = bounds[0]
    elif bounds:
        low, high = bounds[0] or 0, bounds[1]
    if high is not None:
        return low, high
    if dtype is torch.bool:
        return low, 2
    most = 2 ** _DIGITS[dtype] if dtype in _DIGITS else torch.iinfo(dtype).max
    return low, most + 1


DRAWS: dict[Any, Rule] = {
    torch.rand: _factory(_samplers.uniform),
    torch.randn: _factory(_samplers.normal),
    torch.rand_like: _like(_samplers.uniform),
    torch.randn_like: _like(_samplers.normal),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    torch.normal: _normal,
    torch.multinomial: _multinomial,
    Tensor.bernoulli: _bernoulli,
    Tensor.multinomial: _multinomial,
    Tensor.bernoulli_: _in_place(bernoulli_),
    Tensor.exponential_: _in_place(exponential_),
    Tensor.normal_: _in_place(normal_),
    Tensor.random_: _in_place(random_),
    Tensor.uniform_: _in_place(uniform_),
}
