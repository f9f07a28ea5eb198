"""Large workspaces and caches that a call fills, by many operations, and reads."""

import torch
from support.adversarial.program import (
    State,
    family,
    leaf,
    loop,
    observed,
    taking,
    work,
)
from torch import nn


ROWS = 1100  # of 16 numbers: more elements than what is copied in each call


def rows(x, i):
    """Return what is written: a constant that depends on the call."""
    return (x.detach() * (i + 1)).expand(ROWS, 16)


def copy(space, x, i):
    space.copy_(rows(x, i))


def fill(space, x, i):
    space.fill_(i + 0.5)


def zero_and_add(space, x, i):
    space.zero_().add_(rows(x, i))


def slices(space, x, i):
    space[:] = rows(x, i)


def halves(space, x, i):
    space[:500], space[500:] = i, i + 1


def every_second(space, x, i):
    space[::2], space[1::2] = i, x.detach()


def columns(space, x, i):
    for k in range(16):
        space[:, k] = x.detach()[k] * i


def unbound(space, x, i):
    for k, column in enumerate(space.unbind(1)):
        column.copy_(x.detach()[k].expand(ROWS))


def chunks(space, x, i):
    for k, part in enumerate(space.chunk(4)):
        part.fill_(k + i)


def transposed(space, x, i):
    space.t().copy_(rows(x, i).t())


def viewed(space, x, i):
    space.view(-1)[:] = rows(x, i).reshape(-1)


def strided(space, x, i):
    space.as_strided((ROWS, 16), (16, 1)).copy_(rows(x, i))


def masked(space, x, i):
    mask = torch.arange(ROWS)[:, None].expand(ROWS, 16) % 2 == 0
    space.masked_fill_(mask, 1.0 + i).masked_fill_(~mask, 2.0)


def by_a_mask(space, x, i):
    space[torch.arange(ROWS) < 2 + i] = x.detach()


def scattered(space, x, i):
    index = torch.arange(ROWS)[:, None].expand(ROWS, 16)
    space.scatter_(0, index, rows(x, i))


def indexed(space, x, i):
    space.index_copy_(0, torch.arange(ROWS).flip(0), rows(x, i))


def index_filled(space, x, i):
    space.index_fill_(0, torch.arange(ROWS), 2.0 + i)


def put(space, x, i):
    space.put_(torch.arange(ROWS * 16), rows(x, i).reshape(-1))


def one_row(space, x, i):
    space[i] = x.detach()


def one_row_by_index(space, x, i):
    space[torch.tensor([i])] = x.detach()


def one_row_by_narrow(space, x, i):
    space.narrow(0, i, 1).copy_(x.detach())


def one_row_by_select(space, x, i):
    space.select(0, i).copy_(x.detach())


def one_row_by_slice(space, x, i):
    space[i : i + 1, :] = x.detach()


def one_column(space, x, i):
    space[:, i] = x.detach()[i]


def diagonal(space, x, i):
    space.fill_diagonal_(1.0 + i)


def product(space, x, i):
    torch.mm(torch.ones(ROWS, 1).double(), x.detach()[None] * i, out=space)


def sum_of(space, x, i):
    torch.add(rows(x, i), 1.0, out=space)


def joined(space, x, i):
    torch.cat([rows(x, i)[:100], rows(x, i)[100:]], out=space)


def stacked(space, x, i):
    torch.stack([*rows(x, i)], out=space)


def chosen(space, x, i):
    torch.clamp(rows(x, i), min=0.0, out=space)


def cumulated(space, x, i):
    torch.cumsum(rows(x, i), 0, out=space)


def sorted_into(space, x, i):
    index = torch.empty(ROWS, 16, dtype=torch.long)
    torch.sort(rows(x, i), out=(space, index))


def drawn(space, x, i):
    space.normal_()


def drawn_uniformly(space, x, i):
    space.uniform_(0, 1)


def drawn_by_out(space, x, i):
    torch.randn(ROWS, 16, out=space)


def drawn_discretely(space, x, i):
    space.bernoulli_(0.5)


def foreach(space, x, i):
    torch._foreach_copy_(
        [space[:600], space[600:]], [rows(x, i)[:600], rows(x, i)[600:]]
    )


def rolled(space, x, i):
    space.copy_(torch.roll(rows(x, i), 1, 0))


def padded(space, x, i):
    space.copy_(nn.functional.pad(rows(x, i)[1:], (0, 0, 1, 0)))


def reshaped_in_place(space, x, i):
    space.t_().copy_(rows(x, i).t())
    space.t_()


def written_twice(space, x, i):
    space.copy_(rows(x, i))
    space[:10] = 3.0


WRITES = taking(globals(), "space", "x", "i")
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
def a_cache_passed(write):
    def step(wrap):
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

    return step


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
def a_workspace_in_a_call_within(write):
    space = torch.zeros(ROWS, 16, dtype=torch.double)

    def fn(x):
        write(space, x, 2)
        return (work(x) * space).mean(0).tanh()

    def step(wrap):
        run = wrap(fn)
        return loop(wrap(lambda x: run(x * 1.5).sin()), state=lambda: space)(
            lambda f: f
        )

    return step
