"""Count what `jax.checkpoint` runs of the programs of the golden table.

Printed as JSON: for each program its operations forward and backward, and the version
of JAX. `jax_counts.py` runs this in a Python that has jax and need not have torch.

Invariant: an operation counts once for each equation of the jaxprs of `jax.vjp`, the
forward's and the pull-back's, which is what eager code runs. XLA is not asked.
"""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core
from jax import numpy as jnp


policies = jax.checkpoint_policies
dots = functools.partial(jax.checkpoint, policy=policies.dots_saveable)
everything = functools.partial(jax.checkpoint, policy=policies.everything_saveable)
nothing = functools.partial(jax.checkpoint, policy=policies.nothing_saveable)
remat = jax.checkpoint

Fn = Callable[..., Any]


def sin2(w: Any, x: Any) -> Any:
    """Apply two sines."""
    del w
    return jnp.sin(jnp.sin(x))


def sin3(w: Any, x: Any) -> Any:
    """Apply three sines."""
    return jnp.sin(sin2(w, x))


def sin_exp(w: Any, x: Any) -> Any:
    """Return a sine and an exponential."""
    del w
    return jnp.sin(x), jnp.exp(x)


def sin2_exp2(w: Any, x: Any) -> Any:
    """Return two of each."""
    return sin2(w, x), jnp.exp(jnp.exp(x))


def linear(w: Any, x: Any) -> Any:
    """Scale and shift."""
    del w
    return 2 * x + 1


def sin_plus(w: Any, x: Any) -> Any:
    """Add a sine."""
    return jnp.sin(x) + w


def product(w: Any, x: Any) -> Any:
    """Multiply matrices."""
    return w @ x


def block(w: Any, x: Any) -> Any:
    """Apply two layers."""
    return jnp.tanh(w @ jnp.tanh(w @ x))


def first(fn: Fn) -> Fn:
    """Return the first result alone."""
    return lambda w, x: fn(w, x)[0]


def two(fn: Fn) -> Fn:
    """Apply a function twice."""
    return lambda w, x: fn(w, fn(w, x))


PROGRAMS: dict[str, Fn] = {
    "sin2": remat(sin2),
    "sin3": remat(sin3),
    "sin, exp": first(remat(sin_exp)),
    "sin2, exp2": first(remat(sin2_exp2)),
    "2x+1": remat(linear),
    "sin(x)+y": remat(sin_plus),
    "W@x": remat(product),
    "plain": block,
    "remat": remat(block),
    "nothing": nothing(block),
    "dots": dots(block),
    "everything": everything(block),
    "remat(remat)": remat(remat(block)),
    "three deep": remat(remat(remat(block))),
    "remat(dots)": remat(dots(block)),
    "dots(remat)": dots(remat(block)),
    "everything(remat)": everything(remat(block)),
    "two": two(remat(block)),
    "remat(two)": remat(two(remat(block))),
}
NAMES = {"dot_general": "dot"}


def primitives(jaxpr: Any) -> Iterator[str]:
    """Yield the operations of a jaxpr, and of those inside."""
    for equation in jaxpr.eqns:
        inner = [*jax.extend.core.jaxprs_in_params(equation.params)]
        for each in inner:
            yield from primitives(each)
        if not inner:
            yield equation.primitive.name


def counted(fn: Fn, *args: Any) -> Counter[str]:
    """Count the operations of a function."""
    found = primitives(jax.make_jaxpr(fn)(*args).jaxpr)
    return Counter(NAMES.get(name, name) for name in found)


def counts(fn: Fn) -> tuple[Counter[str], Counter[str]]:
    """Count the forward that a pull-back needs, and the pull-back."""
    w, x = jnp.ones((3, 3)), jnp.ones((3, 3))
    out, pull = jax.vjp(fn, w, x)
    return counted(lambda w, x: jax.vjp(fn, w, x), w, x), counted(pull, out)


if __name__ == "__main__":
    rows = {name: counts(fn) for name, fn in PROGRAMS.items()}
    print(json.dumps({"version": jax.__version__, "rows": rows}))
