"""`scan`, `fori_loop`, `while_loop`, `sequential`: gradients need few of their carries.

Users call them. Each says what a step is, and `_call` runs the chain.

Invariant: without gradients a loop is the plain loop, and it stores nothing.
Rejected: numbers as carries that turn into tensors, as in JAX. Eager code can count.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from remat._base.errors import note
from remat._transform.api import PolicyLike
from remat.chain import _call
from remat.chain._call import Checkpoints
from remat.chain._forward import Progress
from remat.chain._schedules import Online, Uniform
from remat.chain._steps import Steps


C = TypeVar("C")


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
    given = checkpoints, unroll, budget, policy, disk
    asked = _call.asked_for("scan", [f], progress, *given)
    label = _call.label_for("scan", f)
    count = _call.length_of(xs, length, label)
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
    given = checkpoints, unroll, budget, policy, disk
    asked = _call.asked_for("fori_loop", [body], progress, *given)
    first, stop = operator.index(lower), operator.index(upper)
    if stop <= first:
        return init
    label = _call.label_for("fori_loop", body)
    step = functools.partial(_counted_step, first)
    steps = Steps(step, label, stop - first, on_disk=disk)
    fn = _call.policed(body, policy)
    try:
        return _call.call_chain(fn, (init,), steps, asked, progress)[0]
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
    given = checkpoints, 1, budget, policy, disk
    asked = _call.asked_for("while_loop", [cond, body], progress, *given)
    label = _call.label_for("while_loop", body)
    steps = Steps(_while_step, label, None, goes_on=_goes_on, on_disk=disk)
    both = cond, _call.policed(body, policy)
    return _call.call_chain(both, (init,), steps, asked, progress)[0]


def sequential(
    fns: Iterable[Callable[..., Any]],
    x: Any,
    *args: Any,
    segments: int | None = None,
    checkpoints: Checkpoints = None,
    budget: None = None,
    disk: bool = False,
    policy: PolicyLike = None,
    progress: Progress = None,
    **others: Any,
) -> Any:
    """Call functions one after the other, each with the result of the one before.

    The value is that of `for fn in fns: x = fn(x, *args)`. The forward stores only some
    of the values between the functions. The backward calls functions again, from these
    on, and reverses them one after the other. Gradients reach `x`, `args`, and the
    parameters of the functions.

    Args:
        fns: functions or modules, in a list, an `nn.Sequential` or an `nn.ModuleList`.
            A module may update its buffers, as batch normalization does.
        x: what the first function is given, a pytree. Values between functions may have
            other shapes.
        *args: what each function is given besides.
        segments: into how many equal segments to cut the list. The backward calls the
            functions of a segment again, and holds the residuals of all of them.
        checkpoints: as of `scan`; not together with `segments`. `None` with no
            `segments`: about sqrt(n) segments.
        budget: not taken: a model in a row with a budget is `remat.fit`.
        disk: as of `scan`.
        policy: as of `scan`.
        progress: as of `scan`.
        **others: not taken: an error says what to write for torch's names.

    Returns:
        The result of the last function.

    Raises:
        TypeError: `fns` holds something that cannot be called, there is a budget, or an
            argument of another name.
        ValueError: both `segments` and `checkpoints` are given, or `segments` is not a
            positive number.

    Source: Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory
    cost", arXiv 1604.06174, 2016.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from remat import chain
        >>> layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(16)])
        >>> y = chain.sequential(layers, torch.ones(2, 8), checkpoints=4)
        >>> y.sum().backward()
        >>> layers[0].weight.grad.shape
        torch.Size([8, 8])
    """
    if others:
        raise TypeError(_unexpected(next(iter(others)), x))
    layers = (*fns,)
    for i, fn in enumerate(layers):
        if not callable(fn):
            raise TypeError(f"remat: fns[{i}] of sequential is not callable: {fn!r}")
    if budget is not None:
        raise TypeError(_BUDGET.format(budget=budget))
    if segments is not None and checkpoints is not None:
        raise ValueError(_BOTH.format(segments=segments, checkpoints=checkpoints))
    given = checkpoints if segments is None else Uniform(segments), 1, None, policy
    schedule = _call.asked_for("sequential", (), progress, *given, disk)
    if not layers:
        return x
    name = type(fns).__name__ if isinstance(fns, nn.Module) else "functions"
    label = _call.label_for(f"sequential of {len(layers)} {name}")
    steps = Steps(_apply_layer, label, len(layers), is_repeated=False, on_disk=disk)
    called = tuple(_call.policed(fn, policy) for fn in layers)
    try:
        return _call.call_chain(called, (x, args), steps, schedule, progress)[0]
    except (AttributeError, TypeError) as error:
        if type(x) is int and args:  # as checkpoint_sequential takes them
            note(error, _ORDER.format(segments=x))
        raise


def _unexpected(name: str, x: Any) -> str:
    """Say what to write in place of an argument of `checkpoint_sequential`."""
    advice = _NOT_NEEDED if name in ("use_reentrant", "preserve_rng_state") else ""
    if name == "input":
        segments = x if type(x) is int else "n"
        advice = f" Write sequential(functions, input, segments={segments})."
    return f"remat: sequential() got an unexpected keyword argument {name!r}.{advice}"


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


def _apply_layer(
    layers: Sequence[Any], args: Sequence[Any], k: int, carry: Any, place: int
) -> tuple[Any, None]:
    del place
    return layers[k](carry, *args[1]), None


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
_COLLECTED = (
    "remat: the function of a scan collects a {kind}. Collect tensors, numbers or None."
)
_NOT_NEEDED = " It is not needed: leave it out."
_ORDER = (
    "remat: the number of segments is no second argument here: write "
    "sequential(functions, input, segments={segments})."
)
_BOTH = (
    "remat: sequential got segments={segments} and checkpoints={checkpoints!r}: pass "
    "one of them."
)
_BUDGET = (
    "remat: sequential got budget={budget!r}. For a model in a row with a budget write "
    "remat.fit(model, batch, budget={budget!r}), or pass checkpoints= here."
)
