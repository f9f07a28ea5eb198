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
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap


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
    """

    run: Callable[..., Any]
    order: int = 1
    at_base: bool = False
    batched: bool = False

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


def by_vjp(loss: Loss, *xs: Tensor) -> Any:
    value, pull = vjp(loss, *xs)
    return value, pull(value)


def by_jvp(loss: Loss, *xs: Tensor) -> Any:
    return jvp(loss, xs, tuple(x.cos() for x in xs))


def by_linearize(loss: Loss, *xs: Tensor) -> Any:
    value, push = linearize(loss, *xs)
    return value, push(*(x.cos() for x in xs))


def vmap_grad(loss: Loss, *xs: Tensor) -> Any:
    return vmap(grad(loss, every(xs)))(*batches(xs))


def grad_vmap(loss: Loss, *xs: Tensor) -> Any:
    return grad(lambda *xs: vmap(loss)(*xs).sum(), every(xs))(*batches(xs))


def backward_vmap(loss: Loss, *xs: Tensor) -> Any:
    leaves = leaves_of(*batches(xs))
    return gradients(vmap(loss)(*leaves).sum(), leaves)


def grad_grad(loss: Loss, *xs: Tensor) -> Any:
    return grad(lambda *xs: scalar(grad(loss, every(xs))(*xs)), every(xs))(*xs)


TRANSFORMS = {
    "backward": Transform(backward, at_base=True),
    "twice": Transform(twice, order=2, at_base=True),
    "backward_vmap": Transform(backward_vmap, at_base=True, batched=True),
    "grad": Transform(lambda loss, *xs: grad(loss, every(xs))(*xs)),
    "vjp": Transform(by_vjp),
    "jvp": Transform(by_jvp),
    "linearize": Transform(by_linearize),
    "jacrev": Transform(lambda loss, *xs: jacrev(loss, every(xs))(*xs)),
    "jacfwd": Transform(lambda loss, *xs: jacfwd(loss, every(xs))(*xs)),
    "vmap_grad": Transform(vmap_grad, batched=True),
    "grad_vmap": Transform(grad_vmap, batched=True),
    "grad_grad": Transform(grad_grad, order=2),
    "jacrev_jacrev": Transform(
        lambda loss, *xs: jacrev(jacrev(loss, every(xs)), every(xs))(*xs), order=2
    ),
    "hessian": Transform(lambda loss, *xs: hessian(loss, every(xs))(*xs), order=2),
}


def some(*names: str) -> dict[str, Transform]:
    """The part of the table that a test runs."""
    return {name: TRANSFORMS[name] for name in names}
