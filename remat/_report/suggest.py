"""The policy to write: few bytes that spare half of what a recompute repeats.

Invariant: what is told is planned as a call would plan it, so its numbers are those of
`explain` under that policy. Rejected: the best set of results. `policies.within` solves
for it; a name or an operator is what people write, read and keep.
"""

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from remat import policies
from remat.policies import Policy


ENOUGH = 0.5  # of the FLOPs that run again without it


@dataclass(frozen=True, slots=True)
class SuggestedPolicy:
    """A policy to write.

    Attributes:
        code: an expression of `torch` and of `policies`, the module of remat.
        saved_bytes, recomputed_share: what `explain` tells of the call under it.
    """

    code: str
    saved_bytes: int
    recomputed_share: float

    def __str__(self) -> str:
        share = f"{self.recomputed_share:.0%} of FLOPs again"
        return f"policy={self.code}: {self.saved_bytes:,} bytes saved, {share}"


def operators_to_save(costs: Iterable[tuple[Any, int, int]]) -> list[Any]:
    """Return operators whose results spare enough, most FLOPs for a byte first.

    Of each operation `costs` has the operator, its bytes, and the FLOPs to run again.

    Example:
        >>> import torch
        >>> mm, bmm = torch.ops.aten.mm, torch.ops.aten.bmm
        >>> operators_to_save([(bmm, 8, 80), (mm, 8, 800), (mm, 8, 800)]) == [mm]
        True
    """
    sizes, work = Counter(), Counter()
    for operator, nbytes, flops in costs:
        sizes[operator] += nbytes
        work[operator] += flops
    left = (1 - ENOUGH) * work.total()
    found: list[Any] = []
    for operator in sorted(work, key=lambda each: -work[each] / max(1, sizes[each])):
        if left > 0:
            found.append(operator)
        left -= work[operator]
    return found


def code_of(policy: Policy) -> str:
    """Return a policy as code that runs; "" if it does not print as code.

    Example:
        >>> code_of(policies.dots_saveable | policies.save_only_these_names("a"))
        "policies.dots_saveable | policies.save_only_these_names('a')"
    """
    try:
        tree = ast.parse(repr(policy), mode="eval")
    except SyntaxError:  # of a function, say
        return ""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    known = {*dir(policies), "torch"}
    return ast.unparse(_Qualified().visit(tree)) if names <= known else ""


class _Qualified(ast.NodeTransformer):
    """Puts `policies.` before the names of policies."""

    @override
    def visit_Name(self, node: ast.Name) -> ast.expr:
        module = ast.Name("policies", ast.Load())
        return node if node.id == "torch" else ast.Attribute(module, node.id, node.ctx)
