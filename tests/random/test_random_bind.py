"""bind: unmodified torch code as a function of a key, or what refuses to be one."""

import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.binding import (
    FUNCTIONS,
    LAYERS,
    ONES,
    REFUSED,
    XS,
    X,
    bound,
    first,
    make,
    uniform,
    unmoved,
)
from support.tables import rows
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional as F, init  # noqa: N812
from torch.utils.checkpoint import checkpoint

from remat import RandomnessError, random
from remat._ambient.draws import Guard
from remat.random import bind, fold_in, key, split
from remat.random._bind import _COMPOSITES, _RULES, _UNKEYED
from remat.testing import count_ops


# --- Which draw is of which key ---------------------------------------------------


def test_the_ith_draw_is_of_the_key_with_i_folded_in():
    k, x = key(7), make(5, 6)
    with bind(k):
        drawn = torch.rand(3), F.dropout(x, 0.3), torch.randn(2, 2), torch.randperm(9)
    assert torch.equal(drawn[0], random.uniform(fold_in(k, 0), (3,)))
    assert torch.equal(drawn[1], random.dropout(fold_in(k, 1), x, 0.3))
    assert torch.equal(drawn[2], random.normal(fold_in(k, 2), (2, 2)))
    assert torch.equal(drawn[3], random.permutation(fold_in(k, 3), 9))


def test_a_call_that_draws_nothing_is_not_counted():
    x = make(5, 6)
    heads = make(1, 2, 3, 4)
    with bind(key(7)):
        assert F.dropout(x, training=False) is x
        F.dropout(x, 0.0)
        F.rrelu(x)
        F.scaled_dot_product_attention(heads, heads, heads)
        nn.LSTM(6, 6, 2, dropout=0.5).requires_grad_(False)
        nn.Dropout(0.5).eval()(x)
        torch.rand(2, generator=torch.Generator().manual_seed(0))
        with bind(key(8)):
            torch.rand(9)
        drawn = torch.rand(3)
    # The LSTM's 8 parameters were drawn.
    assert torch.equal(drawn, uniform(7, 8))


def test_a_block_a_decorator_and_a_wrapped_function_draw_the_same():
    x = make(5, 6)

    @bind(key(3))
    def decorated(x):
        return F.dropout(x)

    want = bound(3, F.dropout, x)
    assert torch.equal(decorated(x), want)
    assert torch.equal(decorated(x), want)  # from 0 again
    assert torch.equal(bind(key(3))(F.dropout)(x), want)
    assert decorated.__name__ == "decorated"


@pytest.mark.parametrize("seed", [3, 2], ids=["itself", "another"])
def test_a_block_may_be_entered_again_and_others_within_it(seed):
    block = bind(key(3))
    other = block if seed == 3 else bind(key(seed))
    for _ in range(2):
        with block:
            a = torch.rand(3)
            with other:
                inner = torch.rand(3)
            b = torch.rand(3)
        assert torch.equal(a, uniform(3, 0))
        assert torch.equal(inner, uniform(seed, 0))
        assert torch.equal(b, uniform(3, 1))


async def coroutine():
    return torch.rand(3)


async def asynchronous():
    yield torch.rand(3)


def generator():
    yield torch.rand(3)


class Lazy:
    def __call__(self):
        yield torch.rand(3)


@pytest.mark.parametrize("fn", [coroutine, asynchronous, generator, Lazy()])
def test_a_generator_or_a_coroutine_function_is_refused(fn):
    with pytest.raises(TypeError, match="a generator or coroutine function: its body"):
        bind(key(0))(fn)


def test_an_array_of_keys_is_refused():
    with pytest.raises(
        ValueError, match=r"bind takes one key, got keys of shape \[3\]"
    ):
        bind(split(key(0), 3)).__enter__()


def test_an_error_in_the_block_ends_it():
    with pytest.raises(KeyError, match="mine"), bind(key(1)):
        raise KeyError("mine")
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), want)


def test_a_generator_is_drawn_from_as_without_bind():
    def draws(g):
        return [
            torch.rand(4, generator=g),
            torch.empty(4).normal_(generator=g),
            torch.bernoulli(torch.full((9,), 0.5), generator=g),
            torch.rrelu(make(9), 0.1, 0.9, True, g),
            init.normal_(torch.empty(3), generator=g),
        ]

    want = draws(torch.Generator().manual_seed(5))
    with unmoved():
        got = bound(1, draws, torch.Generator().manual_seed(5))
    assert all(map(torch.equal, got, want))


def test_seeding_and_forking_inside_change_nothing():
    def seeded():
        torch.manual_seed(11)
        with torch.random.fork_rng():
            return torch.rand(4)

    assert torch.equal(bound(1, seeded), bound(1, torch.rand, 4))


# --- Each function, against the same without bind ---------------------------------


def check_function_of_the_key(fn):
    with unmoved():
        a, b, c = (first(bound(seed, fn)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    plain = first(fn())
    for kind in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(a, kind) == getattr(plain, kind)


@rows("fn", FUNCTIONS)
def test_a_draw_is_a_function_of_the_key_alone(fn):
    check_function_of_the_key(fn)


@rows("x, fn", LAYERS)
def test_a_layer_is_a_function_of_the_key_and_gradients_flow(x, fn):
    x = x.clone().requires_grad_()
    check_function_of_the_key(lambda: fn(x))
    ys = [first(bound(1, fn, x)) for _ in range(2)]
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in ys]
    assert torch.equal(*grads)
    assert grads[0].norm() > 0


def test_a_method_in_place_returns_its_tensor():
    x = torch.empty(4)
    with bind(key(0)):
        for write in (x.normal_, x.uniform_, x.random_, x.exponential_):
            assert write() is x
        y = F.dropout(x, 0.5, inplace=True)
    assert y is x


def test_the_default_dtype_and_device_are_those_of_the_call():
    with bind(key(0)):
        with torch.device("meta"):
            assert torch.rand(3).is_meta
        assert torch.rand(3, device="meta").is_meta
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.rand(3).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.device("meta"), bind(key(0)):
        assert torch.randn(3).is_meta


@pytest.mark.parametrize("fn", [torch.normal, lambda m, s: m.clone().normal_()])
def test_a_draw_is_a_constant_of_its_parameters(fn):
    mean, std = make(4).requires_grad_(), make(4).exp().requires_grad_()
    y = bound(1, fn, mean, std)
    (g,) = torch.autograd.grad(y.sum(), mean)
    assert torch.equal(g, torch.zeros(4))


# --- In other modes and threads ----------------------------------------------------


def test_a_draw_of_meta_tensors_has_a_shape_and_no_numbers():
    assert bound(0, F.dropout, XS.to("meta")).is_meta
    assert bound(0, torch.randn_like, XS.to("meta")).shape == XS.shape


def test_the_numbers_are_the_same_without_autograd():
    want = bound(0, F.dropout, X)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(bound(0, F.dropout, X), want)


def test_a_draw_in_a_fake_tensor_mode_has_a_shape_and_no_numbers():
    with FakeTensorMode(), bind(key(0)):
        model = nn.LSTM(6, 6, 2)
        y, _ = model(F.dropout(torch.rand(5, 6)))
    assert isinstance(y, FakeTensor)
    with bind(key(0)), FakeTensorMode():
        assert torch.randn(3).shape == (3,)


def test_rules_run_without_the_guard_and_before_modes_that_look_on(monkeypatch):
    guarded = []
    real = Guard.__torch_dispatch__

    def counted(self, func, *args, **kwargs):
        guarded.append(str(func))
        return real(self, func, *args, **kwargs)

    monkeypatch.setattr(Guard, "__torch_dispatch__", counted)
    with bind(key(0)):
        F.dropout(X)
        torch.randn(3)
        assert not guarded
        with count_ops() as ops:
            torch.rand(3)
        assert ops["remat::uniform"] == 1
        guarded.clear()
        torch.sin(X)
    assert guarded == ["aten.sin.default"]


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.rand(1)


# Of Python, where there are threads besides; nothing here waits for them.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
def test_workers_forked_in_a_block_draw_numbers_of_their_own():
    loader = torch.utils.data.DataLoader(
        Noise(), batch_size=2, num_workers=2, multiprocessing_context="fork"
    )

    def two_epochs():
        return torch.cat([*loader, *loader]).squeeze(1)

    with unmoved():
        a, b, c = (bound(seed, two_epochs) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert len({*a.tolist(), *c.tolist()}) == 32


def test_a_thread_that_is_started_in_a_block_is_not_in_it():
    def threaded(fn):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(fn).result()

    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(bound(1, threaded, lambda: torch.rand(3)), want)
    with unmoved():
        drawn = bound(1, threaded, bind(key(2))(lambda: torch.rand(3)))
    assert torch.equal(drawn, bound(2, torch.rand, 3))


def test_seeding_inside_moves_the_stream_that_is_seeded():
    bound(1, torch.manual_seed, 11)
    assert torch.initial_seed() == 11


def test_threads_have_blocks_of_their_own():
    with ThreadPoolExecutor(4) as pool:
        drawn = [*pool.map(lambda i: bound(i, F.dropout, X), range(16))]
    for i, y in enumerate(drawn):
        assert torch.equal(y, bound(i, F.dropout, X))


# --- What draws without a key, and torch has no more ---


LIBRARY = torch.library.Library("remat_test_bind", "DEF")
LIBRARY.define("noisy(Tensor x) -> Tensor")
LIBRARY.impl("noisy", lambda x: x + torch.rand(3), "CompositeExplicitAutograd")
UNKEYED = REFUSED | {
    "normal_functional": lambda: torch.ops.aten.normal_functional(ONES),
    "uniform": lambda: torch.ops.aten.uniform(ONES),
    "exponential": lambda: torch.ops.aten.exponential(ONES),
    "rrelu_with_noise": lambda: torch._C._nn.rrelu_with_noise(
        -ONES, ONES.clone(), 0.1, 0.3, True
    ),
    "noisy": lambda: torch.ops.remat_test_bind.noisy(ONES),
}


@pytest.mark.parametrize("name", UNKEYED)
def test_a_draw_without_a_rule_is_refused_and_leaves_the_stream(name):
    draw = UNKEYED[name]
    where = draw.__code__.co_filename
    match = rf"{name.partition(',')[0]}[.\w]* drew from.*\n.*{where}"
    with unmoved(), pytest.raises(RandomnessError, match=match):
        bound(0, draw)


def test_a_scripted_function_that_draws_is_refused():
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        scripted = torch.jit.script(_scripted)
    # TorchScript raises an error of its own, without ours.
    with unmoved(), pytest.raises(RuntimeError, match="failed in the TorchScript"):
        bound(0, scripted, ONES)


def _scripted(x: torch.Tensor):
    return F.dropout(x, 0.5, True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_draw_in_a_checkpoint_of_torchs_is_refused_unless_bound_in_it(reentrant):
    x = make(5, 6).requires_grad_()

    def checkpointed(fn):
        return checkpoint(fn, x, use_reentrant=reentrant)

    with pytest.raises(RandomnessError, match=rf"of a key bound outside.*{__file__}"):
        bound(0, checkpointed, F.dropout)
    bound(0, checkpointed, torch.sin)
    drop = bind(key(0))(F.dropout)
    checkpointed(drop).square().sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(drop(x).square().sum(), x)[0])


@pytest.mark.skipif(torch.__version__ < "2.14", reason="new in torch 2.14")
def test_a_draw_in_a_checkpoint_that_decorates_is_refused():
    @checkpoint(use_reentrant=False)
    def decorated(x):
        return F.dropout(x)

    with pytest.raises(RandomnessError, match=rf"of a key bound outside.*{__file__}"):
        bound(0, decorated, make(5, 6).requires_grad_())


# Operations that torch tags as random, have no rule, and are the guard's.
GUARDED = set(
    """
    poisson binomial native_dropout rrelu_with_noise rrelu_with_noise_ miopen_rnn
    rrelu rrelu_ cauchy_ geometric_ log_normal_
    _standard_gamma
    _sample_dirichlet _fused_dropout _fill_mem_eff_dropout_mask_ _cudnn_rnn
    _cudnn_init_dropout_state _lstm_mps cauchy exponential geometric log_normal random
    uniform normal_functional rrelu_with_noise_functional _fused_sdp_choice
    _cudnn_attention_backward _cudnn_attention_forward _efficient_attention_forward
    _flash_attention_forward _flash_attention_forward_no_dropout_inplace
    _nested_tensor_softmax_with_shape _scaled_dot_product_attention_math
    _scaled_dot_product_attention_math_for_mps _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable _triton_scaled_dot_attention
    """.split()  # noqa: SIM905
)
KEYED = {f.__name__ for f in [*_RULES, *_COMPOSITES]}


def tagged_ops():
    for name in torch._C._dispatch_get_all_op_names():
        space, _, op = name.partition("::")
        base, _, overload = op.partition(".")
        if space == "aten":
            packet = getattr(torch.ops.aten, base)
            if (
                torch.Tag.nondeterministic_seeded
                in getattr(packet, overload or "default").tags
            ):
                yield base


def test_each_operation_that_torch_calls_random_is_keyed_or_known_to_be_refused():
    unknown = {*tagged_ops()} - KEYED - GUARDED
    assert not unknown


@pytest.mark.parametrize("module", [F, init])
def test_each_function_of_torch_that_draws_has_a_rule_or_is_run_with_the_mode_on(
    module,
):
    unseen = set()
    for name, fn in vars(module).items():
        if not isinstance(fn, types.FunctionType) or name.startswith("_"):
            continue
        calls = {*fn.__code__.co_names} & (KEYED | {"poisson", "binomial"})
        asks = {"has_torch_function_variadic", "has_torch_function_unary"}
        # Which the mode sees from outside only.
        if calls - {name} and asks & {*fn.__code__.co_names}:
            unseen |= {name} if fn not in _RULES and fn not in _COMPOSITES else set()
    assert unseen <= {*_UNKEYED}
