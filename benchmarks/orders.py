"""What higher derivatives evaluate: `remat`, beside `jax.checkpoint`.

Six residual blocks, each wrapped, under nested derivatives. Counted are the evaluations
of ``tanh`` and the products, and the bytes that the backward of the outermost level
waits with, beside its inputs. The programs of JAX are written again in
``_jax_orders.py``, and counted in its jaxprs without dead operations. remat's are
counted as they run. Reproduce with

    python benchmarks/orders.py

It uses the jax that is installed, or that of ``JAX_PYTHON=/path/to/python``. Without
one there are no numbers of JAX.

JAX evaluates less where the backward of a call is differentiated in reverse, as in
``grad(grad)``: there it stores what the forward of the call computed. remat stores the
inputs of calls and nothing else.
"""

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _jax import counted_by_jax
from _results import Results
from _systems import DEFAULT, PLAIN, SYSTEMS, Wrapper
from torch import Tensor
from torch.func import grad, hessian, jvp, vjp, vmap

from remat.testing import count_ops, live_bytes


COUNTER = Path(__file__).with_name("_jax_orders.py")
BLOCKS, WIDTH, BATCH, RATE = 6, 16, 8, 0.1
# The most evaluations of `tanh`.
TARGETS = {
    "jvp of grad": 12,
    "vmap of hessian": 12,
    "score matching by jvp": 12,
    "PINN, by jvp of grad": 23,
    "grad of vjp of grad": 44,
    "grad of grad": 23,
    "MAML": 84,
}

Weights = list[tuple[Tensor, Tensor]]
Net = Callable[[Weights, Tensor], Tensor]
Fn = Callable[..., Any]
# What is run on the weights, and the function of the weights whose gradient that is.
Made = tuple[Fn, Fn | None]


def block(w: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """Add a layer to its input."""
    return x + torch.tanh(x @ w[0]) @ w[1]


def network(wrap: Wrapper) -> Net:
    """Return six blocks, each of which is wrapped."""
    wrapped = wrap(block)

    def run(ws: Weights, x: Tensor) -> Tensor:
        for w in ws:
            x = wrapped(w, x)
        return x

    return run


def of_weights(fn: Fn) -> Made:
    """Return the gradient of a function of the weights, and the function."""
    return grad(fn), fn


def push(fn: Fn, v: Tensor) -> Fn:
    """Return the derivative of a function along a vector."""
    return lambda x: jvp(fn, (x,), (v,))[1]


def slope(net: Net, ws: Weights) -> Fn:
    """Return the gradient of the sum of a network by its input."""
    return grad(lambda x: net(ws, x).sum())


def loss(net: Net, ws: Weights) -> Fn:
    """Return the mean of squares of a network, as a function of its input."""
    return lambda x: net(ws, x).square().mean()


def score(net: Net, x: Tensor) -> Made:
    """Differentiate the loss of sliced score matching by weights."""

    def matched(ws: Weights) -> Tensor:
        value, along = jvp(lambda x: net(ws, x), (x,), (x,))
        return (along * x).sum() + 0.5 * value.square().sum()

    return of_weights(matched)


def maml(net: Net, x: Tensor) -> Made:
    """Differentiate through three steps of gradient descent."""

    def after_steps(ws: Weights) -> Tensor:
        for _ in range(3):
            slopes = grad(lambda ws: loss(net, ws)(x))(ws)
            ws = [
                (a - RATE * da, b - RATE * db)
                for (a, b), (da, db) in zip(ws, slopes, strict=True)
            ]
        return loss(net, ws)(x)

    return of_weights(after_steps)


PROGRAMS: dict[str, Callable[[Net, Tensor], Made]] = {
    "jvp of grad": lambda net, x: (
        lambda ws: push(grad(loss(net, ws)), x)(x),
        None,
    ),
    "vmap of hessian": lambda net, x: (
        lambda ws: vmap(hessian(loss(net, ws)))(x),
        None,
    ),
    "score matching by jvp": score,
    "PINN, by jvp of grad": lambda net, x: of_weights(
        lambda ws: push(slope(net, ws), x)(x).square().sum()
    ),
    "grad of vjp of grad": lambda net, x: of_weights(
        lambda ws: vjp(slope(net, ws), x)[1](x)[0].square().sum()
    ),
    "grad of grad": lambda net, x: of_weights(
        lambda ws: slope(net, ws)(x).square().sum()
    ),
    "MAML": maml,
}


def inputs() -> tuple[Weights, Tensor]:
    """Return weights and a batch."""
    torch.manual_seed(0)

    def weight() -> Tensor:
        return torch.randn(WIDTH, WIDTH) / WIDTH**0.5

    return [(weight(), weight()) for _ in range(BLOCKS)], torch.randn(BATCH, WIDTH)


def counted(name: str, system: str) -> tuple[int, int, int]:
    """Return evaluations of `tanh`, products, and bytes that wait for the backward."""
    ws, x = inputs()
    run, fn = PROGRAMS[name](network(SYSTEMS[system]), x)
    with count_ops() as ops:
        run(ws)
    products = sum(ops[op] for op in ("mm", "bmm", "addmm", "mv", "dot"))
    gc.collect()
    held = 0 if fn is None else live_bytes(lambda: vjp(fn, ws)[1])
    return ops["tanh"], products, held


def by_jax() -> tuple[str, dict[str, Any]]:
    """Return the version of JAX, and its counts; none where there is no JAX."""
    found = counted_by_jax(COUNTER)
    return ("not run", {}) if found is None else (found["version"], found["rows"])


def main() -> None:
    """Count and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args()
    torch.set_num_threads(1)
    results = Results(__file__)
    version, jax = by_jax()
    columns = {
        "plain": "d",
        "remat": "d",
        "JAX": "d",
        "plain, products": "d",
        "remat, products": "d",
        "JAX, products": "d",
    }
    title = f"Evaluations of tanh in six blocks, and products (JAX {version})"
    cells = results.table("evaluations", title, "derivative", columns)
    waits: dict[str, tuple[Any, ...]] = {}
    for name in PROGRAMS:
        plain, ours = counted(name, PLAIN), counted(name, DEFAULT)
        theirs = jax[name][1] if jax else ("n/a",) * 3
        cells.add(name, *(plain[0], ours[0], theirs[0], plain[1], ours[1], theirs[1]))
        most = TARGETS[name]
        cells.aim(name, f"<= {most}", str(ours[0]), ours[0] <= most)
        if ours[2]:
            waits[name] = plain[2], ours[2], theirs[2]
    results.show(cells)
    title = f"Bytes that wait for the outermost backward (JAX {version})"
    cells = results.table("bytes", title, "derivative", ["plain", "remat", "JAX"], ",")
    for name, row in waits.items():
        cells.add(name, *row)
    results.show(cells)
    results.finish()


if __name__ == "__main__":
    main()
