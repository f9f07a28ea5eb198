"""What the tests of compositions share: a zoo of functions to wrap, and one comparison.

A *transform* here takes a function and returns what was computed with it. It is run
with the function as it is and with the rematerialized one: the results have to be the
same, and the function has to have been evaluated as often as the test says.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
from support.tables import checked
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from remat import remat
from remat.testing import assert_same, count_ops


def make(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.double, generator=generator) * 0.7


W, X = make(4, 4, seed=1), make(4, 4, seed=2)
WS, XS = make(3, 4, 4, seed=3), make(3, 4, 4, seed=4)
V = make(4, 4, seed=5)


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    """Fresh copies that require grad."""
    return [t.clone().requires_grad_() for t in tensors]


class Calling(nn.Module):
    """Calls a layer or a block; `call` says how."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.layer, x)


class Waves(nn.Module):
    """Its record depends on a number, which is no part of the signature."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = x.sin()
        return x.exp().cos()


def scalar(tree: Any) -> Tensor:
    """A loss of all the floating-point tensors in `tree`, curved in each of them."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor)]
    return sum(t.sin().sum() for t in tensors if t.is_floating_point())


# --- The zoo: functions of two 4x4 matrices that return any pytree ---


def elementwise(w, x):
    return (w.sin() * x).exp()


def matmul(w, x):
    return torch.tanh(x @ w) @ w


def outputs(w, x):
    h = x @ w
    return {
        "sin": h.sin(),
        "rest": [w.exp(), None, "name", 3],
        "i": (x.cos(), h.argmax()),
    }


def keywords(params, /, *, inputs, power, squared):
    h = inputs["x"][0] @ params["w"] * params["scale"]
    return h.tanh() ** power if squared else h


def reductions(w, x):
    h = x @ w
    return h.softmax(-1).mean(0), h.logsumexp(0), (h * h).sum(), h.var(1)


def views(w, x):
    h = (x @ w.t()).reshape(2, 8)[:, 1:7].unflatten(1, (2, 3)).transpose(0, 1)
    return h.exp(), w.diagonal().expand(4, 4) * x, torch.cat(x.unbind(0)[1:]).sin()


def in_place(w, x):
    h = x @ w
    h.mul_(2).tanh_()
    out = torch.zeros_like(h)
    out[1:] = h[:-1]
    out += x
    return out * w


class Cubed(torch.autograd.Function):
    """A cube whose derivative is wrong on purpose: it shows who differentiates it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * 5 * x

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return tangent * 5 * x


def custom(w, x):
    return Cubed.apply(x @ w).sin()


def network(w, x):
    h = torch.nn.functional.layer_norm(x @ w, (4,))
    return torch.nn.functional.gelu(h).softmax(-1) @ x


def linear(w, x):
    return 2 * w + x.mT


def positional(fn, w, x):
    return fn(w, x)


def call_with_keywords(fn, w, x):
    params = {"w": w, "scale": 1.5, "none": None}
    return fn(params, inputs={"x": (x, "text")}, power=2, squared=True)


# What is wrapped, and how it is called.
ZOO = {
    "elementwise": (elementwise, positional),
    "matmul": (matmul, positional),
    "outputs": (outputs, positional),
    "keywords": (keywords, call_with_keywords),
    "reductions": (reductions, positional),
    "views": (views, positional),
    "in_place": (in_place, positional),
    "custom": (custom, positional),
    "network": (network, positional),
    "linear": (linear, positional),
}


# --- The comparison ---


class Evaluations:
    """How often something ran, recomputes included.

    What a recompute does to a list or a counter of the user's is dropped. A queue of
    the standard library is none of those objects: it is used as it is.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        # To be named by the function alone, and not through this.
        self.note = self._queue.put

    def __len__(self) -> int:
        return self._queue.qsize()

    def __iter__(self) -> Iterator[Any]:
        """Take out what was noted."""
        while len(self):
            yield self._queue.get()

    def clear(self) -> None:
        """Start again."""
        while len(self):
            self._queue.get()


def counted(fn: Callable[..., Any]) -> tuple[Callable[..., Any], Evaluations]:
    """`fn`, and how often it is evaluated."""
    calls = Evaluations()
    note = calls.note

    def evaluated(*args, **kwargs):
        note(None)
        return fn(*args, **kwargs)

    return evaluated, calls


def ops_of(call: Callable[[], object]) -> Counter[str]:
    """How often each operation runs in a call."""
    with count_ops() as ops:
        call()
    return ops


def assert_rematerialized(
    transform: Callable[[Callable[..., Any]], Any],
    fn: Callable[..., Any],
    *,
    evaluations: int,
    plain: int = 1,
    reassociated: bool = False,
    wrap: Callable[..., Any] = remat,
) -> None:
    """`transform` gives the same for `fn` and `wrap(fn)`, at the evaluations given."""
    fn, calls = counted(fn)
    expected = transform(fn)
    assert len(calls) == plain, f"plain evaluates {len(calls)} times, not {plain}"
    calls.clear()
    actual = transform(wrap(fn))
    assert_same(actual, expected, reassociated=reassociated)
    assert len(calls) == evaluations, f"{len(calls)} evaluations, not {evaluations}"
    assert_not_vanishing(expected)


def rematerialized(fn: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """Make a test of a transform of `fn` by `assert_rematerialized`."""
    check = lambda transform: assert_rematerialized(transform, fn, **how)
    return lambda transform: checked(transform, check)


def assert_not_vanishing(tree: Any) -> None:
    """Where all gradients are zero, equality proves nothing."""
    tensors = [t.detach() for t in tree_leaves(tree) if isinstance(t, Tensor)]
    assert any(t.count_nonzero() > 0 for t in tensors), "only zeros"
    assert all(t.isfinite().all() for t in tensors if t.is_floating_point())


# --- Memory: blocks whose intermediate values all have one size ---


DEPTH, SIZE = 6, 1 << 14
BIG = make(SIZE, seed=6).float()


def block(x):
    for _ in range(DEPTH):
        x = x.sin()
    return x


def plainly(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in the place of remat in the reference."""
    return fn
