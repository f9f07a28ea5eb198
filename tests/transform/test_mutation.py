"""An input that changes in place is refused, by name, if a recomputation reads it."""

import pytest
import torch
from support.zoo import counted
from torch import nn
from torch.func import grad, vmap

from remat import MutationError, remat
from remat.testing import assert_same, count_ops


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


# --- Inside the function ---------------------------------------------------------

W, X, A = torch.ones(3), torch.randn(3), torch.randn(3, 1)


def changes_positional(x, a, *rest, tree, k):
    a.add_(1)
    return x.sin().sin()


def changes_rest(x, a, *rest, tree, k):
    rest[1].mul_(2)
    return x.sin().sin()


def changes_keyword(x, a, *rest, tree, k):
    k[0] = 7
    return x.sin().sin()


def changes_nested(x, a, *rest, tree, k):
    tree["head"][0]["bias"].zero_()
    return x.sin().sin()


def changes_a_view(x, a, *rest, tree, k):
    tree["head"][0]["bias"].view(-1)[1:].zero_()
    return x.sin().sin()


CHANGES = [
    (changes_positional, "a"),
    (changes_rest, r"rest\[1\]"),
    (changes_keyword, "k"),
    (changes_nested, r"tree\['head'\]\[0\]\['bias'\]"),
    (changes_a_view, r"tree\['head'\]\[0\]\['bias'\]"),
]


@pytest.mark.parametrize("needs_grad", [False, True], ids=["constant", "needs grad"])
@pytest.mark.parametrize(
    ("fn", "name"), CHANGES, ids=[fn.__name__ for fn, _ in CHANGES]
)
@pytest.mark.parametrize("higher_order", [False, True])
def test_changing_an_argument_inside_is_refused_by_name(
    fn, name, needs_grad, higher_order
):
    def tensor():
        # Computed: in plain torch, such a tensor may be changed in place.
        return torch.randn(3, 1, requires_grad=needs_grad) * 1

    tree = {"head": [{"bias": tensor()}]}
    args = (leaf(3, 1), tensor(), tensor(), tensor())
    wrapped = remat(fn, higher_order=higher_order)
    with pytest.raises(MutationError, match=f"`{name}` was changed in place inside"):
        wrapped(*args, tree=tree, k=tensor())


@pytest.mark.parametrize("fn", [fn for fn, _ in CHANGES])
def test_changing_a_vector_without_a_gradient_inside_works(fn):
    """Batch norm changes its statistics without a sign, so all such are copied."""

    def run(wrap):
        torch.manual_seed(1)
        a, *rest, k, bias = torch.randn(5, 3).unbind()
        x = leaf(3)
        with count_ops() as ops:
            y = wrap(fn)(x, a, *rest, tree={"head": [{"bias": bias}]}, k=k)
            y.sum().backward()
        return (y, x.grad, a, rest, k, bias), ops["sin"]

    expected, sines = run(lambda f: f)
    found, more = run(remat)
    assert (sines, more) == (2, 3)
    assert_same(found, expected)


def test_writing_to_an_argument_by_out_is_refused_by_name():
    def fn(x, a):
        return (torch.sin(x.detach(), out=a) * x).sin()

    with pytest.raises(MutationError, match="`a` was changed in place inside"):
        remat(fn)(leaf(3, 1), torch.randn(3, 1))


def test_the_error_names_the_function_where_it_was_decorated_and_what_to_do():
    def fn(x):
        return x.mul_(2).sin()

    message = (
        r"`x` was changed in place inside `.*fn` \(rematerialized at "
        r".*test_mutation.py:\d+\).*work on a copy \(`x.clone\(\)`\)"
    )
    with pytest.raises(MutationError, match=message):
        remat(fn)(leaf(3) * 1)


def test_changing_a_captured_tensor_that_needs_grad_is_refused():
    w = leaf(3) * 1

    def fn(x):
        w.add_(x.detach())
        return (x * w).sin()

    with pytest.raises(MutationError, match="`w` was changed in place inside"):
        remat(fn)(leaf(3))


def test_changing_an_argument_under_grad_is_refused():
    def fn(x, a):
        a.add_(1)
        return (x * a).sin().sum()

    with pytest.raises(MutationError, match="`a` was changed in place inside"):
        grad(remat(fn))(torch.randn(3), torch.randn(3))


def test_changing_an_argument_under_vmap_is_refused():
    def fn(x, a):
        a.add_(1)
        return (x * a).sin().sum()

    with pytest.raises(MutationError, match="`a` was changed in place inside"):
        vmap(grad(remat(fn)))(torch.randn(2, 3), torch.randn(2, 3))


def requires(x, a):
    a.requires_grad_()
    return (x * a).sin().sin().sum()


def test_requiring_grad_of_an_argument_inside_works():
    def run(wrap):
        x, a = X.clone().requires_grad_(), A.clone()
        with count_ops() as ops:
            wrap(requires)(x, a).backward()
        return (x.grad, a.grad), ops["sin"]

    expected, sines = run(lambda f: f)
    found, more = run(remat)
    assert (sines, more) == (2, 3)
    assert_same(found, expected)


def test_requiring_grad_of_an_argument_inside_is_refused_where_it_is_an_input_of_ours():
    with pytest.raises(MutationError, match="`a` was made to require grad inside"):
        remat(requires, higher_order=True)(leaf(3), torch.randn(3, 1))


def test_requiring_grad_inside_is_refused_under_grad_as_torch_does():
    with pytest.raises(RuntimeError, match=r"requires_grad_\(\)"):
        grad(requires)(X, A)
    with pytest.raises(RuntimeError, match=r"requires_grad_\(\) is called.*As without"):
        grad(remat(requires))(X, A)


def test_changing_temporaries_and_copies_inside_is_fine():
    def fn(x):
        y = x.clone()
        y[0] = 0
        z = x.sin()
        z.mul_(y).add_(1)
        return z

    x = leaf(3)
    want = torch.autograd.grad(fn(x).sum(), x)
    with count_ops() as ops:
        got = torch.autograd.grad(remat(fn)(x).sum(), x)
    assert_same(got, want)
    assert ops["sin"] == 2


# --- Between forward and backward ------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x):
        return self.inner(x + self.shift).sin().sin()


def positional():
    a = torch.randn(3)
    return remat(lambda x, a: (x * a).sin().sin())(leaf(3), a), a, "a"


def differentiated():
    x = leaf(3)
    return remat(lambda x: x.sin().sin())(x), x, "x"


def keyword():
    a = torch.randn(3)
    return remat(lambda x, *, k: (x * k).sin().sin())(leaf(3), k=a), a, "k"


def nested():
    a = torch.randn(3)
    fn = remat(lambda x, tree: (x * tree["p"][1]).sin().sin())
    return fn(leaf(3), {"p": (None, a)}), a, r"tree\['p'\]\[1\]"


def closure():
    w = torch.randn(3)
    return remat(lambda x: (x * w).sin().sin())(leaf(3)), w, "w"


def closure_that_needs_grad():
    w = leaf(3)
    return remat(lambda x: (x * w).sin().sin())(leaf(3)), w, "w"


def default():
    w = torch.randn(3)
    return (
        remat(lambda x, w=w: (x * w).sin().sin())(leaf(3)),
        w,
        r"<lambda>\.__defaults__\[0\]",
    )


def global_variable():
    return remat(lambda x: (x * W).sin().sin())(leaf(3)), W, "W"


def parameter():
    block = Block()
    return remat(block)(leaf(3)), block.inner.weight, r"inner\.weight"


def buffer():
    block = Block()
    return remat(block)(leaf(3)), block.shift, "shift"


def parameter_of_an_argument():
    block = Block()
    y = remat(lambda m, x: m(x))(block, leaf(3))
    return y, block.inner.weight, r"m\.inner\.weight"


def parameter_of_a_captured_module():
    block = Block()
    return remat(lambda x: block(x))(leaf(3)), block.inner.bias, r"block\.inner\.bias"


def view():
    base = torch.randn(2, 3)
    return remat(lambda x, a: (x * a).sin().sin())(leaf(3), base[1]), base, "a"


INPUTS = [
    positional, differentiated, keyword, nested, closure, closure_that_needs_grad,
    default, global_variable, parameter, buffer, parameter_of_an_argument,
    parameter_of_a_captured_module, view,
]  # fmt: skip


@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_changing_an_input_before_the_backward_is_refused_by_name(make):
    y, tensor, name = make()
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(MutationError, match=f"`{name}` was changed in place between"):
        y.sum().backward()


@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_the_same_backward_is_fine_if_nothing_changed(make):
    y, _, _ = make()
    with count_ops() as ops:
        y.sum().backward()
    assert ops["sin"] == 1, "the last one is not needed again"


def test_an_optimizer_step_between_two_backwards_is_refused():
    block = Block()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    y = remat(block)(torch.randn(2, 3)).sum()
    y.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(MutationError, match=r"`inner\.weight` was changed in place"):
        y.backward()


@pytest.mark.parametrize(
    ("higher_order", "error", "message"),
    [
        # The graph of the derivative is plain's, and so is the error.
        (False, RuntimeError, "modified by an inplace operation"),
        (True, MutationError, r"`args\[1\]` was changed in place between"),
    ],
)
def test_a_change_during_a_higher_derivative_is_refused(higher_order, error, message):
    x, a = leaf(3), torch.randn(3)
    fn, calls = counted(lambda x, a: (x * a).sin().sin())
    y = remat(fn, higher_order=higher_order)(x, a)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert len(calls) == 2
    a.add_(1)
    with pytest.raises(error, match=message):
        g.sum().backward()


def test_changing_an_input_between_vjp_and_its_pullback_is_refused():
    a = torch.randn(3)
    y, pull = torch.func.vjp(remat(lambda x: (x * a).sin()), torch.randn(3))
    a.add_(1)
    with pytest.raises(MutationError, match="`a` was changed in place between"):
        pull(torch.ones_like(y))


def test_changing_a_batched_input_between_forward_and_backward_is_refused():
    a, x = torch.randn(2, 3), leaf(2, 3)
    y = vmap(remat(lambda x, a: (x * a).sin()))(x, a)
    a.add_(1)
    with pytest.raises(MutationError, match="`a` was changed in place between"):
        y.sum().backward()


def test_changing_a_captured_tensor_that_is_not_used_is_fine():
    used, unused = torch.randn(3), torch.randn(3)
    flag = False

    def fn(x):
        return (x * (unused if flag else used)).sin().sin()

    x = leaf(3)
    want = torch.autograd.grad(fn(x).sum(), x)
    with count_ops() as ops:
        y = remat(fn)(x)
        unused.add_(1)
        got = torch.autograd.grad(y.sum(), x)
    assert_same(got, want)
    assert ops["sin"] == 2 + 1


def test_changing_a_buffer_that_is_not_used_is_fine():
    block = Block()
    block.register_buffer("steps", torch.zeros(()))
    with count_ops() as ops:
        y = remat(block)(torch.randn(2, 3))
        block.steps += 1
        y.sum().backward()
    assert ops["sin"] == 2 + 1
    assert block.inner.weight.grad.abs().min() > 0


def test_changing_an_input_after_the_backward_is_fine():
    y, tensor, _ = positional()
    with count_ops() as ops:
        y.sum().backward()
        tensor.add_(1)
    assert ops["sin"] == 1


def test_nothing_is_refused_where_nothing_is_differentiated():
    a = torch.randn(3)
    x = torch.randn(3)
    remat(lambda x: x.mul_(2))(x)
    with torch.no_grad():
        remat(lambda a: a.mul_(2))(a.requires_grad_())
    with pytest.raises(MutationError, match="`x` was changed in place inside"):
        remat(lambda x: x.mul_(2).sin())(a * 1)
