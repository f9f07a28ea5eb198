"""The policy of contexts that `create_selective_checkpoint_contexts` made.

`_checkpoint` asks for it. The call then follows the policy as `remat(policy=...)` does:
it stores what the backward reads, works under every transform, and may be
differentiated again.

Invariant: a policy function of torch's is called as torch calls it, whatever its
signature. Rejected: to run the function under the contexts. They store all that the
policy saves, read or not, and give it back once.
"""

from remat._torch import selective_policy
from remat.policies import Policy, as_policy
from remat.policies._functions import Selective, checked_hash
from remat.policies._policy import Function


def policy_of(context: object) -> Policy | None:
    """Return the policy of the context for the forward, or None for another context.

    Raises:
        TypeError: the policy is a function that cannot be hashed.
    """
    policy = selective_policy(context)
    if policy is None:
        if hasattr(context, "respect_saved_tensors_hooks"):
            # A subclass, which runs as it is. The hooks around it are those of the
            # call, which count what the graph saves.
            vars(context)["respect_saved_tensors_hooks"] = False
        return None
    if isinstance(policy, list):
        return as_policy(policy)
    return Function(Selective(checked_hash(policy)))
