"""Assertions that two functions compute the same, and counters of what they cost.

Invariant: values are compared bit for bit. Bytes are exact, and a kernel counts once,
under any transform.
Rejected: a tolerance unless the caller asks for it (``reassociated``). A recompute runs
the same operations, so a difference is a mistake. Rejected: estimates of bytes by the
shapes of what is saved. Two tensors may share memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from remat._base import pytree
from remat._base.tensors import describe_meta
from remat._report.inputs import tensors_in
from remat._report.timeline import memory_timeline
from remat._torch.modes import call_kernel


def assert_same(
    actual: Any, expected: Any, *, reassociated: bool | torch.dtype = False
) -> None:
    """Assert that two pytrees agree in structure, metadata and values.

    Tensors must agree in dtype, shape, device, layout and ``requires_grad``, and bit
    for bit in value. (Any NaN equals any NaN, and zero equals negative zero.) Other
    leaves must agree in type and by ``==``.

    Args:
        actual: The computed value.
        expected: The value it should be.
        reassociated: True if the same floating-point sums may be added up in another
            order. Then values must agree to rounding in their own dtype, relative to
            the largest value of the tensor. Pass a dtype if the sums were computed in
            that (lower) precision, as under autocast.

    Raises:
        AssertionError: a leaf differs. The message names the first such leaf, how it
            differs, and both values.

    Example:
        >>> ones = torch.ones(2)
        >>> assert_same({"a": ones}, {"a": ones + 0})
        >>> assert_same({"a": ones}, {"a": ones + 1})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        AssertionError: assert_same: `['a']` differs in value...
    """
    leaves, treedef = pytree.flatten(actual)
    wanted, wanted_treedef = pytree.flatten(expected)
    if treedef != wanted_treedef:
        raise AssertionError(
            "assert_same: the structures differ.\n"
            f"  actual:   {treedef}\n  expected: {wanted_treedef}"
        )
    for path, leaf, want in zip(pytree.paths(treedef), leaves, wanted, strict=True):
        if difference := _difference(leaf, want, reassociated):
            raise AssertionError(
                f"assert_same: {f'`{path}`' if path else 'the result'} {difference}\n"
                f"  actual:   {_describe(leaf)}\n  expected: {_describe(want)}"
            )


def assert_same_gradients(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    wrt: Any = None,
    reassociated: bool | torch.dtype = False,
    **kwargs: Any,
) -> None:
    """Assert that two functions agree in their result and in every gradient.

    Each function runs its forward and ``.backward()`` on its own copy of the arguments.
    Both get the same random cotangents, one for every output that requires grad. If one
    gradient is None, the other must be None too.

    Args:
        fn: The function under test.
        reference: The function that it should equal.
        *args: Arguments for both. Gradients are computed for tensors that require grad.
        wrt: A pytree of further leaf tensors that get gradients, such as
            ``dict(module.named_parameters())``. These are shared, not copied. Their
            ``.grad`` is restored at the end.
        reassociated: As in ``assert_same``, for the gradients. Results are always
            compared bit for bit.
        **kwargs: Keyword arguments for both.

    Raises:
        AssertionError: a leaf of the results or of the gradients differs; the message
            names the first. Or no output requires grad, so there is nothing to compare.

    Example:
        >>> x = torch.linspace(0, 1, 5, requires_grad=True)
        >>> assert_same_gradients(lambda x: -(-x).sin(), torch.sin, x)
        >>> wrong = lambda x: x.detach().sin() + 0 * x
        >>> assert_same_gradients(wrong, torch.sin, x)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        AssertionError: in the gradients: assert_same: `['args'][0]` differs in value...
    """
    result, gradients = _value_and_gradients(fn, args, kwargs, wrt)
    wanted, wanted_gradients = _value_and_gradients(reference, args, kwargs, wrt)
    try:
        assert_same(result, wanted)
    except AssertionError as error:
        raise AssertionError(f"in the results: {error}") from None
    if not any(leaf.requires_grad for leaf in tensors_in(wanted)):
        raise AssertionError(
            "assert_same_gradients: no output of the reference requires grad, so there "
            "is nothing to compare. Pass an argument (or `wrt`) that requires grad."
        )
    try:
        assert_same(gradients, wanted_gradients, reassociated=reassociated)
    except AssertionError as error:
        raise AssertionError(f"in the gradients: {error}") from None


def _value_and_gradients(
    fn: Callable[..., Any], args: Any, kwargs: Any, wrt: Any
) -> tuple[Any, Any]:
    """Run ``fn`` forward and backward. Gradients have the structure of the inputs."""
    args, kwargs = _copy((args, kwargs))
    inputs = {"args": args, "kwargs": kwargs, "wrt": wrt}
    leaves, treedef = pytree.flatten(inputs)
    before = [leaf.grad for leaf in tensors_in(wrt)]
    try:
        for leaf in tensors_in(wrt):
            leaf.grad = None
        result = fn(*args, **kwargs)
        outputs = [leaf for leaf in tensors_in(result) if leaf.requires_grad]
        # Random, with a fixed seed: ones would hide a mix-up.
        rng = torch.Generator().manual_seed(0)
        cotangents = [
            torch.randn(x.shape, dtype=x.dtype, generator=rng).to(x.device)
            for x in outputs
        ]
        torch.autograd.backward(outputs, cotangents)
        # Not None, which a pytree treats as structure: a difference would have no path.
        grads = [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves]
        gradients = ["no gradient" if grad is None else grad for grad in grads]
    finally:
        for leaf, grad in zip(tensors_in(wrt), before, strict=True):
            leaf.grad = grad
    return result, pytree.unflatten(treedef, gradients)


def _copy(tree: Any) -> Any:
    """Copy the tensors of a pytree to new leaves. Copy a repeated tensor once."""
    leaves, treedef = pytree.flatten(tree)
    copies = {
        id(leaf): leaf.detach().clone().requires_grad_(leaf.requires_grad)
        for leaf in leaves
        if isinstance(leaf, Tensor)
    }
    return pytree.unflatten(treedef, [copies.get(id(leaf), leaf) for leaf in leaves])


def _difference(
    actual: Any, expected: Any, reassociated: bool | torch.dtype
) -> str | None:
    """Say how two leaves differ, or return None."""
    if not (isinstance(actual, Tensor) and isinstance(expected, Tensor)):
        if type(actual) is not type(expected):
            return "differs in type."
        nan = actual != actual and expected != expected
        return None if nan or actual == expected else "differs in value."
    for attribute in ("dtype", "shape", "device", "layout", "requires_grad"):
        if getattr(actual, attribute) != getattr(expected, attribute):
            return f"differs in {attribute}."
    return _value_difference(
        actual.detach().to_dense(), expected.detach().to_dense(), reassociated
    )


def _value_difference(
    actual: Tensor, expected: Tensor, reassociated: bool | torch.dtype
) -> str | None:
    """Say how the values of two dense tensors with equal metadata differ."""
    wrong = ~_equal(actual, expected)
    inexact = actual.is_floating_point() or actual.is_complex()
    close = inexact and bool(_close(actual, expected, reassociated).all())
    if not wrong.any() or (reassociated and close):
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    message = (
        f"differs in value: {int(wrong.sum())} of {wrong.numel()} elements, first at "
        f"index {index}: {actual[index].item()!r}, expected {expected[index].item()!r}."
    )
    if close:
        message += (
            " They agree to rounding. If the same sum may be added up in another order"
            " here, pass reassociated=True."
        )
    return message


def _equal(actual: Tensor, expected: Tensor) -> Tensor:
    return (actual == expected) | (actual.isnan() & expected.isnan())


def _close(
    actual: Tensor, expected: Tensor, reassociated: bool | torch.dtype
) -> Tensor:
    """Equal to rounding: within 64 units in the last place of the largest value."""
    dtype = reassociated if isinstance(reassociated, torch.dtype) else actual.dtype
    exact = _equal(actual, expected)
    size = expected.abs().double()
    largest = (
        size[size.isfinite()].max() if size.isfinite().any() else size.new_zeros(())
    )
    wide = torch.complex128 if actual.is_complex() else torch.float64
    error = (actual.to(wide) - expected.to(wide)).abs()
    return exact | (error <= 64 * torch.finfo(dtype).eps * largest)


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"{type(leaf).__name__} {leaf!r}"
    meta = describe_meta(leaf.dtype, leaf.shape)
    layout = "" if leaf.layout == torch.strided else f" {leaf.layout}"
    return f"{meta}{layout} on {leaf.device}, requires_grad={leaf.requires_grad}"


# --- Counters ---


@contextmanager
def count_ops() -> Iterator[Counter[str]]:
    """Count the kernels that run inside the block, by name.

    Kernels are counted below ``torch.func``: a call under ``grad`` and ``vmap`` counts
    once, as the batched kernel that runs in the end. Operations that autograd
    dispatches for bookkeeping (``detach``, ``alias``, ``view``) are counted too.

    Yields:
        A counter from op name (``"mm"``, ``"add_"``, ``"mylib::op"`` outside ATen) to
        the number of calls so far. An op that did not run counts 0.

    Example:
        >>> import torch
        >>> x = torch.ones(3)
        >>> with count_ops() as ops:
        ...     _ = torch.func.grad(lambda x: x.sin().sin().sum())(x)
        >>> ops["sin"], ops["cos"], ops["mm"]
        (2, 2, 0)
    """
    counts: Counter[str] = Counter()
    with _CountingMode(counts):
        yield counts


class _CountingMode(TorchDispatchMode):
    """Adds each op that reaches the bottom of the dispatcher to ``counts``."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types  # every tensor is counted alike
        name = func.overloadpacket.__name__
        aten = func.namespace == "aten"
        self._counts[name if aten else f"{func.namespace}::{name}"] += 1
        return call_kernel(func, *args, **(kwargs or {}))


def peak_bytes(fn: Callable[[], object]) -> int:
    """Run ``fn`` and return the most bytes that its tensors held at any one time.

    Args:
        fn: Called once, without arguments, as in ``memory_timeline``.

    Returns:
        The highest point of ``memory_timeline(fn)``, or 0.

    Example:
        >>> import torch
        >>> x = torch.ones(1000)
        >>> peak_bytes(lambda: x.sin().cos().exp())
        8000
    """
    return memory_timeline(fn).peak


def live_bytes(fn: Callable[[], object]) -> int:
    """Run ``fn`` and return the bytes that are alive afterwards, with its result.

    For a forward, these are the residuals and the result.

    Args:
        fn: Called once, without arguments, as in ``memory_timeline``.

    Returns:
        The last point of ``memory_timeline(fn)``, or 0.

    Example:
        >>> import torch
        >>> x = torch.ones(1000, requires_grad=True)
        >>> live_bytes(lambda: x.sin().sin())  # the result and one residual
        8000
    """
    timeline = memory_timeline(fn).bytes
    return timeline[-1] if timeline else 0
