"""Says on one page whether remat works with the Python and torch that are installed.

    python -m remat.testing.selftest

Each way to run a call gets one small program, which runs plain and rematerialized. The
values must be equal bit for bit, and the rematerialized program must run more
products of matrices: those of its recompute. It ends with 1 if something fails.

Rejected: to run the tests of remat. They are not installed, and take long.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, func
from torch.profiler import ProfilerActivity, profile

from remat._base import interpreter
from remat._torch import versions
from remat._transform.api import remat
from remat.testing._counts import count_ops


_TensorFunction: TypeAlias = Callable[[Tensor], Any]


# No compiler runs products of matrices again by itself.
_WEIGHT = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
_PRODUCTS = "mm", "mv", "bmm"


def _block(x: Tensor) -> Tensor:
    return (x @ _WEIGHT).sin() @ _WEIGHT


# --- Ways to run it: each makes of a function one that differentiates it ---


def _backward(fn: _TensorFunction) -> _TensorFunction:
    def run(x: Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        fn(leaf).sum().backward()
        return leaf.grad

    return run


def _backward_twice(fn: _TensorFunction) -> _TensorFunction:
    def run(x: Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(fn(leaf).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.sum(), leaf)

    return run


def _grad(fn: _TensorFunction) -> _TensorFunction:
    return func.grad(lambda x: fn(x).sum())


_COMPILED = "torch.compile"
_WAYS: dict[str, Callable[[_TensorFunction], _TensorFunction]] = {
    ".backward()": _backward,
    "a second .backward()": _backward_twice,
    "torch.func.grad": _grad,
    "grad of grad": lambda fn: _grad(_grad(fn)),
    "vmap of grad": lambda fn: func.vmap(_grad(fn)),
    "jvp of grad": lambda fn: lambda x: func.jvp(_grad(fn), (x,), (x.cos(),)),
    _COMPILED: lambda fn: _backward(torch.compile(fn, backend="aot_eager")),
}


# --- What comes of it ---


def _products(run: Callable[[], Any], *, is_compiled: bool) -> int:
    if not is_compiled:
        with count_ops() as ops:
            run()
        return sum(ops[name] for name in _PRODUCTS)
    # Nothing is compiled under the mode of `count_ops`.
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    names = [event.name.removeprefix("aten::") for event in profiled.events() or ()]
    return sum(map(names.count, _PRODUCTS))


def _outcome(name: str) -> str:
    """Run the program plain and rematerialized; say in a word what comes of it."""
    way, is_compiled = _WAYS[name], name == _COMPILED
    x = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
    try:
        plain, ours = way(_block), way(remat(_block))
        wanted, found = _leaves(plain(x)), _leaves(ours(x))
        in_plain = _products(lambda: plain(x), is_compiled=is_compiled)
        in_ours = _products(lambda: ours(x), is_compiled=is_compiled)
    except Exception as error:  # noqa: BLE001 - whatever another torch raises
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    if not all(map(torch.equal, wanted, found)):
        return "differs from plain"
    said = _FINE if in_ours > in_plain else "does not recompute"
    return f"{said}: {in_ours} products, and {in_plain} in plain"


_FINE = "equal, and recomputes"


def _leaves(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _main() -> int:
    lines = {name: _outcome(name) for name in _WAYS}
    differs = [f"torch: {what}" for what in versions.differences()]
    differs += [f"Python: {what}" for what in interpreter.differences()]
    python = sys.version.split(maxsplit=1)[0]
    version = getattr(sys.modules["remat"], "__version__", "")
    page = [f"remat {version}, torch {torch.__version__}, Python {python}"]
    page += [f"differs from what was tested: {what}" for what in differs]
    page += [f"{name:<22}{line}" for name, line in lines.items()]
    is_fine = not differs and all(line.startswith(_FINE) for line in lines.values())
    page.append("All is well." if is_fine else "Something does not work.")
    sys.stdout.write("\n".join(page) + "\n")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(_main())
