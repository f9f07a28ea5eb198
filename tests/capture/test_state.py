"""State that a function changes is changed once, of each kind and wherever it is."""

import functools
import sys
import types
from collections import deque

import pytest
import torch
from support.as_plain import leaf
from support.runs import assert_replayed
from support.tables import crossed
from torch import nn
from torch.func import grad
from torch.utils._pytree import tree_map

from remat import remat
from remat.testing import count_ops


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


def in_each_place(each):
    return crossed("change, where", CHANGES, WHERE, each=each)


@in_each_place(3)
def test_each_call_is_recomputed_with_the_state_that_it_read(where, change):
    def program(wrap):
        x = leaf(2)
        call, state = WHERE[where](wrap, CHANGES[change])
        first = call(x).sum()
        second = call(x).sum()
        first.backward()  # after the state has changed twice
        second.backward()
        return state.tell(), x.grad

    assert_replayed(program, sin=4)


@in_each_place(1)
def test_state_is_changed_once_by_each_of_several_steps(where, change):
    def program(wrap):
        x = leaf(2)
        call, state = WHERE[where](wrap, CHANGES[change])
        for _ in range(3):
            call(x).sum().backward()
        return state.tell(), x.grad

    assert_replayed(program, sin=6)


@in_each_place(2)
def test_state_is_changed_once_under_grad(where, change):
    def program(wrap):
        call, state = WHERE[where](wrap, CHANGES[change])
        found = grad(lambda x: (call(x) + call(x)).sum())(leaf(2).detach())
        # The tensors may be dead ones of the transform.
        return tree_map(lambda leaf: None, state.tell()), found

    assert_replayed(program, sin=4)


def rebinds_a_nonlocal():
    state = torch.zeros(4, 4)

    def fn(x):
        nonlocal state
        state = state + x.detach()
        return (x + state).sin().exp()

    return fn, lambda: state


def rebinds_a_global():
    sys.modules[__name__].TOTAL = torch.zeros(4, 4)

    def fn(x):
        global TOTAL
        TOTAL = TOTAL + 1
        return (x + TOTAL).sin().exp()

    return fn, lambda: TOTAL


@pytest.mark.parametrize("make", [rebinds_a_nonlocal, rebinds_a_global])
def test_a_variable_is_rebound_once(make):
    def program(wrap):
        x, (fn, value) = leaf(), make()
        for _ in range(3):
            wrap(fn)(x).sum().backward()
        return value(), x.grad

    assert_replayed(program, sin=2 * 3)


def grows(x, log):
    log.append(x.detach())
    return (x * log[0] * len(log)).sin().exp().sum()


def by_backward(fn, x):
    return torch.autograd.grad(fn(x), x)


@pytest.mark.parametrize("how", [by_backward, lambda fn, x: grad(fn)(x.detach())])
def test_a_list_of_tensors_in_an_argument_is_changed_once(how):
    def program(wrap):
        log, call, x = [], wrap(grows), leaf()
        return how(lambda x: call(x, log) + call(2 * x, log), x), len(log)

    assert_replayed(program, sin=2 * 2)


# --- What a forward deletes, and new lists -----------------------------------------


def test_an_entry_that_a_forward_deletes_is_gone_for_the_user():
    scale = torch.tensor([2.0, 3.0])
    table = {"scale": scale, "other": scale}

    def f(x):
        return (x * table.pop("scale")).sin().sum()

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
    with count_ops() as ops:
        grad(remat(holder))(torch.ones(2))
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
