"""`saved_residuals`: what each entry of the list says, and in which order they come."""

import types

import pytest
import torch
from support.kept import leaves, origins
from support.zoo import make
from torch import nn
from torch.nn.functional import dropout
from torch.testing._internal.two_tensor import TwoTensor

from remat import (
    checkpoint_name,
    policies,
    print_saved_residuals,
    remat as ckpt,
    saved_residuals,
)
from remat._graph.graph import foreign_tensors_at, handles_at, nodes_of


def ones(*shape):
    return torch.ones(shape, requires_grad=True)


def x_is(*names):
    return [f"from the argument {name}" for name in names]


# --- The list ---


class Circular(torch.autograd.Function):
    """Holds its own output, and so its own node, where nobody looks."""

    @staticmethod
    def forward(ctx, x):
        out = x.exp()
        ctx.kept = iter([out, x.cos()])
        return out

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent


class Deep(torch.autograd.Function):
    """Keeps its input where nobody looks."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = iter([x])
        return x * 2

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 2


def with_garbage(x):
    cycle = [x.cos().detach()]
    cycle.append(cycle)
    return x.exp()


STASH = []


def with_stash(x):
    STASH.append(x.cos().detach())
    return x.exp()


def without_grad(x):
    with torch.no_grad():
        y = x.exp().sin()
    return {"out": x.sin(), "aside": y, "name": "text"}


def product(*xs):
    return xs[0].sin() * xs[1].sin()


TABLE = {"scale": torch.ones(4)}


def inner(x):
    return x * TABLE["scale"]


def named_twice(x):
    y = checkpoint_name(checkpoint_name(x.exp(), "a"), "b")
    return checkpoint_name(y, "a")


def named_and_overwritten(x):
    return checkpoint_name(x.neg(), "y").exp_()


def named_views(x):
    row = checkpoint_name(x[0], "row").sin()
    return row + checkpoint_name(x.exp()[1], "view")


def named_capture(scale):
    return lambda x: x * checkpoint_name(scale, "scale")


M, N, ROW, LEAF = make(4, 4, seed=0), make(4, 4, seed=1), make(3, seed=1), ones(4)
# The function, its arguments, and what is kept.
LISTS = {
    "exp": (lambda x: x.exp(), [M], ["output of exp"]),
    "sin of sin": (lambda x: x.sin().sin(), [M], [*x_is("x"), "output of sin"]),
    "a sum": (lambda x: x + x, [M], []),
    "zeros_like": (lambda x: torch.zeros_like(x) * x, [M], ["output of zeros_like"]),
    "a diagonal": (lambda x: torch.einsum("ii->i", x), [M], []),
    "a product": (lambda x, y: x @ y, [M, N], x_is("x", "y")),
    "a sum of a sine": (lambda x, y: x.sin() + y, [M, N], x_is("x")),
    "no tensor": (lambda x: None, [LEAF], []),
    "a number": (lambda x: 3.0, [LEAF], []),
    "what is detached": (lambda x: ["text", x.sin().detach()], [LEAF], []),
    "outputs without grad": (without_grad, [LEAF], x_is("x")),
    "an object that is no pytree": (
        lambda x: types.SimpleNamespace(y=x.exp()),
        [LEAF],
        ["output of exp"],
    ),
    "garbage": (with_garbage, [LEAF], ["output of exp"]),
    "what is stashed elsewhere": (with_stash, [LEAF], ["output of exp"]),
    "a function that holds itself": (
        Circular.apply,
        [LEAF],
        ["output of exp", "output of cos"],
    ),
    "an input out of sight": (lambda x: Deep.apply(x), [LEAF], x_is("x")),
    "an input out of sight, without grad": (
        lambda x: Deep.apply(x),
        [torch.ones(4)],
        x_is("x"),
    ),
    "a capture of a capture": (
        lambda x: inner(x),
        [torch.ones(4)],
        ["from the captured `inner.TABLE['scale']`"],
    ),
    "something that requires grad beside": (
        lambda x, y: x * y,
        [torch.ones(3), ones(3)],
        x_is("x"),
    ),
    "an integer beside": (
        lambda x, i: x * i,
        [torch.ones(3), torch.arange(3)],
        x_is("i"),
    ),
    "the history of an argument": (torch.exp, [ones(4).exp().sin()], ["output of exp"]),
    "a subclass": (
        lambda t: t.sin(),
        [TwoTensor(torch.ones(4), torch.ones(4))],
        x_is("t", "t"),
    ),
    "a subclass, remat": (
        ckpt(lambda t: t.sin()),
        [TwoTensor(torch.ones(4), torch.ones(4))],
        x_is("t", "t"),
    ),
    "two names": (named_twice, [ROW], ["named 'a', 'b'"]),
    "a name that is written over": (named_and_overwritten, [ROW], ["output of exp_"]),
    "named views": (named_views, [make(2, 3, seed=1)], [*x_is("x"), "named 'view'"]),
    "a captured tensor with a name": (
        named_capture(make(3, seed=2)),
        [ROW],
        ["from the captured `scale`"],
    ),
}


@pytest.mark.parametrize(("fn", "args", "expected"), LISTS.values(), ids=list(LISTS))
def test_what_is_listed_of(fn, args, expected):
    assert origins(fn, *args) == expected


def test_varargs_are_named_by_position():
    assert origins(product, ones(4), ones(4))[:2] == x_is("xs[0]", "xs[1]")


def test_an_argument_does_not_require_grad_after_the_report():
    x, scale = torch.ones(3), torch.ones(3)
    assert origins(lambda x: x * scale, x) == ["from the captured `scale`"]
    assert not x.requires_grad


def test_the_history_of_a_captured_tensor_is_not_part_of_the_function():
    captured = ones(4).exp().sin()
    assert origins(lambda y: y * captured, torch.ones(4)) == x_is("y")
    assert origins(lambda y: y.sin() * captured, torch.ones(4)) == ["output of sin"]


def test_what_an_older_graph_saved_may_be_freed():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    y = Double.apply(ones(3)).sin()
    y.sum().backward()
    (found,) = saved_residuals(lambda: y.exp())
    assert found.origin == "output of exp"


def test_a_name_given_elsewhere_changes_no_report():
    y = make(3, seed=1)
    assert origins(torch.exp, y) == ["output of exp"]
    checkpoint_name(y, "y")
    assert origins(torch.exp, y) == ["output of exp"]


def test_no_grad_around_the_report_does_not_empty_it():
    with torch.no_grad():
        assert origins(torch.exp, torch.ones(3)) == ["output of exp"]
    with torch.inference_mode():
        assert origins(lambda x: x.exp(), torch.ones(3)) == []  # cannot be saved


def test_arguments_come_in_order_then_captured_then_program_order():
    """JAX's, item 43."""
    scale, table = make(4, seed=1), torch.arange(4.0).double()

    def f(x, y, *, z):
        h = checkpoint_name((x["b"] * x["a"][0]).sin(), "h") * z * scale
        return h.exp() * y * torch.tensor([1.0, 2.0, 3.0, 4.0]) * table

    a, b, y, z = leaves(*[(4,)] * 4)
    found = saved_residuals(f, {"b": b, "a": [a]}, y, z=z)
    assert [r.origin for r in found][:7] == [
        "from a constant",
        "from the argument x['b']",  # the order of the dict
        "from the argument x['a'][0]",
        "from the argument y",
        "from the argument z",
        "from the captured `scale`",
        "from the captured `table`",
    ]
    made = [r.origin.removeprefix("output of ") for r in found[7:]]
    assert made == ["mul", "named 'h'", "exp"]


def test_parameters_of_a_module_itself_are_named_by_self():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for fn in (module, ckpt(module)):
        found = origins(fn, torch.randn(2, 4))
        assert found[0] == "from the argument input"
        if fn is not module:
            assert "from the captured `self.0.weight`" in found


def test_the_states_of_streams_that_remat_sets_back_are_listed_besides():
    (x,) = leaves((64,))
    found = saved_residuals(ckpt(lambda x: dropout(x, 0.5)), x)
    (state,) = [r for r in found if r.dtype is None]
    assert state.origin == "state of the stream: cpu"
    assert state.nbytes > 2496
    assert all(r.dtype for r in saved_residuals(ckpt(torch.sin), x))


def test_the_function_of_a_call_is_not_searched_for_what_the_graph_keeps():
    # It may refer to anything: here to a tensor that no node saved.
    aside, kept = torch.full((3,), 2.0), torch.full((5,), 3.0)

    def f(x):
        return (x * x).sin().sum() if len(aside) == 3 else x

    (x,) = leaves((4,))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t + kept[0]):
        h = x.clone()
        out = ckpt(f)(h)
    nodes = [node for node, _ in nodes_of([out])]
    assert sum(len(handles_at(node)) for node in nodes) > 0
    found = {id(t) for node in nodes for t in foreign_tensors_at(node)}
    assert found == {id(h), id(kept)}


def test_a_function_that_acts_otherwise_under_a_mode_is_listed_as_it_acts_there():
    """A limit: it keeps the lengths as tensors here, and as numbers otherwise."""
    x = torch.randn(6, 2, 5, requires_grad=True)
    lengths = torch.tensor([6, 6])
    targets = torch.ones(2, 3, dtype=torch.long)

    def f(x):
        return nn.functional.ctc_loss(x, targets, lengths, lengths // 2)

    found = saved_residuals(f, x.log_softmax(-1))
    assert {r.readers for r in found if r.dtype is torch.long} >= {("ctc_loss",)}


# --- One entry, and how it prints ---


def test_source_and_readers_of_a_residual():
    (x,) = leaves((4, 4))

    def f(x):
        return x.sin().cos() @ x

    sine = next(r for r in saved_residuals(f, x) if r.origin == "output of sin")
    file, line = sine.source.rsplit(":", 1)
    assert file == __file__
    assert line == f"{f.__code__.co_firstlineno + 1}, in f"
    assert sine.readers == ("cos",)
    assert (sine.dtype, sine.device) == (torch.double, torch.device("cpu"))
    argument = saved_residuals(f, x)[0]
    assert (argument.source, argument.readers) == ("", ("sin", "mm"))


def test_the_line_of_a_named_value_is_that_of_the_name():
    def f(x):
        y = x.exp()
        y = y * 1.0
        return checkpoint_name(y.sin(), "a") * checkpoint_name(y, "b")

    found = {r.origin: r.source for r in saved_residuals(f, make(3, seed=1))}
    line = f"{__file__}:{f.__code__.co_firstlineno + 3}, in f"
    assert (found["named 'a'"], found["named 'b'"]) == (line, line)


def totals_of(capsys, fn, *args):
    print_saved_residuals(fn, *args)
    return capsys.readouterr().out.splitlines()[-3:]


def test_parameters_are_counted_apart_from_activations(capsys):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
            self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

        def forward(self, x):
            return self.down((self.up(x) * self.frozen).sin())

    x, model = torch.ones(2, 4), Model()
    # The frozen scale, and the second weight; the first only gets a gradient.
    weights = model.frozen.nbytes + model.down.weight.nbytes
    assert totals_of(capsys, ckpt(model.forward), x)[1:] == [
        f"parameters: {weights + 4 * (4 * 8 + 8 + 4):,} bytes in 5 residuals",
        f"total: {weights + 4 * (4 * 8 + 8 + 4) + x.nbytes:,} bytes in 6 residuals",
    ]
    assert totals_of(capsys, model, x) == [
        f"activations: {x.nbytes + 2 * 2 * 8 * 4:,} bytes in 3 residuals",
        f"parameters: {weights:,} bytes in 2 residuals",
        f"total: {x.nbytes + 2 * 2 * 8 * 4 + weights:,} bytes in 5 residuals",
    ]


def test_a_leaf_that_requires_grad_is_a_parameter(capsys):
    w, x = ones(4, 4), torch.ones(4)
    assert totals_of(capsys, lambda w, x: (w @ x).sin(), w, x) == [
        "activations: 32 bytes in 2 residuals",
        "parameters: 0 bytes in 0 residuals",
        "total: 32 bytes in 2 residuals",
    ]
    found = saved_residuals(lambda w, x: (w @ x).sin(), w, x.requires_grad_())
    assert [r.is_parameter for r in found] == [True, True, False]


def test_what_is_offloaded_is_counted_in_each_total(capsys):
    w = ones(4, 4)
    policy = policies.dots_saveable.but_offload(to="disk")
    fn = ckpt(lambda w: (w @ w).sin(), policy=policy)
    assert totals_of(capsys, fn, w) == [
        "activations: 64 bytes in 1 residual, 64 of them offloaded",
        "parameters: 64 bytes in 1 residual",
        "total: 128 bytes in 2 residuals, 64 of them offloaded",
    ]
