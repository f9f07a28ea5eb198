"""Budgets of loops: what is held at a time stays below them, and little runs again.

Bytes are those that the profiler sees allocated, which knows nothing of the meter that
a step was measured with.
"""

import pytest
import torch
from support.loops import Plain, of_backward
from support.tables import rows
from torch import nn
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from remat import BudgetError, chain, checkpoint_name, policies, remat
from remat.chain import _budget
from remat.testing import assert_same, count_ops, memory_timeline


N = 30
X = torch.linspace(-1, 1, 400).reshape(4, 100)
US = torch.linspace(0, 2, N * 400).reshape(N, 4, 100)
W = torch.linspace(-0.1, 0.1, 10_000).reshape(100, 100)


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(_budget, "_KNOWN", {})


def _scanned(loops, x, us, w, **options):
    def step(x, u):
        x = torch.tanh(x @ w + u)
        return x * x.cos(), x.mean()

    return loops.scan(step, x, us, **options)


def _counted(loops, x, us, w, **options):
    def body(i, x):
        return torch.tanh(x @ w + us[i % 3]) * x.cos()

    return loops.fori_loop(0, N, body, x, **options)


def _whiled(loops, x, us, w, **options):
    def body(carry):
        k, x = carry
        return k + 1, torch.tanh(x @ w + us[0]) * x.cos()

    return loops.while_loop(lambda carry: carry[0] < N, body, (0, x), **options)[1]


LOOPS = {"scan": (_scanned, N), "fori_loop": (_counted, N), "while_loop": (_whiled, N)}


def least(run, *tensors, **options):
    """The least budget, which an error names."""
    with pytest.raises(
        BudgetError, match=r"The least that works is [\d,]+ bytes"
    ) as caught:
        of_backward(lambda *ts: run(chain, *ts, budget=0, **options), *tensors)
    return caught.value.least


def bytes_held(run, *tensors, **options):
    """The most bytes beside arguments, results and the gradients of both."""
    leaves = [t.detach().requires_grad_() for t in tensors]

    def step():
        outs = run(chain, *leaves, **options)
        outs = outs if isinstance(outs, tuple) else (outs,)
        cotangents = [torch.full_like(out, 0.5) for out in outs]
        torch.autograd.backward(outs, cotangents)
        return outs, cotangents

    peak = memory_timeline(step).peak
    outs, cotangents = step()
    tensors = [*outs, *cotangents, *(leaf.grad for leaf in leaves)]
    return peak - sum(t.untyped_storage().nbytes() for t in tensors if t is not None)


def steps_run(run, *tensors, **options):
    """The gradients, and how many steps a forward and a backward run."""
    with count_ops() as ops:
        found = of_backward(lambda *ts: run(chain, *ts, **options), *tensors)
    return found, ops["tanh"]


@rows("run, steps", LOOPS, fast=("scan",))
def test_what_is_held_stays_below_the_budget(run, steps):
    """More bytes run fewer steps again. One byte less than the least is refused."""
    few = least(run, X, US, W)
    with pytest.raises(BudgetError, match="too small for"):
        of_backward(lambda *ts: run(chain, *ts, budget=few - 1), X, US, W)
    expected = of_backward(lambda *ts: run(Plain, *ts), X, US, W)
    counts = []
    for factor in (1, 1.3, 1000):
        budget = int(few * factor)
        found, ran = steps_run(run, X, US, W, budget=budget)
        assert_same(found, expected, reassociated=True)
        counts.append(ran)
        held = bytes_held(run, X, US, W, budget=budget)
        assert held <= budget
        if factor == 1.3:  # it is used
            assert held > 0.6 * budget
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 2.5 * steps
    assert counts[-1] == 2 * steps


def test_an_error_speaks_in_the_unit_that_was_given():
    shown = r"0\.1 kB \(100 bytes\) is too small for .* is [\d.]+ kB \([\d,]+ bytes\)"
    with pytest.raises(BudgetError, match=shown):
        of_backward(lambda *ts: _scanned(chain, *ts, budget="0.1kB"), X, US, W)


def looped(body, steps=N):
    """A loop of `body(x, us, w)`, as a function like those of `LOOPS`."""

    def run(loops, x, us, w, **options):
        return loops.fori_loop(0, steps, lambda i, x: body(x, us, w), x, **options)

    return run


def test_under_vmap_a_budget_is_for_the_whole_batch():
    def gradients(x, budget):
        return vmap(grad(lambda x: _counted(chain, x, US, W, budget=budget).sum()))(x)

    xs = torch.stack([X, X / 2, X / 3])
    with pytest.raises(BudgetError, match="too small for") as caught:
        gradients(xs, 0)
    few = caught.value.least
    alone = least(lambda loops, x, **o: _counted(loops, x, US, W, **o), X)
    assert few == 3 * alone
    with count_ops() as ops:
        found = grad(lambda x: _counted(chain, x, US, W, budget=alone).sum())(X)
    assert ops["tanh"] > 3 * N
    assert_same(found, grad(lambda x: _counted(Plain, x, US, W).sum())(X))
    expected = vmap(grad(lambda x: _counted(Plain, x, US, W).sum()))(xs)
    with count_ops() as ops:
        found = gradients(xs, few)
    assert_same(found, expected, reassociated=True)
    assert ops["tanh"] > 4 * N  # of which N store nothing: see the docs


def test_outside_of_a_vmap_a_budget_warns():
    def loss(xs):
        return vmap(lambda x: _counted(chain, x, US, W, budget="1 MiB"))(xs).sum()

    xs = torch.stack([X, X / 2])
    with pytest.warns(UserWarning, match="differentiated outside of a vmap"):
        found = grad(loss)(xs)
    expected = grad(lambda x: vmap(lambda x: _counted(Plain, x, US, W))(x).sum())(xs)
    assert_same(found, expected, reassociated=True)


def scaled(scale):
    """A step whose factor depends on its carry."""
    return looped(lambda x, us, w: torch.tanh(x @ w) * scale(x))


@remat
def cast(x, us, w):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.tanh(x @ w).float() * x.cos()


WINDOW = X * 2, X * 3, X * 4


def windowed(loops, x, us, w, **options):
    """Each carry passes the last three states on."""

    def body(i, carry):
        return (*carry[1:], torch.tanh(carry[0] @ w + carry[-1]))

    return loops.fori_loop(0, N, body, (x, *WINDOW), **options)


def nested(loops, x, us, w, **options):
    def outer(i, x):
        inner = lambda j, x: torch.tanh(x @ w + us[j])
        return loops.fori_loop(0, 4, inner, x, **options)

    return loops.fori_loop(0, 8, outer, x, **options)


# A loop, its budget as a multiple of the least, and how many steps run at least.
# Those that are measured with values, where fakes will not do, are not counted.
OTHERS = {
    "steps that ask for values": (
        scaled(lambda x: 2.0 if x.sum().item() > 0 else 3.0),
        *(1, 2 * N + 1),
    ),
    "steps that format": (scaled(lambda x: len(f"{x.sum():.3f}")), 1, 2 * N + 1),
    "steps that ask for the class": (
        scaled(lambda x: 2.0 if type(x) is torch.Tensor else 1 / 0),
        *(1, 2 * N + 1),
    ),
    # They are measured once they are alike.
    "carries that pass states on": (windowed, 1, 2 * N),
    "carries that pass states on, more bytes": (windowed, 4, 2 * N),
    "autocast in rematerialized steps": (looped(cast), 2, 3 * N),
}


@rows(
    "run, factor, runs",
    OTHERS,
    fast=("steps that format", "carries that pass states on, more bytes"),
)
def test_other_loops_keep_a_budget(run, factor, runs):
    budget = factor * least(run, X, US, W)
    found, ran = steps_run(run, X, US, W, budget=budget)
    # Plain casts a weight once.
    expected, _ = steps_run(run, X, US, W, checkpoints=3)
    assert_same(found, expected, reassociated=True)
    assert ran >= runs
    assert bytes_held(run, X, US, W, budget=budget) <= budget


def test_a_chain_of_chains_keeps_its_budget():
    found, ran = steps_run(nested, X, US, W, budget="200 KiB")
    expected = of_backward(lambda *ts: nested(Plain, *ts), X, US, W)
    assert_same(found, expected, reassociated=True)
    assert ran >= 3 * 32
    assert bytes_held(nested, X, US, W, budget="200 KiB") <= 200 * 1024


def test_random_streams_are_where_they_would_be():
    generator = torch.Generator()

    def drawing(loops, x, us, w, **options):
        def body(i, x):
            noise = torch.rand(x.shape, generator=generator)
            return nn.functional.dropout(torch.tanh(x @ w), 0.3) * noise

        return loops.fori_loop(0, 10, body, x, **options)

    def seeded(loops, **options):
        torch.manual_seed(3)
        generator.manual_seed(4)
        found = of_backward(lambda *ts: drawing(loops, *ts, **options), X, US, W)
        return found, torch.rand(2), torch.rand(2, generator=generator)

    budget = 2 * least(drawing, X, US, W)
    with count_ops() as ops:
        found = seeded(chain, budget=budget)
    assert_same(found, seeded(Plain), reassociated=True)
    assert ops["tanh"] >= 20


def test_measuring_leaves_modes_of_the_user_alone():
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def trained(loops, **options):
        with Seeing():
            return of_backward(lambda *ts: _counted(loops, *ts, **options), X, US, W)

    found = trained(chain, budget="1 MiB")  # which measures
    first = len(seen)
    assert_same(trained(chain, budget="1 MiB"), found)  # which does not
    assert len(seen) == 2 * first
    seen.clear()
    assert_same(found, trained(Plain), reassociated=True)
    assert first > len(seen)  # steps run again


class Counter:
    """An object that a step changes, which holds no tensor."""

    def __init__(self):
        self.count, self.seen = 0, []


@pytest.mark.parametrize("asks", [False, True], ids=["fakes", "values"])
def test_measuring_leaves_objects_that_steps_change_as_they_were(asks):
    def counting(counter):
        def body(i, x):
            counter.count += 1
            counter.seen.append(i)
            scale = 2.0 if asks and x.sum().item() > 0 else 1.5
            return torch.tanh(x * scale) * counter.count

        return body

    def trained(loops, **options):
        counter, x = Counter(), X.clone().requires_grad_()
        body = counting(counter)
        loops.fori_loop(0, N, body, x, **options).square().sum().backward()
        return x.grad, counter.count, counter.seen

    with count_ops() as ops:
        found = trained(chain, budget=X.nbytes * 5)
    assert_same(found, trained(Plain), reassociated=True)
    assert found[1] == N
    assert ops["tanh"] >= 2 * N


@pytest.fixture
def times(monkeypatch):
    """One for each measurement."""
    found, measure = [], _budget.measured

    def measured(*args, **options):
        found.append(1)
        return measure(*args, **options)

    monkeypatch.setattr(_budget, "measured", measured)
    return found


def test_steps_that_are_alike_are_measured_once(times):
    def loop(x, power):
        return chain.fori_loop(0, N, lambda i, x: x.tanh() ** power, x, budget="1 MiB")

    for power in (1, 1, 2, 1):
        x = X.clone().requires_grad_()
        loop(x, power).sum().backward()
    assert len(times) == 2
    x = torch.cat([X, X]).requires_grad_()
    loop(x, 1).sum().backward()
    assert len(times) == 3
    with torch.no_grad():
        loop(X, 5)
    loop(X, 5)  # nothing is differentiated
    assert len(times) == 3


@pytest.mark.slow
def test_a_policy_is_measured_too():
    x, us, w = (t[..., :20].contiguous() for t in (X, US, W[:20]))

    def wide(loops, x, us, w, **options):
        def body(i, x):
            hidden = checkpoint_name(torch.tanh(torch.cat([x @ w] * 8)), "hidden")
            return hidden.cos().sin().exp().reshape(8, *x.shape).mean(0)

        return loops.fori_loop(0, N, body, x, **options)

    policy = policies.save_only_these_names("hidden")
    budget = 20 * least(wide, x, us, w, policy=policy)
    assert bytes_held(wide, x, us, w, budget=budget, policy=policy) <= budget
    assert bytes_held(wide, x, us, w, budget=budget) <= budget
    expected = of_backward(lambda *ts: wide(Plain, *ts), x, us, w)
    found, ran = steps_run(wide, x, us, w, budget=budget, policy=policy)
    assert_same(found, expected, reassociated=True)
    assert ran == 2 * N  # hidden values are saved
    assert len(_budget._KNOWN) == 3


class _Power:
    def __init__(self, k):
        self.k = k

    def __call__(self, i, x):
        return (torch.tanh(torch.cat([x] * self.k)) * 0.9).reshape(self.k, *x.shape)[0]


POWER = 1


def _global(i, x):
    return _Power(POWER)(i, x)


def test_what_a_step_refers_to_is_measured_anew_when_it_changes(monkeypatch):
    power, few = _Power(1), []  # an object, a global, a closure

    def at_least(body, k):
        power.k = k
        monkeypatch.setattr("test_budgets.POWER", k)
        found = least(lambda loops, x, **o: loops.fori_loop(0, N, body, x, **o), X)
        few.append(found)
        return found

    for body in (power, _global, lambda i, x: power(i, x)):
        assert at_least(body, 8) > at_least(body, 1)
    assert len({*few[::2]}) == 1


def test_a_step_that_counts_is_not_measured_for_ever(times):
    counter = Counter()

    def body(i, x):
        counter.count += 1
        return x.tanh()

    for _ in range(8):
        x = X.clone().requires_grad_()
        chain.fori_loop(0, N, body, x, budget="1 MiB").sum().backward()
    assert counter.count == 8 * N
    assert len(times) == 4


def test_steps_that_cannot_be_measured_run_with_a_warning(monkeypatch):
    def measured(*_, **__):
        return ValueError("not today")

    monkeypatch.setattr(_budget, "measured", measured)
    with pytest.warns(UserWarning, match=r"could not be measured.*\(not today\)"):
        found, ran = steps_run(_counted, X, US, W, budget="1 KiB")
    expected = of_backward(lambda *ts: _counted(Plain, *ts), X, US, W)
    assert_same(found, expected, reassociated=True)
    assert ran == 2 * N


def test_a_loop_that_ends_before_the_steps_that_are_measured_is_right():
    with count_ops() as ops:
        found = _one_step(chain, budget="1 MiB")
    assert_same(found, _one_step(Plain))
    assert ops["tanh"] == 2


def _one_step(loops, **options):
    x, ws = X.clone().requires_grad_(), [W]

    def body(carry):
        return carry[0] + 1, torch.tanh(carry[1] @ ws[carry[0]])

    out = loops.while_loop(lambda carry: carry[0] < 1, body, (0, x), **options)[1]
    out.sum().backward()
    return x.grad


def test_carries_without_bytes_need_none():
    def body(i, carry):
        return carry + 1

    with count_ops() as ops:
        assert chain.fori_loop(0, N, body, 0, budget=0) == N
    assert not ops


def test_a_graph_warns_and_follows_segments():
    x = X.clone().requires_grad_()

    def run(x):
        return chain.fori_loop(0, 4, lambda i, x: x.tanh(), x, budget="1 MiB")

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="its budget is not kept"):
        found = compiled(x)
    assert_same(found, run(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"budget": 1000, "checkpoints": 3},
            r"budget=1000 and checkpoints=3: pass one",
        ),
        ({"budget": "1 MiB", "unroll": 2}, r"budget='1 MiB' and unroll=2: pass one"),
        ({"budget": 9, "disk": True}, r"budget=9 and disk=True: pass one"),
        ({"budget": "much"}, r"scan takes a number of bytes; got the text 'much'"),
        ({"budget": -1}, r"scan takes a number of bytes; got -1"),
    ],
    ids=str,
)
def test_budgets_with_what_they_stand_for_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        _scanned(chain, X, US, W, **options)


def test_layers_in_a_row_with_a_budget_are_for_fit():
    with pytest.raises(TypeError, match=r"budget=9\. For a .* remat\.fit\(model"):
        chain.sequential([torch.tanh], X, budget=9)


def test_errors_of_steps_are_those_without_a_budget():
    def growing(i, x):
        return torch.cat([x, x])

    x = X.clone().requires_grad_()
    with pytest.raises(TypeError, match=r"is float32\[4, 100\] on cpu at the start"):
        chain.fori_loop(0, 3, growing, x, budget="1 MiB")
