"""Policies of torch's selective checkpointing decide as they do under torch."""

from dataclasses import replace
from functools import partial
from inspect import signature

import pytest
import torch
from support.operations import (
    MM,
    RECOMPUTE,
    SAVE,
    SIN,
    Recorder,
    aten,
    described,
    op,
    recorded,
    saves,
    torch_saves,
    value,
)
from support.tables import rows
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from remat.policies import Op, Value, as_policy
from remat.policies._functions import call_of, stand_in


def wide_matmuls(ctx, func, *args, **kwargs):
    """As those who save by shape do."""
    if func in {MM, aten.addmm.default} and args[-1].shape[1] > 3:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def by_output(ctx, func, *args, **kwargs):
    """As those who save by size do."""
    out = ctx.op_output
    if not isinstance(out, torch.Tensor):
        return CheckpointPolicy.PREFER_RECOMPUTE
    assert not ctx.is_recompute
    return out.numel() * out.element_size() > 64


def casts(ctx, func, *args, **kwargs):
    """As those who keep copies between devices and dtypes do."""
    if func is aten._to_copy.default and "dtype" in kwargs:
        assert args[0].device.type == "cpu"
        return args[0].dtype != kwargs["dtype"]
    return False


def by_arguments(ctx, func, *args, **kwargs):
    """Reads everything there is."""
    if func is aten.cat.default:
        return len(args[0]) == 2 and args[0][1].size(0) == 3
    if func is aten.convolution.default:
        return args[2] is None and args[3] == [2] and args[1].stride(-1) == 1
    if func is aten.addmm.default:
        return not kwargs
    if func is aten.sum.dim_IntList:
        return list(args[1]) == [1]
    return func is aten._softmax.default and args[1] == 1


# Older versions of torch do not tell a policy what the operation returned.
TELLS_OUTPUT = "op_output" in signature(SelectiveCheckpointContext).parameters


def everything_torch(ctx, func, *args, **kwargs):
    return CheckpointPolicy.PREFER_SAVE


def model(x, w):
    y = nn.functional.linear(x, w.T, w[0]).sin() @ w.T
    y = torch.cat([y, y[:3].double().float()]).softmax(1)
    z = nn.functional.conv1d(y[None], torch.ones(2, y.shape[0], 2), stride=2)
    return (z.sum(1) * 2).exp().sum() + y.t().detach().clone().sum(1).max()


@pytest.mark.parametrize(
    "policy",
    [
        *(wide_matmuls, casts, by_arguments, everything_torch, torch_saves),
        *([by_output] if TELLS_OUTPUT else []),
        [MM, aten.addmm.default, aten.exp.default],
        [],
    ],
    ids=lambda p: getattr(p, "__name__", str(p)),
)
def test_torchs_policies_decide_as_under_torch(policy):
    asked = []

    def spy(ctx, func, *args, **kwargs):
        listed = isinstance(policy, list)
        answer = func in policy if listed else policy(ctx, func, *args, **kwargs)
        if isinstance(answer, CheckpointPolicy):
            answer = "SAVE" in answer.name
        asked.append((func, answer))
        return answer

    gen = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=gen, requires_grad=True)
    w = torch.randn(4, 4, generator=gen, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, spy)
    checkpoint(model, x, w, use_reentrant=False, context_fn=contexts)
    ours = as_policy(policy)
    ops = recorded(model, x, w)
    functions = [func for func, _ in asked]
    seen = [o for o in ops if o.func in functions]
    assert [o.func for o in seen] == functions
    assert [bool(ours(o)) for o in seen] == [answer for _, answer in asked]
    assert not any(ours(o) for o in ops if o.func not in functions)


def test_a_policy_of_torch_that_saves_everything_is_not_asked_of_detach():
    assert as_policy(everything_torch)(op(aten.detach.default)) is RECOMPUTE
    assert as_policy(everything_torch)(op(aten.clone.default)) is SAVE


def test_a_policy_of_torch_may_read_metadata_and_not_values():
    reads = lambda ctx, func, *args, **kwargs: args[0].sum() > 0
    with pytest.raises(TypeError, match=r"shape, dtype and device.*not its values"):
        as_policy(reads)(op(SIN, (2, 3)))


def test_stand_ins_have_the_metadata_of_what_they_stand_for():
    far = Value((2, 3), torch.bfloat16, torch.device("cuda", 1), (1, 2), 5)
    x = stand_in(far)
    assert isinstance(x, torch.Tensor)
    assert (x.shape, x.stride(), x.storage_offset()) == ((2, 3), (1, 2), 5)
    assert (x.dtype, x.device, x.is_cuda) == (torch.bfloat16, far.device, True)
    assert (x.numel(), x.dim(), x.nbytes) == (6, 2, 12)
    assert stand_in(value()).shape == ()
    assert stand_in(value(2, 3)).stride() == (3, 1)


def seen(arg):
    """What can be told of an argument: the class and length of lists, say."""
    if isinstance(arg, list | tuple):
        return type(arg), [*map(seen, arg)]
    return described(arg)


CALLS = {
    "keyword": lambda x: torch.add(x, x, alpha=2),
    "keyword tensor": lambda x: torch.searchsorted(x, x, sorter=x.argsort()),
    "list": lambda x: torch.cat([x, x[:1]], 0),
    "two lists": lambda x: torch._foreach_addcmul([x, x[:1]], [x, x[:1]], [x, x[:1]]),
    "optional list": lambda x: x[:, torch.tensor([0, 2])],
    "optional list at the end": lambda x: x[torch.tensor([0, 2])],
    "left out": lambda x: torch.clamp(x, max=x),
    "not left out": lambda x: torch.clamp(x, x, x),
    "no bias": lambda x: nn.functional.conv1d(x, x[:, :, None]),
    "bias": lambda x: nn.functional.conv1d(x, x[:, :, None], x[:, 0]),
    "no tensor": lambda x: torch.zeros(2, 3, dtype=torch.half),
    "dtype": lambda x: x.to(torch.double),
    "scalars": lambda x: x.mul(2).div(3.0).sum([0], keepdim=True),
    "written": lambda x: torch.mm(x, x, out=torch.empty(4, 4)),
}


@rows("fn", CALLS)
def test_a_call_is_put_together_as_it_was(fn):
    with Recorder() as mode:
        fn(torch.arange(16.0).view(4, 4))
    for o, (args, kwargs) in zip(mode.ops, mode.calls, strict=True):
        got, options = call_of(o)
        assert seen(got) == seen(args)
        assert seen([*options.items()]) == seen([*kwargs.items()])
        tensors = [a for a in tree_leaves((args, kwargs)) if torch.is_tensor(a)]
        assert o.inputs == described(tuple(tensors))
        assert hash(o) == hash(replace(o))


def test_an_operator_of_higher_order_gets_its_tuples_back():
    cond = torch.ops.higher_order.cond
    args, kwargs = call_of(Op(cond, (True, saves, saves, (value(1),))))
    assert seen(args) == seen((True, saves, saves, (torch.empty(1),)))
    assert kwargs == {}
