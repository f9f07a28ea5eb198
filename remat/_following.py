"""What a call under base autograd keeps for its policy, and how it is replayed.

The first call of a kind is recorded: its operations, and for each handle the storage
that it stands for. The plan of the record says what is kept. Where the graph saves what
is kept anyway, later calls keep it as it is saved, by its place, and no mode follows
their operations; else one collects it (`_replay.Keep`).

Invariant: a handle of a value that is kept gives that very value, whatever a plan says.
A replay that does not fit is given up, and the function runs as it is.
Rejected: one list of residuals for a call. A backward frees what it has used, node by
node.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from remat._absent import like
from remat._compat import viewed
from remat._errors import RecomputeError
from remat._handles import Handle
from remat._recipe import Tracing, described_loss, is_of_memory
from remat._replay import Check, Keep, Replay, Verify
from remat._residual import Offloaded, Residual, keep
from remat._script import Script
from remat._trace import Recorder
from remat._traces import Scripts
from remat._values import value_of


class Following:
    """What one call does with its record.

    Args:
        tracing: says whether it is recorded, or follows a record.
        hooks: for saved tensors, around the call: a pair, or None.
        nested: whether those are of a call of remat.

    Attributes:
        mode: to run the function in, None if nothing follows it.
        dropped: the inputs that are let go.
    """

    __slots__ = (
        *("_constants", "_feeding", "_hooks", "_nested", "_scripts", "_seen"),
        *("_taken", "_tracing", "_wanted", "dropped", "mode"),
    )

    def __init__(self, tracing: Tracing, hooks: Any, *, nested: bool) -> None:
        self._tracing, self._hooks, self._nested = tracing, hooks, nested
        self.mode, self._scripts = tracing.mode, tracing.scripts
        self._feeding: list[Residual | Offloaded | None] = []
        self._constants: dict[int, Any] = {}
        self.dropped: Sequence[int] = ()
        self._seen = self.mode is not None
        scripts = self._scripts
        # What is kept by its place, as the graph saves it, needs no mode.
        self._wanted = {} if scripts is None else scripts.sources
        self._taken: dict[int, Tensor] = {}
        if type(self.mode) is Keep and scripts is not None and scripts.are_all_saved:
            self.mode = None

    # --- The forward ---

    def pack(self, place: int, tensor: Tensor | None) -> None:
        """Be told of what the graph saves at a place; None for what stays itself."""
        if type(self.mode) is Recorder:
            self.mode.pack(tensor)
        elif self.mode is None and place in self._wanted and tensor is not None:
            self._taken[place] = tensor.detach()

    def finish(self, handles: Sequence[Handle | None]) -> None:
        """Give the handles what is kept.

        Args:
            handles: by place; None for what stays itself, and for what is gone.
        """
        tensors = self._residuals(handles)
        tracing, self._tracing = self._tracing, None
        scripts, self.mode, self._taken = self._scripts, None, {}
        if scripts is None or tensors is None:
            self._scripts = None
            if tensors is None:
                tracing.trace.strike()
            return
        self._trace = tracing.trace
        steps, residuals = scripts.record.steps, scripts.full.plan.residuals
        ops = [steps[i].op for i, _ in residuals]
        kept = keep(tensors, scripts.places, ops, self._hooks, nested=self._nested)
        for place, k in scripts.kept_at.items():
            handle = handles[place]
            if handle is not None:
                view = scripts.record.packs[place].value
                handle.keep(kept[k], None if view == value_of(tensors[k]) else view)
        self._feeding = [r if k in scripts.feeding else None for k, r in enumerate(kept)]
'''
