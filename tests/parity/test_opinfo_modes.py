"""Torch's database of operators under the recorder: bit for bit as in plain code.

torch asks some kernels whether a mode is entered, and takes another algorithm then.
"""

import itertools
from typing import Any

import pytest
import torch
from support.operators import QUIET
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from remat._partial.recorder import Recorder


pytestmark = [pytest.mark.opinfo, *QUIET]
pytest.importorskip("expecttest", reason="torch's database imports it")
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402


# The import froze torch's flags, which other tests of this process set.
torch.backends.__allow_nonbracketed_mutation_flag = True

SAMPLES = 8
# The bits of `lstsq` differ from call to call, by where its memory is aligned.
OPERATORS = [
    op for op in op_db if torch.float32 in op.dtypes and op.name != "linalg.lstsq"
]


def copied(value: Any) -> Any:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def evaluated(op: Any, sample: Any) -> list[Tensor] | None:
    """Return what an operator makes of copies; None where it raises."""
    torch.manual_seed(0)
    value, args, kwargs = tree_map(copied, (sample.input, sample.args, sample.kwargs))
    try:
        out = op.op(value, *args, **kwargs)
    except Exception:  # noqa: BLE001 - of samples that plain code cannot
        return None
    return [t for t in tree_leaves(out) if isinstance(t, Tensor)]


def same_bits(found: list[Tensor] | None, then: list[Tensor] | None) -> bool:
    if found is None or then is None or len(found) != len(then):
        return found is then
    pairs = zip(found, then, strict=True)
    return all(
        a.layout is not torch.strided or torch.equal(bits(a), bits(b)) for a, b in pairs
    )


def bits(t: Tensor) -> Tensor:
    t = t.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(t) if t.is_complex() else t).nan_to_num()


@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("op", OPERATORS, ids=[op.formatted_name for op in OPERATORS])
def test_values_are_those_of_plain_code(op, needs):
    if needs and not op.supports_autograd:
        return
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=needs)
    for sample in itertools.islice(samples, SAMPLES):
        plain, again = evaluated(op, sample), evaluated(op, sample)
        if plain is None or not same_bits(again, plain):  # as of uninitialized memory
            continue
        recorder = Recorder([], None)
        with recorder:
            recorded = evaluated(op, sample)
        assert same_bits(recorded, plain)
