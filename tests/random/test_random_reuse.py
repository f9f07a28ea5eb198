"""A key that is consumed twice is an error that names both lines, while one asks."""

import contextlib
import functools
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.draws import KEYS, SAMPLERS, K
from support.tables import rows
from support.transforms import some
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat import KeyReuseError, random, remat
from remat.random import _key, _reuse, check_key_reuse, debug_key_reuse
from remat.testing import count_ops


X = torch.ones(3)
CONSUMERS = {
    **{name: draw for name, (_, draw) in SAMPLERS.items()},
    "split": random.split,
    "raw split": lambda k: random.split(random.key_data(k)),
}
is_reuse = functools.partial(pytest.raises, KeyReuseError, match="consumed twice")


@rows("consume", CONSUMERS)
@pytest.mark.parametrize("keys", [K, KEYS], ids=["one", "many"])
def test_every_sampler_and_split_consumes_a_key_once(consume, keys):
    with check_key_reuse():
        consume(keys)
        with is_reuse():
            random.uniform(keys)
    with check_key_reuse():
        random.uniform(keys)
        with is_reuse():
            consume(keys)


def line_of(text):
    with open(__file__) as source:
        (number,) = [i for i, line in enumerate(source, 1) if line.endswith(text)]
    return f"{__file__}:{number}, in "


@contextlib.contextmanager
def switched_on():
    debug_key_reuse(True)
    try:
        yield
    finally:
        debug_key_reuse(False)


CHECKS = {
    "block": check_key_reuse,
    "program": lambda: debug_key_reuse(True),
    "statement": switched_on,
}


@rows("check", CHECKS)
def test_the_error_names_the_key_and_both_lines(check):
    with check():
        random.normal(K)  # the first line
        with pytest.raises(KeyReuseError, match="split") as caught:
            random.split(K)  # the second line
    message = str(caught.value)
    assert "(seed, offset) = (42, 0)" in message
    assert re.search("first: " + re.escape(line_of("# the first line\n")), message)
    assert re.search("again: " + re.escape(line_of("# the second line\n")), message)
    assert "remat.random.clone(key)" in message


def use(*keys):
    for k in keys:
        random.uniform(k)


def fold(number):
    return random.fold_in(K, number)


# What may be done, and what is a reuse after it.
REUSED = {
    "a key made anew": (lambda: use(random.key(42)), lambda: use(random.key(42))),
    "a number folded in again": (
        lambda: use(K, fold(3), fold(4)),
        lambda: use(fold(3)),
    ),
    "a key and the keys it is among": (
        lambda: use(KEYS[0, 0], KEYS[0, 1:], *KEYS[1]),
        lambda: use(KEYS[:, 1]),
    ),
    "an array that holds a key twice": (lambda: None, lambda: use(KEYS[[0, 0]])),
    "a key of a vmap": (
        lambda: vmap(vmap(random.uniform, in_dims=0), in_dims=1)(KEYS),
        lambda: use(KEYS[1, 2]),
    ),
    "a vmap over a key": (lambda: use(KEYS[1, 2]), lambda: vmap(random.uniform)(KEYS)),
    "a key of a vmap over the last dimension of raw keys": (
        lambda: vmap(random.uniform, in_dims=1)(KEYS[0].data.mT.contiguous()),
        lambda: use(KEYS[0, 2]),
    ),
    "a key for a whole batch": (
        lambda: vmap(lambda x: x * random.uniform(K))(X),
        lambda: use(K),
    ),
}


@rows("first, again", REUSED)
def test_a_key_that_was_consumed_is_not_consumed_again(first, again):
    with check_key_reuse():
        first()
        with is_reuse():
            again()


def by_splits_and_numbers():
    a, b = random.split(K)
    use(a, *[random.fold_in(b, i) for i in range(5)])
    use(random.split(random.fold_in(b, 7), 4))


def after_looking_at_it():
    assert next(iter(KEYS))[1] == KEYS[0, 1]
    assert random.wrap_key_data(random.key_data(K)).to("cpu") == K
    use(KEYS)


def after_dropping_nothing():
    for p, training in ((0.0, True), (0.5, False), (0.5, True)):
        random.dropout(K, X, p, training)


def after_traces():
    for _ in range(2):
        traced = make_fx(lambda k: random.uniform(k) + random.uniform(k))(K)
    torch.compile(traced, backend="eager", fullgraph=True)(K)
    use(K)


def without_values():
    meta = K.to("meta")
    use(meta, random.clone(meta), meta)


def in_another_thread():
    use(K)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(use, K, K).result()


ONCE = [
    *(by_splits_and_numbers, after_looking_at_it, after_dropping_nothing),
    *(after_traces, without_values, in_another_thread),
]


@pytest.mark.parametrize("consume", ONCE)
def test_a_key_may_be_consumed_once(consume):
    with check_key_reuse():
        consume()


@rows("check", CHECKS)
def test_each_clone_may_be_consumed_besides_the_original(check):
    with check():
        twin = random.clone(K)
        use(K, twin)
        with is_reuse():
            use(twin)
        use(random.clone(K))
        with is_reuse():
            use(K)


# --- Blocks ------------------------------------------------------------------------


@rows("check", CHECKS)
def test_a_key_consumed_before_or_after_the_check_does_not_count(check):
    use(K, K)
    for _ in range(2):
        with check():
            use(K)
            with is_reuse():
                use(K)
    use(K, K)
    assert not _key.checks


@rows("check", CHECKS)
def test_blocks_inside_one_another_count_together(check):
    with check():
        random.uniform(KEYS[0, 0])
        with check_key_reuse():
            random.uniform(KEYS[0, 1])
            with is_reuse():
                random.uniform(KEYS[0, 0])
        with is_reuse():
            random.uniform(KEYS[0, 1])


@rows("check", CHECKS)
def test_the_check_is_left_by_an_exception(check):
    with is_reuse(), check():
        use(K, K)
    use(K, K)
    assert not _key.checks


WIDE = torch.zeros(7)
REFUSED = {
    "uniform": lambda: random.uniform(K, 3, minval=WIDE),
    "normal": lambda: random.normal(K, 3, std=WIDE),
    "bernoulli": lambda: random.bernoulli(K, WIDE, (3,)),
    "gumbel": lambda: random.gumbel(K, 3, loc=WIDE),
    "exponential": lambda: random.exponential(K, 3, scale=WIDE),
    "laplace": lambda: random.laplace(K, 3, loc=WIDE),
    "truncated_normal": lambda: random.truncated_normal(K, WIDE, 9.0, (3,)),
    "randint": lambda: random.randint(K, 3, WIDE.long(), 9),
    "a bound": lambda: random.randint(K, 3, 0, torch.tensor(300), torch.uint8),
    "dropout": lambda: random.dropout(K, X, WIDE),
    "choice": lambda: random.choice(K, 3, p=X - 1),
    "a range": lambda: random.uniform(K, 3, maxval=-1.0),
    "a shape": lambda: random.uniform(K, (-3,)),
    "split": lambda: random.split(K, -1),
}


@rows("draw", REFUSED)
def test_a_draw_that_is_refused_consumes_nothing(draw):
    with check_key_reuse():
        with pytest.raises(ValueError, match=r"^remat: "):
            draw()
        use(K)


def steps():
    yield random.uniform(K)


async def later():
    return random.uniform(K)


async def both():
    yield random.uniform(K)


@pytest.mark.parametrize("fn", [steps, later, both, functools.partial(steps)])
def test_a_function_whose_body_runs_after_the_call_is_not_decorated(fn):
    with pytest.raises(TypeError, match=r"^remat: .*(steps|later|both).* after its"):
        check_key_reuse()(fn)


def test_one_block_may_be_entered_again_and_inside_itself():
    block = check_key_reuse()
    for _ in range(2):
        with block:
            use(K)
            with block, is_reuse():
                use(K)
    random.uniform(K)
    assert not _key.checks


def test_the_check_is_a_decorator_and_starts_anew_on_each_call():
    @check_key_reuse()
    def draw(times):
        return [random.uniform(K) for _ in range(times)]

    assert draw(1) == draw(1)
    with is_reuse():
        draw(2)


@pytest.mark.parametrize("switches", [(), (True, False)], ids=["never", "no more"])
def test_unless_the_program_is_checked_a_draw_only_looks_at_a_list(
    monkeypatch, switches
):
    for enabled in switches:
        debug_key_reuse(enabled)
    monkeypatch.setattr(_reuse, "_count", None)
    monkeypatch.setattr(_reuse, "_rows", None)
    random.clone(K)
    use(K, K, random.split(K))


# --- The whole program ---------------------------------------------------------------


@pytest.fixture
def checked():
    debug_key_reuse(True)
    yield
    debug_key_reuse(False)
    assert not _key.checks


@pytest.mark.usefixtures("checked")
def test_switching_on_again_goes_on_with_the_keys_so_far():
    use(K)
    debug_key_reuse(True)
    with is_reuse():
        use(K)


@pytest.mark.usefixtures("checked")
def test_a_block_can_pause_the_check():
    use(K)
    with debug_key_reuse(False):
        use(K, K)
        assert not _key.checks
    with is_reuse():
        use(K)


@pytest.mark.usefixtures("checked")
def test_of_many_threads_that_draw_from_one_key_one_may():
    def draw(_):
        try:
            use(K)
        except KeyReuseError:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(draw, range(64))) == 1


@pytest.mark.parametrize("enabled", [1, None, "on"])
def test_the_switch_takes_a_bool(enabled):
    with pytest.raises(TypeError, match="pass True to check keys, or False to stop"):
        debug_key_reuse(enabled)
    assert not _key.checks


# --- Transforms --------------------------------------------------------------------


def loss(x, key):
    a, b = random.split(key)
    noise = random.dropout(a, x, 0.5) * random.normal(b, (3,))
    return (x.sin() * noise).sum()


WRAPS = {"plain": lambda f: f, "remat": remat, "twice": lambda f: remat(remat(f))}


@rows("transform", some("backward", "grad", "hessian", "jvp", "vmap_grad"))
@rows("wrap", WRAPS, fast=("plain", "remat"))
@rows("check", CHECKS, fast=("block", "program"))
def test_no_derivative_and_no_recomputation_is_a_reuse(transform, wrap, check):
    with check(), count_ops() as ops:
        transform(wrap(lambda x: loss(x, K)), X)
    assert ops["remat::uniform"] >= 1
    assert ops["remat::split"] >= 1
    with check(), is_reuse():
        transform(wrap(lambda x: loss(x, K) + loss(x, K)), X)


@rows("check", CHECKS)
def test_each_key_of_a_batch_of_gradients_counts_once(check):
    per_key = lambda fn: vmap(grad(remat(fn)), in_dims=(None, 0))
    with check(), count_ops() as ops:
        per_key(loss)(X, KEYS[0])
    assert ops["remat::uniform"] >= 1
    with check(), is_reuse():
        per_key(lambda x, k: loss(x, k) + loss(x, k))(X, KEYS[0])


def test_a_recomputation_after_the_block_or_before_it_is_no_reuse():
    x = X.clone().requires_grad_()
    y = remat(loss)(x, K)
    with check_key_reuse():
        torch.autograd.grad(y, x, retain_graph=True)
        torch.autograd.grad(y, x)
        use(K)


def test_a_recomputed_clone_allows_no_draw_more():
    x = X.clone().requires_grad_()
    with check_key_reuse():
        y = remat(lambda x: x.sin() * random.normal(random.clone(K), (3,)))(x)
        y.sum().backward()
        random.normal(K)
        with is_reuse():
            random.normal(K)


def test_a_recompute_by_torch_is_a_reuse():
    x = X.clone().requires_grad_()
    with check_key_reuse():
        y = torch.utils.checkpoint.checkpoint(loss, x, K, use_reentrant=False)
        with is_reuse():
            y.sum().backward()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_function_compiled_in_the_block_is_not_checked(fullgraph):
    torch._dynamo.reset()
    twice = lambda k: random.normal(random.clone(k), 3) + random.normal(k, 3)
    compiled = torch.compile(twice, backend="eager", fullgraph=fullgraph)
    with check_key_reuse():
        assert torch.equal(compiled(K), compiled(K))
        random.normal(K, 3)
        with is_reuse():
            random.normal(K, 3)


@pytest.mark.usefixtures("checked")
def test_other_threads_of_a_checked_program_are_checked():
    use(K)
    with ThreadPoolExecutor(1) as pool, is_reuse():
        pool.submit(use, K).result()
