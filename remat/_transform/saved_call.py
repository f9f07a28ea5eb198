"""What is known of one call under base autograd.

That is what it was made in, its inputs and its handles, what the forward did, and what
is done with a record. `saved` runs its forward, and `refill` recomputes it. Reports
read it.

Invariant: it holds no tensor that the call computed, and not the user's module. The
graph holds its handles, which hold the call.
Rejected: a closure. It would hold all variables of the calls around.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from remat._ambient.ambient import Ambient
from remat._base.context import here
from remat._graph.handles import Handle, unpack
from remat._live.reach import Reach
from remat._live.running import Running
from remat._partial.cache import CallKind, metas_of
from remat._partial.decide import Situation
from remat._partial.options import Options
from remat._torch import top_hooks
from remat._transform.leaves import UNKNOWN
from remat._transform.saved_inputs import SavedInputs


if TYPE_CHECKING:
    import weakref

    from remat._partial.stores import SavedInHandles


# Its sizes are asked for by operations, in some runs and not in others.
_NESTED = "an input is a nested tensor"


class SavedCall:
    """One call.

    Args:
        reach: what it reaches, without its tensors.
        options: of the call.
        inputs: its tensors.
        needs: which of them require grad.
        vmaps: how each level of vmap around the call batches its inputs.

    Attributes:
        reach: see above.
        options: see above.
        vmaps: see above.
        policy: of the call, joined with those of the calls around.
        hooks: for saved tensors, around the call: a pair, or None.
        is_nested: whether those are of a call of remat.
        inputs: what it saves of its inputs.
        ambient: what it reads besides.
        handles: by position; None for what was saved itself.
        metas: of what the handles stand for, by position.
        effects: of the forward.
        is_done: whether the forward has ended.
        following: what it does with its record, if anything.
        inner: what the calls within decided, in order.
        seeds: those that the forward took from the machine.
        index: of the call among those within the call around; None outside of one.
    """

    __slots__ = (
        *("__weakref__", "ambient", "effects", "following", "handles", "hooks"),
        *("index", "inner", "inputs", "is_done", "is_nested", "metas", "options"),
        *("policy", "reach", "seeds", "vmaps"),
    )

    def __init__(
        self,
        reach: Reach,
        options: Options,
        inputs: Sequence[Tensor],
        needs: list[bool],
        vmaps: Sequence[Any] = (),
    ) -> None:
        self.reach, self.options, self.vmaps = reach, options, vmaps
        context, self.hooks = here(), top_hooks(True)
        hooks = self.hooks
        is_nested = hooks is not None and hooks[1] is unpack
        self.is_nested = is_nested and hooks[0] is not context.scope_pack
        self.policy = options.joined()
        self.inputs = SavedInputs(
            inputs,
            needs,
            reach.first_parameter,
            reach.buffers,
            hooks,
            nested=self.is_nested,
        )
        self.ambient = Ambient(reach.streams, reach.handles_states)
        self.handles: Sequence[weakref.ref[Handle] | None] = ()
        self.metas: Sequence[Any] = ()
        self.effects, self.is_done = UNKNOWN, False
        self.following: SavedInHandles | None = None
        self.inner: list[Any] = []
        self.seeds: Sequence[int] = ()
        self.index: int | None = None

    @property
    def residual_hooks(self) -> Any:
        """The hooks that are given what the policy saves: a pair, or None."""
        return self.hooks if self.is_nested or self.options.hooks_residuals else None

    def alive(self) -> list[Handle]:
        """Return the handles that a node still holds, but for residuals."""
        return [
            handle
            for ref in self.handles
            if ref is not None
            and (handle := ref()) is not None
            and handle.residual is None
        ]

    def handle_at(self, position: int) -> Handle | None:
        """Return a handle by its position, if it is alive."""
        ref = self.handles[position]
        return None if ref is None else ref()

    def situation(self, inputs: Sequence[Tensor]) -> Situation:
        """Return what decides whether the call is recorded."""
        return Situation(
            is_saved=True,
            is_compiled=self.reach.compiled,
            elements=sum(map(Tensor.numel, inputs)),
            given_up=_NESTED if any(t.is_nested for t in inputs) else "",
        )

    def kind(self, inputs: Sequence[Tensor]) -> CallKind:
        """Return what the call has in common with those that share its record."""
        signature = self.reach.signature, str(self.vmaps), self.ambient.key
        return CallKind((*signature, *self.inputs.needs), metas_of(inputs))

    def run_again(self, running: Running, tensors: Sequence[Tensor]) -> None:
        """Call the function as it was called."""
        self.reach.call(running, tensors)

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.reach.label

    def name_of(self, index: int) -> str:
        """Write where an input comes from, as the function's author would."""
        return self.reach.name_of(index)
