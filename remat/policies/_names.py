"""Policies by the names that `checkpoint_name` gives to values.

Invariant: the names in a policy are strings, checked when it is made.
Rejected: one class that holds a predicate, which would not print, pickle or compare.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import override

from remat._base.op import Op
from remat.policies._functions import check_offload
from remat.policies._policy import Policy


@dataclass(frozen=True)
class ByName(Policy):
    """Saves the values that have one of these names, or a name `other` than these."""

    these: frozenset[str]
    other: bool = False

    def decide(self, op: Op) -> bool:
        """Say whether the value has such a name."""
        if self.other:
            return not self.these.issuperset(op.names)
        return not self.these.isdisjoint(op.names)

    @property
    @override
    def keys(self) -> frozenset[tuple[Policy, str]]:
        return frozenset((self, name) for name in self.these)

    def __repr__(self) -> str:
        kind = "save_any_names_but_these" if self.other else "save_only_these_names"
        return f"{kind}({_listed(self.these)})"


@dataclass(frozen=True)
class NamesMatching(Policy):
    """Saves the values that have a name which the pattern matches in full."""

    pattern: re.Pattern[str]

    def decide(self, op: Op) -> bool:
        """Say whether the value has such a name."""
        return any(map(self.pattern.fullmatch, op.names))

    def __repr__(self) -> str:
        text = self.pattern.pattern
        plain = self.pattern == re.compile(text)
        return f"save_names_matching({text if plain else self.pattern!r})"


def save_only_these_names(*names: str) -> Policy:
    """Save the values that `checkpoint_name` gave one of these names.

    Args:
        *names: the names. Without names, the policy saves nothing.

    Returns:
        The policy.

    Raises:
        TypeError: a name is not a string (such as a list that was not unpacked).

    Source: `jax.checkpoint_policies.save_only_these_names`.

    Example:
        >>> import torch
        >>> policy = save_only_these_names("q", "k")
        >>> policy(Op(torch.ops.aten.sin.default, names=frozenset({"k"})))
        <Decision.SAVE: 3>
        >>> policy(Op(torch.ops.aten.sin.default))
        <Decision.RECOMPUTE: 0>
    """
    return ByName(_checked_names(names, "save_only_these_names"))


def save_any_names_but_these(*names: str) -> Policy:
    """Save every value that has a name other than these.

    A value without a name is not saved.

    Args:
        *names: the names. A value that has one of them and another name is saved.

    Returns:
        The policy.

    Raises:
        TypeError: a name is not a string.

    Source: `jax.checkpoint_policies.save_any_names_but_these`.

    Example:
        >>> import torch
        >>> policy = save_any_names_but_these("q")
        >>> policy(Op(torch.ops.aten.sin.default, names=frozenset({"k"})))
        <Decision.SAVE: 3>
        >>> policy(Op(torch.ops.aten.sin.default))
        <Decision.RECOMPUTE: 0>
    """
    return ByName(_checked_names(names, "save_any_names_but_these"), other=True)


def save_anything_except_these_names(*names: str) -> Policy:
    """Save every value that has none of these names, named or not.

    Args:
        *names: the names.

    Returns:
        The policy, `~save_only_these_names(*names)`.

    Raises:
        TypeError: a name is not a string.

    Source: the documentation of JAX's
    `jax.checkpoint_policies.save_anything_except_these_names`. The code of JAX ignores
    the names.

    Example:
        >>> import torch
        >>> policy = save_anything_except_these_names("q")
        >>> policy(Op(torch.ops.aten.sin.default, names=frozenset({"q"})))
        <Decision.RECOMPUTE: 0>
        >>> policy(Op(torch.ops.aten.sin.default))
        <Decision.SAVE: 3>
    """
    return ~ByName(_checked_names(names, "save_anything_except_these_names"))


def save_names_matching(pattern: str | re.Pattern[str]) -> Policy:
    r"""Save the values that have a name which a regular expression matches in full.

    Args:
        pattern: the regular expression, or a pattern that `re.compile` returned.

    Returns:
        The policy.

    Raises:
        TypeError: `pattern` is neither a string nor a pattern of strings.
        ValueError: `pattern` is not a regular expression.

    Example:
        >>> import torch
        >>> policy = save_names_matching(r"block\d+/(q|k)")
        >>> policy(Op(torch.ops.aten.sin.default, names=frozenset({"block3/q"})))
        <Decision.SAVE: 3>
        >>> policy(Op(torch.ops.aten.sin.default, names=frozenset({"block3/qkv"})))
        <Decision.RECOMPUTE: 0>
    """
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not isinstance(text, str):
        raise TypeError(
            "remat: save_names_matching takes a regular expression; "
            f"got {pattern!r}, a {type(pattern).__name__}"
        )
    try:
        return NamesMatching(re.compile(pattern))
    except re.error as error:
        raise ValueError(
            f"remat: save_names_matching: {text!r} is not a regular expression: {error}"
        ) from None


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Iterable[str],
    names_which_can_be_offloaded: Iterable[str],
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> Policy:
    """Save the values with some names, offload those with others, recompute the rest.

    A value that has a name of each kind is saved.

    Args:
        names_which_can_be_saved: names of the values to save where they are.
        names_which_can_be_offloaded: names of the values to offload. A name must not
            be in both lists.
        offload_src: must be "device".
        offload_dst: "pinned_host" or "disk". JAX does not have "disk".

    Returns:
        The policy.

    Raises:
        TypeError: a name is not a string, or a string is passed instead of a list.
        ValueError: a name is in both, or `offload_src` or `offload_dst` is unknown.

    Source: `jax.checkpoint_policies.save_and_offload_only_these_names`.

    Example:
        >>> save_and_offload_only_these_names(
        ...     names_which_can_be_saved=["q"], names_which_can_be_offloaded=["mlp"]
        ... )  # doctest: +NORMALIZE_WHITESPACE
        (save_only_these_names('q') |
         save_only_these_names('mlp').but_offload(to='pinned_host'))
    """
    taker = "save_and_offload_only_these_names"
    check_offload(offload_dst, taker, offload_src)
    saved = _checked_names(names_which_can_be_saved, taker)
    offloaded = _checked_names(names_which_can_be_offloaded, taker)
    if both := saved & offloaded:
        raise ValueError(
            f"remat: {taker}: {_listed(both)} can be saved and can be offloaded; "
            "put each name in one of the two lists"
        )
    away = ByName(offloaded).but_offload(to=offload_dst)
    return ByName(saved) | away


def _checked_names(names: Iterable[str], taker: str) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"remat: {taker} takes a list of names; got {names!r}")
    names = tuple(names)
    for name in names:
        if not isinstance(name, str):
            unpack = isinstance(name, Iterable)
            raise TypeError(
                f"remat: {taker}: a name is a string; got {name!r}, a "
                f"{type(name).__name__}" + (": unpack it, with *" if unpack else "")
            )
    return frozenset(names)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
