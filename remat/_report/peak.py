"""What holds the peak of a step, the largest first, and what to do about it.

Invariant: each byte that is alive at the peak is in one holder. Advice reads the
holders and how the step was built, and no tensors.
Rejected: one holder for each value. A model has thousands, made by a few lines.
Rejected: advice for each holder. The largest one hides what the others cost.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from remat._base.source import short
from remat._report import render as _render


PeakHolder: TypeAlias = (
    Literal["recompute", "saved inputs", "policy", "residuals", "loss"]
    | Literal["cotangents", "gradients", "parameters", "inputs"]
)
# Of those that are of no single call.
NAMES: dict[PeakHolder, str] = {
    "gradients": "the gradients of the parameters",
    "saved inputs": "the inputs that remat calls save",
    "policy": "the results that policies save",
    "cotangents": "the gradients that pass through remat calls",
    "residuals": "the operations outside of remat calls",
    "parameters": "the parameters",
    "inputs": "the inputs of the step, and buffers",
    "loss": "the operations after the last remat call: the head and the loss",
}


@dataclass(frozen=True, slots=True)
class HeldValues:
    """Values that are alive at the peak and were made alike.

    Attributes:
        op, source: the operation that made them, and the user's line that ran it; of a
            gradient, the operation that it is in the backward of; "" if they are older
            than the step.
        dtype, shape: of each; no dtype for what an operation uses only while it runs.
        count, nbytes: how many there are, and the bytes of all of them.
        is_gradient: whether the backward of the operation made them.

    Example:
        >>> import torch
        >>> str(HeldValues("mm", torch.half, (2, 3), "f.py:1", count=2, nbytes=24))
        '2 x f16[2,3], made by mm at f.py:1'
    """

    op: str
    dtype: Any
    shape: tuple[int, ...]
    source: str
    count: int
    nbytes: int
    is_gradient: bool = False

    def __str__(self) -> str:
        has_dtype = self.dtype is not None
        what = _render.short_array(self.dtype, self.shape) if has_dtype else "memory"
        many = f"{self.count} x {what}" if self.count > 1 else what
        maker = f"backward of {self.op}" if self.is_gradient else self.op
        return f"{many}, made by {maker} at {short(self.source)}" if self.op else many


@dataclass(frozen=True, slots=True)
class Holder:
    """One reason why memory is alive at the peak.

    Attributes:
        kind: "recompute": what the recompute of one call made, or its forward, if the
            peak is there. "saved inputs": of calls, for their recomputes. "policy":
            what policies save. "residuals": what is saved by operations outside of
            calls. "loss": what the operations after the last call made, in the forward
            or the backward. "cotangents": gradients of activations, on their way
            through calls. "gradients": of the parameters. "parameters" and "inputs":
            alive before the step.
        name: the holder in words: "recompute of `Block` (call 3 of 12)".
        nbytes, share: what it holds, in bytes and of all that is alive at the peak.
        values: what it consists of, the largest first.

    Example:
        >>> import torch
        >>> from remat import explain
        >>> peak = explain(lambda x: x.sin().exp().sum(), torch.ones(64)).peak
        >>> [(holder.kind, holder.nbytes) for holder in peak.holders]
        [('residuals', 520), ('gradients', 256), ('inputs', 256)]
    """

    kind: PeakHolder
    name: str
    nbytes: int
    share: float
    values: tuple[HeldValues, ...]


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of a step when most bytes are alive.

    Attributes:
        nbytes: the bytes alive then, with parameters and inputs.
        op: the operation that ran then, or the node of the backward.
        holders: what holds them, the largest first.
        advice: what to do about the largest holder.

    Example:
        >>> import torch
        >>> from remat import explain
        >>> peak = explain(lambda x: x.sin().exp().sum(), torch.ones(64)).peak
        >>> peak.nbytes, peak.op
        (1032, 'mul')
    """

    nbytes: int
    op: str
    holders: tuple[Holder, ...]
    advice: str

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the section "peak"."""
        yield f"peak of a step: {self.nbytes:,} bytes, in {self.op or 'Python'}"
        for holder in self.holders:
            yield f"  {holder.share:4.0%}  {holder.nbytes:,} bytes: {holder.name}"
            if any(value.op for value in holder.values):
                yield f"        largest: {holder.values[0]}"
        yield f"what to do: {self.advice}"


# --- What to do about it ---


def advice_on(
    holders: Sequence[Holder], again: Iterable[str], *, calls: int, is_whole: bool
) -> str:
    """Return what to do about the largest holder, in one line.

    `again` has the labels of calls of which a backward is differentiated. There are so
    many `calls` in no other; `is_whole` says that the only one is nearly all.
    """
    if not holders:
        return "nothing is alive: there is nothing to save."
    main = holders[0]
    values = [v for v in main.values if v.dtype is not None]
    most = str(values[0]) if values else "memory of operations"
    text, labels = _TEXTS[main.kind], ", ".join(again)
    if labels and main.kind not in ("gradients", "parameters", "inputs"):
        text = _AGAIN
    elif is_whole and main.kind in ("recompute", "cotangents"):
        text = _EVERYTHING
    elif main.kind == "residuals" and not calls:
        text = _NOTHING
    return text.format(name=main.name, share=main.share, most=most, calls=labels)


_LOGITS = "If these are the logits, compute the loss in chunks"
_ANYWAY = "the peak is not in activations, so remat cannot lower it much"
_AGAIN = (
    "a backward of {calls} is differentiated (create_graph=True), so all that it "
    "computes stays alive, what it recomputes too. Pass higher_order=True to remat "
    "there: then that is recomputed as well. {share:.0%} of the peak is mainly {most}."
)
_EVERYTHING = (
    "there is one remat around everything: its recompute holds what plain code holds. "
    "Put remat around each block of the model instead."
)
_NOTHING = (
    "nothing is rematerialized: the operations of the step hold {share:.0%}, mainly "
    f"{{most}}. Put remat around each block of the model. {_LOGITS}."
)
_TEXTS: dict[PeakHolder, str] = {
    "recompute": "the {name} is the largest: {share:.0%}, mainly {most}. Split that "
    "block into smaller ones, or use a policy so that it recomputes less.",
    "saved inputs": "the inputs that calls save hold {share:.0%}, mainly {most}. Put "
    "remat around several blocks at once, or groups of them besides, or offload.",
    "policy": "the results that policies save hold {share:.0%}, mainly {most}. Use a "
    "policy that saves less, or offload what it saves.",
    "residuals": "operations outside of remat calls hold {share:.0%}, mainly {most}. "
    f"Put remat around those blocks, too. {_LOGITS}.",
    "loss": "the operations after the last remat call hold {share:.0%}, mainly {most}. "
    f"{_LOGITS}, or put remat around the loss head of each chunk. If these are blocks, "
    "put remat around each.",
    "cotangents": "the gradients that pass through calls hold {share:.0%}, mainly "
    "{most}. One operation of the backward needs them, and remat does not change that. "
    "Use a smaller batch, or split the operation.",
    "gradients": f"the gradients of the parameters hold {{share:.0%}}: {_ANYWAY}. "
    "Shard them, or free each one as soon as the optimizer has used it.",
    "parameters": f"the parameters hold {{share:.0%}}: {_ANYWAY}. Shard them, or use a "
    "smaller dtype.",
    "inputs": f"the inputs of the step and its buffers hold {{share:.0%}}: {_ANYWAY}. "
    "Use a smaller batch.",
}
