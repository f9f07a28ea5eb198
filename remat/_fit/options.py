"""What a block of a model may keep: the options among which `search` chooses.

Invariant: an option is a policy, so what a plan does is what `remat.nn.apply` does.
Rejected: options made of single operations. A policy prints, pickles, and fits a block
of another size.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from remat import policies
from remat.policies import Policy


@dataclass(frozen=True, slots=True)
class Option:
    """What is done with a block.

    Attributes:
        name: for the table.
        recomputes: whether `remat` is applied at all.
        policy: of `remat`; None to save no result.
    """

    name: str
    recomputes: bool = True
    policy: Policy | None = None


PLAIN = Option("plain", recomputes=False)
NOTHING = Option("nothing_saveable")
UNIFORM = (
    NOTHING,
    Option("dots_saveable", policy=policies.dots_saveable),
    Option(
        "dots_with_no_batch_dims_saveable",
        policy=policies.dots_with_no_batch_dims_saveable,
    ),
    Option("everything_saveable", policy=policies.everything_saveable),
)


def options_for(names: Iterable[str]) -> dict[str, Option]:
    """Return the options that every block has, by name.

    Args:
        names: given to values in the step by `checkpoint_name`.
    """
    found = [PLAIN, *UNIFORM]
    named = sorted(names)
    if named:
        policy = policies.save_only_these_names(*named)
        found.append(Option(repr(policy), policy=policy))
    return {option.name: option for option in found}
