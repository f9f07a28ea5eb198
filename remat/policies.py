"""Policies: which intermediates of a rematerialized function may be kept.

A policy is asked about each operation that the function runs, `policy(op) -> Decision`.
"Save" means *may be saved*: a result is kept only if the backward reads it. All are
plain values, so they compare, hash, pickle and print, and combine:

>>> dots_saveable | save_only_these_names("attention")
(dots_saveable | save_only_these_names('attention'))

The names are JAX's, and so is what they do, with these differences:

- `save_anything_except_these_names` does what it says. JAX's saves everything, since
  the operation that makes a value and the one that names it are two; here naming a
  value names the result of the operation that made it.
- `save_from_both_policies(p, q)` is `p | q`, and takes policies that offload.
- Names that are no strings, strings that are no policies, and places that do not exist
  are errors at once. In JAX such a policy is accepted, and keeps nothing.
- Convolution and every kernel of attention are dots, and so is any operator given to
  `register_dot`.

Dots "with no batch dims" are, as in JAX, those that sum once. `x @ w` with `w` a matrix
is one whatever the dimensions of `x`, and so is its einsum: torch runs them as the
product of two matrices. Under `vmap` over both operands a product of matrices becomes
one with a batch, and is recomputed: use `dots_saveable` or names there.

Invariant: nothing here holds a tensor or knows of a call.
Rejected: policies as closures, which neither compare nor print: no cache would know
that two are the same.
"""

import re
from collections.abc import Iterable

from remat._decision import Decision as Decision, place
from remat._dots import register_dot as register_dot
from remat._leaves import AnyNamesBut, Dots, NamesMatching, OnlyNames, Size, listed
from remat._op import Op as Op, Value as Value
from remat._policy import (
    Policy as Policy,
    as_policy as as_policy,
    everything_saveable as everything_saveable,
    nothing_saveable as nothing_saveable,
    save_ops as save_ops,
)


# --- Dots ---------------------------------------------------------------------------


dots_saveable = Dots(batched=True)
"""Keeps products of matrices and vectors, convolutions and attention."""
dots_with_no_batch_dims_saveable = Dots(batched=False)
"""Keeps products of matrices and vectors that are not done for each of a batch."""
checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


def offload_dot_with_no_batch_dims(
    offload_src: str = "device", offload_dst: str = "pinned_host"
) -> Policy:
    """Offload what `dots_with_no_batch_dims_saveable` keeps, and recompute the rest.

    Args:
        offload_src: "device".
        offload_dst: "pinned_host", or "disk" which JAX does not have.

    Returns:
        The policy.

    Raises:
        ValueError: there is no such place.

    Source: `jax.checkpoint_policies.offload_dot_with_no_batch_dims`.

    Example:
        >>> offload_dot_with_no_batch_dims("device", "disk")
        dots_with_no_batch_dims_saveable.but_offload(to='disk')
    """
    _check_places("offload_dot_with_no_batch_dims", offload_src, offload_dst)
    return dots_with_no_batch_dims_saveable.but_offload(to=offload_dst)


# --- Names --------------------------------------------------------------------------


def save_only_these_names(*names: str) -> Policy:
    """Keep the values that `checkpoint_name` calls by one of these names.

    Args:
        *names: the names; with none, nothing is kept.

    Returns:
        The policy.

    Raises:
        TypeError: a name is no string: a list that was not unpacked, say.

    Source: `jax.checkpoint_policies.save_only_these_names`.

    Example:
        >>> import torch
        >>> policy = save_only_these_names("q", "k")
        >>> policy(Op(torch.ops.aten.sin.default, names=frozenset({"k"})))
        <Decision.SAVE: 3>
        >>> policy(Op(torch.ops.aten.sin.default))
        <Decision.RECOMPUTE: 0>
    """
    return OnlyNames(_checked_names("save_only_these_names", names))


def save_any_names_but_these(*names: str) -> Policy:
    """Keep every value that has a name other than these; a value without one is not.

    Args:
        *names: the names. A value that has one of them and another is kept.

    Returns:
        The policy.

    Raises:
        TypeError: a name is no string.

    Source: `jax.checkpoint_policies.save_any_names_but_these`.

    Example:
        >>> import torch
        >>> policy = save_any_names_but_these("q")
        >>> policy(Op(torch.ops.aten.sin.default, names=frozenset({"k"})))
        <Decision.SAVE: 3>
        >>> policy(Op(torch.ops.aten.sin.default))
        <Decision.RECOMPUTE: 0>
    """
    return AnyNamesBut(_checked_names("save_any_names_but_these", names))


def save_anything_except_these_names(*names: str) -> Policy:
    """Keep every value, named or not, that has none of these names.

    Args:
        *names: the names.

    Returns:
        The policy, `~save_only_these_names(*names)`.

    Raises:
        TypeError: a name is no string.

    Source: `jax.checkpoint_policies.save_anything_except_these_names`, whose
    documentation this follows: it ignores its names.

    Example:
        >>> import torch
        >>> policy = save_anything_except_these_names("q")
        >>> policy(Op(torch.ops.aten.sin.default, names=frozenset({"q"})))
        <Decision.RECOMPUTE: 0>
        >>> policy(Op(torch.ops.aten.sin.default))
        <Decision.SAVE: 3>
    """
    return ~OnlyNames(_checked_names("save_anything_except_these_names", names))


def save_names_matching(pattern: str | re.Pattern[str]) -> Policy:
    r"""Keep the values that have a name which a regular expression matches as a whole.

    Args:
        pattern: the expression, or what `re.compile` made of it.

    Returns:
        The policy.

    Raises:
        TypeError: it is neither a string nor a pattern of strings.
        ValueError: it is not a regular expression.

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
    """Keep the values of some names, offload those of others, recompute the rest.

    A value that has a name of both kinds is saved.

    Args:
        names_which_can_be_saved: names of the values to keep where they are.
        names_which_can_be_offloaded: names of the values to offload, none of the above.
        offload_src: "device".
        offload_dst: "pinned_host", or "disk" which JAX does not have.

    Returns:
        The policy.

    Raises:
        TypeError: a name is no string, or the names are one string.
        ValueError: a name is in both, or there is no such place.

    Source: `jax.checkpoint_policies.save_and_offload_only_these_names`.

    Example:
        >>> save_and_offload_only_these_names(
        ...     names_which_can_be_saved=["q"], names_which_can_be_offloaded=["mlp"]
        ... )  # doctest: +NORMALIZE_WHITESPACE
        (save_only_these_names('q') |
         save_only_these_names('mlp').but_offload(to='pinned_host'))
    """
    taker = "save_and_offload_only_these_names"
    _check_places(taker, offload_src, offload_dst)
    saved = _checked_names(taker, names_which_can_be_saved)
    offloaded = _checked_names(taker, names_which_can_be_offloaded)
    if both := saved & offloaded:
        raise ValueError(
            f"remat: {taker}: {listed(both)} can be saved and can be offloaded; "
            "give each name to one of the two"
        )
    away = OnlyNames(offloaded).but_offload(to=offload_dst)
    return OnlyNames(saved) | away


# --- Sizes --------------------------------------------------------------------------


def save_larger_than(nbytes: float) -> Policy:
    """Keep the results of operations whose outputs have more than `nbytes` bytes.

    Args:
        nbytes: the bytes, of all outputs of one operation together.

    Returns:
        The policy.

    Raises:
        TypeError: it is not a number.
        ValueError: it is negative.

    Source: Keras' `RematScope(mode="larger_than")`, which counts elements.

    Example:
        >>> import torch
        >>> out = Value((256,), torch.float32, torch.device("cpu"))
        >>> save_larger_than(1000)(Op(torch.ops.aten.sin.default, outputs=(out,)))
        <Decision.SAVE: 3>
    """
    return Size(True, _checked_bytes("save_larger_than", nbytes))


def save_smaller_than(nbytes: float) -> Policy:
    """Keep the results of operations whose outputs have fewer than `nbytes` bytes.

    Args:
        nbytes: the bytes, of all outputs of one operation together.

    Returns:
        The policy.

    Raises:
        TypeError: it is not a number.
        ValueError: it is negative.

    Example:
        >>> dots_saveable & save_smaller_than(2**20)
        (dots_saveable & save_smaller_than(1048576))
    """
    return Size(False, _checked_bytes("save_smaller_than", nbytes))


# --- Combinations -------------------------------------------------------------------


def save_from_both_policies(policy_1: object, policy_2: object) -> Policy:
    """Keep what either policy keeps, as near as the nearer one says: `p | q`.

    Args:
        policy_1: a policy, or what `as_policy` takes.
        policy_2: another.

    Returns:
        The policy.

    Raises:
        TypeError: one of them is no policy.

    Source: `jax.checkpoint_policies.save_from_both_policies`, which refuses policies
    that offload.

    Example:
        >>> save_from_both_policies(dots_saveable, save_only_these_names("a"))
        (dots_saveable | save_only_these_names('a'))
    """
    return as_policy(policy_1) | policy_2


# --- Checks of arguments ------------------------------------------------------------


def _checked_names(taker: str, names: Iterable[str]) -> frozenset[str]:
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


def _check_places(taker: str, src: object, dst: object) -> None:
    if src != "device":
        raise ValueError(f"remat: {taker} offloads from 'device'; got {src!r}")
    place(dst, taker)


def _checked_bytes(taker: str, nbytes: object) -> float:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int | float):
        raise TypeError(
            f"remat: {taker} takes a number of bytes; got {nbytes!r}, a "
            f"{type(nbytes).__name__}"
        )
    if not nbytes >= 0:
        raise ValueError(f"remat: {taker} takes a number of bytes; got {nbytes!r}")
    return nbytes
