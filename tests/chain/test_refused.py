"""What a chain refuses: each error says which part, of which chain, and what to do."""

import functools
import operator

import pytest
import torch
from support.tables import rows
from support.zoo import V, leaves_of
from torch import nn
from torch.func import grad, vmap

from remat import CaptureError, MutationError, chain
from remat.chain.schedules import Binomial, Sqrt, Uniform
from remat.testing import count_ops


def loop(body, init=None, **options):
    init = leaves_of(V)[0] if init is None else init
    return chain.fori_loop(0, 5, body, init, **options)


# --- Carries of another form --------------------------------------------------------

H = torch.ones(3)
FORMS = {
    "dtype": (
        *(lambda i, c: {"h": c["h"].float() if i == 2 else c["h"], "n": 0},),
        (
            r"`carry\['h'\]` is float64\[4, 4\] on cpu at the start of `fori_loop of "
            r".*test_refused.py:\d+\), and float32\[4, 4\] on cpu after step 2"
        ),
    ),
    "shape": (
        *(lambda i, c: {"h": c["h"][i:], "n": 0},),
        r"`carry\['h'\]` is float64\[4, 4\].* and float64\[3, 4\] on cpu after step 1",
    ),
    "number": (
        *(lambda i, c: {"h": c["h"], "n": 1.0},),
        r"`carry\['n'\]` is of type int .* and of type float after step 0",
    ),
    "number for a tensor": (
        *(lambda i, c: {"h": 1, "n": 0},),
        r"`carry\['h'\]` is float64\[4, 4\].* and of type int after step 0",
    ),
    "structure": (
        *(lambda i, c: {"h": (c["h"], c["h"]), "n": 0},),
        (
            r"step 0 of `fori_loop .* a carry that is built otherwise than the one at "
            r"the start.\n  first: "
        ),
    ),
    "None": (
        lambda i, c: None,
        "a carry that is built otherwise than the one at the start",
    ),
}


@rows("on", {"gradients": True, "no gradients": False})
@rows("body, says", FORMS)
def test_a_carry_keeps_its_form(body, says, on):
    h = V.clone().requires_grad_(on)
    with pytest.raises(TypeError, match=says):
        loop(body, {"h": h, "n": 0})


OTHERS = {
    "scan": lambda h: chain.scan(lambda h, _: (h.float(), None), h, length=2),
    "while_loop": lambda h: chain.while_loop(
        lambda h: True, torch.Tensor.float, h, checkpoints=2
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_loops_name_themselves(name):
    h = leaves_of(V)[0]
    with pytest.raises(TypeError, match=rf"`carry` is float64.*`{name} of .*float32"):
        OTHERS[name](h)


# --- Changes ------------------------------------------------------------------------


class Holder:
    seen = None


def changes():
    values, holder, batch_norm = [], Holder(), nn.BatchNorm1d(4).double()

    def keeping(i, h):
        values.append(h.sin())
        return h * 2

    def keeping_in_an_attribute(i, h):
        holder.seen = h * 2
        return holder.seen * 2

    def updating_a_buffer(i, h):
        return batch_norm(h)

    return {
        "a list with a tensor": keeping,
        "an attribute with a tensor": keeping_in_an_attribute,
        "a buffer": updating_a_buffer,
    }


SAYS = {
    "a list with a tensor": r"changed `values\[0\]`|left it other than by being",
    "an attribute with a tensor": "changed `holder.seen`|left it other than by",
    "a buffer": "changed `.*running_mean`",
}
WAYS = {
    "base": lambda f: f(leaves_of(V)[0]),
    "grad": lambda f: grad(lambda x: f(x).sum())(V),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum()))(torch.stack([V, V])),
}


@rows("way", WAYS)
@pytest.mark.parametrize("what", SAYS)
def test_a_step_may_not_change_what_cannot_be_put_back(what, way):
    if (what, way) == ("a buffer", WAYS["vmap of grad"]):
        pytest.skip("torch refuses it itself")
    body = changes()[what]
    with pytest.raises((CaptureError, MutationError), match=SAYS[what]):
        way(lambda x: loop(body, x))


def in_place_on_the_carry(i, h):
    return h.mul_(2)


def in_place_on_a_part(i, h):
    h[0] = 1.0
    return h * 2


@rows("way", WAYS)
@pytest.mark.parametrize("body", [in_place_on_the_carry, in_place_on_a_part])
def test_a_step_may_not_change_its_carry_in_place(body, way):
    with pytest.raises(MutationError, match=r"in place.*Return|in place.*return a new"):
        way(lambda x: loop(body, x * 1))


def test_a_step_may_not_change_a_constant_part_of_its_carry_in_place():
    def body(i, carry):
        h, count = carry
        return h.sin(), count.add_(1)

    with pytest.raises(MutationError, match=r"in place.*return a new"):
        loop(body, (leaves_of(V)[0], torch.zeros(())))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_step_may_not_change_a_captured_tensor_in_place(requires_grad):
    total = (torch.zeros(4, 4).double().requires_grad_(requires_grad)) * 1

    def body(i, h):
        total.add_(1)
        return h * total

    with pytest.raises(
        (MutationError, CaptureError), match=r"in place|changed `total`"
    ):
        loop(body)


def test_a_step_may_not_change_a_slice_in_place():
    xs = torch.zeros(5, 4, 4).double()

    def step(h, x):
        x += 1
        return h * x, None

    with pytest.raises(MutationError, match="in place"):
        chain.scan(step, leaves_of(V)[0], xs)


class Opaque:
    """Holds a tensor where no search can see it."""

    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


def test_a_carry_that_cannot_be_looked_into_is_refused():
    init = leaves_of(V)[0], Opaque(V)
    with pytest.raises(TypeError, match=r"`carry\[1\]` of .* is a Opaque.*dataclass"):
        chain.fori_loop(0, 5, lambda i, c: c, init)


def test_a_hidden_leaf_is_refused():
    """Its gradient would be lost: no search finds what a C function holds."""
    hidden = torch.ones(4, 4).double().requires_grad_()
    times = operator.methodcaller("mul", hidden)
    with pytest.raises(
        CaptureError, match=r"in `fori_loop of .*is no input of the call"
    ):
        loop(lambda i, h: times(h))


# --- Arguments ----------------------------------------------------------------------


def pair(h, x):
    return h, None


def later(fn):
    """`later(fn)(*args)` calls it when it is called."""
    return functools.partial(functools.partial, fn)


LOOPS = chain.scan, chain.fori_loop, chain.while_loop, chain.sequential
scan, fori_loop, while_loop, sequential = map(later, LOOPS)
NO_PROGRESS = r"progress= takes a function of the number of steps done; got True\."
WRONG = {
    "one value": (
        *(scan(lambda h, x: h, H, length=2), TypeError),
        "returns two values, the next carry and .* got a Tensor",
    ),
    "three values": (
        *(scan(lambda h, x: (h, x, x), H, length=2), TypeError),
        "returns two values, .* got a tuple",
    ),
    "a text collected": (
        *(scan(lambda h, x: (h, "y"), H, length=2), TypeError),
        "collects a str. Collect tensors, numbers or None",
    ),
    "lengths": (
        *(scan(pair, H, {"a": H, "b": [H[:2]]}), ValueError),
        r"`scan of pair` .* scans `xs\['b'\]\[0\]` of length 2, where .* are 3",
    ),
    "length and slices": (
        *(scan(pair, H, H, length=4), ValueError),
        r"scans `xs` of length 3, where `length` or others are 4",
    ),
    "no length": (scan(pair, H), ValueError, "Pass `xs`, or `length=`"),
    "negative": (scan(pair, H, length=-1), ValueError, "has length=-1; use 0 or more"),
    "a number scanned": (scan(pair, H, [3]), TypeError, r"`xs\[0\]`, which is a int"),
    "no dimension": (scan(pair, H, H[0]), TypeError, "`xs`, .* a tensor without dim"),
    "unroll and schedule": (
        *(scan(pair, H, H, unroll=2, checkpoints=Sqrt()), ValueError),
        r"unroll=2 needs checkpoints .*got checkpoints=Sqrt\(\)",
    ),
    "checkpoints": (
        *(scan(pair, H, H, checkpoints="some"), TypeError),
        "checkpoints='some': use a number, 'all', None, or one of",
    ),
    "a bool": (scan(pair, H, H, checkpoints=True), TypeError, "=True: use a number"),
    "no checkpoint": (scan(pair, H, H, checkpoints=0), ValueError, "Binomial"),
    "no unroll": (scan(pair, H, H, checkpoints=1, unroll=0), ValueError, "unroll"),
    "while with sqrt": (
        *(while_loop(bool, pair, H, checkpoints=None), TypeError),
        "Online, as its length is .* Pass checkpoints=10, or a budget of bytes",
    ),
    "while with segments": (
        *(while_loop(bool, pair, H, checkpoints=Uniform(2)), TypeError),
        r"while_loop takes checkpoints .*; got Uniform\(segments=2\)",
    ),
    "scan of no function": (scan(3, H, H), TypeError, "scan takes .* of type int"),
    "fori_loop of none": (fori_loop(0, 2, H, H), TypeError, "fori_loop .* type Tensor"),
    "while_loop of no condition": (
        *(while_loop(True, pair, H, checkpoints=2), TypeError),
        "while_loop takes a function; got an object of type bool",
    ),
    "sequential of no function": (
        *(sequential([torch.sin, None], H), TypeError),
        r"fns\[1\] of sequential is not callable: None",
    ),
    "progress of scan": (scan(pair, H, H, progress=True), TypeError, NO_PROGRESS),
    "of fori_loop": (fori_loop(0, 2, pair, H, progress=True), TypeError, NO_PROGRESS),
    "progress of while_loop": (
        *(while_loop(bool, pair, H, checkpoints=2, progress=True), TypeError),
        NO_PROGRESS,
    ),
    "of sequential": (sequential([torch.sin], H, progress=1), TypeError, "got 1"),
    "segments and checkpoints": (
        *(sequential([torch.sin], H, segments=1, checkpoints=2), ValueError),
        "segments=1 and checkpoints=2: pass one of them",
    ),
    "no segments": (sequential([torch.sin], H, segments=0), ValueError, "segments"),
    "bounds": (fori_loop(0, 2.5, pair, H), TypeError, "float"),
}


@rows("call, kind, says", WRONG)
def test_arguments_that_are_wrong_are_refused_before_a_step_runs(call, kind, says):
    with count_ops() as ops, pytest.raises(kind, match=says):
        call()
    assert not ops["sin"]


OTHER_ROWS = {
    "shape": (
        *(lambda h, i: (h.sin(), {"a": h[: int(i) + 1]}),),
        (
            r"`y\['a'\]` is float64\[1, 4\] on cpu in step 0 of `scan of .*, and "
            r"float64\[2, 4\] on cpu after step 1. What is collected is stacked"
        ),
    ),
    "a shape that could be broadcast": (
        *(lambda h, i: (h.sin(), h.sum() if i else h),),
        r"`y` is float64\[4, 4\] .* in step 0 .* and float64\[\] on cpu after step 1",
    ),
    "dtype": (
        *(lambda h, i: (h.sin(), h.float() if i else h),),
        r"`y` is float64\[4, 4\] .* and float32\[4, 4\] on cpu after step 1",
    ),
    "structure": (
        *(lambda h, i: (h.sin(), {"a" if i else "b": h}),),
        "step 1 of `scan .* returned a `y` that is built otherwise than the one in",
    ),
    "nothing, once": (
        *(lambda h, i: (h.sin(), h if i else None),),
        "step 1 of `scan .* returned a `y` that is built otherwise than the one in",
    ),
}


@rows("way", {"base": WAYS["base"], "nothing": lambda f: f(V)})
@rows("f, says", OTHER_ROWS)
def test_what_is_collected_keeps_its_form(f, says, way):
    with pytest.raises(TypeError, match=says):
        way(lambda h: chain.scan(f, h, torch.arange(3))[0])


# --- Progress -----------------------------------------------------------------------


@rows("checkpoints", {"binomial": Binomial(2), "sqrt": Sqrt()})
@rows("way", {**WAYS, "nothing": lambda f: f(V)})
def test_progress_is_told_once_for_each_step_of_the_forward(way, checkpoints):
    done = []

    def run(x):
        return chain.scan(
            lambda h, s: (h.sin(), None),
            x,
            length=7,
            checkpoints=checkpoints,
            progress=done.append,
        )[0]

    def differentiated(x):
        y = run(x)
        if y.grad_fn is not None and way is WAYS["base"]:
            for _ in range(2):
                y.sum().backward(retain_graph=True)
        return y

    with count_ops() as ops:
        way(differentiated)
    assert done == [1, 2, 3, 4, 5, 6, 7]
    assert (ops["sin"] == 7) == (way not in WAYS.values())


def test_progress_of_other_loops():
    done = []
    x = leaves_of(V)[0]
    h = chain.fori_loop(3, 6, lambda i, h: h.sin(), x, progress=done.append)
    h, _ = chain.while_loop(
        lambda c: c[1] < 2,
        lambda c: (c[0].sin(), c[1] + 1),
        (h, 0),
        checkpoints=1,
        progress=done.append,
    )
    h = chain.sequential([torch.sin] * 2, h, progress=done.append)
    with count_ops() as ops:
        h.sum().backward()
    assert done == [1, 2, 3, 1, 2, 1, 2]
    assert ops["sin"] > 3
