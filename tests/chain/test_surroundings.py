"""Chains inside of other things, and other things inside of chains."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from support.loops import (
    LENGTH,
    SLICES,
    Plain,
    StopError,
    assert_chained,
    by_scan,
    of_backward,
    steps_run,
    stopping,
)
from support.tables import rows
from support.zoo import V, W, X, leaves_of, scalar
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from remat import chain, policies, remat, scope
from remat.chain import _chain
from remat.testing import assert_same, count_ops


STEPS, CHECKPOINTS = 6, 3
RUNS = steps_run(STEPS, checkpoints=CHECKPOINTS)


def loop(loops, body, x):
    return loops.fori_loop(0, STEPS, lambda i, h: body(h), x, checkpoints=CHECKPOINTS)


def differentiated(out, *leaves):
    return out.detach(), torch.autograd.grad(out.abs().sum(), leaves)


# --- Kinds of tensors ---------------------------------------------------------------


def complex_numbers(loops):
    w, x = leaves_of(W.to(torch.complex128) * (1 + 0.3j), X)
    h = loop(loops, lambda h: torch.tanh(h @ w), x.to(w.dtype))
    return differentiated(h, w, x)


def parameters_of(dtype):
    def run(loops):
        w, x = leaves_of(W.to(dtype), X.float())
        return differentiated(loop(loops, lambda h: torch.tanh(h @ w.float()), x), w, x)

    return run


def sparse_gradients(loops):
    table = nn.Embedding.from_pretrained(SLICES.clone(), freeze=False, sparse=True)
    rows = torch.tensor([0, 3, 1, 3, 0, 2])

    def step(h, i):
        return torch.tanh(h + table(i)), None

    h, _ = loops.scan(step, X, rows, checkpoints=CHECKPOINTS)
    (found,) = torch.autograd.grad(h.sum(), table.weight)
    assert found.is_sparse
    return found.to_dense()


def sparse_parameters(loops):
    w, x = W.to_sparse().requires_grad_(), X.clone().requires_grad_()
    h = loop(loops, lambda h: torch.tanh(torch.sparse.mm(w, h)), x)
    found = torch.autograd.grad(h.sum(), (w, x))
    return [g.to_dense() for g in found]


def shared_memory(loops):
    def run(base):
        a, b = base[:16].view(4, 4), base[8:24].view(4, 4)

        def step(carry, s):
            return (torch.tanh(carry[0] * carry[1]), carry[0]), s * carry[1]

        xs = torch.stack([a, b, a])
        xs = torch.cat([xs, xs])
        return loops.scan(step, (a, b), xs, checkpoints=CHECKPOINTS)

    return of_backward(run, torch.linspace(-1, 1, 32).double())


KINDS = {
    "complex numbers": complex_numbers,
    "float16 parameters": parameters_of(torch.float16),
    "bfloat16 parameters": parameters_of(torch.bfloat16),
    "sparse gradients": sparse_gradients,
    "sparse parameters": sparse_parameters,
    "shared memory": shared_memory,
}


@rows("program", KINDS)
def test_tensors_of_each_kind_have_the_gradients_of_plain(program):
    assert_chained(program, steps=STEPS, runs=RUNS)


@pytest.mark.parametrize("first", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("second", ["cpu", "cuda:0", "cuda:1"])
def test_a_graph_of_inputs_on_several_devices(monkeypatch, first, second):
    """On fake tensors, which refuse to mix devices. Their autograd needs a real one."""
    monkeypatch.setattr(_chain, "requires_grad_at_any_level", lambda t: True)
    with FakeTensorMode():
        ends = [torch.ones(3, device=d) for d in (first, second)]
        outs = _chain._connected(ends, [True, True], ends)
    assert [str(o.device) for o in outs] == [first, second]


# --- Modes --------------------------------------------------------------------------


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def test_autocast_around_the_forward_is_that_of_recomputes():
    """Plain casts a weight once, and adds up its gradients in bfloat16."""

    def program(loops):
        w, x = leaves_of(W.float(), X.float())
        with autocast():
            h = loop(loops, lambda h: torch.tanh(h @ w).float(), x)
        return differentiated(h, w, x)

    assert_same(program(chain)[0], program(Plain)[0])
    reassociated = torch.bfloat16
    assert_chained(program, steps=STEPS, runs=RUNS, reassociated=reassociated)


def within(fn):
    def body(h):
        with autocast():
            return fn(h)

    return body


# A decorator notes on itself what it finds when it is entered.
@rows("cast", {"a block": within, "a decorator": autocast()})
def test_autocast_inside_of_a_step(cast):
    def program(loops):
        w, x = leaves_of(W.float(), X.float())
        body = cast(lambda h: torch.tanh(h @ w).float())
        return differentiated(loop(loops, body, x), w, x)

    assert_chained(program, steps=STEPS, runs=RUNS)


def test_steps_without_gradients_run_once():
    def program(loops):
        w, x = leaves_of(W, X)
        h = loop(loops, torch.no_grad()(lambda h: torch.tanh(h @ w)), x)
        return h, h.requires_grad

    assert_chained(program, steps=STEPS, runs=STEPS)
    assert program(chain)[1] is False


# --- Nests --------------------------------------------------------------------------


def of_scans(loops, w, x):
    def inner(h, s):
        h = torch.tanh(h @ w) * s
        return h, h.sum()

    def outer(h, s):
        h, sums = loops.scan(inner, h, SLICES[:3], checkpoints=2)
        return h * s, sums

    return loops.scan(outer, x, SLICES[:4], checkpoints=2)


def of_while_loops(loops, w, x):
    def inner(carry):
        return torch.tanh(carry[0] @ w), carry[1] + 1

    def outer(carry):
        h, n = carry
        h, _ = loops.while_loop(lambda c: c[1] < 3, inner, (h, 0), checkpoints=2)
        return h, n + 1

    return loops.while_loop(lambda c: c[1] < 4, outer, (x, 0), checkpoints=2)[0]


def derivatives(run):
    first = grad(lambda w, x: scalar(run(w, x)), (0, 1))
    batch = vmap(first)(torch.stack([W, V]), torch.stack([X, W]))
    return of_backward(run, W, X), first(W, X), batch


@rows("nest", {"scans": of_scans, "while loops": of_while_loops})
def test_a_chain_of_chains(nest):
    def program(loops):
        return derivatives(lambda w, x: nest(loops, w, x))

    with count_ops() as plain:
        want = program(Plain)
    with count_ops() as ops:
        got = program(chain)
    assert_same(got, want, reassociated=True)
    assert plain["tanh"] == 3 * 12
    # Each step of the outer chain runs again, and then those of the inner one.
    assert 3 * 3 * 12 < ops["tanh"] + 3 * 12 < 3 * 8 * 12


WRAPS = {
    "remat": remat,
    "dots": remat(policy=policies.dots_saveable),
    "everything": remat(policy=policies.everything_saveable),
    "pruned": remat(prune=True),
    "higher order": remat(higher_order=True),
}


@rows("wrap", WRAPS, fast=("dots",))
def test_rematerialized_steps_inside_of_a_rematerialized_function(wrap):
    def program(loops):
        wrapped = wrap if loops is chain else lambda fn: fn

        def run(w, x):
            body = wrapped(lambda h: torch.tanh(h @ w))
            fn = wrapped(lambda x: loop(loops, body, x).sin())
            return fn(fn(x))

        return [derivatives(run) for _ in range(2)]

    with count_ops() as ops:
        got = program(chain)
    assert_same(got, program(Plain), reassociated=True)
    assert ops["tanh"] > 6 * 2 * RUNS


def test_a_chain_inside_of_a_scope():
    def program(loops):
        w, x = leaves_of(W, X)
        with scope() if loops is chain else contextlib.nullcontext():
            h = loop(loops, lambda h: torch.tanh(h @ w).sin(), x.cos()).exp()
        return differentiated(h, w, x)

    # The scope runs the operations of its block once more, those of the forward too.
    assert_chained(program, steps=STEPS, runs=RUNS + STEPS)


class Recurrent(nn.Module):
    def __init__(self, loops):
        super().__init__()
        self.loops, self.cell = loops, nn.RNNCell(4, 4).double()

    def step(self, h, x):
        h = torch.tanh(self.cell(x[None], h))
        return h, h[0]

    def forward(self, xs):
        h = xs.new_zeros(1, 4)
        return self.loops.scan(self.step, h, xs, checkpoints=CHECKPOINTS)


def test_a_chain_inside_of_a_module():
    """The cell has a tanh of its own, in each step."""

    def program(loops):
        torch.manual_seed(0)
        model = Recurrent(loops)
        (xs,) = leaves_of(SLICES)
        scalar(model(xs)).backward()
        found = [xs.grad, *(p.grad for p in model.parameters())]
        params = {k: p.detach() * 2 for k, p in model.named_parameters()}
        per_example = vmap(
            grad(lambda p, xs: scalar(functional_call(model, p, (xs,)))), (None, 0)
        )
        return found, per_example(params, torch.stack([SLICES, SLICES.cos()]))

    schedule_runs = steps_run(LENGTH, checkpoints=CHECKPOINTS)
    with count_ops() as ops:
        got = program(chain)
    assert_same(got, program(Plain), reassociated=True)
    assert ops["tanh"] >= 2 * 2 * schedule_runs


# --- Threads, errors, memory --------------------------------------------------------


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "grad of grad"])
@pytest.mark.parametrize("at", [0, STEPS + 3])
def test_after_an_error_in_a_step_levels_are_as_before(transform, at):
    body = stopping(at)
    first = grad(lambda x: loop(chain, body, x).sum())
    run = {
        "grad": lambda: first(X),
        "vmap of grad": lambda: vmap(first)(torch.stack([X, X])),
        "grad of grad": lambda: grad(lambda x: first(x).sum())(X),
    }[transform]
    with count_ops() as ops, pytest.raises(StopError, match="stopped"):
        run()
    assert ops["tanh"] == at
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert torch.is_grad_enabled()
    x = X.clone().requires_grad_()
    chained = Plain.fori_loop(0, STEPS, lambda i, h: h.tanh(), x)
    assert_same(
        grad(lambda x: loop(chain, torch.tanh, x).sum())(X),
        torch.autograd.grad(chained.sum(), x)[0],
    )


@pytest.mark.usefixtures("_no_collector")
def test_a_long_training_keeps_nothing_of_its_steps():
    model, refs = nn.Linear(4, 4).double(), []

    def body(h):
        return model(h).tanh()

    def step(k):
        x = torch.full((4, 4), k / 100, dtype=torch.double, requires_grad=True)
        refs.append(weakref.ref(x))
        y = loop(chain, body, x).sum()
        if k % 2:
            y.backward()
            model.zero_grad()

    with count_ops() as ops:
        for k in range(10):
            step(k)
        before = len(gc.get_objects())
        for k in range(50):
            step(k)
        after = len(gc.get_objects())
    assert ops["tanh"] == 30 * (RUNS + STEPS)
    assert not any(ref() is not None for ref in refs)
    assert after - before <= 50 + 50  # the weak references, and caches of Python


def test_threads_run_chains_at_once():
    def program(loops):
        found = [None] * 4

        def work(k):
            def run(w, x):
                return by_scan(loops, w, x, checkpoints=3)

            found[k] = of_backward(run, W * (k + 1), X)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    with count_ops() as ops:
        by_scan(chain, *leaves_of(W, X), checkpoints=3)[0].sum().backward()
    assert ops["tanh"] == steps_run(LENGTH, checkpoints=3)
    assert_same(program(chain), program(Plain))


# --- Modes of the user's ------------------------------------------------------------


class Doubling(TorchDispatchMode):
    """Doubles what a sine gives."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.sin.default else out


@pytest.mark.parametrize("checkpoints", [None, 2, "all"])
def test_a_mode_around_the_forward_is_around_each_step_that_runs_again(checkpoints):
    def run(loops):
        (x,) = leaves_of(X)
        with Doubling():
            out = loops.fori_loop(
                0, STEPS, lambda i, h: h.sin().sin(), x, checkpoints=checkpoints
            )
        return differentiated(out, x)

    with count_ops() as ops:
        found = run(chain)
    assert_same(found, run(Plain))
    assert ops["sin"] > 2 * STEPS
