"""What three open requests to PyTorch ask for: checkpoints under torch.func.

Each program is like a use that somebody describes there, in our own words:

- pytorch issue 122729: gradients of each example of a transformer, by ``vmap`` of
  ``grad`` of ``functional_call``, as a comment has it; here each layer is checkpointed,
- issue 141845: the Jacobian, by ``jacrev``, of a flow of many steps of a network, each
  step checkpointed,
- issue 146036: learning at test time. Each example takes gradient steps on weights of
  its own, by ``grad`` under ``vmap``. Here a loss is differentiated through them, too.

The table shows the peak of each system, or the error that it raises, and the largest
difference between the result of remat and that of plain code. Reproduce with

    python benchmarks/torch_issues.py
"""

import contextlib
import functools
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree  # noqa: TID251 (a user's program, not the library)
import torch
from _results import Results
from _systems import (
    BASELINE,
    DEFAULT,
    PLAIN,
    REENTRANT,
    SYSTEMS,
    TORCH_REMAT,
    Wrapper,
    brief,
)
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat.testing import peak_bytes


Run = Callable[[], Any]
Program = Callable[[Wrapper], Run]  # makes the inputs, which no peak counts

EXAMPLES, TOKENS, WIDTH, LAYERS = 4, 128, 32, 6
STEPS, STATE, HIDDEN = 100, 16, 256
INNER_STEPS, MEMORY_BLOCKS, RATE = 4, 8, 0.1


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw numbers that do not depend on what was drawn before."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- 122729: a transformer, per example -----------------------------------------------


class Transformer(nn.Module):
    """Layers in a row, each called through a system."""

    def __init__(self, wrap: Wrapper) -> None:
        super().__init__()
        self.wrap = wrap
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream."""
        for layer in self.layers:
            x = self.wrap(layer)(x)
        return x


def per_example_gradients(wrap: Wrapper) -> Run:
    """Return what computes the gradients of all parameters, for each example."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(wrap)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x[None],)).square().mean()

    params = {name: p.detach() for name, p in model.named_parameters()}
    xs = normal(EXAMPLES, TOKENS, WIDTH)

    def run() -> Any:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no rule for vmap
            return vmap(grad(loss), in_dims=(None, 0))(params, xs)

    return run


# --- 141845: the Jacobian of a flow ---------------------------------------------------


def jacobian_of_flow(wrap: Wrapper) -> Run:
    """Return what computes the Jacobian of a flow: its end by its start."""
    shapes = (STATE, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, STATE)
    weights = [
        normal(*shape, seed=i) / shape[0] ** 0.5 for i, shape in enumerate(shapes)
    ]

    def step(x: Tensor) -> Tensor:
        into, across, out = weights
        return x + torch.tanh(torch.tanh(x @ into) @ across) @ out / STEPS

    wrapped = wrap(step)

    def flow(x: Tensor) -> Tensor:
        for _ in range(STEPS):
            x = wrapped(x)
        return x

    return functools.partial(jacrev(flow), normal(STATE))


# --- 146036: learning at test time ----------------------------------------------------


def learning_at_test_time(wrap: Wrapper) -> Run:
    """Return what differentiates the loss after learning, by the first weights."""

    @wrap
    def block(weight: Tensor, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ weight).sin()

    def memory(weights: Tensor, x: Tensor) -> Tensor:
        for weight in weights:
            x = block(weight, x)
        return x

    def surprise(weights: Tensor, x: Tensor) -> Tensor:
        return (memory(weights, x) - x.roll(1, 0)).square().mean()

    def after_learning(weights: Tensor, x: Tensor) -> Tensor:
        for _ in range(INNER_STEPS):
            weights = weights - RATE * grad(surprise)(weights, x)
        return surprise(weights, x)

    def outer(weights: Tensor, xs: Tensor) -> Tensor:
        return vmap(after_learning, in_dims=(None, 0))(weights, xs).mean()

    weights = normal(MEMORY_BLOCKS, STATE, STATE) / STATE**0.5
    xs = normal(EXAMPLES, TOKENS, STATE, seed=3)
    return functools.partial(grad(outer), weights, xs)


# --- The table ------------------------------------------------------------------------


PROGRAMS: dict[str, Program] = {
    "122729: vmap(grad) of a transformer": per_example_gradients,
    "141845: jacrev of a flow": jacobian_of_flow,
    "146036: grad of vmap of grad": learning_at_test_time,
}
TARGET = 0.3
COMPARED = PLAIN, REENTRANT, BASELINE, TORCH_REMAT, DEFAULT


@dataclass(frozen=True)
class Row:
    """What the systems do with one program.

    Attributes:
        peaks: in bytes by system, or why there is none.
        difference: the largest, between the results of remat and of plain code.
    """

    peaks: dict[str, float | str]
    difference: float


def peak(program: Program, wrap: Wrapper) -> float | str:
    """Return the peak of a program in bytes, or why there is none."""
    try:
        # Autograd prints the trace of an error inside backward; the table says it.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            run = program(wrap)
            run()  # what a first call leaves for good is not counted
            return peak_bytes(run)
    except (RuntimeError, NotImplementedError) as error:
        return brief(error)


def difference(ours: Any, plain: Any) -> float:
    """Return the largest difference between two pytrees."""
    gaps = optree.tree_map(lambda a, b: (a - b).abs().max().item(), ours, plain)
    return max(optree.tree_leaves(gaps))


def measured(program: Program) -> Row:
    """Run a program with every system."""
    peaks = {name: peak(program, SYSTEMS[name]) for name in COMPARED}
    ours, plain = (program(SYSTEMS[name])() for name in (DEFAULT, PLAIN))
    return Row(peaks, difference(ours, plain))


def main() -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)  # bytes are the same, and a busy machine no matter
    results = Results(__file__)
    columns = dict.fromkeys(COMPARED, ",") | {"of plain": ".2f", "difference": ".1g"}
    cells = results.table("peaks", "Peak bytes", "pytorch issue", columns)
    for name, program in PROGRAMS.items():
        row = measured(program)
        ours, plain = row.peaks[DEFAULT], row.peaks[PLAIN]
        share = ours if isinstance(ours, str) else ours / plain
        cells.add(name, *row.peaks.values(), share, row.difference)
        met = not isinstance(share, str) and share < TARGET
        cells.aim(name, f"< {TARGET} of plain", share, met)
    results.show(cells)
    results.finish()


if __name__ == "__main__":
    main()
