"""Rules for torch's random functions inside `bind`: each draws from a key instead.

A rule is called with `draw` and the arguments of the torch function that it replaces.
`draw()` returns the next key.

Invariant: a call that draws nothing (dropout in evaluation mode) takes no key, and runs
torch's own kernel.
Rejected: filling `torch.empty(...)` in place. Under vmap the key may be batched when
the empty tensor is not. Batched values cannot be written to such a tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat.random import _numbers as numbers
from remat.random._choices import permutation
from remat.random._key import Key
from remat.random._samplers import uniform
from remat.random._sharded import shape_like


Draw = Callable[[], Key]
Rule = Callable[..., Any]
Sampler = Callable[..., Tensor]


# -- Factories ------------------------------------------------------------------------


def _shape(size: Any) -> tuple[int, ...]:
    is_nested = len(size) == 1 and isinstance(size[0], Sequence)
    return tuple(size[0] if is_nested else size)


def _deliver(
    make: Callable[[Any, torch.dtype], Tensor],
    default: torch.dtype | None,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = False,
    requires_grad: bool = False,
) -> Tensor:
    """Call `make(device, dtype)` and apply the options of a factory function."""
    if layout not in (None, torch.strided):
        raise ValueError(
            f"remat: bind draws strided tensors only, got layout={layout}. Leave out "
            "`layout` and convert the result."
        )
    if out is not None:
        return _into(out, make(out.device, out.dtype))
    # Read from a tensor: Dynamo does not trace torch.get_default_device.
    device = torch.empty(()).device if device is None else torch.device(device)
    value = make(device, dtype or default or torch.get_default_dtype())
    if pin_memory:
        value = value.pin_memory()
    if requires_grad:
        value.requires_grad = True  # as torch.rand does, under torch.func too
    return value


def _factory(sample: Sampler) -> Rule:
    def rule(draw: Draw, *args: Any, size: Any = None, **options: Any) -> Tensor:
        shape = _shape(args if size is None else size)
        key = draw()
        return _deliver(
            lambda device, dtype: sample(key.to(device), shape, dtype),
            None,
            **options,
        )

    return rule


def _like(sample: Sampler) -> Rule:
    def rule(draw: Draw, input: Tensor, **options: Any) -> Tensor:
        key = draw()
        return _deliver_like(
            lambda device, dtype: sample(key.to(device), shape_like(input), dtype),
            input,
            **options,
        )

    return rule


def _deliver_like(
    make: Callable[[Any, torch.dtype], Tensor],
    input: Tensor,
    *,
    memory_format: torch.memory_format = torch.preserve_format,
    **options: Any,
) -> Tensor:
    options["device"] = options.get("device") or input.device
    requires_grad = options.pop("requires_grad", False)
    value = _deliver(make, input.dtype, **options)
    value = laid_out(value, input, memory_format)
    if requires_grad:
        value.requires_grad = True  # as torch.rand does, under torch.func too
    return value


def laid_out(
    value: Tensor,
    like: Tensor,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """Return `value` with the strides that `torch.empty_like(like)` has."""
    is_plain = memory_format in (torch.preserve_format, torch.contiguous_format)
    if is_plain and like.is_contiguous():
        return value
    strides = torch.empty_like(
        like, device="meta", memory_format=memory_format
    ).stride()
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
    key = draw()
    return _deliver(
        lambda device, dtype: numbers.integers(key.to(device), shape, low, high, dtype),
        torch.int64,
        **options,
    )


def _randint_like(
    draw: Draw,
    input: Tensor,
    *args: Any,
    high: Any = None,
    low: Any = None,
    **options: Any,
) -> Tensor:
    left = list(args)
    high = left.pop() if high is None else high
    low = left.pop() if left else (low or 0)
    key = draw()
    return _deliver_like(
        lambda device, dtype: numbers.integers(
            key.to(device), shape_like(input), int(low), int(high), dtype
        ),
        input,
        **options,
    )


def _randperm(draw: Draw, n: int, **options: Any) -> Tensor:
    key = draw()
    return _deliver(
        lambda device, dtype: permutation(key.to(device), n).to(dtype),
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
    if out is None:
        return value
    if out.shape != value.shape:
        out.resize_(value.shape)
    return out.copy_(value)


def _bernoulli(
    draw: Draw, input: Tensor, p: float | None = None, *, out: Tensor | None = None
) -> Tensor:
    numbers.check_floats("bernoulli", input)
    value = numbers.coin(
        draw().to(input.device), input if p is None else p, shape_like(input)
    )
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
    key = draw()
    if not given:
        return _deliver(
            lambda device, dtype: numbers.gaussian(
                key.to(device), size, dtype, mean, std
            ),
            None,
            out=out,
            **options,
        )
    if isinstance(std, Tensor):
        numbers.check_all(lambda: std >= 0, std, "a standard deviation is at least 0")
    shape = torch.broadcast_shapes(*(p.shape for p in given))
    loc, scale = (p.detach() if isinstance(p, Tensor) else p for p in (mean, std))
    first = given[0]
    value = numbers.gaussian(key.to(first.device), shape, first.dtype, loc, scale)
    return _into(out, _constant_in(value, *given))


def _multinomial(
    draw: Draw,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    numbers.check_floats("multinomial", input)
    numbers.check(
        input.ndim in (1, 2),
        "multinomial takes weights of 1 or 2 dimensions",
        input.ndim,
    )
    numbers.check(num_samples > 0, "multinomial draws at least 1 sample", num_samples)
    p = input.detach()
    key = draw().to(p.device)
    enough = replacement or num_samples <= p.shape[-1]
    numbers.check(
        enough, f"multinomial has {p.shape[-1]} categories to draw", num_samples
    )
    numbers.check_all(
        lambda: ((p >= 0) & p.isfinite()).all(-1) & (p.sum(-1) > 0),
        p,
        "multinomial needs finite weights, none negative and not all zero",
    )
    pick = _with_replacement if replacement else _without_replacement
    return _into(out, pick(key, p, num_samples))


def _with_replacement(key: Key, p: Tensor, num: int) -> Tensor:
    # Divided by the last sum, so that it becomes exactly one: no draw is beyond it.
    total = p.to(numbers.wide(p)).cumsum(-1)
    cumulative = total / total[..., -1:]
    u = uniform(key, (*p.shape[:-1], num), cumulative.dtype)
    return torch.searchsorted(cumulative, u, right=True)


def _without_replacement(key: Key, p: Tensor, num: int) -> Tensor:
    # Largest weight over an exponential number, as in torch: Efraimidis and Spirakis,
    # "Weighted random sampling with a reservoir", 2006.
    return (p / numbers.exponential_(key, p)).topk(num).indices


DRAWS: dict[Any, Rule] = {
    torch.rand: _factory(numbers.uniform_of),
    torch.randn: _factory(numbers.gaussian),
    torch.rand_like: _like(numbers.uniform_of),
    torch.randn_like: _like(numbers.gaussian),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    torch.normal: _normal,
    torch.multinomial: _multinomial,
    Tensor.bernoulli: _bernoulli,
    Tensor.multinomial: _multinomial,
    Tensor.bernoulli_: _in_place(numbers.bernoulli_),
    Tensor.cauchy_: _in_place(numbers.cauchy_),
    Tensor.exponential_: _in_place(numbers.exponential_),
    Tensor.geometric_: _in_place(numbers.geometric_),
    Tensor.log_normal_: _in_place(numbers.log_normal_),
    Tensor.normal_: _in_place(numbers.normal_),
    Tensor.random_: _in_place(numbers.random_),
    Tensor.uniform_: _in_place(numbers.uniform_),
}
