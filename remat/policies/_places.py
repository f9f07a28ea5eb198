"""Policies by place: what a dict means where a policy is accepted.

    a name          that `checkpoint_name` gives                  "logits"
    a path          of a module, by whole parts, below what       "layers.*.attn"
                    is rematerialized
    a class         of modules, or a custom Function              nn.MultiheadAttention
    an operator     an overload, a packet or its text             "aten.mm"
    None            all else

The first kind in this order decides; of paths the longest, then the one with fewer
stars, then the first in the dict; of classes the innermost.
Invariant: all keys are texts, and so data. What a text is shows where it matches.
Rejected: to look up what it is when the policy is made. Operators and names come later.
"""

import functools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from remat._base.op import Op
from remat._base.source import class_names, full_name
from remat._torch.operators import is_operator
from remat.policies import _operations
from remat.policies._functions import Decision, advice, decision_of, family, name
from remat.policies._policy import (
    ACCEPTED,
    Always,
    Both,
    Policy,
    SeenAround,
    as_policy,
    everything_saveable,
    nothing_saveable,
)


@dataclass(frozen=True)
class ByKey(Policy):
    """Asks `policy` where `key` is the nearest key that matches, else `others`."""

    key: str
    policy: Policy
    others: Policy

    @override
    def decide(self, op: Op) -> Decision:
        """Return the decision of the nearest key that matches."""
        found = self.nearest(op) or [[*self.parts()][-1].others]
        return functools.reduce(operator.or_, [policy(op) for policy in found])

    def nearest(self, op: Op) -> list[Policy]:
        """Return the policy of the nearest key; of all names, if a value has several.

        It is empty if no key matches.
        """
        ranks = [(rank_of(part.key, op), part.policy) for part in self.parts()]
        nearest = max(rank for rank, _ in ranks)
        found = [policy for rank, policy in ranks if rank == nearest != _FAR]
        return found if nearest == _NAME else found[:1]

    def parts(self) -> "Iterator[ByKey]":
        """Yield it for each of its keys."""
        part: Policy = self
        while isinstance(part, ByKey):
            yield part
            part = part.others

    @property
    @override
    def keys(self) -> frozenset[tuple[Policy, str]]:
        return super().keys | {(self, self.key)}

    @override
    def matches(self, key: str, op: Op) -> bool:
        return rank_of(key, op) > _FAR

    @property
    @override
    def keeps_calls(self) -> bool:
        is_kept = self.policy == everything_saveable and not _is_operator(self.key)
        return is_kept or self.others.keeps_calls

    @property
    @override
    def asks_modules(self) -> bool:
        return not self.key.startswith(_OPERATOR) or super().asks_modules

    def __repr__(self) -> str:
        shown = [f"{part.key!r}: {_printed(part.policy)}" for part in self.parts()]
        others = [*self.parts()][-1].others
        if others != nothing_saveable:
            shown.append(f"None: {_printed(others)}")
        return f"as_policy({{{', '.join(shown)}}})"


_OPERATOR = "torch.ops."
_FAR, _NAME = (0, 0, 0), (4, 0, 0)


def rank_of(key: str, op: Op) -> tuple[int, int, int]:
    """Return how near a key is to an operation; the least where it does not match.

    Example:
        >>> rank_of("aten.mm", Op(torch.ops.aten.mm.default))
        (1, 0, 0)
        >>> rank_of("b.*", Op(torch.ops.aten.mm.default, module="b.0.c"))
        (3, 1, -1)
    """
    if key in op.names:
        return _NAME
    if op.module and _pattern(key).match(op.module):
        return 3, key.count("."), -key.count("*")
    if key in op.classes:
        return 2, -op.classes.index(key), 0
    if op.func is None:  # a call of a module, or of a Function
        return _FAR
    text = key.removeprefix(_OPERATOR).replace("::", ".")
    if text == name(op.func):
        return 1, 1, 0
    return (1, 0, 0) if text == family(op.func) else _FAR


def keeps_call(policy: Policy, call: Op, modules: Sequence[Op]) -> bool:
    """Say whether a policy keeps a call of a module or a Function as one.

    It does if all that the call may run is saved. `modules` are all that there are.
    """
    if isinstance(policy, Both) and policy.either:
        either = policy.left, policy.right
        return any(keeps_call(p, call, modules) for p in either)
    if isinstance(policy, SeenAround):
        call, *modules = map(policy.seen, (call, *modules))
        return keeps_call(policy.policy, call, modules)
    if policy.has_budget:
        return keeps_call(vars(policy)["must"], call, modules)
    if not isinstance(policy, ByKey):
        return False
    inner = [m for m in modules if is_in(m.module, call.module)]
    if any(policy.nearest(op) != [everything_saveable] for op in (call, *inner)):
        return False
    # Another key that is no place of a module may be the name of a value in it.
    others = [p for p in policy.parts() if p.policy != everything_saveable]
    others = [p.key for p in others if not _is_operator(p.key)]
    return all(any(policy.matches(key, op) for op in modules) for key in others)


def is_in(path: str, around: str) -> bool:
    """Say whether a module is in another one, by their paths."""
    return path.startswith(f"{around}." if around else "")


def _is_operator(key: str) -> bool:
    return key.startswith((_OPERATOR, "aten.", "aten::"))


@functools.cache
def _pattern(key: str) -> re.Pattern[str]:
    parts = re.escape(key).replace(r"\*", r"[^./]*")
    return re.compile(rf"{parts}(?:[./]|$)")


def _printed(policy: Policy) -> str:
    words = [word for word, each in _WORDS.items() if each == policy]
    return repr(words[0]) if words else repr(policy)


_WORDS: dict[str, Policy] = {
    "save": everything_saveable,
    "recompute": nothing_saveable,
    "offload": Always(Decision.OFFLOAD),
    "disk": Always(Decision.OFFLOAD_TO_DISK),
}


@dataclass(frozen=True)
class EveryOther(Policy):
    """Keeps what a policy keeps of the first, third, ... operation of an operator."""

    policy: Policy

    @override
    def decide(self, op: Op) -> Decision:
        """Ask the policy about every other operation."""
        return Decision.RECOMPUTE if op.nth % 2 else self.policy(op)

    def __repr__(self) -> str:
        return f"every_other({self.policy})"


def every_other(policy: Any) -> Policy:
    """Keep what a policy keeps of the first, third, ... operation of each operator.

    Args:
        policy: a policy, or anything that `as_policy` accepts, but no budget.

    Source: the selective mode of torchtitan and NeMo, which saves half of the matmuls
    by a counter. A counter of your own counts the operations of the first call alone.

    Example:
        >>> from remat.policies import dots_saveable
        >>> [every_other(dots_saveable)(Op(torch.ops.aten.mm.default, nth=i)).name
        ...  for i in range(3)]
        ['SAVE', 'RECOMPUTE', 'SAVE']
    """
    return EveryOther(_no_budget(as_policy(policy), "every_other"))


# --- From a dict ---


def by_place(places: Mapping[Any, Any]) -> Policy:
    """Return the policy that a dict means."""
    known: dict[str, Policy] = {}
    default: Policy = nothing_saveable
    for key, value in places.items():
        if key is None:
            default = _value(value)
        else:
            known[_text(key)] = _value(value)
    for key in reversed(known):
        default = ByKey(key, known[key], default)
    return default


def _text(key: Any) -> str:
    """Return the text that a key is held as."""
    if isinstance(key, str) and key:
        return key
    if is_operator(key):
        return _OPERATOR + name(key)
    if isinstance(key, type) and issubclass(key, nn.Module):
        names = [*class_names(key)]
        if not names:  # as of nn.Module, which all modules are
            raise TypeError(_KEY.format(key=key, kind=type(key).__name__))
        return names[0]
    if isinstance(key, type) and issubclass(key, torch.autograd.Function):
        owner = next(each for each in key.__mro__ if "forward" in vars(each))
        return full_name(owner)
    raise TypeError(_KEY.format(key=key, kind=type(key).__name__))


def _value(value: Any) -> Policy:
    if isinstance(value, str):
        names = value, f"{value}_saveable"
        policy = next(filter(None, map((_CONSTANTS | _WORDS).get, names)), None)
        if not isinstance(policy, Policy):
            raise TypeError(_VALUE.format(value=value, advice=advice(value)))
        return policy
    if isinstance(value, bool) or (value is not None and decision_of(value) is None):
        return _no_budget(as_policy(value), "a place")
    return as_policy(value)


def _no_budget(policy: Policy, taker: str) -> Policy:
    if policy.has_budget:
        raise TypeError(_BUDGET.format(policy=policy, taker=taker))
    return policy


_CONSTANTS = vars(_operations)
_KEY = (
    "remat: {key!r}, a {kind}, is no place. The keys of a policy are names of values, "
    "paths of modules, classes of modules or Functions, operators, and None for the "
    "rest."
)
_VALUE = (
    "remat: {value!r} is no policy. {advice}The values of a policy by place are "
    "policies, Decisions, and 'save', 'recompute', 'offload', 'disk', 'dots' or the "
    "name of a constant of remat.policies."
)
_BUDGET = (
    "remat: {taker} cannot have {policy}: a budget is of a whole call. Write "
    "within(bytes) & as_policy({{...}}) for what it may keep."
)


# --- Keys that match nothing ---


def unmatched(
    policy: Policy, ops: Iterable[Op], paths: Iterable[str] = ()
) -> dict[tuple[Policy, str], str]:
    """Return the keys that match no operation, each with the nearest that does.

    That may be another path of those of all modules.
    """
    keys, places = {*policy.keys}, dict.fromkeys(paths)
    names: dict[str, None] = {}
    for op in ops if keys else ():
        keys = {(part, key) for part, key in keys if not part.matches(key, op)}
        names |= dict.fromkeys(sorted(op.names))
        places |= dict.fromkeys((*_prefixes(op.module), *op.classes, family(op.func)))
    every = names | places
    return {
        (part, key): _nearest(key, every if isinstance(part, ByKey) else names)
        for part, key in keys
    }


def _prefixes(path: str) -> Iterable[str]:
    parts = path.split(".") if path else []
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _nearest(key: str, known: Iterable[str]) -> str:
    """Return what a key may mean; "" if nothing is like it."""
    text = key.removeprefix(_OPERATOR).replace("::", ".")
    ends = [each for each in known if each.endswith(f".{text}")]
    # A path that begins further out, at the model, where a block is rematerialized.
    parts = text.split(".")
    ends += [e for i in range(1, len(parts)) if (e := ".".join(parts[i:])) in known]
    near = ends or get_close_matches(text, known, 1, _LIKE)
    return near[0] if near else ""


_LIKE = 0.8  # of the letters


ACCEPTED.append((Mapping, by_place))
