"""What the tests of pruning share: tables of cases, and one runner.

The runner calls a function as it is, with `remat(prune=False)` and with
`remat(prune=True)`, several times: results and gradients have to be the same bit
for bit, and the random streams have to stand where they would. The operations that run,
forward and backward, tell whether pruning was right (fewer than a full recompute
needs) or off (as many).
"""

import ast
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

import numpy as np
import pytest
import torch
from support.zoo import leaves_of, make, scalar
from torch import Tensor
from torch.utils._pytree import tree_leaves

from remat import policies, remat
from remat._partial.decide import CACHES, CallCache
from remat.testing import assert_same, count_ops


W, X = make(4, 4, seed=11), make(4, 4, seed=12)

# What keeps nothing, something, all.
POLICIES = {
    "nothing": None,
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
nothing_or_everything = pytest.mark.parametrize(
    "policy", [None, policies.everything_saveable], ids=["nothing", "everything"]
)

# Functions that change in each call are given up, which is said.
given_up = pytest.mark.filterwarnings("ignore:.* is not followed any more")


def dead_end(h: Tensor) -> Tensor:
    """A sine, whose backward does not read what is made of it here, and a live tanh.

    The tanh comes last: where a recompute stops early, it does not stop before it.
    """
    dead = h.sin() * 2 + 1
    return dead + h.tanh()


# --- Ways to differentiate, with the results beside the gradients ---


Way = Callable[[Callable[..., Any], tuple[Any, ...]], list[Any]]


def of_backward(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """The result and the gradients of all floating-point arguments."""
    args = tuple(leaves_of(a)[0] if _is_differentiable(a) else a for a in args)
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


def _is_differentiable(arg: Any) -> bool:
    return isinstance(arg, Tensor) and (arg.is_floating_point() or arg.is_complex())


WAYS = {"backward": of_backward, "func.grad": of_func_grad}
# Each policy in one way, and what keeps nothing in both. The others are slow.
_ALONE = {("nothing", "backward"), ("nothing", "func.grad")}
_ALONE |= {("dots", "func.grad"), ("everything", "backward")}
each_policy_and_way = pytest.mark.parametrize(
    ("policy", "way"),
    [
        pytest.param(
            POLICIES[policy],
            WAYS[way],
            id=f"{policy}-{way}",
            marks=() if (policy, way) in _ALONE else pytest.mark.slow,
        )
        for policy in POLICIES
        for way in WAYS
    ],
)


# --- The runner ---


def run_seeded(
    way: Way, fn: Callable[..., Any], args: Any, seed: int
) -> tuple[list[Any], tuple[Any, ...], Counter[str]]:
    """What `way` gives, where the streams stand then, and what ran."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    with count_ops() as ops:
        got = way(fn, args)
    return got, (torch.rand(2), random.random(), np.random.rand()), ops


def total(ops: Counter[str]) -> int:
    """How many operations did work: not aliases, nor memory without values."""
    free = "detach", "alias", "empty", "empty_strided", "empty_like"
    return sum(n for name, n in ops.items() if name not in free)


def work(fn: Callable[..., Any], *args: Any) -> int:
    """How many operations run in a forward and its backward."""
    with count_ops() as ops:
        of_backward(fn, args)
    return total(ops)


def assert_exact(
    fn: Callable[..., Any],
    *args: Any,
    pruned: bool | None = None,
    policy: Any = None,
    way: Way = of_backward,
    before: Callable[[int], object] = lambda call: None,
    calls: int = 3,
    wrap: Callable[..., Any] = remat,
) -> None:
    """`remat(fn, prune=True)` is `fn`, bit for bit, on every call.

    The first call is recorded, the second follows the record, and from the third on
    inputs may be dropped.

    Args:
        fn: the function.
        *args: what it is called with.
        pruned: whether fewer operations run in the last call than in a full
            recompute; None for as many or fewer.
        policy: what may be kept.
        way: how it is differentiated.
        before: is called before each run, with the number of the call.
        calls: how often, with different seeds.
        wrap: the transform under test.
    """
    full, ours = remat(fn, prune=False), wrap(fn, policy=policy, prune=True)
    for call in range(calls):
        before(call)
        want, streams, _ = run_seeded(way, fn, args, call)
        before(call)
        got, ours_stand, ops = run_seeded(way, ours, args, call)
        assert_same(got, want)
        assert_same(ours_stand, streams)
    before(calls - 1)
    recomputed, _, all_ops = run_seeded(way, full, args, calls - 1)
    assert_same(recomputed, want)
    assert_not_zero(want)
    if pruned:
        assert total(ops) < total(all_ops), f"not pruned: {ops}"
    elif pruned is None:
        assert total(ops) <= total(all_ops), f"more than a full recompute: {ops}"
    else:
        assert ops == all_ops, f"not off: {ops - all_ops} and {all_ops - ops}"


def assert_not_zero(tree: Any) -> None:
    """Where all gradients are zero, equality proves nothing."""
    tensors = [t.detach() for t in tree_leaves(tree) if isinstance(t, Tensor)]
    assert any(t.count_nonzero() for t in tensors), "all is zero"


def assert_like_plain(
    ours: Callable[..., Any], fn: Callable[..., Any], *args: Any
) -> None:
    """The result and the gradients of `ours` are those of `fn`."""
    assert_same(of_backward(ours, args), of_backward(fn, args))


# --- Tables of cases ---


@dataclass(frozen=True)
class Case:
    """A function of one or two matrices, and how the runner is to call it."""

    fn: Callable[..., Any]
    options: dict[str, Any]

    def check(self, policy: Any = None, way: Way = of_backward) -> None:
        """Run it."""
        args = (X, W)[: self.fn.__code__.co_argcount]
        assert_exact(self.fn, *args, policy=policy, way=way, **self.options)


def written(text: str, scope: dict[str, Any], **options: Any) -> dict[str, Case]:
    """A table of functions that are text: a line is a name, a colon and a body.

    A body may go on in indented lines, and its last expression is what is returned. A
    function has the arguments `x` and `w` if it says `w`, else `x` alone. A line that
    begins with `#` is a comment.

    Args:
        text: the table.
        scope: the globals of the functions.
        **options: of the runner; and `arguments`, the names of more of them.
    """
    functions, more = {}, options.pop("arguments", ())
    for row in re.split(r"\n(?=\S)", text.strip()):
        if row.startswith("#"):
            continue
        name, _, body = row.partition(":")
        tree = ast.parse(f"def fn():\n    {body.strip()}")
        fn = tree.body[0]
        args = ("x", "w") if re.search(r"\bw\b", body) else ("x",)
        fn.args.args = [ast.arg(arg) for arg in (*args, *more)]
        fn.body[-1] = ast.Return(fn.body[-1].value)
        found: dict[str, Any] = {}
        code = compile(ast.fix_missing_locations(tree), f"<{name}>", "exec")
        exec(code, scope, found)
        assert name not in functions, f"two functions are named {name}"
        functions[name] = found["fn"]
    return cases_of(functions, **options)


def cases_of(functions: Mapping[str, Any], **options: Any) -> dict[str, Case]:
    """A table of functions that were made, with the options of the runner."""
    return {name: Case(fn, options) for name, fn in functions.items() if isfunction(fn)}


def each_case(*tables: dict[str, Case]) -> pytest.MarkDecorator:
    """Parametrizes a test over all the cases of some tables."""
    cases = {name: case for table in tables for name, case in table.items()}
    assert len(cases) == sum(map(len, tables)), "two cases have one name"
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


# --- What calls share ---


def call_caches() -> list[CallCache]:
    """What the calls so far share, by signature, the one last used at the end."""
    return [*CACHES._caches.values()]


def last_call_cache() -> CallCache:
    """What is shared by the calls of the signature last used."""
    return call_caches()[-1]


def nothing_is_recorded() -> bool:
    """Whether no call has plans."""
    return not any(cache.plans for cache in call_caches())


def strikes() -> list[int]:
    """How many records of each signature did not fit."""
    return [cache.misfits for cache in call_caches()]


def forget_calls(which: slice | None = None) -> None:
    """Make the next call of a signature a first one; of some, the oldest first."""
    if which is None:
        CACHES.clear()
        return
    for key in [*CACHES._caches][which]:
        del CACHES._caches[key]
