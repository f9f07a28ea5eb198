"""`compat.patch` and `install`: who calls ours, and that torch's come back."""

import functools
import importlib
import pickle
import sys
import types

import pytest
import torch
from support.checkpoints import sin_exp
from support.compared import leaf, points
from support.zoo import counted
from torch.func import grad
from torch.utils import checkpoint as torchs

from remat import compat
from remat.testing import assert_same, count_ops


NAMES = "checkpoint", "checkpoint_sequential"
ORIGINALS = [(getattr(torchs, name),) for name in NAMES]  # where no patch looks


def is_torchs():
    return all(
        getattr(torchs, name) is old
        for name, (old,) in zip(NAMES, ORIGINALS, strict=True)
    )


def is_ours(checkpoint):
    """Whether it works under torch.func, and recomputes."""
    body, calls = counted(sin_exp)
    try:
        got = grad(lambda x: checkpoint(body, x, use_reentrant=False).sum())(points(3))
    except RuntimeError as error:
        assert "saved tensor hooks" in str(error)  # noqa: PT017
        return False
    assert len(calls) == 2
    assert_same(got, points(3).sin().exp() * points(3).cos())
    return True


@pytest.fixture
def library(monkeypatch):
    """A library that has imported torch's function."""
    module = types.ModuleType("a_library")
    exec("from torch.utils.checkpoint import checkpoint as their_name", vars(module))
    monkeypatch.setitem(sys.modules, "a_library", module)
    return module


def test_torchs_functions_are_ours_inside(library):
    assert not is_ours(library.their_name)
    with compat.patch():
        assert is_ours(torchs.checkpoint)
        assert is_ours(library.their_name)
        assert not is_torchs()
    assert is_torchs()
    assert not is_ours(library.their_name)


IMPORTED = {
    "torch.utils.checkpoint": ORIGINALS[0][0],
    "remat.compat": compat.checkpoint,
}


@pytest.mark.parametrize("source", IMPORTED)
def test_what_was_imported_inside_is_what_it_was_imported_as(source, monkeypatch):
    module = types.ModuleType("another_library")
    monkeypatch.setitem(sys.modules, "another_library", module)
    with compat.patch():
        exec(f"from {source} import checkpoint", vars(module))
        assert is_ours(module.checkpoint)
    assert module.checkpoint is IMPORTED[source]
    assert is_ours(module.checkpoint) is (source == "remat.compat")


def test_it_nests_and_survives_errors():

    def fails():
        with compat.patch():
            with compat.patch():
                assert is_ours(torchs.checkpoint)
            assert is_ours(torchs.checkpoint)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails()
    assert is_torchs()


def test_install_holds_until_uninstall():
    try:
        compat.install()
        compat.install()
        with compat.patch():
            assert is_ours(torchs.checkpoint)
        assert is_ours(torchs.checkpoint)
    finally:
        compat.uninstall()
    assert is_torchs()
    compat.uninstall()
    assert is_torchs()


def test_what_holds_torchs_function_elsewhere_is_not_reached():
    """A default argument, and a partial that was made before."""
    made = functools.partial(torchs.checkpoint)

    def default(fn, x, checkpoint=torchs.checkpoint, **options):
        return checkpoint(fn, x, **options)

    with compat.patch():
        assert is_ours(torchs.checkpoint)
        assert not is_ours(made)
        assert not is_ours(default)


def test_the_other_functions_are_patched_too():
    x = leaf(3)
    body, calls = counted(sin_exp)
    with compat.patch():
        with torchs.set_checkpoint_early_stop(False):
            out = torchs.checkpoint(lambda x: body(x).clone(), x)
        loss = grad(
            lambda x: torchs.checkpoint_sequential([sin_exp, sin_exp], 2, x).sum()
        )
        got = loss(points(3))
    assert_same(got, grad(lambda x: sin_exp(sin_exp(x)).sum())(points(3)))
    out.sum().backward()
    assert len(calls) == 2


def test_remats_own_uses_of_torchs_checkpoint_stay():
    process = importlib.import_module("remat._torch.process")
    depths = []

    def note(x):
        depths.append(process.checkpoint_depth())
        return sin_exp(x)

    theirs = torchs.checkpoint
    with compat.patch():
        theirs(note, leaf(3), use_reentrant=False)
        torchs.checkpoint(note, leaf(3))
    assert depths == [1, 0]


def test_signatures_and_names_stay():
    for name, (old,) in zip(NAMES, ORIGINALS, strict=True):
        with compat.patch():
            new = getattr(torchs, name)
        assert new is not old
        assert (new.__name__, new.__doc__) == (name, getattr(compat, name).__doc__)


@pytest.mark.clients
def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=50,
        attention_dropout=0.1,
    )
    model = transformers.LlamaForCausalLM(config).train()
    tokens = torch.arange(8)[None]

    def gradients():
        torch.manual_seed(0)
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    plain = gradients()
    layer = model.model.layers[0].mlp
    layer.forward, calls = counted(layer.forward)
    with compat.patch():
        model.activation_checkpointing_enable()
        got = gradients()
    assert len(calls) == 2
    assert_same(got, plain)


def test_what_is_put_in_is_pickled():
    x = torch.linspace(0.1, 1.0, 3).requires_grad_()
    with compat.patch():
        holder = [torchs.checkpoint]
        (again,) = pickle.loads(pickle.dumps(holder))
        assert again is holder[0]
    with count_ops() as ops:
        again(lambda x: x.sin().exp(), x).sum().backward()
    assert ops["sin"] == 2
    assert_same(x.grad, (x.cos() * x.sin().exp()).detach())
