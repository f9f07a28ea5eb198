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


_Fn: TypeAlias = Callable[[Tensor], Any]


# No compiler runs products of matrices again by itself.
_WEIGHT = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
_PRODUCTS = "mm", "mv", "bmm"


def _block(x: Tensor) -> Tensor:
    return (x @ _WEIGHT).sin() @ _WEIGHT


# --- Ways to run it: each makes of a function one that differentiates it ---


def _total(fn: _Fn) -> _Fn:
    return lambda x: fn(x).sum()


def _backward(fn: _Fn) -> _Fn:
    def run(x: Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        fn(leaf).sum().backward()
        return leaf.grad

    return run


def _backward_twice(fn: _Fn) -> _Fn:
    def run(x: Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(fn(leaf).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.sum(), leaf)

    return run


def _grad(fn: _Fn) -> _Fn:
    return func.grad(_total(fn))


def _grad_twice(fn: _Fn) -> _Fn:
    return func.grad(_total(_grad(fn)))


def _vmap(fn: _Fn) -> _Fn:
    return func.vmap(_grad(fn))


def _jvp(fn: _Fn) -> _Fn:
    return lambda x: func.jvp(_grad(fn), (x,), (x.cos(),))


def _compiled(fn: _Fn) -> _Fn:
    return _backward(torch.compile(fn, backend="aot_eager", fullgraph=True))


_WAYS: dict[str, Callable[[_Fn], _Fn]] = {
    ".backward()": _backward,
    "a second .backward()": _backward_twice,
    "torch.func.grad": _grad,
    "grad of grad": _grad_twice,
    "vmap of grad": _vmap,
    "jvp of grad": _jvp,
    "torch.compile": _compiled,
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


def _outcome(way: Callable[[_Fn], _Fn]) -> str:
    """Run the program both ways; say in a word what comes of it."""
    x = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
    try:
        plain, ours = way(_block), way(remat(_block))
        wanted, found = _leaves(plain(x)), _leaves(ours(x))
        runs = [
            _products(lambda run=run: run(x), is_compiled=way is _compiled)
            for run in (plain, ours)
        ]
    except Exception as error:  # noqa: BLE001 - whatever another torch raises
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    if not all(map(torch.equal, wanted, found)):
        return "differs from plain"
    if runs[1] <= runs[0]:
        return f"does not recompute: {runs[1]} products, and {runs[0]} in plain"
    return f"{_FINE}: {runs[1]} products, and {runs[0]} in plain"


_FINE = "equal, and recomputes"


def _leaves(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _main() -> int:
    lines = {name: _outcome(way) for name, way in _WAYS.items()}
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
