"""Tensors: in place, views, what shares memory, `.data`, gradients, modes, graphs."""

import torch
from support.adversarial.program import (
    State,
    around,
    back,
    family,
    leaf,
    loop,
    observed,
    program,
    ran,
    reversed_loop,
    texts,
    within,
    work,
)
from torch import nn


# --- In place ---


@family(
    add=lambda y: y.add_(1),
    mul=lambda y: y.mul_(2),
    tanh=torch.tanh_,
    entry=lambda y: y.__setitem__(0, 3),
    masked=lambda y: y.masked_fill_(y > 0, 0.5),
    view=lambda y: y[2:6].mul_(3),
    reshaped=lambda y: y.view(4, 4).t_().exp_(),
    zero=lambda y: y[:4].zero_(),
    copy=lambda y: y[4:].copy_(y[:-4].clone()),
)
def an_intermediate_changed_in_place(change):
    def fn(x):
        y = x * 2
        change(y)
        return work(y)

    return loop(fn)


@family(before=True, after=False)
def an_input_that_is_no_leaf_changed_in_place(first):
    def fn(y):
        if first:
            y.mul_(2)
            return work(y)
        z = work(y)
        y.add_(1)
        return z * 2

    return around(fn, lambda run: lambda x: run(y := x * 3) + y)


@program
def an_input_without_gradient_changed_in_place():
    scale = torch.ones(16, dtype=torch.double)

    def fn(x, k):
        k.add_(1)
        return work(x * k)

    return loop(fn, args=(scale,), state=lambda: scale)


# --- Memory, data, gradients and flags ---


def ones(*shape):
    return torch.ones(*shape, dtype=torch.double)


def inner_step(w, x):
    """A step of SGD inside, with its graph."""
    (g,) = torch.autograd.grad(work(x * w, 0.5).sum(), w, create_graph=True)
    return w - 0.1 * g


ARRAY = "held = ones(16); numbers = held.numpy()"
WEIGHT = "held = leaf(seed=4)"

texts(globals())


# --- Modes ---


@family(
    no_grad=torch.no_grad,
    inference=torch.inference_mode,
    autocast=lambda: torch.autocast("cpu", torch.bfloat16),
    anomaly=lambda: torch.autograd.set_detect_anomaly(True),
    enabled=torch.enable_grad,
)
def a_mode_inside(mode):
    def fn(x):
        with mode():
            k = (x.detach().float().reshape(4, 4) @ torch.ones(4, 4)).flatten()
        return work(x * k.double())

    return lambda wrap: loop(fn)(wrap)


@family(
    autocast=lambda: torch.autocast("cpu", torch.bfloat16),
    default_dtype=lambda: DefaultDtype(),
    enabled=torch.enable_grad,
)
def a_mode_around_the_forward(mode):
    def fn(x):
        k = torch.ones(4, 4) * 0.5
        return work((x.float().reshape(4, 4) @ k.float()).flatten() + 0.1)

    return around(fn, within(mode))


class DefaultDtype:
    def __enter__(self):
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_):
        torch.set_default_dtype(torch.float32)


@program
def a_forward_without_grad_first():
    state = State(n=0)

    def fn(x):
        state.n += 1
        return work(x, state.n)

    def outer(run):
        with torch.no_grad():
            run(leaf())
        return run

    return around(fn, outer, state=lambda: state)


# --- Graphs ---


class Scaled(torch.autograd.Function):
    """Keeps what it needs as attributes of its context."""

    @staticmethod
    def forward(ctx, x, k):
        ran()
        ctx.k = k
        ctx.x = x.detach().clone()
        return (x * k).sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.x * ctx.k).cos() * ctx.k, None


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ran()
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        return grad * y * (1 + again) + 0 * x


@family(forward=0, backward=1)
def a_count_in_a_function_of_autograd(where):
    class Counting(torch.autograd.Function):
        count = 0

        @staticmethod
        def forward(ctx, x):
            Counting.count += where == 0
            ctx.k = Counting.count
            ctx.save_for_backward(x)
            return x.sin() * (1 + Counting.count)

        @staticmethod
        def backward(ctx, grad):
            Counting.count += where == 1
            (x,) = ctx.saved_tensors
            return grad * x.cos() * (1 + (Counting.count if where else ctx.k))

    return loop(lambda x: Counting.apply(work(x)), state=lambda: Counting.count)


@program
def a_returned_view_changed_in_place():
    def outer(run):
        def call(x):
            y = run(x)
            y[0].mul_(3)
            return y.sin()

        return call

    return around(lambda x: (work(x) * 2).view(4, 4), outer)


RETURNED = {
    "a view": lambda x: work(x).view(4, 4).t()[1:],
    "the input": lambda x: (x, work(x)),
    "a view of the input": lambda x: (x[:4], work(x), x.view(4, 4)),
    "one of three outputs": lambda x: (work(x).sin(), x.cos().exp(), work(x, 3))[0],
    "one with no elements before it": lambda x: torch.cat([x[:0], work(x)]),
    "a complex one as two": lambda x: torch.view_as_real(
        torch.complex(work(x), x).exp()
    ),
    "one that was saved twice": lambda x: Saving.apply(work(x)).tanh(),
}


@family(**RETURNED)
def returned(fn):
    return loop(fn)


@family(captured=False, passed=True)
def an_inference_tensor(is_passed):
    with torch.inference_mode():
        k = torch.ones(16, dtype=torch.double) * 3
    fn = lambda x, k=k: work(x + k)
    return loop(fn, args=(k,) if is_passed else ())


@program
def a_subclass_of_tensor():
    class Tagged(torch.Tensor):
        pass

    k = torch.ones(16, dtype=torch.double).as_subclass(Tagged)

    def fn(x):
        y = k * 2
        assert isinstance(y, Tagged)
        return work(x + y.as_subclass(torch.Tensor))

    return loop(fn)


@family(once=False, kept=True)
def a_gradient_by_grad(wrap, kept):
    fn = lambda x: work(x).tanh()

    x = leaf()
    out = wrap(fn)(x)
    grads = torch.autograd.grad(out.sum(), x, retain_graph=kept)
    more = torch.autograd.grad(out.sin().sum(), x) if kept else ()
    return out, grads, more


@program
def a_second_derivative_of_state(wrap):
    state = State(n=1)

    def fn(x):
        state.n += 1
        return work(x, state.n)

    x = leaf()
    out = wrap(fn)(x)
    state.n = 7
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    state.n = 9
    g.sin().sum().backward()
    return out, g, x.grad, state


@program
def inputs_of_a_backward(wrap):
    w = leaf(seed=4)

    x = leaf()
    out = wrap(lambda x: work(x * w))(x)
    out.sum().backward(inputs=[w])
    return out, x.grad, w.grad


@program
def batched_gradients(wrap):
    x = leaf()
    out = wrap(work)(x)
    eye = torch.eye(16, dtype=torch.double)
    (rows,) = torch.autograd.grad(out, x, eye, is_grads_batched=True)
    return out, rows


# --- What is set on tensors ---


def constant(value, **attributes):
    value = value(torch.ones(16, dtype=torch.double))
    vars(value).update(attributes)
    return value


ON_A_TENSOR = {
    "dict": (lambda n: {"n": [n]}, lambda s: s["n"]),
    "object": (lambda n: State(n=[n]), lambda s: s.n),
    "tuple": (lambda n: ((1, [n]),), lambda s: s[0][1]),
    "dict of a tensor": (lambda n: constant(torch.clone, n=[n]), lambda s: s.n),
}


@family(**ON_A_TENSOR)
def set_on_an_argument_and_changed_between(how):
    make, items = how
    k = constant(torch.clone, s=make(1.0))
    new = iter(range(2, 9))

    def change():
        items(k.s)[0] = next(new)

    return loop(
        lambda x, k: work(x, items(k.s)[0]),
        between=change,
        state=lambda: items(k.s),
        args=(k,),
    )


@family(**ON_A_TENSOR)
def set_on_an_argument_and_counted(how):
    make, items = how
    k = constant(torch.clone, s=make(1.0))

    def fn(x):
        y = work(x, items(k.s)[0])
        items(k.s)[0] += 1
        return y.tanh()

    return reversed_loop(fn, state=lambda: items(k.s))


@family(list=lambda k, h: setattr(k, "s", [h]), itself=lambda k, h: setattr(k, "s", h))
def what_is_set_on_a_tensor_is_set_by_the_function(put):
    k = constant(nn.Parameter)

    def fn(x):
        put(k, work(x * k))
        held = k.s[0] if isinstance(k.s, list) else k.s
        return work(held.tanh())

    return loop(fn, state=lambda: [*vars(k)])


@family(replaced=lambda k: setattr(k, "s", 5.0), taken_off=lambda k: delattr(k, "s"))
def what_is_set_on_a_leaf_taken_off_inside(wrap, change):
    k = constant(nn.Parameter)

    def fn(x):
        y = work(x * k, k.s)
        del k.s
        return y.tanh()

    run, seen = wrap(fn), []
    for i in range(3):
        x = leaf(seed=i)
        k.s = i + 1.0
        out = run(x)
        k.s = 9.0
        change(k)
        back(out)
        seen.append(observed((out, x.grad, [*vars(k)])))
    return seen


class Own(nn.Parameter):
    """A parameter of a class of the user's."""


def of_a_tensor(value):
    return value.as_subclass(Kind).requires_grad_()


class Kind(torch.Tensor):
    """A tensor of a class of the user's, which sees no operations."""


@family(parameter=nn.Parameter, of_its_own=Own, tensor=of_a_tensor)
def set_on_a_leaf_and_counted(kind):
    k = constant(kind, n=1.0, held=[2.0])

    def fn(x):
        y = work(x * k, k.n).sin() * k.held[0]
        k.n += 1
        k.held.append(k.held.pop() * 2)
        return y.tanh()

    state = lambda: (vars(k), type(k).__name__, k.grad)
    return reversed_loop(fn, state=state)


@family(parameter=nn.Parameter, of_its_own=Own, tensor=of_a_tensor)
def set_on_a_leaf_and_changed_between(kind):
    k = constant(kind, n=1.0)

    def change():
        k.n += 1

    return loop(lambda x: work(x * k, k.n).tanh(), between=change, state=lambda: k.n)
