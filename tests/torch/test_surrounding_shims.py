"""What the shims of `process`, and of pytrees, expect of torch."""

import inspect
import types
from typing import Any

import torch
from support.shims import expects, leaf, replaced
from torch import nn
from torch.nn.utils import parametrize
from torch.utils import _pytree, checkpoint
from torch.utils.module_tracker import ModuleTracker

from remat._torch import (
    noted,
    operators,
    process,
)


@expects("read_settings", "write_settings")
def test_settings_are_read_and_written():
    then = process.read_settings()
    assert type(then) is tuple
    assert torch.get_default_dtype() in then
    for put, value in zip(process._SETTERS, then, strict=True):
        put(*value) if isinstance(value, tuple) else put(value)
    assert process.write_settings(then) is None
    assert process.read_settings() == then


@expects("has_hooks_on_all_modules", "hooks_of_trackers", "remove_hooks_since")
def test_hooks_of_trackers_are_removed():
    assert process.has_hooks_on_all_modules() is False
    assert not process.hooks_of_trackers()
    with ModuleTracker() as tracker:
        assert process.has_hooks_on_all_modules() is True
        nn.Linear(1, 1)(leaf().sum(0, keepdim=True))
        before = len(tracker._hooks)
        then = process.hooks_of_trackers()
        nn.Linear(1, 1)(leaf().sum(0, keepdim=True))
        assert len(tracker._hooks) == 2 * before > 0
        process.remove_hooks_since(then)
        assert len(tracker._hooks) == before


@expects("default_generators", "device_generators")
def test_generators_are_found():
    more = process.device_generators()
    assert [torch.default_generator, *more] == process.default_generators()
    assert all(isinstance(g, torch.Generator) for g in more)


@expects("autocast_depth", "is_autocast_active")
def test_autocast_is_seen():
    before = process.autocast_depth()
    assert process.is_autocast_active() is False
    with torch.autocast("cpu", torch.bfloat16):
        assert process.autocast_depth() == before + 1
        assert process.is_autocast_active() is True


@expects("parametrization_cache", "swap_parametrization_cache")
def test_parametrizations_are_cached():
    assert process.parametrization_cache() is None
    fresh: dict[Any, Any] = {}
    with parametrize.cached():
        before = process.swap_parametrization_cache(({}, 0))
        assert process.parametrization_cache() is None
        process.swap_parametrization_cache((fresh, 1))
        assert process.parametrization_cache() is fresh
        assert process.swap_parametrization_cache(before) == (fresh, 1)
        assert process.parametrization_cache() is before[0]


@expects("is_of_checkpoint")
def test_hooks_of_checkpoint_are_known():
    frame = checkpoint._checkpoint_hook.__init__
    assert not process.is_of_checkpoint(leaf)
    # The hooks are functions within that.
    assert process.is_of_checkpoint(frame)


@expects("checkpoint_depth")
def test_checkpoints_are_seen():
    # Unwrapped and reentrant, as the others import Dynamo.
    call = inspect.unwrap(checkpoint.checkpoint)
    depths: list[int] = []

    def note(x):
        depths.append(process.checkpoint_depth())
        return x * 1

    call(note, leaf(), use_reentrant=True)
    if inspect.signature(call).parameters["function"].default is None:
        call(use_reentrant=True)(note)(leaf())
    assert {*depths} == {1}
    assert process.checkpoint_depth() == 0


def _of_list(
    operators: list[Any],
):
    cells = {"policy_fn_or_list": types.CellType(operators)}
    code = process._CODE_OF_LIST
    closure = tuple(cells[name] for name in code.co_freevars)
    return types.FunctionType(code, {}, closure=closure)


@expects("checkpoint_settings")
def test_settings_of_checkpoints_are_read():
    before = process.checkpoint_settings()
    with checkpoint.set_checkpoint_early_stop(False):
        assert process.checkpoint_settings() == (False, before[1])
        with checkpoint.set_checkpoint_debug_enabled(True):
            assert process.checkpoint_settings() == (False, True)
    assert process.checkpoint_settings() == before


@expects("selective_policy")
def test_selective_contexts_tell_their_policy():
    # Not made by torch's function: their class imports Dynamo.
    kind = checkpoint._CachingTorchDispatchMode
    assert "policy_fn" in inspect.signature(kind).parameters
    context = object.__new__(kind)
    context.policy_fn = leaf
    assert process.selective_policy(context) is leaf
    operators: list[Any] = []
    context.policy_fn = _of_list(operators)
    assert process.selective_policy(context) is operators
    assert process.selective_policy(None) is None


class _Node:
    pass


def _unflatten(*_):
    return _Node()


@expects("TORCH_NODES", "register_torch_node")
def test_classes_of_pytrees_are_listed():
    assert {dict, list, tuple} <= operators.TORCH_NODES.keys()
    takes = inspect.signature(_pytree.register_pytree_node)
    given: list[inspect.BoundArguments] = []

    def note(*args, **kwargs):
        given.append(takes.bind(*args, **kwargs))

    def flatten(_):
        return [3], None

    # Not registered, which could not be undone.
    with replaced(vars(_pytree), "register_pytree_node", note):
        register = operators.register_torch_node
        register(_Node, flatten, _unflatten, name="name", children=["a"])
        register(_Node, flatten, _unflatten)
    assert len(given) == 2
    keyed, _ = given[0].arguments["flatten_with_keys_fn"](None)
    assert keyed == [(_pytree.GetAttrKey("a"), 3)]


@expects("Renorm", "Renorms", "later_renorms", "renorms_taken_back")
def test_scaled_rows_are_noted():
    weight, notes = torch.tensor([[3.0], [0.5]]), noted.Noted()
    notes.start()
    try:
        torch.nn.functional.embedding(torch.tensor([0, 1]), weight, max_norm=1.0)
    finally:
        notes.end()
    (note,) = notes.renorms
    assert (note.rows.tolist(), note.before.tolist()) == ([0], [[3.0]])
    assert weight[0] < 3.0
    later = noted.later_renorms(note.storage)
    torch.nn.functional.embedding(torch.tensor([1]), weight, max_norm=0.1)
    with noted.renorms_taken_back():
        torch.nn.functional.embedding(torch.tensor([1]), weight, max_norm=0.01)
    assert [note.rows.tolist() for note in later.changes] == [[1]]


@expects("Noted", "seed")
def test_seeds_are_taken_again():
    state = torch.get_rng_state()
    try:
        forward = noted.Noted()
        first = _draw_with(forward)
        assert forward.seeds == [first[0]]
        assert _draw_with(noted.Noted(forward.seeds)) == first
    finally:
        torch.set_rng_state(state)


def _draw_with(notes: noted.Noted):
    notes.start()
    try:
        return noted.seed(), torch.rand(2).tolist()
    finally:
        notes.end()


@expects("twister_memory", "twister_state")
def test_memory_tells_what_was_drawn():
    generator = torch.Generator().manual_seed(0)
    memory = process.twister_memory(generator)
    before = memory.raw
    assert memory.raw == before
    first = torch.randn(3, generator=generator)
    assert memory.raw != before
    generator.set_state(process.twister_state(before))
    assert torch.equal(torch.randn(3, generator=generator), first)
