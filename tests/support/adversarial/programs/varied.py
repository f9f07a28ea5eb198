"""Varied ways to hold, to ask for and to change what a recompute reads."""

import contextlib
import dataclasses
import enum
import functools
import gc
import operator
import threading
import types
import typing
import weakref
from collections import ChainMap, Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import torch
from support.adversarial.program import (
    State,
    back,
    family,
    leaf,
    loop,
    observed,
    program,
    ran,
    reversed_loop,
    taking,
    trained,
    work,
)
from torch import nn


# --- What never changes, around what does ---


def scaled(x, *, by, power=1):
    return work(x, by["k"]) ** power


class Named(functools.partial):
    """A partial with attributes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    table: dict
    power: int = 1

    def __call__(self, x):
        return scaled(x, by=self.table, power=self.power)


class Pair(typing.NamedTuple):
    fn: object
    table: object = None


class Kind(enum.Enum):
    ONE = 1

    def __call__(self, x):
        return scaled(x, by=self.table)


class Scales:
    def __init__(self, table):
        self.table = table

    def of(self, x):
        return scaled(x, by=self.table)

    half = functools.partialmethod(of)

    @functools.cached_property
    def cached(self):
        return functools.partial(scaled, by=self.table)


def by_named(table):
    fn = Named(scaled, by=table)
    fn.note = [table]
    return lambda x: fn(x) * fn.note[0]["k"]


def by_slotted(table):
    return Slotted(table)


def by_pair(table):
    pair = Pair(functools.partial(scaled, by=table), (table,))
    return lambda x: pair.fn(x) + pair.table[0]["k"]


def by_enum(table):
    Kind.ONE.table = table
    return Kind.ONE


def by_method(table):
    return Scales(table).of


def by_partialmethod(table):
    return Scales(table).half


def by_cached_property(table):
    scales = Scales(table)
    return lambda x: scales.cached(x)


def by_proxy(table):
    proxy = types.MappingProxyType({"inner": types.MappingProxyType(table)})
    return lambda x: scaled(x, by=proxy["inner"])


def by_frozenset(table):
    fns = frozenset({functools.partial(scaled, by=table)})
    return lambda x: next(iter(fns))(x)


def by_chain(table):
    chain = ChainMap({}, table)
    return lambda x: scaled(x, by=chain)


def by_methodcaller(table):
    scales = Scales(table)
    return lambda x: operator.methodcaller("of", x)(scales)


def by_dispatch(table):
    @functools.singledispatch
    def fn(x):
        raise TypeError

    fn.register(torch.Tensor, functools.partial(scaled, by=table))
    return fn


def by_weak_keys(table):
    key, found = State(), weakref.WeakKeyDictionary()
    found[key] = table
    return lambda x: scaled(x, by=found[key])


def by_local(table):
    local = threading.local()
    local.table = table
    return lambda x: scaled(x, by=local.table)


def by_default_factory(table):
    found = defaultdict(lambda: table["k"])
    return lambda x: work(x, found[len(found)])


HELD = taking(globals(), "table")


@family(**HELD)
def a_number_below_what_never_changes(build):
    table = {"k": 1.0}
    fn = build(table)

    def change():
        table["k"] += 0.5

    return reversed_loop(lambda x: fn(x), between=change, state=lambda: table)


@family(**HELD)
def counted_below_what_never_changes(build):
    table = {"k": 1.0}
    inner = build(table)

    def fn(x):
        table["k"] += 0.5
        return inner(x).tanh()

    return reversed_loop(fn, state=lambda: table)


@family(**{name: build for name, build in HELD.items() if name != "by weak keys"})
def below_what_is_gone_by_the_backward(build):
    state = State(fn=build({"k": 1.0}), n=0)

    def gone():
        state.n += 1
        state.fn = build({"k": 1.0 + state.n})

    return loop(lambda x: state.fn(x), between=gone)


# --- Hooks ---


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x, *, k=1.0):
        return work(self.b(self.a(x).tanh()) * k)


def pre_with_kwargs(block, counts):
    def hook(module, args, kwargs):
        counts["n"] += 1
        return args, {"k": 1.0 + counts["n"]}

    block.register_forward_pre_hook(hook, with_kwargs=True)


def hook_with_kwargs(block, counts):
    def hook(module, args, kwargs, out):
        counts["n"] += 1
        return out * counts["n"]

    block.register_forward_hook(hook, with_kwargs=True)


def always_called(block, counts):
    def hook(module, args, out):
        counts["n"] += 1
        return out * counts["n"]

    block.a.register_forward_hook(hook, always_call=True)


def prepended(block, counts):
    block.a.register_forward_hook(lambda m, a, out: out * counts["n"])

    def hook(module, args, out):
        counts["n"] += 1

    block.a.register_forward_hook(hook, prepend=True)


def removes_itself(block, counts):
    def hook(module, args, out):
        counts["n"] += 1
        handle.remove()
        return out * 3

    handle = block.a.register_forward_hook(hook)


def sets_another(block, counts):
    def hook(module, args, out):
        counts["n"] += 1
        if counts["n"] == 2:
            block.b.register_forward_hook(lambda m, a, out: out * counts["n"])

    block.a.register_forward_hook(hook)


def of_backward(block, counts):
    def hook(module, grads_in, grads_out):
        counts["n"] += 1
        return tuple(g * counts["n"] for g in grads_in)

    block.a.register_full_backward_hook(hook)


def pre_of_backward(block, counts):
    def hook(module, grads):
        counts["n"] += 1
        return tuple(g * counts["n"] for g in grads)

    block.b.register_full_backward_pre_hook(hook)


def of_a_parameter(block, counts):
    def hook(grad):
        counts["n"] += 1
        return grad * counts["n"]

    block.a.weight.register_hook(hook)


def after_accumulation(block, counts):
    def hook(p):
        counts["n"] += 1
        p.grad.mul_(counts["n"])

    block.a.weight.register_post_accumulate_grad_hook(hook)


def of_an_inner_result(block, counts):
    def scale(grad):
        counts["n"] += 1
        return grad * counts["n"]

    def hook(module, args, out):
        out.register_hook(scale)

    block.a.register_forward_hook(hook)


@family(
    pre_with_kwargs=pre_with_kwargs,
    hook_with_kwargs=hook_with_kwargs,
    always_called=always_called,
    prepended=prepended,
    removes_itself=removes_itself,
    sets_another=sets_another,
    of_backward=of_backward,
    pre_of_backward=pre_of_backward,
    of_a_parameter=of_a_parameter,
    after_accumulation=after_accumulation,
    of_an_inner_result=of_an_inner_result,
)
def a_hook_that_counts(register):
    block, counts = Block(), {"n": 0}
    register(block, counts)
    return trained(block, state=lambda: counts)


# --- Settings, and what torch keeps for itself ---


@contextlib.contextmanager
def flag_set(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


SETTINGS = {
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "default device": lambda: torch.device("meta"),
    "flush denormal": lambda: flag_set(torch.backends.mkldnn, "enabled", False),
    "errors of NumPy": lambda: np.errstate(all="raise"),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "layers": lambda: torch.nn.utils.parametrize.cached(),
    "attention": lambda: torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ),
    "profiler": lambda: torch.autograd.profiler.record_function("a"),
}


NO_GRAD = {"no grad", "inference"}


@family(**{k: v for k, v in SETTINGS.items() if k not in NO_GRAD})
def a_setting_of_the_forward_alone(setting):
    def fn(x):
        y = torch.ones(16, dtype=torch.double)
        return work(x, 2.0) * (3.0 if y.is_meta else 2.0)

    def step(wrap):
        run, x = wrap(fn), leaf()
        with setting():
            out = run(x)
        if out.requires_grad:
            back(out)
        return observed((out, x.grad))

    return step


@family(**{k: v for k, v in SETTINGS.items() if k != "inference"})
def a_setting_inside(setting):
    def fn(x):
        y = work(x, 2.0)
        with setting():
            z = y * 2
        return (y * z).tanh()

    return loop(fn)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.set_materialize_grads(False)
        ctx.k = k
        y, mask = x * k, x > 0
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(y, mask)
        return y, mask

    @staticmethod
    def backward(ctx, grad, _):
        y, mask = ctx.saved_tensors
        again = ctx.saved_tensors[0]
        return grad * ctx.k * mask * y.cos() * again, None


@program
def a_function_of_the_users_that_saves_its_results():
    def fn(x):
        y, mask = Doubling.apply(work(x), 2.0)
        return torch.where(mask, y.sin(), y.exp())

    return loop(fn)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


@program
def a_function_of_the_users_that_writes_in_place():
    return loop(lambda x: work(InPlace.apply(x * 1.5)).tanh())


@program
def hooks_for_saved_tensors_inside():
    packed = []

    def pack(t):
        packed.append(t.shape)
        return t * 2

    def fn(x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t / 2):
            y = work(x)
        return y.tanh() * len(packed)

    return loop(fn, state=lambda: len(packed))


@program
def a_gradient_retained_inside():
    kept = []

    def fn(x):
        y = work(x)
        y.retain_grad()
        kept.append(y)
        return y.tanh()

    return loop(fn, state=lambda: [y.grad for y in kept])


@program
def a_node_with_a_prehook():
    scales = [1.0]

    def fn(x):
        y = work(x)
        y.grad_fn.register_prehook(lambda grads: (grads[0] * scales[0],))
        return y.tanh()

    def change():
        scales[0] += 1

    return loop(fn, between=change)


@program
def an_accumulating_gradient_read_inside():
    w = leaf(seed=9)

    def fn(x):
        k = 1.0 if w.grad is None else w.grad.sum().item()
        return work(x * w) * k

    return loop(fn, state=lambda: w.grad)


@program
def a_weak_reference_to_a_result():
    kept = []

    def fn(x):
        y = work(x)
        kept.append(weakref.ref(y))
        return y.tanh() * (2.0 if kept[-1]() is y else 3.0)

    def state():
        gc.collect()
        return [ref() is None for ref in kept]

    return loop(fn, state=state)


@program
def an_output_that_is_an_input_and_its_view():
    def fn(x):
        y = work(x)
        return x, x.view(4, 4), y, y[2:]

    return loop(fn)


@program
def containers_of_results_of_many_kinds():
    Point = namedtuple("Point", "a b")

    def fn(x):
        y = work(x)
        return OrderedDict(p=Point(y, y.tanh())), Counter(n=1)

    def step(wrap):
        run, x = wrap(fn), leaf()
        found, count = run(x)
        back((found["p"].a, found["p"].b))
        return observed((found["p"].a, found["p"].b, count, x.grad))

    return step


@program
def evaluations_counted_by_the_outermost():
    counts = Counter()

    def inner(x):
        counts["inner"] += 1
        return work(x, counts["inner"])

    def step(wrap):
        run = wrap(inner)

        def outer(x):
            counts["outer"] += 1
            return sum(run(x * k) for k in range(1, 4)) * counts["outer"]

        return reversed_loop(wrap(outer), state=lambda: counts)(lambda f: f)

    return step


@program
def an_error_inside_that_is_caught_outside():
    tries = Counter()

    def fn(x):
        tries["n"] += 1
        y = work(x, tries["n"])
        if tries["n"] % 2:
            raise KeyError(tries["n"])
        return y.tanh()

    def step(wrap):
        run, seen = wrap(fn), []
        for i in range(4):
            x = leaf(seed=i)
            try:
                out = run(x)
            except KeyError as error:
                seen.append(repr(error))
            else:
                back(out)
                seen.append(observed((out, x.grad, tries)))
        return seen

    return step


@program
def a_module_whose_class_is_changed_between():
    class Other(nn.Module):
        def forward(self, x):
            return work(x, 5.0)

    class First(nn.Module):
        def forward(self, x):
            return work(x, 2.0)

    module = First()

    def change():
        module.__class__ = Other if type(module) is First else First

    return loop(lambda x: module(x), between=change)


class Doubled(Block):
    __slots__ = ()

    def forward(self, x):
        return super().forward(x) * 2


class Sharded(Block):
    """As libraries do that give a module another class and change nothing."""


class Scaled:
    __slots__ = "__weakref__", "k"

    def __call__(self, x):
        return work(x, self.k)


class Other(Scaled):
    __slots__ = ()

    def __call__(self, x):
        return work(x, 5.0)


def of_a_module(kind):
    block = Block()
    return block, lambda x: block(x.view(4, 4)), kind


def of_a_slotted_object(kind):
    scaled = Scaled()
    scaled.k = 2.0
    return scaled, lambda x: scaled(x), kind


@family(
    doubled=lambda: of_a_module(Doubled),
    sharded=lambda: of_a_module(Sharded),
    slots=lambda: of_a_slotted_object(Other),
)
def another_class_between(make):
    value, fn, other = make()
    first = type(value)

    def change():
        value.__class__ = first if type(value) is other else other

    return reversed_loop(fn, between=change, state=lambda: type(value).__name__)


@family(
    doubled=lambda: of_a_module(Doubled),
    slots=lambda: of_a_slotted_object(Other),
)
def another_class_by_the_function(make):
    value, fn, other = make()
    first = type(value)

    def changing(x):
        out = fn(x)
        value.__class__ = first if type(value) is other else other
        return out.tanh()

    return loop(changing, state=lambda: type(value).__name__)


@program
def parameters_replaced_between():
    block = Block()

    def change():
        block.a.weight = nn.Parameter(block.a.weight.detach() * 2)

    return loop(
        lambda x: block(x.view(4, 4)), between=change, state=lambda: block.a.weight
    )


@program
def a_module_put_into_another_between():
    holder = nn.ModuleDict({"a": Block()})

    def change():
        holder["a"] = Block()
        holder["a"].a.weight.data.mul_(2)

    return loop(lambda x: holder["a"](x.view(4, 4)), between=change)


@program
def dropout_switched_off_between():
    drop = nn.Dropout(0.5)

    def change():
        drop.train(not drop.training)

    return loop(lambda x: work(drop(x)).tanh(), between=change)


@program
def a_loop_of_calls_on_one_state():
    state = State(h=torch.zeros(16, dtype=torch.double), n=0)

    def cell(x):
        state.n += 1
        state.h = (state.h.detach() * 0.5 + work(x, state.n)).tanh()
        return state.h

    def step(wrap):
        run = wrap(cell)

        def outer(x):
            return torch.stack([run(x * k) for k in range(1, 4)])

        return loop(outer, state=lambda: state.n)(lambda f: f)

    return step


@program
def a_recurrent_state_with_its_graph():
    state = State(h=None)

    def cell(x):
        h = torch.zeros_like(x) if state.h is None else state.h
        state.h = (h * 0.5 + work(x)).tanh()
        return state.h

    def step(wrap):
        run, x = wrap(cell), leaf()
        out = [run(x * k) for k in range(1, 4)]
        back(out[-1])
        return observed((out[-1], x.grad))

    return step


@program
def what_ran_counts_once():
    def fn(x):
        ran()
        return work(x).tanh()

    return loop(fn)


# --- In torch's checkpoint ---


def keeps_its_input(kept, x):
    kept.append(x)
    return work(x)


def keeps_a_detached_one(kept, x):
    y = work(x)
    kept.append(y.detach())
    return y.tanh()


def keeps_what_it_computes(kept, x):
    y = work(x)
    kept.append(y)
    return y.tanh()


def replaces_what_it_keeps(kept, x):
    y = work(x)
    kept[:] = [y.detach(), *kept[:1]]
    return y.tanh()


@family(
    input=keeps_its_input,
    detached=keeps_a_detached_one,
    computed=keeps_what_it_computes,
    replaced=replaces_what_it_keeps,
)
def a_list_that_grows_in_a_call_in_torchs_checkpoint(keep):
    """Torch's checkpoint runs the call again, with more in the list."""
    kept = []

    def step(wrap):
        run = wrap(lambda x: keep(kept, x))

        def outer(x):
            inner = lambda x: run(x.sin()).tanh()
            return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)

        return loop(outer)(lambda f: f)

    return step


@family(
    input=keeps_its_input,
    detached=keeps_a_detached_one,
    replaced=replaces_what_it_keeps,
)
def a_list_that_is_passed_in_torchs_checkpoint(keep):
    kept = []

    def step(wrap):
        run = wrap(lambda x, kept: keep(kept, x))

        def outer(x):
            inner = lambda x: run(x.sin(), kept).tanh()
            return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)

        return loop(outer)(lambda f: f)

    return step


@program
def a_log_of_hooks_in_torchs_checkpoint():
    block, log = Block(), []
    block.a.register_forward_hook(lambda m, args, out: log.append(out.detach()))

    def step(wrap):
        run = wrap(block)

        def outer(x):
            inner = lambda x: run(x.view(4, 4).sin()).tanh()
            return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)

        return loop(outer)(lambda f: f)

    return step
