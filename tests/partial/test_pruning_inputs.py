"""Inputs that no backward reads are let go, and nothing else is.

From the call on that follows a recomputation which went well, a call keeps the inputs
that it needs. Its graph saves some of them itself, as in plain code; what a call keeps
besides, it keeps for the sake of what it will recompute. What is let go is checked by
weak references to storages.
"""

import gc
import weakref

import pytest
import torch
from support.pruning import W, X, last_trace
from support.zoo import V, leaves_of, make, scalar
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat import MutationError, RecomputeError, policies, remat
from remat._graph.graph import handles_at
from remat.testing import assert_same, count_ops, live_bytes


everything = policies.everything_saveable


@pytest.fixture(autouse=True)
def _no_collector():
    gc.disable()
    yield
    gc.enable()


def warm(fn, *args, calls=3):
    """Call and differentiate a few times, so that inputs may be let go."""
    for _ in range(calls):
        leaves = [leaves_of(a)[0] if isinstance(a, Tensor) else a for a in args]
        wanted = [t for t in leaves if isinstance(t, Tensor)]
        torch.autograd.grad(scalar(fn(*leaves)), wanted, allow_unused=True)


def activation(t):
    """A tensor that only a graph will hold, and a reference to its storage."""
    held = leaves_of(t)[0] * 1
    storage = StorageWeakRef(held.untyped_storage())
    return held, lambda: None if storage.expired() else storage


def held_for(out):
    """The inputs that are held by the call behind a result."""
    (handle,) = handles_at(out.grad_fn)
    return [t for _, t in handle.call.held.kept()]


# What is computed, and which of two inputs are kept for it.
FUNCTIONS = {
    "2x + 1": (lambda x, w: 2 * x + 1 + w, ()),
    "sin(x) + w": (lambda x, w: x.sin() + w, (0,)),
    "x + sin(w)": (lambda x, w: x + w.sin(), (1,)),
    "a product": (lambda x, w: x * w, (0, 1)),
    "views": (lambda x, w: torch.cat([x.t().reshape(-1), w.flatten()]) * 2, ()),
    "sums": (lambda x, w: x.mean(0) + w.sum(), ()),
    "a matrix product": (lambda x, w: x @ w, (0, 1)),
    "shapes": (lambda x, w: x.sin() * w.shape[0] + w.expand(4, 4), (0,)),
    "detached": (lambda x, w: x.detach().sin().sum() * w + x * 2, (0,)),
    "zeros": (lambda x, w: torch.zeros_like(x) + w.new_ones(4, 4) * w + x, ()),
    "constant": (lambda x, w: x.exp().detach() + w * 3, ()),
    "one in the end": (lambda x, w: (x * 2 + w * 3).sin(), (0, 1)),
    "half": (lambda x, w: (x[:2] * w[:2]) + x[2:].mean(), (0, 1)),
    "in place": (lambda x, w: (x * 2).add_(w).mul_(3), ()),
}


def with_more(fn):
    """A function, and something beside it that is to be recomputed."""
    return lambda x, w, more: (fn(x, w), more.sin().exp())


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_the_inputs_kept_are_those_needed(case, prune):
    fn, needed = FUNCTIONS[case]
    ours = remat(with_more(fn), prune=prune)
    warm(ours, X, W, V)
    (x, x_ref), (w, w_ref) = activation(X), activation(W)
    out = ours(x, w, leaves_of(V)[0])
    del x, w
    alive = [x_ref() is not None, w_ref() is not None]
    assert alive == [i in needed or not prune for i in (0, 1)]
    with count_ops() as ops:
        scalar(out).backward()
    # Without pruning, also that of which only a constant is made.
    assert ops["exp"] == (2 if case == "constant" and not prune else 1)


@pytest.mark.parametrize("case", FUNCTIONS)
def test_gradients_without_those_inputs(case):
    fn, _ = FUNCTIONS[case]
    ours = remat(with_more(fn), prune=True)
    warm(ours, X, W, V)
    for seed in range(3):
        grads = []
        for f in (with_more(fn), ours):
            x, w = leaves_of(make(4, 4, seed=seed), make(4, 4, seed=seed + 1))
            loss = scalar(f(x * 1.5, w * 2.5, V * 1))
            grads.append(torch.autograd.grad(loss, (x, w), allow_unused=True))
        assert_same(grads[1][1], grads[0][1])
        assert (grads[1][0] is None) == (grads[0][0] is None)
        if grads[0][0] is not None:
            assert_same(grads[1][0], grads[0][0])


def two_and(x, w):
    return 2 * x + w.exp()


def test_the_first_call_keeps_all_inputs():
    ours = remat(two_and, prune=True)
    x, ref = activation(X)
    out = ours(x, leaves_of(W)[0])
    del x
    assert ref() is not None
    scalar(out).backward()
    assert ref() is None
    x, ref = activation(X)
    out = ours(x, leaves_of(W)[0])
    del x
    assert ref() is None
    scalar(out).backward()


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_without_pruning_all_inputs_are_kept(policy):
    ours = remat(two_and, prune=False, policy=policy)
    warm(ours, X, W)
    x, ref = activation(X)
    out = ours(x, leaves_of(W)[0])
    del x
    assert ref() is not None
    scalar(out).backward()
    assert ref() is None


def test_a_policy_alone_lets_go_of_what_a_large_call_does_not_need():
    big = make(1 << 13, seed=1)
    ours = remat(two_and, policy=policies.dots_saveable)
    warm(ours, big, big)
    x, ref = activation(big)
    out = ours(x, leaves_of(big)[0])
    del x
    assert ref() is None
    with count_ops() as ops:
        scalar(out).backward()
    assert ops["exp"] == 1


def test_the_bytes_kept():
    fn = lambda x, w: x.sin().exp() + w
    ours = remat(fn, prune=True)
    big = make(1 << 12, seed=1)
    warm(ours, big, big)
    x, w = leaves_of(big, big)
    size = big.nbytes
    scalars = 64  # the products' constants
    kept = live_bytes(lambda: ours(x * 1, w * 1))
    assert 2 * size <= kept < 2 * size + scalars, "the result, and x"
    assert live_bytes(lambda: remat(fn, prune=False)(x * 1, w * 1)) >= 3 * size


def test_residuals_in_place_of_inputs():
    """With a policy, an input is not needed if what is computed of it is kept."""
    ours = remat(lambda x, w: (w * x.exp()).sin(), prune=True, policy=everything)
    for _ in range(3):
        scalar(ours(X.clone(), leaves_of(W)[0])).backward()
    x = X.clone()
    ref = weakref.ref(x)
    out = ours(x, leaves_of(W)[0])
    del x
    assert ref() is None
    with count_ops() as ops:
        scalar(out).backward()
    assert ops["exp"] == 0


@pytest.mark.parametrize("higher_order", [False, True])
def test_what_a_residual_depends_on(higher_order):
    """It is let go where plain's graph is there to differentiate the gradient by.

    Without that graph, the gradient itself could not be differentiated.
    """
    fn = lambda x: (x @ W).tanh().tanh()
    ours = remat(fn, prune=True, policy=everything, higher_order=higher_order)
    warm(ours, X)
    x, ref = activation(X)
    out = ours(x)
    del x
    assert (ref() is not None) == higher_order
    with count_ops() as ops:
        scalar(out).backward()
    assert (ops["mm"], ops["tanh"]) == (1, 0)
    second = []
    for f in (fn, ours):
        (x,) = leaves_of(X)
        (first,) = torch.autograd.grad(scalar(f(x * 1)), x, create_graph=True)
        second.append(torch.autograd.grad(scalar(first), x))
    assert_same(second[1], second[0], reassociated=higher_order)


# --- Parameters, and what is not an activation ---


def test_parameters_are_never_let_go():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    ours = remat(module, prune=True)
    for _ in range(4):
        (x,) = leaves_of(X)
        out = ours(x)
        scalar(out).backward()
    out = ours(leaves_of(X)[0])
    kept = {t.data_ptr() for t in held_for(out)}
    assert {p.data_ptr() for p in module.parameters()} <= kept


def test_integers_and_masks_that_are_not_needed():
    def fn(x, index, mask):
        return x * 2 + (index * 3).double() + mask

    ours = remat(fn, prune=True)
    index, mask = torch.arange(4), torch.ones(4, dtype=torch.bool)
    for _ in range(3):
        scalar(ours(leaves_of(X)[0], index, mask)).backward()
    index = index.clone()
    ref = weakref.ref(index)
    out = ours(leaves_of(X)[0], index, mask)
    del index
    assert ref() is None
    scalar(out).backward()


def test_captured_activations_are_let_go_as_arguments_are():
    """The graph does not hold the function, only a snapshot without tensors."""

    def call(h, x):
        return remat(lambda x: x.sin().exp() + h, prune=True)(x)

    for kept in (True, False):
        h, ref = activation(W)
        out = call(h, leaves_of(X)[0])
        del h
        assert (ref() is not None) == kept
        scalar(out).backward()
        assert ref() is None


def test_buffers_that_are_updated():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Flatten()).double()
    plain = nn.Sequential(nn.BatchNorm1d(4), nn.Flatten()).double()
    ours = remat(module, prune=True)
    for seed in range(5):
        grads = []
        for f in (plain, ours):
            (x,) = leaves_of(make(4, 4, seed=seed))
            grads.append(torch.autograd.grad(scalar(f(x)), x))
        assert_same(grads[1], grads[0])
    assert_same(dict(module.named_buffers()), dict(plain.named_buffers()))


def test_the_same_tensor_twice_and_views_of_one():
    fn = lambda x, w: x.sin().exp() + w * 2
    ours = remat(fn, prune=True)
    warm(ours, X, W)
    for _ in range(3):
        grads, counts = [], []
        for f in (fn, ours):
            (x,) = leaves_of(X)
            h = x * 1
            loss = scalar([f(h, h), f(h, h.t()), f(h[:2], h[2:])])
            with count_ops() as ops:
                grads.append(torch.autograd.grad(loss, x))
            counts.append(ops["exp"])
        assert_same(grads[1], grads[0])
        assert counts == [0, 3]


# --- Mutation between forward and backward ---


def test_a_change_of_what_is_not_needed_is_no_error():
    fn = lambda x, w: x.sin().exp() + w
    ours = remat(fn, prune=True)
    warm(ours, X, W)
    x, w = leaves_of(X, W)
    h = w * 1
    out = ours(x, h)
    with torch.no_grad():
        h.zero_()
    with count_ops() as ops:
        got = torch.autograd.grad(scalar(out), (x, w))
    assert ops["exp"] == 1
    x, w = leaves_of(X, W)
    assert_same(got, torch.autograd.grad(scalar(fn(x, w * 1)), (x, w)))


def test_a_change_of_what_is_needed_is_an_error():
    ours = remat(lambda x, w: x.sin().exp() + w, prune=True)
    warm(ours, X, W)
    x, w = leaves_of(X, W)
    h = x * 1
    out = ours(h, w)
    with torch.no_grad():
        h.zero_()
    with pytest.raises(MutationError, match="`x`"):
        torch.autograd.grad(scalar(out), (x, w))


def test_a_change_in_the_first_call_is_an_error_only_if_it_is_read():
    ours = remat(lambda x, w: x.sin().exp() + w, prune=True)
    x, w = leaves_of(X, W)
    h = w * 1
    out = ours(x, h)
    with torch.no_grad():
        h.zero_()
    with count_ops() as ops:
        (got, _) = torch.autograd.grad(scalar(out), (x, w))
    assert ops["exp"] == 1
    x, w = leaves_of(X, W)
    assert_same(got, torch.autograd.grad(scalar(x.sin().exp() + w), x)[0])


# --- Needed after all ---


def branching(x, w, flag):
    return (x.exp() if flag["on"] else x * 2) + w.sin().exp()


class Hidden:
    """A flag that no snapshot has: of a class, and read by a name that is computed."""

    on = False

    def __getitem__(self, name):
        return getattr(Hidden, name)


@pytest.mark.parametrize("policy", [None, everything], ids=["nothing", "everything"])
def test_an_input_let_go_is_needed_on_another_branch(policy):
    flag = {"on": False}
    fn = lambda x, w: branching(x, w, flag)
    ours = remat(fn, prune=True, policy=policy)
    for on in [False, False, False, True, True, False, True, False, False]:
        flag["on"] = on
        grads = []
        for f in (fn, ours):
            x, w = leaves_of(X, W)
            grads.append(torch.autograd.grad(scalar(f(x * 1, w * 1)), (x, w)))
        assert_same(grads[1], grads[0])


def test_a_branch_is_taken_as_the_flag_was():
    flag = {"on": False}
    ours = remat(lambda x, w: branching(x, w, flag), prune=True)
    warm(ours, X, W)
    x, w = leaves_of(X, W)
    want = torch.autograd.grad(scalar(branching(x * 1, w * 1, flag)), (x, w))
    loss = scalar(ours(x * 1, w * 1))
    flag["on"] = True
    with count_ops() as ops:
        got = torch.autograd.grad(loss, (x, w))
    assert_same(got, want)
    assert ops["exp"] == 1


def test_a_branch_taken_in_the_recomputation_only_is_an_error(monkeypatch):
    ours = remat(lambda x, w: branching(x, w, Hidden()), prune=True)
    warm(ours, X, W)
    x, w = leaves_of(X, W)
    loss = scalar(ours(x * 1, w * 1))
    monkeypatch.setattr(Hidden, "on", True)
    with pytest.raises(RecomputeError, match="prune=False"):
        torch.autograd.grad(loss, (x, w))


def test_a_value_that_only_python_reads_now_and_then():
    """No operation shows it: an error once, in the backward, and right ever after."""
    flag = {"on": False}

    def fn(x, w):
        factor = float(x.detach().numpy()[0, 0]) if flag["on"] else 1.5
        return (w * factor).sin() + x

    ours = remat(fn, prune=True)
    warm(ours, X, W)
    flag["on"] = True
    x, w = leaves_of(X, W)
    try:
        first = torch.autograd.grad(scalar(ours(x, w)), (x, w))
    except RecomputeError as error:
        assert "prune=False" in str(error)  # noqa: PT017
        first = None
    grads = []
    for f in (fn, ours):
        x, w = leaves_of(X, W)
        grads.append(torch.autograd.grad(scalar(f(x, w)), (x, w)))
    assert_same(grads[1], grads[0])
    assert first is None or torch.equal(first[0], grads[0][0])


@pytest.mark.filterwarnings("ignore:.* is not followed any more")
def test_nothing_is_let_go_until_a_recomputation_went_well():
    """A function whose record never fits keeps its inputs."""
    flag = {"on": False}
    ours = remat(lambda x, w: branching(x, w, flag), prune=True)
    for call in range(10):
        flag["on"] = call % 2 == 0
        x, ref = activation(X)
        out = ours(x, leaves_of(W)[0])
        del x
        kept = ref() is not None
        scalar(out).backward()
        assert kept
    assert last_trace().reason


# --- Chains and nesting ---


def test_a_chain_of_blocks_keeps_what_a_policy_says_and_no_more():
    weights = [make(4, 4, seed=k) for k in range(4)]
    alive = lambda refs: [not ref.expired() for ref in refs]

    @remat(prune=True)
    def block(x, w):
        return x + torch.tanh(x @ w) * 2

    def chain(x):
        refs = []
        for w in weights:
            x = block(x, w)
            refs.append(StorageWeakRef(x.untyped_storage()))
        return x, refs

    for _ in range(3):
        (x,) = leaves_of(X)
        out, _ = chain(x)
        scalar(out).backward()
    (x,) = leaves_of(X)
    out, refs = chain(x)
    # Each block keeps its input, which is the result of the one before.
    assert alive(refs) == [True] * 4
    with count_ops() as ops:
        scalar(out).backward()
    assert ops["tanh"] == 4
    assert alive(refs) == [False] * 3 + [True]


def test_a_nested_call_whose_input_is_not_needed():
    """It counts as needed if the outer call was recorded before the inner one ran."""
    inner = remat(lambda h: 2 * h + 1, prune=True)
    fn = lambda x: inner(x.sin()) * 3
    warm(inner, X)
    ours = remat(fn, prune=True)
    warm(ours, X)
    grads = []
    for f in (fn, ours):
        (x,) = leaves_of(X)
        with count_ops() as ops:
            grads.append(torch.autograd.grad(scalar(f(x)), x))
    assert_same(grads[1], grads[0])
    assert ops["sin"] == 2, "that of the forward, and that of the loss"


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_func_transforms_see_all_inputs(when):
    """Under a level nothing is let go; the numbers are those of plain code."""
    fn = lambda x, w: x.sin() + w * 2
    ours = remat(fn, prune=True)
    warm(ours, X, W)

    def loss(f):
        return lambda x, w: scalar(f(x, w))

    for _ in range(3):
        if when == "forward":
            got = torch.func.grad(loss(ours), (0, 1))(X, W)
            want = torch.func.grad(loss(fn), (0, 1))(X, W)
        else:
            got = torch.func.vjp(ours, X, W)[1](W)
            want = torch.func.vjp(fn, X, W)[1](W)
        assert_same(got, want)
