"""Globals: who writes them, and who reads them."""

import sys
import types

from support.adversarial.program import family, leaf, loop, reversed_loop, work
from torch import nn


N, TENSOR, TABLE, LOG = 1, None, {}, []


def read():
    return N


def read_deep():
    return (lambda: max(read() for _ in range(2)))()


def by_word(_):
    return N


class Reading:
    def method(self):
        return N

    @property
    def by_property(self):
        return N

    @staticmethod
    def static():
        return N

    @classmethod
    def by_class(cls):
        return N

    def __call__(self):
        return N

    def __len__(self):
        return N

    def __getitem__(self, i):
        return N

    def __getattr__(self, name):
        return N

    def __float__(self):
        return float(N)

    def __enter__(self):
        return N

    def __exit__(self, *_):
        return None

    def __iter__(self):
        yield N

    def __add__(self, other):
        return N + other

    def __eq__(self, other):
        return other == N

    def __hash__(self):
        return N

    def __bool__(self):
        return N % 2 == 0


class Layer(nn.Module):
    def forward(self, x):
        return x.tanh() * N


def entered(reading):
    with reading as n:
        return n


reading = Reading()
READERS = {
    "function": read,
    "function of a function": read_deep,
    "lambda": lambda: N,
    "method": reading.method,
    "method of a global": lambda: reading.method(),
    "property": lambda: reading.by_property,
    "static method": Reading.static,
    "class method": Reading.by_class,
    "call": lambda: reading(),
    "length": lambda: len(reading),
    "item": lambda: reading[0],
    "missing attribute": lambda: reading.unknown,
    "float": lambda: float(reading),
    "context": lambda: entered(reading),
    "iteration": lambda: sum(reading),
    "addition": lambda: reading + 0,
    "comparison": lambda: 2 if reading == 1 else 3,
    "hash": lambda: hash(reading),
    "truth": lambda: 2 if reading else 3,
    "subscript of globals": lambda: globals()["N"],
    "module of the interpreter": lambda: sys.modules[__name__].N,
    "evaluated": lambda: eval("N"),
    "comprehension": lambda: sum(N for _ in range(1)),
    "layer": lambda: Layer()(leaf().detach())[0].item(),
    "format": lambda: int(f"{N}"),
    "map": lambda: next(map(by_word, "a")),
    "key of min": lambda: min([1, 2], key=lambda k: -k * N) * N,
    "made class": lambda: type("Made", (), {"n": N}).n,
}


def reset():
    global N, TENSOR
    N, TENSOR = 1, None
    TABLE.clear()
    LOG.clear()


def count():
    global N
    N += 1


@family(**READERS)
def written_by_the_user(reader):
    reset()
    return loop(lambda x: work(x, reader()), between=count, state=read)


@family(**READERS)
def written_by_a_function_that_is_called(reader):
    reset()

    def fn(x):
        count()
        return work(x, reader())

    return reversed_loop(fn, state=read)


class Counting(nn.Module):
    def forward(self, x):
        global N
        N += 1
        LOG.append(N)
        return x.tanh()


@family(**READERS)
def written_by_a_submodule(reader):
    reset()
    model = nn.Sequential(Counting(), nn.Sequential(Counting()))
    return loop(lambda x: work(model(x), reader() / 4), state=lambda: (N, LOG))


def remember(x):
    global TENSOR
    TENSOR = x if TENSOR is None else TENSOR + x
    return TENSOR


def of_remembered(fn):
    reset()
    return reversed_loop(fn, state=lambda: TENSOR)


@family(
    written=lambda: lambda x: work(x * remember(x.detach())),
    written_before_it_is_read=lambda: (
        lambda x: (remember(x.detach()), work(x * TENSOR))[1]
    ),
    read_before_it_is_written=lambda: (
        lambda x: (
            work(x) if TENSOR is None else work(x * TENSOR),
            remember(x.detach()),
        )[0].tanh()
    ),
    written_in_a_table=lambda: (
        lambda x: work(x * TABLE.setdefault(len(TABLE), x.detach()) * TABLE[0])
    ),
    appended_to_a_log=lambda: lambda x: (LOG.append(x.detach()), work(x * sum(LOG)))[1],
)
def a_global_tensor(make):
    return of_remembered(make())


class Memo:
    """A table that all instances share."""

    table = types.MappingProxyType(TABLE)

    def scale(self, key):
        if key not in TABLE:
            TABLE[key] = len(TABLE) + 1
        return self.table[key]


@family(first=lambda n: 0, second=lambda n: n, third=lambda n: n // 2)
def a_global_memo_of_a_method(key):
    reset()
    memo, calls = Memo(), []

    def fn(x):
        calls.append(1)
        return work(x, memo.scale(key(len(calls))))

    return reversed_loop(fn, state=lambda: TABLE)
