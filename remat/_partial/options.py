"""What `remat` was asked for, and what the calls around ask for in addition.

Invariant: a call within others runs under the policies of all of them, as it did in its
forward: they are part of its program. Rejected: reading the surrounding policy in the
backward, where other calls surround it, or none.
"""

from dataclasses import dataclass
from typing import Any, Literal

from remat._base.context import here
from remat.policies import Policy


Rng = Literal["replay", "error"]
Prune = Literal["auto"] | bool


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one `remat`."""

    policy: Policy | None = None
    prune: Prune = "auto"
    rng: Rng = "replay"
    higher_order: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others in a signature, without holding a policy."""
        return reference(self.policy), self.prune, self.rng, self.higher_order

    def joined(self) -> Policy | None:
        """Return the policy, joined with that of the calls around."""
        policy, outer = self.policy, here().policy
        if outer is None or policy is None:
            return policy or outer
        return policy | outer


def reference(policy: Policy | None) -> Any:
    """Return what tells a policy from others, without holding functions in it."""
    return None if policy is None else policy.cache_key


DEFAULT = Options(prune=False)
