"""A key that is consumed twice is an error that names both lines, while one asks."""

import functools
import re
import threading

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat import KeyReuseError, random, remat
from remat.random import _reuse, check_key_reuse
from remat.testing import count_ops


K = random.key(42)
KEYS = random.split(K, (2, 3))

CONSUMERS = {
    "bits": random.bits,
    "uniform": random.uniform,
    "normal": random.normal,
    "bernoulli": random.bernoulli,
    "rademacher": random.rademacher,
    "randint": lambda k: random.randint(k, (), 0, 9),
    "gumbel": random.gumbel,
    "exponential": random.exponential,
    "laplace": random.laplace,
    "truncated_normal": lambda k: random.truncated_normal(k, -1.0, 1.0),
    "permutation": lambda k: random.permutation(k, 9),
    "independent": lambda k: random.permutation(k, torch.ones(2, 3), independent=True),
    "choice": lambda k: random.choice(k, 9),
    "choice with p": lambda k: random.choice(k, 2, p=torch.ones(2)),
    "choice without": lambda k: random.choice(k, 9, (2,), replace=False),
    "choice without, with p": lambda k: random.choice(k, 2, (), False, torch.ones(2)),
    "categorical": lambda k: random.categorical(k, torch.ones(3)),
    "dropout": lambda k: random.dropout(k, torch.ones(2, 3), 0.5),
    "split": random.split,
    "raw split": lambda k: random.split(random.key_data(k)),
}


@pytest.mark.parametrize("consume", CONSUMERS.values(), ids=CONSUMERS.keys())
@pytest.mark.parametrize("keys", [K, KEYS])
def test_every_sampler_and_split_consumes_a_key_once(consume, keys):
    with check_key_reuse():
        consume(keys)
        with pytest.raises(KeyReuseError, match="a key was consumed twice"):
            random.uniform(keys)
    with check_key_reuse():
        random.uniform(keys)
        with pytest.raises(KeyReuseError, match="a key was consumed twice"):
            consume(keys)


def line_of(text):
    with open(__file__) as source:
        (number,) = [i for i, line in enumerate(source, 1) if line.endswith(text)]
    return f"{__file__}:{number}, in "


def test_the_error_names_the_key_and_both_lines():
    with check_key_reuse():
        random.normal(K)  # the first line
        with pytest.raises(KeyReuseError, match="split") as caught:
            random.split(K)  # the second line
    message = str(caught.value)
    assert "(seed, offset) = (42, 0)" in message
    assert re.search("first: " + re.escape(line_of("# the first line\n")), message)
    assert re.search("again: " + re.escape(line_of("# the second line\n")), message)
    assert "remat.random.clone(key)" in message


def test_distinct_keys_are_no_reuse():
    with check_key_reuse():
        a, b = random.split(K)
        random.normal(a)
        for i in range(5):
            random.normal(random.fold_in(b, i))
        random.uniform(random.split(random.fold_in(b, 7), 4))


def test_fold_in_consumes_nothing_but_gives_equal_keys_for_equal_numbers():
    with check_key_reuse():
        random.fold_in(K, 3)
        random.uniform(random.fold_in(K, 3))
        random.uniform(random.fold_in(K, 4))
        random.uniform(K)
        with pytest.raises(KeyReuseError, match="consumed twice"):
            random.uniform(random.fold_in(K, 3))


def test_an_equal_key_made_anew_is_a_reuse():
    with check_key_reuse():
        random.uniform(random.key(42))
        with pytest.raises(KeyReuseError, match="consumed twice"):
            random.uniform(random.key(42))


def test_each_clone_may_be_consumed_besides_the_original():
    with check_key_reuse():
        twin = random.clone(K)
        random.uniform(K)
        random.uniform(twin)
        with pytest.raises(KeyReuseError, match="consumed twice"):
            random.uniform(twin)
        random.uniform(random.clone(K))
        with pytest.raises(KeyReuseError, match="consumed twice"):
            random.uniform(K)


def test_each_key_of_an_array_counts_by_itself():
    with check_key_reuse():
        random.uniform(KEYS[0, 0])
        random.uniform(KEYS[0, 1:])
        for key in KEYS[1]:
            random.uniform(key)
        with pytest.raises(KeyReuseError, match="consumed twice"):
            random.uniform(KEYS[:, 1])


def test_an_array_that_holds_a_key_twice_is_a_reuse():
    twice = KEYS[[0, 0]]
    with check_key_reuse(), pytest.raises(KeyReuseError, match="consumed twice"):
        random.uniform(twice)


def test_indexing_comparing_and_copying_consume_nothing():
    with check_key_reuse():
        assert next(iter(KEYS))[1] == KEYS[0, 1]
        assert random.wrap_key_data(random.key_data(K)).to("cpu") == K
        random.uniform(KEYS)


def test_dropout_that_drops_nothing_consumes_nothing():
    with check_key_reuse():
        for p, training in ((0.0, True), (0.5, False), (0.5, True)):
            random.dropout(K, torch.ones(3), p, training)


def test_what_was_consumed_before_the_block_does_not_count():
    random.uniform(K)
    for _ in range(2):
        with check_key_reuse():
            random.uniform(K)
    random.uniform(K)
    assert not _reuse._open


def test_blocks_inside_one_another_count_together():
    with check_key_reuse():
        random.uniform(KEYS[0, 0])
        with check_key_reuse():
            random.uniform(KEYS[0, 1])
            with pytest.raises(KeyReuseError, match="consumed twice"):
                random.uniform(KEYS[0, 0])
        with pytest.raises(KeyReuseError, match="consumed twice"):
            random.uniform(KEYS[0, 1])


def test_the_block_is_left_by_an_exception():
    both = torch.stack([K.data, K.data])
    with pytest.raises(KeyReuseError, match="consumed twice"), check_key_reuse():
        random.uniform(both)
    random.uniform(both)
    assert not _reuse._open


def test_a_draw_that_is_refused_consumes_nothing():
    wide, x = torch.zeros(7), torch.ones(3)
    refused = [
        lambda: random.uniform(K, 3, minval=wide),
        lambda: random.normal(K, 3, std=wide),
        lambda: random.bernoulli(K, wide, (3,)),
        lambda: random.gumbel(K, 3, loc=wide),
        lambda: random.exponential(K, 3, scale=wide),
        lambda: random.laplace(K, 3, loc=wide),
        lambda: random.truncated_normal(K, wide, 9.0, (3,)),
        lambda: random.randint(K, 3, wide.long(), 9),
        lambda: random.randint(K, 3, 0, torch.tensor(300), torch.uint8),
        lambda: random.dropout(K, x, wide),
        lambda: random.choice(K, 3, p=x - 1),
        lambda: random.uniform(K, 3, maxval=-1.0),
        lambda: random.uniform(K, (-3,)),
        lambda: random.split(K, -1),
    ]
    with check_key_reuse():
        for draw in refused:
            with pytest.raises(ValueError, match=r"^remat: "):
                draw()
        random.uniform(K)


def test_a_function_whose_body_runs_after_the_call_is_not_decorated():
    def steps():
        yield random.uniform(K)

    async def later():
        return random.uniform(K)

    async def both():
        yield random.uniform(K)

    for fn in (steps, later, both, functools.partial(steps)):
        with pytest.raises(
            TypeError, match=r"^remat: .*(steps|later|both).* after its"
        ):
            check_key_reuse()(fn)


def test_one_block_may_be_entered_again_and_inside_itself():
    block = check_key_reuse()
    for _ in range(2):
        with block:
            random.uniform(K)
            with block, pytest.raises(KeyReuseError, match="consumed twice"):
                random.uniform(K)
    random.uniform(K)
    assert not _reuse._open


def test_it_is_a_decorator_and_starts_anew_on_each_call():
    @check_key_reuse()
    def draw(times):
        return [random.uniform(K) for _ in range(times)]

    assert draw(1) == draw(1)
    with pytest.raises(KeyReuseError, match="consumed twice"):
        draw(2)


def test_another_thread_is_not_checked():
    failed = []

    def draw():
        try:
            random.uniform(K)
            random.uniform(K)
        except KeyReuseError as error:
            failed.append(error)

    with check_key_reuse():
        random.uniform(K)
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
    assert not failed


def test_outside_the_block_a_draw_only_looks_at_a_list(monkeypatch):
    monkeypatch.setattr(_reuse, "_consume", None)
    monkeypatch.setattr(_reuse, "_rows", None)
    random.clone(K)
    random.uniform(random.split(K))


# --- Transforms --------------------------------------------------------------------


def test_under_vmap_each_key_counts():
    with check_key_reuse():
        vmap(vmap(random.uniform, in_dims=0), in_dims=1)(KEYS)
        with pytest.raises(KeyReuseError, match="consumed twice"):
            random.uniform(KEYS[1, 2])
    with check_key_reuse():
        random.uniform(KEYS[1, 2])
        with pytest.raises(KeyReuseError, match="consumed twice"):
            vmap(random.uniform)(KEYS)


def test_a_batch_over_the_last_dimension_of_raw_keys_is_taken_apart():
    data = KEYS[0].data.mT.contiguous()
    with check_key_reuse():
        vmap(random.uniform, in_dims=1)(data)
        with pytest.raises(KeyReuseError, match="consumed twice"):
            random.uniform(KEYS[0, 2])


def test_one_key_for_a_whole_batch_is_consumed_once():
    with check_key_reuse():
        vmap(lambda x: x * random.uniform(K))(torch.ones(3))
        with pytest.raises(KeyReuseError, match="consumed twice"):
            random.uniform(K)


def loss(x, key):
    a, b = random.split(key)
    noise = random.dropout(a, x, 0.5) * random.normal(b, (3,))
    return (x.sin() * noise).sum()


X = torch.ones(3)
DERIVATIVES = {
    "backward": lambda f: torch.autograd.grad(f(y := X.clone().requires_grad_(), K), y),
    "grad": lambda f: grad(f)(X, K),
    "hessian": lambda f: hessian(f)(X, K),
    "jvp": lambda f: jvp(lambda x: f(x, K), (X,), (X,)),
    "vmap of grad": lambda f: vmap(grad(f), in_dims=(None, 0))(X, KEYS[0]),
}


@pytest.mark.parametrize("derive", DERIVATIVES.values(), ids=DERIVATIVES.keys())
@pytest.mark.parametrize("wrap", [lambda f: f, remat, lambda f: remat(remat(f))])
def test_no_derivative_and_no_recomputation_is_a_reuse(derive, wrap):
    with check_key_reuse(), count_ops() as ops:
        derive(wrap(loss))
    assert ops["remat::uniform"] >= 1
    assert ops["remat::split"] >= 1
    with check_key_reuse(), pytest.raises(KeyReuseError, match="consumed twice"):
        derive(wrap(lambda x, k: loss(x, k) + loss(x, k)))


def test_a_recomputation_after_the_block_or_before_it_is_no_reuse():
    x = X.clone().requires_grad_()
    y = remat(loss)(x, K)
    with check_key_reuse():
        torch.autograd.grad(y, x, retain_graph=True)
        torch.autograd.grad(y, x)
        random.uniform(K)


def test_a_recomputed_clone_allows_no_draw_more():
    x = X.clone().requires_grad_()
    with check_key_reuse():
        y = remat(lambda x: x.sin() * random.normal(random.clone(K), (3,)))(x)
        y.sum().backward()
        random.normal(K)
        with pytest.raises(KeyReuseError, match="consumed twice"):
            random.normal(K)


def test_a_recompute_by_torch_is_a_reuse():
    x = X.clone().requires_grad_()
    with check_key_reuse():
        y = torch.utils.checkpoint.checkpoint(loss, x, K, use_reentrant=False)
        with pytest.raises(KeyReuseError, match="consumed twice"):
            y.sum().backward()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_function_compiled_in_the_block_is_not_checked(fullgraph):
    torch._dynamo.reset()
    twice = lambda k: random.normal(random.clone(k), 3) + random.normal(k, 3)
    compiled = torch.compile(twice, backend="eager", fullgraph=fullgraph)
    with check_key_reuse():
        assert torch.equal(compiled(K), compiled(K))
        random.normal(K, 3)
        with pytest.raises(KeyReuseError, match="consumed twice"):
            random.normal(K, 3)


def test_traces_are_not_checked():
    with check_key_reuse():
        for _ in range(2):
            traced = make_fx(lambda k: random.uniform(k) + random.uniform(k))(K)
        fn = torch.compile(traced, backend="eager", fullgraph=True)
        fn(K)
        random.uniform(K)


def test_keys_without_values_are_not_checked():
    meta = K.to("meta")
    with check_key_reuse():
        random.uniform(meta)
        random.uniform(random.clone(meta))
        random.uniform(meta)
