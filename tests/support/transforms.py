"""The table of transforms: each way to differentiate a function, written once.

A transform takes a scalar `loss` of tensors and the tensors, and returns a pytree of
values and derivatives. A test runs it with a function as it is and with the
rematerialized one. The batched ones make a batch of each tensor themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.zoo import ZOO, leaves_of, scalar
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
        batched: whether the loss is evaluated on batches of its tensors.
        forward: whether forward mode takes part, in which nothing is recorded.
        plain: how often a plain function is evaluated.
        evaluations: how often a rematerialized one is where each backward is a call:
            under torch.func, and with `higher_order=True`.
        nested: the same for a function rematerialized twice.
        backwards: how many backwards of base autograd there are, if no others are.
        spared: how many of `nested` run in the end in a backward of base autograd.
        exact: whether sums are in the order of plain although the order is higher.
        of_outputs: whether it takes a function that returns a tree of tensors.
        cases: those of the zoo that plain torch differentiates in this way.
    """

    run: Callable[..., Any]
    order: int = 1
    batched: bool = False
    forward: bool = False
    plain: int = 1
    evaluations: int = 2
    nested: int = 3
    backwards: int = 0
    spared: int = 0
    exact: bool = False
    of_outputs: bool = False
    cases: tuple[str, ...] = tuple(ZOO)

    @property
    def at_base(self) -> bool:
        """Whether base autograd alone differentiates: with the graph of plain."""
        return self.backwards > 0

    @property
    def stores_nothing(self) -> bool:
        """Whether it is forward mode alone, so that nothing is computed again."""
        return self.evaluations == self.plain

    @property
    def reassociated(self) -> bool:
        """Whether sums of contributions are in another order than in plain."""
        return self.order > 1 and not self.exact

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


def forward(run: Callable[..., Any], **row: Any) -> Transform:
    """Forward mode alone, which stores nothing and so recomputes nothing."""
    return Transform(run, **({"evaluations": 1, "nested": 1, "forward": True} | row))


def second(
    run: Callable[..., Any], evaluations: int = 4, nested: int = 8, **row: Any
) -> Transform:
    """A second order: two calls, of which the outer derivative recomputes both."""
    return Transform(run, order=2, evaluations=evaluations, nested=nested, **row)


def mixed(run: Callable[..., Any], **row: Any) -> Transform:
    """Forward and reverse mode: one evaluation gives values and tangents."""
    return second(run, 2, 3, forward=True, **row)


TRANSFORMS = {
    "backward": Transform(backward, backwards=1),
    "twice": second(twice, backwards=2),
    "backward_vmap": Transform(backward_vmap, batched=True, backwards=1),
    "grad": Transform(every_of(grad)),
    "vjp": Transform(by_vjp, spared=1),
    "jvp": forward(by_jvp),
    # It traces the function once for the value and once for the tangent.
    "linearize": forward(by_linearize, plain=2, evaluations=2, nested=2),
    "jacrev": Transform(every_of(jacrev), spared=1),
    "jacfwd": forward(every_of(jacfwd)),
    "vmap_grad": Transform(vmap_grad, batched=True),
    "grad_vmap": Transform(grad_vmap, batched=True),
    "grad_grad": second(grad_grad),
    "jacrev_jacrev": second(every_of_two(jacrev, jacrev), spared=1),
    "hessian": mixed(every_of(hessian), exact=True),
}


# Others, for tests of policies, pruning and random programs.
OTHERS = {
    "retained": Transform(retained, backwards=1),
    "accumulated": Transform(accumulated, backwards=1),
    "of_one": Transform(of_one, backwards=1),
    "batched_cotangents": Transform(batched_cotangents, backwards=1),
    "twice_vmap": second(twice_vmap, batched=True, backwards=2),
    "grad_and_value": Transform(every_of(grad_and_value)),
    "two_pulls": Transform(two_pulls, spared=1),
    "duals": forward(duals),
    "vmap_grad_of_last": Transform(vmap_grad_of_last, batched=True),
    "grad_vmap_of_last": Transform(grad_vmap_of_last, batched=True),
    "vmap_jvp": forward(vmap_jvp, batched=True),
    "twice_grad": second(twice_grad, spared=3),
    "jvp_grad": mixed(jvp_grad),
    "grad_jvp": mixed(grad_jvp),
    "jacrev_jacfwd": mixed(every_of_two(jacrev, jacfwd)),
    "jacfwd_jacrev": mixed(every_of_two(jacfwd, jacrev)),
    "vmap_hessian": mixed(vmap_hessian, batched=True),
}


ALL = TRANSFORMS | OTHERS


def some(*names: str) -> dict[str, Transform]:
    """The parts of the tables that a test runs."""
    return {name: ALL[name] for name in names}
