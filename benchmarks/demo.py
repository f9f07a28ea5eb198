"""Train a small language model twice, plain and with remat, and compare.

The model is a pre-norm transformer over characters: a pytree of parameters, a pure
function of them, and ``torch.func.grad_and_value``. The text is the Python language
reference, which every Python carries in ``pydoc_data.topics``. Reproduce with

    make demo                                  (or: python benchmarks/demo.py --help)

Both runs start from the same seed and see the same batches, so their parameters end
identical to the last bit; what differs is memory. A plot of it goes to ``out/``.
The runs take turns, step by step, so that other load on the machine slows both. They
use one thread: with more of them, the bits of plain code may differ from run to run.
"""

import argparse
import functools
import importlib
import importlib.util
import inspect
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import optree  # noqa: TID251 (a user's program, not the library)
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional

from remat import fit, remat
from remat.testing import count_ops, memory_timeline


Params = dict[str, Any]
Block = Callable[..., Tensor]  # of parameters, residual stream and number of heads


# --- The model ---------------------------------------------------------------------


@remat
def block(params: Params, x: Tensor, heads: int) -> Tensor:
    """Add attention and an MLP to the residual stream ``x`` of (batch, time, width).

    Its only residuals are its inputs: everything below is computed again in the
    backward pass. Tensors and the number of heads are passed alike.
    """
    x = x + attention(params["attention"], norm(x, params["norm1"]), heads)
    return x + mlp(params["mlp"], norm(x, params["norm2"]))


plain_block = inspect.unwrap(block)


def norm(x: Tensor, scale: Tensor) -> Tensor:
    """Divide each vector by its root mean square."""
    return x * scale * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def attention(params: Params, x: Tensor, heads: int) -> Tensor:
    """Attend to every earlier position, with softmax, in several heads."""
    query, key, value = (
        (x @ params[name]).unflatten(-1, (heads, -1)).transpose(-2, -3)
        for name in ("query", "key", "value")
    )
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return (weights @ value).transpose(-2, -3).flatten(-2) @ params["out"]


def mlp(params: Params, x: Tensor) -> Tensor:
    """Apply a two-layer perceptron.

    Its activation is relu squared: gelu and silu have one derivative kernel for when a
    second derivative may follow and another for when not, which differ by rounding.
    """
    return (x @ params["up"]).relu().square() @ params["down"]


def language_model(params: Params, tokens: Tensor, heads: int, block: Block) -> Tensor:
    """Return the logits of each next token."""
    x = functional.embedding(tokens, params["embedding"])
    x = x + params["position"][: tokens.shape[-1]]
    for block_params in params["blocks"]:
        x = block(block_params, x, heads)
    return norm(x, params["norm"]) @ params["head"]


def loss_function(params: Params, batch: Tensor, heads: int, block: Block) -> Tensor:
    """Return the mean cross entropy of predicting each token from those before it."""
    logits = language_model(params, batch[:, :-1], heads, block)
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def initial_params(options: argparse.Namespace, vocabulary: int) -> Params:
    """Draw the parameters; nothing is shared between two places of the model."""
    generator = torch.Generator().manual_seed(options.seed)
    width = options.width

    def normal(fan_in: int, *shape: int) -> Tensor:
        return torch.randn(fan_in, *shape, generator=generator) / fan_in**0.5

    def block_params() -> Params:
        names = ("query", "key", "value", "out")
        return {
            "norm1": torch.ones(width),
            "attention": {name: normal(width, width) for name in names},
            "norm2": torch.ones(width),
            "mlp": {"up": normal(width, 4 * width), "down": normal(4 * width, width)},
        }

    return {
        "embedding": normal(vocabulary, width),
        "position": normal(options.context, width),
        "blocks": [block_params() for _ in range(options.layers)],
        "norm": torch.ones(width),
        "head": normal(width, vocabulary),
    }


# --- The data ----------------------------------------------------------------------


def load_text() -> tuple[Tensor, str]:
    """Return the text as token numbers, and the characters that they stand for."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    alphabet = "".join(sorted(set(text)))
    number = {character: index for index, character in enumerate(alphabet)}
    return torch.tensor([number[character] for character in text]), alphabet


def batches(tokens: Tensor, options: argparse.Namespace) -> Iterator[Tensor]:
    """Yield random windows of the text, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(options.seed)
    windows = tokens.unfold(0, options.context + 1, 1)
    while True:
        yield windows[
            torch.randint(len(windows), (options.batch,), generator=generator)
        ]


# --- Training ----------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one training run leaves behind."""

    loss: float  # mean of the last ten steps
    params: Params
    seconds: tuple[float, ...]  # of each step
    timeline: tuple[int, ...]  # live bytes of one step, beyond what lives between
    ops: Counter[str]  # kernels that one gradient runs


def train(
    block: Block, tokens: Tensor, vocabulary: int, options: argparse.Namespace
) -> Generator[float, None, Run]:
    """Train from the seed, then do one more step to look at it closely.

    Yields the loss of each step.
    """
    params = initial_params(options, vocabulary)
    leaves = optree.tree_leaves(params)
    optimizer = torch.optim.AdamW(leaves, lr=options.lr)
    data = batches(tokens, options)
    loss = functools.partial(loss_function, heads=options.heads, block=block)
    gradient = grad_and_value(loss)

    def step() -> float:
        grads, value = gradient(params, next(data))
        for leaf, grad in zip(leaves, optree.tree_leaves(grads), strict=True):
            leaf.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    losses, seconds = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
        yield losses[-1]
    timeline = memory_timeline(step).bytes
    with count_ops() as ops:
        gradient(params, next(data))
    recent = statistics.mean(losses[-10:])
    return Run(recent, params, tuple(seconds), timeline, ops)


def in_turns(
    first: Generator[float, None, Run],
    second: Generator[float, None, Run],
    advance: Callable[[int, float], None],
) -> tuple[Run, Run]:
    """Advance two runs step by step. Each goes first in every second step."""
    runs, order, ended = (first, second), [0, 1], {}
    while len(ended) < len(runs):
        for i in order:
            try:
                advance(i, next(runs[i]))
            except StopIteration as end:
                ended[i] = end.value
        order.reverse()
    return ended[0], ended[1]


def train_both(
    tokens: Tensor, vocabulary: int, options: argparse.Namespace, console: Console
) -> tuple[Run, Run]:
    """Train plain and with remat, showing progress."""
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    with Progress(*columns, console=console) as progress:
        tasks = [
            progress.add_task(name, total=options.steps, loss=float("nan"))
            for name in ("plain", "with remat")
        ]

        def advance(run: int, loss: float) -> None:
            progress.update(tasks[run], advance=1, loss=loss)

        plain, ours = (
            train(each, tokens, vocabulary, options) for each in (plain_block, block)
        )
        return in_turns(plain, ours, advance)


# --- The comparison ----------------------------------------------------------------


def identical(a: Params, b: Params) -> bool:
    """Return whether two pytrees of tensors are equal to the last bit."""
    return optree.tree_all(optree.tree_map(torch.equal, a, b))


def failure(plain: Run, ours: Run) -> str | None:
    """Say which promise was not kept, or nothing."""
    if not identical(plain.params, ours.params):
        return "The parameters are not bit-identical."
    if max(ours.timeline) >= max(plain.timeline):
        return "The peak is not lower."
    return None


def forward_ops(params: Params, batch: Tensor, heads: int) -> Counter[str]:
    """Count the kernels of the plain forward pass alone."""
    with count_ops() as ops:
        loss_function(params, batch, heads, plain_block)
    return ops


def recomputed_ops(plain: Run, ours: Run, forward: Counter[str]) -> int:
    """Count the forward kernels that ran once more with remat than without."""
    extra = ours.ops - plain.ops
    return sum(extra[name] for name in forward)


def comparison(plain: Run, ours: Run, recomputed: str) -> Table:
    """Return the table that shows what remat changes and what it does not."""
    peaks = max(plain.timeline), max(ours.timeline)
    times = [statistics.median(run.seconds) for run in (plain, ours)]
    pairs = zip(ours.seconds, plain.seconds, strict=True)
    slower = statistics.median(b / a for b, a in pairs)
    table = Table(title="One model, trained twice")
    for heading in ("", "plain", "with remat", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("final loss", f"{plain.loss:.4f}", f"{ours.loss:.4f}", "")
    same = "yes" if identical(plain.params, ours.params) else "NO"
    table.add_row("parameters bit-identical", "", same, "")
    table.add_row(
        "peak bytes of a step",
        *(f"{peak:,}" for peak in peaks),
        f"{peaks[1] / peaks[0]:.2f}",
    )
    table.add_row("step time", *(f"{t * 1e3:.0f} ms" for t in times), f"{slower:.2f}")
    table.add_row("forward ops recomputed", "0", recomputed, "")
    return table


def plot(plain: Run, ours: Run, path: Path) -> None:
    """Draw the live bytes over one training step of both runs."""
    import matplotlib as mpl

    mpl.use("Agg")  # no screen needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, run in (("plain", plain), ("with remat", ours)):
        live = [size / 2**20 for size in run.timeline]
        (line,) = axes.plot(live, label=f"{name}: peak {max(live):.0f} MiB")
        axes.fill_between(range(len(live)), live, alpha=0.15, color=line.get_color())
    axes.set_title("Live bytes over one training step")
    axes.set_xlabel("allocations and frees, in order")
    axes.set_ylabel("MiB beyond parameters and optimizer state")
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.legend()
    figure.savefig(path, dpi=150)


# --- A budget for a model of transformers --------------------------------------------


def in_a_budget(seed: int) -> str:
    """Train a Llama of transformers in three quarters of its peak; say what it took."""
    transformers = importlib.import_module("transformers")

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(256, (8, 64))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    budget = fit(model, budget="1TB", **batch).peak * 3 // 4
    plan = fit(model, budget=budget, **batch)
    plan.apply(model)
    before = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    before += sum(t.untyped_storage().nbytes() for t in batch.values()) - ids.nbytes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        out = model(**batch)
        out.loss.backward()

    peaks: list[int] = []
    for _ in range(3):
        peaks.append(before + memory_timeline(step).peak)
        optimizer.step()
        optimizer.zero_grad()
    return (
        f"A Llama of transformers in a budget of {budget:,} bytes: plain takes "
        f"{plan.plain_peak:,}, the plan says {plan.peak:,}, three steps took "
        f"{max(peaks):,}."
    )


# --- The command -------------------------------------------------------------------


def positive_int(text: str) -> int:
    """Read a command-line value that has to be a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_float(text: str) -> float:
    """Read a command-line value that has to be a positive number."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


def seed(text: str) -> int:
    """Read a command-line value that a random generator takes."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be in 0 ... 2**63 - 1, got {value}")
    return value


def parse_options(tokens: Tensor) -> argparse.Namespace:
    """Read the command line, or exit with a message that says what to change."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=positive_int, default=6, help="number of blocks")
    add("--width", type=positive_int, default=128, help="size of the residual stream")
    add(
        "--heads",
        type=positive_int,
        default=4,
        help="attention heads; must divide --width",
    )
    add(
        "--context",
        type=positive_int,
        default=64,
        help="characters that the model sees",
    )
    add("--batch", type=positive_int, default=16, help="windows of text in a step")
    add("--steps", type=positive_int, default=120, help="steps of training, each twice")
    add("--lr", type=positive_float, default=1e-3, help="learning rate of AdamW")
    add("--seed", type=seed, default=0, help="of the parameters and the batches")
    add("--out", type=Path, default=Path("out"), help="folder for the plot")
    options = parser.parse_args()
    if error := mistake(options, len(tokens)):
        parser.error(error)
    return options


def mistake(options: argparse.Namespace, characters: int) -> str | None:
    """Say what is wrong with options that are each right alone; make the folder."""
    if options.width % options.heads:
        return f"--width {options.width} is not divisible by --heads {options.heads}"
    if options.context >= characters:
        return f"--context {options.context} is not below the text's {characters:,}"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out {options.out} cannot be made a folder: {error.strerror}"
    return None


def main() -> None:
    """Train twice, print the comparison, write the plot; exit with 1 if it failed."""
    # With two threads on a busy machine the bits differed in a few of many runs. Some
    # kernels are not equal to themselves there: the gradient of `w[index]`, for one, is
    # added up in the order in which the threads arrive.
    torch.set_num_threads(1)
    console = Console()
    tokens, alphabet = load_text()
    options = parse_options(tokens)
    params = initial_params(options, len(alphabet))
    size = sum(leaf.numel() for leaf in optree.tree_leaves(params))
    console.print(
        f"A transformer of {options.layers} blocks and {size:,} parameters learns "
        f"{len(tokens):,} characters of the Python language reference."
    )
    plain, ours = train_both(tokens, len(alphabet), options, console)
    forward = forward_ops(params, next(batches(tokens, options)), options.heads)
    recomputed = recomputed_ops(plain, ours, forward)
    console.print(comparison(plain, ours, f"{recomputed:,} of {forward.total():,}"))
    if importlib.util.find_spec("transformers") is not None:
        console.print(in_a_budget(options.seed))
    path = options.out / "demo_memory.png"
    plot(plain, ours, path)
    console.print(f"Live bytes over one training step: {path}")
    sys.exit(failure(plain, ours))


if __name__ == "__main__":
    main()
