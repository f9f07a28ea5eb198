"""The tables of docs/migrating.md that compare, cell by cell.

The page is the source: each cell says ``works``, the error it raises with a part of its
message, or ``wrong`` with the number that came out and the right one.
"""

import builtins
import contextlib
import inspect
import pkgutil
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from support.zoo import plainly
from torch.utils.checkpoint import (
    checkpoint as torch_checkpoint,
    create_selective_checkpoint_contexts,
)

import remat
from remat.testing import assert_same


PAGE = Path(__file__).parents[2] / "docs/migrating.md"


def torch_remat_checkpoint(fn):
    torch_remat = pytest.importorskip("torch_remat")
    return torch_remat.checkpoint()(fn)


SYSTEMS = {
    "torch, non-reentrant": lambda fn: partial(
        torch_checkpoint, fn, use_reentrant=False
    ),
    "`torch_remat` 0.2.2": torch_remat_checkpoint,
}

x = torch.tensor([1.0, 2.0, 3.0])
xs = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]])


def f(x):
    return x.sin().sin().sum()


def leaf():
    return x.clone().requires_grad_()


# Each case takes a checkpoint (the identity, for plain) and returns what it computes.


def gradient(loss, q=None):
    """The gradient of a loss by `.backward()`, at the point or a batch of points."""
    q = leaf() if q is None else q
    loss(q).backward()
    return q.grad


def double_backward(ckpt):
    q = leaf()
    (first,) = torch.autograd.grad(ckpt(f)(q), q, create_graph=True)
    return torch.autograd.grad(first.sum(), q)


def func_vjp(ckpt):
    out, vjp = torch.func.vjp(ckpt(f), x)
    return out, vjp(torch.ones(()))


def compiled(transform):
    """A case: `transform` of the checkpoint, compiled as one graph."""

    def case(ckpt):
        torch._dynamo.reset()
        fn = transform(ckpt(f))
        try:
            return torch.compile(fn, fullgraph=True, backend="aot_eager")(x)
        finally:
            # A compilation that fails under torch.func leaves them disabled.
            torch._C._autograd._saved_tensors_hooks_enable()

    return case


def two_backwards(ckpt):
    q = leaf()
    out = ckpt(f)(q)
    out.backward(retain_graph=True)
    out.backward()
    return q.grad


def batch():
    return xs.clone().requires_grad_()


def some_inputs(ckpt):
    q = leaf()
    ckpt(f)(q * 1).backward(inputs=[q])
    return q.grad


def functional_call(ckpt):
    class Cube(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.constant_(self.inner.weight, 2.0)

        def forward(self, z):
            return ckpt(lambda y: self.inner(y) ** 3)(z)

    weight = torch.full((1, 1), 10.0, requires_grad=True)
    z = torch.ones(1, 1, requires_grad=True)
    params = {"inner.weight": weight}
    torch.func.functional_call(Cube(), params, (z,)).sum().backward()
    return weight.grad


def batch_norm_updates(ckpt):
    norm = torch.nn.BatchNorm1d(2)
    q = torch.randn(4, 2, requires_grad=True)
    ckpt(norm)(q).sum().backward()
    return norm.num_batches_tracked


def mutated_closure(ckpt):
    scale = torch.tensor([2.0])
    q = torch.tensor([3.0], requires_grad=True)
    out = ckpt(lambda z: (z * scale) ** 2)(q)
    if ckpt is not plainly:  # plain refuses this too; the right answer is without it
        scale.fill_(5.0)
    out.sum().backward()
    return q.grad


def generator_inside(ckpt):
    """For f homogeneous of degree 2, x·f'(x) / 2f(x) is 1 if the masks agree."""
    generator = torch.Generator().manual_seed(0)

    def dropped(z):
        mask = torch.bernoulli(torch.full((8,), 0.5), generator=generator)
        return ((z * mask) ** 2).sum()

    q = torch.ones(8, requires_grad=True)
    out = ckpt(dropped)(q)
    out.backward()
    return ((q * q.grad).sum() / (2 * out)).detach()


def empty_cache(ckpt):
    """Keys and values are kept, as language models do in their first call."""
    cache = []
    weight = torch.eye(3).requires_grad_()

    def attend(z):
        cache.append(z @ weight)
        keys = torch.cat(cache)
        return (z @ keys.T).softmax(-1) @ keys

    q = xs.clone().requires_grad_()
    ckpt(attend)(q).square().sum().backward()
    return weight.grad.norm()


def counter(ckpt):
    calls = []

    def counted(z):
        calls.append(None)
        return f(z)

    ckpt(counted)(leaf()).backward()
    return torch.tensor(len(calls))


def loss_in_attribute(ckpt):
    class Router(torch.nn.Module):
        def forward(self, z):
            weights = z.softmax(-1)
            self.loss = weights.square().sum()
            return weights * z

    q, router = leaf(), Router()
    out = ckpt(router)(q).sum()
    (out + router.loss).backward()
    return q.grad.norm()


CASES = {
    "`.backward()`": lambda ckpt: gradient(ckpt(f)),
    "`torch.autograd.grad`": lambda ckpt: torch.autograd.grad(ckpt(f)(q := leaf()), q),
    "double backward": double_backward,
    "`torch.func.grad`": lambda ckpt: torch.func.grad(ckpt(f))(x),
    "`torch.func.vjp`": func_vjp,
    "`torch.func.hessian`": lambda ckpt: torch.func.hessian(ckpt(f))(x),
    "`torch.func.jvp`": lambda ckpt: torch.func.jvp(ckpt(f), (x,), (x,)),
    "`vmap`, forward only": lambda ckpt: torch.vmap(ckpt(f))(xs),
    "`vmap`, then `.backward()`": lambda ckpt: gradient(
        lambda q: torch.vmap(ckpt(f))(q).sum(), batch()
    ),
    "`vmap(grad)`": lambda ckpt: torch.vmap(torch.func.grad(ckpt(f)))(xs),
    "`torch.compile(grad(f))`": compiled(torch.func.grad),
    "`torch.compile` of `vmap(grad(f))`": compiled(
        lambda fn: lambda x: torch.vmap(torch.func.grad(fn))(x.expand(2, 3))
    ),
    "two backwards of one graph": two_backwards,
    "nested in itself": lambda ckpt: gradient(ckpt(lambda z: ckpt(f)(z).sin())),
    "a function returning a dict": lambda ckpt: gradient(
        lambda q: ckpt(lambda z: {"a": z.sin()})(q)["a"].sum()
    ),
    "a keyword argument called `debug`": lambda ckpt: gradient(
        lambda q: ckpt(lambda z, debug: f(z) * debug)(q, debug=3.0)
    ),
    "`functional_call` around it, backward outside": functional_call,
    "`BatchNorm` in training: updates of its buffers": batch_norm_updates,
    "a captured tensor changed before backward": mutated_closure,
    "a `torch.Generator` inside": generator_inside,
    "`backward(inputs=...)`": some_inputs,
    "a cache of keys that is empty at the call": empty_cache,
    "a list that the function appends to": counter,
    "a loss that is left in an attribute": loss_in_attribute,
}

# Rows of the table that stand for several cases.
TOGETHER = {
    "`torch.func.grad`, `vjp`, `hessian`, `vmap(grad)`": (
        *("`torch.func.grad`", "`torch.func.vjp`"),
        *("`torch.func.hessian`", "`vmap(grad)`"),
    ),
    "`torch.compile` of `grad(f)`, `vmap(grad(f))`": (
        *("`torch.compile(grad(f))`", "`torch.compile` of `vmap(grad(f))`"),
    ),
    "`torch.func.jvp`, `vmap`": ("`torch.func.jvp`", "`vmap`, forward only"),
}
# What the text below the table says to work everywhere.
EVERYWHERE = {
    *("`.backward()`", "`backward(inputs=...)`", "two backwards of one graph"),
    *(
        "`torch.autograd.grad`",
        "double backward",
        "a loss that is left in an attribute",
    ),
}
REFUSED = {"a captured tensor changed before backward": "MutationError"}  # by remat


def table():
    """Yield (case, system, cell) for every cell of the page's table."""
    _, found, rest = PAGE.read_text().partition("| call |")
    block = (found + rest).split("\n\n")[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in block.splitlines()
    ]
    header = rows[0]
    for row in rows[2:]:  # below the header and its rule
        for system, cell in zip(header[1:], row[1:], strict=True):
            for case in TOGETHER.get(row[0], row[:1]):
                yield case, system, cell


# What a peer would call such a thing, in a name or in a parameter.
WORDS = {
    "a budget": "budget|limit",
    "draws from a key": r"\bkey|random|dropout",
    "a report": "explain|report",
    "policies side by side": "compare",
    "long loops": "scan|loop|chain",
    "hides a value from all who store it": r"\bscope",
}


def offers():
    """Yield (row, system, cell) for every cell of the page's second table."""
    block = PAGE.read_text().partition("offers of the rest:\n\n")[2]
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in block.split("\n\n")[0].splitlines()
    )
    for row in rows:
        for system, cell in zip(header, row, strict=True):
            yield row[0].partition(":")[0], system.split("`")[1], cell


def public(module):
    """The public names of a module, and the parameters of its functions."""
    names = getattr(module, "__all__", None) or vars(module)
    for name in names:
        value = getattr(module, name)
        if not name.startswith("_") and callable(value):
            yield name
            with contextlib.suppress(TypeError, ValueError):
                yield from inspect.signature(value).parameters


@pytest.mark.parametrize(("row", "system", "cell"), list(offers()))
def test_what_each_offers_besides_is_true(row, system, cell):
    module = pytest.importorskip(system)
    for name in re.findall(r"`([\w.]+)`", cell):
        assert pkgutil.resolve_name(name) is not None
    if cell.startswith("none"):
        assert not [n for n in public(module) if re.search(WORDS[row], n)]


def number(value):
    return "None" if value is None else f"{value.item():.3g}"


def check(cell, case, system):
    kind, detail = re.fullmatch(r"(\w+)(?: \((.*)\))?", cell).groups()
    if kind.endswith("Error"):
        places = (builtins, remat, torch.utils.checkpoint)
        error = next(getattr(place, kind) for place in places if hasattr(place, kind))
        with pytest.raises(error, match=re.escape(detail or "")):
            case(system)
        return
    want, got = case(plainly), case(system)
    if kind == "works":
        assert_same(got, want)
    else:
        assert kind == "wrong"
        assert detail == f"{number(got)} for {number(want)}"


@pytest.fixture
def quietly():
    """A compilation that fails warns first; the outcome is what counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quietly")
@pytest.mark.parametrize(("case", "system", "cell"), list(table()))
def test_the_table_in_the_docs_is_true(case, system, cell):
    check(cell, CASES[case], SYSTEMS[system])


@pytest.mark.usefixtures("quietly")
@pytest.mark.parametrize("case", CASES)
def test_remat_is_right_in_each_row(case):
    check(REFUSED.get(case, "works"), CASES[case], remat.remat)


@pytest.mark.parametrize("case", sorted(EVERYWHERE))
@pytest.mark.parametrize("system", SYSTEMS)
def test_what_works_everywhere(case, system):
    check("works", CASES[case], SYSTEMS[system])


@pytest.mark.parametrize("case", ["double backward", "two backwards of one graph"])
def test_torchs_selective_checkpoint_has_one_backward(case):
    aten = torch.ops.aten
    contexts = partial(create_selective_checkpoint_contexts, [aten.sin.default])
    select = {"use_reentrant": False, "context_fn": contexts}
    with pytest.raises(RuntimeError, match="backward an extra time"):
        CASES[case](lambda fn: partial(torch_checkpoint, fn, **select))


def test_the_page_has_a_cell_for_every_case_and_system():
    cells = {(case, system) for case, system, _ in table()}
    shown = CASES.keys() - EVERYWHERE
    assert cells == {(case, system) for case in shown for system in SYSTEMS}
