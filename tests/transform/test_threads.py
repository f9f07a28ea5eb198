"""Threads share functions and modules, and see nothing of each other's calls."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.runs import replayed
from support.tables import rows
from support.zoo import Evaluations
from torch import nn
from torch.func import grad, vmap
from torch.utils import _python_dispatch
from torch.utils.checkpoint import set_checkpoint_early_stop

from remat import remat
from remat._transform import function, state
from remat.compat import checkpoint
from remat.testing import assert_same, count_ops


ROUNDS = 12


@pytest.fixture(autouse=True)
def _flags_of_modes():
    # torch notes for all threads at once whether a mode is on: two threads that leave
    # `count_ops` in turn would leave it noted.
    scope = vars(_python_dispatch)
    before = {name: value for name, value in scope.items() if type(value) is bool}
    yield
    scope.update(before)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x.sin()).sin().exp()


def in_threads(*jobs):
    """Run all jobs at once and return their results."""
    start = threading.Barrier(len(jobs))

    def run(job):
        start.wait(timeout=60)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [f.result(timeout=60) for f in [pool.submit(run, j) for j in jobs]]


def rounds(call, x):
    """Forward and backward, again and again; return the gradients and the sines."""
    with count_ops() as ops:
        results = [call(x) for _ in range(ROUNDS)]
    return results, ops["sin"] / ROUNDS


def gradient(fn):
    def call(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(fn(x).pow(2).sum(), x)[0]

    return call


TRANSFORMS = {
    "backward": gradient,
    "grad": lambda fn: grad(lambda x: fn(x).pow(2).sum()),
    "vmap(grad)": lambda fn: vmap(grad(lambda x: fn(x).pow(2).sum())),
}


@pytest.mark.parametrize("threads", [2, 4])
def test_the_same_module_in_several_threads(threads):
    block = Block()
    notes = Evaluations()
    block.layer.register_forward_pre_hook(lambda *_: notes.note(None))
    xs = torch.randn(threads, 4, 8)

    def step(call):
        def gradients(x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(call(x).pow(2).sum(), [x, *block.parameters()])

        return gradients

    want = [step(block)(x) for x in xs]
    notes.clear()
    call = remat(block)
    results = in_threads(*(lambda x=x: rounds(step(call), x) for x in xs))
    for (got, sines), expected in zip(results, want, strict=True):
        assert_same(got, [expected] * ROUNDS)
        assert sines == 2 * 2
    assert len(notes) == threads * ROUNDS * 2


@rows("transform", {name: TRANSFORMS[name] for name in ("grad", "vmap(grad)")})
def test_the_same_module_under_torch_func_in_two_threads(transform):
    """Its parameters are used themselves: in the module nothing is exchanged."""
    block, xs = Block(), torch.randn(2, 4, 8)
    before = dict(block.named_parameters())
    done = threading.Event()

    def work(k):
        try:
            return rounds(transform(remat(block)), xs[k])
        finally:
            done.set()

    def read():
        """Plain code that looks at the module meanwhile."""
        seen = 0
        while not done.is_set() or not seen:
            assert all(block.get_parameter(n) is p for n, p in before.items())
            seen += 1
        return seen

    want = [transform(block)(x) for x in xs]
    *results, seen = in_threads(lambda: work(0), lambda: work(1), read)
    for (got, sines), expected in zip(results, want, strict=True):
        assert_same(got, [expected] * ROUNDS)
        assert sines == 2 * 2
    assert seen > 0


# --- A large buffer, of which a forward under torch.func has a copy in its place ---


def in_a_new_pool(w, x):
    with ThreadPoolExecutor(1) as pool:
        a, b = pool.map(lambda k: (x @ w * k).sin() @ w, (1.0, 2.0))
    return (a * b).exp()


def in_the_middle(w, x):
    y = (x @ w).sin()
    with ThreadPoolExecutor(1) as pool:
        z = pool.submit(lambda: (y.detach() * x).cos()).result()
    return (y * z @ w).exp()


@pytest.mark.parametrize("fn", [in_a_new_pool, in_the_middle])
@replayed(each=True, exp=(4, 8))
def test_a_pool_of_threads_inside_computes_what_it_does_in_plain(wrap, fn):
    x = torch.randn(8, 8)
    w = torch.eye(8).requires_grad_()
    return [torch.autograd.grad(wrap(fn)(w, x).sum(), w) for _ in range(4)]


TODO = queue.SimpleQueue(), queue.SimpleQueue()  # which no recompute puts back


class Counting(nn.Module):
    """Reads a buffer and writes it; between the two it does what is to be done."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(2**15, dtype=torch.double))

    def forward(self, x, number):
        y = (x * self.table[:4].clone()).sin()
        self.table.add_(1)
        if not TODO[number].empty():
            TODO[number].get()()
        return (y * self.table[:4].clone()).sum()


# For what A waits in its forward and B in its, and B before that begins.
ORDERS = {
    "B within A": ("b ended", "a is in it", "a is in it"),
    "A ends within B": ("b is in it", "a ended", "a is in it"),
    "A ends before the forward of B": ("b begins", "a ended", "a ended"),
}


@rows("a_waits, b_waits, b_begins", ORDERS)
def test_a_copy_of_a_large_buffer_is_never_left(
    a_waits, b_waits, b_begins, monkeypatch
):
    names = "a is in it", "a ended", "b begins", "b is in it", "b ended"
    happened = {name: threading.Event() for name in names}

    def then(happens, waits):
        happened[happens].set()
        assert happened[waits].wait(timeout=60)

    class Inputs(state.ForwardInputs):
        def __init__(self, *args):
            if threading.current_thread().name == "b":
                then("b begins", b_begins)
            super().__init__(*args)

    monkeypatch.setattr(function, "ForwardInputs", Inputs)
    TODO[0].put(lambda: then("a is in it", a_waits))
    TODO[1].put(lambda: then("b is in it", b_waits))
    module, x = Counting(), torch.linspace(0.1, 1, 4, dtype=torch.double)
    own, run = module.table, grad(remat(module))

    def a():
        found = run(x, 0)
        happened["a ended"].set()
        return found

    def b():
        assert happened["a is in it"].wait(timeout=60)
        threading.current_thread().name = "b"
        found = run(x, 1)
        happened["b ended"].set()
        return found

    found = in_threads(a, b)
    assert module.table is own
    # Of what was there before the call wrote it, which A may have written.
    expected = [k * (x * k).cos() * (k + 1) for k in (1, 2)]
    assert torch.equal(found[0], expected[0])
    assert any(torch.equal(found[1], e) for e in expected)


@pytest.mark.parametrize("early", [True, False])
def test_a_backward_that_ends_meanwhile_takes_no_value_from_another(early):
    """In each recompute a backward of the other output begins and ends."""
    runs, requests, answers = Evaluations(), queue.SimpleQueue(), queue.SimpleQueue()

    def fn(x, z):
        y, other = x.sin().exp(), z.sin().exp()
        runs.note(1)
        if (
            2 <= len(runs) <= 8
            and threading.current_thread() is threading.main_thread()
        ):
            requests.put(True)
            answers.get(timeout=60)
        return y.tanh(), other.tanh()

    def gradient(out, x):
        return torch.autograd.grad(out.sum(), x, retain_graph=True)[0]

    x, z = (torch.linspace(0, k, 4).requires_grad_() for k in (1, 2))
    with set_checkpoint_early_stop(early):
        out, other = checkpoint(fn, x, z, use_reentrant=False)

    def serve():
        while requests.get(timeout=60):
            gradient(other, z)  # which may find values that others left
            answers.put(gradient(other, z))

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        try:
            found = gradient(out, x)
        finally:
            requests.put(False)
        served.result(timeout=60)
    assert torch.equal(found, gradient(x.sin().exp().tanh(), x))
    assert len(runs) > 2
