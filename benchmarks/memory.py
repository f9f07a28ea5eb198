"""Peak memory of a chain of blocks, in tensors, under every kind of derivative.

The program is 8 blocks of 8 sines on one 16 MB tensor, every block checkpointed. What a
system cannot run shows as n/a with the exception that it raised. Reproduce with

    python benchmarks/memory.py
"""

import argparse
import contextlib
import functools
import io
import sys
import warnings
from collections.abc import Callable

import torch
from _systems import SYSTEMS, TensorFn, Wrapper, brief
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.func import grad, jvp, vmap

from remat.testing import peak_bytes


BLOCKS = 8
SINES = 8
ROWS = 4  # the batch of vmap: the tensor is as large as everywhere

# Most tensors that remat may hold: a number, or a share of what plain holds.
TARGETS: dict[str, tuple[float, str]] = {
    ".backward()": (17, "tensors"),
    "func.grad": (25, "tensors"),
    "grad of grad": (1 / 4, "of plain"),
    "vmap of grad": (1 / 4, "of plain"),
    "grad of jvp": (1 / 4, "of plain"),
}


def block(x: Tensor) -> Tensor:
    """Apply the unit of work that each system checkpoints."""
    for _ in range(SINES):
        x = x.sin()
    return x


def make_loss(wrap: Wrapper) -> TensorFn:
    """Return the program: the wrapped block several times over, then a sum."""
    wrapped = wrap(block)

    def loss(x: Tensor) -> Tensor:
        for _ in range(BLOCKS):
            x = wrapped(x)
        return x.sum()

    return loss


def backward(loss: TensorFn, x: Tensor) -> None:
    """Differentiate with the autograd tape, as training loops do."""
    leaf = x.detach().requires_grad_()
    loss(leaf).backward()


def grad_of_grad(loss: TensorFn, x: Tensor) -> Tensor:
    """Differentiate the gradient: the second order of every value of it."""
    return grad(lambda x: grad(loss)(x).sin().sum())(x)


def grad_of_jvp(loss: TensorFn, x: Tensor) -> Tensor:
    """Differentiate a directional derivative: one Hessian-vector product."""
    return grad(lambda y: jvp(loss, (y,), (x,))[1])(x)


DERIVATIVES: dict[str, Callable[[TensorFn, Tensor], object]] = {
    ".backward()": backward,
    "func.grad": lambda loss, x: grad(loss)(x),
    "grad of grad": grad_of_grad,
    "vmap of grad": lambda loss, x: vmap(grad(loss))(x.view(ROWS, -1)),
    "grad of jvp": grad_of_jvp,
}


def measure(derivative: str, wrap: Wrapper, x: Tensor) -> float | str:
    """Return the peak in units of ``x``, or why there is none."""
    run = functools.partial(DERIVATIVES[derivative], make_loss(wrap), x)
    try:
        # Autograd prints the trace of an error inside backward; the table says it.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return peak_bytes(run) / x.nbytes
    except (RuntimeError, NotImplementedError) as error:
        return brief(error)


def verdict(derivative: str, peaks: dict[str, float | str]) -> tuple[bool, str]:
    """Say whether remat meets its target, and what that is."""
    bound, unit = TARGETS[derivative]
    plain, ours = peaks["plain"], peaks["remat"]
    if isinstance(plain, str) or isinstance(ours, str):
        return False, "no number"
    limit = bound * plain if unit == "of plain" else bound
    met = ours < limit + 0.01  # a few bytes for scalars are not a tensor
    return met, f"{'met' if met else 'MISSED'} (<= {limit:.0f})"


def main() -> None:
    """Measure, print the table, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=float, default=16, help="size of the tensor")
    megabytes = parser.parse_args().mb
    if megabytes <= 0:
        parser.error(f"--mb must be positive, got {megabytes:g}")
    x = torch.linspace(0, 1, ROWS * int(megabytes * 2**20 / 4 / ROWS))
    table = Table(title=f"Peak in tensors of {megabytes:g} MB: 8 blocks of 8 sines")
    table.add_column("derivative")
    for name in SYSTEMS:
        table.add_column(name, justify="right")
    table.add_column("target")
    all_met = True
    for derivative in track(DERIVATIVES, transient=True, description="measuring"):
        peaks = {name: measure(derivative, SYSTEMS[name], x) for name in SYSTEMS}
        met, text = verdict(derivative, peaks)
        cells = [p if isinstance(p, str) else f"{p:.2f}" for p in peaks.values()]
        table.add_row(derivative, *cells, text)
        all_met &= met
    Console().print(table)
    sys.exit(not all_met)


if __name__ == "__main__":
    main()
