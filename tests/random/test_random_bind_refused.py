"""What draws without a key is refused in a block of bind; and torch has no more."""

import types

import pytest
import torch
from support.binding import ONES, REFUSED, bound, make, unmoved
from torch.nn import functional as F, init  # noqa: N812
from torch.utils.checkpoint import checkpoint

from remat import RandomnessError
from remat.random import bind, key
from remat.random._bind import _COMPOSITES, _RULES


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
    match = rf"{name}[.\w]* drew from.*\n.*{where}"
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
    poisson binomial rrelu_with_noise rrelu_with_noise_ miopen_rnn _standard_gamma
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
    assert not unseen
