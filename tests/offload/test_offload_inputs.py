"""`offload_inputs=`: what only recomputes need of inputs is away until then."""

import threading
import warnings
import weakref

import pytest
import torch
from support.zoo import make
from torch import nn
from torch.func import functional_call, grad, jacrev, vjp, vmap

import remat
from remat import explain
from remat._offload import inputs, offload
from remat._torch.levels import base_tensor
from remat.testing import assert_same, count_ops, peak_bytes


SIZE = 64  # 16 KiB


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.register_buffer("table", torch.ones(SIZE, SIZE))

    def forward(self, x, others=None):
        x = x + self.down(self.up(x).tanh()) @ self.table / SIZE
        return x if others is None else x * others


class Model(nn.Module):
    def __init__(self, count=5):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.seen = []  # the memory of what the blocks were given

    def forward(self, x, others=None):
        x = x * 1.5
        self.seen.clear()
        for layer in self.layers:
            self.seen.append(weakref.ref(base_tensor(x).untyped_storage()))
            x = layer(x, others)
        return x.sum()

    def held(self):
        """How many inputs of blocks are in memory."""
        return sum(ref() is not None for ref in self.seen)


@pytest.fixture
def moved(monkeypatch):
    """What goes and comes, in order. Host memory is another place here."""
    moves = []

    class Noting(offload.Fetched):
        def take(self, k):
            moves.append("back")
            return super().take(k)

    def away(tensor):
        moves.append("away")
        return offload.in_file(tensor)

    monkeypatch.setattr(inputs, "Fetched", Noting)
    monkeypatch.setattr(inputs, "in_file", away)
    return moves


def wrapped(model, **options):
    return remat.nn.apply(model, "layers.*", **options)


def step(model, *args):
    model.zero_grad()
    (x,) = (make(2 * SIZE, SIZE, seed=1).float().requires_grad_(),)
    model(x, *args).backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def forward(model, *args):
    return model(make(2 * SIZE, SIZE, seed=1).float().requires_grad_(), *args)


def assert_away_until_the_backward(model, want, moved):
    """Assert that five inputs go and come back in each step, with plain's gradients."""
    for _ in range(2):
        loss = forward(model)
        assert model.held() == 0
        assert moved == ["away"] * 5
        del loss, moved[:]
        assert_same(step(model), want)
        assert moved == ["away"] * 5 + ["back"] * 5
        moved.clear()


def test_inputs_that_stay_are_noticed(moved):
    model = Model()
    with pytest.raises(AssertionError, match="5 == 0"):
        assert_away_until_the_backward(wrapped(model), step(Model()), moved)


@pytest.mark.parametrize("policy", [None, remat.policies.dots_saveable])
def test_the_inputs_of_blocks_are_gone_until_their_recomputes(policy, moved):
    model = Model()
    want = step(model)
    loss = forward(wrapped(model, policy=policy))
    assert model.held() == 5
    del loss
    remat.nn.remove(model)
    wrapped(model, policy=policy, offload_inputs="disk")
    assert_away_until_the_backward(model, want, moved)


def gradients_by_grad(model):
    gradient = grad(lambda p, x: functional_call(model, p, (x,)))
    return gradient(parameters_of(model, True), make(2 * SIZE, SIZE, seed=1).float())


@pytest.mark.parametrize("gradients", [step, gradients_by_grad])
def test_while_one_is_used_the_one_before_is_fetched(gradients, monkeypatch):
    order, made = [], []

    class Noting(offload.Fetched):
        def __init__(self, stored, origins):
            super().__init__(stored, origins)
            made.append(stored[0])
            order.append(("begins", len(made)))

        def take(self, k):
            order.append(
                ("takes", [s is self._stored[0] for s in made].index(True) + 1)
            )
            return super().take(k)

    monkeypatch.setattr(inputs, "Fetched", Noting)
    gradients(wrapped(Model(3), offload_inputs="disk"))
    assert order == [
        ("begins", 1),
        ("takes", 1),
        ("begins", 2),
        ("takes", 2),
        ("begins", 3),
        ("takes", 3),
    ]


def outside_of_torch(tensor):
    """Move a tensor to memory that torch's profiler does not see."""
    memory = bytearray(tensor.numpy().tobytes())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("policy", [None, remat.policies.dots_saveable])
def test_they_are_gone_from_the_peak(policy, monkeypatch):
    monkeypatch.setattr(inputs, "in_file", outside_of_torch)

    def peak(count, **options):
        """In inputs of blocks, of a step of so many."""
        model = wrapped(Model(count), policy=policy, **options).requires_grad_(False)
        x = make(2 * SIZE, SIZE, seed=1).float().requires_grad_()
        found = explain(model, x).peak
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        kinds = {holder.kind: holder.nbytes for holder in found.holders}
        assert kinds.get("saved inputs", 0) < x.nbytes or not options
        assert "gradients" not in kinds  # that of x is made after the peak
        return (found.nbytes - held) / x.nbytes

    saved = 0 if policy is None else 4  # of each block one, which its tanh reads
    assert round(peak(8) - peak(4) - saved) == 4
    away = {"offload_inputs": "disk"}
    assert round(peak(8, **away) - peak(4, **away) - saved) == 0


def test_what_others_hold_stays(moved):
    """Parameters, buffers, and results that the user keeps."""
    model, kept = wrapped(Model(), offload_inputs="disk"), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    plain = Model()
    plain.load_state_dict(model.state_dict())
    assert_same(step(model), step(plain))
    assert "back" not in moved
    fn = remat.remat(lambda w, x: (w @ x).tanh(), offload_inputs="disk")
    moved.clear()
    w = nn.Parameter(torch.randn(SIZE, SIZE))
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    fn(w, x).sum().backward()
    assert moved == []


def test_what_many_blocks_are_given_goes_once(moved):
    model = wrapped(Model(), offload_inputs="disk")
    loss = forward(model, make(2 * SIZE, SIZE, seed=4).float())
    assert moved == ["away"] * 6
    loss.backward()
    others = make(2 * SIZE, SIZE, seed=4).float()
    want = step(model, others)
    model.zero_grad()
    loss = forward(model, others)
    others.add_(1)  # the copy is as it was
    loss.backward()
    assert_same([p.grad for p in model.parameters()], want[1:])


def test_small_inputs_stay(moved):
    fn = remat.remat(lambda x: x.sin().sin(), offload_inputs="disk")
    x = torch.ones(8, requires_grad=True) * 2
    fn(x * 1).sum().backward()
    assert moved == []


def test_a_graph_that_is_kept_brings_them_back_again(moved):
    model = wrapped(Model(2), offload_inputs="disk")
    loss = forward(model)
    leaves = [*model.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    moved.clear()
    assert_same(torch.autograd.grad(loss, leaves), first)
    assert moved == ["back"] * 2


def test_in_host_memory_it_is_told_once_that_nothing_moves():
    model = wrapped(Model(2), offload_inputs=True)
    with pytest.warns(UserWarning, match=r"offload_inputs= moves no input .* 'disk'"):
        step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)


def test_where_compiled_code_or_forward_mode_holds_them_that_is_told(moved):
    def block(x):
        return x.sin().sin()

    fn = remat.remat(block, offload_inputs="disk")
    x, ones = torch.randn(SIZE, SIZE), torch.ones(SIZE, SIZE)

    def tangent(fn):
        gradient = torch.func.grad(lambda x: fn(x * 1.5).sum())
        return torch.func.jvp(gradient, (x,), (ones,))

    with pytest.warns(UserWarning, match="moves no input of .* forward mode is on"):
        found = tangent(fn)
    assert_same(found, tangent(block))
    with count_ops() as ops:
        assert_same(tangent(fn), found)  # told once
    assert ops["sin"] > 2
    assert moved == []
    found = torch.func.grad(lambda x: block(x).sum())(x)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="moves no input of .* compiled code holds"):
        torch.compile(fn, backend="eager")(x.requires_grad_()).sum().backward()
    assert_same(x.grad, found)


def test_calls_within_others_and_other_hooks(moved):
    inner = remat.remat(lambda x: x.sin().sin(), offload_inputs="disk")
    outer = remat.remat(lambda x: inner(x.exp()).sin())
    (x,) = (make(2 * SIZE, SIZE, seed=1).requires_grad_(),)
    outer(x * 1).sum().backward()
    want = torch.autograd.grad((x * 1).exp().sin().sin().sin().sum(), x)
    assert_same(x.grad, want[0])
    with torch.autograd.graph.save_on_cpu():
        found = torch.autograd.grad(inner((x * 1).exp()).sin().sum(), x)
    assert_same(found, want)
    assert moved == []


def test_threads_share_nothing():
    found = []

    def run():
        torch.manual_seed(0)
        found.append(step(wrapped(Model(), offload_inputs="disk")))

    with torch.random.fork_rng():
        run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert_same(*found)


def test_other_values_are_refused():
    model = nn.Sequential(Block())
    for call in (
        lambda: remat.remat(torch.sin, offload_inputs="cpu"),
        lambda: remat.nn.apply(model, "0", offload_inputs="cpu"),
    ):
        with pytest.raises(ValueError, match="offload_inputs='cpu': use True, False"):
            call()


@pytest.mark.parametrize("size", [4, SIZE])
def test_an_input_that_stayed_and_changes_is_refused(size):
    layer = nn.Linear(size, size)
    block = remat.remat(lambda x: layer(x).tanh(), offload_inputs="disk")
    x = torch.linspace(-1, 1, size * size).view(size, size) * 1.5
    with count_ops() as ops:
        expected = torch.autograd.grad(layer(x).tanh().sum(), layer.weight)
    assert ops["tanh"] == 1
    y = block(x)
    x += 1
    if size == SIZE:  # it is in a file, as it was
        assert_same(torch.autograd.grad(y.sum(), layer.weight), expected)
        return
    with pytest.raises(remat.MutationError, match=r"changed in place between"):
        torch.autograd.grad(y.sum(), layer.weight)


def test_an_inference_tensor_may_be_an_input():
    with torch.inference_mode():
        x = torch.ones(SIZE, SIZE)
    layer = nn.Linear(SIZE, SIZE)
    block = remat.remat(lambda x: layer(x.clone()).tanh(), offload_inputs="disk")
    with count_ops() as ops:
        found = torch.autograd.grad(block(x).sum(), layer.weight)
    assert ops["tanh"] == 2
    expected = torch.autograd.grad(layer(x.clone()).tanh().sum(), layer.weight)
    assert_same(found, expected)


def test_a_plan_over_a_step_moves_no_inputs():
    model, x = nn.Sequential(Block(), Block()), torch.ones(SIZE, SIZE)
    plan = remat.fit(model, x, budget="1GB")
    with pytest.raises(ValueError, match=r"over a step.*over='blocks'"):
        plan.apply(model, offload_inputs="disk")
    assert not plan.is_applied
    with count_ops() as ops:
        model(x).sum().backward()
    assert ops["tanh"] == 2  # nothing was applied


# --- Under torch.func ---


def at_end(model, held):
    """Return the model as a function of its parameters and its input."""

    def loss(parameters, x):
        found = functional_call(model, parameters, (x,))
        held.append(model.held())
        return found

    return loss


def parameters_of(model, requires_grad):
    found = {k: p.detach() for k, p in Model.named_parameters(model)}
    return {k: p.requires_grad_(requires_grad) for k, p in found.items()}


def twice(loss):
    """Return the gradient of a function of the gradient."""
    first = grad(loss, argnums=1)
    return grad(lambda p, x: (first(p, x) ** 2).sum(), argnums=(0, 1))


def within_level(loss):
    """Return the same, by a second derivative in the graph of one level."""

    def squares(p, x):
        (first,) = torch.autograd.grad(loss(p, x), x, create_graph=True)
        return (first**2).sum()

    return grad(squares, argnums=(0, 1))


def after_its_end(loss):
    def pulled(p, x):
        out, pull = vjp(loss, p, x)
        first, second = pull(torch.ones_like(out)), pull(torch.ones_like(out))
        assert_same(first, second)
        return second

    return pulled


def batched_within(loss):
    each = vmap(loss, (None, 0))
    return grad(lambda p, x: each(p, torch.stack([x, x + 1])).sum(), argnums=(0, 1))


def batched_outside(loss):
    each = vmap(grad(loss, argnums=(0, 1)), (None, 0))
    return lambda p, x: each(p, torch.stack([x, x + 1]))


TRANSFORMS = {
    "grad": lambda loss: grad(loss, argnums=(0, 1)),
    "of the input": lambda loss: grad(loss, argnums=1),
    "vjp": after_its_end,
    "jacrev": lambda loss: jacrev(lambda p, x: loss(p, x) * torch.ones(3), argnums=1),
    "twice": twice,
    "within a level": within_level,
    "of a vmap": batched_within,
    "in a vmap": batched_outside,
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("how", TRANSFORMS)
def test_under_transforms_they_are_gone_until_their_recomputes(
    how, requires_grad, moved, monkeypatch
):
    model, held, came, alive = Model(), [], [], []
    parameters = parameters_of(model, requires_grad)
    x = make(2 * SIZE, SIZE, seed=1).float()
    wrapped(model)
    gradient = TRANSFORMS[how](at_end(model, held))
    want = gradient(parameters, x)
    remat.nn.remove(model)
    assert {*held} == {5}

    class Copying(inputs.Fetched):
        def take(self, k):
            value = super().take(k).clone()
            came.append(weakref.ref(value.untyped_storage()))
            alive.append(sum(ref() is not None for ref in came))
            return value

    monkeypatch.setattr(inputs, "Fetched", Copying)
    wrapped(model, offload_inputs="disk")
    held.clear()
    assert_same(gradient(parameters, x), want)
    assert {*held} == {0}
    assert moved.count("away") == 5
    assert max(alive) == 1  # nodes of the backward hold none that came back


def test_under_grad_they_are_gone_from_the_peak(monkeypatch):
    monkeypatch.setattr(inputs, "in_file", outside_of_torch)
    x = make(2 * SIZE, SIZE, seed=1).float()

    def peak(count, **options):
        """In inputs of blocks."""
        model = wrapped(Model(count), **options)
        gradient = grad(at_end(model, []), argnums=1)
        parameters = parameters_of(model, False)
        gradient(parameters, x)
        return peak_bytes(lambda: gradient(parameters, x)) / x.nbytes

    away = {"offload_inputs": "disk"}
    for count in 4, 9:
        assert round(peak(count) - peak(count, **away)) == count


def test_a_node_at_the_base_sends_them_too(moved):
    model = Model()
    x = make(2 * SIZE, SIZE, seed=1).float().requires_grad_()

    def derivatives(**options):
        wrapped(model, higher_order=True, **options)
        loss, leaves = model(x), [x, *model.parameters()]
        held = model.held()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(sum((t**2).sum() for t in first), x)
        remat.nn.remove(model)
        return held, [*first, *second]

    (held, want), (left, found) = derivatives(), derivatives(offload_inputs="disk")
    assert (held, left) == (5, 0)
    assert_same(found, want)
    assert moved.count("away") == 5


def test_under_transforms_what_is_away_is_as_it_was():
    """What stayed, as it is small, is refused."""
    block = remat.remat(lambda w, x: (w @ x).sin(), offload_inputs="disk")
    w = torch.ones(SIZE, SIZE)
    for size in SIZE, 4:
        x = torch.ones(SIZE, size)
        want = grad(lambda w, x=x: (w @ x).sin().sum())(w)
        with count_ops() as ops:
            out, pull = vjp(lambda w, x=x: block(w * 1, x).sum(), w)
            x.add_(1)
            if size == SIZE:
                assert_same(pull(torch.ones_like(out))[0], want)
                assert ops["mm"] > 2  # of the forward, the recompute, the gradient
            else:
                with pytest.raises(remat.MutationError, match="changed in place"):
                    pull(torch.ones_like(out))

    def changed_in_level(fn, size):
        def loss(w):
            x, y = w * 1.5, (w * 2)[:, :size].clone()
            out = fn(x, y).sum()
            x.add_(1)
            y.add_(1)
            return out

        return grad(loss)(w)

    want = grad(lambda w: ((w * 1.5) @ (w * 2)).sin().sum())(w)
    assert_same(changed_in_level(block, SIZE), want)
    with pytest.raises(remat.MutationError, match="was changed in place between"):
        changed_in_level(block, 4)


# --- Blocks ---


class Scoped(Model):
    """Its blocks are `with` blocks, of what is made between them."""

    def __init__(self, count=5, **options):
        super().__init__(count)
        self.options = options

    def forward(self, x, others=None):
        self.seen.clear()
        for layer in self.layers:
            x = x * 1.5
            self.seen.append(weakref.ref(base_tensor(x).untyped_storage()))
            with remat.scope(**self.options):
                x = layer(x, others)
        return x.sum()


def scoped(**options):
    torch.manual_seed(0)
    return Scoped(**options)


def test_what_blocks_are_given_is_gone_until_their_recomputes(moved):
    with torch.random.fork_rng():
        plain, model = scoped(), scoped(offload_inputs="disk")
    want, loss = step(plain), forward(plain)
    assert plain.held() == 5
    del loss
    assert_away_until_the_backward(model, want, moved)


def test_a_block_counts_operations_as_without(moved):
    counts = []
    for options in ({}, {"offload_inputs": "disk"}):
        with torch.random.fork_rng():
            model = scoped(**options)
        with count_ops() as ops:
            step(model)
        counts.append((ops["addmm"], ops["tanh"]))
    assert counts[0] == counts[1] == (2 * 10 - 5, 2 * 5)
    assert len(moved) == 2 * 5


def test_what_others_hold_of_blocks_stays(moved):
    with torch.random.fork_rng():
        model, plain = scoped(offload_inputs="disk"), scoped()
    others = make(2 * SIZE, SIZE, seed=4).float()
    want, found = step(plain, others), step(model, others)
    assert_same(found, want)
    assert moved == ["away"] * 5 + ["back"] * 5


def test_a_block_goes_on_where_its_input_changes(moved):
    """What is away is as it was; what stayed, as it is small, is refused."""
    w = torch.ones(SIZE, SIZE, requires_grad=True)
    for size in SIZE, 4:
        x = torch.full((SIZE, size), 2.0, requires_grad=True) * 1
        with remat.scope(offload_inputs="disk"):
            y = (w @ x).sin()
        loss = y.sum()
        del y
        with torch.no_grad():
            x.add_(1)
        if size == SIZE:
            (found,) = torch.autograd.grad(loss, w)
            (want,) = torch.autograd.grad((w @ (x - 1)).sin().sum(), w)
            assert_same(found, want)
            continue
        with pytest.raises(remat.MutationError, match="was changed in place between"):
            torch.autograd.grad(loss, w)
    assert moved[:2] == ["away", "back"]


def test_blocks_within_others_send_what_they_are_given(moved):
    x = make(SIZE, SIZE, seed=1).requires_grad_()

    def run(outer, inner):
        with outer:
            y = (x * 1.5).sin()
            with inner:
                z = (y.cos() * 2).sin()
            return (z.exp() * y).sum()

    def block(where):
        return remat.scope(offload_inputs=where)

    want = torch.autograd.grad(run(block(False), block(False)), x)
    assert moved == []
    for places in ("disk", False), (False, "disk"), ("disk", "disk"):
        assert_same(torch.autograd.grad(run(*map(block, places)), x), want)


def test_where_a_block_moves_nothing_that_is_told_once():
    x = make(SIZE, SIZE, seed=1).requires_grad_()

    def run(where):
        y = x * 1.5
        with remat.scope(offload_inputs=where):
            y = y.sin().sin()
        return y.sum()

    with pytest.warns(UserWarning, match=r"moves no input of `scope`.* pass 'disk'"):
        run(True).backward()
    with pytest.warns(UserWarning, match=r"moves no input of `scope`.* a call around"):
        remat.remat(run)("disk").backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(True).backward()
        remat.remat(run)("disk").backward()
    with pytest.raises(ValueError, match="offload_inputs='cpu': use True, False"):
        run("cpu")
