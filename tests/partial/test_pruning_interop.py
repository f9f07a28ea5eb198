"""What else lives below a function: subclasses, operators of the user's, compiled code.

And what Python asks tensors for without an operation, and dispatch modes of the user's.
"""

import contextlib
from operator import attrgetter
from typing import ClassVar

import pytest
import torch
from support.pruning import (
    W,
    X,
    assert_exact,
    dead_end,
    each_case,
    each_policy,
    nothing_is_recorded,
    nothing_or_everything,
    of_backward,
    written,
)
from support.zoo import leaves_of, ops_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import dropout
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat import remat
from remat.testing import assert_same


@pytest.fixture(autouse=True)
def _dynamo_starts_anew():
    torch._dynamo.reset()


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


# A wrapper does not tell what shares its memory, which is said.
wraps = pytest.mark.filterwarnings("ignore:.* is not pruned")


@each_policy
@wraps
def test_a_wrapper_subclass_is_inside(policy):
    def fn(x):
        h = TwoTensor(x.detach().sin(), x.detach().cos())
        return dead_end((x * (h * 2).exp().a).exp())

    assert_exact(fn, X, policy=policy)


@pytest.mark.parametrize("kind", [Logged, Doubled])
@each_policy
def test_a_subclass_sees_functions(policy, kind):
    def fn(x):
        h = (x * 2).as_subclass(kind)
        return dead_end((h.sin() * 3).as_subclass(Tensor).exp())

    assert_exact(fn, X, policy=policy, pruned=True)


@each_policy
@wraps
def test_inputs_are_wrappers_in_some_calls(policy):
    fn = lambda x, w: dead_end((x * 2).sin()) * w.exp()
    ours = remat(fn, policy=policy, prune=True)

    def gradients(fn, wrapped):
        (w,) = leaves_of(W)
        x = TwoTensor(X.clone(), X.clone()) if wrapped else X.clone()
        out = fn(x.requires_grad_(), w)
        grads = torch.autograd.grad(out, (x, w), torch.ones_like(out))
        return [g.a if type(g) is TwoTensor else g for g in grads]

    for wrapped in [False, True, True, False, True]:
        assert_same(gradients(ours, wrapped), gradients(fn, wrapped))


ATTRIBUTES = [
    *(Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.storage_offset),
    *(Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_pinned),
    *(Tensor._is_view, torch.is_tensor),
    *map(
        attrgetter, ["nbytes", "itemsize", "requires_grad", "is_leaf", "is_quantized"]
    ),
    *map(attrgetter, ["is_meta", "_version", "output_nr"]),
    lambda h: isinstance(h, Tensor),
    lambda h: h.stride(0),
    lambda h: h.size(-1),
    lambda h: h.grad_fn is not None,
    lambda h: h.dtype is torch.double,
    lambda h: h.device.type == "cpu",
    lambda h: h.layout is torch.strided,
    lambda h: h.is_conj() or h.is_neg() or h.is_inference() or h.is_sparse,
    lambda h: h.t().stride(0) * 10,
    lambda h: h[1:].storage_offset() * 10,
    lambda h: h.mT.is_contiguous(),
    lambda h: h.t()._base is h,
]


@each_policy
def test_python_asks_for_attributes(policy):
    def fn(x, w):
        h = dead_end(w)
        factor = sum(float(ask(h)) for ask in ATTRIBUTES)
        return (x * factor * 1e-3).sin().exp() + h * 2

    assert_exact(fn, X, W, policy=policy)


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


OPERATORS = """
differentiable: dead_end(cube(cube(x * 0.5)))
without a fake: parts = no_fake(x.detach(), 4)
    dead_end((x * parts[2]).exp() + parts[0])
mutates: h = x.detach().sin(); doubled_(h); dead = x.detach().cos(); doubled_(dead)
    dead_end((x * h).exp())
mutates and returns: into = torch.zeros(4, 4, dtype=x.dtype)
    a, b = two_results(x.detach(), into); dead_end((x * into * b).exp() + a)
returns a number: dead_end((x * count_positive(x.detach().sin())).exp())
"""


@each_policy
@each_case(written(OPERATORS, globals(), pruned=True))
def test_an_operator_of_the_users(case, policy):
    case.check(policy)


# --- What is found after the forward, or of an input ---


@nothing_or_everything
def test_a_backward_inside_is_repeated(policy):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()

    def fn(x):
        inner = x.detach().requires_grad_()
        layer(inner).sin().sum().backward()
        return x.sin() * inner.grad

    ours, found = remat(fn, policy=policy, prune=True), []
    for f in fn, ours:
        layer.zero_grad()
        told = pytest.warns(
            UserWarning, match="not followed.* changes gradients inside"
        )
        with contextlib.nullcontext() if f is fn else told:
            grads = [of_backward(f, (X,)) for _ in range(3)]
        found.append((grads, layer.weight.grad.clone()))
    assert_same(*found)
    assert layer.weight.grad.any()
    (x,) = leaves_of(X)
    out = ours(x).sum()
    assert ops_of(out.backward)["addmm"] == 1
    assert nothing_is_recorded()


@nothing_or_everything
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_recomputed(policy, layout):
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    x = torch.nested.nested_tensor(
        [torch.ones(2, 8), torch.ones(3, 8)], layout=layout, requires_grad=True
    )
    fn = lambda x: torch.relu(layer(x)) * 2
    found, ours = [], remat(fn, policy=policy, prune=True)
    for f in fn, ours:
        layer.zero_grad()
        x.grad = None  # which torch cannot add to
        told = pytest.warns(UserWarning, match="not followed.* is a nested tensor")
        with contextlib.nullcontext() if f is fn else told:
            f(x).to_padded_tensor(0.0).square().sum().backward()
        found.append(layer.weight.grad)
    assert_same(*found)
    assert layer.weight.grad.any()
    x.grad, out = None, ours(x).to_padded_tensor(0.0).square().sum()
    assert ops_of(out.backward)["linear"] == 1
    assert nothing_is_recorded()


# --- Compiled code ---


def compiled(backend):
    torch.manual_seed(0)
    return torch.compile(lambda h: dropout(h.sin()).exp() * 2, backend=backend)


@pytest.fixture
def told():
    """A context in which a call says that it is not recorded."""
    return pytest.warns(UserWarning, match="not followed.* it calls compiled code")


def assert_equal(fn, policy, told=None):
    """Without the mode that counts: compiled code runs as such only where none is."""
    ours = remat(fn, policy=policy, prune=True)
    if told is not None:
        with told:
            of_backward(ours, (X,))
    for call in range(4):
        results = []
        for f in (fn, ours):
            torch.manual_seed(call)
            results.append(of_backward(f, (X,)))
        assert_same(results[1], results[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize(
    ("backend", "hidden"),
    [
        *(("eager", True), ("aot_eager", False)),
        pytest.param("inductor", False, marks=pytest.mark.slow),
    ],
)
@nothing_or_everything
def test_compiled_code_is_inside(policy, backend, hidden, told):
    inner = compiled(backend)
    holder = {"f": [inner]}

    def fn(x):
        dropout(x)
        f = holder["f"][0] if hidden else inner
        return dead_end(f(x * 2))

    assert_equal(fn, policy, told=told)
    assert nothing_is_recorded()


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


@nothing_or_everything
@pytest.mark.parametrize(
    "fn",
    [HoldsCompiled(), of_getattr, of_globals],
    ids=["object", "getattr", "globals"],
)
def test_compiled_code_is_hidden(fn, policy, told):
    found = fn is not of_globals
    assert_equal(fn, policy, told=told if found else None)


def scripted_helper(h):
    return h.sin() * 2


@nothing_or_everything
def test_scripted_code_is_inside(policy, told):
    scripted = torch.jit.script(scripted_helper)
    with told:
        assert_exact(lambda x: dead_end(scripted(x).exp()), X, policy=policy, calls=8)


# --- Modes of the user's ---


class Noisy(TorchDispatchMode):
    """Changes what an operation computes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 3 if func is torch.ops.aten.cos.default else out


@pytest.mark.parametrize("inside", [True, False])
@each_policy
def test_a_dispatch_mode_of_the_users_is_on(policy, inside):
    def fn(x):
        with Noisy() if inside else contextlib.nullcontext():
            h = x.cos() * x
        return dead_end(h.exp())

    def way(fn, args):
        with contextlib.nullcontext() if inside else Noisy():
            return of_backward(fn, args)

    assert_exact(fn, X, policy=policy, way=way, calls=6)


def test_a_size_is_unknown():
    def fn(x):
        places = x.detach().relu().nonzero()
        return places.double().sum() * x.sin().sum().sin()

    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.randn(4, 4, requires_grad=True)
        for _ in range(3):
            remat(fn, prune=True)(x).backward()
            assert x.grad.shape == x.shape
