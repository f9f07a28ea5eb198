"""Streams, threads, exceptions, nested calls and the order of backwards."""

import copy
import gc
import pickle
import queue
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import numpy as np
import torch
from support.adversarial.program import (
    State,
    back,
    family,
    leaf,
    loop,
    observed,
    program,
    ran,
    reversed_loop,
    trained,
    work,
)
from torch import nn


# --- Random numbers ---


def by_a_generator():
    generator = torch.Generator().manual_seed(5)
    return lambda: torch.rand(16, generator=generator, dtype=torch.double)


def by_random_random():
    stream = random.Random(5)
    return stream.random


def by_a_generator_of_numpy():
    stream = np.random.default_rng(5)
    return lambda: stream.uniform()


def by_a_list_of_generators():
    streams = [torch.Generator().manual_seed(s) for s in range(3)]

    def draw():
        streams.append(streams.pop(0))
        return torch.rand(16, generator=streams[0], dtype=torch.double)

    return draw


def by_a_class():
    class Noise:
        stream = random.Random(5)

    return lambda: Noise.stream.random()


def by_a_shuffled_list():
    order = [1, 2, 3, 4]

    def draw():
        random.shuffle(order)
        return order[0]

    return draw


def seeded_inside():
    def draw():
        torch.manual_seed(3)
        return torch.rand(16, dtype=torch.double)

    return draw


def forked():
    def draw():
        with torch.random.fork_rng():
            torch.manual_seed(3)
            k = torch.rand(())
        return (k + torch.rand(())).item()

    return draw


STREAMS = {
    "torch": lambda: lambda: torch.rand(16, dtype=torch.double),
    "dropout": lambda: (
        lambda: nn.functional.dropout(torch.ones(16, dtype=torch.double), 0.5)
    ),
    "bernoulli": lambda: lambda: torch.ones(16, dtype=torch.double).bernoulli_(0.5),
    "random": lambda: random.random,
    "gauss": lambda: lambda: random.gauss(0, 1),
    "NumPy": lambda: np.random.rand,
    "generator": by_a_generator,
    "list of generators": by_a_list_of_generators,
    "Random": by_random_random,
    "generator of NumPy": by_a_generator_of_numpy,
    "Random of a class": by_a_class,
    "shuffled list": by_a_shuffled_list,
    "seeded inside": seeded_inside,
    "forked": forked,
}


@family(**STREAMS)
def drawn_twice(make):
    draw = make()
    return loop(lambda x: work(work(x, draw()).tanh(), draw()))


@family(**STREAMS)
def drawn_and_recomputed_later(make):
    draw = make()
    return reversed_loop(lambda x: work(x, draw()).tanh())


@family(**STREAMS)
def drawn_between(make):
    draw = make()
    return loop(lambda x: work(x, draw()).tanh(), between=draw)


# --- Exceptions ---


@program
def an_exception_in_the_first_forward():
    state = State(n=0)

    def fn(x):
        state.n += 1
        y = work(x, state.n)
        if state.n == 1:
            raise KeyError(state.n)
        return y

    def step(wrap):
        run = wrap(fn)
        try:
            run(leaf())
        except KeyError as error:
            caught = repr(error)
        return caught, loop(run, state=lambda: state)(lambda f: f)

    return step


@program
def an_exception_that_the_function_catches():
    tries = [0]

    def fn(x):
        try:
            tries[0] += 1
            if tries[0] % 2:
                raise ValueError
            return work(x, 2)
        except ValueError:
            return work(x, 3)

    return reversed_loop(fn, state=lambda: tries)


@program
def an_exception_in_a_hook_of_the_backward():
    def fn(x):
        y = work(x)

        def hook(_):
            raise KeyError

        handle = y.register_hook(hook)
        return y.tanh(), handle

    def step(wrap):
        x = leaf()
        out, handle = wrap(fn)(x)
        try:
            out.sum().backward(retain_graph=True)
        except KeyError:
            handle.remove()
        back(out)
        return observed((out, x.grad))

    return step


@program
def a_finally_that_writes():
    log = []

    def fn(x):
        try:
            return work(x, len(log) + 1).tanh()
        finally:
            log.append(1)

    return reversed_loop(fn, state=lambda: log)


@program
def a_flag_that_an_early_stop_leaves_set():
    busy = [0]

    def fn(x):
        busy[0] += 1
        y = work(x, 2)
        busy[0] -= 1
        return y

    return loop(fn, state=lambda: busy)


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
def a_forward_in_another_thread():
    state = State(n=0)

    def fn(x):
        state.n += 1
        return work(x, state.n)

    def step(wrap):
        run = wrap(fn)
        with ThreadPoolExecutor(1) as pool:
            return loop(lambda x: pool.submit(run, x).result(), state=lambda: state)(
                lambda f: f
            )

    return step


@program
def a_backward_in_another_thread():
    state = State(n=0)

    def fn(x):
        state.n += 1
        return work(x, state.n)

    def step(wrap):
        run, x = wrap(fn), leaf()
        out = run(x)
        thread = threading.Thread(target=back, args=(out,))
        thread.start()
        thread.join()
        return observed((out, x.grad, state))

    return step


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
def a_pool_inside():
    # One thread: with two, the order of what plain adds up is by chance.
    pool = ThreadPoolExecutor(1)
    fn = lambda x: sum(pool.map(lambda k: work(x, k), [1, 2, 3]))

    def step(wrap):
        try:
            return loop(fn)(wrap)
        finally:
            pool.shutdown()

    return step


@program
def threads_that_share_a_module():
    model = nn.Linear(16, 16).double()

    def step(wrap):
        run = wrap(lambda x: work(model(x)))
        xs = [leaf(seed=i) for i in range(4)]

        def train(x):
            run(x).sum().backward(inputs=[x])

        threads = [threading.Thread(target=train, args=(x,)) for x in xs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return observed([x.grad for x in xs])

    return step


@program
def a_queue_read_by_the_function():
    waiting = queue.Queue()

    def fn(x):
        waiting.put(1)
        return work(x, 2)

    return loop(fn)


@program
def a_context_variable_set_inside():
    depth = ContextVar("depth", default=1)

    def fn(x):
        token = depth.set(depth.get() + 1)
        try:
            return work(x, depth.get()).tanh()
        finally:
            depth.reset(token)

    return reversed_loop(fn, state=depth.get)


@program
def a_context_variable_that_counts():
    depth = ContextVar("depth", default=1)

    def fn(x):
        depth.set(depth.get() + 1)
        return work(x, depth.get())

    def step(wrap):
        token = depth.set(1)
        try:
            return reversed_loop(fn, state=depth.get)(wrap)
        finally:
            depth.reset(token)

    return step


# --- Calls in calls, and orders ---


def in_turn(layers):
    def fn(x):
        for layer in layers:
            x = layer(x).tanh()
        return x

    return fn


@family(**{str(n): n for n in (2, 3, 5)})
def calls_in_calls(depth):
    state = State(n=0)

    def step(wrap):
        def counted(x):
            state.n += 1
            return work(x, state.n)

        fn = wrap(counted)
        for _ in range(depth - 1):
            fn = wrap(in_turn([fn]))
        return loop(fn, state=lambda: state)(lambda f: f)

    return step


@program
def a_call_in_a_call_with_dropout():
    def step(wrap):
        inner = wrap(lambda x: nn.functional.dropout(work(x), 0.5))
        return loop(wrap(lambda x: nn.functional.dropout(inner(inner(x)).sin(), 0.5)))(
            lambda f: f
        )

    return step


@program
def a_wrapped_module_in_a_wrapped_function():
    norm = nn.BatchNorm1d(4).double()

    def step(wrap):
        inner = wrap(norm)
        outer = wrap(lambda x: work(inner(inner(x))))
        return trained(norm, call=outer)(lambda f: f)

    return step


@program
def a_call_that_wraps_in_the_body():
    def step(wrap):
        state = State(n=0)

        def fn(x):
            state.n += 1
            return wrap(lambda y: work(y, state.n).tanh())(x).sin()

        return reversed_loop(wrap(fn), state=lambda: state)(lambda f: f)

    return step


@program
def layers_in_a_row_that_share_a_list():
    log = []

    def step(wrap):
        def layer(x):
            log.append(len(log) + 1)
            return work(x, 1 / log[-1])

        fn = in_turn([wrap(layer) for _ in range(4)])
        return loop(fn, state=lambda: log)(lambda f: f)

    return step


@program
def a_call_whose_output_is_dropped():
    state = State(n=0)

    def fn(x):
        state.n += 1
        return work(x, state.n)

    def step(wrap):
        run = wrap(fn)

        def twice(x):
            run(x)
            return run(x)

        return loop(twice, state=lambda: state)(lambda f: f)

    return step


@program
def a_backward_in_the_middle_of_forwards():
    state = State(n=0)

    def fn(x):
        state.n += 1
        return work(x, state.n).tanh()

    def step(wrap):
        run, xs = wrap(fn), [leaf(seed=i) for i in range(4)]
        a, b = run(xs[0]), run(xs[1])
        back(a)
        c = run(xs[2])
        back(c)
        d = run(xs[3])
        back([d, b])
        return observed(([a, b, c, d], [x.grad for x in xs], state))

    return step


@program
def a_graph_that_is_kept():
    state = State(n=0)

    def fn(x):
        state.n += 1
        return work(x, state.n).tanh()

    def step(wrap):
        run, x = wrap(fn), leaf()
        out = run(x)
        for _ in range(3):
            out.sum().backward(retain_graph=True)
            state.n += 10
        return observed((out, x.grad, state))

    return step


@program
def gradients_that_are_accumulated():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)).double()

    def step(wrap):
        run = wrap(lambda x: work(model(x)))
        for i in range(3):
            back(run(leaf(4, 4, seed=i)))
        return observed([p.grad for p in model.parameters()])

    return step


@family(sgd=torch.optim.SGD, adam=torch.optim.Adam)
def a_step_between_two_forwards(optimizer):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()

    def step(wrap):
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

    return step


@program
def an_optimizer_that_calls_again():
    w = leaf(seed=4)

    def step(wrap):
        run, x = wrap(lambda x: work(x * w, 0.5)), leaf().detach()
        steps = torch.optim.LBFGS([w], lr=0.1, max_iter=4)

        def closure():
            steps.zero_grad()
            loss = run(x).square().sum()
            loss.backward()
            return loss

        return observed((steps.step(closure), w))

    return step


# --- Lifetimes ---


@program
def an_input_that_is_gone():
    def step(wrap):
        x = leaf()
        run = wrap(lambda y: work(y).tanh())
        out = run(x * 2)
        gc.collect()
        back(out)
        return observed((out, x.grad))

    return step


@program
def an_object_replaced_between():
    holder = State(data=State(k=1, items=[1, 2]))

    def fn(x):
        holder.data.items.append(3)
        return work(x, len(holder.data.items))

    def between():
        holder.data = State(k=2, items=[])

    return loop(fn, between=between, state=lambda: holder.data)


@program
def a_state_replaced_by_the_function():
    class State:
        def __init__(self, k):
            self.k = k

    class Model:
        state = State(1)

        def __call__(self, x):
            self.state = State(self.state.k + 1)
            return work(x, self.state.k)

    model = Model()
    return reversed_loop(model, state=lambda: model.state.k)


@program
def a_finalizer_that_counts():
    count = [0]

    class Owner:
        def __del__(self):
            count[0] += 1

    def fn(x):
        owner = Owner()
        return work(x, 2 if owner else 3)

    # How often it runs is of no promise: what counts is that nothing breaks.
    return loop(fn)


@program
def an_owner_with_a_finalizer():
    class Owner:
        k = 2

        def __del__(self):
            self.k = None

    holder = State(owner=Owner())
    return loop(lambda x: work(x, holder.owner.k))


@program
def a_weak_set_of_objects():
    class Item:
        def __init__(self, k):
            self.k = k

    items = [Item(k) for k in range(3)]
    held = weakref.WeakSet(items)
    fn = lambda x: work(x, 1 + sum(item.k for item in held))
    return loop(fn, between=lambda: items.pop() and None, count=2)


@program
def a_weak_dict_of_modules():
    class Scale(nn.Module):
        def forward(self, x):
            return work(x, 2)

    layer = Scale()
    counts = weakref.WeakKeyDictionary({layer: 0})

    def fn(x):
        counts[layer] += 1
        return layer(x) * counts[layer]

    return reversed_loop(fn, state=lambda: [*counts.values()])


@program
def a_list_of_a_thousand_numbers():
    held = [*range(1500)]

    def fn(x):
        held.append(1)
        return work(x, held[1])

    return loop(fn, state=lambda: len(held))


@program
def a_list_of_a_thousand_numbers_changed_between():
    held = [*range(1500)]

    def between():
        held[1] += 1

    return loop(lambda x: work(x, held[1]), between=between, state=lambda: held[1])


@program
def a_dict_of_a_thousand_tensors():
    held = {i: torch.full((), float(i), dtype=torch.double) for i in range(1500)}
    return loop(lambda x: work(x * held[3] + held[7]))


@program
def a_hundred_small_tensors():
    held = [leaf(seed=i).detach() for i in range(100)]
    return loop(lambda x: work(x * held[3] + sum(held[40:50])), between=held.reverse)


@program
def three_hundred_objects():
    held = [State(k=i % 3) for i in range(300)]

    def fn(x):
        held[3].k += 1
        return work(x, held[3].k)

    return reversed_loop(fn, state=lambda: held[3])


@program
def a_copied_and_a_pickled_state():
    state = {"k": 1}

    def fn(x):
        state["k"] += 1
        saved = pickle.loads(pickle.dumps(copy.deepcopy(state)))
        return work(x, saved["k"])

    return reversed_loop(fn, state=lambda: state)


@program
def a_text_that_is_written_to():
    log = []

    def fn(x):
        log.append(f"mean {x.mean().item():.6f}")
        return work(x, len(log[-1]) / 10)

    return loop(fn, state=lambda: log)


@program(recomputes=False)
def nothing_that_requires_grad():
    state = State(n=0)

    def fn(x):
        state.n += 1
        return work(x.detach(), state.n)

    return lambda wrap: observed((wrap(fn)(leaf()), state))


@program(recomputes=False)
def no_backward_at_all():
    state = State(n=0)

    def fn(x):
        ran()
        state.n += 1
        return (x * state.n).sin()

    def step(wrap):
        outs = [wrap(fn)(leaf(seed=i)) for i in range(3)]
        return observed((outs, state))

    return step
