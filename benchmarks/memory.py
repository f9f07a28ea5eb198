"""Peak memory of checkpointed blocks: under every derivative, and while training.

Two tables:

- a chain of 8 blocks of 8 sines on one 16 MB tensor, every block checkpointed, under
  each kind of derivative: the peak, in tensors,
- 4 transformer blocks whose parameters are larger than what they compute: the peak of a
  step that adds to gradients that are there already, and of one whose optimizer takes
  each gradient when it is complete (``register_post_accumulate_grad_hook``), in bytes,
  in each style that a block is written in.

What a system cannot run shows as n/a with the exception that it raised. Reproduce with

    python benchmarks/memory.py
"""

import argparse
import contextlib
import functools
import io
import warnings
from collections.abc import Callable

import torch
from _block import block_work, stream
from _results import Results, Table
from _styles import STYLES
from _systems import (
    BASELINE,
    DEFAULT,
    PLAIN,
    REENTRANT,
    SYSTEMS,
    TORCH_REMAT,
    TensorFn,
    Wrapper,
    brief,
)
from rich.progress import track
from torch import Tensor
from torch.autograd import grad as base_grad
from torch.func import grad, jvp, vmap

from remat import remat
from remat.testing import peak_bytes


Peak = float | str  # text: why there is none


# --- Derivatives ---------------------------------------------------------------------


BLOCKS = 8
SINES = 8
ROWS = 4  # the batch of vmap: the tensor is as large as everywhere

HIGHER = "remat, higher_order=True"
CHAINED = {
    name: SYSTEMS[name] for name in (PLAIN, REENTRANT, BASELINE, TORCH_REMAT, DEFAULT)
}
CHAINED[HIGHER] = functools.partial(remat, higher_order=True)

FIRST_ORDER, SECOND_ORDER = ".backward()", "second order"
# The most tensors that a system may hold.
TARGETS = {
    (FIRST_ORDER, DEFAULT): 16,
    (FIRST_ORDER, HIGHER): 17,
    (SECOND_ORDER, HIGHER): 42,
    ("func.grad", DEFAULT): 23,
    ("vmap of grad", DEFAULT): 23,
    ("grad of grad", DEFAULT): 55,
    ("grad of jvp", DEFAULT): 53,
}


def sines(x: Tensor) -> Tensor:
    """Apply the unit of work that each system checkpoints."""
    for _ in range(SINES):
        x = x.sin()
    return x


def chain_loss(wrap: Wrapper) -> TensorFn:
    """Return the program: the wrapped block several times over, then a sum."""
    wrapped = wrap(sines)

    def loss(x: Tensor) -> Tensor:
        for _ in range(BLOCKS):
            x = wrapped(x)
        return x.sum()

    return loss


def backward(loss: TensorFn, x: Tensor) -> None:
    """Differentiate with the autograd tape, as training loops do."""
    leaf = x.detach().requires_grad_()
    loss(leaf).backward()


def backward_twice(loss: TensorFn, x: Tensor) -> None:
    """Differentiate the gradient that the tape gives, as a gradient penalty does."""
    leaf = x.detach().requires_grad_()
    (first,) = base_grad(loss(leaf), leaf, create_graph=True)
    first.sum().backward()


def grad_of_grad(loss: TensorFn, x: Tensor) -> Tensor:
    """Differentiate the gradient: the second order of every value of it."""
    return grad(lambda x: grad(loss)(x).sin().sum())(x)


def grad_of_jvp(loss: TensorFn, x: Tensor) -> Tensor:
    """Differentiate a directional derivative: one Hessian-vector product."""
    return grad(lambda y: jvp(loss, (y,), (x,))[1])(x)


DERIVATIVES: dict[str, Callable[[TensorFn, Tensor], object]] = {
    FIRST_ORDER: backward,
    SECOND_ORDER: backward_twice,
    "func.grad": lambda loss, x: grad(loss)(x),
    "grad of grad": grad_of_grad,
    "vmap of grad": lambda loss, x: vmap(grad(loss))(x.view(ROWS, -1)),
    "grad of jvp": grad_of_jvp,
}


def chain_peak(derivative: str, wrap: Wrapper, x: Tensor) -> Peak:
    """Return the peak in units of ``x``, or why there is none."""
    run = functools.partial(DERIVATIVES[derivative], chain_loss(wrap), x)
    try:
        # Autograd prints the trace of an error inside backward; the table says it.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return peak_bytes(run) / x.nbytes
    except (RuntimeError, NotImplementedError) as error:
        return brief(error)


def derivatives(megabytes: float, results: Results) -> None:
    """Print the peaks under derivatives."""
    x = torch.linspace(0, 1, ROWS * int(megabytes * 2**20 / 4 / ROWS))
    title = f"Peak in tensors of {megabytes:g} MB: {BLOCKS} blocks of {SINES} sines"
    cells = results.table("derivatives", title, "derivative", [*CHAINED], ".1f")
    for name in track(DERIVATIVES, transient=True, description="measuring"):
        peaks = {who: chain_peak(name, wrap, x) for who, wrap in CHAINED.items()}
        cells.add(name, *peaks.values())
        aim(cells, name, peaks)
    results.show(cells)


def aim(cells: Table, derivative: str, peaks: dict[str, Peak]) -> None:
    """Say whether each system meets its target, if it has one."""
    for (name, who), limit in TARGETS.items():
        if name == derivative:
            peak = peaks[who]
            # A few bytes for scalars are not a tensor.
            met = not isinstance(peak, str) and peak < limit + 0.01
            cells.aim(name, f"{who} <= {limit}", peak, met)


# --- Training ------------------------------------------------------------------------


LAYERS = 4
SHAPE = (2, 8, 256)  # batch, time, width
TRAINED = PLAIN, REENTRANT, BASELINE, TORCH_REMAT, DEFAULT


class Training:
    """Blocks in a row, and their parameters."""

    def __init__(self, wrap: Wrapper, style: str) -> None:
        works = [block_work(style, *SHAPE) for _ in range(LAYERS)]
        self.blocks = [(wrap(work.fn), work) for work in works]
        self.params = [p for work in works for p in work.leaves[1:]]

    def step(self) -> None:
        """Add to the gradients of all parameters."""
        x = stream(*SHAPE)
        for block, work in self.blocks:
            x = block(*(x if arg is work.leaves[0] else arg for arg in work.args))
        x.sum().backward()

    def update_in_hooks(self) -> None:
        """Have each parameter updated, and its gradient dropped, when that is there."""
        for p in self.params:
            optimizer = torch.optim.SGD([p], lr=1e-3, foreach=False)

            def update(_: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(update)


def training_peak(wrap: Wrapper, style: str, *, in_hooks: bool) -> int:
    """Return the peak of a step, once others are over."""
    training = Training(wrap, style)
    if in_hooks:
        training.update_in_hooks()
    training.step()
    training.step()
    return peak_bytes(training.step)


def trainings(results: Results) -> None:
    """Print the peaks while training."""
    title = "Peak bytes of a step of {} blocks of {} x {} x {}".format(LAYERS, *SHAPE)
    cells = results.table("training", title, "gradients, style", TRAINED)
    for kind, in_hooks in ("added to others", False), ("taken by an optimizer", True):
        for style in STYLES:
            peaks = {
                name: training_peak(SYSTEMS[name], style, in_hooks=in_hooks)
                for name in TRAINED
            }
            row = f"{kind}, {style}"
            cells.add(row, *peaks.values())
            met = peaks[DEFAULT] <= peaks[BASELINE]
            cells.aim(row, f"<= {BASELINE}", peaks[DEFAULT], met)
    results.show(cells)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=float, default=16, help="size of the tensor")
    megabytes = parser.parse_args().mb
    if megabytes <= 0:
        parser.error(f"--mb must be positive, got {megabytes:g}")
    torch.set_num_threads(1)  # bytes are the same, and a busy machine no matter
    results = Results(__file__)
    derivatives(megabytes, results)
    trainings(results)
    results.finish()


if __name__ == "__main__":
    main()
