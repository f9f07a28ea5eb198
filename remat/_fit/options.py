"""What a block of a model may keep: the options among which `search` chooses.

Invariant: an option is a policy, so what a plan does is what `remat.nn.apply` does.
Rejected: options made of single operations. A policy prints, pickles, and fits a block
of another size.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from remat import policies
from remat.policies import Policy


@dataclass(frozen=True, slots=True)
class Option:
    """What is done with a block.

    Attributes:
        name: for the table.
        recomputes: whether `remat` is applied at all.
        policy: of `remat`; None to save no result.
        policies: those of blocks that have one of their own.
    """

    name: str
    recomputes: bool = True
    policy: Policy | None = None
    policies: Mapping[str, Policy] = field(default_factory=dict)

    def of(self, block: str) -> Policy | None:
        """Return the policy of a block."""
        return self.policies.get(block, self.policy)


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


# Of what a block saves beyond its input, if it saves everything.
_SHARES = (0.1, 0.25, 0.4, 0.6, 0.8)


def has_solver() -> bool:
    """Say whether scipy is installed, which policies with a budget need."""
    return importlib.util.find_spec("scipy") is not None


def budgets_for(sizes: Mapping[str, int]) -> list[Option]:
    """Return options that keep a share of what each block would save.

    Args:
        sizes: the bytes that recomputing each block frees.
    """
    if not has_solver():
        return []
    return [
        Option(
            f"within {share:.0%}",
            policies={
                block: policies.within(int(share * max(size, 0)))
                for block, size in sizes.items()
            },
        )
        for share in _SHARES
    ]


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
