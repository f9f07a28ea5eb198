"""Random programs: small functions of two matrices, as data.

A program is a list of instructions. Each makes a value of those before it, or changes
one in place; some return several, some draw from a key, and most of them are read by
nobody. What it returns is chosen at the end. All values are 3x3, so that everything
fits everything, and bounded, so that no gradient is infinite.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import remat.random as keyed
from remat import checkpoint_name, policies, remat


SIZE = 3


# --- Instructions ---


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "exp": lambda a: (a * 0.3).exp(),
    "square": lambda a: torch.tanh(a).square(),
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "double": lambda a: a * 2 - 1,
    "softmax": lambda a: a.softmax(-1),
    "mean": lambda a: a.mean(0, keepdim=True).expand(SIZE, SIZE),
    "norm": lambda a: torch.nn.functional.layer_norm(a, (SIZE,)),
    "cumsum": lambda a: torch.tanh(a).cumsum(0),
    "detach": lambda a: a.detach(),
    "clone": torch.clone,
    "transpose": lambda a: a.t(),
    "reshape": lambda a: a.t().reshape(SIZE, SIZE),
    "flip": lambda a: a.flip(0),
    "roll": lambda a: a[1:].new_zeros(1, SIZE).add(a.sum(0)).expand(SIZE, SIZE),
    "diagonal": lambda a: torch.diag_embed(a.diagonal()),
    "triangle": torch.tril,
    "slice": lambda a: torch.cat([a[:, 1:], a[:, :1]], 1),
    "largest": lambda a: a.amax(1, keepdim=True).expand(SIZE, SIZE),
    "sorted": lambda a: a.sort(0).values,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": lambda a, b: torch.tanh(a) * b,
    "sub": torch.sub,
    "matmul": lambda a, b: torch.tanh(a @ b),
    "transposed": lambda a, b: torch.tanh(a) @ b.t() * 0.3,
    "where": lambda a, b: torch.where(a.detach() > 0, a, b),
    "maximum": torch.maximum,
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a.sin(), b.cos()),
    "linear": lambda a, b: torch.nn.functional.linear(a.tanh(), b.tanh()),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
}
IN_PLACE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda a, b: a.add_(b, alpha=0.5),
    "mul_": lambda a, b: a.mul_(b.detach().tanh()),
    "tanh_": lambda a, b: a.tanh_(),
    "row": lambda a, b: a[0].copy_(b[1]),
    "column": lambda a, b: a[:, 1].mul_(0.5),
    "item": lambda a, b: a.t()[2].add_(b[:, 0]),
    "fill": lambda a, b: a.view(-1)[::4].fill_(0.25),
}
SEVERAL: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "split": lambda a, b: tuple(p.expand(SIZE, SIZE) for p in (a * b).split(1)[:2]),
    "unbind": lambda a, b: tuple(torch.outer(r, b[0]).tanh() for r in a.unbind()[:2]),
    "max": lambda a, b: (a.max(0).values.expand(SIZE, SIZE), b.min(1).values * a),
    "qr": lambda a, b: (a.tanh().svd().S.expand(SIZE, SIZE), b),
}


@dataclass(frozen=True)
class Step:
    """One instruction: what to do, of which values, and how many draws to fold in."""

    kind: str
    name: str
    a: int
    b: int
    nested: bool = False


@dataclass(frozen=True)
class Program:
    """A function of two matrices and a key."""

    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def __call__(self, x: Tensor, w: Tensor, wrap: Any = None) -> list[Tensor]:
        """Run it; `wrap` is what nested calls are wrapped in."""
        values = [x, w, x * 1.0]
        key = keyed.key(7)
        for k, step in enumerate(self.steps):
            values += self._made(step, values, keyed.fold_in(key, k), wrap)
        # One more than the program's own, which may be constant.
        return [
            values[2].sin() @ w,
            *(values[i % len(values)] * 1 for i in self.results),
        ]

    def _made(self, step: Step, values: list[Tensor], key: Any, wrap: Any) -> list:
        a, b = values[step.a % len(values)], values[step.b % len(values)]
        if step.kind == "unary":
            f = UNARY[step.name]
            return [(wrap or _plain)(f)(a) if step.nested else f(a)]
        if step.kind == "binary":
            f = BINARY[step.name]
            return [(wrap or _plain)(f)(a, b) if step.nested else f(a, b)]
        if step.kind == "several":
            return [*SEVERAL[step.name](a, b)]
        if step.kind == "draw":
            return [_drawn(step.name, key, a)]
        if step.kind == "name":
            return [checkpoint_name(a * 1, step.name)]
        changed = a * 1.0
        IN_PLACE[step.name](changed, b)
        return [changed]


def _plain(fn: Any) -> Any:
    return fn


def _drawn(name: str, key: Any, a: Tensor) -> Tensor:
    if name == "dropout":
        return keyed.dropout(key, a, 0.4)
    if name == "noise":
        return a + keyed.normal(key, (SIZE, SIZE), dtype=a.dtype)
    return keyed.uniform(key, (SIZE, SIZE), dtype=a.dtype).mul(a)


DRAWS = ["dropout", "noise", "uniform"]
NAMES = ["p", "q"]
# A policy that mentions a name which was never given warns.
checkpoint_name(torch.ones(len(NAMES)).unbind(), "p")
checkpoint_name(torch.ones(len(NAMES)).unbind(), "q")


def _kinds() -> dict[str, list[str]]:
    return {
        "unary": [*UNARY],
        "binary": [*BINARY],
        "in_place": [*IN_PLACE],
        "several": [*SEVERAL],
        "draw": DRAWS,
        "name": NAMES,
    }


@st.composite
def steps(draw: Any, without: tuple[str, ...] = ()) -> Step:
    """An instruction, of the kinds that are not excluded."""
    kinds = {kind: names for kind, names in _kinds().items() if kind not in without}
    kind = draw(st.sampled_from([*kinds, "unary", "binary"]))
    where = st.integers(0, 15)
    name = draw(st.sampled_from(kinds[kind]))
    nested = kind in ("unary", "binary") and draw(st.booleans())
    return Step(kind, name, draw(where), draw(where), nested)


@st.composite
def programs(draw: Any, size: int = 8, without: tuple[str, ...] = ()) -> Program:
    """A program of some instructions, with one to three results."""
    body = draw(st.lists(steps(without), min_size=1, max_size=size))
    results = draw(st.lists(st.integers(0, 15), min_size=1, max_size=3))
    return Program((*body,), (*results,))


# --- Policies ---


_LEAVES = [
    policies.nothing_saveable,
    policies.everything_saveable,
    policies.dots_saveable,
    policies.save_only_these_names("p"),
    policies.save_any_names_but_these("q"),
    policies.save_larger_than(8),
    policies.save_ops(torch.ops.aten.sin, torch.ops.aten.tanh, torch.ops.aten.exp),
    policies.save_ops(torch.ops.aten.mul, torch.ops.aten.view, torch.ops.aten.expand),
]


def _combined(inner: Any) -> Any:
    return st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] | p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] & p[1]),
        inner.map(lambda p: ~p),
    )


POLICIES = st.recursive(st.sampled_from(_LEAVES), _combined, max_leaves=3)


# --- How a program is wrapped ---


@st.composite
def wrappers(draw: Any) -> Any:
    """What turns a function into its rematerialized self, and what nests inside."""
    policy, inner = draw(POLICIES), draw(st.none() | POLICIES)
    prune = draw(st.sampled_from([True, True, "auto", False]))

    def wrap(program: Program) -> Callable[..., list[Tensor]]:
        def nested(fn: Any) -> Any:
            return remat(fn, policy=inner, prune=prune)

        return remat(lambda x, w: program(x, w, nested), policy=policy, prune=True)

    return wrap
