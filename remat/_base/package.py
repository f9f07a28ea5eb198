"""The names of the package: looked up at their first use, and what to write for others.

A package names what it imports later (PEP 562), or a room below it does. `import remat`
takes an eighth of what it takes to import all that a call needs.

Invariant: names that exist are attributes from their first use on. The right name for a
wrong one is looked for when an error is raised; only the function has a table of names.
Rejected: a class of module with properties. Tools that read modules would meet a class
that they do not know. A package that can be called: `remat` would be a function in one
file and a package in the next, and `remat.fit` would depend on which.
"""

import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from typing_extensions import override


def later(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    `names` are those of each module. Those of the package itself are modules in it.

    >>> get, listed = later("email", {"email": ["mime"], "email.message": ["Message"]})
    >>> get("Message"), get("mime").__name__
    (<class 'email.message.Message'>, 'email.mime')
    """
    namespace = vars(sys.modules[package])
    homes = {name: module for module in names for name in names[module]}

    def get(name: str) -> Any:
        if name == "__all__":  # `import *` asks for it, and else finds what is imported
            return [name for name in listed() if not name.startswith("_")]
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == package:
            return importlib.import_module(f"{package}.{name}")
        namespace[name] = getattr(importlib.import_module(home), name)
        return namespace[name]

    def listed() -> list[str]:
        return sorted({*namespace, *homes})

    return get, listed


# All that rooms ask of rooms above them. The import contracts do not see these.
_ABOVE = {"ask_at_calls": "remat.rules._keep", "fit": "remat._fit.api"}


def from_above(name: str) -> Any:
    """Return what a room above defines.

    >>> from_above("fit").__module__
    'remat._fit.api'
    """
    return getattr(importlib.import_module(_ABOVE[name]), name)


# --- Names that are used wrongly ---


def advise(name: str) -> None:
    """Have a module say what to write where it is called, or has no such name."""
    sys.modules[name].__class__ = _Hinting


def advise_on(function: Any, package: str) -> None:
    """Have a function named like its package say so where names are looked up."""
    names = {n: n for n in dir(sys.modules[package]) if not n.startswith("_")}
    names |= {n: f"{room}.{n}" for room, found in IN_ROOMS.items() for n in found}
    for name in names.keys() - {function.__name__}:
        first = names[name].partition(".")[0]
        says = _FUNCTION.format(name=names[name], package=package, first=first)
        setattr(function, name, _Misplaced(says))


class _Hinting(types.ModuleType):
    """A module of remat."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        name = self.__name__
        raise TypeError((_ROOM if "." in name else _PACKAGE).format(name=name))

    @override
    def __getattr__(self, name: str) -> NoReturn:
        message = f"module {self.__name__!r} has no attribute {name!r}"
        found = "" if name.startswith("_") else _advice(self, name)
        raise AttributeError(f"{message}. {found}" if found else message)


class _Misplaced:
    """A name of the package that was looked up on a function of its name."""

    def __init__(self, says: str) -> None:
        self._says = says

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(self._says)

    def __getattr__(self, name: str) -> NoReturn:
        # What copies or pickles asks for its own names.
        raise AttributeError(name if name.startswith("_") else self._says)


def _advice(module: types.ModuleType, name: str) -> str:
    """Say which name is meant; "" if none is like it."""
    package = sys.modules[module.__name__.partition(".")[0]]
    rooms = [r.name for r in pkgutil.iter_modules(package.__path__) if r.name[0] != "_"]
    if name in rooms:  # one that was not imported yet
        return f"Write `import {package.__name__}.{name}`."
    imported = (importlib.import_module(f"{package.__name__}.{room}") for room in rooms)
    there = [m.__name__ for m in (package, *imported) if name in _public(m)]
    if there:
        return f"Write {' or '.join(f'{place}.{name}' for place in there)}."
    if name in _OF_OTHERS:
        return f"Write {_OF_OTHERS[name]}."
    names = _public(module)
    near = [n for n in names if n.startswith(name)]
    near += get_close_matches(name, names, 1, 0.75)
    return f"Do you mean {module.__name__}.{near[0]}?" if near else ""


def _public(module: types.ModuleType) -> list[str]:
    """Return the names of a module that are not private, nor of other packages."""
    values = {n: getattr(module, n) for n in dir(module) if not n.startswith("_")}
    own = {n: getattr(v, "__module__", None) or "" for n, v in values.items()}
    return [name for name in own if own[name].partition(".")[0] == "remat"]


# What people look for on the function.
IN_ROOMS = {
    "chain": ("scan", "fori_loop", "while_loop", "sequential"),
    "nn": ("apply", "applied", "enable", "remove"),
    "policies": ("within", "save_only_these_names"),
    "random": ("key", "split", "fold_in", "bind"),
}
# What JAX has, by another name or elsewhere.
_OF_OTHERS = {
    "PRNGKey": "remat.random.key",
    "ad_checkpoint": "remat.checkpoint_name, say: its names are in remat itself",
    "checkpoint_policies": "remat.policies",
    "cond": "`if`, also on values; torch.cond in compiled code",
    "eval_shape": "a call of the function on tensors of device='meta'",
    "gamma": "it with remat.random.uniform or normal: it has no sampler",
    "jit": "torch.compile",
    "lax": "remat.chain",
    "map": "torch.vmap(fn, chunk_size=n), or remat.chain.scan",
    "pmap": "torch.distributed: DDP, fully_shard or DTensors",
    "stop_gradient": "x.detach()",
    "tree_util": "torch.utils._pytree, or optree",
    "value_and_grad": "torch.func.grad_and_value: it returns the gradient first",
    "vmap": "torch.vmap",
}
for _name in ("grad", "hessian", "jacfwd", "jacrev", "jvp", "linearize", "vjp"):
    _OF_OTHERS[_name] = f"torch.func.{_name}"
_PACKAGE = (
    "{name}: `{name}` is the package here, which is not callable. Write `from {name} "
    "import {name}`, or {name}.{name}(fn)."
)
_ROOM = "remat: {name} is a module, which is not callable. Call a function in it."
_FUNCTION = (
    "remat: `{package}` is the function here, not the package. For {package}.{name} "
    "write `import {package}`, or `from {package} import {first}`."
)
