"""However a backward ends, streams are put back."""

import random
import threading

import numpy as np
import pytest
import torch
from support.as_plain import leaf
from support.runs import assert_replayed
from support.tables import rows
from torch.nn.functional import dropout

from remat import policies, remat


def by_the_whole(a, b, leaves):
    (a.sum() + b).backward()


def by_a_part(a, b, leaves):
    del b
    a.sum().backward()


def by_two(a, b, leaves):
    (a.sum() + b).backward(retain_graph=True)
    (a.sum() + b).backward()


def by_an_error_and_another(a, b, leaves):
    a.register_hook(_fail)
    with pytest.raises(ZeroDivisionError, match="planted"):
        (a.sum() + b).backward(retain_graph=True)
    b.backward()


def _fail(grad):
    raise ZeroDivisionError("planted")


def by_a_thread(a, b, leaves):
    thread = threading.Thread(target=(a.sum() + b).backward)
    thread.start()
    thread.join()


def by_a_second_derivative(a, b, leaves):
    got = torch.autograd.grad(a.sum() + b, leaves, create_graph=True)
    (got[0].square().sum() + got[1].sum()).backward()


# How a backward ends, and how often the function is evaluated until then.
ENDS = {
    "whole": (by_the_whole, 2),
    "part": (by_a_part, 2),
    "retained": (by_two, 3),
    "error": (by_an_error_and_another, 3),
    "thread": (by_a_thread, 2),
    "double": (by_a_second_derivative, 3),
}


@rows("end, evaluations", ENDS)
@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_streams_are_put_back_however_a_backward_ends(end, evaluations, policy):
    def program(wrap):
        generator = torch.Generator().manual_seed(7)
        w, x = leaf(1), leaf(2)

        def fn(x):
            h = dropout((x @ w).tanh(), 0.5) * random.random()
            noise = torch.rand(4, 4, generator=generator).double()
            h = (h * noise * np.random.rand()).exp()
            return h.sin(), (h * torch.rand(4, 4)).cos().sum()

        outputs = wrap(fn)(x)
        before = torch.rand(3, generator=generator), torch.rand(3)
        end(*outputs, [w, x])
        after = torch.rand(3, generator=generator), torch.rand(3)
        return before, after, w.grad, x.grad

    with_policy = lambda fn: remat(fn, policy=policy, prune=False)
    assert_replayed(program, wrap=with_policy, evaluations=(1, evaluations))
