"""What tells a policy in every process, for caches of compiled code on disk.

`_transform/traced.py` makes it part of the key of a node in Dynamo's graph.

Invariant: policies of equal identity decide alike. A policy that asks a user's
function, or is of a user's class, has none: nobody can tell what its code reads.
Rejected: `repr` and pickles. The first may be a user's own, and the second hold the
order of sets, which differs between processes.
"""

import re
from typing import Any

from remat.policies._decision import Decision


def identity_of(policy: Any) -> str | None:
    """Return a text that tells a policy, or a part of one; None if there is none."""
    if policy is None or type(policy) in (bool, int, float, str):
        return repr(policy)
    if isinstance(policy, Decision):
        return str(policy)
    if isinstance(policy, re.Pattern):
        return f"{policy.pattern!r} {policy.flags}"
    if isinstance(policy, frozenset):
        return _joined("set", sorted(map(repr, policy)))
    kind = type(policy)
    fields = getattr(kind, "__dataclass_fields__", None)
    if fields is None or not kind.__module__.startswith(_OURS):
        return None
    parts = [identity_of(getattr(policy, name)) for name in fields]
    known = [part for part in parts if part is not None]
    return _joined(kind.__qualname__, known) if len(known) == len(parts) else None


_OURS = f"{__name__.rpartition('.')[0]}."


def _joined(name: str, parts: list[str]) -> str:
    return f"{name}({', '.join(parts)})"
