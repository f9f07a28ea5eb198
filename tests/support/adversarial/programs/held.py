"""Each way to hold a value, changed in each way between forward and recompute."""

import torch
from support.adversarial.holders import ANNOTATIONS, ANYTHING, HOLDERS
from support.adversarial.program import (
    State,
    back,
    family,
    leaf,
    loop,
    nothing,
    observed,
    reversed_loop,
    work,
)
from torch import nn


@family(**HOLDERS, annotations=ANNOTATIONS)
def replaced_by_the_user(hold):
    read, write, dump = hold()
    new = iter(range(2, 9))
    return loop(
        lambda x: work(x, read()), between=lambda: write(next(new)), state=dump, count=2
    )


@family(**HOLDERS)
def read_then_counted_and_recomputed_later(hold):
    read, write, dump = hold()

    def fn(x):
        y = work(x, read())
        write(read() + 1)
        return y.tanh()

    return reversed_loop(fn, state=dump)


@family(**HOLDERS)
def counted_by_a_hook(hold):
    read, write, dump = hold()
    layer = nn.Tanh()
    layer.register_forward_hook(lambda *_: nothing(write(read() + 1)))
    return loop(lambda x: work(layer(x), read()), state=dump, count=2)


class Writing(nn.Module):
    def __init__(self, read, write):
        super().__init__()
        self.read, self.write = read, write

    def forward(self, x):
        self.write(self.read() + 1)
        return x.sigmoid()


def numbers(k):
    return torch.full((16,), float(k), dtype=torch.double)


@family(**ANYTHING)
def a_tensor_replaced_by_the_user(hold):
    read, write, dump = hold()
    write(numbers(2))
    new = iter(range(3, 9))
    change = lambda: write(numbers(next(new)))
    return loop(lambda x: work(x, read()), between=change, state=dump, count=2)


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
def an_output_that_a_hook_leaves(hold):
    read, write, _ = hold()
    layer = nn.Tanh()
    layer.register_forward_hook(lambda _m, _x, y: nothing(write(y)))

    def fn(x):
        y = work(layer(x))
        return y * read().sin()

    return loop(fn, count=2)


# --- Set anew in each forward: what torch's checkpoint gets right ---


def resetting(write, body):
    """A function that sets the number to 1 and then runs `body`."""

    def fn(x):
        write(1)
        return body(x)

    return fn


@family(**HOLDERS)
def only_read(hold):
    read, _, dump = hold()
    return reversed_loop(lambda x: work(work(x, read()), read()).tanh(), state=dump)


@family(**HOLDERS)
def reset_and_counted_by_the_function(hold):
    read, write, dump = hold()

    def body(x):
        for _ in range(2):
            x = work(x, read() / 2)
            write(read() + 1)
        return work(x * read(), 1)  # after the last write: no early stop

    return loop(resetting(write, body), state=dump, count=2)


@family(**HOLDERS)
def reset_and_counted_by_a_hook(hold):
    read, write, dump = hold()
    layer = nn.Tanh()
    layer.register_forward_hook(lambda *_: nothing(write(read() + 1)))
    return reversed_loop(
        resetting(write, lambda x: work(layer(work(layer(x), read())), read() / 4)),
        state=dump,
    )


@family(**HOLDERS)
def reset_and_counted_by_a_submodule(hold):
    read, write, dump = hold()
    model = nn.Sequential(Writing(read, write), nn.Sequential(Writing(read, write)))
    fn = resetting(write, lambda x: work(model(x), read() / 2))
    return loop(fn, between=lambda: write(6), state=dump, count=2)


@family(**HOLDERS)
def reset_and_counted_by_an_inner_call(wrap, hold):
    read, write, dump = hold()

    def inner(x):
        y = work(x, read())
        write(read() + 1)
        return y.tanh()

    first, second = wrap(resetting(write, inner)), wrap(resetting(write, inner))
    run = wrap(lambda x: second(first(x)) * read())
    return loop(run, state=dump, count=2)(lambda fn: fn)


@family(**HOLDERS)
def kept_for_the_user_only(hold):
    read, write, dump = hold()
    new = iter(range(2, 9))

    def fn(x):
        y = work(x).tanh()
        write(7)
        return y * 2

    # The user sees what was written last, by whoever it was.
    return loop(
        fn, between=lambda: write(next(new)), state=lambda: (read(), dump()), count=2
    )


# These are the process's, and not gone with what holds them.
OF_THE_PROCESS = "environment", "entry of globals", "local of a generator"


@family(**{n: hold for n, hold in HOLDERS.items() if n not in OF_THE_PROCESS})
def gone_and_a_leaf_that_is_gone(wrap, hold):
    state = State()
    state.read, state.write, _ = hold()

    run, seen = wrap(lambda x: work(x, state.read())), []
    for i in range(2):
        x = leaf(seed=i)
        out = run(x * 1.5)
        state.read, state.write, _ = hold()
        state.write(i + 2)
        back(out)
        seen.append(observed((out, x.grad)))
    return seen
