"""Iterators, generators and counters that the function reads."""

import itertools

import torch
from support.adversarial.program import (
    State,
    family,
    loop,
    program,
    reversed_loop,
    work,
)


MADE = {
    "count": lambda: itertools.count(1),
    "count with a step": lambda: itertools.count(1, 2),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "repeat for ever": lambda: itertools.repeat(2),
    "islice": lambda: itertools.islice(itertools.count(1), 50),
    "starmap": lambda: itertools.starmap(pow, [(n, 2) for n in range(1, 30)]),
    "tee": lambda: itertools.tee(range(1, 50))[0],
    "list iterator": lambda: iter([*range(1, 50)]),
    "range iterator": lambda: iter(range(1, 50)),
    "reversed list": lambda: reversed([*range(1, 50)]),
    "dict iterator": lambda: iter(dict.fromkeys(range(1, 50))),
    "zip": lambda: map(sum, zip(range(1, 30), range(1, 30), strict=True)),
    "generator expression": lambda: (n for n in range(1, 50)),
    "callable iterator": lambda: iter(itertools.count(1).__next__, 99),
}


@family(**MADE)
def read_by_the_function(make):
    it = make()
    return loop(lambda x: work(x, next(it)), state=lambda: next(it))


@family(**MADE)
def read_by_the_user_between(make):
    it, holder = make(), State(k=1)

    def between():
        holder.k = next(it)

    # Reached, and not read.
    return loop(
        lambda x: work(x, 2 if it else 3), between=between, state=lambda: holder
    )


@family(**MADE)
def of_an_object_and_read_later(make):
    class Numbered:
        def __init__(self):
            self.ids = make()

        def __call__(self, x):
            return work(x, next(self.ids)).tanh()

    return reversed_loop(Numbered())


@program
def an_object_that_a_count_numbers():
    class Part:
        ids = itertools.count()

        def __init__(self):
            self.id = next(self.ids)

    made = []

    def fn(x):
        made.append(Part())
        return work(x, 2)

    return loop(fn, state=lambda: [part.id for part in made])


# --- Layers that number themselves ---


class Numbers:
    count = 0


@program
def an_index_given_at_the_first_call():
    Numbers.count = 0

    class Layer(torch.nn.Module):
        idx = None

        def forward(self, x):
            if self.idx is None:
                self.idx = Numbers.count
                Numbers.count += 1
            return work(x, self.idx + 1)

    model = torch.nn.Sequential(Layer(), Layer(), Layer())
    state = lambda: (Numbers.count, [layer.idx for layer in model])
    return loop(model, state=state)


@program
def a_generator_that_is_sent_tensors():
    def accumulating():
        total = 0
        while True:
            total = total + (yield total)

    def fn(x):
        sums = accumulating()
        next(sums)
        for k in range(3):
            y = sums.send(work(x, k + 1))
        return y

    return loop(fn)
