"""Policies that look at one thing each: whether it is a dot, its names, its size.

Invariant: each field is what its factory in `remat.policies` checked, and no more.
Rejected: one class that holds a predicate, which would not print, pickle or compare.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import override

from remat._dots import is_dot, is_dot_without_batch
from remat._op import Op
from remat._policy import Policy


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


@dataclass(frozen=True)
class Dots(Policy):
    """Keeps contractions, with or without those that have batch dimensions."""

    batched: bool

    def decide(self, op: Op) -> bool:
        """Say whether it is such a contraction."""
        return is_dot(op) if self.batched else is_dot_without_batch(op)

    def __repr__(self) -> str:
        return f"dots_{'' if self.batched else 'with_no_batch_dims_'}saveable"


@dataclass(frozen=True)
class OnlyNames(Policy):
    """Keeps the values that have one of these names."""

    only: frozenset[str]

    def decide(self, op: Op) -> bool:
        """Say whether it has one of the names."""
        return not self.only.isdisjoint(op.names)

    @property
    @override
    def names(self) -> frozenset[str]:
        """The names."""
        return self.only

    def __repr__(self) -> str:
        return f"save_only_these_names({listed(self.only)})"


@dataclass(frozen=True)
class AnyNamesBut(Policy):
    """Keeps the values that have a name that is none of these."""

    but: frozenset[str]

    def decide(self, op: Op) -> bool:
        """Say whether it has another name."""
        return bool(op.names - self.but)

    @property
    @override
    def names(self) -> frozenset[str]:
        """The names that are mentioned."""
        return self.but

    def __repr__(self) -> str:
        return f"save_any_names_but_these({listed(self.but)})"


@dataclass(frozen=True)
class NamesMatching(Policy):
    """Keeps the values that have a name which a pattern matches as a whole."""

    pattern: re.Pattern[str]

    def decide(self, op: Op) -> bool:
        """Say whether it has such a name."""
        return any(map(self.pattern.fullmatch, op.names))

    def __repr__(self) -> str:
        text = self.pattern.pattern
        plain = self.pattern == re.compile(text)
        return (
            f"save_names_matching({text!r})"
            if plain
            else (f"save_names_matching({self.pattern!r})")
        )


@dataclass(frozen=True)
class Size(Policy):
    """Keeps results by the bytes of all outputs together."""

    larger: bool
    than: float

    def decide(self, op: Op) -> bool:
        """Compare the bytes."""
        return op.nbytes > self.than if self.larger else op.nbytes < self.than

    def __repr__(self) -> str:
        return f"save_{'larg' if self.larger else 'small'}er_than({self.than!r})"
