"""docs/migrating.md: every call of ours in its tables runs.

The rows on Hugging Face need other libraries: see `clients/test_docs_of_clients.py`.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from support.tables_of_docs import rows, run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential

import remat
from remat import policies
from remat.testing import assert_same, count_ops


SECTIONS = {
    "From torch.utils.checkpoint": 9,
    "From other trainers": 13,
    "From JAX": 27,
    "From RETURNN's scope": 3,
}

TORCH = {
    "checkpoint": checkpoint,
    "checkpoint_sequential": partial(checkpoint_sequential, use_reentrant=False),
    "checkpoint_wrapper": checkpoint_wrapper,
    "apply_activation_checkpointing": apply_activation_checkpointing,
}


def leaf(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, requires_grad=True)


def block(w, x):
    return torch.tanh(x @ w) @ w


def step(carry, x):
    carry = torch.sin(carry + x)
    return carry, carry.sum()


class Block(nn.Sequential):
    """A block of the model in the tables."""


@dataclass
class State:
    carry: torch.Tensor


def names():
    """What the calls in the tables refer to."""
    return {
        "remat": remat,
        "policies": policies,
        "torch": torch,
        "block": block,
        "w": leaf(8, 8),
        "x": leaf(4, 8),
        "layer": nn.Linear(8, 8),
        "layers": nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(16))
        ),
        "model": nn.Sequential(*(Block(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))),
        "Block": Block,
        "State": State,
        "matmuls": [torch.ops.aten.addmm],
        "is_block": lambda module: isinstance(module, nn.Linear),
        "ops": [torch.ops.aten.mm.default],
        "policy_fn": lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_SAVE,
        "p": policies.dots_saveable,
        "q": policies.save_only_these_names("a"),
        "f": lambda x: x.sin().sum(),
        "step": step,
        "init": leaf(3),
        "xs": leaf(10, 3),
        "body": lambda i, carry: torch.sin(carry + i),
        "goes_on": lambda carry: carry.abs().sum() > 0.1,
        "halve": lambda carry: carry / 2,
    }


@pytest.mark.parametrize("section", SECTIONS)
def test_the_tables_have_their_rows(section):
    assert len(rows(section)) == SECTIONS[section]


@pytest.mark.filterwarnings("ignore:remat. a policy mentions")
@pytest.mark.parametrize(
    "code", [code for section in SECTIONS for _, ours in rows(section) for code in ours]
)
def test_our_call_runs(code):
    run(code, names())


def test_a_call_that_does_not_run_is_noticed():
    with pytest.raises(AttributeError, match="no_such_policy"):
        run("policies.no_such_policy", names())


# Ours runs the last segment of a sequence again, too.
@pytest.mark.parametrize(("row", "more"), [(0, 0), (1, 2), (2, 0), (3, 0)])
def test_our_call_does_what_theirs_does(row, more):
    both = [codes[0] for codes in rows("From torch.utils.checkpoint")[row]]
    (theirs, expected), (ours, found) = map(gradient_and_tanhs, both)
    assert_same(ours, theirs)
    assert found == expected + more


def gradient_and_tanhs(code):
    torch.manual_seed(0)
    found = {**names(), **TORCH}
    with count_ops() as ops:
        result = run(code, found)
        module = found["model"] if result is None else result
        out = module(found["x"]) if isinstance(module, nn.Module) else module
        out.sum().backward()
    return found["x"].grad, ops["tanh"]


def test_each_policy_of_jax_has_a_row():
    """Those of `jax.checkpoint_policies` in JAX 0.12."""
    theirs = {name.removeprefix("P.").partition("(")[0] for row in rows("From JAX")
              for name in row[0] if name.startswith("P.")}  # fmt: skip
    assert theirs == {
        *("everything_saveable", "nothing_saveable", "dots_saveable"),
        *("checkpoint_dots", "dots_with_no_batch_dims_saveable"),
        *("checkpoint_dots_with_no_batch_dims", "offload_dot_with_no_batch_dims"),
        *("save_anything_except_these_names", "save_any_names_but_these"),
        *("save_only_these_names", "save_from_both_policies"),
        "save_and_offload_only_these_names",
    }


def test_a_step_of_a_scan_runs_again():
    theirs, ours = next(r for r in rows("From JAX") if '"all"' in "".join(r[1]))
    assert theirs == ["jax.lax.scan(jax.checkpoint(step), init, xs)"]
    with count_ops() as ops:
        run(ours[0], names())[0].sum().backward()
    assert ops["sin"] == 2 * 10
