"""State that a function changes is changed once under torch.func, wherever it is.

Under base autograd it is a theme of `support.adversarial`.
"""

import functools
import types
from collections import OrderedDict, deque

import pytest
import torch
from support.as_plain import leaf
from support.runs import replayed
from support.tables import crossed
from support.zoo import ops_of
from torch import nn
from torch.func import grad
from torch.utils._pytree import tree_map

from remat import remat
from remat._capture import container_kinds
from remat.testing import assert_same, count_ops


class Holder:
    """An object with state of many kinds."""

    def __init__(self):
        self.seen, self.table, self.count = [], None, 0
        self.by_name, self.last = {}, deque([0, 1], maxlen=2)
        self.tensor, self.log = torch.zeros(4, 4), [torch.ones(4, 4)] * 7
        self.inner, self.named = [[torch.ones(4, 4)]], {"first": torch.ones(4, 4)}

    def tell(self):
        """What there is to compare."""
        return {name: value for name, value in vars(self).items() if name[0] != "_"}


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


def tensor_rebound(state, x):
    state.tensor = state.tensor + x.detach()
    return x + state.tensor


def tensors_added(state, x):
    state.log.append(x.detach())
    state.named["last"] = x.detach()
    return x * state.log[0] * len(state.log)


def tensor_added_within(state, x):
    state.inner[0].append(x.detach() * 2)
    return x * state.inner[0][-2]


def tensor_replaced(state, x):
    y = x * state.log[0]
    state.log[0] = x.detach() * 2
    return y


def tensor_removed(state, x):
    return x * state.log.pop(0) * len(state.log)


CHANGES = [counter, grown_list, lazy_table, dictionary, new_attribute]
CHANGES += [removed_attribute, bounded_queue, tensor_rebound, tensors_added]
CHANGES += [tensor_added_within, tensor_replaced, tensor_removed]
CHANGES = {fn.__name__: fn for fn in CHANGES}


class Stateful(nn.Module):
    """The same state, in a module."""

    def __init__(self, change):
        super().__init__()
        vars(self).update(vars(Holder()))
        self.layer, self.change = nn.Linear(4, 4), change

    def forward(self, x):
        return self.change(self, self.layer(x).sin()).exp()

    def tell(self):
        held = {name: getattr(self, name, None) for name in vars(Holder())}
        return held, [p.grad for p in self.parameters()]


def in_an_argument(wrap, change):
    state = Holder()
    fn = wrap(lambda x, state: change(state, x.sin()).exp())
    return functools.partial(fn, state=state), state


def in_a_closure(wrap, change):
    state = Holder()
    return wrap(lambda x: change(state, x.sin()).exp()), state


def in_a_default(wrap, change):
    state = Holder()
    return wrap(lambda x, state=state: change(state, x.sin()).exp()), state


def in_a_module(wrap, change):
    model = Stateful(change).double()
    return wrap(model), model


def in_the_module_of_a_forward(wrap, change):
    model = Stateful(change).double()
    return wrap(model.forward), model


# Each makes a function whose state is somewhere, and gives both.
WHERE = {
    "argument": in_an_argument,
    "closure": in_a_closure,
    "default": in_a_default,
    "module": in_a_module,
    "forward": in_the_module_of_a_forward,
}


@crossed("change, where", CHANGES, WHERE, each=2)
@replayed(sin=4)
def test_state_is_changed_once_under_grad(wrap, where, change):
    call, state = WHERE[where](wrap, CHANGES[change])
    found = grad(lambda x: (call(x) + call(x)).sum())(leaf(2).detach())
    # The tensors may be dead ones of the transform.
    return tree_map(lambda leaf: None, state.tell()), found


# --- What a forward deletes, and new lists -----------------------------------------


def test_an_entry_that_a_forward_deletes_is_gone_for_the_user():
    scale = torch.tensor([2.0, 3.0])
    table = {"scale": scale, "other": scale}
    f = lambda x: (x * table.pop("scale")).sin().sum()
    x = torch.ones(2)
    with count_ops() as ops:
        found = grad(remat(f))(x)
    assert {*table} == {"other"}
    assert torch.equal(found, scale * scale.cos())
    assert ops["mul"] > 2  # one forward, one recompute, and the backward


def test_a_new_list_that_a_forward_assigns_holds_the_users_own_tensors():
    class Holder:
        def __init__(self):
            self.scale, self.seen = torch.tensor([2.0, 3.0]), None

        def __call__(self, x):
            self.seen = [self.scale]
            return (x * self.scale).sin().sum()

    holder = Holder()
    ops = ops_of(lambda: grad(remat(holder))(torch.ones(2)))
    assert holder.seen[0] is holder.scale
    assert ops["mul"] > 2


def test_what_was_set_between_forward_and_backward_stays_under_torch_func():
    holder, x = types.SimpleNamespace(count=0), torch.linspace(0.1, 1, 4)

    def fn(x):
        holder.count += 1
        return x.sin() * holder.count

    y, pull = torch.func.vjp(remat(fn), x)
    holder.count = 10
    assert torch.equal(pull(torch.ones(4))[0], x.cos())  # as counted in the forward
    assert torch.equal(y, x.sin())
    assert holder.count == 10


# --- What a run under torch.func is given in place of containers ---


def func_gradient(fn):
    x = torch.linspace(0.1, 1, 4)
    with count_ops() as ops:
        ours = torch.func.grad(lambda x: remat(fn)(x).sum())(x)
    return ours, torch.func.grad(lambda x: fn(x).sum())(x), ops


def test_a_set_is_made_again_without_a_search_for_its_order(monkeypatch):
    searched = []
    monkeypatch.setattr(container_kinds, "write_set", lambda *_: searched.append(1))
    words, made = {f"word {i}" for i in range(300)}, []

    def fn(x):
        made.append({f"new {i}" for i in range(60)})
        words.add(f"call {len(made)}")
        return (x * (1 + len(words - {"none"}))).sin().exp()

    ours, _, ops = func_gradient(fn)
    assert not searched
    assert ours.isfinite().all()
    assert (ops["sin"], ops["exp"]) == (2, 2)
    assert {"call 1", "word 299"} <= words


class ByAttribute(dict):
    def __getattr__(self, name):
        return self[name]


class Growing(dict):
    def __getattr__(self, name):
        return self.setdefault(name, Growing())


class Configured:
    options = ByAttribute(scale=2.0), Growing(scale=3.0)


def test_a_search_asks_dicts_for_no_attribute():
    def fn(x):
        first, second = Configured.options
        return (x * first["scale"] * second["scale"]).sin().exp()

    ours, plain, ops = func_gradient(fn)
    assert_same(ours, plain)
    assert ops["sin"] == 2
    assert [*Configured.options[1]] == ["scale"]


class Noisy(property):
    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)


def with_attribute(seed):
    fn = functools.partial(torch.sin)
    fn.generator = torch.Generator().manual_seed(seed)
    return fn


class Streams:
    noisy, part = Noisy(1), with_attribute(2)


@pytest.mark.parametrize("name", ["noisy", "part"])
def test_streams_of_attributes_of_what_classes_hold_are_set_back(name):
    generator = vars(Streams)[name].generator
    fn = lambda x: (x * torch.rand(4, generator=generator)).sin().exp()
    before = generator.get_state()
    x = torch.linspace(0.1, 1, 4)
    plain = torch.func.grad(lambda x: fn(x).sum())(x)
    generator.set_state(before)
    found = lambda x: (x * torch.rand(4, generator=vars(Streams)[name].generator)).sin()
    with count_ops() as ops:
        ours = torch.func.grad(lambda x: remat(lambda x: found(x).exp())(x).sum())(x)
    assert_same(ours, plain)
    assert ops["sin"] == 2


def test_a_dict_that_gets_a_key_is_never_empty(monkeypatch):
    table = OrderedDict((f"key {i}", 2.0) for i in range(5))
    cleared = []

    class Watched(OrderedDict):
        def clear(self):
            cleared.append(1)
            super().clear()

    watched = Watched(table)
    how = container_kinds.container_kind(Watched)
    monkeypatch.setattr(how, "_base", Watched)
    keys, values = how.held(watched)
    how.write(watched, [*keys, "new"], [*values, 3.0])
    assert [*watched.items()][-1] == ("new", 3.0)
    how.write(watched, keys[1:], values[1:])  # one is gone
    assert [*watched] == keys[1:]
    assert not cleared
    how.write(watched, keys[::-1], values)
    assert [*watched] == keys[::-1]
    assert cleared == [1]


def test_a_generator_that_was_at_its_end_gives_nothing_again():
    numbers = (n for n in [2.0])
    assert [*numbers] == [2.0]

    def fn(x):
        for n in numbers:
            x = x * n
        return x.sin().exp()

    ours, plain, ops = func_gradient(fn)
    assert_same(ours, plain)
    assert ops["sin"] == 2
