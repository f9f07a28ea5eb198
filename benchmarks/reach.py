"""What a call costs for what it can reach and does not use.

A function runs four ops, or two blocks. Beside that it reaches parameters, tensors,
objects or blocks that it leaves alone. Instructions beyond plain are counted, as shares
of those of torch's checkpoint. Reproduce with

    python benchmarks/reach.py

``_count.py`` says how instructions are counted.
"""

import argparse
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from _count import Case, Counts, Label, count
from _results import THOUSANDS, Results
from _styles import Step, Work
from _systems import BASELINE, DEFAULT, PLAIN, SYSTEMS
from overhead import ops
from sequential import Block
from torch import Tensor, nn


CHOSEN = PLAIN, BASELINE, DEFAULT
Function = Callable[[Tensor], Tensor]


class Unused(nn.Module):
    """Four ops, and modules that they do not use."""

    def __init__(self, modules: nn.Module) -> None:
        super().__init__()
        self.modules_beside = modules

    def forward(self, x: Tensor) -> Tensor:
        """Run the four ops."""
        return ops(x)


def parameters(n: int) -> Function:
    """Return a module with parameters that it does not use."""
    return Unused(nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(n)))


def modules(n: int) -> Function:
    """Return a module with modules that it does not use."""
    return Unused(nn.ModuleList(nn.Linear(2, 2) for _ in range(n)))


def tensors(n: int) -> Function:
    """Return a function with a list of tensors, one of which it uses."""
    held = [torch.full((2,), 1 + i / 1000) for i in range(n)]
    return lambda x: ops(x) * held[0].sum() * len(held)


class Numbered:
    """An object of the user's."""

    def __init__(self, number: int) -> None:
        self.number = number


def objects(n: int) -> Function:
    """Return a function with a list of objects, of which it reads the length."""
    held = [Numbered(i) for i in range(n)]
    return lambda x: ops(x) * (len(held) / n)


def blocks(n: int) -> Function:
    """Return a function that calls the first two blocks of a list."""
    held = nn.ModuleList(Block(4) for _ in range(n))

    def apply(x: Tensor) -> Tensor:
        for block in held[:2]:
            x = block(x)
        return x

    return apply


@dataclass(frozen=True)
class Reached:
    """What a function reaches, and which share of torch's it may cost at most."""

    make: Callable[[], Function]
    target: float | None = None


REACHED: Mapping[str, Reached] = {
    "10 unused parameters": Reached(functools.partial(parameters, 10)),
    "100 unused parameters": Reached(functools.partial(parameters, 100)),
    "1,000 unused parameters": Reached(functools.partial(parameters, 1000), 3.5),
    "32 unused modules": Reached(functools.partial(modules, 32)),
    "10 small tensors": Reached(functools.partial(tensors, 10)),
    "100 small tensors": Reached(functools.partial(tensors, 100), 3),
    "100 objects": Reached(functools.partial(objects, 100), 2.2),
    "900 objects": Reached(functools.partial(objects, 900), 11),
    "2 of 2 blocks": Reached(functools.partial(blocks, 2)),
    "2 of 8 blocks": Reached(functools.partial(blocks, 8)),
    "2 of 32 blocks": Reached(functools.partial(blocks, 32), 2.3),
}


def step_of(name: str, system: str) -> Step:
    """Return forward and backward of a function that reaches something."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 4).requires_grad_()
    return Work(REACHED[name].make(), (x,), [x]).step(SYSTEMS[system])


def cases() -> dict[Label, Case]:
    """Return all that is counted."""
    return {
        (name, system): Case(functools.partial(step_of, name, system), loops=6)
        for name in REACHED
        for system in CHOSEN
    }


def shares(counts: Counts, results: Results) -> None:
    """Print the table."""
    title = "Thousands of instructions: plain, and beyond it"
    columns = dict.fromkeys(CHOSEN, THOUSANDS) | {f"of {BASELINE}": ".2f"}
    cells = results.table("instructions", title, "what is reached", columns)
    for name, reached in REACHED.items():
        plain, theirs, ours = (float(counts[name, system]) for system in CHOSEN)
        share = (ours - plain) / (theirs - plain)
        cells.add(name, plain, theirs - plain, ours - plain, share)
        target = reached.target
        if target is not None:
            cells.aim(name, f"<= {target:g}", f"{share:.2f}", share <= target)
    results.show(cells)


def main() -> None:
    """Count and print the table."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    torch.set_num_threads(1)
    results = Results(__file__)
    shares(count(__file__), results)
    results.finish()


if __name__ == "__main__":
    main()
