"""Streams, threads, exceptions, nested calls and the order of backwards."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from support.adversarial.program import (
    State,
    around,
    back,
    family,
    leaf,
    loop,
    observed,
    program,
    ran,
    reversed_loop,
    texts,
    work,
)
from torch import nn


# --- Random numbers ---


# What the rows use besides, which are text.
exec("import queue, random, weakref\nimport numpy as np")


# What draws, and what makes a stream `held` of which it does.
STREAMS = {
    "torch": "torch.rand(16, dtype=torch.double)",
    "dropout": "nn.functional.dropout(torch.ones(16, dtype=torch.double), 0.5)",
    "bernoulli": "torch.ones(16, dtype=torch.double).bernoulli_(0.5)",
    "random": "random.random()",
    "gauss": "random.gauss(0, 1)",
    "NumPy": "np.random.rand()",
    "generator": (
        "torch.rand(16, generator=held, dtype=torch.double)",
        "torch.Generator().manual_seed(5)",
    ),
    "list of generators": (
        "held.append(held.pop(0)) or torch.rand((), generator=held[0]).double()",
        "[torch.Generator().manual_seed(s) for s in range(3)]",
    ),
    "Random": ("held.random()", "random.Random(5)"),
    "generator of NumPy": ("held.uniform()", "np.random.default_rng(5)"),
    "Random of a class": (
        "held.stream.random()",
        "type('Noise', (), {'stream': random.Random(5)})",
    ),
    "shuffled list": ("random.shuffle(held) or held[0]", "[1, 2, 3, 4]"),
    "seeded inside": "torch.manual_seed(3) and torch.rand(16, dtype=torch.double)",
    "forked": "forked() + torch.rand(()).item()",
}


def forked():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.rand(()).item()


def drawing(row):
    """Return a function that draws."""
    draw, make = (row, "None") if isinstance(row, str) else row
    return eval(f"(lambda held: lambda: {draw})({make})")


@family(**STREAMS)
def drawn_twice(row):
    draw = drawing(row)
    return loop(lambda x: work(work(x, draw()).tanh(), draw()))


@family(**STREAMS)
def drawn_and_recomputed_later(row):
    draw = drawing(row)
    return reversed_loop(lambda x: work(x, draw()).tanh())


@family(**STREAMS)
def drawn_between(row):
    draw = drawing(row)
    return loop(lambda x: work(x, draw()).tanh(), between=draw)


def counted(*, curved=True):
    """A state, and a function that counts in it and computes with the number."""
    state = State(n=0)

    def fn(x):
        state.n += 1
        y = work(x, state.n)
        return y.tanh() if curved else y

    return state, fn


# --- Exceptions ---


@program
def an_exception_in_the_first_forward(wrap):
    state = State(n=0)

    def fn(x):
        state.n += 1
        y = work(x, state.n)
        if state.n == 1:
            raise KeyError(state.n)
        return y

    run = wrap(fn)
    try:
        run(leaf())
    except KeyError as error:
        caught = repr(error)
    return caught, loop(run, state=lambda: state)(lambda f: f)


@program
def an_exception_in_a_hook_of_the_backward(wrap):
    def fn(x):
        y = work(x)

        def hook(_):
            raise KeyError

        handle = y.register_hook(hook)
        return y.tanh(), handle

    x = leaf()
    out, handle = wrap(fn)(x)
    try:
        out.sum().backward(retain_graph=True)
    except KeyError:
        handle.remove()
    back(out)
    return out, x.grad


@program
def a_lock_of_the_user():
    lock, state = threading.Lock(), State(n=0)

    def fn(x):
        with lock:
            state.n += 1
            return work(x, state.n).tanh()

    return reversed_loop(fn, state=lambda: (state, lock.locked()))


# --- Threads ---


@program
def a_forward_in_another_thread(wrap):
    state, fn = counted()

    with ThreadPoolExecutor(1) as pool:
        outer = lambda run: lambda x: pool.submit(run, x).result()
        return around(fn, outer, state=lambda: state)(wrap)


@program
def a_backward_in_another_thread(wrap):
    state, fn = counted()

    run, x = wrap(fn), leaf()
    out = run(x)
    thread = threading.Thread(target=back, args=(out,))
    thread.start()
    thread.join()
    return out, x.grad, state


@program
def a_thread_inside():
    def fn(x):
        found = []
        thread = threading.Thread(target=lambda: found.append(work(x)))
        thread.start()
        thread.join()
        return found[0].tanh()

    return loop(fn)


@program(recomputes=False)
def a_pool_inside(wrap):
    # One thread: with two, the order of what plain adds up is by chance.
    pool = ThreadPoolExecutor(1)
    fn = lambda x: sum(pool.map(lambda k: work(x, k), [1, 2, 3]))

    try:
        return loop(fn)(wrap)
    finally:
        pool.shutdown()


@program
def threads_that_share_a_module(wrap):
    model = nn.Linear(16, 16).double()

    run = wrap(lambda x: work(model(x)))
    xs = [leaf(seed=i) for i in range(4)]

    def train(x):
        run(x).sum().backward(inputs=[x])

    threads = [threading.Thread(target=train, args=(x,)) for x in xs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [x.grad for x in xs]


# --- Calls in calls, and orders ---


def in_turn(layers):
    def fn(x):
        for layer in layers:
            x = layer(x).tanh()
        return x

    return fn


@family(**{str(n): n for n in (2, 3, 5)})
def calls_in_calls(wrap, depth):
    state = State(n=0)

    def counted(x):
        state.n += 1
        return work(x, state.n)

    fn = wrap(counted)
    for _ in range(depth - 1):
        fn = wrap(in_turn([fn]))
    return loop(fn, state=lambda: state)(lambda f: f)


@program
def a_call_in_a_call_with_dropout(wrap):
    dropout = functools.partial(nn.functional.dropout, p=0.5)

    inner = wrap(lambda x: dropout(work(x)))
    return loop(lambda x: dropout(inner(inner(x)).sin()))(wrap)


@program
def a_call_that_wraps_in_the_body(wrap):
    state = State(n=0)

    def fn(x):
        state.n += 1
        return wrap(lambda y: work(y, state.n).tanh())(x).sin()

    return reversed_loop(wrap(fn), state=lambda: state)(lambda f: f)


@program
def a_call_whose_output_is_dropped():
    state, fn = counted()
    return around(fn, lambda run: lambda x: [run(x), run(x)][1], state=lambda: state)


@program
def a_backward_in_the_middle_of_forwards(wrap):
    state, fn = counted()

    run, xs = wrap(fn), [leaf(seed=i) for i in range(4)]
    a, b = run(xs[0]), run(xs[1])
    back(a)
    c = run(xs[2])
    back(c)
    d = run(xs[3])
    back([d, b])
    return [a, b, c, d], [x.grad for x in xs], state


@program
def a_graph_that_is_kept(wrap):
    state, fn = counted()

    run, x = wrap(fn), leaf()
    out = run(x)
    for _ in range(3):
        out.sum().backward(retain_graph=True)
        state.n += 10
    return out, x.grad, state


@family(sgd=torch.optim.SGD, adam=torch.optim.Adam)
def a_step_between_two_forwards(wrap, optimizer):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()

    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.normal_(p)
    run = wrap(lambda x: work(model(x)))
    steps, seen = optimizer(model.parameters(), lr=0.1), []
    for i in range(3):
        x = leaf(4, 4, seed=i)
        loss = run(run(x)).sum()
        loss.backward()
        seen.append(observed((loss, x.grad)))
        steps.step()
        steps.zero_grad()
    return seen


@program
def an_optimizer_that_calls_again(wrap):
    w = leaf(seed=4)

    run, x = wrap(lambda x: work(x * w, 0.5)), leaf().detach()
    steps = torch.optim.LBFGS([w], lr=0.1, max_iter=4)

    def closure():
        steps.zero_grad()
        loss = run(x).square().sum()
        loss.backward()
        return loss

    return steps.step(closure), w


# --- Lifetimes ---


@program(recomputes=False)
def nothing_that_requires_grad():
    state = State(n=0)

    def fn(x):
        state.n += 1
        return work(x.detach(), state.n)

    return lambda wrap: observed((wrap(fn)(leaf()), state))


@program(recomputes=False)
def no_backward_at_all(wrap):
    state = State(n=0)

    def fn(x):
        ran()
        state.n += 1
        return (x * state.n).sin()

    outs = [wrap(fn)(leaf(seed=i)) for i in range(3)]
    return outs, state


class Closing:
    k = 2

    def __del__(self):
        self.k = None


def tried(tries):
    """Raise every other time, and catch it."""
    try:
        tries[0] += 1
        return 2 // (tries[0] % 2)
    except ZeroDivisionError:
        return 3


texts(globals())
