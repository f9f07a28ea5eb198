"""`remat.scope`: the context manager.

Invariant: a thread that has no block open and no value left is as if there had never
been a block.
Rejected: a function that marks a tensor, `not_stored(x)`. When it is called, the graph
has saved all that `x` was computed from.
"""

import threading
from typing import Any, Literal, NoReturn, Self

import torch

from remat._base.calls import Calls, Places
from remat._base.context import here
from remat._base.errors import Label, RematError, label_of
from remat._base.source import user_line
from remat._offload.inputs import InputsAway, check_where, warn_of_inputs
from remat._partial.names import PolicyKeys
from remat._scope.hooks import Hooks
from remat._scope.recording import Recording
from remat._scope.table import ValueTable
from remat._scope.values import Block
from remat._torch.autograd import are_hooks_allowed, hooks_here
from remat._torch.levels import current_layer
from remat._torch.modes import undisturbed
from remat._torch.process import is_of_checkpoint
from remat._torch.tracing import eager_only, must_inline
from remat.policies import Policy, as_policy


class scope:  # noqa: N801
    """A block whose results no graph stores: a backward computes them again.

    Operations in the block run once, as they are. Whatever saves one of their results
    for its backward, in the block or later, saves a handle in place of it. The first
    handle that a backward reads has the result computed from what the block was given,
    without running any Python code again. It is freed after its last use.

    Use it where a value has many consumers that you do not call yourself, such as a
    weight that is made of a parameter and noise. Where you can name the function that
    consumes it, ``remat`` stores less.

    What the block is given (tensors that no block made) is stored instead, and must not
    be changed in place before the backward. Random numbers are drawn again from the
    state that the stream had, of any device or a ``torch.Generator``; afterwards the
    stream is as it was. In-place operations in the block are run again on copies. A
    result that is changed in place after the block is stored as without the block.

    Blocks may be nested, may be left in any order, and may be alive together: none
    stores the results of another. It does nothing where no graph is made, inside a call
    of ``remat(fn)`` or of torch's checkpoint, which recompute what is in them anyway,
    and in what ``torch.compile`` compiles. Compiled code that is called in a block runs
    compiled, and is no part of the block.

    Args:
        policy: of the results in the block: what it saves is stored as without the
            block, and what it offloads is brought back. By default nothing is saved.
            The policy of a nested block is joined with those around it.
        offload_inputs: whether what the block is given, and only its recomputes need,
            goes to pinned host memory when the block ends (``"disk"``: to a file), and
            comes back before its recompute. Leaves stay, as parameters, buffers and
            batches; what somebody still holds is used itself.
        **unknown: not accepted.

    Raises:
        TypeError: the policy is a budget (``within``), or there is another option.
        RematError: on entry, inside of ``torch.func.grad``, ``vmap`` or the like. There
            use ``remat(fn)``.
        MutationError: in the backward, if a tensor that the block was given was changed
            in place since, or freed, as FSDP does with the parameters that it gathers.

    Source: RETURNN's ``gradient_checkpoint_scope`` (rwth-i6/returnn issue 1552), which
    asked for it in pytorch issue 129867.

    Example:
        >>> import remat
        >>> from remat.testing import count_ops
        >>> w = torch.ones(3, requires_grad=True)
        >>> with remat.scope():
        ...     noisy = w + torch.randn(3)
        >>> loss = (noisy.sin() * noisy).sum()
        >>> del noisy
        >>> with count_ops() as ops:
        ...     loss.backward()
        >>> ops["randn"], ops["add"] > 0
        (1, True)
    """

    def __init__(
        self,
        policy: Any = None,
        *,
        offload_inputs: Literal["disk"] | bool = False,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            raise TypeError(_NO_OPTION.format(name=next(iter(unknown))))
        check_where(offload_inputs)
        self._where = offload_inputs
        self._policy = None if policy is None else as_policy(policy)
        if self._policy is not None and self._policy.has_budget:
            raise TypeError(_NO_BUDGET.format(policy=self._policy))
        self._entered: list[Block | None] = []

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: it recomputes no function.

        Raises:
            TypeError: always.
        """
        raise TypeError(_NO_CALL)

    def __enter__(self) -> Self:
        if must_inline() or not torch.is_grad_enabled():
            self._entered.append(None)
        else:
            self._entered.append(_begin(self._policy, self._where))
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        block = self._entered.pop()
        if block is not None:
            _end(block, raises=kind is None)


_NO_CALL = (
    "remat: remat.scope is a block: write `with remat.scope():` around the code. To "
    "recompute a function or a module, write remat.remat(fn) in place of "
    "remat.scope(fn)."
)
_NO_OPTION = (
    "remat: remat.scope takes a policy, and no {name}=. Put the block in a function, "
    "and write remat.remat(fn, {name}=...)."
)
_NO_BUDGET = (
    "remat: remat.scope cannot follow {policy}: what the backward reads of a block is "
    "not known when it ends, because graphs made later may save its results. Put the "
    "block in a function, and pass the budget to remat(fn, policy=...)."
)


class _Blocks(threading.local):
    """The blocks of the thread that asks."""

    def __init__(self) -> None:
        self.table = ValueTable()
        self._hooks = Hooks(self.table)
        self.recording = Recording(self.table)

    def begin(self, policy: Any, away: InputsAway | None) -> Block:
        """Open a block."""
        recording, hooks = self.recording, self._hooks
        hooks.remove_if_due()
        around = recording.blocks[-1].policy if recording.blocks else None
        both = policy is not None and around is not None
        block = Block(policy | around if both else policy or around, away)
        if away is not None:
            self.table.sender = block
        asks = block.policy is not None and block.policy.asks_modules
        if asks and recording.places.calls is None:
            recording.places.calls = Calls().__enter__()
        hooks.install()
        hooks.open += 1
        if not recording.blocks:
            recording.begin()
        recording.blocks.append(block)
        return block

    def end(self, block: Block) -> None:
        """Close a block, the innermost or another one."""
        recording, hooks = self.recording, self._hooks
        recording.store_late()
        recording.blocks.remove(block)
        block.is_open = False
        self.table.settle()
        if not recording.blocks:
            recording.end()
            if recording.places.calls is not None:
                recording.places.calls.__exit__()
            recording.places = Places(asks=False)
        hooks.open -= 1
        self.table.forget_running(block)
        self.table.forget_used_up()
        if block.away is not None:
            senders = [b for b in recording.blocks if b.away is not None]
            self.table.sender = senders[-1] if senders else None
            with undisturbed():
                self.table.send_given(block.away)
        if len(self.table):
            hooks.install()
        else:
            hooks.remove()


_BLOCKS = _Blocks()


def awaits_backward(kind: type[Policy]) -> bool:
    """Say whether a graph is alive of a closed block of the thread with such a policy.

    That is one which a backward may use yet.
    """
    handles = [ref() for ref in [*_BLOCKS.table.handles]]
    parts = {handle.made.part for handle in handles if handle is not None}
    over = [part for part in parts if not (part.is_used_up or part.block.is_open)]
    return any(isinstance(part.block.policy, kind) for part in over)


@eager_only
def _begin(policy: Any, where: Any) -> Block | None:
    if here().is_in_call() or any(is_of_checkpoint(p) for p, _ in hooks_here()):
        if where:
            warn_of_inputs(_label(), "a call around recomputes what is in it")
        return None
    if current_layer() is not None:
        raise RematError(_UNDER_TORCH_FUNC.format(where=user_line()))
    if not are_hooks_allowed():
        return None
    away = InputsAway(_label(), to_disk=where == "disk") if where else None
    return _BLOCKS.begin(policy, away)


def _label() -> Label:
    return label_of("scope", user_line().partition(", in ")[0])


@eager_only
def _end(block: Block, *, raises: bool) -> None:
    _BLOCKS.end(block)
    if block.asked is not None:
        PolicyKeys(block.policy, block.asked, _label()).tell()
        block.asked = None
    if raises:
        _BLOCKS.recording.raise_error()


_UNDER_TORCH_FUNC = (
    "remat: `with remat.scope()` at {where} is inside of a transform of torch.func, "
    "which takes no hooks for saved tensors. Put what consumes the results into a "
    "function and call `remat(fn)`, or use `remat.nn.apply(model)`. These work there, "
    "and a block inside of them does nothing."
)
