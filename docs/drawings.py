"""Draw the pictures of docs/concepts.md, docs/policies.md and the README.

The first is a forward and a backward, plain and with remat. The second is what each
policy saves of a block: what `explain` says of it. The third is what the sweep of
architectures found. Colours can be read on a light and
on a dark page, and no mark differs from another by its colour alone. Reproduce with

    python docs/drawings.py
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from remat import Explanation, checkpoint_name, explain, policies


FOLDER = Path(__file__).parent / "_static"
INK, SAVED, AGAIN = "#7a7a7a", "#2a9d8f", "#d1603d"


# --- Shapes --------------------------------------------------------------------------


def text(x: float, y: float, words: str, **look: object) -> str:
    """Write words, in the middle of a point unless `text_anchor` says otherwise."""
    look = {"text_anchor": "middle", "fill": INK} | look
    return f'<text x="{x:g}" y="{y:g}"{_attributes(look)}>{words}</text>'


def box(x: float, y: float, w: float, h: float, **look: object) -> str:
    """Draw a rectangle around a point."""
    place = {"x": x - w / 2, "y": y - h / 2, "width": w, "height": h, "rx": 4}
    return f"<rect{_attributes(place | look)}/>"


def arrow(x: float, y: float, to_x: float, to_y: float, **look: object) -> str:
    """Draw an arrow from one point to another."""
    look = {"stroke": INK, "marker-end": "url(#tip)"} | look
    return f'<path d="M {x:g} {y:g} L {to_x:g} {to_y:g}"{_attributes(look)}/>'


def _attributes(look: dict[str, object]) -> str:
    return "".join(f' {k.replace("_", "-")}="{v}"' for k, v in look.items())


def picture(width: int, height: int, title: str, shapes: Iterable[str]) -> str:
    """Return the SVG of some shapes."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = 'font-family="sans-serif" font-size="14"'
    tip = f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{INK}"/>'
    box_of_tip = 'refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">',
        f"<title>{title}</title>",
        f'<defs><marker id="tip" {box_of_tip}>{tip}</marker></defs>',
        *shapes,
        "</svg>\n",
    ])  # fmt: skip


# --- Forward and backward ------------------------------------------------------------


VALUES = ["x", "a", "b", "out"]
COLUMNS = [185, 345, 505, 665]
ALIVE = {"fill": SAVED, "stroke": SAVED}
HANDLE = {"fill": "none", "stroke": INK, "stroke-dasharray": "4 3"}
ANEW = {"fill": AGAIN, "stroke": AGAIN}


def value(x: float, y: float, name: str, look: dict[str, str]) -> str:
    """Draw a tensor."""
    colour = INK if look is HANDLE else "#ffffff"
    return box(x, y, 46, 28, **look) + text(x, y + 5, name, fill=colour)


def row_of(y: float, label: str, looks: list[dict[str, str]]) -> Iterator[str]:
    """Draw values from left to right, with the sines between them."""
    yield text(10, y + 5, label, text_anchor="start")
    for i, (at, look) in enumerate(zip(COLUMNS, looks, strict=False)):
        if i:
            yield arrow(COLUMNS[i - 1] + 26, y, at - 26, y)
            yield text((COLUMNS[i - 1] + at) / 2, y - 7, "sin")
        yield value(at, y, VALUES[i], look)


def backward_of(y: float, above: float, label: str) -> Iterator[str]:
    """Draw gradients from right to left, and what they read in the row above."""
    yield text(10, y + 5, label, text_anchor="start")
    yield text(COLUMNS[-1], y + 5, "∂out")
    for i in (2, 1, 0):
        left, right = COLUMNS[i], COLUMNS[i + 1]
        middle = (left + right) / 2
        yield arrow(right - 26, y, left + 26, y)
        yield text(left, y + 5, f"∂{VALUES[i]}")
        yield text(middle, y + 20, f"· cos {VALUES[i]}")
        yield arrow(left + 6, above + 16, middle - 6, y - 5, stroke_dasharray="2 3")


def forward_and_backward() -> str:
    """Draw three sines, plain and with remat."""
    handles = [ALIVE, HANDLE, HANDLE, HANDLE]
    shapes = [
        text(10, 24, "plain", text_anchor="start", font_weight="bold"),
        *row_of(60, "forward", [ALIVE, ALIVE, ALIVE, HANDLE]),
        *backward_of(130, 60, "backward"),
        text(10, 196, "remat", text_anchor="start", font_weight="bold"),
        *row_of(232, "forward", handles),
        *row_of(302, "recompute", [ALIVE, ANEW, ANEW]),
        text(COLUMNS[-1], 307, "ends here"),
        *backward_of(372, 302, "backward"),
        value(40, 432, "", ALIVE) + text(72, 437, "waits in memory", **START),
        value(245, 432, "", HANDLE) + text(277, 437, "does not wait", **START),
        value(435, 432, "", ANEW)
        + text(467, 437, "computed again, freed once it is read", **START),
    ]
    return picture(745, 456, "Forward and backward, plain and with remat", shapes)


START = {"text_anchor": "start"}


# --- What each policy saves ----------------------------------------------------------


WIDTH, HEADS, TOKENS = 64, 4, 128
SHAPES = {"qkv": (64, 192), "out": (64, 64), "up": (64, 256), "down": (256, 64)}
# Of the operations in `block`, but views.
OPERATIONS = ["norm", "matmul “qkv”", "q · k", "softmax", "· v", "join heads", "matmul",
              "add", "norm", "matmul “hidden”", "gelu", "matmul", "add"]  # fmt: skip
DOTS = policies.dots_saveable
POLICIES = {
    "None": None,
    'save_only_these_names("qkv")': policies.save_only_these_names("qkv"),
    "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
    "dots_saveable": DOTS,
    'dots_saveable.but_offload(to="disk")': DOTS.but_offload(to="disk"),
    "everything_saveable": policies.everything_saveable,
}


def block(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Attend, and apply an MLP."""
    qkv = checkpoint_name(layer_norm(x, (WIDTH,)) @ params["qkv"], "qkv")
    q, k, v = qkv.view(TOKENS, 3, HEADS, -1).permute(1, 2, 0, 3)
    heads = torch.softmax(q @ k.mT, -1) @ v
    x = x + heads.transpose(0, 1).flatten(1) @ params["out"]
    hidden = checkpoint_name(layer_norm(x, (WIDTH,)) @ params["up"], "hidden")
    return x + gelu(hidden) @ params["down"]


def explained() -> dict[str, Explanation]:
    """Return what becomes of the operations under each policy."""
    with torch.device("meta"):
        params = {k: torch.empty(s, requires_grad=True) for k, s in SHAPES.items()}
        x = torch.empty(TOKENS, WIDTH)
    return {name: explain(block, params, x, policy=p) for name, p in POLICIES.items()}


def mark(x: float, y: float, fate: str) -> str:
    """Draw what becomes of an operation."""
    match fate:
        case "saved":
            return box(x, y, 20, 20, **ALIVE)
        case "offloaded":
            return box(x, y, 20, 20, fill="none", stroke=SAVED) + box(
                x, y + 5, 20, 10, **ALIVE
            )
        case "recomputed":
            return f'<circle cx="{x}" cy="{y}" r="7" fill="none" stroke="{AGAIN}" \
stroke-width="2.5"/>'
        case _:
            return f'<circle cx="{x}" cy="{y}" r="2" fill="{INK}"/>'


LEFT, STEP, TOP, TALL = 330, 32, 130, 32
BYTES, WORK = 785, 865
LEGEND = {
    "saved": "saved",
    "offloaded": "saved in a file",
    "recomputed": "computed again",
    "dead": "not saved, and not read",
}


def table_of_policies() -> str:
    """Draw a row for each policy and a column for each operation."""
    shapes = [
        *(
            text(0, 0, name, text_anchor="start", transform=f"translate({x + 4} "
                 f"{TOP - 22}) rotate(-55)")
            for x, name in zip(_columns(), OPERATIONS, strict=True)
        ),
        text(BYTES, TOP - 40, "KiB in") + text(BYTES, TOP - 24, "memory"),
        text(WORK, TOP - 40, "FLOPs") + text(WORK, TOP - 24, "again"),
    ]  # fmt: skip
    for i, (name, report) in enumerate(explained().items()):
        shapes += row_of_policy(TOP + i * TALL, name, report)
    below, x = TOP + len(POLICIES) * TALL + 20, 40
    for fate, words in LEGEND.items():
        shapes += [mark(x, below, fate), text(x + 18, below + 5, words, **START)]
        x += 60 + 8 * len(words)
    return picture(910, below + 24, "What each policy saves of a block", shapes)


def row_of_policy(y: float, name: str, report: Explanation) -> list[str]:
    """Draw what becomes of each operation, and what that costs."""
    fates = [op.fate for op in report.ops if not op.is_view]
    return [
        text(LEFT - 30, y + 5, name, text_anchor="end", font_family="monospace",
             font_size=13),
        *(mark(x, y, fate) for x, fate in zip(_columns(), fates, strict=True)),
        text(BYTES, y + 5, f"{kept(report):.0f}"),
        text(WORK, y + 5, f"{report.recomputed_share:.0%}"),
    ]  # fmt: skip


def kept(report: Explanation) -> float:
    """Return the KiB that wait for the backward, beside parameters."""
    parameters = sum(each.nbytes for each in report.inputs if each.is_parameter)
    return (report.saved_bytes - parameters) / 2**10


def _columns() -> list[int]:
    return [LEFT + STEP * i for i in range(len(OPERATIONS))]


# --- Architectures -------------------------------------------------------------------


# Of so many, those that equal plain: `python benchmarks/architectures.py`.
SWEPT, EQUAL = 341, {"remat": 341, "torch's checkpoint": 146}


def bars_of_architectures() -> str:
    """Draw how many architectures of transformers equal plain code, bit for bit."""
    title = f"Of {SWEPT} architectures, those that equal plain bit for bit"
    shapes, left, scale = [text(360, 24, title)], 170, 480 / SWEPT
    for y, (name, count) in zip((56, 92), EQUAL.items(), strict=True):
        look = {"fill": SAVED if name == "remat" else AGAIN}
        width = round(count * scale)
        shapes += [
            text(left - 12, y + 5, name, text_anchor="end"),
            box(left + 240, y, 480, 22, fill="none", stroke=INK),
            box(left + width / 2, y, width, 22, **look),
            text(left + width / 2, y + 5, str(count), fill="#ffffff"),
        ]
    return picture(720, 116, title, shapes)


PICTURES = {
    "architectures.svg": bars_of_architectures,
    "recompute.svg": forward_and_backward,
    "policies.svg": table_of_policies,
}


def main() -> None:
    """Write the pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
