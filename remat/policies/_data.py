"""Policies as data, for compiled code: a text that tells one, and its parts.

The text is part of the key of a node in Dynamo's graph, for caches on disk. A policy
that the trace itself makes has no attributes yet, so its class and fields are passed.

Invariant: policies of equal identity decide alike. One with a user's function or class
has none: nobody can tell what its code reads. `whole(*policy_parts(p))` equals p.
Rejected: pickles, which hold the order of sets.
"""

import types
from typing import Any

from remat._torch.tracing import constant_in_traces
from remat.policies._functions import Decision, asked
from remat.policies._policy import Function, Policy


def identity_of(policy: Policy | None) -> str | None:
    """Return a text that tells a policy from others; None if there is none."""
    return repr(policy) if policy is None or _is_ours(policy) else None


def _is_ours(policy: Policy) -> bool:
    is_known = type(policy).__module__.startswith(_OURS) and policy.is_data
    return is_known and all(map(_is_ours, policy._parts()))


_OURS = f"{__name__.rpartition('.')[0]}."


def policy_parts(policy: Any) -> tuple[Any, Any]:
    """Return the parts of a policy, and the policy itself where it has none."""
    # Dynamo traces this. Of others it may take a number for one that changes.
    if _is_made_here(policy) and _has_parts(policy):
        return _part(policy), None
    return None, policy


@constant_in_traces
def _is_made_here(policy: Any) -> bool:
    """Say whether the trace has made a policy: then it has no attributes yet."""
    fields = getattr(type(policy), "__dataclass_fields__", ())
    return bool(fields) and not vars(policy)


def offloads_to_disk(policy: Any) -> bool:
    """Say whether a policy offloads to disk, as far as its fields tell."""
    if policy == "disk" or policy is Decision.OFFLOAD_TO_DISK:
        return True
    fields = getattr(type(policy), "__dataclass_fields__", ())
    return any(offloads_to_disk(getattr(policy, name)) for name in fields)


def _has_parts(value: Any) -> bool:
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is None:
        return value is None or isinstance(value, _CONSTANTS)
    # Dynamo traces no generators here.
    return False not in [_has_parts(getattr(value, name)) for name in fields]


_CONSTANTS = bool, int, float, str, frozenset, Decision, types.FunctionType


def _part(value: Any) -> Any:
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is None:
        return value
    return type(value), tuple([_part(getattr(value, name)) for name in fields])


def whole(parts: Any, policy: Any) -> Policy | None:
    """Return the policy that parts are of, or that has none."""
    return policy if parts is None else _whole(parts)


def _whole(part: Any) -> Any:
    if not isinstance(part, tuple):
        return part
    kind, fields = part
    fields = [*map(_whole, fields)]
    if kind is Function and isinstance(fields[0], types.FunctionType):
        fields = [asked(fields[0])]  # nobody could ask for its signature in the trace
    return kind(*fields)
