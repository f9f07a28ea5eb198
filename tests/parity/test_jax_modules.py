"""What the tests of JAX, Equinox, flax and haiku say of layers, effects and rules.

Numbers are items of the survey of JAX's tests: see `test_jax_transforms.py`. Values
that leave a call (23) and prints (debugging_primitives) are in `whole/test_docs_*.py`.
"""

import dataclasses
import functools
from queue import SimpleQueue

import pytest
import torch
from support.compared import compared, points
from support.rules import TripledSinForFunc
from support.zoo import Evaluations, counted, plainly
from torch import nn
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.func import functional_call, grad, jacrev, jvp, vmap

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Both(First):
    def forward(self, x):
        return self.inner(x, x)


class Self(First):
    def forward(self, x):
        return self.inner(x, x, x)[0]


class Fused(First):
    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Indexed(First):
    def forward(self, x):
        return self.inner(torch.tensor([[1, 2, 3, 1], [4, 0, 1, 1]])) * x[..., None]


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


def linear_then(layer):
    return nn.Sequential(nn.Linear(4, 4), layer)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


LAYERS = {
    "Linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "Bilinear": (lambda: Both(nn.Bilinear(4, 4, 3)), (2, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 3, 2), (2, 4, 5)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 2), (2, 2, 4, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 2, 4, 4)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (2, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (2, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 5)),
    "PReLU": (nn.PReLU, (2, 4)),
    "GELU MLP": (mlp, (2, 4)),
    "Dropout": (lambda: linear_then(nn.Dropout(0.5)), (8, 4)),
    "Dropout in place": (lambda: linear_then(nn.Dropout(0.5, True)), (8, 4)),
    "AlphaDropout": (lambda: linear_then(nn.AlphaDropout(0.5)), (8, 4)),
    "Dropout2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout2d(0.5)),
        (2, 2, 6, 6),
    ),
    "GRU": (lambda: First(nn.GRU(4, 3, num_layers=2)), (5, 2, 4)),
    "LSTM": (lambda: First(nn.LSTM(4, 3, 2, dropout=0.5)), (5, 2, 4)),
    "GRUCell": (lambda: nn.GRUCell(4, 3), (2, 4)),
    "MultiheadAttention": (
        lambda: Self(nn.MultiheadAttention(4, 2, batch_first=True)),
        (2, 3, 4),
    ),
    "MultiheadAttention, fused": (
        lambda: Fused(nn.MultiheadAttention(4, 2, batch_first=True)),
        (2, 3, 4),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True),
        (2, 3, 4),
    ),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        (2, 4),
    ),
    "orthogonal": (
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        (2, 4),
    ),
    "Embedding": (lambda: Indexed(nn.Embedding(5, 4)), (2, 4)),
}


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=list(LAYERS))
def test_every_kind_of_layer(make, shape):
    """haiku, flax: all library modules, values, gradients, buffers and names."""
    torch.manual_seed(1)
    # The sine saves the result of the layer, which is therefore recomputed whole.
    module = nn.Sequential(make(), Sine()).train()
    calls = Evaluations()
    module[0].register_forward_hook(lambda *_: calls.note(None))
    x = torch.randn(shape).requires_grad_()
    state = {k: v.clone() for k, v in module.state_dict().items()}
    results = []
    for fn in (remat(module), module):
        module.load_state_dict(state)
        torch.manual_seed(2)
        out = fn(x)
        leaves = {"x": x, **dict(module.named_parameters())}
        grads = torch.autograd.grad((out * out.cos()).sum(), list(leaves.values()))
        buffers = {k: v.clone() for k, v in module.named_buffers()}
        named = dict(zip(leaves, grads, strict=True))
        results.append((out.detach(), named, buffers, torch.get_rng_state()))
    assert len(calls) == 2 + 1
    assert_same(results[0], results[1])


def test_parameters_of_a_deep_stack_by_functional_call():
    """equinox's MLP, flax's remat_scan: a stack called with other parameters."""
    blocks = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12))
    )
    params = {k: v.detach() * 1.5 for k, v in blocks.named_parameters()}

    class Stack(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.blocks, self.wrap = blocks, wrap

        def forward(self, x):
            for block in self.blocks:
                x = self.wrap(block)(x)
            return x.square().sum()

    def grads(wrap):
        def loss(params):
            named = {f"blocks.{k}": v for k, v in params.items()}
            return functional_call(Stack(wrap), named, (points(2, 4),))

        return grad(loss)(params)

    with count_ops() as ops:
        got = grads(remat)
    assert ops["tanh"] == 24
    assert_same(got, grads(plainly))


class Block(nn.Module):
    def __init__(self, tanh):
        super().__init__()
        self.linear, self.tanh = nn.Linear(3, 3), tanh

    @remat
    def decorated(self, x, *, train):
        assert train is True
        return self.tanh(self.linear(x))


def test_a_decorated_method_and_its_static_flag():
    """flax: methods, and a flag that arrives as a Python bool."""
    tanh, calls = counted(torch.tanh)
    block = Block(tanh)
    out = block.decorated(points(2, 3), train=True)
    got = torch.autograd.grad(out.sum(), block.linear.weight)
    assert len(calls) == 2
    want = block.linear(points(2, 3)).tanh().sum()
    assert_same(got, torch.autograd.grad(want, block.linear.weight))


@dataclasses.dataclass(frozen=True)
class State:
    x: torch.Tensor
    name: str
    hidden: dict


@compared(evaluations=6, plain=3)
def test_a_carry_may_be_any_pytree(wrap, counting):
    """equinox: filtered transforms, where what is no array is static."""
    body = counting(lambda x, h: (x * h).sin())

    @wrap
    def step(state):
        hidden = {"h": state.hidden["h"] + 1, "n": None}
        x = body(state.x, state.hidden["h"])
        return dataclasses.replace(state, x=x, hidden=hidden)

    def loss(x):
        state = State(x, "run", {"h": points(3), "n": None})
        for _ in range(3):
            state = step(state)
        assert state.name == "run"
        return state.x.sum()

    return grad(loss)(points(3))


# --- State, effects, errors and forwarded values ---


def test_a_check_at_run_time_is_still_reported():
    """checkify: `torch._assert` inside, in the forward and in the recompute."""
    limits = SimpleQueue()
    for limit in (0.0, 10.0, 0.0):
        limits.put(limit)
    next_limit = limits.get

    def f(x):
        torch._assert(bool((x < next_limit()).all()), "x is too large")
        return x.sin().exp().sum()

    with pytest.raises(AssertionError, match="x is too large"):
        remat(f)(points(3).requires_grad_())
    out = remat(f)(points(3).requires_grad_())
    with pytest.raises(AssertionError, match="x is too large") as info:
        out.backward()
    assert "raised while recomputing" in "".join(info.value.__notes__)


def test_gradients_accumulate_into_a_users_buffer():
    """80: by a hook of the user's, over several calls."""
    buffer = torch.zeros(3)
    body, calls = counted(lambda x: x.sin().exp().sum())
    x = points(3).requires_grad_()
    x.register_hook(lambda g: buffer.add_(g))
    for _ in range(3):
        remat(body)(x).backward()
    assert len(calls) == 6
    assert_same(buffer, sum(grad(body)(points(3)) for _ in range(3)))


# --- Effects ---


def test_effects_in_triple_nesting_run_four_times(capsys):
    """mutable_array: nesting is not free for effects: each level runs the next."""

    def f(x):
        print("here")  # noqa: T201
        return x.sin().sum()

    assert_same(grad(remat(remat(remat(f))))(points(3)), points(3).cos())
    assert capsys.readouterr().out.split() == ["here"] * 4


class Counter(nn.Module):
    def __init__(self, sine):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.weight = nn.Parameter(points(3))
        self.sine = sine

    def forward(self, x):
        self.count += 1
        return self.sine(x * self.weight) * self.count


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_state_is_updated_once_however_deep(depth):
    """mutable_array, flax BatchStat, haiku: a counter is 1 after a remat call."""
    sine, calls = counted(torch.sin)
    module = Counter(sine)
    fn = module
    for _ in range(depth):
        fn = remat(fn)
    fn(points(3)).sum().backward()
    # Two evaluations at any depth: only the innermost call has anything to recompute.
    assert (module.count, len(calls)) == (1, 2)
    assert_same(module.weight.grad, points(3) * (points(3) * points(3)).cos())


# --- Forwarded values, and cotangents that do not exist ---


def test_a_residual_that_is_also_an_output_is_kept_once_without_a_policy():
    """Remat3Test: exp's result is its own residual; the output is all there is."""
    x = points(1000).requires_grad_()

    def f(x):
        y = x.sin().exp()
        return y, y.exp()

    assert live_bytes(lambda: remat(f)(x)) == 2 * x.nbytes
    assert live_bytes(lambda: f(x)) == 2 * x.nbytes  # sin keeps x, exp its result
    with count_ops() as ops:
        got = torch.autograd.grad(sum(remat(f)(x)).sum(), x)
    assert ops["exp"] == 4
    assert_same(got, torch.autograd.grad(sum(f(x)).sum(), x))


def test_inputs_forwarded_to_outputs_are_the_inputs():
    """Remat3Test, scan's forwarded residuals: the same object, never a copy."""
    x, n = points(3).requires_grad_(), points(3)
    with count_ops() as ops:
        a, b, c = remat(lambda x, n: (x, x.sin().sin(), n))(x, n)
        assert a is x
        assert c is n
        (got,) = torch.autograd.grad((a * b).sum(), x)
    assert ops["sin"] == 2 + 1
    assert_same(got, torch.autograd.grad((x * x.sin().sin()).sum(), x)[0])


def test_what_is_saved_for_the_backward_is_the_input_itself():
    """lax_control_flow: the residual for `xs` is forwarded, not copied."""
    x = points(3).requires_grad_()
    second = remat(lambda x: x.sin().sin())(x).grad_fn
    (first, _), *_ = second.next_functions
    with count_ops() as ops:
        assert first._saved_self.data_ptr() == x.data_ptr()
    assert ops["sin"] == 0
    with count_ops() as ops:
        saved = second._saved_self
    assert ops["sin"] == 1
    assert_same(saved.detach(), x.detach().sin())


@pytest.mark.parametrize("seed", range(6))
def test_random_permutations_of_forwarded_and_computed_leaves(seed):
    """api_test: inputs and outputs in any order, some passed through."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(6, generator=generator).tolist()
    sine, calls = counted(torch.sin)

    def f(*xs):
        made = [sine(xs[0] * xs[1]), xs[2].exp() * xs[0], xs[1].cos()]
        pool = [*xs, *made]
        return [pool[i] for i in order]

    leaves = [(points(3).double() + k).requires_grad_() for k in range(3)]

    def loss(g, *xs):
        return sum((k + 1) * o.sin().sum() for k, o in enumerate(g(*xs)))

    got = torch.autograd.grad(loss(remat(f), *leaves), leaves)
    assert len(calls) == 2
    assert_same(got, torch.autograd.grad(loss(f, *leaves), leaves))
    assert gradcheck(functools.partial(loss, remat(f)), leaves)


@compared(evaluations=6, plain=3)
def test_zero_size_buffers_and_integer_carries(wrap, counting):
    """equinox: zero-size arrays and values without a derivative in the carry."""
    body = counting(lambda x: x.sin().exp())

    @wrap
    def step(carry):
        x, empty, n = carry["x"], carry["empty"], carry["n"]
        return {"x": body(x), "empty": empty * 2.0, "n": n + 1}

    x, empty = points(3).requires_grad_(), torch.zeros(0, requires_grad=True)
    out = {"x": x, "empty": empty, "n": torch.tensor(0)}
    for _ in range(3):
        out = step(out)
    assert (out["n"], out["n"].requires_grad, out["empty"].shape) == (3, False, (0,))
    return torch.autograd.grad(out["x"].sum() + out["empty"].sum(), (x, empty))


def test_an_output_without_tangent_stays_so():
    """api_test: `stop_gradient(x) * 2` returned from remat is not differentiated."""
    x = points(3).requires_grad_()
    a, b = remat(lambda x: (x.detach() * 2, x.sin().sin()))(x)
    assert (a.requires_grad, b.requires_grad) == (False, True)
    with count_ops() as ops:
        b.sum().backward()
    assert ops["sin"] == 1
    assert_same(x.grad, x.detach().sin().cos() * x.detach().cos())


def test_a_backward_of_nothing_costs_nothing():
    """equinox: with no cotangent for the call the body is not evaluated again."""
    body, calls = counted(lambda x: x.sin().exp().sum())
    x = points(3).requires_grad_()
    out = remat(body)(x)
    (got,) = torch.autograd.grad(x.cos().sum() + 0 * out.detach(), x)
    assert len(calls) == 1
    assert_same(got, -x.detach().sin())
    (out + x.cos().sum()).backward()
    assert len(calls) == 2


# --- Custom derivatives ---


sine = TripledSinForFunc.apply
CUSTOM = {
    "grad(remat)": (lambda wrap: grad(wrap(sine)), 3.0, torch.cos),
    "grad(grad(remat))": (lambda wrap: grad(grad(wrap(sine))), -3.0, torch.sin),
    "grad(remat(grad))": (lambda wrap: grad(wrap(grad(sine))), -3.0, torch.sin),
    "grad(grad(grad(remat)))": (
        lambda wrap: grad(grad(grad(wrap(sine)))),
        -3.0,
        torch.cos,
    ),
    "vmap(grad(remat))": (
        lambda wrap: lambda x: vmap(grad(wrap(sine)))(x[None])[0],
        3.0,
        torch.cos,
    ),
    "jacrev(remat)": (lambda wrap: jacrev(wrap(sine)), 3.0, torch.cos),
    "jvp(grad(remat))": (
        lambda wrap: lambda x: jvp(grad(wrap(sine)), (x,), (torch.ones_like(x),))[1],
        -3.0,
        torch.sin,
    ),
}


def assert_more_sines(derivative, *, reassociated=False):
    """The same with remat as without, and sines run again."""
    with count_ops() as plain_ops:
        want = derivative(plainly)
    with count_ops() as ops:
        got = derivative(remat)
    assert ops["sin"] > plain_ops["sin"]
    assert_same(got, want, reassociated=reassociated)
    return got


@pytest.mark.parametrize(
    ("derivative", "factor", "true"), CUSTOM.values(), ids=list(CUSTOM)
)
def test_custom_derivatives_are_used_though_they_are_wrong(derivative, factor, true):
    """custom_api_test: the rule is what counts, to every order."""
    x = points()
    got = assert_more_sines(lambda wrap: derivative(wrap)(x))
    assert_same(got, factor * true(x))


def test_a_custom_derivative_by_forward_mode():
    """58, 64: inside a loop, under remat, differentiated again."""

    def f(x):
        for _ in range(3):
            x = sine(x) * 2.0
        return x.sum()

    def directional(wrap):
        return grad(lambda x: jvp(wrap(f), (x,), (points(3),))[1])(points(3))

    # x is used in value and tangent (promise 1).
    assert_more_sines(directional, reassociated=True)


class ScaledByDict(Function):
    """Takes its tensors in a dict, and a flag that has no derivative."""

    @staticmethod
    def forward(x, scale, negative):
        return x * scale * (-1 if negative else 1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, scale, ctx.negative = inputs
        ctx.save_for_backward(x, scale)

    @staticmethod
    def backward(ctx, cotangent):
        x, scale = ctx.saved_tensors
        return 7 * cotangent * scale.exp(), cotangent * x.exp(), None


@compared(evaluations=2)
def test_a_custom_rule_with_a_dict_and_a_flag(wrap, counting):
    """custom_api_test: dictionaries and arguments that are not differentiated."""
    body = counting(lambda d, flag: ScaledByDict.apply(d["x"], d["s"], flag).sin())
    loss = wrap(lambda *args: body(*args).sum())
    return grad(loss)({"x": points(3), "s": points(3) + 1}, True)


class TwoOutputs(Function):
    """Its backward is told which cotangent is missing."""

    missing: list[tuple[bool, bool]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.exp()

    @staticmethod
    def backward(ctx, of_sin, of_exp):
        TwoOutputs.missing.append((of_sin is None, of_exp is None))
        (x,) = ctx.saved_tensors
        return of_sin * x.cos()


def test_a_custom_rule_sees_which_cotangents_do_not_exist():
    """custom_api_test: symbolic zeros."""
    TwoOutputs.missing.clear()
    x = points(3).requires_grad_()
    with count_ops() as ops:
        remat(lambda x: TwoOutputs.apply(x.sin()))(x)[0].sum().backward()
    assert TwoOutputs.missing == [(False, True)]
    assert ops["sin"] == 2 + 2
    assert_same(x.grad, x.detach().sin().cos() * x.detach().cos())


class ImplicitSolve(Function):
    """Solve A y = b; the derivative is another solve (custom_linear_solve)."""

    @staticmethod
    def forward(a, b):
        return torch.linalg.solve(a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, cotangent):
        a, y = ctx.saved_tensors
        of_b = ImplicitSolve.apply(a.mT, cotangent)
        return -of_b @ y.mT, of_b


def test_an_implicit_derivative():
    """custom_linear_solve: first and second order."""
    a = (points(3, 3).sin() + 2 * torch.eye(3)).double()
    b = points(3, 1).double()

    def f(a, b):
        return ImplicitSolve.apply(a * 1.0, b.sin()).square().sum()

    with count_ops() as ops:
        got = grad(remat(f), argnums=(0, 1))(a, b)
    assert ops["sin"] == 2
    assert_same(got, grad(f, argnums=(0, 1))(a, b))
    leaves = a.requires_grad_(), b.requires_grad_()
    assert gradcheck(remat(f), leaves)
    assert gradgradcheck(remat(f), leaves)
