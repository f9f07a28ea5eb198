"""`scan`, `fori_loop` and `while_loop`: loops whose gradients need few carries.

Users call them. Each says what a step is, and `_call` runs the chain.

Invariant: without gradients a loop is the plain loop, and it stores nothing.
Rejected: numbers as carries that turn into tensors, as in JAX. Eager code can count.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from remat._base import pytree
from remat._base.errors import note
from remat._torch import must_inline
from remat._transform.api import PolicyLike
from remat.chain import _call
from remat.chain._actions import Schedule
from remat.chain._budget import budget_of
from remat.chain._call import Strategy
from remat.chain._forward import Progress
from remat.chain._schedules import Binomial, EveryStep, Online, Sqrt
from remat.chain._steps import Steps


C = TypeVar("C")
Checkpoints: TypeAlias = int | Literal["all"] | Schedule | None


def scan(
    f: Callable[[C, Any], tuple[C, Any]],
    init: C,
    xs: Any = None,
    length: int | None = None,
    *,
    reverse: bool = False,
    unroll: int = 1,
    checkpoints: Checkpoints = None,
    budget: int | str | None = None,
    disk: bool = False,
    policy: PolicyLike = None,
    progress: Progress = None,
) -> tuple[C, Any]:
    """Run `f` on the slices of `xs` in turn, and carry a value from step to step.

    The values are those of this loop::

        carry, ys = init, []
        for x in xs:
            carry, y = f(carry, x)
            ys.append(y)
        return carry, torch.stack(ys)

    The forward stores only some carries. The backward runs the steps again from these,
    and reverses them one after the other. Gradients reach `init`, `xs` and the tensors
    that `f` refers to, under every transform of `torch.func` too. docs/chains.md says
    which checkpoints to choose.

    Args:
        f: a step: takes a carry and a slice, and returns the next carry and what is
            collected. It may not change tensors in place, nor keep them. It may count,
            and append numbers to a list. Random numbers of global streams are drawn
            again; fold a key with the number of the step: `random.fold_in(key, i)`.
        init: the initial carry, a pytree. Each carry keeps its structure, and the
            shapes, dtypes and devices of its tensors. It may hold Python numbers.
        xs: a pytree of tensors whose first dimension counts the steps. `None`: `f` is
            given `None`.
        length: the number of steps; needed if `xs` holds no tensor.
        reverse: whether the last slice comes first. What is collected is in the order
            of `xs`.
        unroll: how many steps the backward reverses together, of which it holds all
            residuals at once. Not with a schedule. Without checkpoints the carries
            between such steps are stored, as by `"all"`.
        checkpoints: how many carries are stored at a time, with the initial one: the
            backward then runs the fewest steps again (binomial checkpointing). `"all"`:
            each carry. `None`: the carries at the starts of about sqrt(length)
            segments, each of which is reversed as a whole. Or one of
            `remat.chain.schedules`. A graph, as of `torch.compile`, follows those that
            reverse segments: `None`, `"all"`, `Uniform`, `Sqrt`. For others it has
            about sqrt(length) segments, and warns once.
        budget: how many bytes there may be, as a number or a text such as "64 MiB", in
            place of `checkpoints`: for the carries that are stored, the live carry, and
            the steps that run at a time. Some steps run on fake tensors first, and tell
            what a step takes. The schedule that runs the fewest steps again is
            followed.
        disk: whether stored carries, but the initial one, are in files below
            `REMAT_OFFLOAD_DIR`, or the folder for temporary files. Not with a budget.
        policy: which results to save of a step that is reversed, as for `remat`.
            `None`: all that its backward needs.
        progress: called after each step of the forward with the number of steps done.
            It is not called when steps are run again.

    Returns:
        The last carry, and what was collected. Each tensor is stacked along a new first
        dimension; numbers become tensors.

    Raises:
        TypeError: a carry changed its structure, shape, dtype or device; the message
            names the part. Or an argument is of the wrong type.
        ValueError: the tensors of `xs` differ in their first dimension, or there is no
            length.
        CaptureError: a step changes what cannot be put back for a recompute, or a
            tensor leaves it other than by being returned.
        MutationError: a step changes a tensor in place.
        OffloadError: there is no room on the disk.
        BudgetError: the budget is too small. The error names the least one.

    Source: the contract of `jax.lax.scan`. Griewank and Walther, "Algorithm 799:
    Revolve", ACM TOMS 26, 2000.

    Example:
        >>> from remat import chain
        >>> def step(x, u):
        ...     x = torch.sin(x) + u
        ...     return x, x.sum()
        >>> x, us = torch.ones(3, requires_grad=True), torch.zeros(100, 3)
        >>> last, sums = chain.scan(step, x, us, checkpoints=5)
        >>> sums.shape
        torch.Size([100])
        >>> last.sum().backward()
        >>> x.grad.shape
        torch.Size([3])
    """
    _call.check_callable("scan", [f], progress)
    asked = _asked("scan", checkpoints, unroll, budget, policy, disk=disk)
    label = _call.label_for("scan", f)
    count = _length_of(xs, length, label)
    if not count:
        return init, _nothing_collected(f, init, xs)
    steps = Steps(
        _scan_step, label, count, scanned=1, is_reversed=reverse, on_disk=disk
    )
    # Its slices are inputs of their own, also where `f` refers to the same tensor.
    args = init, _call.map_tree(lambda t: t.view_as(t), xs)
    return _call.call_chain(_call.policed(f, policy), args, steps, asked, progress)


def fori_loop(
    lower: int,
    upper: int,
    body: Callable[[int, C], C],
    init: C,
    *,
    unroll: int = 1,
    checkpoints: Checkpoints = None,
    budget: int | str | None = None,
    disk: bool = False,
    policy: PolicyLike = None,
    progress: Progress = None,
) -> C:
    """Run `body` for each number from `lower` up to `upper`, which is left out.

    The value is that of `for i in range(lower, upper): carry = body(i, carry)`. Carries
    are stored, and steps run again, as by `scan`.

    Args:
        lower: the first number.
        upper: the number after the last.
        body: a step: takes the number, a Python integer, and a carry, and returns the
            next carry.
        init: as of `scan`.
        unroll: as of `scan`.
        checkpoints: as of `scan`.
        budget: as of `scan`.
        disk: as of `scan`.
        policy: as of `scan`.
        progress: as of `scan`.

    Returns:
        The last carry.

    Raises:
        BudgetError: as of `scan`.
        TypeError: as of `scan`; or `lower` or `upper` is not an integer.

    Source: the contract of `jax.lax.fori_loop`.

    Example:
        >>> from remat import chain
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> y = chain.fori_loop(0, 10, lambda i, y: y * x, torch.tensor(1.0))
        >>> y.backward()
        >>> y.item(), x.grad.item()
        (1024.0, 5120.0)
    """
    _call.check_callable("fori_loop", [body], progress)
    asked = _asked("fori_loop", checkpoints, unroll, budget, policy, disk=disk)
    first, stop = operator.index(lower), operator.index(upper)
    if stop <= first:
        return init
    label = _call.label_for("fori_loop", body)
    step = functools.partial(_counted_step, first)
    steps = Steps(step, label, stop - first, on_disk=disk)
    try:
        return _call.call_chain(
            _call.policed(body, policy), (init,), steps, asked, progress
        )[0]
    except (AttributeError, TypeError) as error:
        if not str(error).startswith("remat:"):
            note(error, "remat: fori_loop calls body(i, carry), the number first.")
        raise


def while_loop(
    cond: Callable[[C], Any],
    body: Callable[[C], C],
    init: C,
    *,
    checkpoints: int | Literal["all"] | Online | None = None,
    budget: int | str | None = None,
    disk: bool = False,
    policy: PolicyLike = None,
    progress: Progress = None,
) -> C:
    """Run `body` as long as `cond` says so.

    The value is that of `while cond(carry): carry = body(carry)`. The number of steps
    is known only at the end. So the forward stores carries where they serve any number
    of steps well, and lets go of some as the loop goes on (online checkpointing).
    `cond` is not called again, and is not differentiated.

    Args:
        cond: takes a carry, and returns a bool or a tensor of one element.
        body: a step: takes a carry and returns the next one.
        init: as of `scan`.
        checkpoints: how many carries are stored at a time, with the initial one; or
            `"all"`. This or `budget` is needed.
        budget: as of `scan`: as many carries are stored as it has room for.
        disk: as of `scan`.
        policy: as of `scan`.
        progress: as of `scan`.

    Returns:
        The last carry.

    Raises:
        BudgetError: as of `scan`.
        TypeError: as of `scan`; or there are neither checkpoints nor a budget.

    Source: the contract of `jax.lax.while_loop`. Wang, Moin and Iaccarino, "Minimal
    repetition dynamic checkpointing algorithm for unsteady adjoint calculation",
    SIAM J. Sci. Comput. 31, 2009.

    Example:
        >>> from remat import chain
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> def halve(y):
        ...     return y / 2
        >>> y = chain.while_loop(lambda y: y > 1, halve, x, checkpoints=4)
        >>> y.backward()
        >>> y.item(), x.grad.item()
        (0.75, 0.25)
    """
    _call.check_callable("while_loop", [cond, body], progress)
    asked = _asked("while_loop", checkpoints, 1, budget, policy, disk=disk)
    label = _call.label_for("while_loop", body)
    steps = Steps(_while_step, label, None, goes_on=_goes_on, on_disk=disk)
    both = cond, _call.policed(body, policy)
    return _call.call_chain(both, (init,), steps, asked, progress)[0]


# --- Steps ---


def _scan_step(
    f: Any, args: Sequence[Any], k: int, carry: Any, place: int
) -> tuple[Any, Any]:
    del k
    result = f(carry, _call.map_tree(lambda t: t[place], args[1]))
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(_PAIR.format(got=type(result).__name__))
    carry, y = result
    return carry, _call.map_tree(_as_tensor, y)


def _counted_step(
    first: int, body: Any, args: Sequence[Any], k: int, carry: Any, place: int
) -> tuple[Any, None]:
    del args, place
    return body(first + k, carry), None


def _while_step(
    both: tuple[Any, Any], args: Sequence[Any], k: int, carry: Any, place: int
) -> tuple[Any, None]:
    del args, k, place
    return both[1](carry), None


def _goes_on(both: tuple[Any, Any], carry: Any) -> bool:
    return bool(both[0](carry))


# --- Arguments ---


def _asked(
    taker: str,
    checkpoints: Checkpoints,
    unroll: int,
    budget: int | str | None,
    policy: PolicyLike,
    *,
    disk: bool,
) -> Strategy:
    """Return what a user asks for: a budget, or a schedule."""
    if budget is not None:
        others = {"checkpoints": checkpoints, "disk": disk or None}
        others |= {"unroll": None if unroll == 1 else unroll}
        return budget_of(taker, budget, policy, others)
    if taker == "while_loop":
        return _online(checkpoints)
    return schedule_for(checkpoints, unroll)


def schedule_for(checkpoints: Checkpoints, unroll: int) -> Schedule:
    """Return the schedule that a user asks for."""
    if isinstance(checkpoints, Schedule):
        if unroll != 1:
            raise ValueError(_UNROLL.format(unroll=unroll, checkpoints=checkpoints))
        return checkpoints
    if checkpoints is None and unroll == 1:
        return Sqrt()
    if checkpoints is None or checkpoints == "all":
        return EveryStep(unroll)
    if isinstance(checkpoints, int) and not isinstance(checkpoints, bool):
        return Binomial(checkpoints, unroll)
    raise TypeError(_CHECKPOINTS.format(got=checkpoints))


def _online(checkpoints: Checkpoints) -> Schedule:
    """Return the schedule of a loop whose length is not known."""
    schedule = schedule_for(checkpoints, 1)
    if isinstance(schedule, Binomial):
        return Online(schedule.checkpoints)
    if not isinstance(schedule, (Online, EveryStep)):
        raise TypeError(_ONLINE.format(got=checkpoints))
    return schedule


def _length_of(xs: Any, length: int | None, label: str) -> int:
    """Return the number of steps."""
    known = None if length is None else operator.index(length)
    for path, leaf in _with_paths(xs):
        if not isinstance(leaf, Tensor) or not leaf.dim():
            got = f"a {type(leaf).__name__}"
            if isinstance(leaf, Tensor):
                got = "a tensor without dimensions"
            raise TypeError(_SCANNED.format(label=label, path=path, got=got))
        if known is None:
            known = len(leaf)
        elif known != len(leaf):
            message = _LENGTHS.format(label=label, path=path, got=len(leaf), had=known)
            raise ValueError(message)
    if known is None:
        raise ValueError(_NO_LENGTH.format(label=label))
    if known < 0:
        raise ValueError(f"remat: {label} has length={known}; use 0 or more")
    return known


def _with_paths(xs: Any) -> list[tuple[str, Any]]:
    if must_inline():  # Dynamo traces no other pytrees
        return [("", leaf) for leaf in tree_leaves(xs) if leaf is not None]
    leaves, treedef = pytree.flatten(xs)
    return [*zip(pytree.paths(treedef), leaves, strict=True)]


def _nothing_collected(f: Any, init: Any, xs: Any) -> Any:
    """Return what no step collects: tensors of length 0."""
    with torch.no_grad():
        _, y = f(init, _call.map_tree(lambda t: t.new_zeros(t.shape[1:]), xs))
    tensors = _call.map_tree(_as_tensor, y)
    return _call.map_tree(lambda t: t.new_zeros((0, *t.shape)), tensors)


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, (bool, int, float, complex)):
        return torch.as_tensor(leaf)
    raise TypeError(_COLLECTED.format(kind=type(leaf).__name__))


_PAIR = (
    "remat: the function of a scan returns two values, the next carry and what is "
    "collected (`return carry, y`, or `return carry, None`); got a {got}."
)
_UNROLL = (
    "remat: unroll={unroll} needs checkpoints that are a number, 'all' or None; got "
    "checkpoints={checkpoints!r}."
)
_CHECKPOINTS = (
    "remat: checkpoints={got!r}: use a number, 'all', None, or one of "
    "remat.chain.schedules."
)
_ONLINE = (
    "remat: while_loop takes checkpoints that are a number, 'all' or "
    "schedules.Online, as its length is not known; got {got!r}. Pass checkpoints=10, "
    "or a budget of bytes: budget='64 MiB'."
)
_SCANNED = (
    "remat: {label} scans `xs{path}`, which is {got}. Scan tensors whose first "
    "dimension counts the steps."
)
_LENGTHS = (
    "remat: {label} scans `xs{path}` of length {got}, where `length` or others are "
    "{had}."
)
_NO_LENGTH = "remat: {label} scans nothing. Pass `xs`, or `length=`."
_COLLECTED = (
    "remat: the function of a scan collects a {kind}. Collect tensors, numbers or None."
)
