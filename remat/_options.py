"""What `remat` was asked for, and what the calls around ask for in addition.

Invariant: a call within others runs under the policies of all of them, as it did in its
forward: they are part of its program. Rejected: reading the surrounding policy in the
backward, where other calls surround it, or none.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from remat.policies import Policy


Rng = Literal["replay", "error"]
Prune = Literal["auto"] | bool


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one `remat`."""

    policy: Policy | None = None
    prune: Prune = "auto"
    rng: Rng = "replay"
    _joined: dict[Any, Policy] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others in a signature, without holding a policy."""
        return reference(self.policy), self.prune, self.rng

    def joined(self) -> Policy | None:
        """Return the policy, joined with that of the calls around."""
        policy, outer = self.policy, _AROUND.policy
        if outer is None or policy is None:
            return policy or outer
        key = weakref.ref(outer)
        found = self._joined.get(key)
        if found is None:
            # The same each time: what is known of a call is known by its policy.
            found = self._joined[key] = policy | outer
        return found


def reference(policy: Policy | None) -> Any:
    """Return what equals for equal policies, and lets the functions in them go."""
    return None if policy is None else weakref.ref(policy)


DEFAULT = Options(prune=False)


class _Around(threading.local):
    """The policy of the calls that this thread is in."""

    policy: Policy | None = None


_AROUND = _Around()


@contextmanager
def within(policy: Policy | None) -> Iterator[None]:
    """Run the body as part of a call with a policy, in which others are already."""
    before, _AROUND.policy = _AROUND.policy, policy
    try:
        yield
    finally:
        _AROUND.policy = before
