"""Says what to write where a name of remat is used wrongly.

Invariant: names that exist are found as without it. The right name is looked for when
an error is raised, with `dir`. Only for the function there is a table, of names in
rooms, and a test compares it with them: to list them would import the rooms.
Rejected: a package that can be called. `remat` would be a function in one file and a
package in the next, and `remat.fit` would depend on which.
"""

import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, NoReturn

from typing_extensions import override


def at(name: str) -> None:
    """Have a module say what to write where it is called, or has no such name."""
    sys.modules[name].__class__ = _Hinting


def on(function: Any, package: str) -> None:
    """Have a function named like its package say so where names are looked up."""
    names = {n: n for n in dir(sys.modules[package]) if not n.startswith("_")}
    names |= {n: f"{room}.{n}" for room, found in IN_ROOMS.items() for n in found}
    for name in names.keys() - {function.__name__}:
        setattr(function, name, _Misplaced(names[name], package))


class _Hinting(types.ModuleType):
    """A module of remat."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        name = self.__name__
        if "." in name:
            raise TypeError(_ROOM.format(name=name, has=_listed(self)))
        raise TypeError(_PACKAGE.format(name=name))

    @override
    def __getattr__(self, name: str) -> NoReturn:
        message = f"module {self.__name__!r} has no attribute {name!r}"
        found = "" if name.startswith("_") else _advice(self, name)
        raise AttributeError(f"{message}. {found}" if found else message)


class _Misplaced:
    """A name of the package that was looked up on a function of its name."""

    __slots__ = ("_name", "_package")

    def __init__(self, name: str, package: str) -> None:
        self._name, self._package = name, package

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(repr(self))

    def __getattr__(self, name: str) -> NoReturn:
        # What copies or pickles asks for its own names.
        raise AttributeError(name if name.startswith("_") else repr(self))

    def __repr__(self) -> str:
        shown = {"name": self._name, "package": self._package}
        return _FUNCTION.format(first=self._name.partition(".")[0], **shown)


def _advice(module: types.ModuleType, name: str) -> str:
    """Say which name is meant; "" if none is like it."""
    package = module.__name__.partition(".")[0]
    rooms = _rooms(package)
    if name in rooms:  # one that was not imported yet
        return f"Write `import {package}.{name}`."
    if name in _ELSEWHERE and not [*_places(package, name)]:
        return _ELSEWHERE[name]
    known = _OTHERS.get(name)
    places = [f"{package}.{known}"] if known else [*_places(package, name)]
    if places:
        return f"Write {' or '.join(places)}."
    names = _public(module)
    near = [n for n in names if n.startswith(name)]
    near += get_close_matches(name, names, 1, _LIKE)
    return f"Do you mean {module.__name__}.{near[0]}?" if near else ""


def _places(package: str, name: str) -> Iterator[str]:
    """Return where a name is found: in the package, or in one of its public rooms."""
    top = sys.modules[package]
    if name in _public(top):
        yield f"{package}.{name}"
    for room in _rooms(package):
        if name in _public(importlib.import_module(f"{package}.{room}")):
            yield f"{package}.{room}.{name}"


def _rooms(package: str) -> list[str]:
    """Return the names of the public rooms."""
    found = pkgutil.iter_modules(sys.modules[package].__path__)
    return [room.name for room in found if not room.name.startswith("_")]


def _public(module: types.ModuleType) -> list[str]:
    """Return the names of a module that are not private, nor of other packages."""
    package = module.__name__.partition(".")[0]
    names = [name for name in dir(module) if not name.startswith("_")]
    return [name for name in names if _home(getattr(module, name)) == package]


def _home(value: Any) -> str:
    """Return the package that something is of."""
    is_module = isinstance(value, types.ModuleType)
    name = value.__name__ if is_module else getattr(value, "__module__", "")
    return str(name).partition(".")[0]


def _listed(room: types.ModuleType) -> str:
    """Return some functions of a room."""
    names = [n for n in _public(room) if inspect.isfunction(getattr(room, n))]
    shown = ", ".join(f"{room.__name__}.{name}" for name in names[:_SHOWN])
    return f"{shown}, ..." if len(names) > _SHOWN else f"{shown}."


# What people look for on the function.
IN_ROOMS = {
    "chain": ("scan", "fori_loop", "while_loop", "sequential"),
    "nn": ("apply", "applied", "enable", "remove"),
    "policies": ("within", "save_only_these_names"),
    "random": ("key", "split", "fold_in", "bind"),
}
_SHOWN = 5
_LIKE = 0.75  # of the letters of two names: then one may be meant
# What JAX calls it.
_OTHERS = {
    "PRNGKey": "random.key",
    "checkpoint_policies": "policies",
    "lax": "chain",
}
# What JAX has, and remat has not.
_NO_SAMPLER = (
    "Make it of remat.random.uniform or normal; torch.distributions has no keys."
)
_BRANCH = "Write `if`, also on values; torch.cond in compiled code."
_ELSEWHERE = {
    "ad_checkpoint": "Its names are in remat itself: remat.checkpoint_name.",
    "associative_scan": "Write torch._higher_order_ops.associative_scan.",
    "closure_convert": "Not needed: tensors that a function refers to are inputs.",
    "cond": _BRANCH,
    "custom_jvp": "Write a torch.autograd.Function with a jvp.",
    "jit": "Write torch.compile.",
    "map": "Write torch.vmap(fn, chunk_size=n), or remat.chain.scan.",
    "stop_gradient": "Write x.detach().",
    "switch": _BRANCH,
    "tree_util": "Write torch.utils._pytree, or optree.",
    "value_and_grad": "Write torch.func.grad_and_value: it returns the gradient first.",
    "vmap": "Write torch.vmap.",
}
for _name in ("grad", "hessian", "jacfwd", "jacrev", "jvp", "linearize", "vjp"):
    _ELSEWHERE[_name] = f"Write torch.func.{_name}."
for _name in (
    *("ball", "beta", "binomial", "cauchy", "chisquare", "dirichlet"),
    *("double_sided_maxwell", "f", "gamma", "generalized_normal", "geometric"),
    *("loggamma", "logistic", "lognormal", "maxwell", "multinomial"),
    *("multivariate_normal", "orthogonal", "pareto", "poisson", "rayleigh"),
    *("t", "triangular", "wald", "weibull_min"),
):
    _ELSEWHERE[_name] = _NO_SAMPLER
_PACKAGE = (
    "{name}: `{name}` is the package here, which is not callable. Write `from {name} "
    "import {name}`, or {name}.{name}(fn)."
)
_ROOM = "remat: {name} is a module, which is not callable. Call a function in it: {has}"
_FUNCTION = (
    "remat: `{package}` is the function here, not the package. For {package}.{name} "
    "write `import {package}`, or `from {package} import {first}`."
)
