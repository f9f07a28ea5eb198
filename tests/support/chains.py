"""A loss of a scan, and the ways to differentiate it: in reverse, and not."""

import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vmap


def _random(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.double)


LENGTH = 10
W = _random(4, 4, seed=0) / 2
H = _random(4, seed=1)
XS = _random(LENGTH, 4, seed=2) * 0.3
HS = _random(5, 4, seed=3)


def loss_of(scan, **options):
    """A loss of a weight that is closed over, an initial carry, and what is scanned."""

    def loss(w, h, xs):
        def step(carry, x):
            carry = torch.tanh(carry @ w) + x
            return carry, carry.sin().sum()

        last, sums = scan(step, h, xs, **options)
        return last.square().sum() + sums.pow(3).sum()

    return loss


def leaves():
    return [t.clone().requires_grad_() for t in (W, H, XS)]


def _backward(loss):
    inputs = leaves()
    return torch.autograd.grad(loss(*inputs), inputs)


def _accumulated(loss):
    inputs = leaves()
    loss(*inputs).backward()
    return [t.grad for t in inputs]


def _twice(loss):
    inputs = leaves()
    value = loss(*inputs)
    first = torch.autograd.grad(value, inputs, retain_graph=True)
    return (*first, *torch.autograd.grad(value, inputs))


def _second(loss):
    inputs = leaves()
    first = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)


def _batched(loss):
    w, h, xs = leaves()
    values = torch.stack([loss(w, h, xs), loss(w, 2 * h, xs)])
    return torch.autograd.grad(
        values, (w, h), torch.eye(2).double(), is_grads_batched=True
    )


def _forward_ad(loss):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(H, H)
        return torch.autograd.forward_ad.unpack_dual(loss(W, dual, XS)).tangent


def _squares(gradients):
    return sum(g.square().sum() for g in gradients)


# What is differentiated in reverse. A chain runs its steps again there.
REVERSE = {
    "backward": _accumulated,
    "autograd.grad": _backward,
    "retain_graph": _twice,
    "create_graph": _second,
    "is_grads_batched": _batched,
    "grad": lambda f: grad(f, (0, 1, 2))(W, H, XS),
    "grad of the weight alone": lambda f: grad(f)(W, H, XS),
    "grad of grad": lambda f: grad(lambda w: _squares(grad(f, (0, 1, 2))(w, H, XS)))(W),
    "vmap of grad": lambda f: vmap(grad(f, (0, 1)), (None, 0, None))(W, HS, XS),
    "grad of vmap": lambda f: grad(
        lambda w, h: vmap(f, (None, 0, None))(w, h, XS).sum(), (0, 1)
    )(W, HS),
    "vmap of vmap of grad": lambda f: vmap(
        vmap(grad(f, 1), (None, 0, None)), (None, None, 0)
    )(W, HS, torch.stack([XS, 2 * XS])),
    "jvp of grad": lambda f: jvp(lambda w: grad(f, (0, 1, 2))(w, H, XS), (W,), (W,)),
    "grad of jvp": lambda f: grad(lambda w: jvp(lambda h: f(w, h, XS), (H,), (H,))[1])(
        W
    ),
    "hessian": lambda f: hessian(f, 1)(W, H, XS),
    "jacrev": lambda f: jacrev(lambda h: torch.stack([f(W, h, XS), f(W, 2 * h, XS)]))(
        H
    ),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f, 1), 1)(W, H, XS),
    "third order": lambda f: grad(lambda h: hessian(f, 1)(W, h, XS).sum())(H),
}
# What is not. Nothing is stored there, and no step runs again.
FORWARD = {
    "jvp": lambda f: jvp(lambda w: f(w, H, XS), (W,), (W,)),
    "vmap of jvp": lambda f: vmap(lambda h: jvp(lambda w: f(w, h, XS), (W,), (W,))[1])(
        HS
    ),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f, 1), 1)(W, H, XS),
    "forward_ad": _forward_ad,
    "vmap": lambda f: vmap(lambda h: f(W, h, XS))(HS),
    "no_grad": lambda f: torch.no_grad()(f)(W, H, XS),
    "linearize": lambda f: linearize(lambda h: f(W, h, XS), H)[1](H),
}
