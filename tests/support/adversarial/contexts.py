"""The transforms of torch.func around a program's functions, for plain code and others.

A program calls its functions, and later calls `.backward()`. Here each call is made
below a transform. What that returns reaches the program through one node of autograd,
whose backward gives what the transform computed.

Invariant: plain code runs below the same transform. Where it cannot, the context does
not apply.
Rejected: programs of their own. What is hard about a program is what its function
reaches, and that is the same everywhere.
"""

import functools

import torch
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from remat import chain


class Bridge(torch.autograd.Function):
    """Outputs that were computed below a transform, and how they are pulled back."""

    @staticmethod
    def forward(ctx, pull, count, *tensors):
        ctx.pull, ctx.count = pull, count
        ctx.set_materialize_grads(True)
        outs = tuple(t.detach() for t in tensors[:count])
        ctx.mark_non_differentiable(*(o for o in outs if not o.is_floating_point()))
        return outs

    @staticmethod
    def backward(ctx, *cotangents):
        return None, None, *[None] * ctx.count, *ctx.pull(cotangents)


def below(transform):
    """Return a context: it wraps a function to be called below a transform."""

    def context(fn):
        @functools.wraps(fn, updated=())
        def call(*args, **kwargs):
            at = [k for k, a in enumerate(args) if _is_differentiated(a)]
            found = []

            def of_primals(*primals):
                given = [*args]
                for k, primal in zip(at, primals, strict=True):
                    given[k] = primal
                leaves, spec = tree_flatten(fn(*given, **kwargs))
                found[:] = leaves, spec
                return tuple(v for v in leaves if isinstance(v, torch.Tensor))

            primals = [args[k] for k in at]
            outs, pull = transform(of_primals, primals)
            leaves, spec = found
            bridged = iter(Bridge.apply(pull, len(outs), *outs, *primals))
            leaves = [
                next(bridged) if isinstance(v, torch.Tensor) else v for v in leaves
            ]
            found.clear()
            return tree_unflatten(leaves, spec)

        return call

    return context


def _is_differentiated(value):
    return isinstance(value, torch.Tensor) and value.requires_grad


def _loss(outs):
    return sum(
        (o * (o.detach() + k)).sum() for k, o in enumerate(outs, 1) if _is_real(o)
    )


def _is_real(tensor):
    return tensor.is_floating_point()


def by_vjp(fn, primals):
    outs, pull = vjp(fn, *primals)
    return outs, pull


def by_grad(fn, primals):
    def loss(*primals):
        outs = fn(*primals)
        return _loss(outs), outs

    grads, outs = grad(loss, argnums=(*range(len(primals)),), has_aux=True)(*primals)
    return outs, lambda _: grads


def by_vmap_of_grad(fn, primals):
    batches = [torch.stack([p, p.cos()]) for p in primals]
    grads, outs = vmap(functools.partial(_grads_and_outs, fn))(*batches)
    return tuple(o[1] for o in outs), lambda _: tuple(g.sum(0) for g in grads)


def _grads_and_outs(fn, *primals):
    outs, pull = by_grad(fn, primals)
    return pull(None), outs


def by_jacrev(fn, primals):
    def twice(*primals):
        outs = fn(*primals)
        return tuple(filter(_is_real, outs)), outs

    argnums = (*range(len(primals)),)
    jacobians, outs = jacrev(twice, argnums=argnums, has_aux=True)(*primals)
    grads = []
    for k, primal in enumerate(primals):
        rows = [j[k].reshape(-1, *primal.shape).sin().sum(0) for j in jacobians]
        grads.append(sum(rows))
    return outs, lambda _: tuple(grads)


def by_jvp_of_grad(fn, primals):
    tangents = tuple(p.cos() for p in primals)
    grads, products, outs = jvp(
        lambda *p: _grads_and_outs(fn, *p), tuple(primals), tangents, has_aux=True
    )
    return outs, lambda _: tuple(g + p for g, p in zip(grads, products, strict=True))


# --- Steps of a chain ---


def in_a_chain(fn):
    """Return what calls a function in two steps: of a chain if it is rematerialized."""
    is_plain = not hasattr(type(fn), "__remat_options__")
    fn = fn if is_plain else fn.__wrapped__

    def call(x, *args, **kwargs):
        def step(h, _):
            leaves = tree_flatten(fn(h, *args, **kwargs))[0]
            outs = [v for v in leaves if isinstance(v, torch.Tensor)]
            return h.cos() + next(filter(_is_real, outs)).sum() / 8, tuple(outs)

        if is_plain:
            h, *rows = x, *[None] * STEPS
            for k in range(STEPS):
                h, rows[k] = step(h, None)
            ys = tuple(map(torch.stack, zip(*rows, strict=True)))
        else:
            h, ys = chain.scan(step, x, length=STEPS, checkpoints="all")
        outs = [y.sum(0) for y in ys]
        outs[0] = outs[0] + h.sum()
        return outs[0] if len(outs) == 1 else outs

    return call


STEPS = 2  # gradients of what both use are added up in either order
CONTEXTS = {
    "vjp": below(by_vjp),
    "grad": below(by_grad),
    "vmap(grad)": below(by_vmap_of_grad),
    "jacrev": below(by_jacrev),
    "jvp(grad)": below(by_jvp_of_grad),
    "chain.scan": in_a_chain,
}
