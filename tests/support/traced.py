"""Compiled code: how to run it, what runs in it, and the table of transforms of it.

A program takes `wrap`, which is remat or does nothing, and returns a loss of `w` and
`x`. A transform compiles a derivative of that loss and calls it.

Dynamo compiles nothing under a mode such as `count_ops`. So what runs is counted by
torch's profiler, in a second call: the first one compiles.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from support.zoo import assert_not_vanishing, leaves_of, plainly
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from remat import remat
from remat.testing import assert_same


Loss = Callable[..., Tensor]
Program = Callable[[Callable[..., Any]], Loss]


def points(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.double, generator=generator) / 3


W, X = points(8, 8, seed=1), points(4, 8, seed=2)
XS = points(3, 4, 8, seed=3)


def block(w: Tensor, x: Tensor) -> Tensor:
    """What most programs rematerialize. Its derivative reads both of its tanh."""
    return torch.tanh(torch.tanh(x @ w) @ w)


# --- What runs ---


def ran(call: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """The result of a call, and how often each operation ran in it."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = call()
    names = [event.name for event in profiler.events() if not _is_passed_on(event)]
    return result, Counter(n.removeprefix("aten::") for n in names if "::" in n)


def _is_passed_on(event: Any) -> bool:
    """Whether a mode was shown the operation. If that ran it, it is another event."""
    return any(child.name == "PythonDispatchMode" for child in event.cpu_children)


def begins_again(ops: Counter[str]) -> bool:
    """Whether a recompute is among what ran, or is held: it begins at a barrier."""
    return ops["remat::barrier"] + ops["remat::same"] > 0


@contextmanager
def compiling() -> Iterator[None]:
    """Dynamo compiles in here, from a clean slate."""
    torch._dynamo.reset()
    before = _graphs()
    yield
    assert _graphs() > before, "Dynamo compiled nothing"
    torch._dynamo.reset()


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# --- What is in graphs ---


class Graphs:
    """A backend that runs AOTAutograd's graphs as they are, and counts what they hold.

    Attributes:
        forward: the operations of forwards. A graph without a backward is one.
        backward: those of backwards.
    """

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.graphs: list[torch.fx.GraphModule] = []
        self._compile = aot_autograd(
            fw_compiler=self._counting(self.forward),
            bw_compiler=self._counting(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return self._compile(graph, inputs)

    def _counting(self, counts: Counter[str]) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
            self.graphs.append(graph)
            counts.update(operations(graph))
            return make_boxed_func(graph.forward)

        return compile_graph


def operations(graph: torch.fx.GraphModule) -> Counter[str]:
    """How often each operation is in a graph, without what nobody reads."""
    graph.graph.eliminate_dead_code()
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    return Counter(_name_of(node.target) for node in calls)


def _name_of(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return str(target) if schema is None else schema.name.removeprefix("aten::")


# --- Transforms: each compiles a derivative of a loss ---


@dataclass(frozen=True)
class Transform:
    """A way to differentiate in compiled code.

    Attributes:
        of: takes a loss and returns what is compiled.
        call: takes that, compiled, and returns values and derivatives.
        factor: how often what the derivative reads runs, against plain. What nobody
            reads is not in a graph.
        eager: the same for the backend "eager", which leaves out nothing.
        reassociated: whether contributions are added up in another order than in plain.
    """

    of: Callable[[Loss], Callable[..., Any]]
    call: Callable[[Callable[..., Any]], Any] = lambda compiled: compiled(W, X)
    factor: float = 2
    eager: float = 2
    reassociated: bool = False


def _backward(compiled: Callable[..., Any]) -> Any:
    w, x = leaves_of(W, X)
    value = compiled(w, x)
    value.backward()
    return value.detach(), w.grad, x.grad


def _step(loss: Loss) -> Callable[..., Any]:
    def step(w: Tensor, x: Tensor) -> Any:
        value = loss(w, x)
        return value.detach(), *torch.autograd.grad(value, (w, x))

    return step


def _run_step(compiled: Callable[..., Any]) -> Any:
    return compiled(*leaves_of(W, X))


def _squares(gradients: Any) -> Tensor:
    return sum(g.square().sum() for g in tree_leaves(gradients))


def _grad_grad(loss: Loss) -> Callable[..., Any]:
    return grad(lambda w, x: _squares(grad(loss, (0, 1))(w, x)), (0, 1))


def _jvp_grad(loss: Loss) -> Callable[..., Any]:
    return lambda w, x: jvp(lambda w: grad(loss)(w, x), (w,), (torch.cos(w),))


def _vjp(loss: Loss) -> Callable[..., Any]:
    def pulled(w: Tensor, x: Tensor) -> Any:
        value, pull = vjp(loss, w, x)
        return value, pull(torch.ones_like(value) * 2)

    return pulled


ONE = (None, 0)
TRANSFORMS = {
    "backward": Transform(lambda loss: loss, _backward),
    "grad": Transform(lambda loss: grad(loss, (0, 1))),
    "vmap_grad": Transform(
        lambda loss: vmap(grad(loss, (0, 1)), ONE), lambda c: c(W, XS)
    ),
    "grad_vmap": Transform(
        lambda loss: grad(lambda w, x: vmap(loss, ONE)(w, x).sum(), (0, 1)),
        lambda c: c(W, XS),
    ),
    "vjp": Transform(_vjp),
    "jacrev": Transform(lambda loss: jacrev(loss, (0, 1)), reassociated=True),
    "jacfwd": Transform(lambda loss: jacfwd(loss, 1), factor=1, eager=1),
    "jvp": Transform(
        lambda loss: lambda w, x: jvp(loss, (w, x), (torch.cos(w), x * 2)),
        factor=1,
        eager=1,
    ),
    "grad_grad": Transform(_grad_grad, factor=4, eager=4, reassociated=True),
    "jvp_grad": Transform(_jvp_grad, factor=2, eager=2, reassociated=True),
    "hessian": Transform(
        lambda loss: hessian(loss, 1), factor=2, eager=2, reassociated=True
    ),
}
STEP = Transform(_step, _run_step)


def differentiated(
    loss: Loss, transform: Transform, backend: Any, **options: Any
) -> tuple[Any, Counter[str]]:
    """What a compiled derivative gives, and what runs in its second call."""
    with compiling():
        options = {"fullgraph": True, **options}
        compiled = torch.compile(transform.of(loss), backend=backend, **options)
        torch.manual_seed(7)
        result = transform.call(compiled)
        _, ops = ran(lambda: transform.call(compiled))
    return result, ops


def assert_traced(
    program: Program,
    transform: Transform,
    backend: str,
    *,
    wrap: Callable[..., Any] = remat,
    factor: float | None = None,
    reassociated: bool = False,
    read: str = "tanh",
    **options: Any,
) -> None:
    """Compiled, a program gives with `wrap` what it gives without, and recomputes.

    Args:
        program: takes `wrap`.
        transform: of its loss.
        backend: of torch.compile.
        wrap: the transform under test.
        factor: how often the operation `read` runs, against plain; by default as the
            transform says.
        reassociated: whether contributions are added up in another order.
        read: an operation that the derivative reads.
        **options: of torch.compile.
    """
    want, once = differentiated(program(plainly), transform, backend, **options)
    got, again = differentiated(program(wrap), transform, backend, **options)
    assert_same(got, want, reassociated=reassociated or transform.reassociated)
    assert_not_vanishing(want)
    if factor is None:
        factor = transform.eager if backend == "eager" else transform.factor
    counts = f"{read} runs {once[read]} times plain and {again[read]} with remat"
    assert once[read] > 0, counts
    assert again[read] == factor * once[read], counts
