"""The numbers of the tensors of a call: where each is among its inputs.

In comes what the call was given, with the tensors of that, and its roots. Out come
numbers for the tensors that the roots reach.

Invariant: parameters come last, and nothing is noted of each by itself.
Rejected: an entry for each tensor. A model has thousands of parameters.
"""

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, not_

from torch import Tensor, nn

from remat._reach.arguments import CallArguments
from remat._reach.roots import Root


_PARAMETERS = frozenset({nn.Parameter})
_requires_grad = attrgetter("requires_grad")


def number_all(
    passed: CallArguments,
    roots: Sequence[Root],
    each: Sequence[list[Tensor]],
    buffers: dict[int, bool],
) -> list[Tensor]:
    """Give each tensor that the roots reach a number; return the parameters.

    Parameters get the last numbers, a block for each root (`root.first`). Others are
    added to `passed`, and what may be updated in place to `buffers`. If a parameter is
    found twice there are no blocks, and all are added to `passed`.
    """
    parameters = _parameters(passed, roots, each)
    count = len(passed.tensors)
    for root, tensors in zip(roots, each, strict=True):
        before = root.before
        if parameters and len(before.others) < len(tensors):
            tensors = [*map(tensors.__getitem__, before.others)]
        if not tensors:
            continue
        root.entries, is_module = passed.numbers_of(tensors), root.layout.is_module
        frozen = compress(root.entries, map(not_, map(_requires_grad, tensors)))
        if is_module or type(root.entries) is range:  # then none was passed
            buffers.update(dict.fromkeys(frozen, is_module))
        else:
            for i in frozen:
                if i >= count:
                    buffers.setdefault(i, False)
    if parameters:
        first = len(passed.tensors)
        for root in roots:
            root.first, first = first, first + len(root.before.refs)
    return parameters


def _parameters(
    passed: CallArguments, roots: Sequence[Root], each: Sequence[list[Tensor]]
) -> list[Tensor]:
    """Return the parameters that the roots reach, or none if one is found twice."""
    found = [root.before.parameters for root in roots]
    if len(found) == 1:
        are_apart = passed.index.keys().isdisjoint(found[0])
    else:
        known = {*passed.index}.union(*found)
        are_apart = len(known) == len(passed.index) + sum(map(len, found))
    parameters: list[Tensor] = []
    if are_apart:
        for root, tensors in zip(roots, each, strict=True):
            parameters += root.before.parameters_in(tensors)
    # Another tensor may have the identity of one that is gone.
    return parameters if _PARAMETERS.issuperset(map(type, parameters)) else []
