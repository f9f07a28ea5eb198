"""`within`: a policy that keeps at most so many bytes, and recomputes the least work.

It decides when a forward has ended, by its whole record (`remat._partial.budget`):

    within(b) | p              what p keeps must be kept, and counts in b
    within(b) & p              only what p keeps may be kept
    within(b) - p              only what p does not keep may be kept
    within(a) | within(b)      the larger budget
    within(a) & within(b)      the smaller budget

Invariant: a budget is data. Every expression has one form, `(within(b) & may) | must`.
Rejected: `~within(b)` and `within(b).but_offload()`. Which results a budget keeps
depends on the whole program, and on the solver.
"""

import importlib.util
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from typing_extensions import override

from remat._base.errors import missing
from remat._base.op import Op
from remat._base.sizes import bytes_in
from remat.policies._functions import Decision, checked_number, is_collective
from remat.policies._policy import (
    NO_MEANING,
    Policy,
    as_policy,
    everything_saveable,
    intersection,
    nothing_saveable,
    union,
)


Costs = Literal["roofline", "measured"]
_TIME_LIMIT = 10.0


@dataclass(frozen=True, order=True)
class Budget:
    """How much is kept, and how that is decided."""

    nbytes: int
    costs: Costs = "roofline"
    time_limit: float = _TIME_LIMIT  # seconds that the solver is given

    def __repr__(self) -> str:
        costs = "" if self.costs == "roofline" else f", costs={self.costs!r}"
        is_usual = self.time_limit == _TIME_LIMIT
        limit = "" if is_usual else f", time_limit={self.time_limit!r}"
        return f"within({self.nbytes}{costs}{limit})"


@dataclass(frozen=True, repr=False)
class Within(Policy):
    """Keeps what recomputes the least work, of what fits a budget."""

    budget: Budget
    must: Policy  # what has to be kept
    may: Policy  # what can be kept besides that

    has_budget = True

    def decide(self, op: Op) -> Decision:
        """Return where the result goes if the budget keeps it."""
        # Other ranks may keep others, and a collective has to be repeated by all.
        may = Decision.RECOMPUTE if is_collective(op.func) else self.may(op)
        return may | self.must(op)

    @override
    def below(self, path: str, classes: tuple[str, ...]) -> Policy:
        """Return the budget, for which the call within asks its parts."""
        must, may = self.must.below(path, classes), self.may.below(path, classes)
        return Within(self.budget, must, may)

    @override
    def __or__(self, other: object) -> Policy:
        other = as_policy(other)
        if not isinstance(other, Within):
            return Within(self.budget, union(self.must, other), self.may)
        budget = max(self.budget, other.budget)
        must, may = union(self.must, other.must), union(self.may, other.may)
        return Within(budget, must, may)

    @override
    def __and__(self, other: object) -> Policy:
        other, both = as_policy(other), intersection
        if not isinstance(other, Within):
            return Within(self.budget, both(self.must, other), both(self.may, other))
        budget, must = min(self.budget, other.budget), both(self.must, other.must)
        ours, theirs = union(self.may, self.must), union(other.may, other.must)
        return Within(budget, must, both(ours, theirs))

    __ror__, __rand__ = __or__, __and__

    @override
    def __invert__(self) -> NoReturn:
        raise TypeError(NO_MEANING.format(written=f"~{self}"))

    @override
    def but_offload(self, which: object = None, *, to: str = "pinned_host") -> NoReturn:
        raise TypeError(NO_MEANING.format(written=f"{self}.but_offload()"))

    def __repr__(self) -> str:
        shown = repr(self.budget)
        if self.may != everything_saveable:
            shown = f"({shown} & {self.may})"
        return shown if self.must == nothing_saveable else f"({shown} | {self.must})"


def times_operations(policy: Policy | None) -> bool:
    """Say whether a policy asks for the operations of a call to be timed."""
    return isinstance(policy, Within) and policy.budget.costs == "measured"


NO_SCIPY = f"remat: a budget of bytes is solved by scipy: {missing('scipy')}."


def within(
    bytes: int | str, *, costs: Costs = "roofline", time_limit: float = _TIME_LIMIT
) -> Policy:
    """Keep at most so many bytes per call, and recompute the least work that allows.

    The budget is that of each call of the function: of each block, if the blocks of a
    model are rematerialized. The first call of a kind holds its results until it ends.
    Then the choice is made, by a mixed-integer program, and the rest is let go. Later
    calls follow it. What the call was given is not in the budget: its inputs and
    parameters are kept anyway. Views count with the memory that they share.

    `within(b) | policy` keeps what `policy` keeps in any case, and within `b`. If that
    alone takes more, nothing else is kept. `within(b) & policy` keeps nothing else than
    what `policy` keeps. Of two budgets `|` is the larger and `&` the smaller. What is
    offloaded does not count. A call within another one has the larger of both budgets,
    and the call around decides what crosses.

    Args:
        bytes: the number of bytes, or a text such as "512 MiB" or "8GB".
        costs: "roofline" estimates what operations cost, from their FLOPs and bytes.
            It chooses alike on every machine and in every run. "measured" times the
            operations of the first call on its tensors, each once, so two runs may
            choose differently.
        time_limit: the seconds after which the solver stops. The best choice by then
            is taken. `explain` tells how far it may be from the best one.

    Returns:
        The policy.

    Raises:
        ImportError: scipy is not installed, which solves what to keep (`pip install
            scipy`).
        TypeError: `bytes` or `time_limit` is not a number.
        ValueError: `bytes` is negative or cannot be read, or `costs` is unknown.

    Example:
        >>> import torch
        >>> from remat import remat
        >>> from remat.policies import save_only_these_names
        >>> from remat.testing import count_ops
        >>> def f(x):
        ...     return x.sin().sin().sin()
        >>> for budget in 0, 400, 800:
        ...     y = remat(f, policy=within(budget))(torch.ones(100, requires_grad=True))
        ...     with count_ops() as ops:
        ...         y.sum().backward()
        ...     print(ops["sin"], ops["cos"])
        2 3
        1 3
        0 3
        >>> within("1 KiB") | save_only_these_names("q")
        (within(1024) | save_only_these_names('q'))
    """
    if costs not in _COSTS:
        known = " or ".join(map(repr, _COSTS))
        raise ValueError(f"remat: within takes costs={known}; got {costs!r}")
    nbytes = bytes_in(bytes, "within")
    # Dynamo cannot trace the search. The call says it there.
    if not (torch.compiler.is_compiling() or importlib.util.find_spec("scipy")):
        raise ImportError(NO_SCIPY)
    limit = float(checked_number(time_limit, "within takes time_limit in seconds"))
    budget = Budget(nbytes, costs, limit)
    return Within(budget, nothing_saveable, everything_saveable)


_COSTS = "roofline", "measured"
