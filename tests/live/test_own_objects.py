"""A recompute reads and writes the user's own objects, also those that others hold."""

import functools
import itertools
import signal
import types
import weakref
from collections import OrderedDict, deque
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from support.runs import assert_replayed, leaf, replayed
from support.tables import rows
from torch import nn

from remat import RecomputeError, remat
from remat.testing import assert_same, count_ops


def curve(x, factor):
    """Needs a recompute, and a right one: its slope depends on the factor."""
    return (x * factor).sin().exp()


# --- What a walk over the function does not lead to ---


class Scaled(nn.Module):
    """Multiplies by a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return x * self.weight


def hook_that_fills_a_dict(wrap):
    module, found = Scaled(), {}
    module.register_forward_hook(
        lambda m, args, out: found.update(scale=len(found) + 2)
    )
    return wrap(lambda x: curve(module(x), found["scale"]))


def hook_that_sets_a_variable(wrap):
    module, scale = Scaled(), 1

    def hook(module, args, out):
        nonlocal scale
        scale += 1

    module.register_forward_hook(hook)
    return wrap(lambda x: curve(module(x), scale))


SEEN = []


class Appending(Scaled):
    def forward(self, x):
        SEEN.append(2.0)
        return super().forward(x)


def method_that_appends_to_a_global(wrap):
    SEEN.clear()
    module = Appending()
    return wrap(lambda x: curve(module(x), len(SEEN)))


class Shared:
    values = None

    def add(self):
        self.values.append(3.0)


def class_attribute_that_is_in_a_closure(wrap):
    values = Shared.values = []
    shared = Shared()

    def fn(x):
        shared.add()
        return curve(x, len(values))

    return wrap(fn)


class Numbered(nn.Module):
    count = 1

    def __init__(self):
        super().__init__()
        self.index = None

    def forward(self, x):
        if self.index is None:
            self.index = Numbered.count
            Numbered.count += 1
        return curve(x, self.index)


def number_that_a_class_gives(wrap):
    Numbered.count = 2
    return wrap(Numbered())


class Reading:
    """Reads a global in a method, a property and a call."""

    def method(self):
        return FACTOR

    @property
    def value(self):
        return FACTOR

    def __call__(self, x):
        return curve(x, FACTOR + self.method() + self.value)


FACTOR = 1.0


def global_that_methods_read(wrap):
    global FACTOR
    FACTOR = 1.0
    reading = Reading()

    def change():
        global FACTOR
        FACTOR = 7.0

    return wrap(lambda x: reading(x)), change


def set_factor(value):
    global FACTOR
    FACTOR = value


def global_that_one_function_sets_for_another(wrap):
    set_factor(1.0)

    def fn(x):
        set_factor(FACTOR + 1)
        return Reading()(x)

    return wrap(fn)


class Pushing:
    def __init__(self):
        self.items = []
        self.push = self.items.append


def bound_method_of_a_list(wrap):
    pushing = Pushing()

    def fn(x):
        pushing.push(2.0)
        return curve(x, len(pushing.items))

    return wrap(fn)


def weak_dictionary(wrap):
    table, key = weakref.WeakKeyDictionary(), Scaled()
    table[key] = 2.0

    def fn(x):
        table[key] += 1
        return curve(x, table[key])

    return wrap(fn), lambda: table.__setitem__(key, 9.0), key


VARIABLE = ContextVar("VARIABLE")


def context_variable(wrap):
    VARIABLE.set(2.0)
    return wrap(lambda x: curve(x, VARIABLE.get())), lambda: VARIABLE.set(9.0)


def counting_iterator(wrap):
    numbers = itertools.count(2)
    return wrap(lambda x: curve(x, next(numbers)))


def tensor_and_its_array(wrap):
    tensor = torch.full((1,), 2.0)
    array = tensor.numpy()

    def fn(x):
        array[0] += 1
        return curve(x, float(tensor))

    return wrap(fn)


class Backwards(list):
    """Iterates over other items than it holds."""

    def __iter__(self):
        return iter([0.0])


def list_that_iterates_otherwise(wrap):
    values = Backwards([2.0])

    def fn(x):
        values[0] += 1
        return curve(x, values[0])

    return wrap(fn)


def function_as_a_key(wrap):
    key = lambda: 2.0
    table = {key: 3.0}
    return wrap(lambda x: curve(x, table[key]))


def set_of_modules(wrap):
    modules = {nn.Identity() for _ in range(5)}
    scales = dict(zip(modules, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))

    def fn(x):
        for module in modules:
            x = curve(module(x), scales[module])
        return x

    return wrap(fn)


def ordered_dict(wrap):
    table = OrderedDict(a=2.0, b=3.0)

    def fn(x):
        table.move_to_end("a")
        return curve(x, next(iter(table.values())))

    return wrap(fn), lambda: table.move_to_end("b")


def bounded_deque(wrap):
    recent = deque([1.0, 2.0], maxlen=2)

    def fn(x):
        recent.append(recent[-1] + 1)
        return curve(x, sum(recent))

    return wrap(fn)


def code_of_a_function(wrap):
    def scale():
        return 2.0

    def other():
        return 9.0

    code = other.__code__
    return wrap(lambda x: curve(x, scale())), lambda: setattr(scale, "__code__", code)


def default_of_a_function(wrap):
    scale = lambda value=2.0: value

    def change():
        scale.__defaults__ = (9.0,)

    return wrap(lambda x: curve(x, scale())), change


def remembered_identity(wrap):
    memo = {}
    return wrap(lambda x: curve(x, memo.setdefault(id(x), len(memo) + 2)))


def leaf_or_not(wrap):
    return wrap(lambda x: curve(x, 2.0 if x.is_leaf else 3.0))


def node_or_not(wrap):
    fn = wrap(lambda x: curve(x, 2.0 if x.grad_fn is None else 3.0))
    return lambda x: fn(x * 2)


PROGRAMS = [
    *(
        hook_that_fills_a_dict,
        hook_that_sets_a_variable,
        method_that_appends_to_a_global,
    ),
    *(class_attribute_that_is_in_a_closure, number_that_a_class_gives),
    *(global_that_methods_read, global_that_one_function_sets_for_another),
    *(bound_method_of_a_list, weak_dictionary, context_variable, counting_iterator),
    *(tensor_and_its_array, list_that_iterates_otherwise, function_as_a_key),
    *(ordered_dict, bounded_deque, code_of_a_function, default_of_a_function),
    *(remembered_identity, leaf_or_not, node_or_not),
]


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
@replayed(sin=(2, 4))
def test_a_recompute_finds_what_the_forward_found(wrap, make):
    """Two calls before their backwards, the second first; what differs is put back."""

    fn, change, *_ = (
        (*made, None) if type(made := make(wrap)) is tuple else (made, None)
    )
    x = leaf()
    first, second = fn(x).sum(), fn(x).sum()
    if change is not None:
        change()
    return [torch.autograd.grad(y, x) for y in (second, first)]


@replayed(sin=(5, 10))
def test_sets_of_modules_keep_their_order(wrap):
    x, fn = leaf(), set_of_modules(wrap)
    return torch.autograd.grad(fn(x).sum(), x)


@pytest.mark.parametrize("count", [2, 5, 20, 100])
@replayed(sin=(1, 2))
def test_a_set_that_forwards_change_keeps_its_order(wrap, count):
    names, x = {f"name {k}" for k in range(count)}, leaf()

    def fn(x):
        y = curve(x, 1 + int(next(iter(names)).split()[1]))
        names.add("name 7000")
        names.discard(next(iter(names)))
        return y

    y = wrap(fn)(x).sum()
    return torch.autograd.grad(y, x), len(names)


def test_a_set_is_given_back_in_the_order_of_the_call():
    class Same:
        """All instances have one hash, so a set has them in the order of insertion."""

        def __hash__(self):
            return 1

    first, second = Same(), Same()
    scales, found, x = {first: 2.0, second: 3.0}, {first, second}, leaf()
    with count_ops() as ops:
        y = remat(lambda x: curve(x, scales[next(iter(found))]))(x).sum()
        found.clear()
        found.update([second, first])
        (got,) = torch.autograd.grad(y, x)
    assert ops["sin"] == 2
    assert_same(got, leaf_gradient(x, 2.0))
    assert [*found] == [second, first]


@replayed(sin=(3, 6))
def test_a_recompute_leaves_no_trace_in_what_hooks_and_methods_wrote(wrap):
    module, found = Scaled(), []
    SEEN.clear()
    module.register_forward_hook(lambda m, args, out: found.append(len(found)))

    def fn(x):
        SEEN.append(1)
        return curve(module(x), len(found))

    x = leaf()
    for _ in range(3):
        wrap(fn)(x).sum().backward()
    return x.grad, found, [*SEEN]


@replayed(sin=(1, 2))
def test_what_a_signal_handler_counts_stays(wrap):
    counted, x = [], leaf()
    handler = signal.signal(signal.SIGUSR1, lambda *_: counted.append(1))
    try:
        y = wrap(lambda x: curve(x, 2.0))(x).sum()
        x.register_hook(lambda _: signal.raise_signal(signal.SIGUSR1))
        y.backward()
    finally:
        signal.signal(signal.SIGUSR1, handler)
    return x.grad, counted


def test_a_subclass_of_dict_is_written_by_its_base_class():
    class Loud(dict):
        def __setitem__(self, key, value):
            raise AssertionError("no setter of the user's runs")

    table = Loud(scale=2.0)
    x = leaf()
    y = remat(lambda x: curve(x, table["scale"]))(x).sum()
    dict.__setitem__(table, "scale", 9.0)
    with count_ops() as ops:
        (got,) = torch.autograd.grad(y, x)
    assert ops["sin"] == 1
    expected = leaf_gradient(x, 2.0)
    assert_same(got, expected)
    assert table["scale"] == 9.0


def leaf_gradient(x, factor):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(curve(x, factor).sum(), x)[0]


# --- Iterators ---

ITERATORS = {
    "cycle": lambda: itertools.cycle([2.0, 3.0]),
    "islice": lambda: itertools.islice([2.0, 3.0, 4.0], 3),
    "chain": lambda: itertools.chain([2.0], [3.0]),
    "zip": lambda: map(sum, zip([1.0, 2.0], [1.0, 1.0], strict=True)),
    "generator": lambda: (float(i) for i in (2, 3)),
}


@rows("make", ITERATORS)
def test_an_iterator_that_cannot_be_read_again_is_named(make):
    numbers = make()
    x = leaf()
    with count_ops() as ops:
        y = remat(lambda x: curve(x, next(numbers)))(x).sum()
    assert ops["sin"] == 1
    with pytest.raises(RecomputeError, match=r"reads the \w+ `numbers`, which"):
        y.backward()


@replayed(sin=(1, 2))
def test_an_iterator_that_is_not_read_is_no_error(wrap):
    unread = itertools.cycle([2.0])
    x = leaf()
    fn = wrap(lambda x: curve(x, 2.0) if unread is not None else x)
    return torch.autograd.grad(fn(x).sum(), x)


@replayed(sin=(2, 4))
def test_repeat_goes_on_where_it_was(wrap):
    numbers, x = itertools.repeat(2.0, 3), leaf()
    fn = wrap(lambda x: curve(x, next(numbers)))
    ys = [fn(x).sum() for _ in range(2)]
    grads = [torch.autograd.grad(y, x) for y in ys]
    return grads, [*numbers]


# --- What is gone by the backward is revived, and only that ---


class State:
    def __init__(self):
        self.scale = 2.0


@replayed(sin=(1, 2))
def test_an_object_that_was_replaced_is_made_again(wrap):
    module, x = Scaled(), leaf()
    module.state = State()
    y = wrap(lambda x: curve(module(x), module.state.scale))(x).sum()
    module.state = State()
    module.state.scale = 9.0
    (grad,) = torch.autograd.grad(y, x)
    return grad, module.state.scale


@replayed(sin=(1, 2))
def test_a_function_and_a_module_that_are_gone_are_made_again(wrap):
    def computed():
        module, scales = Scaled(), [2.0]
        refs.append(weakref.ref(module))
        fn = functools.partial(lambda s, x: curve(module(x), s[0]), scales)
        return wrap(fn)(x).sum()

    refs, x = [], leaf()
    y = computed()
    assert refs[0]() is None
    return torch.autograd.grad(y, x)


def test_what_has_a_finalizer_is_not_made_again():
    class Handle:
        scale = 2.0

        def __del__(self):
            pass

    handles = [Handle()]
    x = leaf()
    with count_ops() as ops:
        y = remat(lambda x: curve(x, handles[0].scale))(x).sum()
    assert ops["sin"] == 1
    handles.clear()
    with pytest.raises(RecomputeError, match="Handle, which has `__del__`,"):
        y.backward()


# --- What was passed ---


@replayed(sin=(1, 2))
def test_passed_lists_and_dicts_hold_what_they_held(wrap):
    x, tree = leaf(), {"a": [2.0], "b": (3.0, {"c": 1.0})}
    fn = wrap(lambda x, t: curve(x, t["a"][0] + t["b"][0] + t["b"][1]["c"]))
    y = fn(x, tree).sum()
    tree["a"].append(5.0)
    tree["a"][0] = tree["b"][1]["c"] = 9.0
    (grad,) = torch.autograd.grad(y, x)
    return grad, tree


@replayed(sin=(1, 2))
def test_a_passed_list_that_an_owner_holds_is_that_list(wrap):
    module, x = Scaled(), leaf()
    module.values = [2.0]
    fn = lambda x, values: curve(module(x), 2.0 if values is module.values else 3.0)
    y = wrap(fn)(x, module.values).sum()
    return torch.autograd.grad(y, x)


@replayed(sin=(1, 2))
def test_a_list_that_the_user_replaced_and_one_in_its_place(wrap):
    space, x = types.SimpleNamespace(values=[1.0, 2.0]), leaf()
    y = wrap(lambda x: curve(x, sum(space.values)))(x).sum()
    space.values = np.arange(3)
    (grad,) = torch.autograd.grad(y, x)
    return grad, space.values.tolist()


@replayed(sin=(6, 12))
def test_a_set_of_modules_that_is_passed_keeps_its_order(wrap):
    modules, x = {Scaled() for _ in range(6)}, leaf()
    for k, module in enumerate(modules):
        module.weight.data.fill_(1 + k / 4)
    fn = wrap(lambda x, ms: functools.reduce(lambda y, m: m(y).sin(), ms, x).exp())
    return torch.autograd.grad(fn(x, modules).sum(), x)


def test_a_tuple_with_attributes_that_is_passed():
    class Sizes(tuple):
        """A tuple with an attribute."""

    def program(wrap):
        sizes, x = Sizes((1.0, 2.0)), leaf()
        sizes.factor = 3.0
        fn = wrap(lambda x, sizes: curve(x, sizes[1] * sizes.factor))
        return torch.autograd.grad(fn(x, sizes).sum(), x)

    assert_replayed(program, sin=(1, 2))


def test_keys_are_not_compared_by_the_user():
    class Key:
        def __init__(self, k):
            self.k = k

        def __eq__(self, other):
            return self.k == other.k

        def __hash__(self):
            return hash(self.k)

    def program(wrap):
        module, x = Scaled(), leaf()
        module.cache = {Key(1): 2.0}
        fn, grads = wrap(lambda x: curve(module(x), sum(module.cache.values()))), []
        for k in range(3):
            module.cache.clear()
            module.cache[Key(k)] = k + 2.0
            grads += torch.autograd.grad(fn(x).sum(), x)
        return grads

    assert_replayed(program, sin=(3, 6))
