"""Side effects in what is rematerialized, and graph breaks, in compiled code.

With `fullgraph=True` an effect is refused. Without it the graph breaks at the call, and
eager remat runs: the effect happens once for each call, and the backward recomputes.
"""

import pytest
import torch
from support.tables import rows
from support.traced import TRANSFORMS, W, X, assert_traced, block, ran
from support.zoo import leaves_of
from torch._dynamo.exc import Unsupported

from remat import remat
from remat.testing import assert_same


class Notes:
    """What effects change."""

    def __init__(self):
        self.items, self.number, self.table = [], 0, {}

    @property
    def count(self):
        return len(self.items) + self.number + len(self.table)


EFFECTS = {
    "appending": lambda notes, x: notes.items.append(x.shape[0]),
    "counting": lambda notes, x: setattr(notes, "number", notes.number + 1),
    "storing": lambda notes, x: notes.table.update({len(notes.table): x.shape}),
    "printing": lambda notes, x: print("effect"),  # noqa: T201
}


def within(effect, notes):
    """A block that has an effect in its middle."""

    def fn(w, x):
        y = torch.tanh(x @ w)
        effect(notes, x)
        return torch.tanh(y @ w)

    return fn


# Remat may be applied outside of what is compiled, and inside.
WAYS = {
    "outside": lambda wrap, fn: _summed(wrap(fn)),
    "inside": lambda wrap, fn: lambda w, x: wrap(fn)(w, x).sum(),
}


def _summed(fn):
    return lambda w, x: fn(w, x).sum()


def gradients(fn):
    w, x = leaves_of(W, X)
    value = fn(w, x)
    value.backward()
    return value.detach(), w.grad, x.grad


@rows("way", WAYS, fast=["inside"])
@rows("effect", EFFECTS)
def test_an_effect_is_refused_in_a_full_graph(effect, way, capsys):
    notes = Notes()
    loss = way(remat, within(effect, notes))
    message = (
        r"(?s)rematerialized function must be whole.*no print, no list that grows.*"
        r"Return the values instead\. Without fullgraph=True.*test_traced_effects\.py"
    )
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match=message):
        compiled(*leaves_of(W, X))
    assert notes.count == 0
    assert capsys.readouterr().out == ""
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"]
)
@rows("way", WAYS, fast=["inside"])
@rows("effect", EFFECTS, fast=["appending", "storing"])
def test_an_effect_breaks_the_graph_and_happens_once_in_each_call(
    effect, way, backend, capsys
):
    notes = Notes()
    torch._dynamo.reset()
    compiled = torch.compile(way(remat, within(effect, notes)), backend=backend)
    gradients(compiled)
    gradients(compiled)
    capsys.readouterr()
    before = notes.count
    w, x = leaves_of(W, X)
    value = compiled(w, x)
    effects = notes.count - before + capsys.readouterr().out.count("effect")
    _, ops = ran(value.backward)
    assert ops["tanh"] == 2  # both of the recompute
    assert effects == 1
    assert notes.count - before in (0, 1)
    assert_same((w.grad, x.grad), gradients(_summed(block))[1:])
    torch._dynamo.reset()


# --- Graph breaks ---


def broken(w, x):
    y = torch.tanh(x @ w)
    torch._dynamo.graph_break()
    return torch.tanh(y @ w)


def break_inside(wrap):
    fn = wrap(broken)
    return lambda w, x: fn(w, x).square().sum()


def break_around(wrap):
    fn = wrap(block)

    def loss(w, x):
        y = fn(w, x)
        torch._dynamo.graph_break()
        return y.square().sum()

    return loss


def break_between(wrap):
    fn = wrap(block)

    def loss(w, x):
        y = fn(w, x * 0.5)
        torch._dynamo.graph_break()
        return fn(w, y).square().sum()

    return loss


def disabled_inside(wrap):
    layer = torch.compiler.disable(lambda w, x: torch.tanh(x @ w))
    fn = wrap(lambda w, x: layer(w, layer(w, x)))
    return lambda w, x: fn(w, x).square().sum()


BREAKS = {
    fn.__name__: fn
    for fn in (break_inside, break_around, break_between, disabled_inside)
}


@pytest.mark.filterwarnings("default")  # Dynamo's, of what it was told not to compile
@rows("backend", {k: k for k in ("eager", "aot_eager")}, fast=["aot_eager"])
@rows("program", BREAKS, fast=["break_inside", "break_between"])
def test_a_graph_may_break(program, backend):
    reassociated = program is break_between
    assert_traced(
        program,
        TRANSFORMS["backward"],
        backend,
        fullgraph=False,
        reassociated=reassociated,
    )


def test_an_error_inside_is_the_users():
    def fails(w, x):
        raise ValueError(f"no {x.shape[0]} rows")

    compiled = torch.compile(lambda w, x: remat(fails)(w, x), backend="aot_eager")
    with pytest.raises(ValueError, match="no 4 rows"):
        compiled(*leaves_of(W, X))
    torch._dynamo.reset()
