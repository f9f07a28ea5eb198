"""Which submodules of a model are meant: by class, by name, or by a function.

Called by `apply`.

Invariant: a selector that selects nothing is an error. A name may be misspelled, or
that of a list of modules, which is never called.
Rejected: to let a name select the submodules of what it names, too. A block and its
parts would be recomputed one in the other.
"""

import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from remat._transform.refused import has_forward
from remat.policies import Decision, Policy


# A class, a name with wildcards, or a function of a module, or of its name and itself.
Selector: TypeAlias = type[nn.Module] | str | Callable[..., bool]


def selected(
    model: nn.Module, selectors: Iterable[Selector]
) -> list[tuple[str, nn.Module, int]]:
    """Return the modules that selectors select, and the first that does.

    Modules without `forward`, such as an `nn.ModuleList`, are left out.
    """
    selectors = [*selectors]
    tests = [_test_of(selector) for selector in selectors]
    found: list[tuple[str, nn.Module, int]] = []
    useful: set[int] = set()
    left_out: dict[int, str] = {}
    for name, module in model.named_modules():
        hits = [k for k, test in enumerate(tests) if test(name, module)]
        if not has_forward(module):
            left_out.update((k, name) for k in hits if k not in left_out)
        elif hits:
            useful.update(hits)
            found.append((name, module, hits[0]))
    for k, selector in enumerate(selectors):
        if k not in useful and k in left_out:
            raise ValueError(_only_container(model, left_out[k]))
        if k not in useful:
            raise ValueError(_nothing(model, selector))
    return found


def _test_of(selector: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return lambda name, module: isinstance(module, selector)
    if isinstance(selector, str):
        pattern = _pattern(selector)
        return lambda name, module: pattern.fullmatch(name) is not None
    if isinstance(selector, (Policy, Decision)):
        raise TypeError(_POLICY.format(policy=selector))
    if callable(selector) and not isinstance(selector, (type, nn.Module)):
        if _takes_one(selector):
            return lambda name, module: selector(module)
        return selector
    raise TypeError(_NO_SELECTOR.format(selector=selector))


def _takes_one(selector: Callable[..., Any]) -> bool:
    """Say whether a function takes a module, and not also its name."""
    try:
        signature = inspect.signature(selector)
    except ValueError:  # a builtin that has none
        return False
    return _binds(signature, 1) and not _binds(signature, 2)


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _pattern(text: str) -> re.Pattern[str]:
    """Return a pattern of names, in which `*` stands for one part of a name."""
    parts = (
        _PARTS[part]
        if part in _PARTS
        else fnmatch.translate(part).removesuffix(r"\Z").replace(".*", "[^.]*")
        for part in text.split(".")
    )
    return re.compile(r"\.".join(parts))


# The name of the model itself is empty, and has no part.
_PARTS = {"*": "[^.]+", "**": r"[^.]+(?:\.[^.]+)*"}


def as_selectors(select: Any) -> Sequence[Selector]:
    """Return one selector or several as a sequence."""
    if isinstance(select, Mapping):
        return [*select]
    if isinstance(select, (list, tuple, set, frozenset)):
        return [*select]
    return [select]


def _only_container(model: nn.Module, name: str) -> str:
    kind = type(model.get_submodule(name)).__name__
    shown, inside = (f"`{name}`", f"{name}.*") if name else ("the model itself", "*")
    return _NO_FORWARD.format(shown=shown, kind=kind, inside=inside)


def _nothing(model: nn.Module, selector: Any) -> str:
    names = [name for name, _ in model.named_modules() if name]
    more = ", ..." if len(names) > 8 else "."
    has = f"Its modules are: {', '.join(names[:8])}{more}"
    has = has if names else "It has no modules inside."
    shown = getattr(selector, "__name__", repr(selector))
    return _NOTHING.format(shown=shown, model=type(model).__name__, has=has)


_NO_SELECTOR = (
    "remat.nn.apply: {selector!r} is not a selector. Pass a class of modules, a name "
    "such as 'layers.*', a function of a module (or of its name and the module), or a "
    "list of these."
)
_POLICY = (
    "remat.nn.apply: pass a policy by name: remat.nn.apply(model, policy={policy})"
)
_NO_FORWARD = (
    "remat: {shown} is a {kind}, which has no `forward`, so nothing would be "
    "recomputed. Select the modules in it: {inside!r}."
)
_NOTHING = (
    "remat.nn.apply: {shown} selects no module of this {model}. {has} "
    "In a name `*` stands for one part and `**` for several."
)
