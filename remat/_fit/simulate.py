"""Runs a training step on fake tensors, and tells its peak and its work.

Called by `planning` for a plan, and by `search` for each candidate. The copy of the
step is changed as that says. Where calls have policies it runs twice: the first call of
a policy records what the function does, and may hold more than the calls after it.

Invariant: nothing of the user's is touched, no memory is allocated, no number is drawn.
Rejected: a formula for the peak. Whatever autograd, remat and a model do with memory is
done here as it is done in training.
"""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from remat._ambient.streams import global_streams, stream_of
from remat._base.context import is_recomputing
from remat._fit.meter import Meter, Window
from remat._fit.training_step import (
    TrainingStep,
    backward,
    copied,
    copied_for_real,
    resident,
)
from remat._partial.cache import CACHES
from remat._partial.names import told_of_names
from remat._torch import device_generators, fake_mode


@dataclass(frozen=True, slots=True)
class Part:
    """What was measured of a window: see `Window`.

    Attributes:
        name: of the block that is called; "" between two calls.
        entered: the bytes alive when it begins.
        left: the bytes alive when it ends.
        highest: the most bytes alive in it, and in its backward.
        forward: the seconds of its forward.
        seconds: of its forward and its backward, with what is recomputed.
        flops: of both.
    """

    name: str
    entered: int
    left: int
    highest: int
    forward: float
    seconds: float
    flops: int

    @property
    def saves(self) -> int:
        """The bytes that its forward leaves alive."""
        return self.left - self.entered

    @property
    def needs(self) -> int:
        """The most bytes that are alive in it beside those from before."""
        return self.highest - self.entered


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a step does.

    Attributes:
        peak: the most bytes alive at any one time.
        resident: the bytes that are there before.
        seconds: the time of its operations, at nominal rates.
        flops: their floating-point operations.
        op: that ran at the peak.
        block: whose forward or backward ran at the peak; "" if none.
        in_backward: whether it was in the backward.
        steps: the windows of each of the two runs.
        nests: modules around several windows, as (name, first, end).
        names: given to values by `checkpoint_name`.
    """

    peak: int
    resident: int
    seconds: float
    flops: int
    op: str
    block: str
    in_backward: bool
    steps: tuple[tuple[Part, ...], ...]
    nests: tuple[tuple[str, int, int], ...]
    names: frozenset[str]


def place(found: Simulation) -> str:
    """Return where the peak of a step is: "mm in the backward of layers.3"."""
    phase = "backward" if found.in_backward else "forward"
    of = f" of {found.block}" if found.block else ""
    return f"in {found.op} in the {phase}{of}"


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave random streams as they are, and collect no garbage in the block.

    Steps are simulated in here.
    """
    devices = [s for s in map(stream_of, device_generators()) if s is not None]
    streams = [*global_streams().streams, *devices]
    states = [stream.read() for stream in streams]
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            # Of a choice that nobody made, and of the user's code in each run.
            warnings.simplefilter("ignore")
            yield
    finally:
        if enabled:
            gc.enable()
        for stream, state in zip(streams, states, strict=True):
            if stream.read() != state:
                stream.write(state)


def simulate(
    step: TrainingStep,
    device: torch.device,
    change: Callable[[TrainingStep], TrainingStep],
    blocks: Iterable[str] = (),
    around: Iterable[str] = (),
    *,
    is_real: bool = False,
    times: int = 2,
) -> Simulation:
    """Run a step twice on fake tensors, where it is `undisturbed`.

    Args:
        step: the step.
        device: of tensors that are on the meta device.
        change: what is to be measured, done to the copy.
        blocks: the names of the modules whose calls are windows.
        around: the names of modules around them.
        is_real: whether it runs on real tensors.
        times: how often it runs. Work is counted in the last run.
    """
    mode = nullcontext() if is_real else fake_mode()
    # Choices before have left records of calls of the same kinds.
    with CACHES.set_aside(), ExitStack() as stack:
        made = copied_for_real(step) if is_real else copied(step, mode, device)
        grads = [t.grad for t in _parameters(made)]
        made = change(made)
        stack.enter_context(mode)
        meter = Meter()
        watch = _Watch(meter)
        watch.see(made, blocks, around)
        with meter, told_of_names(watch):
            for tensor in resident(made):
                meter.hold(tensor)
            before = meter.live
            runs = []
            for k in range(times):
                runs.append(_run(made, meter, watch, costs=k == times - 1))
                for tensor, grad in zip(_parameters(made), grads, strict=True):
                    tensor.grad = grad
    return _outcome(before, runs, watch)


def _parameters(step: TrainingStep) -> list[Any]:
    return [t for t in resident(step) if t.is_leaf and t.requires_grad]


@dataclass(frozen=True, slots=True)
class _Run:
    peak: int
    where: tuple[str, str, bool]
    windows: Sequence[Window]
    nests: tuple[tuple[str, int, int], ...]
    last: int


def _run(step: TrainingStep, meter: Meter, watch: "_Watch", *, costs: bool) -> _Run:
    watch.nests = []
    meter.begin(costs=costs)
    result, outs = step.forward()
    last = meter.live
    backward(outs)
    del result, outs
    meter.end()
    nests = tuple(watch.nests)
    return _Run(meter.peak, meter.where, meter.windows, nests, last)


def _outcome(before: int, runs: Sequence[_Run], watch: "_Watch") -> Simulation:
    highest = max(runs, key=lambda run: run.peak)
    later = runs[-1].windows
    steps = tuple(tuple(_parts(run)) for run in runs)
    return Simulation(
        highest.peak,
        before,
        sum(w.seconds + w.again for w in later),
        sum(w.flops for w in later),
        *highest.where,
        steps,
        runs[-1].nests,
        frozenset(watch.names),
    )


def _parts(run: _Run) -> Iterator[Part]:
    ends = [*(w.entered for w in run.windows[1:]), run.last]
    for w, end in zip(run.windows, ends, strict=True):
        total = w.seconds + w.again
        yield Part(w.name, w.entered, end, w.highest, w.seconds, total, w.flops)


class _Watch:
    """Tells a meter when modules are called.

    Attributes:
        nests: the calls of modules around others, with their windows.
        names: given to values.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._begun: list[int] = []
        self.nests: list[tuple[str, int, int]] = []
        self.names: set[str] = set()

    def name(self, tensor: Tensor, name: str) -> None:
        """Note the name of a value."""
        del tensor
        self.names.add(name)

    def see(
        self, step: TrainingStep, blocks: Iterable[str], around: Iterable[str]
    ) -> None:
        """Watch modules of a copy of a step, outside of what is recomputed."""
        model = step.model()
        if model is None:
            return
        for name in blocks:
            self._hook(model.get_submodule(name), name, "")
        for name in around:
            self._hook(model.get_submodule(name), "", name)

    def _hook(self, module: nn.Module, window: str, nest: str) -> None:
        def enter(*_: Any) -> None:
            if not is_recomputing():
                self._begun.append(self._meter.enter(window))

        def leave(*_: Any) -> None:
            if not is_recomputing():
                first, end = self._begun.pop(), self._meter.enter("")
                if not window:
                    self.nests.append((nest, first, end))

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave)
