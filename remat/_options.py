"""What `remat` was asked for, and what the calls around ask for in addition.

Invariant: a call within others runs under the policies of all of them, as it did in its
forward: they are part of its program. Rejected: reading the surrounding policy in the
backward, where other calls surround it, or none.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from remat.policies import Policy


Rng = Literal["replay", "error"]
Prune = Literal["auto"] | bool


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one `remat`."""

    policy: Policy | None = None
    prune: Prune = "auto"
    rng: Rng = "replay"


DEFAULT = Options(prune=False)


class _Around(threading.local):
    """The policy of the calls that this thread is in."""

    policy: Policy | None = None


_AROUND = _Around()


def joined(policy: Policy | None) -> Policy | None:
    """Return a policy joined with that of the calls around."""
    outer = _AROUND.policy
    if outer is None or policy is None:
        return policy or outer
    return policy | outer


@contextmanager
def within(policy: Policy | None) -> Iterator[None]:
    """Run the body as part of a call with a policy, in which others are already."""
    before, _AROUND.policy = _AROUND.policy, policy
    try:
        yield
    finally:
        _AROUND.policy = before
