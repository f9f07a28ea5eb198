"""What the tests of pruning share: one comparison, of three ways to run a function.

The function is run as it is, with `remat(prune=False)` and with `remat(prune=True)`,
several times each: results and gradients have to be the same bit for bit, and the
random streams have to stand where they would. The operations that run, forward and
backward, tell whether pruning was right (fewer than a full recomputation needs) or off
(as many).
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support.zoo import leaves_of, make, scalar
from torch import Tensor
from torch.utils._pytree import tree_leaves

from remat import policies, remat
from remat._partial.cache import CACHES, CallCache
from remat.testing import assert_same, count_ops


W, X, Y = make(4, 4, seed=11), make(4, 4, seed=12), make(4, 4, seed=13)

# Policies by name: what keeps nothing, something, all.
POLICIES = {
    "nothing": None,
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
}


def dead_end(h: Tensor) -> Tensor:
    """A sine, whose backward does not read what is made of it here, and a live tanh.

    The tanh comes last: where a recompute stops early, it does not stop before it.
    """
    dead = h.sin() * 2 + 1
    return dead + h.tanh()


def of_backward(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """The result and the gradients of all floating-point arguments."""
    args = tuple(_leaf(a) for a in args)
    result = fn(*args)
    loss = scalar(result)
    # What happens between forward and backward is not to be seen in it.
    torch.rand(3), random.random(), np.random.rand()
    wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return [result, *torch.autograd.grad(loss, wanted, allow_unused=True)]


def of_func_grad(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """The gradients by `torch.func.grad`, whose graph is of another level."""
    which = tuple(i for i, a in enumerate(args) if _is_differentiable(a))
    return [torch.func.grad(lambda *a: scalar(fn(*a)), argnums=which)(*args)]


TRANSFORMS = {"backward": of_backward, "func.grad": of_func_grad}


def _is_differentiable(arg: Any) -> bool:
    return isinstance(arg, Tensor) and (arg.is_floating_point() or arg.is_complex())


def _leaf(arg: Any) -> Any:
    return leaves_of(arg)[0] if _is_differentiable(arg) else arg


def run_seeded(
    transform: Callable[..., list[Any]], fn: Callable[..., Any], args: Any, seed: int
) -> tuple[list[Any], tuple[Any, ...], Counter[str]]:
    """What `transform` gives, where the streams stand then, and what ran."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    with count_ops() as ops:
        got = transform(fn, args)
    return got, (torch.rand(2), random.random(), np.random.rand()), ops


def total(ops: Counter[str]) -> int:
    """How many operations did work: not aliases, nor memory without values."""
    free = "detach", "alias", "empty", "empty_strided", "empty_like"
    return sum(n for name, n in ops.items() if name not in free)


def assert_exact(
    fn: Callable[..., Any],
    *args: Any,
    pruned: bool | None,
    policy: Any = None,
    transform: Callable[..., list[Any]] = of_backward,
    before: Callable[[int], object] = lambda call: None,
    calls: int = 5,
    wrap: Callable[..., Any] = remat,
) -> CallCache | None:
    """`remat(fn, prune=True)` is `fn`, bit for bit, on every call.

    Args:
        fn: the function.
        *args: what it is called with.
        pruned: whether fewer operations run in the last call than in a full
            recomputation; None for as many or fewer.
        policy: what may be kept.
        transform: gives values and gradients of it.
        before: is called before each run, with the number of the call.
        calls: how often, with different seeds.
        wrap: the transform under test.

    Returns:
        The trace last used, if there is one.
    """
    full, ours = remat(fn, prune=False), wrap(fn, policy=policy, prune=True)
    for call in range(calls):
        before(call)
        want, streams, _ = run_seeded(transform, fn, args, call)
        before(call)
        recomputed, _, all_ops = run_seeded(transform, full, args, call)
        before(call)
        got, ours_stand, ops = run_seeded(transform, ours, args, call)
        assert_same(recomputed, want)
        assert_same(got, want)
        assert_same(ours_stand, streams)
    assert_not_zero(want)
    if pruned:
        assert total(ops) < total(all_ops), f"not pruned: {ops}"
    elif pruned is None:
        assert total(ops) <= total(all_ops), f"more than a full recomputation: {ops}"
    else:
        assert ops == all_ops, f"not off: {ops - all_ops} and {all_ops - ops}"
    return last_trace()


def assert_not_zero(tree: Any) -> None:
    """Where all gradients are zero, equality proves nothing."""
    tensors = [t.detach() for t in tree_leaves(tree) if isinstance(t, Tensor)]
    assert any(t.count_nonzero() for t in tensors)


def traces() -> list[CallCache]:
    """All traces, the one last used at the end."""
    return [*CACHES._caches.values()]


def last_trace() -> CallCache | None:
    """The trace last used, if there is one."""
    return traces()[-1] if len(CACHES) else None
