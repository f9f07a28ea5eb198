"""What the tests of others' models share: one training, run plain and with remat.

A *client* is a model that somebody else wrote, with random weights and inputs. It is
trained as it is, and with its layers rematerialized in one of several *styles*, as
users write them. Losses, outputs, gradients, parameters, buffers and the random stream
have to be the same bit for bit in every step. Matrix products are counted, for a remat
that does nothing passes every comparison: a backward runs those of a block again, once.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from support.zoo import plainly
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes, peak_bytes


PRODUCTS = "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution"
Wrap = Callable[..., Any]


@dataclass(frozen=True)
class Client:
    """A model of somebody else.

    Attributes:
        build: makes it, with random weights.
        blocks: the lists of layers of a model that are to be rematerialized.
        inputs: makes keyword arguments for a call, at random.
        loss: takes it from what the model returns.
        is_adapted: whether most parameters are frozen, and adapters train.
    """

    build: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], Sequence[Any]]
    inputs: Callable[[], dict[str, Any]]
    loss: Callable[[Any], Tensor] = lambda out: out.loss
    is_adapted: bool = False


class WithLoss(nn.Module):
    """A model of pictures, as a client: it returns a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def vision(
    build: Callable[[], nn.Module], blocks: Callable[[Any], Sequence[Any]]
) -> Client:
    def inputs() -> dict[str, Tensor]:
        labels = torch.tensor([0, 1, 2, 3])
        return {"images": torch.randn(4, 3, 64, 64), "labels": labels}

    return Client(
        lambda: WithLoss(build()),
        lambda model: blocks(model.model),
        inputs,
        lambda out: out["loss"],
    )


def residual_stages(model: Any) -> list[Any]:
    return [model.layer1, model.layer2, model.layer3, model.layer4]


# --- Styles: how users put remat into a model that they do not edit ---


class Calls(nn.Module):
    """Holds a layer, and calls it through remat."""

    def __init__(self, layer: nn.Module, wrap: Wrap) -> None:
        super().__init__()
        self.layer, self.wrap = layer, wrap

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrap(self.layer)(*args, **kwargs)


def replace_forward(blocks: Sequence[Any], wrap: Wrap) -> None:
    """`layer.forward = remat(layer.forward)`, for each layer."""
    for block in blocks:
        for layer in block:
            layer.forward = wrap(layer.forward)


def replace_layer(blocks: Sequence[Any], wrap: Wrap) -> None:
    """Put a module that calls `remat(layer)` where the layer was."""
    for block in blocks:
        for i, layer in enumerate(block):
            block[i] = Calls(layer, wrap)


Change = Callable[[nn.Module], object]
Style = Callable[[Sequence[Any], Wrap], None]
STYLES: dict[str, Style] = {"forward": replace_forward, "layer": replace_layer}


def theirs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What remat is measured against, in its place."""
    return lambda *args, **kwargs: checkpoint(fn, *args, use_reentrant=False, **kwargs)


# --- A run ---


def snapshot(value: Any) -> Any:
    """What a model returned, as a pytree of copies: with its caches, and their types.

    A copy requires grad where the tensor did.
    """
    match value:
        case Tensor():
            return value.detach().clone().requires_grad_(value.requires_grad)
        case None | str() | int() | float() | torch.dtype() | torch.device() | type():
            return repr(value)
        case Mapping():
            return {str(key): snapshot(item) for key, item in value.items()}
        case list() | tuple():
            return [type(value).__name__, *map(snapshot, value)]
        case _ if is_dataclass(value):
            names = [field.name for field in fields(value)]
            return {name: snapshot(getattr(value, name)) for name in names}
        case _:
            return {"type": type(value).__name__, **snapshot(vars(value))}


def gradients(model: nn.Module) -> list[Any]:
    grads = [p.grad for p in model.parameters()]
    return ["no gradient" if grad is None else grad.clone() for grad in grads]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    client: Client,
    model: nn.Module,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    steps: int = 3,
    micro_batches: int = 1,
    before: Callable[[nn.Module, int], object] = lambda model, step: None,
    between: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Train a model; return all that can be seen of it, step by step.

    `before` is called before each step, and `between` a forward and its backward.
    """
    seed(1)
    optimize = optimizer(model)
    seen: list[Any] = []
    for step in range(steps):
        before(model, step)
        optimize.zero_grad()
        for _ in range(micro_batches):
            out = model(**client.inputs())
            loss = client.loss(out)
            between()
            (loss / micro_batches).backward()
            # Taken after the backward: a recompute must not show in it.
            seen.append([snapshot(out), loss.detach()])
        seen.append(gradients(model))
        optimize.step()
    return {
        "steps": seen,
        "parameters": [snapshot(p) for p in model.parameters()],
        "buffers": [snapshot(b) for b in model.buffers()],
        "streams": [torch.rand(3), np.random.rand(), random.random()],
    }


def seed(number: int) -> None:
    """Seed every global stream."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def built(client: Client) -> nn.Module:
    torch.manual_seed(0)
    return client.build().train()


def of_style(client: Client, style: str | Style, wrap: Wrap) -> nn.Module:
    model = built(client)
    change = STYLES[style] if isinstance(style, str) else style
    change(client.blocks(model), wrap)
    return model


def changed(client: Client, change: Change) -> nn.Module:
    """A model that a function changes in place."""
    model = built(client)
    change(model)
    return model


def products(client: Client, model: nn.Module) -> tuple[int, int]:
    """How many products a forward and a backward do, after a step."""
    torch.manual_seed(2)
    client.loss(model(**client.inputs())).backward()
    with count_ops() as forward:
        loss = client.loss(model(**client.inputs()))
    with count_ops() as backward:
        loss.backward()
    return _products(forward), _products(backward)


def _products(ops: Counter[str]) -> int:
    return sum(ops[name] for name in PRODUCTS)


# --- Assertions ---


def assert_trains_as_plain(
    client: Client, style: str | Style, wrap: Wrap, *, times: int = 1, **options: Any
) -> None:
    """A training with `wrap` gives plain's bits, and its backward runs blocks again."""
    plain, ours = built(client), of_style(client, style, wrap)
    want = train(client, plain, **options)
    assert_moved(plain, want)
    assert_same(train(client, ours, **options), want)
    assert_recomputed(client, ours, times=times)


def assert_changed_trains_as_plain(
    client: Client, change: Change, *, times: int = 1, **options: Any
) -> None:
    """The same of a model that is changed as a whole."""
    plain, ours = built(client), changed(client, change)
    want = train(client, plain, **options)
    assert_moved(plain, want, is_adapted=client.is_adapted)
    assert_same(train(client, ours, **options), want)
    assert_recomputed(client, ours, times=times)


def assert_moved(
    model: nn.Module, run: dict[str, Any], *, is_adapted: bool = False
) -> None:
    """Where no parameter has a gradient, equality proves nothing."""
    norms = [0 if isinstance(g, str) else g.abs().max() for g in gradients(model)]
    still = [
        name
        for (name, p), norm in zip(model.named_parameters(), norms, strict=True)
        if not norm and (p.requires_grad or not is_adapted)
    ]
    assert len(still) <= len(norms) // 10, f"no gradient for {still}"
    assert all(p.isfinite().all() for p in run["parameters"]), "not finite"


def assert_recomputed(client: Client, model: nn.Module, *, times: int = 1) -> None:
    """A backward runs a product per layer again at least, none more than `times`."""
    layers = sum(map(len, client.blocks(model)))
    plain = products(client, built(client))
    assert_again(products(client, model), plain, layers, times=times)


def assert_again(
    ours: tuple[int, int], plain: tuple[int, int], layers: int, *, times: int = 1
) -> None:
    """The same of numbers of products: those of a forward, and of a backward."""
    (ours_forward, ours_backward), (forward, backward) = ours, plain
    again = ours_backward - backward
    assert ours_forward == forward, f"{ours_forward} products forward, not {forward}"
    assert layers <= again <= times * forward, f"{again} products run again"


def bytes_after_forward(client: Client, model: nn.Module) -> int:
    """What a forward leaves alive, once the model is warm."""
    torch.manual_seed(3)
    inputs = client.inputs()
    client.loss(model(**inputs)).backward()
    return live_bytes(lambda: model(**inputs))


def bytes_at_peak(client: Client, model: nn.Module) -> int:
    """The most that a step of gradient accumulation holds, once the model is warm."""
    torch.manual_seed(3)
    inputs = client.inputs()
    client.loss(model(**inputs)).backward()
    return peak_bytes(lambda: client.loss(model(**inputs)).backward())


def bytes_left(client: Client, model: nn.Module) -> int:
    """What steps leave alive with the garbage collector off, once the model is warm."""
    torch.manual_seed(3)
    inputs = client.inputs()

    def steps() -> None:
        for _ in range(3):
            client.loss(model(**inputs)).backward()

    steps()
    return live_bytes(steps)


def assert_no_more_than_theirs(
    client: Client, style: str, wrap: Wrap = remat, *, copies: bool = False
) -> tuple[int, int, int, int]:
    """remat does no more work than torch's checkpoint, and holds no more bytes.

    With `copies` a peak may hold the buffers once more: theirs updates running
    statistics twice, remat has a copy of what they were. Returns the bytes after a
    forward, plain and with remat, and those at the peak.
    """
    models = [of_style(client, style, wrap) for wrap in (plainly, theirs, wrap)]
    beside = copies * sum(b.nbytes for b in models[2].buffers())
    return assert_no_more(client, *models, beside=beside)


def assert_no_more(
    client: Client, plain: nn.Module, other: nn.Module, ours: nn.Module, beside: int = 0
) -> tuple[int, int, int, int]:
    """The same of three models: plain, with torch's checkpoint, and with remat."""
    models = plain, other, ours
    ran, allowed = (products(client, model) for model in (ours, other))
    assert ran <= allowed, f"{ran} products, {allowed} with torch's checkpoint"
    of_plain, allowed, held = (bytes_after_forward(client, m) for m in models)
    assert held <= allowed, f"{held} bytes, {allowed} with torch's checkpoint"
    at_peak, allowed, peak = (bytes_at_peak(client, model) for model in models)
    assert peak <= allowed + beside, f"{peak} bytes, {allowed} with theirs"
    return of_plain, held, at_peak, peak


def assert_leaves_nothing_behind(
    client: Client, style: str, wrap: Wrap = remat
) -> None:
    """Without the garbage collector: whatever is freed is freed at once."""
    ours = of_style(client, style, wrap)
    of_plain, left = (bytes_left(client, m) for m in (built(client), ours))
    assert left == of_plain, f"{left} bytes are left, and {of_plain} without remat"
    assert_recomputed(client, ours)
