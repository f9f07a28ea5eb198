"""What `remat` was asked for, and what the calls around ask for in addition.

Invariant: a call within others runs under the policies of all of them, as it did in its
forward: they are part of its program. Rejected: reading the surrounding policy in the
backward, where other calls surround it, or none.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others in a signature, without holding a policy."""
        return reference(self.policy), self.prune, self.rng

    def joined(self) -> Policy | None:
        """Return the policy, joined with that of the calls around."""
        policy, outer = self.policy, _AROUND.policy
        if outer is None or policy is None:
            return policy or outer
        return policy | outer


def reference(policy: Policy | None) -> Any:
    """Return what tells a policy from others, without holding functions in it."""
    return None if policy is None else policy.cache_key


DEFAULT = Options(prune=False)


class _Around(threading.local):
    """The calls that this thread is in: their policy, and how many are followed."""

    policy: Policy | None = None
    followed: int = 0


_AROUND = _Around()


@contextmanager
def within(policy: Policy | None, *, followed: bool) -> Iterator[None]:
    """Run the body as part of a call with a policy, followed by a mode or not."""
    before, _AROUND.policy = _AROUND.policy, policy
    _AROUND.followed += followed
    try:
        yield
    finally:
        _AROUND.policy = before
        _AROUND.followed -= followed


def is_followed() -> bool:
    """Say whether a mode of ours follows what this thread does."""
    return _AROUND.followed > 0
