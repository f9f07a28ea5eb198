"""The table of transforms: each way to differentiate a function, written once.

A transform takes a scalar `loss` of tensors and the tensors, and returns a pytree of
values and derivatives. A test runs it with a function as it is and with the
rematerialized one. The batched ones make a batch of each tensor themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.zoo import leaves_of, scalar
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import (
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)


Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Transform:
    """A way to differentiate.

    Attributes:
        run: takes the loss and its tensors.
        order: of the derivative.
        at_base: whether base autograd alone differentiates, whose graph is plain's, so
            that gradients are equal bit for bit.
        batched: whether the loss is evaluated on batches of its tensors.
        forward: whether forward mode takes part, in which nothing is recorded.
    """

    run: Callable[..., Any]
    order: int = 1
    at_base: bool = False
    batched: bool = False
    forward: bool = False

    def __call__(self, loss: Loss, *xs: Tensor) -> Any:
        return self.run(loss, *xs)


def batches(xs: tuple[Tensor, ...]) -> list[Tensor]:
    """Three examples of each tensor."""
    return [torch.stack([x, -x, 2 * x]) for x in xs]


def every(xs: tuple[Tensor, ...]) -> tuple[int, ...]:
    """The argnums of all the tensors."""
    return tuple(range(len(xs)))


def gradients(out: Tensor, leaves: list[Tensor], **how: Any) -> tuple[Tensor, ...]:
    """What base autograd gives; zeros where the output does not depend on a leaf."""
    return torch.autograd.grad(
        out, leaves, allow_unused=True, materialize_grads=True, **how
    )


def backward(loss: Loss, *xs: Tensor) -> Any:
    leaves = leaves_of(*xs)
    value = loss(*leaves)
    value.backward()
    return value.detach(), [leaf.grad for leaf in leaves]


def twice(loss: Loss, *xs: Tensor) -> Any:
    leaves = leaves_of(*xs)
    first = gradients(loss(*leaves), leaves, create_graph=True)
    return [g.detach() for g in first], gradients(scalar(first), leaves)


def retained(loss: Loss, *xs: Tensor) -> Any:
    leaves = leaves_of(*xs)
    value = loss(*leaves)
    first = gradients(value, leaves, retain_graph=True)
    return first, gradients(value, leaves)


def of_one(loss: Loss, *xs: Tensor) -> Any:
    leaves = leaves_of(*xs)
    return gradients(loss(*leaves), leaves[-1:])


def accumulated(loss: Loss, *xs: Tensor) -> Any:
    leaves = leaves_of(*xs)
    (loss(*leaves) + loss(*leaves[:-1], leaves[-1] * 2)).backward()
    return [leaf.grad for leaf in leaves]


def batched_cotangents(loss: Loss, *xs: Tensor) -> Any:
    leaves = leaves_of(*xs)
    value = loss(*leaves)
    cotangents = torch.tensor([1.0, 2.0], dtype=value.dtype)
    return torch.autograd.grad(value, leaves, cotangents, is_grads_batched=True)


def by_vjp(loss: Loss, *xs: Tensor) -> Any:
    value, pull = vjp(loss, *xs)
    return value, pull(value)


def two_pulls(loss: Loss, *xs: Tensor) -> Any:
    value, pull = vjp(loss, *xs)
    return value, pull(value), pull(2 * value)


def tangents(xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One of each tensor."""
    return tuple(x.cos() for x in xs)


def by_jvp(loss: Loss, *xs: Tensor) -> Any:
    return jvp(loss, xs, tangents(xs))


def duals(loss: Loss, *xs: Tensor) -> Any:
    with forward_ad.dual_level():
        pairs = zip(xs, tangents(xs), strict=True)
        return forward_ad.unpack_dual(loss(*(forward_ad.make_dual(*p) for p in pairs)))


def by_linearize(loss: Loss, *xs: Tensor) -> Any:
    value, push = linearize(loss, *xs)
    return value, push(*tangents(xs))


def vmap_grad(loss: Loss, *xs: Tensor) -> Any:
    return vmap(grad(loss, every(xs)))(*batches(xs))


def last_alone(xs: tuple[Tensor, ...]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """A batch of the last tensor, and the dimensions that `vmap` is over."""
    *shared, last = xs
    return [*shared, *batches((last,))], (None,) * len(shared) + (0,)


def vmap_grad_of_last(loss: Loss, *xs: Tensor) -> Any:
    args, in_dims = last_alone(xs)
    return vmap(grad(loss, every(xs)), in_dims)(*args)


def grad_vmap_of_last(loss: Loss, *xs: Tensor) -> Any:
    args, in_dims = last_alone(xs)
    return grad(lambda *xs: vmap(loss, in_dims)(*xs).sum(), every(xs))(*args)


def grad_vmap(loss: Loss, *xs: Tensor) -> Any:
    return grad(lambda *xs: vmap(loss)(*xs).sum(), every(xs))(*batches(xs))


def backward_vmap(loss: Loss, *xs: Tensor) -> Any:
    leaves = leaves_of(*batches(xs))
    return gradients(vmap(loss)(*leaves).sum(), leaves)


def twice_vmap(loss: Loss, *xs: Tensor) -> Any:
    leaves = leaves_of(*batches(xs))
    first = gradients(vmap(loss)(*leaves).sum(), leaves, create_graph=True)
    return [g.detach() for g in first], gradients(scalar(first), leaves)


def vmap_jvp(loss: Loss, *xs: Tensor) -> Any:
    return vmap(lambda *xs: jvp(loss, xs, tangents(xs)))(*batches(xs))


def grad_jvp(loss: Loss, *xs: Tensor) -> Any:
    return grad(lambda *xs: jvp(loss, xs, tangents(xs))[1], every(xs))(*xs)


def jvp_grad(loss: Loss, *xs: Tensor) -> Any:
    return jvp(grad(loss, every(xs)), xs, tangents(xs))


def vmap_hessian(loss: Loss, *xs: Tensor) -> Any:
    return vmap(hessian(loss))(*batches(xs))


def twice_grad(loss: Loss, *xs: Tensor) -> Any:
    """Base autograd differentiates what torch.func differentiated."""
    leaves = leaves_of(*xs)
    return gradients(scalar(grad(loss, every(xs))(*leaves)), leaves)


def grad_grad(loss: Loss, *xs: Tensor) -> Any:
    return grad(lambda *xs: scalar(grad(loss, every(xs))(*xs)), every(xs))(*xs)


def every_of(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Such as `jacrev`, to all the tensors."""
    return lambda loss, *xs: transform(loss, every(xs))(*xs)


def every_of_two(outer: Any, inner: Any) -> Callable[..., Any]:
    """Such as `jacrev(jacfwd)`, to all the tensors."""
    return lambda loss, *xs: outer(inner(loss, every(xs)), every(xs))(*xs)


TRANSFORMS = {
    "backward": Transform(backward, at_base=True),
    "retained": Transform(retained, at_base=True),
    "accumulated": Transform(accumulated, at_base=True),
    "of_one": Transform(of_one, at_base=True),
    "batched_cotangents": Transform(batched_cotangents, at_base=True),
    "twice": Transform(twice, order=2, at_base=True),
    "backward_vmap": Transform(backward_vmap, at_base=True, batched=True),
    "twice_vmap": Transform(twice_vmap, order=2, at_base=True, batched=True),
    "grad": Transform(every_of(grad)),
    "grad_and_value": Transform(every_of(grad_and_value)),
    "vjp": Transform(by_vjp),
    "two_pulls": Transform(two_pulls),
    "jvp": Transform(by_jvp, forward=True),
    "duals": Transform(duals, forward=True),
    "linearize": Transform(by_linearize, forward=True),
    "jacrev": Transform(every_of(jacrev)),
    "jacfwd": Transform(every_of(jacfwd), forward=True),
    "vmap_grad": Transform(vmap_grad, batched=True),
    "grad_vmap": Transform(grad_vmap, batched=True),
    "vmap_grad_of_last": Transform(vmap_grad_of_last, batched=True),
    "grad_vmap_of_last": Transform(grad_vmap_of_last, batched=True),
    "vmap_jvp": Transform(vmap_jvp, batched=True, forward=True),
    "grad_grad": Transform(grad_grad, order=2),
    "twice_grad": Transform(twice_grad, order=2),
    "jvp_grad": Transform(jvp_grad, order=2, forward=True),
    "grad_jvp": Transform(grad_jvp, order=2, forward=True),
    "jacrev_jacrev": Transform(every_of_two(jacrev, jacrev), order=2),
    "jacrev_jacfwd": Transform(every_of_two(jacrev, jacfwd), order=2, forward=True),
    "jacfwd_jacrev": Transform(every_of_two(jacfwd, jacrev), order=2, forward=True),
    "hessian": Transform(every_of(hessian), order=2, forward=True),
    "vmap_hessian": Transform(vmap_hessian, order=2, batched=True, forward=True),
}


def some(*names: str) -> dict[str, Transform]:
    """The part of the table that a test runs."""
    return {name: TRANSFORMS[name] for name in names}
