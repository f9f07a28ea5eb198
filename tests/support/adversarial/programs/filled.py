"""Large workspaces and caches that a call fills, by many operations, and reads."""

import torch
from support.adversarial.program import State, family, leaf, loop, observed, work
from torch import nn


ROWS = 1100  # of 16 numbers: more elements than what is copied in each call


def rows(x, i):
    """Return what is written: a constant that depends on the call."""
    return (x.detach() * (i + 1)).expand(ROWS, 16)


EACH = torch.arange(ROWS)[:, None].expand(ROWS, 16)
EVEN = EACH % 2 == 0

# What fills a space, of `x` and the number of the call.
WRITES = {
    "copy": "space.copy_(rows(x, i))",
    "fill": "space.fill_(i + 0.5)",
    "zero and add": "space.zero_().add_(rows(x, i))",
    "slices": "space[:] = rows(x, i)",
    "halves": "space[:500], space[500:] = (i, i + 1)",
    "every second": "space[::2], space[1::2] = (i, x.detach())",
    "columns": "for k in range(16): space[:, k] = x.detach()[k] * i",
    "unbound": "for k, at in enumerate(space.unbind(1)): at.fill_(x.detach()[k])",
    "chunks": "for k, part in enumerate(space.chunk(4)): part.fill_(k + i)",
    "transposed": "space.t().copy_(rows(x, i).t())",
    "viewed": "space.view(-1)[:] = rows(x, i).reshape(-1)",
    "strided": "space.as_strided((ROWS, 16), (16, 1)).copy_(rows(x, i))",
    "masked": "space.masked_fill_(EVEN, 1.0 + i).masked_fill_(~EVEN, 2.0)",
    "by a mask": "space[torch.arange(ROWS) < 2 + i] = x.detach()",
    "scattered": "space.scatter_(0, EACH, rows(x, i))",
    "indexed": "space.index_copy_(0, torch.arange(ROWS).flip(0), rows(x, i))",
    "index filled": "space.index_fill_(0, torch.arange(ROWS), 2.0 + i)",
    "put": "space.put_(torch.arange(ROWS * 16), rows(x, i).reshape(-1))",
    "one row": "space[i] = x.detach()",
    "one row by index": "space[torch.tensor([i])] = x.detach()",
    "one row by narrow": "space.narrow(0, i, 1).copy_(x.detach())",
    "one row by select": "space.select(0, i).copy_(x.detach())",
    "one row by slice": "space[i:i + 1, :] = x.detach()",
    "one column": "space[:, i] = x.detach()[i]",
    "diagonal": "space.fill_diagonal_(1.0 + i)",
    "product": (
        "torch.mm(torch.ones(ROWS, 1).double(), x.detach()[None] * i, out=space)"
    ),
    "sum of": "torch.add(rows(x, i), 1.0, out=space)",
    "joined": "torch.cat([rows(x, i)[:100], rows(x, i)[100:]], out=space)",
    "stacked": "torch.stack([*rows(x, i)], out=space)",
    "chosen": "torch.clamp(rows(x, i), min=0.0, out=space)",
    "cumulated": "torch.cumsum(rows(x, i), 0, out=space)",
    "sorted into": "torch.sort(rows(x, i), out=(space, torch.empty_like(EACH)))",
    "added by an index": (
        "space.zero_().index_add_(0, torch.tensor([1, 1, i]), x.detach().expand(3, 16))"
    ),
    "scattered and added": "space.zero_().scatter_add_(0, EACH[:1], x.detach()[None])",
    "scattered and reduced": (
        'space.fill_(1.0).scatter_reduce_(0, EACH[:9], rows(x, i), "amax")'
    ),
    "masked and scattered": "space.masked_scatter_(EVEN | ~EVEN, rows(x, i))",
    "two lists": "space.fill_(0.5); space[[0, 1, 2], [3, 4, 5]] = 2.5 + i",
    "by a list of tensors": "torch._foreach_zero_([space]); space[i] = x.detach()",
    "drawn": "space.normal_()",
    "drawn uniformly": "space.uniform_(0, 1)",
    "drawn by out": "torch.randn(ROWS, 16, out=space)",
    "drawn discretely": "space.bernoulli_(0.5)",
    "foreach": "torch._foreach_copy_([*space.chunk(2)], [*rows(x, i).chunk(2)])",
    "rolled": "space.copy_(torch.roll(rows(x, i), 1, 0))",
    "padded": "space.copy_(nn.functional.pad(rows(x, i)[1:], (0, 0, 1, 0)))",
    "reshaped in place": "space.t_().copy_(rows(x, i).t()); space.t_()",
    "written twice": "space.copy_(rows(x, i)); space[:10] = 3.0",
}


def writing(statement):
    """Return a function that runs a statement."""
    found = {}
    exec(f"def write(space, x, i):\n    {statement}", globals(), found)
    return found["write"]


WRITES = {name: writing(statement) for name, statement in WRITES.items()}
WHOLE = {n: w for n, w in WRITES.items() if not n.startswith(("one ", "by a", "diag"))}


@family(**WHOLE)
def a_workspace(write):
    space, at = torch.zeros(ROWS, 16, dtype=torch.double), State(i=0)

    def fn(x):
        write(space, x, at.i)
        return (work(x) * space).mean(0).tanh()

    def after():
        at.i += 1

    return loop(fn, after=after, state=lambda: space)


@family(**WRITES)
def a_cache_passed(wrap, write):
    space = torch.zeros(ROWS, 16, dtype=torch.double)
    run, seen = (
        wrap(lambda x, space, i: write(space, x, i) or read(x, space, i)),
        [],
    )
    for i in range(3):
        x = leaf(seed=i)
        out = run(x, space, i)
        out.sum().backward()
        seen.append(observed((out, x.grad, space)))
    return seen


def read(x, space, i):
    return (work(x) * space[i]).tanh() + space[: i + 1, : i + 1].sum()


@family(**WRITES)
def a_buffer_of_a_module(write):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("space", torch.zeros(ROWS, 16, dtype=torch.double))
            self.i = 0

        def forward(self, x):
            write(self.space, x, self.i)
            self.i += 1
            return read(x, self.space, self.i - 1)

    cache = Cache()
    return loop(cache, state=lambda: (cache.space, cache.i))


@family(**WHOLE)
def a_workspace_in_a_call_within(wrap, write):
    space = torch.zeros(ROWS, 16, dtype=torch.double)

    def fn(x):
        write(space, x, 2)
        return (work(x) * space).mean(0).tanh()

    run = wrap(fn)
    return loop(wrap(lambda x: run(x * 1.5).sin()), state=lambda: space)(lambda f: f)
