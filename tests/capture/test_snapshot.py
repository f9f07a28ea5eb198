"""A recompute reads what the call read, and what it changes is dropped.

The forward runs on the user's own objects. A recompute runs on a snapshot of the call:
whatever the forward changed, and whatever was changed since, is as it was, or it is an
error that names it. Streams and grad mode are as they were before a recompute.
"""

import argparse
import functools
import random
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.as_plain import assert_as_plain, leaf
from support.zoo import Evaluations, make, plainly
from torch import nn
from torch.autograd import grad
from torch.nn.functional import dropout

from remat import RecomputeError, policies, remat
from remat.testing import count_ops


# --- State that the forward changes ---


class Cache:
    """Grows at every use, as those of language models do, and is empty at first."""

    def __init__(self):
        self.keys = None

    def update(self, key):
        self.keys = key if self.keys is None else torch.cat([self.keys, key])
        return self.keys


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_a_cache_that_is_empty_at_the_call(policy):
    def program(wrap, note):
        layer, cache = nn.Linear(4, 4).double(), Cache()

        def attend(x, cache):
            note(None)
            keys = cache.update(layer(x))
            return (x @ keys.T).softmax(-1) @ keys

        call = wrap(attend)
        first = call(leaf(2), cache)
        second = call(leaf(3), cache)
        (first.sum() + second.square().sum()).backward()
        assert cache.keys.shape == (8, 4)
        return cache.keys, [p.grad for p in layer.parameters()]

    def with_policy(fn):
        return remat(fn, policy=policy)

    assert_as_plain(program, evaluations=4, plain=2, wrap=with_policy)


def test_a_value_with_a_graph_that_is_memoised():
    def program(wrap, note):
        w, memo = leaf(1), {}

        def scale(w):
            if "scale" not in memo:
                memo["scale"] = w.exp().cos()
            return memo["scale"]

        def fn(x):
            note(None)
            return (x * scale(w)).tanh()

        call = wrap(fn)
        (call(make(4, 4, seed=2)) + call(make(4, 4, seed=3))).sum().backward()
        return w.grad, memo["scale"].detach()

    assert_as_plain(program, evaluations=4, plain=2)


class Holder:
    """An object with state of many kinds."""

    def __init__(self):
        self.seen, self.table, self.count = [], None, 0
        self.by_name, self.last = {}, deque([0, 1], maxlen=2)


def counter(state, x):
    state.count += 1
    return x * state.count


def grown_list(state, x):
    state.seen.append(len(state.seen) + 1)
    return x * sum(state.seen)


def lazy_table(state, x):
    if state.table is None:
        state.table = torch.linspace(1, 2, 4).double().cos()
        x = x * 2
    return x * state.table


def dictionary(state, x):
    state.by_name[f"n{len(state.by_name)}"] = 3
    return x * len(state.by_name)


def new_attribute(state, x):
    factor = getattr(state, "extra", 1)
    state.extra = factor + 1
    return x * factor


def removed_attribute(state, x):
    factor = 3 if hasattr(state, "count") else 5
    vars(state).pop("count", None)
    return x * factor


def bounded_queue(state, x):
    state.last.append(state.last[-1] + 1)
    return x * sum(state.last)


CHANGES = [counter, grown_list, lazy_table, dictionary, new_attribute]
CHANGES += [removed_attribute, bounded_queue]


class Stateful(nn.Module):
    """The same state, in a module."""

    def __init__(self, change, note):
        super().__init__()
        vars(self).update(vars(Holder()))
        self.layer = nn.Linear(4, 4)
        self.change, self.note = change, note

    def forward(self, x):
        self.note(None)
        return self.change(self, self.layer(x).sin()).exp()


@pytest.mark.parametrize("where", ["argument", "closure", "module", "forward"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_state_that_the_forward_changes(change, where):
    def program(wrap, note):
        model = Stateful(change, note).double()
        state, x = Holder(), leaf(2)

        def fn(x, state=state):
            note(None)
            return change(state, x.sin()).exp()

        if where == "argument":
            call = functools.partial(wrap(fn), state=state)
        elif where == "closure":
            call = wrap(lambda x: fn(x))
        else:
            call, state = wrap(model if where == "module" else model.forward), model
        first = call(x).sum()
        second = call(x).sum()
        first.backward()  # after the state has changed twice
        second.backward()
        shown = [*map(float, state.seen), float(len(state.by_name)), *state.last]
        return torch.tensor(shown), x.grad, *(p.grad for p in model.parameters())

    assert_as_plain(program, evaluations=4, plain=2)


def test_containers_of_every_kind_in_arguments():
    @dataclass
    class Config:
        steps: list = field(default_factory=list)

    def program(wrap, note):
        x = leaf()
        held = {
            "list": [1],
            "dict": {"a": 1},
            "ordered": OrderedDict(a=1),
            "default": defaultdict(list),
            "set": {1},
            "deque": deque([1]),
            "namespace": argparse.Namespace(n=1),
            "config": Config([1]),
            "array": np.ones(1),
            "bytes": bytearray(b"1"),
        }

        def fn(x, held):
            note(None)
            held["list"].append(2)
            held["dict"]["b"] = 2
            held["ordered"]["b"] = 2
            held["default"]["new"].append(2)
            held["set"].add(2)
            held["deque"].appendleft(2)
            held["namespace"].n += 1
            held["config"].steps.append(2)
            held["array"] += 1
            held["bytes"].append(3)
            sizes = [len(held[k]) for k in ("list", "dict", "ordered", "default")]
            sizes += [len(held["set"]), len(held["deque"]), held["namespace"].n]
            sizes += [len(held["config"].steps), int(held["array"][0])]
            sizes += [len(held["bytes"])]
            return (x * sum(sizes)).sin()

        y = wrap(fn)(x, held)
        assert held["list"] == [1, 2]
        held["list"].append(3)
        held["array"] += 1
        held["bytes"].append(3)
        y.sum().backward()
        assert held["list"] == [1, 2, 3]
        assert held["array"][0] == 3
        return x.grad

    assert_as_plain(program)


def test_variables_that_functions_share_and_globals():
    def program(wrap, note):
        x, scale, calls = leaf(), 2.0, 0

        def bump():
            nonlocal calls
            calls += 1
            return calls

        def fn(x):
            nonlocal scale
            note(None)
            scale = scale + bump()
            GLOBAL["n"] += 1
            return (x * scale * GLOBAL["n"]).sin().exp()

        GLOBAL["n"] = 0
        y = wrap(fn)(x)
        scale = 100.0
        GLOBAL["n"] = 50
        y.sum().backward()
        assert (scale, calls, GLOBAL["n"]) == (100.0, 1, 50)
        return x.grad

    assert_as_plain(program)


GLOBAL = {"n": 0}


def test_an_iterator_that_the_forward_advances():
    def program(wrap, note):
        x, scales = leaf(), iter([2.0, 3.0, 5.0])

        def fn(x):
            note(None)
            return (x * next(scales)).sin()

        call = wrap(fn)
        (call(x) + call(x)).sum().backward()
        assert next(scales) == 5.0
        return x.grad

    assert_as_plain(program, evaluations=4, plain=2)


def test_a_generator_that_the_forward_advances_is_an_error_that_names_it():
    numbers = (n for n in [2.0, 3.0, 5.0])

    def fn(x):
        return (x * next(numbers)).sin()

    y = remat(fn)(leaf())
    with pytest.raises(RecomputeError, match="numbers"):
        y.sum().backward()


def test_state_that_is_kept_by_the_identity_of_a_module():
    def program(wrap, note):
        model, x = nn.Linear(4, 4).double(), leaf(2)
        table = weakref.WeakKeyDictionary({model: 3.0})
        by_id = {id(model): 2.0}

        def fn(x):
            note(None)
            return (model(x) * table[model] * by_id[id(model)]).sin().exp()

        wrap(fn)(x).sum().backward()
        return x.grad, model.weight.grad

    assert_as_plain(program)


def test_attributes_set_on_a_tensor_that_is_passed():
    def program(wrap, note):
        x, mask = leaf().sin(), make(4, 4, seed=2)
        x.retain_grad()
        mask.scale = 2

        def fn(x, mask):
            note(None)
            x.seen = getattr(x, "seen", 0) + 1
            mask.scale += 1
            return (x * mask * mask.scale * x.seen).sin()

        y = wrap(fn)(x, mask)
        mask.scale = 50
        y.sum().backward()
        assert (x.seen, mask.scale) == (1, 50)
        return x.grad

    assert_as_plain(program)


def test_a_container_of_very_many_entries_that_changes_is_an_error_that_names_it():
    table = {n: n for n in range(5000)}

    def fn(x):
        return (x * table[1]).sin().exp()

    x = leaf()
    with count_ops() as ops:
        remat(fn)(x).sum().backward()
    assert ops["sin"] == 2
    y = remat(fn)(x)
    table[1] = 2
    with pytest.raises(RecomputeError, match=r"`table` changed since the call"):
        y.sum().backward()


@functools.lru_cache(None)
def positions(n):
    return torch.arange(float(n)).double().cos()


OPTIONS = [{}, {"policy": policies.dots_saveable}, {"prune": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "dots", "prune"])
def test_a_table_that_a_cache_of_the_standard_library_holds(options):
    def program(wrap, note):
        positions.cache_clear()
        w, x = leaf(1), leaf(2)

        def fn(w, x):
            return ((x @ w).tanh() * positions(4)).sin()

        call = wrap(fn)
        with count_ops() as ops:
            for _ in range(3):
                call(w, x).sum().backward()
        for _ in range(ops["tanh"]):
            note(None)
        return w.grad, x.grad

    def with_options(fn):
        return remat(fn, **options)

    # With a record, the first recompute finds the table, which does not fit, and is
    # run again as it is.
    count = 7 if options else 6
    assert_as_plain(program, evaluations=count, plain=3, wrap=with_options)


# --- What is not walked ---


def test_hooks_are_not_walked():
    """The hook leads to fifty layers, and the call is about one."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50))).double()
    model[0].register_forward_hook(lambda *_: model and None)
    from remat._capture.search import Search

    search = Search()
    search.visit(model[0], None)
    assert len(search.found.tensors) == 2
    with count_ops() as ops:
        remat(model[0])(make(3, 4, seed=2).sin()).tanh().sum().backward()
    assert ops["addmm"] == 1  # its graph saves inputs only


# --- Streams ---


def test_torch_size_as_an_argument_and_as_a_result():
    def program(wrap, note):
        x = leaf()

        def fn(x, size):
            note(None)
            return x.sin().exp().reshape(size), x.shape

        y, size = wrap(fn)(x, torch.Size((2, 8)))
        assert type(size) is torch.Size
        y.sum().backward()
        return x.grad

    assert_as_plain(program)


def draws(generator):
    return generator.get_state().sum(), torch.get_rng_state().sum()


ENDS = ["whole", "part", "retained", "error", "thread", "double"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_streams_are_restored_and_put_back(end, policy):
    """However a backward ends: early, in a thread, by an error, twice."""

    def program(wrap, note):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        generator = torch.Generator().manual_seed(7)
        w, x = leaf(1), leaf(2)

        def fn(x):
            note(None)
            h = dropout((x @ w).tanh(), 0.5) * random.random()
            noise = torch.rand(4, 4, generator=generator).double()
            h = (h * noise * np.random.rand()).exp()
            return h.sin(), (h * torch.rand(4, 4)).cos().sum()

        a, b = wrap(fn)(x)
        before = torch.rand(3, generator=generator), torch.rand(3)
        if end == "part":
            del b
            a.sum().backward()
        elif end == "retained":
            (a.sum() + b).backward(retain_graph=True)
            (a.sum() + b).backward()
        elif end == "error":
            a.register_hook(_fail)
            with pytest.raises(ZeroDivisionError, match="planted"):
                (a.sum() + b).backward(retain_graph=True)
            b.backward()
        elif end == "thread":
            thread = threading.Thread(target=(a.sum() + b).backward)
            thread.start()
            thread.join()
        elif end == "double":
            got = grad(a.sum() + b, [w, x], create_graph=True)
            (got[0].square().sum() + got[1].sum()).backward()
        else:
            (a.sum() + b).backward()
        after = torch.rand(3, generator=generator), torch.rand(3)
        rest = torch.tensor([random.random(), np.random.rand()])
        return before, after, rest, w.grad, x.grad

    # After an error in a hook, the second backward recomputes once more.
    counts = {"retained": 3, "double": 3, "error": 3}
    evaluations = counts.get(end, 2)

    def with_policy(fn):
        return remat(fn, policy=policy, prune=False)

    results = []
    for wrap in (plainly, with_policy):
        notes = Evaluations()
        results.append((program(wrap, notes.note), len(notes)))
    (expected, one), (actual, several) = results
    flat = torch.utils._pytree.tree_leaves
    assert all(map(torch.equal, flat(actual), flat(expected)))
    assert (one, several) == (1, evaluations)


def _fail(grad):
    raise ZeroDivisionError("planted")


def test_grad_mode_and_autocast_are_as_they_were():
    def program(wrap, note):
        x, w = leaf().float().detach().requires_grad_(), make(4, 4, seed=2).float()

        def fn(x):
            note(None)
            assert torch.is_autocast_enabled("cpu")
            return (x @ w).exp().sin()

        with torch.autocast("cpu", torch.bfloat16):
            y = wrap(fn)(x)
        y.sum().backward()
        assert not torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            assert not torch.is_grad_enabled()
        return x.grad

    assert_as_plain(program)


def test_entries_of_a_large_container_that_use_the_memory_of_others_are_told_apart():
    table = [float(n) + 0.5 for n in range(2000)]

    def fn(x):
        return (x * table[5]).sin().exp()

    y = remat(fn)(leaf())
    before = id(table[5])
    for n in range(100):
        table[5] = n + 0.25
        if id(table[5]) == before:
            break
    with pytest.raises(RecomputeError, match=r"`table` changed since the call"):
        y.sum().backward()


def test_parameters_in_a_large_container_get_their_gradients():
    def program(wrap, note):
        held, x = [leaf(n, (4,)) for n in range(1001)], leaf(2)

        def fn(x):
            note(None)
            return (x * held[1000]).sin().exp()

        wrap(fn)(x).sum().backward()
        return x.grad, held[1000].grad

    assert_as_plain(program)
