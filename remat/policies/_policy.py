"""What a policy is, how policies combine, and what `as_policy` accepts as a policy.

Decisions are ordered from far to near, and policies combine as their decisions do:

    p | q   kept if either keeps it, in the nearer of the two places
    p & q   kept if both keep it, in the farther of the two places
    ~p      saved if p does not keep it, else recomputed
    p - q   what p keeps and q does not: p & ~q

All laws of a lattice hold, and De Morgan's. `~~p` is p, but saves what p offloads.

Invariant: a policy is a value. It compares, hashes, pickles if its functions do, and
prints as the expression that makes it. Rejected: closures. They neither compare nor
print. A `~p` that offloads what p offloads: "q without p" would keep what p keeps.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from types import FunctionType
from typing import Any, ClassVar

import torch
from typing_extensions import override

from remat._base.code import mentions
from remat._base.op import Op
from remat.policies._functions import (
    DESTINATIONS,
    Answer,
    Ask,
    Decision,
    Selective,
    asked,
    check_offload,
    decision_of,
    name,
    printed,
)


class Policy(ABC):
    """Which results to save for the backward. A policy is a value that can be called.

    A result that the policy saves is kept only if the backward reads it. A policy
    combines with other policies, and with anything that `as_policy` accepts:
    `dots_saveable | (lambda op: op.nbytes < 64)`.

    Example:
        >>> from remat.policies import dots_saveable, save_only_these_names
        >>> dots_saveable - save_only_these_names("logits")
        (dots_saveable & ~save_only_these_names('logits'))
    """

    # Bytes saved instead of results that are not there; of those that wait; see `Made`.
    owed = put_off = unread = 0
    # Whether results are saved when it shows what reads them; whether others may have
    # replaced them; whether what was not planned takes too much; whether it has places.
    is_late = is_replaced = is_short = is_by_place = False

    @abstractmethod
    def decide(self, op: Op) -> Answer:
        """Return the answer for `op`. `policy(op)` checks it."""

    def __call__(self, op: Op) -> Decision:
        """Return the decision for the result of `op`.

        Raises:
            TypeError: a function of the user returned something other than a decision.
        """
        answer = self.decide(op)
        if isinstance(answer, torch.SymBool):  # a size that compiled code does not fix
            answer = bool(answer)
        decision = decision_of(answer)
        if decision is None:
            raise TypeError(
                f"remat: policy {self!r} returned {answer!r}, a "
                f"{type(answer).__name__}, for {name(op.func)}"
                + (f" at {op.source}" if op.source else "")
                + ". Return a bool, a remat.policies.Decision or a "
                "torch.utils.checkpoint.CheckpointPolicy."
            )
        return decision

    has_budget: ClassVar[bool] = False
    """Whether it is a budget, which looks at all operations of a call at once."""

    is_in_order: ClassVar[bool] = False  # asked once about each result

    @property
    def keys(self) -> "frozenset[tuple[Policy, str]]":
        """The names and places in it, each with the policy that has it."""
        return frozenset().union(*(p.keys for p in self._parts()))

    def matches(self, key: str, op: Op) -> bool:
        """Say whether a key of this policy matches an operation: by default, a name."""
        return key in op.names

    @property
    def asks_modules(self) -> bool:
        """Whether it asks an operation for its module, or for classes."""
        return any(p.asks_modules for p in self._parts())

    @property
    def keeps_calls(self) -> bool:
        """Whether it may keep calls of modules or Functions as one."""
        return any(p.keeps_calls for p in self._parts())

    @property
    def has_decisions(self) -> bool:
        """Whether it keeps decisions, which its call may make otherwise each time."""
        return any(p.has_decisions for p in self._parts())

    @property
    def may_count(self) -> bool:
        """Whether it asks a function that may count, or remember what it was asked."""
        return any(p.may_count for p in self._parts())

    def _parts(self) -> "list[Policy]":
        return [p for p in vars(self).values() if isinstance(p, Policy)]

    def below(self, path: str, classes: tuple[str, ...]) -> "Policy":
        """Return the policy for a call in the module at a path of this one's call."""
        return SeenAround(self, path, " ".join(classes)) if path or classes else self

    def saves(self, name: str) -> bool:
        """Say whether a value is kept because `checkpoint_name` gave it this name.

        Example:
            >>> from remat.policies import dots_saveable, save_only_these_names
            >>> policy = dots_saveable | save_only_these_names("q")
            >>> policy.saves("q"), policy.saves("k")
            (True, False)
        """
        return bool(self(Op(torch.ops.remat.named.default, names=frozenset({name}))))

    @property
    def is_data(self) -> bool:
        """Whether the policy holds no function of the user, which may hold anything."""
        return False not in [p.is_data for p in self._parts()]

    @property
    def cache_key(self) -> Any:
        """A key that is equal for equal policies and holds no function of the user.

        It is made of the keys of its parts: a nested call makes a new policy each time.
        """
        if self.is_data:
            return self
        if not is_dataclass(self):
            return weakref.ref(self)
        parts = vars(self).values()
        keys = (p.cache_key if isinstance(p, Policy) else p for p in parts)
        return type(self), *keys

    def __or__(self, other: object) -> "Policy":
        other = as_policy(other)
        return other.__ror__(self) if other.has_budget else union(self, other)

    def __ror__(self, other: object) -> "Policy":
        return as_policy(other) | self

    def __and__(self, other: object) -> "Policy":
        other = as_policy(other)
        return other.__rand__(self) if other.has_budget else intersection(self, other)

    def __rand__(self, other: object) -> "Policy":
        return as_policy(other) & self

    def __invert__(self) -> "Policy":
        return Complement(self)

    def __sub__(self, other: object) -> "Policy":
        return self & ~as_policy(other)

    def __rsub__(self, other: object) -> "Policy":
        return as_policy(other) & ~self

    def but_offload(self, which: object = None, *, to: str = "pinned_host") -> "Policy":
        """Return a policy that keeps the same results, and offloads some of them.

        Args:
            which: a policy. Results that both policies keep are offloaded to `to`. None
                offloads every result that this policy keeps.
            to: "pinned_host" for the host's memory, or "disk" for a file.

        Returns:
            The policy.

        Raises:
            TypeError: `which` is not a policy.
            ValueError: `to` is not a known destination.

        Example:
            >>> from remat.policies import dots_saveable, save_larger_than
            >>> dots_saveable.but_offload(save_larger_than(2**20), to="disk")
            dots_saveable.but_offload(save_larger_than(1048576), to='disk')
        """
        check_offload(to, "but_offload")
        chosen = everything_saveable if which is None else as_policy(which)
        if chosen.has_budget:
            raise TypeError(NO_MEANING.format(written=f"but_offload({chosen})"))
        return ButOffload(self, chosen, to)


@dataclass(frozen=True)
class Always(Policy):
    """Returns the same decision for every operation, as JAX's two constants do."""

    decision: Decision

    def decide(self, op: Op) -> Decision:
        """Return the one decision."""
        del op
        return self.decision

    def __repr__(self) -> str:
        if self.decision.offloads:
            return f"as_policy({self.decision})"
        return "everything_saveable" if self.decision else "nothing_saveable"


nothing_saveable = Always(Decision.RECOMPUTE)
"""Saves nothing. Every result is recomputed, as with `policy=None`.

Example:
    >>> import torch
    >>> from remat.policies import Op, nothing_saveable
    >>> nothing_saveable(Op(torch.ops.aten.mm.default))
    <Decision.RECOMPUTE: 0>
"""
everything_saveable = Always(Decision.SAVE)
"""Saves everything that the backward reads, as without remat.

Example:
    >>> import torch
    >>> from remat.policies import Op, everything_saveable
    >>> everything_saveable(Op(torch.ops.aten.mm.default))
    <Decision.SAVE: 3>
"""


@dataclass(frozen=True)
class Both(Policy):
    """Combines two policies: `p | q` where it is `either`, else `p & q`."""

    left: Policy
    right: Policy
    either: bool

    def decide(self, op: Op) -> Decision:
        """Return the nearer decision of the two, or the farther."""
        left, right = self.left(op), self.right(op)
        return left | right if self.either else left & right

    def __repr__(self) -> str:
        return f"({self.left} {'|' if self.either else '&'} {self.right})"


@dataclass(frozen=True)
class Complement(Policy):
    """Saved if the policy `of` does not keep it."""

    of: Policy

    def decide(self, op: Op) -> Decision:
        """Return SAVE or RECOMPUTE."""
        return ~self.of(op)

    def __repr__(self) -> str:
        return f"~{self.of}"


@dataclass(frozen=True)
class ButOffload(Policy):
    """Kept as `policy` keeps it, but offloaded if `which` would keep it too."""

    policy: Policy
    which: Policy
    to: str

    def decide(self, op: Op) -> Decision:
        """Return the decision of `policy`, or the one to offload."""
        decision = self.policy(op)
        return DESTINATIONS[self.to] if decision and self.which(op) else decision

    def __repr__(self) -> str:
        which = "" if self.which == everything_saveable else f"{self.which}, "
        is_complement = isinstance(self.policy, Complement)
        # `~` binds less tightly than the dot.
        policy = f"({self.policy})" if is_complement else self.policy
        return f"{policy}.but_offload({which}to={self.to!r})"


@dataclass(frozen=True)
class SeenAround(Policy):
    """A policy of a call around, which knows the module of this one by a path."""

    policy: Policy
    path: str
    classes: str
    keys = frozenset()  # which the call around looks for

    @override
    def decide(self, op: Op) -> Decision:
        """Ask about the operation as the call around sees it."""
        return self.policy(self.seen(op))

    def seen(self, op: Op) -> Op:
        """Return an operation as the call around sees it."""
        module = ".".join(filter(None, (self.path, op.module)))
        return replace(op, module=module, classes=(*op.classes, *self.classes.split()))

    def __repr__(self) -> str:
        return f"{self.policy}.below({self.path!r}, {self.classes!r})"


NO_MEANING = (
    "remat: {written} has no meaning: a budget says how much is kept, and not which "
    "results. To keep some results out of a budget, write within(bytes) - policy. To "
    "offload some, write within(bytes) | policy.but_offload()."
)


def union(left: Policy, right: Policy) -> Policy:
    """Return `left | right`, or one of the two if it decides the same."""
    if right == nothing_saveable or left in (right, everything_saveable):
        return left
    if left == nothing_saveable or right == everything_saveable:
        return right
    return Both(left, right, either=True)


def intersection(left: Policy, right: Policy) -> Policy:
    """Return `left & right`, or one of the two if it decides the same."""
    if right == everything_saveable or left in (right, nothing_saveable):
        return left
    if left == everything_saveable or right == nothing_saveable:
        return right
    return Both(left, right, either=False)


# --- What `as_policy` accepts -------------------------------------------------------


@dataclass(frozen=True)
class Function(Policy):
    """Asks a user's function about the operation."""

    fn: Ask

    def decide(self, op: Op) -> Answer:
        """Return the function's answer."""
        return self.fn(op)

    is_data = False

    @property
    @override
    def asks_modules(self) -> bool:
        is_ours = not isinstance(self.fn, Selective)
        return is_ours and mentions(self.fn, frozenset(("module", "classes")))

    @property
    @override
    def may_count(self) -> bool:
        return not (isinstance(self.fn, Selective) and self.fn.is_new)

    @property
    @override
    def cache_key(self) -> Any:
        # Refers to the user's function: a call may make the policy anew.
        fn = self.fn.fn if isinstance(self.fn, Selective) else self.fn
        return weakref.ref(fn if type(fn) is FunctionType else self)

    def __repr__(self) -> str:
        return f"as_policy({printed(self.fn)})"


# The types of other values that are policies, and what makes a policy of one. The files
# above this one add theirs.
ACCEPTED: list[tuple[Any, Callable[[Any], "Policy"]]] = []


def as_policy(obj: object) -> Policy:
    """Convert `obj` to a policy.

    Args:
        obj: one of these:
            a policy;
            None, for `nothing_saveable`;
            a `Decision` or a `CheckpointPolicy` of torch, for every operation;
            a list, tuple or set of operators, for `save_ops`;
            a dict of policies by place: keys are names of values, paths of modules
            below what is rematerialized (`"layers.*.attn"`), classes of modules or
            Functions, operators (also as text, `"aten.mm"`), and None for the rest. A
            name comes first, then the longest path, the class, the operator. Values may
            be "save" (of modules as `keep`), "recompute", "offload", "disk", or the
            name of a constant policy;
            a function `(op) -> bool | Decision`;
            a policy function of torch's selective checkpointing, `(ctx, op, *args,
            **kwargs) -> bool | CheckpointPolicy`.
            A function that can be called with one argument counts as a function of
            `op`. A function must be hashable. It must give the same answer for equal
            operations, because remat reuses an answer in later calls: one that counts
            is told so. `op.nth` and `every_other` count.

    Returns:
        The policy.

    Raises:
        TypeError: `obj` cannot be converted to a policy.

    Example:
        >>> import torch
        >>> as_policy([torch.ops.aten.mm.default])
        save_ops(torch.ops.aten.mm.default)
        >>> as_policy({"layers.*.attn": "save", torch.ops.aten.mm: "offload"})
        as_policy({'layers.*.attn': 'save', 'torch.ops.aten.mm': 'offload'})
    """
    if isinstance(obj, Policy):
        return obj
    if obj is None:
        return nothing_saveable
    decision = None if isinstance(obj, bool) else decision_of(obj)
    if decision is not None:
        return Always(decision)
    for kinds, make in ACCEPTED:
        if isinstance(obj, kinds):
            return make(obj)
    # Dynamo cannot trace the check, which `_data` makes up for.
    is_traced = torch.compiler.is_compiling() and isinstance(obj, FunctionType)
    return Function(obj if is_traced else asked(obj))
