"""`remat.scope` changes no value, and has what its blocks computed run again, once."""

import contextlib
import functools

import pytest
import torch
from support.scopes import assert_scoped, grads, leaf, more_of, plainly, scoped
from support.tables import rows
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import remat
from remat import MutationError, RematError, policies
from remat.testing import assert_same, count_ops


A, B, C = leaf(3, 3), leaf(3, 3, seed=2), leaf(3, 3, seed=3)


def added(block, policy=None):
    """The example of the issue: x is made in a block, and used outside."""
    with block(policy):
        x = A + B
    return grads((x * C).sum(), A, B, C)


# --- The comparison itself ---


def test_the_comparison_fails_for_a_scope_that_does_nothing():
    with pytest.raises(AssertionError, match=r"Counter\(\)"):
        assert_scoped(added, scope=plainly, add=1)


def test_the_comparison_fails_for_another_value():
    def program(block):
        with block():
            x = A + B
        return [x * (1 if block is plainly else 2)]

    with pytest.raises(AssertionError, match="differs in value"):
        assert_scoped(program)


# --- Consumers ---


# What reads a value x, and how often it is computed again for that.
CONSUMERS = {
    "a product": (lambda x: grads((x * C).sum(), A, B, C), 1),
    "a sum, which needs no value": (lambda x: grads((x + C).sum(), A, B, C), 0),
    "a graph that is retained": (lambda x: twice((x * C).sum(), A, C), 2),
    "two losses": (lambda x: each_of((x * C).sum(), (x * x).sum()), 2),
    "a consumer after the backward": (
        lambda x: [*grads((x * C).sum(), A, C), *grads((x * C).sum(), A, C)],
        1,
    ),
    "torch's checkpoint": (
        lambda x: grads(
            checkpoint(lambda x, c: (x * c).sin(), x, C, use_reentrant=False).sum(),
            *(A, B, C),
        ),
        1,
    ),
}


def each_of(one, two):
    return [*grads(one, A, C), *grads(two, A, B)]


def twice(y, *inputs):
    return [*grads(y, *inputs, retain_graph=True), *grads(y, *inputs)]


@rows("consume, count", CONSUMERS)
def test_a_value_is_computed_again_for_what_reads_it(consume, count):
    def program(block):
        with block():
            x = A + B
        return consume(x)

    assert_scoped(program, **({"add": count} if count else {}))


# The sine itself, the product in it, and the sum in that.
@scoped(add=1, mul=1, sin=1)
def test_consumers_in_the_block_store_nothing_either(block):
    with block():
        x = A + B
        y = (x * C).sin() * x
    return grads(y.sum(), A, B, C)


@scoped(add=1, cos=1)
def test_only_what_is_needed_runs_again(block):
    with block():
        x = A + B
        unused = (A * B).exp()
        z = x.cos()
    assert unused.requires_grad
    return grads((z * C).sum(), C)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[1:].reshape(-1)[:3],
        lambda x: x.view(9)[::2],
        lambda x: x.diagonal(),
        lambda x: x.expand(2, 3, 3),
        lambda x: x.unfold(0, 2, 1),
        lambda x: x.detach(),
        lambda x: x.unbind(0)[1],
    ],
)
def test_views_of_a_value_are_not_stored(view):
    def program(block):
        with block():
            x = A + B
        v = view(x)
        c = torch.ones_like(v).requires_grad_()
        return grads((v * c).sum(), c)

    assert_scoped(program, add=1)


@scoped(add=1, complex=1)
def test_a_value_of_another_dtype_and_its_bits_are_not_stored(block):
    with block():
        x = A + B
        z = torch.complex(x, B)
    bits = torch.view_as_real(z)[..., 0]
    conj = (z.conj() * torch.complex(C, C)).real
    return grads((bits * C).sum() + conj.sum(), A, B, C)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("linear", lambda: nn.Linear(4, 5)),
        ("conv", lambda: nn.Conv1d(4, 5, 3)),
        ("bilinear", lambda: nn.Bilinear(4, 4, 5)),
        ("lstm", lambda: nn.LSTM(4, 5)),
    ],
)
def test_modules_compute_with_values_as_weights(kind, make):
    torch.manual_seed(0)
    module = make()
    x = leaf(2, 4, 6).mT if kind != "conv" else leaf(2, 4, 6)

    def program(block):
        with block():
            state = {k: v * 1.5 for k, v in module.named_parameters()}
        args = (x, x) if kind == "bilinear" else (x,)
        out = torch.func.functional_call(module, state, args)
        out = out[0] if isinstance(out, tuple) else out
        return grads(out.square().sum(), *module.parameters())

    weights = [n for n, _ in module.named_parameters()]
    used = {"linear": 1, "conv": 1, "bilinear": 1, "lstm": 2}[kind]
    assert used <= len(weights)
    if kind == "lstm":  # its kernel saves what it has packed besides
        more_of(program)
    else:
        assert_scoped(program, mul=used)


# --- In place ---


@scoped(mul=1, add=1, add_=1, mul_=1, copy_=1)
def test_changes_in_place_in_a_block_run_again(block):
    with block():
        x = A * 1.0
        first = x + C
        x.add_(B).mul_(2.0)
        x[0].copy_(x[1])
    return grads((x * C).sum() + (first * first).sum(), A, B, C)


@scoped(mul=1, sin=1, exp_=1)
def test_a_recompute_of_an_older_state_is_not_destroyed(block):
    with block():
        x = A * B
        with torch.no_grad():
            early = x.sin()
            x.exp_()
    return grads((early * C).sum() + (x.detach() * C).sum(), C)


@scoped()
def test_a_value_that_is_changed_after_the_block_is_stored(block):
    with block():
        x = A * B
    with torch.no_grad():
        before = x * 1.0
    y = before * C
    x.add_(1.0)
    return grads((x * C).sum() + y.sum(), A, B, C)


def test_a_change_after_the_block_leaves_handles_right():
    # Plain code refuses this: the product has saved what was changed.
    with remat.scope():
        x = A.detach() + B.detach()
    y = (x * C).sum()
    value = x.clone()
    x.mul_(3.0)
    assert_same(grads(y, C)[0], value)


@scoped(mul=1)
def test_an_operation_may_write_into_given_memory(block):
    out = torch.zeros(3, 3)
    total = torch.zeros(3, 3)
    with block():
        with torch.no_grad():
            torch.mul(A, B, out=out)
            total += out
        x = total * C
    return [*grads((x * C).sum(), C), out, total]


@pytest.mark.parametrize("saved", [False, True])
def test_batch_norm_in_a_block_updates_its_statistics_once(saved):
    policy = policies.save_ops(torch.ops.aten.native_batch_norm) if saved else None

    def program(block):
        norm = nn.BatchNorm1d(3)
        with block(policy):
            x = norm(A).sin()
        return [*grads((x * C).sum(), A, C), *norm.state_dict().values()]

    assert_scoped(program, sin=1, **({} if saved else {"native_batch_norm": 1}))


@scoped(sin=1)
def test_memory_that_python_writes_to_is_stored(block):
    with block():
        x = torch.zeros(3, 3)
        x.numpy()[1] = 5.0
        y = x.sin()
    return grads((x * C).sum() + (y * C).sum(), C)


def resized(b):
    return b.resize_(4, 3)


def resized_as(b):
    return b.resize_as_(torch.empty(4, 3))


@pytest.mark.parametrize("resize", [resized, resized_as])
def test_memory_that_grows_is_stored(resize):
    def program(block):
        x = leaf(4, 3)
        with block():
            y = x.sin()
            y = y.cos() * resize(torch.zeros(2)).copy_(y.detach())
        return grads(y.exp().sum(), x)

    assert_scoped(program, sin=1)


@scoped(add=1)
def test_blank_memory_that_something_unseen_may_fill_is_stored(block):
    with block():
        x = torch.empty(3, 3)
        with torch._C._DisableTorchDispatch():  # as a kernel of an extension
            x.fill_(2.0)
        y = x + 1.0
    return grads((x * C).sum() + (y * C).sum(), C)


@scoped(add=3, copy_=3)
def test_blank_memory_that_operations_fill_is_not_stored(block):
    with block():
        x = torch.empty(3, 3)
        for i in range(3):
            x[i] = B.detach()[i] + i
    return grads((x * C).sum(), C)


# --- What is changed ---


def test_a_source_that_was_changed_in_place_is_an_error():
    a = torch.ones(3, requires_grad=True) * 1.0
    with remat.scope():
        x = a.detach() * 2.0
    y = (x * leaf(3)).sum()
    with torch.no_grad():
        a.add_(1.0)
    with pytest.raises(
        MutationError, match=r"float32\[3\] .*mul.Tensor at .*test_scope.py"
    ):
        y.backward()


@scoped()
def test_a_source_that_nobody_reads_may_change(block):
    a = A * 1.0
    with block():
        x = a + B
    y = (x + C).sum()
    with torch.no_grad():
        a.add_(1.0)
    return grads(y, B, C)


def test_what_is_no_value_is_watched_as_in_plain_code():
    with remat.scope():
        x = A + B
    kept = C * 1.0
    y = (kept * kept).sum() + (x * C).sum()
    with torch.no_grad():
        kept.add_(1.0)
    with pytest.raises(MutationError, match="modified by an inplace operation"):
        y.backward()


# --- Backwards ---


@scoped(add=1, rand=1)
def test_batched_cotangents(block):
    with block():
        x = A + torch.rand(3, 3)
    eye = torch.eye(9).view(9, 3, 3)
    return grads(x * C, A, C, grad_outputs=eye, is_grads_batched=True)


def test_a_saved_tensor_can_be_read_outside_of_a_backward():
    with remat.scope():
        x = A + B
    y = x * C
    with count_ops() as ops:
        assert_same(y.grad_fn._saved_self.detach(), x.detach())
    assert ops["add"] == 1


def test_a_function_that_reads_what_it_saved_twice():
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return g * (ctx.saved_tensors[0] + ctx.saved_tensors[0])

    def program(block):
        with block():
            x = A + B
        return grads((Squared.apply(x) * C).sum(), A, B, C)

    # The two sums, and one more for the value that the product saves.
    assert more_of(program)["add"] == 2


@scoped(mul=2, sin=1)
def test_a_backward_inside_of_a_block(block):
    with block():
        x = A * B
        first = grads((x * C).sum(), A, C)
        y = x.sin()
    return [*first, *grads((y * C).sum(), C)]


def test_an_error_in_a_backward_leaves_nothing():
    def fail(_):
        raise ValueError("mine")

    with remat.scope():
        x = A + B
    y = (x * C).sin()
    y.register_hook(fail)
    with pytest.raises(ValueError, match="mine"):
        y.sum().backward()
    with count_ops() as ops:
        grads((x * C).sum(), C)
    assert ops["add"] == 1


# --- Surroundings ---


def test_autocast_casts_are_values():
    def program(block):
        with torch.autocast("cpu", torch.bfloat16):
            with block():
                x = A @ B
                cast = C.to(torch.bfloat16)
            y = x @ C + cast
        return grads(y.float().square().sum(), A, B, C)

    assert more_of(program)["mm"] == 1


@scoped(randn=1)
def test_settings_are_those_of_the_block(block):
    torch.set_default_dtype(torch.float64)
    try:
        with block():
            x = torch.randn(3, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    c = C.double().detach().requires_grad_()
    return grads((x * c).sum(), c)


@pytest.mark.parametrize("how", ["argument", "closure"])
def test_consumers_in_a_call_of_remat(how):
    def program(block):
        with block():
            x = A + B

        def consume(c, x=None, of=x):
            return ((of if x is None else x) * c).sin()

        args = (C, x) if how == "argument" else (C,)
        return grads(remat.remat(consume)(*args).sum(), A, B, C)

    assert more_of(program)["add"] == 1


def checkpointed(fn):
    return functools.partial(checkpoint, fn, use_reentrant=False)


@pytest.mark.parametrize("wrap", [remat.remat, checkpointed])
def test_a_block_in_a_call_does_nothing(wrap):
    def program(block):
        def fn(a, c):
            with block():
                x = a + B
            return (x * c).sin()

        return grads(wrap(fn)(A, C).sum(), A, B, C)

    assert_scoped(program)


def test_a_block_in_a_call_under_torch_func_does_nothing():
    def program(block):
        def fn(a, c):
            with block():
                x = a + B
            return (x * c).sin().sum()

        return torch.func.grad(remat.remat(fn))(A.detach(), C.detach())

    assert_scoped(lambda block: [program(block)])


def test_a_block_without_grad_does_nothing():
    with torch.no_grad(), remat.scope():
        x = A + B
    with count_ops() as ops:
        grads((x * C).sum(), C)
    assert ops["add"] == 0


def test_a_block_under_torch_func_is_an_error():
    def fn(a):
        with remat.scope():
            x = a + 1
        return (x * x).sum()

    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(RematError, match=r"test_scope.py.*call `remat\(fn\)`"):
            transform(fn)(A.detach())


def test_torch_func_in_a_block_and_while_values_are_alive():
    def program(block):
        with block():
            x = A + B
            inner = torch.func.grad(lambda c: (c * x).sin().sum())(C)
        outer = torch.func.grad(lambda c: (c * x).exp().sum())(C)
        return [*grads(((inner + outer) * C).sum(), A, B, C), inner, outer]

    assert more_of(program)["add"] > 0


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_block_that_is_compiled_does_nothing(fullgraph):
    def fn(a, c):
        with remat.scope():
            x = a + B
        return (x * c).sin()

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=fullgraph)
    assert_same(grads(compiled(A, C).sum(), A, C), grads(fn(A, C).sum(), A, C))


# --- Policies ---


def test_a_policy_says_what_is_stored():
    def program(block, policy=None):
        with block(policy):
            x = (A @ B).sin()
        return grads((x * C).sum(), A, B, C)

    assert_scoped(program, mm=1, sin=1)
    save_dots = policies.dots_saveable
    assert_scoped(lambda b: program(b, save_dots), sin=1)
    assert_scoped(lambda b: program(b, policies.everything_saveable))


# The product is what the sine saves.
@scoped(mul=1, exp=1)
def test_a_policy_finds_results_by_name(block):
    with block(policies.save_only_these_names("x")):
        x = remat.checkpoint_name((A * B).sin(), "x")
        y = x.exp()
    return grads((x * C).sum() + (y * C).sum(), A, B, C)


def test_a_policy_offloads(folder):
    def program(block):
        policy = policies.dots_saveable.but_offload(to="disk")
        with block(policy):
            x = (A @ B).sin()
        return grads((x * C).sum(), A, B, C)

    assert_scoped(program, sin=1)


@scoped(sin=1)
def test_the_policies_of_nested_blocks_are_joined(block):
    with block(policies.dots_saveable), block():
        x = (A @ B).sin()
    return grads((x * C).sum(), A, B, C)


def test_an_error_of_a_policy_is_raised_when_the_block_ends():
    with pytest.raises(ZeroDivisionError), remat.scope(lambda op: 1 // 0):  # noqa: PT012
        x = A + B
        assert x.requires_grad
    assert_scoped(added, add=1)


# --- Keys, streams, parametrizations, blocks ---


def test_random_numbers_are_drawn_again_and_streams_go_on():
    generator = torch.Generator()

    def program(block):
        generator.manual_seed(3)
        with block():
            noise = torch.randn(3, 3) + torch.rand(3, 3, generator=generator)
            mask = functional.dropout(A, 0.5)
        middle = torch.rand(2)
        out = grads((noise * C).sum() + (mask * C).sum(), A, C)
        return [*out, middle, torch.rand(2), torch.rand(2, generator=generator)]

    assert_scoped(program, randn=1, rand=1, add=1, mul=1, empty_like=1, bernoulli_=1,
                  div_=1)  # fmt: skip


@scoped(add=1, mul=1, sin=1, exp=1)
def test_blocks_nest_overlap_and_are_used_again(block):
    one, two = block(), block()
    one.__enter__()
    x = A + B
    two.__enter__()
    y = x * C
    one.__exit__(None, None, None)
    z = y.sin()
    two.__exit__(None, None, None)
    with one, two, one:
        w = z.exp()
    return grads((z * y).sum() + (w * x).sum(), A, B, C)


def test_a_block_that_raises_is_closed():
    with pytest.raises(ValueError, match="mine"), remat.scope():  # noqa: PT012
        x = A + B
        raise ValueError("mine")
    with count_ops() as ops:
        grads((x * C).sum(), C)
    assert ops["add"] == 1


@scoped(add=1, sin=1)
def test_other_modes_may_end_in_any_order(block):
    stack = contextlib.ExitStack()
    with block(), count_ops() as ops:
        x = A + B
        stack.enter_context(block())
    with stack:
        y = x.sin()
    return [*grads((x * y).sum(), A, B), torch.tensor(ops["add"])]
