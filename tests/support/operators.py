"""Torch's database of operators: samples as functions, and what can't be compared."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


# --- What can't be compared, and why ---


def _named(why, names):
    return dict.fromkeys(names.split(), why)


NOTHING = "no sample has a tensor to differentiate, and the same result twice"

NO_VALUES = {
    **_named("uninitialized", "empty_like new_empty new_empty_strided"),
    "sparse.sampled_addmm": "gives a sparse tensor, of which no sine is taken",
}

OF_CUDA = _named(
    "only for CUDA",
    """jiterator_unary jiterator_binary jiterator_4inputs_with_extra_args
    jiterator_binary_return_by_ref jiterator_2inputs_2outputs""",
)

EVERYWHERE = {
    **OF_CUDA,
    "chalf": "there is no sine of complex numbers in half precision",
    **_named("refuses what requires grad", "resize_ resize_as_"),
}

CHUNKED = """nn.functional.linear_cross_entropy-chunked
    nn.functional.linear_cross_entropy-chunked_none"""
UNDER_FUNC = {
    **EVERYWHERE,
    **_named(
        "torch.func refuses sparse CSR tensors",
        "sparse.sampled_addmm sparse.mm-reduce",
    ),
    **_named("a Function without setup_context", CHUNKED),
}

RAISES = {
    "backward": EVERYWHERE,
    "func_grad": UNDER_FUNC,
    "vmap_grad": {
        **UNDER_FUNC,
        **_named(
            "torch has no batching rule for it, or for an operator in it",
            """allclose equal as_strided_scatter native_batch_norm
            _native_batch_norm_legit _batch_norm_with_update nn.functional.batch_norm
            nn.functional.instance_norm nn.functional.rrelu _chunk_cat histogramdd
            to_sparse""",
        ),
        **_named(
            "reads values, or has results of sizes that depend on them",
            """item tensor_split index_reduce-prod scatter_reduce-prod unique
            unique_consecutive nonzero argwhere nn.functional.gaussian_nll_loss""",
        ),
    },
}

# Plain can't under a level of torch.func, and a recompute can, which runs below it.
BETTER = {
    "func_grad": {*CHUNKED.split(), "tensor_split"},
    "vmap_grad": {"index_reduce-prod", "scatter_reduce-prod"},
}

# torch asks in their formulas whether a tensor is one of torch.func's wrappers, which
# those of a recompute below it are not, and adds up in another order.
ROUNDED = {
    "func_grad": {
        *("prod", "cumprod", "masked.cumprod", "masked_fill"),
        "nn.functional.binary_cross_entropy_with_logits",
    }
}

# What is drawn in place changes a value after it was made: policies do not keep that.
DRAWN_IN_PLACE = {
    *("cauchy", "exponential", "geometric", "log_normal", "normal-in_place", "uniform")
}

# torch_geometric, which other tests import, puts a function of its own there.
REPLACED = {"index_select": torch._C._VariableFunctions.index_select}

# Plain runs other operations for it under these levels than a recompute does.
UNCOUNTED = {
    "func_grad": {"linalg.slogdet", "nn.functional.binary_cross_entropy_with_logits"},
    "vmap_grad": {"masked_select", "logit"},
}


QUIET = [
    # Torch warns of many of its own operators. Only what remat says is an error.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:remat"),
    # Of tensor_split, whose results depend on values.
    pytest.mark.filterwarnings("ignore:.* is not followed any more"),
]


# --- Samples ---


def differentiable(value: Any) -> bool:
    """Whether it is a dense tensor of floating-point or complex numbers."""
    return (
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.layout is torch.strided
    )


def parts(out: Any) -> list[Any]:
    """All that an operator returned."""
    # Not torch's own: whatever a function calls is searched in each call of remat.
    if isinstance(out, (tuple, list)):
        return [leaf for part in out for leaf in parts(part)]
    return [out]


def scalar(fn: Any) -> Any:
    """A loss of what a case gives."""

    def loss(*leaves: Tensor) -> Tensor:
        curved = fn(*leaves)[1]
        return sum((t.real if t.is_complex() else t).sum() for t in curved)

    return loss


class Case:
    """An operator and one of its samples, as a function of what is differentiable."""

    def __init__(self, op: Any, call: Callable[..., Any], sample: Any) -> None:
        flat, treedef = tree_flatten((sample.input, sample.args, sample.kwargs))
        apart = not op.supports_autograd
        which = [
            i
            for i, x in enumerate(flat)
            if differentiable(x) and (apart or x.requires_grad)
        ]
        self.leaves = [flat[i].detach() for i in which]
        constants = [None if i in which else x for i, x in enumerate(flat)]
        process = sample.output_process_fn_grad

        def fn(*leaves: Tensor) -> Any:
            inputs = list(constants)
            for i, leaf in zip(which, leaves, strict=True):
                inputs[i] = leaf * 1
            first, rest, options = treedef.unflatten(inputs)
            out = process(call(first, *rest, **options))
            # What has no gradient is computed beside something that has one.
            curved = [inputs[i] for i in which] if apart else parts(out)
            return out, [t.sin() for t in curved if differentiable(t)]

        self.fn = fn


def cases(op: Any, call: Callable[..., Any], amounts: Any) -> Iterator[Any]:
    """Yield the first samples in each type of numbers, with a name for each."""
    for dtype, some in amounts.items():
        if dtype not in supported(op):
            continue
        seed(0)
        samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
        for i, sample in enumerate(itertools.islice(samples, some)):
            case = Case(op, call, sample)
            if case.leaves:
                yield f"{dtype}, sample {i}", case


def supported(op: Any) -> Any:
    if op.supports_autograd:
        return op.supported_backward_dtypes("cpu")
    return {torch.float64} & op.supported_dtypes("cpu")


def seed(number: int) -> None:
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def name_of(op):
    variant = op.variant_test_name
    return f"{op.name}-{variant}" if variant else op.name
