"""What a chain refuses, and says about it."""

import pytest
import torch
from support.tables import rows
from torch import nn

from remat import CaptureError, MutationError, chain
from remat.chain import schedules


X = torch.ones(3, requires_grad=True)
SEEN = []
COUNT = [0]
BOX = nn.Linear(3, 3)
NORM = nn.BatchNorm1d(3)
BUFFER = torch.zeros(3)


def collects(i, x):
    SEEN.append(i)
    return x * 2


def leaks(i, x):
    SEEN.append(x)
    return x * 2


def counts(i, x):
    COUNT[0] += 1
    return x * COUNT[0]


def sets_an_attribute(i, x):
    BOX.last = i
    return BOX(x)


def changes_in_place(i, x):
    return x.mul_(2)


def changes_a_constant_in_place(i, x):
    BUFFER.add_(1)
    return x * BUFFER


def normalizes(i, x):
    return NORM(x)


@rows(
    "body, error, message",
    {
        "a list": (collects, CaptureError, "steps of .*collects.* changed a list"),
        "a leak": (leaks, CaptureError, "changed a list|other than by being returned"),
        "a counter": (counts, CaptureError, "steps of .* changed a list"),
        "an attribute": (
            sets_an_attribute,
            CaptureError,
            "changed `last` of a Linear",
        ),
        "in place": (changes_in_place, MutationError, "step 0 of .* in place"),
        "a constant in place": (
            changes_a_constant_in_place,
            CaptureError,
            "steps of .* changed `BUFFER`",
        ),
    },
)
@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_what_leaves_a_step_is_refused(body, error, message, transform):
    def value(x):
        return chain.fori_loop(0, 4, body, x * 1).sum()

    try:
        with pytest.raises(error, match=message):
            value(X) if transform == "backward" else torch.func.grad(value)(X.detach())
    finally:
        SEEN.clear()
        COUNT[0] = 0
        BOX.__dict__.pop("last", None)
        BUFFER.zero_()


def test_a_buffer_that_each_step_updates_is_refused():
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(CaptureError, match=r"changed `NORM.running_mean`"):
        chain.fori_loop(0, 4, normalizes, x)


def other_dtype(i, x):
    return {"h": x["h"].double()}


def other_shape(i, x):
    return {"h": x["h"][:2]} if i == 1 else x


def other_structure(i, x):
    return {"h": x["h"], "n": 1}


@rows(
    "body, message",
    {
        "dtype": (
            other_dtype,
            r"`carry\['h'\]` is float32\[3\] on cpu .* float64\[3\] .* after step 0",
        ),
        "shape": (
            other_shape,
            r"`carry\['h'\]` is .* float32\[2\] on cpu after step 1",
        ),
        "structure": (other_structure, "step 0 of .* built otherwise"),
    },
)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_carry_keeps_its_form(body, message, requires_grad):
    init = {"h": torch.ones(3, requires_grad=requires_grad)}
    with pytest.raises(TypeError, match=message):
        chain.fori_loop(0, 4, body, init)


def test_a_number_that_becomes_a_tensor_is_refused():
    with pytest.raises(TypeError, match=r"`carry\[1\]` is of type int"):
        chain.fori_loop(0, 3, lambda i, c: (c[0] * 2, c[0].sum()), (X, 1))


class Opaque:
    """Not a pytree."""


def test_a_carry_that_cannot_be_looked_into_is_refused():
    with pytest.raises(TypeError, match=r"`carry\[1\]` of .* is a Opaque"):
        chain.fori_loop(0, 3, lambda i, c: c, (X, Opaque()))


XS = torch.ones(4, 3)


@rows(
    "call, error, message",
    {
        "no pair": (
            lambda: chain.scan(lambda c, x: c, X, XS),
            TypeError,
            "returns two values",
        ),
        "no length": (
            lambda: chain.scan(lambda c, x: (c, None), X),
            ValueError,
            "Pass `xs`, or `length=`",
        ),
        "two lengths": (
            lambda: chain.scan(lambda c, x: (c, None), X, {"a": XS, "b": XS[:2]}),
            ValueError,
            r"scans `xs\['b'\]` of length 2, where others have length 4",
        ),
        "another length": (
            lambda: chain.scan(lambda c, x: (c, None), X, XS, 5),
            ValueError,
            "of length 4, where others have length 5",
        ),
        "a number scanned": (
            lambda: chain.scan(lambda c, x: (c, None), X, (XS, 3)),
            TypeError,
            r"scans `xs\[1\]`, which is a int",
        ),
        "no dimensions": (
            lambda: chain.scan(lambda c, x: (c, None), X, torch.tensor(1.0)),
            TypeError,
            "a tensor without dimensions",
        ),
        "text collected": (
            lambda: chain.scan(lambda c, x: (c, "a"), X, XS),
            TypeError,
            "collects a str",
        ),
        "unroll": (
            lambda: chain.scan(lambda c, x: (c, None), X, XS, unroll=2),
            ValueError,
            "unroll=2 needs checkpoints",
        ),
        "checkpoints": (
            lambda: chain.scan(lambda c, x: (c, None), X, XS, checkpoints="some"),
            TypeError,
            "checkpoints='some'",
        ),
        "no checkpoints": (
            lambda: chain.scan(lambda c, x: (c, None), X, XS, checkpoints=0),
            ValueError,
            "checkpoints >= 1; got 0",
        ),
        "no function": (lambda: chain.scan(3, X, XS), TypeError, "takes a function"),
        "while, equal segments": (
            lambda: chain.while_loop(
                lambda c: False, lambda c: c, X, checkpoints=schedules.Sqrt()
            ),
            TypeError,
            "while_loop takes checkpoints that are a number",
        ),
        "sequential, no function": (
            lambda: chain.sequential([torch.sin, 3], X),
            TypeError,
            r"fns\[1\] of sequential is not callable",
        ),
        "sequential, both": (
            lambda: chain.sequential([torch.sin], X, segments=1, checkpoints=1),
            ValueError,
            "segments=1 and checkpoints=1",
        ),
    },
)
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
