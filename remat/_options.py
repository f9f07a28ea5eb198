"""What `remat` was asked for, and what the calls around ask for in addition.

Invariant: a call within others runs under the policies of all of them, as it did in its
forward: they are part of its program. Rejected: reading the surrounding policy in the
backward, where other calls surround it, or none.
"""

import threading
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


class within:  # noqa: N801
    """A context that is part of a call with a policy, followed by a mode or not."""

    __slots__ = ("_before", "_followed", "_policy")

    def __init__(self, policy: Policy | None, *, followed: bool) -> None:
        self._policy, self._followed = policy, followed

    def __enter__(self) -> None:
        around = _AROUND
        self._before, around.policy = around.policy, self._policy
        around.followed += self._followed

    def __exit__(self, *_: object) -> None:
        _AROUND.policy = self._before
        _AROUND.followed -= self._followed


def is_followed() -> bool:
    """Say whether a mode of ours follows what this thread does."""
    return _AROUND.followed > 0
