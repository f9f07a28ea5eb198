"""Every architecture of transformers, trained plain, with torch's checkpoint and remat.

Each is built small, with random weights. Two steps are run as they are, and with the
repeated blocks recomputed: by ``torch.utils.checkpoint`` around each, and by
``remat.nn.apply``. All that can be seen is compared bit for bit: outputs, losses,
gradients, parameters, buffers, random streams. With ``--states`` blocks also read and
fill a counter, a log, an array and a generator, which go on before the backward, as
in real training. Reproduce with

    python benchmarks/architectures.py [gemma bert ...] [--states]

What cannot be built small, or called by its signature alone, is left out, and counted.
"""

import argparse
import inspect
import itertools
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


# On Intel's processors a transposed product is added up in another order.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import torch
import transformers
from _tables import console, table
from rich.progress import Progress
from torch import Tensor, nn

import remat
from remat.testing import assert_same


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.clients import Client, replace_forward, theirs
from support.restless import Change, Way, by_forward, trained
from support.shrunk import classes, kinds, shrunk, sizes_of
from support.swept import blocks, loss


MOST = 5_000_000  # parameters; what is larger was not made small
EQUAL, LEFT_OUT = "equal", "left out"
Inputs = dict[str, Tensor]


def checkpointed(model: nn.Module) -> nn.Module:
    """Put torch's checkpoint around each block."""
    replace_forward(blocks(model), theirs)
    return model


SYSTEMS: dict[str, Change] = {
    "remat": remat.nn.apply,
    "torch.utils.checkpoint": checkpointed,
}


# --- Inputs ---------------------------------------------------------------------------


def inputs_of(model: nn.Module) -> Callable[[], Inputs]:
    """Return what makes inputs that a model takes: the first that works."""
    refused = "it takes no text, pictures, sounds or series"
    for make in candidates(model):
        try:
            loss(model(**make())).backward()
        except Exception as error:  # noqa: BLE001
            refused = str(error)
        else:
            return make
    raise ValueError(refused)


def candidates(model: nn.Module) -> Iterator[Callable[[], Inputs]]:
    """Yield ways to make the inputs that a signature names, in several shapes."""
    taken = {*inspect.signature(model.forward).parameters}
    texts = [n for n in ("input_ids", "decoder_input_ids") if n in taken]
    named = [name for name in shapes(model.config) if name in taken]
    for name, beside in itertools.product(named, (texts, texts[:1], texts[1:], [])):
        for shape in shapes(model.config)[name]:
            yield lambda name=name, shape=shape, beside=beside: {
                name: torch.randn(shape),
                **{text: _ids() for text in beside},
            }
    for beside in texts, texts[:1]:
        yield lambda beside=beside: {text: _ids() for text in beside}


def _ids() -> Tensor:
    return torch.randint(4, 60, (2, 12))


def shapes(config: Any) -> Mapping[str, list[tuple[int, ...]]]:
    """Return the shapes that an input may have, from what a configuration says."""
    size = _first(config, "image_size", 32)
    channels = _first(config, "num_channels", 3)
    frames = _first(config, "num_frames", 4)
    mels = _first(config, "num_mel_bins", 8)
    long, wide = 2 * _first(config, "max_source_positions", 16), (size, size)
    return {
        "pixel_values": [
            (2, channels, *wide),
            (2, frames, channels, *wide),
            (2, channels, 64, 64),
            (2, channels, frames, *wide),
        ],
        "pixel_values_videos": [(2, frames, channels, *wide)],
        "input_features": [(2, mels, long), (2, 32, mels), (2, 32, 160)],
        "input_values": [(2, 1600), (2, 1, 1600), (2, 1024, mels)],
        "past_values": [(2, _first(config, "context_length", 32), 1)],
    }


def _first(config: Any, name: str, default: int) -> int:
    parts = "vision_config", "audio_config", "text_config", "encoder_config"
    found = (getattr(c, name, None) for c in (config, *_parts(config, parts)))
    return next((value for value in found if isinstance(value, int)), default)


def _parts(config: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(config, name, None) for name in names]


# --- A row ----------------------------------------------------------------------------


def row(kind: str, ways: list[Way]) -> dict[str, str]:
    """Return what became of an architecture, by who recomputes its blocks."""
    try:
        client = client_of(kind)
        _, want = trained(client, lambda model: model, ways)
    except Exception as error:  # noqa: BLE001
        return dict.fromkeys(SYSTEMS, f"{LEFT_OUT}: {_brief(error)}")
    return {
        system: verdict(client, change, ways, want)
        for system, change in SYSTEMS.items()
    }


def client_of(kind: str) -> Client:
    """Return a small architecture, with inputs that it takes and blocks."""
    config, model = classes(kind)
    with torch.device("meta"):
        size = sum(p.numel() for p in model(config(**sizes_of(config))).parameters())
    if size > MOST:
        raise ValueError(f"it has {size:,} parameters")
    made = shrunk(kind).train()
    if not blocks(made)[0]:
        raise ValueError("it has no repeated blocks")
    return Client(lambda: shrunk(kind), blocks, inputs_of(made), loss)


def verdict(
    client: Client, change: Change, ways: list[Way], want: Mapping[str, Any]
) -> str:
    """Say whether a training gives plain's bits."""
    try:
        _, seen = trained(client, change, ways)
    except Exception as error:  # noqa: BLE001
        return f"raises {_brief(error)}"
    try:
        assert_same(seen, want)
    except AssertionError as error:
        return f"differs: {_brief(error)}"
    return EQUAL


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:100]}"


# --- All of them ----------------------------------------------------------------------


def sweep(chosen: list[str], ways: list[Way]) -> dict[str, dict[str, str]]:
    """Return the row of each architecture."""
    found = {}
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for kind in chosen:
            progress.update(task, description=kind)
            found[kind] = row(kind, ways)
            progress.advance(task)
    return found


def show(found: Mapping[str, Mapping[str, str]]) -> None:
    """Print how many are equal, differ, raise or are left out, and which."""
    screen = console()
    counts = {
        system: Counter(made[system].split()[0].rstrip(":") for made in found.values())
        for system in SYSTEMS
    }
    heads = EQUAL, "differs", "raises", "left"
    made = table("Two steps beside plain", "blocks by", *heads[:3], LEFT_OUT)
    for system, count in counts.items():
        made.add_row(system, *(str(count[head]) for head in heads))
    screen.print(made)
    for kind, made_of in found.items():
        for system, text in made_of.items():
            if text != EQUAL and (system == "remat" or LEFT_OUT not in text):
                screen.print(f"{kind}, {system}: {text}", highlight=False)


def main() -> None:
    """Train the architectures that were chosen, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="of transformers; by default all")
    parser.add_argument("--states", action="store_true", help="blocks have states")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # else plain is not always equal to itself
    show(sweep(options.kinds or kinds(), [by_forward] if options.states else []))


if __name__ == "__main__":
    main()
