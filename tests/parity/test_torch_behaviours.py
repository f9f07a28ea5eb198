"""What PyTorch's tests of `torch.utils.checkpoint` say, restated for `remat`.

Numbers are items of the survey of those tests. Left out, because there is nothing in
`remat` they could be about: the reentrant variant (2 in part, 8 in part, 17, 23 in
part), the argument checks of `checkpoint_sequential` (4), `preserve_rng_state=False`
(6: there is no way to switch replay off), `context_fn` (16), execution groups (18: each
backward recomputes), messages of `debug=` (19 in part), a switch for early stop (29:
there is none), and `DataParallel` (25 in part), which needs several devices.
"""

import gc
import weakref
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from support.zoo import Evaluations
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from remat import RecomputeError, remat
from remat.testing import assert_same, assert_same_gradients, count_ops, peak_bytes


def points(*shape):
    size = torch.Size(shape).numel()
    return torch.linspace(0.2, 1.3, size).reshape(shape)


def leaf(*shape):
    return points(*shape).requires_grad_()


class Counted:
    """A function that counts the evaluations of its body."""

    def __init__(self, fn):
        self.fn, self.evaluations = fn, Evaluations()

    def __call__(self, *args, **kwargs):
        self.evaluations.note(None)
        return self.fn(*args, **kwargs)

    def take(self):
        count = len(self.evaluations)
        self.evaluations.clear()
        return count


# --- 1-3: sequences ---


class Logged(nn.Module):
    def __init__(self, index, log):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.index, self.log = index, log

    def forward(self, x):
        self.log.note(self.index)
        return self.linear(x).tanh()


def sequential(modules, segments, x):
    """As `checkpoint_sequential`: all segments but the last are rematerialized."""
    modules = list(modules)
    size = len(modules) // segments
    for start in range(0, size * (segments - 1), size):
        x = remat(nn.Sequential(*modules[start : start + size]))(x)
    for module in modules[size * (segments - 1) :]:
        x = module(x)
    return x


def test_a_sequence_of_two_segments_runs_its_first_half_again():
    """1."""
    log = Evaluations()
    modules = [Logged(k, log) for k in range(10)]
    x = leaf(2, 4)
    out = sequential(modules, 2, x)
    assert [*log] == list(range(10))
    out.sum().backward()
    assert [*log] == list(range(5))
    assert_same(x.grad, torch.autograd.grad(chain(modules, x).sum(), x)[0])


def chain(modules, x):
    for module in modules:
        x = module(x)
    return x


def test_gradients_by_autograd_grad_and_of_gradients():
    """2: `autograd.grad` and `create_graph` are no different from `backward`."""
    body = Counted(lambda x: x.sin().exp())

    def second(ckpt):
        x = leaf(3)
        (first,) = torch.autograd.grad(ckpt(body)(x).sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), x)

    got = second(remat)
    assert body.take() == 3
    assert_same(got, second(lambda f: f))


KINDS = {
    "Sequential": lambda modules: nn.Sequential(*modules),
    "list": list,
    "ModuleList": nn.ModuleList,
}


@pytest.mark.parametrize("segments", [2, 3, 6])
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_sequences_of_any_kind(kind, segments):
    """3: outputs, gradients of inputs and of parameters."""
    log = Evaluations()
    modules = kind([Logged(k, log) for k in range(6)])
    params = {k: dict(m.named_parameters()) for k, m in enumerate(modules)}
    assert_same_gradients(
        lambda x: sequential(modules, segments, x),
        lambda x: chain(modules, x),
        leaf(2, 4),
        wrt=params,
    )
    again = (6 // segments) * (segments - 1)
    assert len(log) == 6 + again + 6


# --- 5: random streams ---


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU()],
    ids=["Dropout", "AlphaDropout", "RReLU"],
)
def test_masks_are_the_same_in_the_recomputation(layer):
    """5: bit for bit; and the stream goes on as if nothing had been recomputed."""
    body = Counted(lambda x: layer(x.sin()) * layer(x - 0.7).exp())
    results = []
    for fn in (remat(body), body):
        torch.manual_seed(0)
        x = leaf(50)
        out = fn(x)
        between = torch.rand(3)
        out.sum().backward()
        results.append((out.detach(), x.grad, between, torch.rand(3)))
    assert body.take() == 3
    assert_same(results[0], results[1])


# --- 7, 8: what may go in and out ---


def test_what_is_no_tensor_passes_both_ways():
    """7."""
    seen = Evaluations()

    def f(x, none, text, number, pair):
        seen.note((none, text, number, pair))
        return x.sin().exp() * number, none, text, pair, number

    x = leaf(3)
    out, *rest = remat(f)(x, None, "text", 3, (1, None))
    assert rest == [None, "text", (1, None), 3]
    out.sum().backward()
    assert [*seen] == [(None, "text", 3, (1, None))] * 2
    assert_same(x.grad, 3 * points(3).sin().exp() * points(3).cos())


def test_a_call_without_tensors():
    """7: there is nothing to differentiate."""
    body = Counted(lambda n, text: (n + 1, text.upper()))
    assert remat(body)(1, text="a") == (2, "A")
    assert body.take() == 1
    x = leaf(3)
    (got,) = torch.autograd.grad(
        remat(lambda n: body.fn(n, "") and x.sin())(1).sum(), x
    )
    with count_ops() as ops:
        torch.autograd.grad(remat(lambda: x.sin().exp())().sum(), x)
    assert ops["sin"] == 2, "but what is captured may be"
    assert_same(got, points(3).cos())


def test_a_backward_after_the_graph_was_freed_is_refused():
    """7: torch's own error, and no evaluation."""
    body = Counted(lambda x: x.sin().exp())
    out = remat(body)(leaf(3)).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert body.take() == 3
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()
    assert body.take() == 0


def test_some_outputs_may_need_no_grad():
    """8."""
    body = Counted(
        lambda x: (x.detach() + 1, x.sin().exp(), x > 0.5, [x.exp().detach()])
    )
    x = leaf(3)
    outs = remat(body)(x)
    flags = [o.requires_grad for o in (*outs[:3], *outs[3])]
    assert flags == [False, True, False, False]
    outs[1].sum().backward()
    assert body.take() == 2
    assert_same(x.grad, points(3).sin().exp() * points(3).cos())


@pytest.mark.parametrize("wrap", [remat, lambda f: remat(remat(f))], ids=["1", "2"])
def test_a_call_none_of_whose_outputs_need_grad(wrap):
    """8, 23: fine here, and never evaluated again."""
    body = Counted(lambda x: x.sin().detach())
    x = leaf(3)
    out = wrap(body)(x)
    assert (out.requires_grad, body.take()) == (False, 1)
    inner = Counted(lambda x: x.sin().exp())
    (out + wrap(inner)(x)).sum().backward()
    assert (body.take(), inner.take() >= 2) == (0, True)
    assert_same(x.grad, torch.autograd.grad(inner.fn(x).sum(), x)[0])


# --- 9: memory during the backward ---


def living(refs):
    """How many of the objects that were noted are alive."""
    taken = [*refs]
    for ref in taken:
        refs.note(ref)
    return sum(ref() is not None for ref in taken)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_recomputed_values_are_freed_block_by_block(retain_graph):
    """9: with a retained graph too. No block sees recomputed values of others alive."""
    refs, alive = Evaluations(), Evaluations()

    def block(x):
        alive.note(living(refs))
        for _ in range(3):
            x = x.sin()
            refs.note(weakref.ref(x))
        return x

    x = leaf(3)
    out = x
    for _ in range(4):
        out = remat(block)(out)
    # The outputs, of which each is the input of the next, and nothing recomputed.
    assert [*alive] == [0, 1, 2, 3]
    out.sum().backward(retain_graph=retain_graph)
    assert [*alive] == ([4] * 4 if retain_graph else [4, 3, 2, 1])
    assert x.grad.abs().min() > 0.01


def test_inputs_are_freed_as_the_backward_proceeds():
    """9: after a block's backward its input is gone, unless the graph is retained."""
    refs, alive = Evaluations(), Evaluations()

    def block(x):
        alive.note(living(refs))
        return x.sin().exp()

    def run(**options):
        refs.clear()
        alive.clear()
        out = leaf(3) * 1.0
        for _ in range(4):
            refs.note(weakref.ref(out))
            out = remat(block)(out)
        out.sum().backward(**options)
        return [*alive][4:]

    assert run() == [4, 3, 2, 1]
    assert run(retain_graph=True) == [4, 4, 4, 4]


# --- 10, 11: devices ---


def test_tensors_on_other_devices_in_nested_structures():
    """10: meta tensors in dicts and lists; the CPU's stream is replayed anyway."""
    body = Counted(
        lambda tree: (
            tree["a"][0].sin() * torch.rand(3),
            {"m": tree["b"]["m"].sin()},
        )
    )
    x, m = leaf(3), torch.empty(3, device="meta", requires_grad=True)
    torch.manual_seed(0)
    out, on_meta = remat(body)({"a": [x, None], "b": {"m": m}})
    assert on_meta["m"].is_meta
    (out.sum() + 0).backward()
    torch.manual_seed(0)
    mask = torch.rand(3)
    assert body.take() == 2
    assert_same(x.grad, mask * points(3).cos())


def test_only_meta_tensors():
    """10."""
    body = Counted(lambda x, w: (x @ w).sin().exp())
    x = torch.empty(2, 3, device="meta", requires_grad=True)
    out = remat(body)(x, torch.empty(3, 4, device="meta"))
    out.sum().backward()
    assert body.take() == 2
    assert (out.shape, x.grad.shape, x.grad.is_meta) == ((2, 4), (2, 3), True)


def test_a_draw_is_replayed_though_no_argument_tells_of_its_device():
    """10: no argument at all, only a captured tensor inside an object."""

    class Holder:
        value = None

    holder = Holder()
    holder.value = leaf(50)
    draws = Evaluations()

    def f():
        mask = torch.rand(50)
        draws.note(mask)
        return (holder.value * mask).sin()

    remat(f)().sum().backward()
    drawn = [*draws]
    assert len(drawn) == 2
    assert_same(drawn[0], drawn[1])
    assert_same(holder.value.grad, drawn[0] * (points(50) * drawn[0]).cos())


@pytest.mark.parametrize("inside", [True, False])
def test_the_device_context_of_the_forward_is_in_force_again(inside):
    """11."""
    devices = Evaluations()

    def f(x):
        devices.note(torch.zeros(1).device.type)
        return x.sin().exp()

    x = leaf(3)
    with torch.device("meta") if inside else nullcontext():
        out = remat(f)(x)
    ones = torch.ones(3)
    with torch.device("cpu" if inside else "meta"):
        out.backward(ones)
    assert [*devices] == (["meta"] if inside else ["cpu"]) * 2
    assert_same(x.grad, points(3).sin().exp() * points(3).cos())


# --- 12-14: many, autocast, memory ---


def test_two_thousand_small_nets_in_one_graph():
    """12."""
    net = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1))
    body = Counted(net)
    fn = remat(body)
    rows = leaf(2000, 4)
    sum(fn(row) for row in rows).sum().backward()
    assert body.take() == 4000
    got = {k: p.grad.clone() for k, p in net.named_parameters()}
    wanted = dict(net.named_parameters())
    want = torch.autograd.grad(sum(net(r) for r in rows).sum(), list(wanted.values()))
    # The nets' contributions are added up in the order of the graph: the same one.
    assert_same(got, dict(zip(wanted, want, strict=True)))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_recomputation_autocasts_as_the_forward_did(dtype, enabled):
    """13: whatever is on when the backward runs."""
    dtypes = Evaluations()

    def f(x, w):
        y = (x @ w).sin()
        dtypes.note(y.dtype)
        return y.exp().sum()

    def run(fn):
        x, w = leaf(3, 4), leaf(4, 2)
        with torch.autocast("cpu", dtype, enabled=enabled):
            out = fn(x, w)
        with torch.autocast("cpu", torch.bfloat16, enabled=not enabled):
            out.backward()
        return out.detach(), x.grad, w.grad

    got = run(remat(f))
    assert [*dtypes] == [dtype if enabled else torch.float32] * 2
    assert_same(got, run(f))


def test_the_peak_is_lower_than_plain():
    """14."""
    modules = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(8)]
    x = torch.randn(512, 64, requires_grad=True)

    def step(ckpt):
        out = x
        for module in modules:
            out = ckpt(module)(out)
        out.sum().backward()

    step(lambda f: f)  # the gradients exist from here on
    want = peak_bytes(lambda: step(lambda f: f))
    assert peak_bytes(lambda: step(remat)) < 0.7 * want


# --- 15: custom Functions ---


class ReadsTwice(Function):
    """Reads what it saved twice in a backward; its derivative is 5 times too large."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, cotangent):
        x, y = ctx.saved_tensors
        again = ctx.saved_tensors
        assert again[0].equal(x)
        assert again[1].equal(y)
        return 5 * cotangent * y


def test_a_custom_function_may_read_what_it_saved_twice():
    """15: torch's checkpoint refuses a second look."""
    x = leaf(3)
    with count_ops() as ops:
        remat(lambda x: ReadsTwice.apply(x.sin()))(x).sum().backward()
    assert ops["exp"] == 2
    (want,) = torch.autograd.grad(ReadsTwice.apply(x.sin()).sum(), x)
    assert_same(x.grad, want)


# --- 19: nondeterminism ---

CHANGES = {
    "shape": lambda x, again: x.sin().expand(4 if again else 2, 3),
    "dtype": lambda x, again: x.sin().double() if again else x.sin(),
    "fewer outputs": lambda x, again: [x.sin()] if again else [x.sin(), x.cos()],
    "more outputs": lambda x, again: [x.sin()] * (1 + again) + [x.cos()] * again,
    "other structure": lambda x, again: {"b" if again else "a": x.sin()},
    "a tuple for a list": lambda x, again: (x.sin(),) if again else [x.sin()],
    "a tensor for a number": lambda x, again: (x.sin(), x.cos() if again else 1.0),
    "nothing for a tensor": lambda x, again: (x.sin(), None if again else x.cos()),
    "an input for a computed one": lambda x, again: (x.sin(), x if again else x.cos()),
    "requires_grad lost": lambda x, again: (x.detach() if again else x).sin(),
}


@pytest.mark.parametrize("f", CHANGES.values(), ids=list(CHANGES))
def test_one_node_refuses_a_recomputation_with_other_outputs(f):
    """19: structure, shape, dtype and differentiability of the outputs."""
    runs = Evaluations()

    def body(x):
        runs.note(None)
        return f(x, len(runs) > 1)

    out = remat(body, higher_order=True)(leaf(3))
    first = first_of(out)
    with pytest.raises(RecomputeError, match=r"remat: .*recomput") as info:
        first.sum().backward()
    assert len(runs) == 2
    assert "test_one_node_refuses_a_recomputation" in _text(info.value)


@pytest.mark.parametrize("change", [k for k in CHANGES if k != "requires_grad lost"])
def test_a_recomputation_may_have_other_outputs_if_it_saves_the_same(change):
    """19: it stops where the last value was saved that is read."""
    f = CHANGES[change]
    runs = Evaluations()

    def body(x):
        runs.note(None)
        return f(x.cos(), len(runs) > 1)

    x, y = leaf(3), leaf(3)
    out = remat(body)(x)
    first = first_of(out)
    del out
    first.sum().backward()
    assert len(runs) == 2
    want = torch.autograd.grad(first_of(f(y.cos(), False)).sum(), y)[0]
    assert_same(x.grad, want)


def _text(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def first_of(out):
    return out if isinstance(out, torch.Tensor) else next(iter(_leaves(out)))


def _leaves(tree):
    return tree.values() if isinstance(tree, dict) else tree


def test_a_function_is_judged_by_what_it_saves():
    """19: as by torch's checkpoint, and by whose operands and results they are."""
    count = Evaluations()

    def body_with(again):
        def f(x):
            count.note(None)
            y = x.sin()
            return y.exp() if len(count) == 1 else again(y)

        return f

    x = leaf(3)
    remat(body_with(lambda y: y.clone().exp() * 1.0))(x).sum().backward()
    assert len(count) == 2
    assert_same(x.grad, points(3).cos() * points(3).sin().exp())
    count.clear()
    out = remat(body_with(torch.sigmoid))(x).sum()
    with pytest.raises(RecomputeError, match=r"of ExpBackward0(?s:.*)of SigmoidBack"):
        out.backward()
    assert len(count) == 2


# --- 20-24: reading the graph, errors, detached tensors, identity ---


def test_reading_what_a_node_saved_recomputes_it():
    """20: until it is freed."""
    body = Counted(lambda x: x.sin().exp())
    x = leaf(3)
    out = remat(body)(x)
    (sin,) = [node for node, _ in out.grad_fn.next_functions]
    assert_same(sin._saved_self.detach(), x.detach())
    assert body.take() == 1
    for _ in range(3):
        assert_same(out.grad_fn._saved_result.detach(), out.detach())
    assert body.take() == 3
    out.sum().backward()
    assert body.take() == 1
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = out.grad_fn._saved_result
    assert_same(x.grad, points(3).sin().exp() * points(3).cos())


def test_reading_what_one_node_saved_recomputes_nothing():
    """20: a call saves its inputs, so they can be read at any time until freed."""
    body = Counted(lambda x: x.exp())
    x = leaf(3)
    y = x * 2.0
    out = remat(body, higher_order=True)(y)
    for _ in range(3):
        assert_same(out.grad_fn.saved_tensors[0].detach(), y.detach())
    assert body.take() == 1
    out.sum().backward()
    assert body.take() == 1
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = out.grad_fn.saved_tensors
    assert_same(x.grad, 2 * (points(3) * 2).exp())


@pytest.mark.parametrize("wanted", [True, False])
def test_inputs_that_need_grad_and_that_do_not(wanted):
    """21: keyword arguments too."""
    body = Counted(lambda x, *, scale, power=2: (x.sin() * scale) ** power)
    x = points(3).requires_grad_(wanted)
    scale = leaf(3)
    assert_same_gradients(remat(body), body, x, scale=scale, power=3)
    assert body.take() == 3


def test_a_failed_backward_does_not_poison_the_next():
    """22: the first asks for a gradient that does not exist."""
    body = Counted(lambda x: x.sin().exp())
    x, other = leaf(3), leaf(3)
    out = remat(body)(x).sum()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(out, (x, other), retain_graph=True)
    body.take()
    (got,) = torch.autograd.grad(out, x)
    assert body.take() == 1
    assert_same(got, torch.autograd.grad(body.fn(x).sum(), x)[0])


def test_a_backward_that_raised_in_a_hook_can_be_done_again():
    """22."""
    body = Counted(lambda x: x.sin().exp())
    x = leaf(3)
    fail = [True]

    def hook(grad):
        if fail:
            raise ValueError(f"a hook, at {grad.shape[0]}")
        return grad

    middle = x * 1.0
    middle.register_hook(hook)
    out = remat(body)(middle).sum()
    with pytest.raises(ValueError, match="a hook, at 3"):
        out.backward(retain_graph=True)
    fail.clear()
    out.backward()
    assert body.take() == 3
    assert_same(x.grad, torch.autograd.grad(body.fn(x).sum(), x)[0])


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_a_call_where_nothing_is_recorded(grad_mode):
    """23: it is the function itself; a part of it without recording is as in plain."""
    body = Counted(lambda x: x.sin())
    x = leaf(3)
    with grad_mode():
        out = remat(body)(x)
    assert (out.requires_grad, body.take()) == (False, 1)

    def partly(x):
        with torch.no_grad():
            scale = body(x)
        return scale * x.exp()

    assert_same_gradients(remat(partly), partly, x)
    assert body.take() == 3


def test_what_is_unpacked_is_the_original_object():
    """24: an input that needs no grad, seen by saved-tensor hooks around the call.

    A leaf that does is kept as it is.
    """
    packed, unpacked = [], []

    def unpack(t):
        unpacked.append(t)
        return t

    def pack(t):
        packed.append(t)
        return t

    body = Counted(lambda x, n: (x * n).sin())
    x, n = leaf(3), points(3)
    with saved_tensors_hooks(pack, unpack):
        out = remat(body)(x, n)
    assert len(packed) == 1
    assert packed[0] is n
    out.sum().backward()
    assert body.take() == 2
    assert len(unpacked) == 1
    assert unpacked[0] is n
    assert_same(x.grad, n * (n * n).cos())


def test_the_body_sees_the_original_object_where_it_needs_no_grad():
    """24: in the forward and in the recomputation."""
    seen = Evaluations()

    def f(x, n):
        seen.note(n.data_ptr())
        return (x * n).sin()

    n = points(3, 1)
    x = leaf(3, 1)
    remat(f)(x, n).sum().backward()
    assert [*seen] == [n.data_ptr()] * 2
    assert_same(x.grad, n * (n * n).cos())


# --- 25, 26: gradients, hooks, structures, offloading ---


def test_a_parameter_used_inside_and_outside_fires_its_hook_once():
    """25."""
    weight = nn.Parameter(points(3))
    fired = []
    weight.register_hook(lambda g: fired.append(g.clone()))
    body = Counted(lambda x: (x * weight).sin() * weight)
    x = points(3)
    (remat(body)(x) + weight.exp()).sum().backward()
    assert body.take() == 2
    assert len(fired) == 1
    assert_same(fired[0], weight.grad)
    want = torch.autograd.grad((body.fn(x) + weight.exp()).sum(), weight)[0]
    assert_same(weight.grad, want)


def test_dictionaries_in_and_out():
    """25: ordered ones keep their order, outputs their structure."""
    seen = Evaluations()

    def f(named):
        seen.note(list(named))
        out = OrderedDict(
            (k, v.sin() * (i + 1)) for i, (k, v) in enumerate(named.items())
        )
        return {"out": out, "sum": sum(out.values()).exp()}

    named = OrderedDict(b=leaf(3), a=leaf(3) * 2.0)
    assert_same_gradients(remat(f), f, OrderedDict(b=leaf(3), a=leaf(3)))
    out = remat(f)(named)
    assert list(out["out"]) == ["b", "a"]
    assert [*seen] == [["b", "a"]] * 4


def test_offloading_around_it_and_inside_it():
    """26: the inputs go through `save_on_cpu`; the gradients are right."""
    body = Counted(lambda x, w: (x @ w).tanh())

    def run(ckpt):
        x, w = leaf(2, 3), leaf(3, 3)
        with save_on_cpu():
            ckpt(lambda x, w: body(body(x, w), w))(x, w).sum().backward()
        return x.grad, w.grad

    got = run(remat)
    assert body.take() == 4
    assert_same(got, run(lambda f: f))

    def inside(x, w):
        with save_on_cpu():
            return body(x, w)

    assert_same_gradients(remat(inside), inside, leaf(2, 3), leaf(3, 3))


@pytest.mark.parametrize("outer", ["torch", "remat"])
def test_mixed_with_torchs_own_checkpoint(outer):
    """26: either inside the other."""
    body = Counted(lambda x: x.sin().exp())

    def mixed(x):
        if outer == "torch":
            return torch_checkpoint(
                lambda y: remat(body)(y).cos(), x, use_reentrant=False
            )
        return remat(lambda y: torch_checkpoint(body, y, use_reentrant=False).cos())(x)

    x = leaf(3)
    mixed(x).sum().backward()
    assert body.take() == 3
    want = torch.autograd.grad(body.fn(x).cos().sum(), x)[0]
    assert_same(x.grad, want)


# --- 27, 28: nesting, orders, hooks ---


def derivative(f):
    """Return the function's derivative by `autograd.grad` inside."""

    def g(x):
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(f(y).sum(), y, create_graph=True)[0]

    return g


MIXES = ["c", "cg", "gc", "gcg", "cgc", "ggc", "cgg", "gcgc", "cgcgc", "gggc"]


@pytest.mark.parametrize("mix", MIXES)
def test_any_mix_of_gradients_and_remat(mix):
    """27: to third order; all of it is freed by reference counting."""
    refs = Evaluations()

    def body(x):
        y = (x * x).sin()
        refs.note(weakref.ref(y))
        return y.exp()

    def build(ckpt):
        f = body
        for step in reversed(mix):
            f = ckpt(f) if step == "c" else derivative(f)
        return f

    def run(ckpt):
        refs.clear()
        x = leaf(3)
        out = build(ckpt)(x)
        (first,) = torch.autograd.grad(out.sum(), x)
        return out.detach(), first, len(refs)

    gc.collect()
    gc.disable()
    try:
        *got, evaluations = run(remat)
        left = living(refs)
    finally:
        gc.enable()
    *want, plain_evaluations = run(lambda f: f)
    assert_same(got, want)
    assert left == 0
    assert evaluations > plain_evaluations


def test_two_children_in_one_parent():
    """28: with arguments that are no tensors, and keywords with gradients."""
    left = Counted(lambda x, flag, *, scale: x.sin() * scale if flag else x)
    right = Counted(lambda x, name: {"name": name, "y": x.exp()})

    def parent(x, *, scale):
        a = remat(left)(x, True, scale=scale)
        b = remat(right)(a, "b")
        assert b["name"] == "b"
        return a * b["y"], b["name"]

    x, scale = leaf(3), leaf(3)
    out, name = remat(parent)(x, scale=scale)
    assert (name, left.take(), right.take()) == ("b", 1, 1)
    out.sum().backward()
    assert (left.take(), right.take()) == (2, 2)
    a = points(3).sin() * points(3)
    want = a.exp() * (1 + a) * points(3).cos() * points(3)
    assert_same(x.grad, want, reassociated=True)  # against a formula
    assert_same_gradients(remat(parent), parent, x, scale=scale)


def test_hooks_on_the_graph_around_fire_once():
    """28: on an argument, on an output, and on a node."""
    fired = []
    body = Counted(lambda x: x.sin().exp())
    x = leaf(3)
    y = x * 1.0
    y.register_hook(lambda g: fired.append("y"))
    y.grad_fn.register_hook(lambda *_: fired.append("node"))
    out = remat(lambda y: remat(body)(y).cos())(y)
    out.register_hook(lambda g: fired.append("out"))
    out.sum().backward()
    assert body.take() == 3
    assert fired == ["out", "y", "node"]
    assert_same(x.grad, torch.autograd.grad(body.fn(x).cos().sum(), x)[0])


def test_a_hook_inside_fires_in_the_recomputation():
    """28: on a value made inside, as often as a gradient passes there: once."""
    fired = []

    def f(x):
        y = x.sin()
        y.register_hook(lambda g: fired.append(g.clone()))
        return y.exp()

    x = leaf(3)
    with count_ops() as ops:
        remat(f)(x).sum().backward()
    assert ops["sin"] == 2
    assert_same(fired, [points(3).sin().exp()])


def test_a_backward_started_by_a_hook():
    """28: a rematerialized problem of its own within another's backward."""
    body = Counted(lambda x: x.sin().exp())
    inner, x = leaf(3), leaf(3)
    got = []

    def hook(grad):
        with torch.enable_grad():
            remat(body)(inner).sum().backward()
        got.append(inner.grad.clone())
        return grad * 1.0

    y = x * 1.0
    y.register_hook(hook)
    remat(lambda y: remat(body)(y))(y).sum().backward()
    assert body.take() == 2 + 2
    (want,) = torch.autograd.grad(body.fn(x).sum(), x)
    assert_same((x.grad, got), (want, [want]))


def test_a_backward_started_inside_the_body():
    """28: `backward` within the function, on tensors of its own."""

    def f(x):
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            own.sin().sum().backward()
        return own.grad * x.exp()

    x = leaf(3)
    with count_ops() as ops:
        remat(f)(x).sum().backward()
    assert ops["sin"] == 2
    assert_same(x.grad, points(3).cos() * points(3).exp())


# --- 30: what needs no recomputation ---


def test_a_function_that_saves_only_its_input():
    """30: the op does not run again."""
    x = leaf(3)
    with count_ops() as ops:
        remat(torch.sin)(x).sum().backward()
    assert (ops["sin"], ops["cos"]) == (1, 1)
    assert_same(x.grad, points(3).cos())


def test_a_function_that_saves_nothing():
    """30: the function does not run again."""
    body = Counted(lambda x: 2.0 * x + 1.0)
    x = leaf(3)
    remat(body)(x).sum().backward()
    assert body.take() == 1
    assert_same(x.grad, torch.full((3,), 2.0))
