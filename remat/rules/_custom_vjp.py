"""`custom_vjp`: a function whose derivative, and whose recompute, its author writes.

Invariant: a rule that is wrong in structure, shape, dtype or number is an error that
names the function and where it is written.
Rejected: an `autograd.Function` of the user's. Its residuals are saved tensors, which a
recompute computes by running all of it again.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from remat._base.context import here
from remat._base.program import Request
from remat._base.pytree import tensors_and_frame
from remat._base.source import shown
from remat._partial.names import BY_RULE, checkpoint_name
from remat._torch.levels import current_layer, requires_grad_at_any_level
from remat._torch.tracing import has_proxies, must_inline
from remat._transform.function import dispatch
from remat.rules._places import is_in_region, place_of
from remat.rules._ruled import Ruled, RulePlace


class custom_vjp:  # noqa: N801
    """A function with rules for its derivative, and for its recompute.

    ``f = custom_vjp(fn)`` is called as `fn` is, with positional arguments or keywords.
    Arguments and results are pytrees of tensors and other values. Rules are given by
    `f.defvjp` or `f.defremat`, or both. They are for authors of kernels that know best
    what to keep: attention its log-sum-exp, a quantized product its scales.

    Outside of rematerialized calls the rules of `defvjp` hold, or else those of
    `defremat`, where `rem` runs right after `fwd`. Within one the rules of `defremat`
    hold: the forward runs `fwd` and keeps its residuals, whatever the policy says, and
    the recompute runs `rem` on them. With `defvjp` alone `fwd` is run again, as any
    code is, and what it names by `checkpoint_name` may be saved.

    `fn` runs where nothing is differentiated in reverse. Forward mode differentiates
    `fn` there, and `fwd` (or `rem` after it) where reverse mode takes part, too. So do
    second derivatives: these rules are then differentiated as any code is. All that is
    differentiated must be passed as an argument. Rules are pure: they change nothing,
    and their results are not changed in place.

    Args:
        fn: the function.
        nondiff_argnums: the positions of arguments that are not differentiated. `bwd`
            is passed them first, and gives no cotangents for them.

    Source: `jax.custom_vjp`, with `defremat` since JAX 0.12.

    Example:
        >>> from remat import custom_vjp, remat
        >>> from remat.testing import count_ops
        >>> sin = custom_vjp(torch.sin)
        >>> sin.defremat(
        ...     fwd=lambda x: (x.sin(), x.cos()),
        ...     rem=lambda cos, x: (x.sin(), cos),
        ...     bwd=lambda cos, ct: (ct * cos,),
        ... )
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = remat(lambda x: sin(x).exp())(x)
        >>> with count_ops() as ops:
        ...     y.sum().backward()
        >>> ops["sin"], ops["cos"]
        (1, 0)
    """

    def __init__(
        self, fn: Callable[..., Any], nondiff_argnums: Sequence[int] = ()
    ) -> None:
        if not callable(fn):
            raise TypeError(f"remat: custom_vjp takes a function, and not {fn!r}")
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.nondiff_argnums = tuple(nondiff_argnums)
        self._outside: Any = None  # fwd, None, bwd
        self._inside: Any = None  # fwd, rem, bwd
        self._function: Any = None  # by which Dynamo traces it

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Give the rules of the derivative.

        Args:
            fwd: `fwd(*args) -> (out, res)`. The residuals are any pytree.
            bwd: `bwd(res, cotangents) -> cotangents of the arguments`, a tuple; None
                for an argument whose cotangent is zero, or that has none.
        """
        self._outside = _checked(fwd, None, bwd)
        self._function = _function_of(self, self._outside)

    def defremat(
        self,
        fwd: Callable[..., Any],
        rem: Callable[..., Any] | None,
        bwd: Callable[..., Any],
    ) -> None:
        """Give the rules that hold within rematerialized calls.

        Args:
            fwd: `fwd(*args) -> (out, res)`. All of `res` is kept for the recompute.
            rem: `rem(res, *args) -> (out, res2)`, called in the recompute. `out` is
                what `fwd` returned; it is not read if nothing reads it. None: `fwd`
                runs again, and nothing is kept.
            bwd: `bwd(res2, cotangents) -> cotangents of the arguments`.
        """
        self._inside = _checked(fwd, rem, bwd)
        self._function = _function_of(self, self._outside or self._inside)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> Any:
        name: str = vars(self).get("__qualname__", "")
        found: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else super().__reduce__()

    def __repr__(self) -> str:
        return f"custom_vjp({self.fn!r})"

    @property
    def label(self) -> str:
        """What messages call the function."""
        code = getattr(inspect.unwrap(self.fn), "__code__", None)
        name = f"`{getattr(self.fn, '__name__', repr(self.fn))}`"
        at = code and f" ({shown(code.co_filename)}:{code.co_firstlineno})"
        return name + (at or "")

    def name_of(self, index: int, path: str = "") -> str:
        """Write an argument as the function's author would."""
        try:
            names = (*inspect.signature(self.fn).parameters,)
        except (TypeError, ValueError):
            names = ()
        name = names[index] if index < len(names) else f"argument {index}"
        return f"`{name}{path}`"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._outside is None and self._inside is None:
            raise AttributeError(_NO_RULE.format(label=self.label))
        if kwargs:
            args = self._positional(args, kwargs)
        if torch.compiler.is_compiling():
            return self._traced(*args)
        if must_inline() and not has_proxies():
            return self.fn(*args)
        tensors, frame = tensors_and_frame(args)
        needs = [*map(requires_grad_at_any_level, tensors)]
        is_plain = not torch.is_grad_enabled() or True not in needs
        rules, place, is_again = self._outside or self._inside, None, False
        if self._inside is not None and not must_inline() and is_in_region():
            rules = self._inside
            if rules[1] is not None:
                place, is_again = place_of(RulePlace, self.label)
                # A recompute asks for the gradients of fewer.
                place.is_plain = is_plain = place.is_plain if is_again else is_plain
        # Also within `fwd` in forward mode, which would call it again.
        if is_plain or self in here().rules:
            return self.fn(*args)
        program = Ruled(self, rules, frame, len(tensors), place, is_again=is_again)
        request = Request(needs, current_layer() is None)
        return program.joined(dispatch(program, tensors, request)[0])

    def _traced(self, *args: Any) -> Any:
        """Call the function while Dynamo traces."""
        if not torch.is_grad_enabled():  # as in `fwd`, which may call it
            return self.fn(*args)
        # Dynamo forgets that a level differentiates it, but not a view of it.
        views = [a.view_as(a) if isinstance(a, torch.Tensor) else a for a in args]
        return self._function.apply(*views)

    def _positional(self, args: Any, kwargs: dict[str, Any]) -> Any:
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            names = ", ".join(map(repr, bound.kwargs))
            raise TypeError(_KEYWORDS.format(label=self.label, names=names))
        return bound.args


def _function_of(rule: custom_vjp, rules: Any) -> Any:
    """Return a Function of a call by rules outside of regions, which Dynamo traces."""
    fwd, rem, bwd = rules
    static, label = rule.nondiff_argnums, rule.label

    class ByRules(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, *args: Any) -> Any:  # pyrefly: ignore[bad-override]
            out, res = fwd(*args)
            if rem is not None:
                res = rem(checkpoint_name(res, BY_RULE), *args)[1]
            leaves, ctx.spec = tree_flatten(res)
            ctx.at = [k for k, t in enumerate(leaves) if isinstance(t, torch.Tensor)]
            ctx.save_for_backward(*[leaves[k] for k in ctx.at])
            ctx.leaves = [None if k in ctx.at else t for k, t in enumerate(leaves)]
            ctx.static = [args[i] for i in static]
            if not isinstance(out, (torch.Tensor, tuple)):
                raise TypeError(_TRACED.format(label=label))
            return out

        @staticmethod
        @override
        def backward(ctx: Any, *cts: Any) -> Any:
            leaves = [*ctx.leaves]
            for k, t in zip(ctx.at, ctx.saved_tensors, strict=True):
                leaves[k] = t
            res = tree_unflatten(leaves, ctx.spec)
            grads = [*bwd(*ctx.static, res, cts[0] if len(cts) == 1 else cts)]
            for i in sorted(static):
                grads.insert(i, None)
            return tuple(grads)

    return ByRules


def _checked(fwd: Any, rem: Any, bwd: Any) -> Any:
    for rule in (fwd, *filter(None, [rem]), bwd):
        if not callable(rule):
            raise TypeError(f"remat: a rule of a custom_vjp is no function: {rule!r}")
    return fwd, rem, bwd


_NO_RULE = (
    "remat: custom_vjp {label} has no rules. Give them by its defvjp(fwd, bwd) or "
    "defremat(fwd, rem, bwd)."
)
_TRACED = (
    "remat: in compiled code the result of custom_vjp {label} must be a tensor or a "
    "tuple of tensors."
)
_KEYWORDS = (
    "remat: custom_vjp {label} has keyword-only parameters ({names}), and rules take "
    "positional arguments. Let it take them by position; callers may use keywords."
)
