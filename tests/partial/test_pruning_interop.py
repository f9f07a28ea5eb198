"""What else lives below a function: subclasses, operators of the user's, compiled code.

And tensors that are not strided numbers: sparse, complex, quantized, integers, of no
elements. And results of every shape: none, nested, views, inputs.
"""

import contextlib
from typing import ClassVar

import pytest
import torch
from support.pruning import POLICIES, W, X, assert_exact, dead_end, of_backward, traces
from support.zoo import leaves_of, scalar
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from remat import RecomputeError, policies, remat
from remat._partial import decide as _decide
from remat.testing import assert_same


@pytest.fixture(autouse=True)
def _dynamo_starts_anew():
    torch._dynamo.reset()


everything = policies.everything_saveable


# --- Subclasses ---


class Logged(Tensor):
    """Sees functions."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Logged.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Doubled(Tensor):
    """Multiplies twice as much as it is told: another function for the same calls."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2.0 if func is torch.Tensor.sin else out


class Wrapped(Tensor):
    """Holds its values in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride()
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrapped(t):
            return t.inner if isinstance(t, cls) else t

        out = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        wrap = lambda t: cls(t) if isinstance(t, Tensor) else t
        return tree_map(wrap, out)


def through_a_wrapper(x):
    h = Wrapped(x.detach().sin())
    return dead_end((x * (h * 2).exp().inner).exp())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("ignore:.* is not pruned")
def test_a_wrapper_subclass_inside(policy):
    assert_exact(through_a_wrapper, X, policy=POLICIES[policy], pruned=None)


@pytest.mark.parametrize("kind", [Logged, Doubled])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_subclass_that_sees_functions(policy, kind):
    def fn(x):
        h = (x * 2).as_subclass(kind)
        return dead_end((h.sin() * 3).as_subclass(Tensor).exp())

    assert_exact(fn, X, policy=POLICIES[policy], pruned=True)


@pytest.mark.parametrize(
    "kinds", [(Tensor, Doubled), (Doubled, Tensor)], ids=["after", "before"]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_inputs_that_are_of_a_subclass_in_some_calls(policy, kinds):
    fn = lambda x: dead_end((x * 2).sin().exp())
    ours = remat(fn, policy=POLICIES[policy], prune=True)
    for kind in kinds * 4:
        results = []
        for f in (fn, ours):
            x = X.clone().as_subclass(kind).requires_grad_()
            f(x).as_subclass(Tensor).square().sum().backward()
            results.append(x.grad.as_subclass(Tensor))
        assert_same(results[1], results[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("ignore:.* is not pruned")
def test_inputs_that_are_wrappers_in_some_calls(policy):
    fn = lambda x, w: dead_end((x * 2).sin()) * w.exp()
    ours = remat(fn, policy=POLICIES[policy], prune=True)
    for wrapped in [False, True, True, False, True]:
        results = []
        for f in (fn, ours):
            (w,) = leaves_of(W)
            x = Wrapped(X.clone()).requires_grad_() if wrapped else leaves_of(X)[0]
            out = f(x, w)
            grads = torch.autograd.grad(out, (x, w), torch.ones_like(out))
            results.append([g.inner if type(g) is Wrapped else g for g in grads])
        assert_same(results[1], results[0])


def test_classes_that_python_asks_for():
    def fn(x, w):
        factor = (
            1.0 if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) else 2.0
        )
        return x * 2 + (w * factor).sin().exp()

    assert_exact(fn, X, W, pruned=True)


def test_the_exact_type_of_what_is_left_out_is_another():
    """A limit: `type(x) is Tensor` is not true of what stands for a value."""

    def fn(x, w):
        factor = 1.0 if type(x) is Tensor else 2.0
        return (w * factor).sin() + x * 2

    ours = remat(fn, prune=True)
    x, w = leaves_of(X, W)
    try:
        got = torch.autograd.grad(scalar(ours(x, w)), (x, w))
    except RecomputeError:
        return
    assert [g.shape for g in got] == [X.shape, W.shape]


@pytest.mark.parametrize("policy", POLICIES)
def test_attributes_that_python_asks_for(policy):
    def fn(x, w):
        h = dead_end(w)
        factor = (
            float(isinstance(h, Tensor))
            + h.dim()
            + h.numel()
            + h.element_size()
            + h.stride(0)
            + h.storage_offset()
            + h.nbytes
            + float(h.is_contiguous())
            + float(h.requires_grad)
            + float(h.is_leaf)
            + float(h.grad_fn is not None)
            + float(h.dtype is torch.double)
            + float(h.device.type == "cpu")
            + float(h.layout is torch.strided)
            + float(h.is_floating_point())
            + float(h.is_conj() or h.is_neg() or h.is_inference() or h.is_sparse)
            + float(h.t().stride(0) * 10)
            + float(h[1:].storage_offset() * 10)
            + float(torch.is_tensor(h))
            + float(h.size(-1))
            + float(h._version)
            + float(h.is_pinned())
            + float(h.is_quantized)
            + float(h.is_meta)
            + float(h.itemsize)
            + float(h.mT.is_contiguous())
            + float(h._is_view())
            + float(h.t()._base is h)
            + float(h.output_nr)
        )
        return (x * factor * 1e-3).sin().exp() + h * 2

    assert_exact(fn, X, W, policy=POLICIES[policy], pruned=None)


# --- Operators of the user's ---


@torch.library.custom_op("pruning::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


cube.register_fake(torch.empty_like)


def _cube_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.output = output.detach()


def _cube_backward(ctx, cotangent):
    return cotangent * 3 * ctx.saved_tensors[0] ** 2 + ctx.output * 0


cube.register_autograd(_cube_backward, setup_context=_cube_setup)


@torch.library.custom_op("pruning::no_fake", mutates_args=())
def no_fake(x: Tensor, n: int) -> list[Tensor]:
    return [x * k for k in range(1, n + 1)]


@torch.library.custom_op("pruning::doubled_", mutates_args=("x",))
def doubled_(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("pruning::two_results", mutates_args=("into",))
def two_results(x: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    into.copy_(x * 3)
    return x + 1, x.sum()


@torch.library.custom_op("pruning::count_positive", mutates_args=())
def count_positive(x: Tensor) -> int:
    return int((x > 0).sum())


def differentiable_operator(x):
    return dead_end(cube(cube(x * 0.5)))


def operator_without_fake(x):
    parts = no_fake(x.detach(), 4)
    return dead_end((x * parts[2]).exp() + parts[0])


def operator_that_mutates(x):
    h = x.detach().sin()
    doubled_(h)
    dead = x.detach().cos()
    doubled_(dead)
    return dead_end((x * h).exp())


def operator_that_mutates_and_returns(x):
    into = torch.zeros(4, 4, dtype=x.dtype)
    a, b = two_results(x.detach(), into)
    return dead_end((x * into * b).exp() + a)


def operator_that_returns_a_number(x):
    return dead_end((x * count_positive(x.detach().sin())).exp())


OPERATORS = [
    *(differentiable_operator, operator_without_fake, operator_that_mutates),
    *(operator_that_mutates_and_returns, operator_that_returns_a_number),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fn", OPERATORS, ids=lambda fn: fn.__name__)
def test_operators_of_the_users(fn, policy):
    assert_exact(fn, X, policy=POLICIES[policy], pruned=True)


LOG: list = []


@torch.library.custom_op("pruning::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    LOG.append(float(x.sum()))
    return x * 2


def test_an_operator_of_the_users_with_a_side_effect():
    """It runs again, as all side effects do, or is left out: the numbers are right."""

    def fn(x):
        noted(x.detach())
        return dead_end((x * noted(x.detach().exp())).exp())

    assert_exact(fn, X, pruned=None)


# --- Compiled code ---


def compiled(backend):
    torch.manual_seed(0)
    return torch.compile(lambda h: dropout(h.sin()).exp() * 2, backend=backend)


@pytest.fixture
def told(monkeypatch):
    """A context in which a call says that it is not recorded."""
    monkeypatch.setattr(_decide, "_WARNED", set())
    return pytest.warns(UserWarning, match="not followed.* it calls compiled code")


def assert_equal(fn, policy, calls=4, told=None):
    """Without the mode that counts: compiled code runs as such only where none is."""
    ours = remat(fn, policy=POLICIES[policy], prune=True)
    if told is not None:
        with told:
            of_backward(ours, (X,))
    for call in range(calls):
        results = []
        for f in (fn, ours):
            torch.manual_seed(call)
            results.append(of_backward(f, (X,)))
        assert_same(results[1], results[0])


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("policy", ["nothing", "everything"])
def test_compiled_code_inside(policy, backend, hidden, told):
    inner = compiled(backend)
    holder = {"f": [inner]}

    def fn(x):
        dropout(x)
        f = holder["f"][0] if hidden else inner
        return dead_end(f(x * 2))

    assert_equal(fn, policy, told=told)
    assert not any(t.plans for t in traces())


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["nothing", "everything"])
def test_compiled_code_of_inductor_inside(policy, told):
    inner = compiled("inductor")

    def fn(x):
        dropout(x)
        return dead_end(inner(x * 2))

    assert_equal(fn, policy, calls=3, told=told)
    assert not any(t.plans for t in traces())


class HoldsCompiled:
    """Where a search for compiled code might not look."""

    act = staticmethod(torch.compile(lambda h: dropout(h.sin()), backend="eager"))

    def __call__(self, x):
        dropout(x)
        return dead_end(self.act(x * 2).exp())


def of_getattr(x):
    dropout(x)
    return dead_end(getattr(HoldsCompiled, "a" + "ct")(x * 2).exp())


def of_globals(x):
    dropout(x)
    return dead_end(globals()["Holds" + "Compiled"].act(x * 2).exp())


@pytest.mark.parametrize("policy", ["nothing", "everything"])
@pytest.mark.parametrize(
    "fn",
    [HoldsCompiled(), of_getattr, of_globals],
    ids=["object", "getattr", "globals"],
)
def test_compiled_code_in_hiding(fn, policy, told):
    found = isinstance(fn, HoldsCompiled)
    assert_equal(fn, policy, told=told if found else None)


def scripted_helper(h):
    return h.sin() * 2


@pytest.mark.parametrize("policy", ["nothing", "everything"])
def test_scripted_code_inside(policy, told):
    scripted = torch.jit.script(scripted_helper)
    with told:
        assert_exact(
            lambda x: dead_end(scripted(x).exp()),
            X,
            policy=POLICIES[policy],
            pruned=None,
            calls=8,
        )


# --- Modes of the user's ---


class Noisy(TorchDispatchMode):
    """Changes what an operation computes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 3 if func is torch.ops.aten.cos.default else out


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_dispatch_modes_of_the_users(policy, inside):
    def fn(x):
        with Noisy() if inside else contextlib.nullcontext():
            h = x.cos() * x
        return dead_end(h.exp())

    def transform(fn, args):
        with contextlib.nullcontext() if inside else Noisy():
            return of_backward(fn, args)

    assert_exact(
        fn, X, policy=POLICIES[policy], transform=transform, pruned=None, calls=6
    )


def test_sizes_that_nobody_knows():
    def fn(x):
        places = x.detach().relu().nonzero()
        return places.double().sum() * x.sin().sum().sin()

    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.randn(4, 4, requires_grad=True)
        for _ in range(3):
            remat(fn, prune=True)(x).backward()
            assert x.grad.shape == x.shape
