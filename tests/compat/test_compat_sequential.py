"""`compat.checkpoint_sequential`: items 1, 3 and 4 of `test_compat_calls.py`.

And that a segment costs what a call costs, however many there are.
"""

import sys

import pytest
import torch
from support.checkpoints import KINDS, Logged, both_sequential, chain
from support.compared import leaf
from support.zoo import Evaluations
from torch import nn

from remat import compat
from remat.testing import assert_same, assert_same_gradients, count_ops, live_bytes


@both_sequential
def test_a_sequence_of_two_segments_runs_its_first_half_again(sequential):
    """1."""
    log = Evaluations()
    modules = nn.Sequential(*[Logged(k, log) for k in range(10)])
    x = leaf(2, 4)
    out = sequential(modules, 2, x)
    assert [*log] == list(range(10))
    out.sum().backward()
    assert [*log] == list(range(5))
    assert_same(x.grad, torch.autograd.grad(chain(modules, x).sum(), x)[0])


@both_sequential
@pytest.mark.parametrize("segments", [2, 3, 4, 6])
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_sequences_of_any_kind(sequential, kind, segments):
    """3: outputs, gradients of inputs and of parameters; the last one may be longer."""
    log = Evaluations()
    modules = kind([Logged(k, log) for k in range(6)])
    assert_same_gradients(
        lambda x: sequential(modules, segments, x),
        lambda x: chain(modules, x),
        leaf(2, 4),
        wrt={k: dict(m.named_parameters()) for k, m in enumerate(modules)},
    )
    again = (6 // segments) * (segments - 1)
    assert len(log) == 6 + again + 6


@both_sequential
def test_a_sequence_takes_one_input(sequential):
    """4."""
    x = leaf(3)
    with pytest.raises(TypeError, match=r"positional argument|multiple values"):
        sequential([torch.sin, torch.cos], 2, x, False, x)
    with pytest.raises(TypeError, match="'input'"):
        sequential([torch.sin, torch.cos], 2)


@both_sequential
def test_a_sequence_refuses_other_keywords(sequential):
    """4: but takes `preserve_rng_state`."""
    x = leaf(3)
    with pytest.raises(ValueError, match="depth"):
        sequential([torch.sin, torch.cos], 2, x, depth=3)
    with count_ops() as ops:
        sequential([torch.sin] * 4, 2, x, preserve_rng_state=False).sum().backward()
    assert ops["sin"] == 4 + 1


@pytest.mark.parametrize("segments", [-1, 0, 3])
def test_too_many_or_too_few_segments_are_refused(segments):
    with pytest.raises(ValueError, match=f"{segments} segments of 2 functions: use 1"):
        compat.checkpoint_sequential([torch.sin, torch.cos], segments, leaf(3))


def test_an_error_names_the_segment():
    log = Evaluations()

    def changes(x):
        log.note(None)
        return x.sigmoid() if len(log) > 1 else x.exp()

    functions = [torch.sin, changes, torch.sin, torch.sin]
    out = compat.checkpoint_sequential(functions, 2, leaf(3))
    with pytest.raises(compat.CheckpointError, match=r"`functions\[0:2\]` \(remat.*py"):
        out.sum().backward()
    assert len(log) == 2


def calls_of(run):
    """How many Python functions run."""
    count = 0

    def note(_frame, event, _arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("style", ["modules", "functions"])
def test_a_segment_costs_what_a_call_costs_however_many_there_are(style):
    """It does not refer to the others: counted in calls of Python functions."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(64)]
    functions = layers
    if style == "functions":
        functions = [lambda x, layer=layer: layer(x) for layer in layers]
    x = leaf(2, 4)

    def in_sequence(count):
        return lambda: compat.checkpoint_sequential(functions[:count], count, x)

    def one_by_one():
        out = x
        for function in functions[:-1]:
            out = compat.checkpoint(function, out)
        return functions[-1](out)

    for warm_up in (one_by_one, in_sequence(64), in_sequence(16)):
        warm_up()
    of_64 = calls_of(in_sequence(64))
    assert of_64 <= 1.05 * calls_of(one_by_one)
    assert of_64 <= 1.05 * 63 / 15 * calls_of(in_sequence(16))
    with count_ops() as ops:
        in_sequence(64)().sum().backward()
    assert ops["tanh"] == 64 + 63


def test_a_sequence_keeps_the_inputs_of_its_segments():
    functions = [torch.sin] * 16
    x = leaf(1024)
    plain = live_bytes(lambda: chain(functions, x))
    in_segments = live_bytes(lambda: compat.checkpoint_sequential(functions, 4, x))
    # `sin` saves its input, which is `x` for the first. The result counts.
    assert (plain, in_segments) == (16 * 4096, (3 + 4) * 4096)
