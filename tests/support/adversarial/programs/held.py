"""Each way to hold a number, changed in each way between a forward and its recompute."""

import torch
from support.adversarial.holders import ANYTHING, HOLDERS
from support.adversarial.program import (
    back,
    family,
    leaf,
    loop,
    nothing,
    observed,
    ran,
    reversed_loop,
    work,
)
from torch import nn


@family(**HOLDERS)
def replaced_by_the_user(hold):
    read, write, dump = hold()
    new = iter(range(2, 9))
    return loop(lambda x: work(x, read()), between=lambda: write(next(new)), state=dump)


@family(**HOLDERS)
def counted_by_the_function(hold):
    read, write, dump = hold()

    def fn(x):
        write(read() + 1)
        return work(x, read())

    return loop(fn, state=dump)


@family(**HOLDERS)
def read_then_counted_and_recomputed_later(hold):
    read, write, dump = hold()

    def fn(x):
        y = work(x, read())
        write(read() + 1)
        return y.tanh()

    return reversed_loop(fn, state=dump)


@family(**HOLDERS)
def set_once_by_the_function(hold):
    read, write, dump = hold()

    def fn(x):
        if read() == 1:
            write(3)
            x = x * 2
        return work(x, read())

    return loop(fn, state=dump)


@family(**HOLDERS)
def counted_by_a_hook(hold):
    read, write, dump = hold()
    layer = nn.Tanh()
    layer.register_forward_hook(lambda *_: nothing(write(read() + 1)))
    return loop(lambda x: work(layer(x), read()), state=dump)


class Writing(nn.Module):
    def __init__(self, read, write):
        super().__init__()
        self.read, self.write = read, write

    def forward(self, x):
        self.write(self.read() + 1)
        return x.sigmoid()


@family(**HOLDERS)
def counted_by_a_submodule_and_replaced_by_the_user(hold):
    read, write, dump = hold()
    model = nn.ModuleList([Writing(read, write)])

    def fn(x):
        return work(model[0](x), read())

    return loop(fn, between=lambda: write(7), state=dump)


@family(**HOLDERS)
def counted_by_an_inner_call(hold):
    read, write, dump = hold()

    def inner(x):
        write(read() + 1)
        return work(x, read())

    def step(wrap):
        run = wrap(lambda x: wrap(inner)(x).sin() * read())
        return loop(run, state=dump)(lambda fn: fn)

    return step


@family(**HOLDERS)
def counted_by_a_call_that_raises_at_first(hold):
    read, write, dump = hold()

    def fn(x):
        write(read() + 1)
        y = work(x, read())
        if read() == 2:
            raise ValueError
        return y

    def step(wrap):
        run = wrap(fn)
        try:
            run(leaf())
        except ValueError:
            nothing()
        x = leaf()
        out = run(x)
        back(out)
        return observed((out, x.grad, dump()))

    return step


@family(**HOLDERS)
def counted_by_a_hook_of_the_backward(hold):
    read, write, dump = hold()

    def fn(x):
        ran()
        y = (x * read()).sin()
        y.register_hook(lambda _: nothing(write(read() + 1)))
        return (y * 2).exp()

    return loop(fn, state=dump)


def numbers(k):
    return torch.full((16,), float(k), dtype=torch.double)


@family(**ANYTHING)
def a_tensor_replaced_by_the_user(hold):
    read, write, dump = hold()
    write(numbers(2))
    new = iter(range(3, 9))
    change = lambda: write(numbers(next(new)))
    return loop(lambda x: work(x, read()), between=change, state=dump)


@family(**ANYTHING)
def a_tensor_replaced_by_the_function(hold):
    read, write, dump = hold()
    write(numbers(2))

    def fn(x):
        y = work(x, read())
        write(read() + 1)
        return y.tanh()

    return reversed_loop(fn, state=dump)


@family(**ANYTHING)
def an_intermediate_written_and_read(hold):
    read, write, dump = hold()

    def fn(x):
        write(work(x))
        return work(read().tanh())

    return reversed_loop(fn, state=dump)


@family(**ANYTHING)
def a_list_made_again_by_the_function(hold):
    read, write, dump = hold()
    write([1])

    def fn(x):
        write([*read(), len(read())])
        return work(x, sum(read()))

    return reversed_loop(fn, state=dump)
