"""docs/limits.md and docs/randomness.md: what is put back, watched, drawn, refused."""

import copy
import itertools
import random
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import jacrev
from torch.fx.experimental.proxy_tensor import make_fx

import remat.random as keyed
from remat import MutationError, RandomnessError, RecomputeError, remat
from remat.testing import count_ops


def ones(*shape):
    return torch.ones(*shape, requires_grad=True)


def gradient(out, leaf):
    return torch.autograd.grad(out.sum(), leaf)[0]


def scaled(x, scale):
    return (x * scale).sin()


def times(x, number):
    """The backward reads the number as a tensor, made again in a recompute."""
    return x * torch.tensor(float(number))


# --- What the function changes ---


def test_prints_run_again_and_changes_to_lists_do_not(capsys):
    ran = []

    def fn(x):
        ran.append(1)
        print("here")  # noqa: T201
        return x.sin().exp()

    remat(fn)(ones(3)).sum().backward()
    assert len(ran) == 1
    assert capsys.readouterr().out.split() == ["here", "here"]


def test_an_embedding_whose_rows_are_scaled_is_refused_under_torch_func():
    embed = nn.Embedding(4, 3, max_norm=0.1)
    fn = remat(lambda i, x: (embed(i) * x).sin())

    def loss(x):
        return fn(torch.arange(3), x).sum()

    with pytest.raises(MutationError, match=r"`embed\.weight`"):
        torch.func.grad(loss)(ones(3))


# --- What changes between the call and its backward ---


def test_a_module_of_another_dtype_by_then_fails_in_the_backward():
    module = nn.Linear(3, 3)
    out = remat(lambda x: module(x).sin().exp())(ones(2, 3))
    module.double()
    moved = pytest.warns(UserWarning, match="was given other memory")
    with moved, pytest.raises(RecomputeError, match="float64"):
        out.sum().backward()


settings = ModuleType("settings")

settings.CONSTANT = torch.ones(3)
settings.WEIGHT = ones(3)


def test_attributes_of_python_modules_are_found_under_torch_func():
    x = ones(3)

    def fn(x):
        return (x * settings.WEIGHT).exp()

    assert torch.equal(gradient(remat(fn)(x), settings.WEIGHT), gradient(fn(x), x))
    with count_ops() as ops:
        found = torch.func.grad(lambda x: remat(fn)(x).sum())(x)
    assert torch.equal(found, torch.func.grad(lambda x: fn(x).sum())(x))
    assert ops["exp"] == 2


def test_attributes_that_are_found_by_computed_names_are_read_as_they_are_by_then():
    x, name = ones(3), "SCALE"
    settings.SCALE = 2.0
    y = remat(lambda x: scaled(x, getattr(settings, name)))(x)
    settings.SCALE = 5.0
    with count_ops() as ops:
        got = gradient(y, x)
    assert ops["mul"] == 1 + 2
    # The sine's part is of the recompute; what the product saved is a number.
    assert torch.equal(got, 2 * (5 * x).cos())


# --- What is watched ---


@pytest.mark.parametrize("rows", [128, 129])
def test_captured_tensors_without_a_gradient_may_change_if_they_are_small(rows):
    x, table = ones(3), torch.zeros(rows, 128)

    def fn(x):
        table.add_(1)
        return (x * table[0, :3]).sin()

    if rows == 129:
        with pytest.raises(MutationError, match="`table` was changed in place inside"):
            gradient(remat(fn)(x), x)
        return
    with count_ops() as ops:
        got = gradient(remat(fn)(x), x)
    assert ops["add_"] == 2
    assert torch.equal(got, x.cos())
    assert torch.equal(table, torch.ones(rows, 128))


# --- What leaves, and results ---


def test_a_dual_result_that_shares_memory_may_be_changed_in_place():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, 3), torch.ones(3, 3))
        remat(lambda x: x[0])(dual).mul_(2)


def test_dropout_of_what_is_not_contiguous_draws_as_at_the_base():
    """A transform of torch's takes another kernel for it, on the CPU."""
    x = torch.linspace(1, 2, 20).view(5, 4)

    def drawn(fn, transform):
        torch.manual_seed(0)
        return transform(lambda x: fn(x.t()).sum())(x)

    drop, of_x = nn.Dropout(0.4), torch.func.grad
    with count_ops() as ops:
        ours = drawn(remat(drop), of_x)
    assert ops["bernoulli_"] == 2
    torch.manual_seed(0)
    at_base = drop(x.t()).t() / x
    assert torch.allclose(ours, at_base)
    assert not torch.equal(drawn(drop, of_x), ours)


# --- What is replayed, and what is not ---


local = threading.local()


def in_a_thread_local_variable():
    local.stream = random.Random(5)
    return lambda: local.stream.random()


def in_an_object_of_a_module():
    settings.state = SimpleNamespace(generator=random.Random(5))
    return lambda: settings.state.generator.random()


def behind_a_computed_name():
    settings.late, name = SimpleNamespace(generator=random.Random(5)), "late"
    return lambda: getattr(settings, name).generator.random()


def among(others):
    around = [[i] for i in range(others)]
    source = itertools.repeat((around, [random.Random(5)], [*map(list, around)]))
    return lambda: next(source)[1][0].random()


def of_the_operating_system():
    source = random.SystemRandom()
    return lambda: source.random()


def of_new_generators():
    return lambda: np.random.default_rng().random()


def of_spawned_generators():
    source = np.random.default_rng(0)
    return lambda: source.spawn(1)[0].random()


# Each makes a function that draws a number; whether a recompute draws it again.
STREAMS = {
    "in a thread-local variable": (in_a_thread_local_variable, True),
    "in an object of a module": (in_an_object_of_a_module, True),
    "behind a computed name": (behind_a_computed_name, False),
    "among a hundred values": (lambda: among(100), True),
    "among five hundred values": (lambda: among(500), False),
    "of the operating system": (of_the_operating_system, False),
    "of new generators": (of_new_generators, False),
    "of spawned generators": (of_spawned_generators, False),
}


@pytest.mark.parametrize(("make", "replayed"), STREAMS.values(), ids=list(STREAMS))
def test_whether_a_draw_is_replayed(make, replayed):
    x, draw = ones(3), make()
    y = remat(lambda x: times(x, draw()))(x)
    assert torch.equal(gradient(y, x), y) is replayed


def test_a_generator_that_is_only_copied_is_not_replayed():
    x, source = ones(3), random.Random(5)
    y = remat(lambda x: times(x, copy.copy(source).random()))(x)
    source.random()
    assert not torch.equal(gradient(y, x), y)


def test_a_generator_made_in_the_first_call_and_kept_is_replayed():
    kept, x = {}, ones(8)

    def fn(x):
        if "g" not in kept:
            kept["g"] = torch.Generator().manual_seed(0)
        return x * torch.rand(8, generator=kept["g"])

    for _ in range(2):
        y = remat(fn)(x)
        with count_ops() as ops:
            assert torch.equal(gradient(y, x), y.detach())
        assert ops["rand"] == 1


# --- Batches of cotangents ---


def drop_squares(x):
    return nn.functional.dropout(x * x)


def drop_squares_by_key(x):
    return keyed.dropout(keyed.key(0), x * x, 0.5)


def test_a_batch_of_cotangents_at_base_is_of_the_draws_of_the_forward():
    x = ones(8)
    y = remat(drop_squares)(x)
    with count_ops() as ops:
        (got,) = torch.autograd.grad(y, x, torch.eye(8), is_grads_batched=True)
    assert ops["bernoulli_"] == 1
    assert torch.equal(got, (2 * y).diag())


def test_a_batch_of_recomputations_that_draw_is_refused():
    with pytest.raises(RuntimeError, match="random operation"):
        jacrev(jacrev(remat(drop_squares)))(torch.ones(8))


def test_a_batch_of_recomputations_may_draw_from_keys():
    x, fn = ones(8), remat(drop_squares_by_key)
    y = fn(x)
    (got,) = torch.autograd.grad(y, x, torch.eye(8), is_grads_batched=True)
    assert torch.equal(got, (2 * y).diag())
    assert torch.equal(jacrev(jacrev(fn))(x).sum((1, 2)), 2 * y)


# --- Keys under vmap ---


@pytest.mark.parametrize("in_dims", [(0, 0), (0, 1)])
def test_vmap_that_takes_the_bits_of_a_key_as_examples_complains_of_a_size_2(in_dims):
    key = keyed.key(1) if in_dims == (0, 0) else keyed.split(keyed.key(1), 4)
    drop = torch.vmap(lambda x, key: keyed.dropout(key, x, 0.5), in_dims)
    with pytest.raises(ValueError, match=r"mapped dimension, got sizes \[4, 2\]"):
        drop(torch.ones(4, 8), key)


# --- Refused draws ---


def test_draws_are_refused_in_graphs_too():
    fn = remat(drop_squares, rng="error")
    refused = pytest.raises(RandomnessError, match="drew from a global random stream")
    for x in ones(3), torch.ones(3):
        for mode in torch.enable_grad, torch.no_grad:
            with refused, mode():
                fn(x)
    for x in ones(3), torch.ones(3):
        for mode in torch.enable_grad, torch.no_grad:
            with refused, mode():
                make_fx(fn)(x)


def test_a_refused_draw_leaves_the_stream_of_python_alone():
    before = random.getstate()
    with pytest.raises(RandomnessError, match="stream of: Python's random"):
        remat(lambda x: x * random.random(), rng="error")(ones(3))
    assert random.getstate() == before


def test_a_refused_draw_undoes_one_of_another_thread_at_that_moment():
    library = torch.library.Library("remat_test_docs", "DEF")
    library.define("slow(Tensor x) -> Tensor")

    def slow(x):
        thread = threading.Thread(target=torch.rand, args=(3,))
        thread.start()
        thread.join()
        return x.clone()

    library.impl("slow", slow, "CPU")
    state = torch.get_rng_state()
    refused = pytest.raises(RandomnessError, match="slow")
    with refused, keyed.bind(keyed.key(0)):
        torch.ops.remat_test_docs.slow(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)


# --- In a bound block ---


def test_a_coroutine_that_waits_in_a_bound_block_leaves_it_open():
    def waiting():
        with keyed.bind(keyed.key(0)):
            yield

    block = waiting()
    next(block)
    meanwhile = torch.rand(3)
    assert not [*block]
    assert torch.equal(meanwhile, keyed.bind(keyed.key(0))(torch.rand)(3))


def test_a_compiled_function_in_a_bound_block_is_not_compiled():
    traced = []

    def backend(graph, inputs):
        traced.append(inputs)
        return graph

    fn = torch.compile(drop_squares, backend=backend)
    whole = torch.compile(drop_squares, backend=backend, fullgraph=True)
    bind = keyed.bind(keyed.key(0))
    with bind:
        assert torch.equal(fn(torch.ones(9)), bind(drop_squares)(torch.ones(9)))
        with pytest.raises(RuntimeError, match="fullgraph"):
            whole(torch.ones(9))
    assert not traced
