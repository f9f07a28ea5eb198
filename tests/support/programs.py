"""Random programs: small functions of square matrices, as data.

A program is a block: a list of instructions and of blocks in it. An instruction makes
values of those before it; most of them are read by nobody. A block is called as one
function, which is rematerialized as many times as it says. What it returns is chosen at
the end. All values are 3x3, so that everything fits everything, and bounded, so that no
gradient is infinite.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from support.zoo import Cubed, make, plainly
from torch import Tensor
from torch.nn import functional

import remat.random as keyed
from remat import checkpoint_name, policies, remat
from remat.policies import Policy


SIZE = 3
# A tensor that every program may refer to without being passed it.
CAPTURED = torch.linspace(0.5, 1.5, SIZE * SIZE, dtype=torch.double).view(SIZE, SIZE)


# --- Instructions: each makes one matrix, or several, of two ---


class InPlace:
    """Changes of a value of the instruction's own, made of the first."""

    def add_(own, b):
        return own.add_(b, alpha=0.5)

    def mul_(own, b):
        return own.mul_(b.detach().tanh()).add_(0.1)

    def tanh_(own, b):
        return own.tanh_()

    def row(own, b):
        return own[0].copy_(b[1])

    def column(own, b):
        return own[:, 1].mul_(0.5).add_(b[:, 1])

    def item(own, b):
        return own.t()[2].add_(b[:, 0])

    def fill(own, b):
        return own.diagonal().fill_(0.25)

    def view(own, b):
        return own[::2].mul_(2.0)

    def copy(own, b):
        return own.copy_(b * 2)


def changed(change):
    def instruction(a, b):
        own = a * 1.0
        change(own, b)
        return own

    return instruction


def without_derivative(a, b):
    with torch.no_grad():
        scale = a.sigmoid()
    return b * scale + a.detach().cos()


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "exp": lambda a: (a.tanh() * 0.3).exp(),
    "square": lambda a: torch.tanh(a).square(),
    "sigmoid": torch.sigmoid,
    "relu": lambda a: torch.relu(a) + 0.1 * a,
    "double": lambda a: a * 2 - 1,
    "softmax": lambda a: a.softmax(-1),
    "mean": lambda a: a * a.mean().cos(),
    "row sums": lambda a: a - a.sum(-1, keepdim=True).tanh(),
    "norm": lambda a: functional.layer_norm(a, (SIZE,)),
    "cumsum": lambda a: torch.tanh(a).cumsum(0),
    "detach": lambda a: a.detach(),
    "clone": torch.clone,
    "transpose": lambda a: a.mT,
    "reshape": lambda a: a.mT.reshape(SIZE, SIZE),
    "view": lambda a: a.reshape(-1).view(SIZE, SIZE),
    "flip": lambda a: a.flip(0),
    "roll": lambda a: a[1:].new_zeros(1, SIZE).add(a.sum(0)).expand(SIZE, SIZE),
    "diagonal": lambda a: torch.diag_embed(a.diagonal()),
    "triangle": torch.tril,
    "slice": lambda a: torch.cat([a[:, 1:], a[:, :1]], 1),
    "largest": lambda a: a.amax(1, keepdim=True).expand(SIZE, SIZE),
    "sorted": lambda a: a.sort(0).values,
    "topk": lambda a: a.topk(SIZE)[0],
    "branch": lambda a: torch.where(a > 0.5, a.sin(), a.cos()),
    "captured": lambda a: (a * CAPTURED).sin(),
    "captured matmul": lambda a: a @ CAPTURED / SIZE,
    "custom": lambda a: Cubed.apply(a.sin()),
    "stack": lambda a: torch.stack([row.sin() for row in a.unbind(0)]),
    "index": lambda a: a[[2, 1, 0]],
    "expand": lambda a: a[:, :1].expand(SIZE, SIZE),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": lambda a, b: torch.tanh(a) * b,
    "sub": torch.sub,
    "div": lambda a, b: a / (b.square() + 1),
    "matmul": lambda a, b: torch.tanh(a @ b),
    "transposed": lambda a, b: torch.tanh(a) @ b.mT * 0.3,
    "where": lambda a, b: torch.where(a.detach() > 0, a, b),
    "maximum": torch.maximum,
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a.sin(), b.cos()),
    "outer": lambda a, b: torch.outer(a[0], b[:, 0]),
    "linear": lambda a, b: functional.linear(a.tanh(), b.tanh(), b[0]),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "cat": lambda a, b: torch.cat([a[:1], b[1:]]),
    "zeros": lambda a, b: torch.zeros_like(a) + b.cos(),
    "no_grad": without_derivative,
}
SEVERAL: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "split": lambda a, b: tuple(p.expand(SIZE, SIZE) for p in (a * b).split(1)[:2]),
    "unbind": lambda a, b: tuple(torch.outer(r, b[0]).tanh() for r in a.unbind()[:2]),
    "max": lambda a, b: (a.max(0).values.expand(SIZE, SIZE), b.min(1).values * a),
    "qr": lambda a, b: (a.tanh().svd().S.expand(SIZE, SIZE), b),
}
IN_PLACE = {k: changed(f) for k, f in vars(InPlace).items() if not k.startswith("__")}
# From the global stream.
STREAM = {
    "dropout": lambda a, b: functional.dropout(a, 0.5),
    "rand": lambda a, b: a * torch.rand(SIZE, SIZE, dtype=a.dtype),
    "randn_like": lambda a, b: torch.randn_like(a) * b,
}
# What Python decides by a value.
ASKING = {
    "item": lambda a, b: a * float(b.detach().sum() > 0) + b,
    "if": lambda a, b: a.sin() if a.sum() > 0 else b.cos(),
    "count": lambda a, b: a * (b > 0).nonzero().shape[0],
}
# From a key.
KEYED = {
    "dropout": lambda key, a: keyed.dropout(key, a, 0.4),
    "noise": lambda key, a: a + keyed.normal(key, (SIZE, SIZE), dtype=a.dtype),
    "uniform": lambda key, a: keyed.uniform(key, (SIZE, SIZE), dtype=a.dtype).mul(a),
}
NAMES = {name: lambda a, name=name: checkpoint_name(a * 1, name) for name in "pq"}
KINDS: dict[str, dict[str, Callable[..., Any]]] = {
    "unary": UNARY,
    "binary": BINARY,
    "in_place": IN_PLACE,
    "several": SEVERAL,
    "draw": KEYED,
    "name": NAMES,
    "stream": STREAM,
    "asking": ASKING,
}
# A policy that mentions a name which was never given warns.
for _name in NAMES:
    checkpoint_name(CAPTURED, _name)


# --- Programs ---


@dataclass(frozen=True)
class Step:
    """One instruction: what to do, and of which values."""

    kind: str
    name: str
    a: int
    b: int = 0

    def run(self, values: Sequence[Tensor], context: "Context") -> tuple[Tensor, ...]:
        """Return what it makes."""
        context.note(self.name)
        a, b = values[self.a % len(values)], values[self.b % len(values)]
        fn = KINDS[self.kind][self.name]
        if self.kind in ("unary", "name"):
            return (fn(a),)
        if self.kind == "draw":
            return (fn(keyed.fold_in(keyed.key(7), len(values)), a),)
        made = fn(a, b)
        return made if self.kind == "several" else (made,)


@dataclass(frozen=True)
class Context:
    """What nested calls are wrapped in, and what is told of instructions that run."""

    wrap: Callable[[Any], Any] = plainly
    note: Callable[[str], object] = str


@dataclass(frozen=True)
class Block:
    """Instructions and blocks, called as one function.

    Attributes:
        body: the parts.
        results: which of the values it returns: the last for 0, the one before for 1.
        depth: how many times it is wrapped.
        closure: whether it refers to the values before it, and is not passed them.
    """

    body: tuple["Step | Block", ...]
    results: tuple[int, ...] = (0,)
    depth: int = 1
    closure: bool = False

    def run(self, values: Sequence[Tensor], context: Context) -> tuple[Tensor, ...]:
        """Return its results."""

        def evaluated(*args: Tensor) -> dict[str, Any]:
            known = [*values] if self.closure else [*args]
            for part in self.body:
                known += part.run(known, context)
            chosen = [known[-1 - k % len(known)] for k in self.results]
            return {"first": chosen[0], "rest": chosen[1:], "count": len(known)}

        for _ in range(self.depth):
            evaluated = context.wrap(evaluated)
        out = evaluated() if self.closure else evaluated(*values)
        assert out["count"] >= len(values)
        return (out["first"], *out["rest"])


@dataclass(frozen=True)
class Program:
    """A function of matrices, which returns one more value than its block.

    That of the block may be constant.
    """

    block: Block

    def __call__(self, *xs: Tensor, context: Context | None = None) -> list[Tensor]:
        """Run it."""
        x, w = xs[:2]
        outs = self.block.run([*xs, x * 1.0], context or Context())
        return [(x * 1.0).sin() @ w, *(out * 1 for out in outs)]

    def is_nested(self) -> bool:
        """Whether a call is in it."""
        return any(isinstance(part, Block) for part in self.block.body)


# --- Strategies ---


PURE = "unary", "binary", "in_place", "several", "draw", "name"
SMOOTH = "unary", "binary", "in_place", "name"
_places = st.integers(0, 15)
_results = st.lists(_places, min_size=1, max_size=3).map(tuple)


def steps(kinds: tuple[str, ...] = PURE) -> Any:
    """An instruction, of some kinds."""

    def of_kind(kind: str) -> Any:
        names = st.sampled_from([*KINDS[kind]])
        return st.builds(Step, st.just(kind), names, _places, _places)

    return st.sampled_from([*kinds, "unary", "binary"]).flatmap(of_kind)


def blocks(parts: Any, size: int = 4, **fields: Any) -> Any:
    """A block of such parts."""
    body = st.lists(parts, min_size=1, max_size=size).map(tuple)
    fields = {"results": _results, "closure": st.booleans(), **fields}
    return st.builds(Block, body, **fields)


def programs(kinds: tuple[str, ...] = PURE, size: int = 6) -> Any:
    """A program of instructions, and of small blocks of them."""
    inner = blocks(steps(kinds), 3, depth=st.integers(1, 2))
    parts = st.one_of(steps(kinds), steps(kinds), steps(kinds), inner)
    outer = blocks(parts, size, depth=st.just(0), closure=st.just(False))
    return st.builds(Program, outer)


# --- Policies, and how a program is wrapped ---


_LEAVES = [
    policies.nothing_saveable,
    policies.everything_saveable,
    policies.dots_saveable,
    policies.save_only_these_names("p"),
    policies.save_any_names_but_these("q"),
    policies.save_larger_than(8),
    policies.save_ops(torch.ops.aten.sin, torch.ops.aten.tanh, torch.ops.aten.exp),
    policies.save_ops(torch.ops.aten.mul, torch.ops.aten.view, torch.ops.aten.expand),
    policies.everything_saveable.but_offload(to="disk"),
    policies.as_policy(lambda op: len(str(op.func)) % 3 == 0),
]


def _combined(inner: Any) -> Any:
    return st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] | p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] & p[1]),
        inner.map(lambda p: ~p),
    )


POLICIES = st.recursive(st.sampled_from(_LEAVES), _combined, max_leaves=3)


@dataclass(frozen=True)
class Wrapper:
    """The policies of a call and of those in it, and what of them is pruned."""

    outer: Policy | None
    inner: Policy | None
    prune: bool | str

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a program rematerialized, and what is nested in it."""
        nested = Context(lambda fn: remat(fn, policy=self.inner, prune=self.prune))
        wrapped = lambda *xs: fn(*xs, context=nested)
        return remat(wrapped, policy=self.outer, prune=self.prune)


WRAPPERS = st.builds(
    Wrapper,
    outer=st.none() | POLICIES,
    inner=st.none() | POLICIES,
    prune=st.sampled_from([True, True, True, "auto", False]),
)
LEAVES = [make(SIZE, SIZE, seed=s) for s in (51, 52, 53)]
