"""What the user asked `remat` for, joined with what the calls around ask for.

Invariant: a nested call runs under the policies of all calls around it, in its forward
and in a recompute: they are part of its program. Rejected: reading the policies around
in the backward. Other calls are around it there, or none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from remat._base.context import here
from remat.policies import Policy


Rng = Literal["replay", "error"]
Prune = Literal["auto"] | bool
OffloadInputs = Literal["disk"] | bool


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one `remat`, by their public names, and of `remat.compat`."""

    policy: Policy | None = None
    prune: Prune = "auto"
    rng: Rng = "replay"
    higher_order: bool = False
    offload_inputs: OffloadInputs = False
    stops_early: bool = True  # a recompute ends with the last value that is read
    compares: bool = True  # what a recompute saves must be like what the forward saved
    # Whether hooks for saved tensors around the call are given what its policy saves.
    hooks_residuals: bool = True
    # Whether the function is called as it is where a plan for a whole step is followed.
    unless_followed: bool = False
    describe: Callable[[], str] | None = None  # what to add to an error of a recompute

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells these options from others in a signature."""
        return reference(self.policy), self.prune, self.rng, self.higher_order

    def joined(self) -> Policy | None:
        """Return the policy, joined with that of the calls around this one."""
        policy, context = self.policy, here()
        outer = context.policy
        if outer is None:
            return policy
        if outer.asks_modules and context.calls is not None:
            outer = outer.below(*context.calls.where)
        return outer if policy is None else policy | outer


def reference(policy: Policy | None) -> Any:
    """Return what tells a policy from others, without holding its functions."""
    return None if policy is None else policy.cache_key


DEFAULT = Options(prune=False)
