"""Says what to write where a name of remat is used wrongly.

Invariant: names that exist are found as without it. The right name is looked for when
an error is raised, with `dir`. Only for the function there is a table, of names in
rooms, and a test compares it with them: to list them would import the rooms.
Rejected: a package that can be called. `remat` would be a function in one file and a
package in the next, and `remat.fit` would depend on which.
"""

import importlib
import pkgutil
import sys
import types
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
        raise TypeError((_ROOM if "." in name else _PACKAGE).format(name=name))

    @override
    def __getattr__(self, name: str) -> NoReturn:
        message = f"module {self.__name__!r} has no attribute {name!r}"
        found = "" if name.startswith("_") else _advice(self, name)
        raise AttributeError(f"{message}. {found}" if found else message)


class _Misplaced:
    """A name of the package that was looked up on a function of its name."""

    def __init__(self, name: str, package: str) -> None:
        first = name.partition(".")[0]
        self._says = _FUNCTION.format(name=name, package=package, first=first)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(self._says)

    def __getattr__(self, name: str) -> NoReturn:
        # What copies or pickles asks for its own names.
        raise AttributeError(name if name.startswith("_") else self._says)

    def __repr__(self) -> str:
        return self._says


def _advice(module: types.ModuleType, name: str) -> str:
    """Say which name is meant; "" if none is like it."""
    package = sys.modules[module.__name__.partition(".")[0]]
    rooms = [r.name for r in pkgutil.iter_modules(package.__path__) if r.name[0] != "_"]
    if name in rooms:  # one that was not imported yet
        return f"Write `import {package.__name__}.{name}`."
    imported = (importlib.import_module(f"{package.__name__}.{room}") for room in rooms)
    there = [m.__name__ for m in (package, *imported) if name in _public(m)]
    if name in _OF_OTHERS and not there:
        return f"Write {_OF_OTHERS[name]}."
    if there:
        return f"Write {' or '.join(f'{place}.{name}' for place in there)}."
    names = _public(module)
    near = [n for n in names if n.startswith(name)]
    near += get_close_matches(name, names, 1, 0.75)
    return f"Do you mean {module.__name__}.{near[0]}?" if near else ""


def _public(module: types.ModuleType) -> list[str]:
    """Return the names of a module that are not private, nor of other packages."""
    names = [name for name in dir(module) if not name.startswith("_")]
    return [name for name in names if _home(getattr(module, name)) == "remat"]


def _home(value: Any) -> str:
    is_module = isinstance(value, types.ModuleType)
    name = getattr(value, "__name__" if is_module else "__module__", "")
    return str(name).partition(".")[0]


# What people look for on the function.
IN_ROOMS = {
    "chain": ("scan", "fori_loop", "while_loop", "sequential"),
    "nn": ("apply", "applied", "enable", "remove"),
    "policies": ("within", "save_only_these_names"),
    "random": ("key", "split", "fold_in", "bind"),
}
# What JAX has, by another name or elsewhere.
_SHARDED = "torch.distributed: DDP, fully_shard or DTensors"
_TREES = "torch.utils._pytree, or optree"
_BRANCH = "`if`, also on values; torch.cond in compiled code"
_OF_OTHERS = {
    "PRNGKey": "remat.random.key",
    "ad_checkpoint": "remat.checkpoint_name, say: its names are in remat itself",
    "associative_scan": "torch._higher_order_ops.associative_scan",
    "block_until_ready": "torch.cuda.synchronize()",
    "checkpoint_policies": "remat.policies",
    "closure_convert": "the function as it is: tensors that it refers to are inputs",
    "cond": _BRANCH,
    "custom_gradient": "a remat.custom_vjp",
    "custom_jvp": "a torch.autograd.Function with a jvp",
    "device_put": "x.to(device)",
    "eval_shape": "a call of the function on tensors of device='meta'",
    "jit": "torch.compile",
    "lax": "remat.chain",
    "make_jaxpr": "torch.fx.experimental.proxy_tensor.make_fx",
    "map": "torch.vmap(fn, chunk_size=n), or remat.chain.scan",
    "named_scope": "torch.profiler.record_function",
    "numpy": "torch",
    "pmap": _SHARDED,
    "pure_callback": "a call of the function itself",
    "shard_map": _SHARDED,
    "stop_gradient": "x.detach()",
    "switch": _BRANCH,
    "tree": _TREES,
    "tree_util": _TREES,
    "value_and_grad": "torch.func.grad_and_value: it returns the gradient first",
    "vmap": "torch.vmap",
}
for _name in ("grad", "hessian", "jacfwd", "jacrev", "jvp", "linearize", "vjp"):
    _OF_OTHERS[_name] = f"torch.func.{_name}"
for _name in (
    *("ball", "beta", "binomial", "cauchy", "chisquare", "dirichlet"),
    *("double_sided_maxwell", "f", "gamma", "generalized_normal", "geometric"),
    *("loggamma", "logistic", "lognormal", "maxwell", "multinomial"),
    *("multivariate_normal", "orthogonal", "pareto", "poisson", "rayleigh"),
    *("t", "triangular", "wald", "weibull_min"),
):
    _OF_OTHERS[_name] = "it with remat.random.uniform or normal: it has no sampler"
_PACKAGE = (
    "{name}: `{name}` is the package here, which is not callable. Write `from {name} "
    "import {name}`, or {name}.{name}(fn)."
)
_ROOM = "remat: {name} is a module, which is not callable. Call a function in it."
_FUNCTION = (
    "remat: `{package}` is the function here, not the package. For {package}.{name} "
    "write `import {package}`, or `from {package} import {first}`."
)
