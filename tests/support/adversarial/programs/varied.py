"""Varied ways to hold, to ask for and to change what a recompute reads."""

import torch
from support.adversarial.program import (
    family,
    loop,
    program,
    reversed_loop,
    trained,
    work,
)
from torch import nn


# --- Hooks ---


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x, *, k=1.0):
        return work(self.b(self.a(x).tanh()) * k)


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
    prepended=prepended,
    removes_itself=removes_itself,
    sets_another=sets_another,
    of_a_parameter=of_a_parameter,
    after_accumulation=after_accumulation,
    of_an_inner_result=of_an_inner_result,
)
def a_hook_that_counts(register):
    block, counts = Block(), {"n": 0}
    register(block, counts)
    return trained(block, state=lambda: counts)


# --- Settings, and what torch keeps for itself ---


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
def a_node_with_a_prehook():
    scales = [1.0]

    def fn(x):
        y = work(x)
        y.grad_fn.register_prehook(lambda grads: (grads[0] * scales[0],))
        return y.tanh()

    def change():
        scales[0] += 1

    return loop(fn, between=change)


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


@family(doubled=lambda: of_a_module(Doubled), slots=lambda: of_a_slotted_object(Other))
def another_class_by_the_function(make):
    value, fn, other = make()
    first = type(value)

    def changing(x):
        out = fn(x)
        value.__class__ = first if type(value) is other else other
        return out.tanh()

    return loop(changing, state=lambda: type(value).__name__)


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
def a_list_that_grows_in_a_call_in_torchs_checkpoint(wrap, keep):
    """Torch's checkpoint runs the call again, with more in the list."""
    kept = []

    run = wrap(lambda x: keep(kept, x))

    def outer(x):
        inner = lambda x: run(x.sin()).tanh()
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)

    return loop(outer)(lambda f: f)


@program
def a_log_of_hooks_in_torchs_checkpoint(wrap):
    block, log = Block(), []
    block.a.register_forward_hook(lambda m, args, out: log.append(out.detach()))

    run = wrap(block)

    def outer(x):
        inner = lambda x: run(x.view(4, 4).sin()).tanh()
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)

    return loop(outer)(lambda f: f)
