"""The table in `remat/_torch/tracing.py`: what is said in code that is traced."""

import re

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from remat import remat
from remat._torch import graphs, tracing
from remat._transform import traced


X = torch.ones(3, requires_grad=True)
TABLE = dict(re.findall(r"(?m)^ +`(\w+)` +((?:(?:yes|no|-) *){6})$", tracing.__doc__))
ASK = {name: vars(tracing).get(name, vars(graphs).get(name)) for name in TABLE}


def said(column):
    """What the table says in a column."""
    rows = {name: words.split()[column] for name, words in TABLE.items()}
    return {name: word == "yes" for name, word in rows.items() if word != "-"}


def asked():
    """What the functions say here."""
    return {name: ask() for name, ask in ASK.items()}


class Asks(nn.Module):
    def forward(self, x):
        self.found = asked()
        return x.sin()


def test_the_table_has_rows():
    assert len(TABLE) == 5


def test_nothing_is_traced_here():
    assert not any(asked().values())


@pytest.mark.parametrize("name", said(0))
def test_dynamo(name):
    ask = ASK[name]
    out = torch.compile(lambda x: (x.sin(), ask()), backend="eager", fullgraph=True)(X)
    assert out[1] == said(0)[name]


def test_aot_autograd(monkeypatch):
    call, found = traced._call, []

    def asking(*args):
        found.append(asked())
        return call(*args)

    monkeypatch.setattr(traced, "_call", asking)
    torch.compile(lambda x: remat(lambda x: x.sin().exp())(x), backend="aot_eager")(X)
    assert found == [said(1), said(2)]


def test_make_fx():
    module = Asks()
    make_fx(module)(X)
    assert module.found == said(3)


def test_export():
    module = Asks()
    with torch.no_grad():
        torch.export.export(module, (X,), strict=False)
    assert module.found == said(4)


def test_fx():
    module = Asks()
    fx.symbolic_trace(module)
    assert module.found == said(5)
    assert not any(asked().values())
