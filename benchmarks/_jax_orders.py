"""Count what `jax.checkpoint` evaluates under nested derivatives, for `orders.py`.

Printed as JSON: for each derivative the `tanh` and products in its jaxpr, without dead
ones, and the bytes between the forward and the backward of its outermost level.
`orders.py` runs this in a Python that has jax and need not have torch.

Invariant: the programs are those of `orders.py`, on inputs of the same sizes.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core
from jax import numpy as jnp
from jax.interpreters import partial_eval


BLOCKS, WIDTH, BATCH, RATE = 6, 16, 8, 0.1

Fn = Callable[..., Any]


def block(w: Any, x: Any) -> Any:
    """Add a layer to its input."""
    return x + jnp.tanh(x @ w[0]) @ w[1]


def network(wrap: Fn) -> Fn:
    """Return six blocks, each of which is wrapped."""
    wrapped = wrap(block)

    def run(ws: Any, x: Any) -> Any:
        for w in ws:
            x = wrapped(w, x)
        return x

    return run


def loss(net: Fn) -> Fn:
    """Return the mean of squares of a network, a function of weights and input."""
    return lambda ws, x: jnp.mean(net(ws, x) ** 2)


def push(fn: Fn, v: Any) -> Fn:
    """Return the derivative of a function along a vector."""
    return lambda x: jax.jvp(fn, (x,), (v,))[1]


# A program is what is run on the weights, and the function of the weights whose
# gradient that is, if it is one.
Made = tuple[Fn, Fn | None]


def of_weights(fn: Fn) -> Made:
    """Return the gradient of a function of the weights, and the function."""
    return jax.grad(fn), fn


def jvp_of_grad(net: Fn, x: Any) -> Made:
    """Multiply the Hessian by a vector."""
    return lambda ws: push(jax.grad(lambda x: loss(net)(ws, x)), x)(x), None


def vmap_of_hessian(net: Fn, x: Any) -> Made:
    """Compute the Hessian of each example."""
    return lambda ws: jax.vmap(jax.hessian(lambda x: loss(net)(ws, x)))(x), None


def score(net: Fn, x: Any) -> Made:
    """Differentiate the loss of sliced score matching by weights."""

    def matched(ws: Any) -> Any:
        value, along = jax.jvp(lambda x: net(ws, x), (x,), (x,))
        return jnp.sum(along * x) + 0.5 * jnp.sum(value**2)

    return of_weights(matched)


def slope(net: Fn, ws: Any) -> Fn:
    """Return the gradient of the sum of a network by its input."""
    return jax.grad(lambda x: jnp.sum(net(ws, x)))


def pinn_by_jvp(net: Fn, x: Any) -> Made:
    """Differentiate by weights a residual that holds a second derivative by inputs."""
    return of_weights(lambda ws: jnp.sum(push(slope(net, ws), x)(x) ** 2))


def pinn_by_vjp(net: Fn, x: Any) -> Made:
    """Do the same with a vjp of the gradient."""
    return of_weights(lambda ws: jnp.sum(jax.vjp(slope(net, ws), x)[1](x)[0] ** 2))


def grad_grad(net: Fn, x: Any) -> Made:
    """Differentiate the squares of a gradient by weights."""
    return of_weights(lambda ws: jnp.sum(slope(net, ws)(x) ** 2))


def maml(net: Fn, x: Any) -> Made:
    """Differentiate through three steps of gradient descent."""

    def after_steps(ws: Any) -> Any:
        for _ in range(3):
            slopes = jax.grad(lambda ws: loss(net)(ws, x))(ws)
            ws = [
                tuple(w - RATE * s for w, s in zip(*pair, strict=True))
                for pair in zip(ws, slopes, strict=True)
            ]
        return loss(net)(ws, x)

    return of_weights(after_steps)


PROGRAMS = {
    "jvp of grad": jvp_of_grad,
    "vmap of hessian": vmap_of_hessian,
    "score matching by jvp": score,
    "PINN, by jvp of grad": pinn_by_jvp,
    "grad of vjp of grad": pinn_by_vjp,
    "grad of grad": grad_grad,
    "MAML": maml,
}


def equations(jaxpr: Any) -> Iterator[str]:
    """Yield the operations of a jaxpr, and of those inside."""
    for equation in jaxpr.eqns:
        inner = [*jax.extend.core.jaxprs_in_params(equation.params)]
        for each in inner:
            yield from equations(each)
        if not inner:
            yield equation.primitive.name


def counted(fn: Fn, *args: Any) -> Counter[str]:
    """Count the operations of a function that its results depend on."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return Counter(equations(live))


def stored(fn: Fn, ws: Any) -> int:
    """Return the bytes that the backward of a function of the weights waits with."""
    _, pull = jax.vjp(fn, ws)
    given = {id(w) for w in jax.tree.leaves(ws)}
    held = {id(a): a.nbytes for a in jax.tree.leaves(pull) if id(a) not in given}
    return sum(held.values())


def main() -> None:
    """Count, and print."""
    keys = jax.random.split(jax.random.key(0), 2 * BLOCKS + 1)
    made = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys[1:]]
    ws = [*zip(made[::2], made[1::2], strict=True)]
    x = jax.random.normal(keys[0], (BATCH, WIDTH))
    rows: dict[str, Any] = {}
    for name, program in PROGRAMS.items():
        found = []
        for wrap in (lambda fn: fn, jax.checkpoint):
            run, of_weights = program(network(wrap), x)
            ops = counted(run, ws)
            held = stored(of_weights, ws) if of_weights is not None else 0
            found.append((ops["tanh"], ops["dot_general"], held))
        rows[name] = found
    print(json.dumps({"version": jax.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
