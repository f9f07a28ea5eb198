"""Programs with blocks, run with `remat.scope` and without: values, and what ran again.

A *program* takes what makes a block, `remat.scope` or a context that does nothing, and
returns tensors.
"""

from collections import Counter
from contextlib import nullcontext

import torch

import remat
from remat._torch.autograd import hooks_here
from remat.testing import assert_same, count_ops


# What autograd and remat do besides computing.
BOOKKEEPING = {"detach", "alias", "view", "as_strided", "t", "transpose", "set_"}
BOOKKEEPING |= {"_unsafe_view", "expand", "slice", "select", "lift_fresh", "empty"}
BOOKKEEPING |= {"_conj", "clone"}  # of what is run again in place


def leaf(*shape, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def counted(program, block):
    torch.manual_seed(7)
    with count_ops() as ops:
        out = program(block)
    return out, Counter({op: n for op, n in ops.items() if op not in BOOKKEEPING})


def plainly(policy=None):
    return nullcontext()


def more_of(program, scope=remat.scope):
    """Assert that blocks change no value, and return what they have run again."""
    before = len(hooks_here())
    wanted, plain = counted(program, plainly)
    out, ops = counted(program, scope)
    assert_same(out, wanted)
    assert len(hooks_here()) <= before, "hooks are left on the stack"
    return Counter(
        {op: ops[op] - plain[op] for op in ops | plain if ops[op] != plain[op]}
    )


def assert_scoped(program, *, scope=remat.scope, **again):
    """Assert that blocks change no value, and which operations they have run again."""
    found = more_of(program, scope)
    assert found == again, found


def grads(out, *inputs, **kwargs):
    return torch.autograd.grad(out, inputs, **kwargs)


def scoped(**again):
    """Make a test of a program: see `assert_scoped`."""

    def decorate(program):
        def test():
            assert_scoped(program, **again)

        test.__name__ = program.__name__
        return test

    return decorate
