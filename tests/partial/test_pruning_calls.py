"""What a function may call that does more than operations: hooks, Functions, modes.

Each function is dangerous in its own way: it hides a value from the record, runs code
of the user's in the backward, or is another function in another mode.
"""

# ruff: noqa: F401 - the rows, which are text, use what is imported

import pytest
import torch
from support.pruning import (
    X,
    assert_like_plain,
    cases_of,
    dead_end,
    each_case,
    each_policy,
    each_policy_and_way,
    of_backward,
    written,
)
from torch import func, nn
from torch.autograd.graph import (
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from remat import remat


HIDDEN: dict = {}


# --- Functions of the user's ---


def differentiated(backward):
    """Calls an autograd Function of that backward, and of the forward that follows."""

    def of_forward(forward):
        rules = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        function = type("Custom", (torch.autograd.Function,), rules)
        return lambda x: dead_end(function.apply(x.sin() * 3).exp())

    return of_forward


BUFFER = torch.zeros(4, 4, dtype=torch.double)


class Functions:
    """Forwards that hide what the backward reads, and one that hides nothing."""

    @differentiated(lambda ctx, g: g * ctx.x.cos() * ctx.nested["y"][0])
    def attributes(ctx, x):
        ctx.x, ctx.nested = x.detach(), {"y": [x.detach() * 3]}
        return x * 2

    @differentiated(lambda ctx, g: g * HIDDEN.pop(ctx.key))
    def in_a_global(ctx, x):
        ctx.key = len(HIDDEN)
        HIDDEN[ctx.key] = x.detach().exp()
        return x * 2

    @differentiated(lambda ctx, g: g * ctx.saved_tensors[0].sin())
    def dirty(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @differentiated(lambda ctx, g: g * 3)
    def silent(ctx, x):
        BUFFER.copy_(x.detach())
        ctx.save_for_backward(x.detach().exp())
        return x * BUFFER.sum()

    def saved_tensors(x):
        y, z = Inputs.apply(x.sin(), x * 2)
        return dead_end(y * z)


class Inputs(torch.autograd.Function):
    """Saves inputs and outputs, of which it reads some."""

    @staticmethod
    def forward(ctx, x, w):
        y, z = x @ w, x.exp()
        ctx.save_for_backward(x, w, y, z)
        ctx.mark_non_differentiable(z)
        return y, z

    @staticmethod
    def backward(ctx, cotangent, _):
        x, w, y, _ = ctx.saved_tensors
        return (cotangent * y.cos()) @ w.t(), x.t() @ cotangent


@each_policy
@each_case(cases_of(vars(Functions), pruned=True))
def test_a_function_of_the_users_is_pruned(case, policy):
    case.check(policy)


# --- Hooks ---


HOOKS = """
reads another: h, other = x.sin(), x.exp() * 2
    h.register_hook(lambda g: g * other); dead_end(h * 3)
on a dead value: h = x * 2; y = h + 1; y.register_hook(lambda g: g * h); y * 3
in a row: a, b, c = x.sin() * 1, x.cos() * 2, x.exp() + 3
    a.register_hook(lambda g: g * b.detach())
    b.register_hook(lambda g: g + c.detach()); dead_end(a + b)
of several gradients: a, b, c = x.sin() * 1, x.cos() * 2, (x.exp() + 3).detach()
    register_multi_grad_hook([a, b], lambda grads: float((grads[0] * c).sum()))
    a.register_hook(lambda g: g * 2); dead_end(a * b)
before a node: h, other = x.sin() * 2, x.detach().exp() + 1
    h.grad_fn.register_prehook(lambda grads: (grads[0] * other,)); dead_end(h * 3)
of a node: h, other = x.sin() * 2, x.detach().exp() + 1
    h.grad_fn.register_hook(lambda grads, _: (grads[0] * other, *grads[1:]))
    dead_end(h * 3)
on the input: other = x.detach().exp() + 1
    x.register_hook(lambda g: g * other); dead_end(x * 3)
that draws: h, other = x.sin() * 1, x * 3
    h.register_hook(lambda g: g + torch.randn_like(g))
    (y := x * 1.0).register_hook(lambda g: g * other.detach()); h.exp() + y
retained: h = x.sin() * 2; h.retain_grad(); dead_end(h.exp())
"""


@each_policy
@each_case(written(HOOKS, globals()))
def test_a_hook_closes_over_values(case, policy):
    case.check(policy)


@each_policy
def test_a_known_hook_runs_once_in_each_backward(policy):
    seen = []

    def fn(x):
        h, other = x.sin(), x.exp() * 2
        h.register_hook(lambda g: seen.append(1))
        (h * 1).register_hook(lambda g: g * other)
        return dead_end(h * 3)

    ours = remat(fn, policy=policy, prune=True)
    for _ in range(4):
        of_backward(ours, (X,))
    seen.clear()
    of_backward(ours, (X,))
    assert len(seen) == 1


# --- Saved-tensor hooks inside ---


def selective():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def checkpointed(**options):
    def fn(x, w):
        layer = lambda h: torch.tanh(h @ w).exp()
        return dead_end(checkpoint(layer, x.sin(), use_reentrant=False, **options) * w)

    return fn


def packed(context):
    def fn(x, w):
        with context():
            h = torch.tanh(x.sin() @ w).exp()
        return dead_end(h * w)

    return fn


def as_numpy():
    return saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy)


def lossily():
    return saved_tensors_hooks(lambda t: t.detach().bfloat16(), lambda t: t.double())


SAVED = {
    "checkpoint_inside": checkpointed(),
    "packed_as_numpy": packed(as_numpy),
    "packed_lossily": packed(lossily),
}


# torch 2.14 warns that values of a selective checkpoint pass hooks by, ours too.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@each_policy
@each_case(cases_of(SAVED))
def test_saved_tensor_hooks_run_inside(case, policy):
    case.check(policy)


@each_policy
@pytest.mark.parametrize("around", ["save_on_cpu", "checkpoint"])
def test_saved_tensor_hooks_run_around(around, policy):
    def outside(f):
        def run(x):
            if around == "checkpoint":
                return checkpoint(f, x * 2, use_reentrant=False) * 2
            with save_on_cpu():
                return f(x * 2) * 2

        return run

    fn = lambda x: dead_end((x * 2).exp())
    ours = remat(fn, policy=policy, prune=True)
    for _ in range(4):
        assert_like_plain(outside(ours), outside(fn), X)


# --- Modes of grad, and derivatives inside ---


LINEAR = nn.Linear(4, 4, bias=False).double()


MODES = """
no_grad: with torch.no_grad(): mean, scale = (x @ w).tanh().mean(0), x.exp().std()
    dead_end((x - mean) * scale * w)
enable_grad in no_grad: with torch.no_grad():
        h = x.sin()
        with torch.enable_grad(): y = (w * 2).exp()
    dead_end(h * y)
func.grad: dead_end(func.grad(lambda x: (torch.tanh(x @ w) * x).sum())(x) * x)
vmap: dead_end(func.vmap(lambda row: torch.tanh(row @ w).exp())(x))
jvp: out, tangent = func.jvp(lambda v: (v @ w).tanh(), (x,), (w,))
    dead_end(out * tangent)
"""
DERIVATIVES = """
jacobians: f = lambda v: torch.tanh(v @ w)
    dead_end(func.jacrev(f)(x[0]) @ func.jacfwd(f)(x[1]))
hessian: dead_end(func.hessian(lambda v: (v @ w).sin().sum())(x[0]) * x)
functional_call: y = func.functional_call(LINEAR, {"weight": w}, (x.sin(),))
    dead_end(y.exp())
"""


@pytest.mark.one_in(2)
@each_policy_and_way
@each_case(written(MODES, globals(), pruned=True), written(DERIVATIVES, globals()))
def test_a_mode_or_a_derivative_inside(case, policy, way):
    case.check(policy, way)
