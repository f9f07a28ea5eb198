"""Base autograd keeps its own graph: what works in plain code works in a call.

A *program* builds what it needs, wraps a function and returns tensors. It runs twice,
with the function as it is and rematerialized: the tensors have to be the same bit for
bit, and the function has to have been evaluated as often as the test says.
"""

import gc
import threading
import weakref

import pytest
import torch
from support.as_plain import assert_as_plain, grads, leaf, trained
from support.zoo import Evaluations, make, plainly
from torch import nn
from torch.autograd import Function, grad
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils._pytree import tree_leaves

from remat import policies, remat
from remat.testing import count_ops, live_bytes


# --- The comparison itself ---


def test_the_comparison_fails_for_a_function_that_is_not_rematerialized():
    def program(wrap, note):
        w = leaf()

        def fn(w):
            note(None)
            return w.sin().exp()

        wrap(fn)(w).sum().backward()
        return w.grad

    assert_as_plain(program)
    with pytest.raises(AssertionError):
        assert_as_plain(program, wrap=plainly)


def test_the_comparison_fails_for_another_gradient():
    def program(wrap, note):
        w = leaf()
        note(None)
        y = w.sin().sum() * (2 if wrap is remat else 1)
        y.backward()
        return w.grad

    with pytest.raises(AssertionError, match="differs"):
        assert_as_plain(program, evaluations=1)


# --- The graph ---


def test_the_graph_is_that_of_plain():
    def fn(w, x):
        return (x @ w).tanh().sum(0)

    def nodes(out):
        found = [out.grad_fn]
        for node in found:
            found += [p for p, _ in node.next_functions if p is not None]
        return [node.name() for node in found]

    w, x = leaf(1), leaf(2).sin()
    assert nodes(remat(fn)(w, x)) == nodes(fn(w, x))
    with count_ops() as ops:
        remat(fn)(w, x).sum().backward()
    assert ops["mm"] == 1 + 1 + 2


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_the_recompute_stops_at_the_last_tensor_that_is_read(policy):
    def fn(w):
        return (w.sin().exp() * 2 + 1).sum() * 3

    with count_ops() as ops:
        remat(fn, policy=policy, prune=False)(leaf()).backward()
    # `exp` saves its result. Nothing after it is run again.
    assert (ops["sin"], ops["exp"], ops["add"], ops["sum"]) == (2, 2, 1, 1)


def test_a_function_whose_graph_saves_only_inputs_is_not_run_again():
    def program(wrap, note):
        w, x = leaf(1), leaf(2)

        def fn(w, x):
            note(None)
            return x @ w

        wrap(fn)(w, x).sum().backward()
        return grads(w, x)

    assert_as_plain(program, evaluations=1)


def test_a_backward_of_a_part_recomputes_up_to_what_it_reads():
    """Handles of nodes that are gone need no value."""

    def fn(w):
        a = w.sin().exp()
        return a, a.tanh().cos().sum()

    w = leaf()
    a, b = remat(fn)(w)
    del b
    with count_ops() as ops:
        a.sum().backward()
    # The cosine is that of the derivative.
    assert (ops["exp"], ops["tanh"], ops["cos"]) == (1, 0, 1)
    assert torch.equal(w.grad, w.cos() * w.sin().exp())


def test_a_retained_graph_is_recomputed_for_each_backward():
    def program(wrap, note):
        w = leaf()

        def fn(w):
            note(None)
            return w.sin().exp().tanh()

        y = wrap(fn)(w).sum()
        y.backward(retain_graph=True)
        first = w.grad.clone()
        y.backward()
        return first, w.grad

    assert_as_plain(program, evaluations=3)


def test_a_backward_with_respect_to_some_inputs():
    def program(wrap, note):
        w, x = leaf(1), leaf(2)

        def fn(w, x):
            note(None)
            return (x @ w).tanh() * x.sin()

        y = wrap(fn)(w, x).sum()
        y.backward(inputs=[w], retain_graph=True)
        assert x.grad is None
        return w.grad, *grad(y, [x])

    assert_as_plain(program, evaluations=3)


def test_a_batch_of_cotangents():
    def program(wrap, note):
        w = leaf()

        def fn(w):
            note(None)
            return w.sin().exp().sum(0)

        y = wrap(fn)(w)
        return grad(y, w, torch.eye(4).double(), is_grads_batched=True)

    assert_as_plain(program)


def test_vmap_alone_keeps_the_graph_of_plain():
    def program(wrap, note):
        w, xs = leaf(1), leaf(2)

        def fn(x):
            note(None)
            return (x @ w).sin().exp()

        torch.func.vmap(wrap(fn))(xs).sum().backward()
        return grads(w, xs)

    assert_as_plain(program)


# --- What leaves the function other than by being returned ---


def test_a_loss_of_what_a_forward_hook_collected():
    def program(wrap, note):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        model.register_forward_pre_hook(lambda *_: note(None))
        found = []
        model[1].register_forward_hook(lambda m, a, out: found.append(out))
        y = wrap(model)(make(3, 4, seed=2))
        (y.sum() + found[0].square().sum()).backward()
        return y, [p.grad for p in model.parameters()]

    assert_as_plain(program)


class Router(nn.Module):
    """Leaves a loss, and the attention, on itself."""

    def __init__(self, note):
        super().__init__()
        self.inner, self.note = nn.Linear(4, 4), note

    def forward(self, x):
        self.note(None)
        self.weights = self.inner(x).softmax(-1)
        self.loss = self.weights.square().mean()
        return (self.weights * x).tanh()


@pytest.mark.parametrize("style", ["module", "forward"])
def test_a_loss_that_is_left_in_an_attribute(style):
    def program(wrap, note):
        model = Router(note).double()
        call = wrap(model) if style == "module" else None
        if call is None:
            model.forward = wrap(model.forward)
            call = model
        y = call(make(3, 4, seed=2))
        (y.sum() + model.loss).backward()
        return y, model.weights, [p.grad for p in model.inner.parameters()]

    assert_as_plain(program)


def test_attention_that_is_kept_for_plotting_stays_that_of_the_last_forward():
    model = Router(Evaluations().note).double()
    y = remat(model)(make(3, 4, seed=2))
    kept = model.weights
    y.sum().backward()
    assert model.weights is kept
    with count_ops() as ops:
        remat(model)(make(3, 4, seed=3)).sum().backward()
    assert ops["addmm"] == 2
    assert model.weights is not kept


def test_a_leaf_that_is_made_inside_and_returned():
    def program(wrap, note):
        x = leaf()

        def fn(x):
            note(None)
            made = torch.ones(4).double().requires_grad_()
            return (x * made).sin().exp(), made

        y, made = wrap(fn)(x)
        y.sum().backward()
        return x.grad, made.grad

    assert_as_plain(program)


def test_an_object_that_holds_tensors_is_returned_as_it_is():
    class Result:
        def __init__(self, logits):
            self.logits = logits

    def program(wrap, note):
        x = leaf()

        def fn(x):
            note(None)
            return Result(x.sin().exp())

        result = wrap(fn)(x)
        assert type(result) is Result
        result.logits.sum().backward()
        return x.grad

    assert_as_plain(program)


def test_results_that_share_memory_with_inputs_and_with_each_other():
    def program(wrap, note):
        x = leaf().sin()
        x.retain_grad()

        def fn(x):
            note(None)
            h = x.exp().cos()
            return x[0], h, h.view(-1)[1:3]

        row, h, part = wrap(fn)(x)
        assert row._base is not None
        assert part.data_ptr() == h.data_ptr() + 8
        (row.sum() + h.sum() + part.square().sum()).backward()
        return x.grad

    assert_as_plain(program)


def test_a_result_that_is_changed_in_place():
    def program(wrap, note):
        x = leaf()

        def fn(x):
            note(None)
            return x.sin().cos() * 2

        y = wrap(fn)(x)
        y.mul_(3)
        y[0] = 1
        y.sum().backward()
        return y, x.grad

    assert_as_plain(program)


def test_a_result_that_the_backward_reads_and_that_is_changed_is_an_error_as_in_plain():
    for wrap in (plainly, remat):
        y = wrap(lambda x: x.sin().exp())(leaf())
        y.mul_(2)
        # With a handle, the value is not that of `y`: it is computed again.
        if wrap is plainly:
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                y.sum().backward()
        else:
            with count_ops() as ops:
                y.sum().backward()
            assert ops["exp"] == 1


# --- Hooks ---


def test_hooks_of_every_kind_fire_once_and_change_gradients():
    def program(wrap, note):
        model = nn.Linear(4, 4).double()
        x = leaf(2)
        seen = []

        def hook(name, factor):
            def run(*args):
                seen.append(name)
                last = args[-1]
                return last * factor if isinstance(last, torch.Tensor) else None

            return run

        x.register_hook(hook("input", 2))
        model.weight.register_hook(hook("weight", 3))
        model.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append("accumulated")
        )
        model.register_full_backward_hook(lambda *_: seen.append("module"))
        model.register_full_backward_pre_hook(lambda *_: seen.append("before"))

        def fn(x):
            note(None)
            h = model(x).tanh()
            h.register_hook(hook("inside", 5))
            return h.exp()

        y = wrap(fn)(x)
        y.register_hook(hook("output", 7))
        y.grad_fn.register_prehook(lambda _: seen.append("prehook"))
        y.sum().backward()
        order = torch.tensor([hash(name) % 1000 for name in seen])
        assert len(seen) == 8
        return order, x.grad, *grads(*model.parameters())

    assert_as_plain(program)


def test_a_hook_that_the_function_sets_on_an_input_fires_once():
    def program(wrap, note):
        x = leaf()

        def fn(x):
            note(None)
            x.register_hook(lambda g: g * 2)
            return x.sin().exp()

        wrap(fn)(x).sum().backward()
        return x.grad

    assert_as_plain(program)


@pytest.mark.parametrize("kind", ["forward", "pre", "full_backward"])
def test_a_hook_that_is_removed_before_the_backward(kind):
    def program(wrap, note):
        model = nn.Linear(4, 4).double()
        register = {
            "forward": model.register_forward_hook,
            "pre": model.register_forward_pre_hook,
            "full_backward": model.register_full_backward_hook,
        }[kind]
        hook = {
            "forward": lambda m, args, out: out.tanh(),
            "pre": lambda m, args: (args[0].sin(),),
            "full_backward": lambda m, gi, go: (gi[0] * 2,),
        }[kind]
        handle = register(hook)
        x = leaf(2)

        def fn(x):
            note(None)
            return model(x.sin()).exp()

        y = wrap(fn)(x)
        handle.remove()
        y.sum().backward()
        return x.grad, *grads(*model.parameters())

    assert_as_plain(program)


def test_hooks_for_saved_tensors_around_a_call_and_in_it():
    def program(wrap, note):
        w, x = leaf(1), leaf(2).sin()
        packed, inner = [], []

        def fn(w, x):
            note(None)
            h = (x @ w).tanh()
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: (inner.append(0), t * 2)[1], lambda t: t / 2
            ):
                h = h.exp()
            return h.sin()

        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (packed.append(0), t * 4)[1], lambda t: t / 4
        ):
            y = wrap(fn)(w, x)
        y.sum().backward()
        assert packed
        return w.grad

    assert_as_plain(program)


# --- Derivatives inside, custom Functions, anomaly mode, compiled code ---


def test_a_derivative_inside_by_each_way():
    def program(wrap, note):
        x = leaf()

        def fn(x):
            note(None)
            a = grad(x.sin().exp().sum(), x, create_graph=True)[0]
            b = torch.func.grad(lambda x: x.cos().exp().sum())(x)
            made = torch.ones(4).double().requires_grad_()
            (made.sin() ** 2).sum().backward()
            return (a * b).tanh() + made.grad

        wrap(fn)(x).sum().backward()
        return x.grad

    # Each derivative that autograd takes inside the forward runs the function, too.
    assert_as_plain(program, evaluations=4)


class Doubled(Function):
    """Saves an input, a result and a tensor of its own, in the old style."""

    @staticmethod
    def forward(ctx, x):
        y, other = x.exp(), x.cos()
        ctx.save_for_backward(x, y)
        ctx.other = other
        return y

    @staticmethod
    def backward(ctx, cotangent):
        x, y = ctx.saved_tensors
        return cotangent * y * x * ctx.other


def test_a_custom_function_of_the_old_style():
    def program(wrap, note):
        x = leaf()

        def fn(x):
            note(None)
            return Doubled.apply(x.sin()).tanh()

        wrap(fn)(x).sum().backward()
        return x.grad

    assert_as_plain(program)


def test_anomaly_mode_names_the_line_of_the_forward():
    def fn(x):
        return (x * 0).sqrt().exp()  # the line

    x = leaf()
    with torch.autograd.set_detect_anomaly(True):
        y = remat(fn)(x)
        pattern = "MulBackward0.*nan"
        with (
            pytest.warns(UserWarning, match="Traceback of forward call") as caught,
            pytest.raises(RuntimeError, match=pattern),
        ):
            y.sum().backward()
    assert "# the line" in str(caught[0].message)


def test_compiled_code_inside():
    torch.compiler.reset()
    inner = torch.compile(lambda x: x.sin().exp(), backend="aot_eager")

    def program(wrap, note):
        x = leaf()

        def fn(x):
            note(None)
            return inner(x).tanh()

        wrap(fn)(x).sum().backward()
        return x.grad

    assert_as_plain(program)
    torch.compiler.reset()


def test_torch_cond_inside():
    def program(wrap, note):
        x = leaf()

        def fn(x):
            note(None)
            branches = (lambda x: x.sin(), lambda x: x.cos())
            return torch.cond(x.sum() > 0, *branches, (x.exp(),)).tanh()

        wrap(fn)(x).sum().backward()
        return x.grad

    torch.compiler.reset()
    assert_as_plain(program)
    torch.compiler.reset()


# --- Nesting, and other users of hooks ---


@pytest.mark.parametrize("depth", [2, 120])
def test_calls_within_calls(depth):
    def program(wrap, note):
        x = leaf()

        def fn(x):
            note(None)
            return x.sin().exp()

        for _ in range(depth):
            fn = wrap(fn)
        fn(x).sum().backward()
        return x.grad

    # The calls around save only the input, which is a leaf.
    assert_as_plain(program)


def test_calls_side_by_side_within_a_call_keep_only_its_inputs():
    def fn(x):
        return remat(inner)(remat(inner)(x))

    def inner(x):
        return x.sin().sin().sin()

    x = make(1 << 12, seed=1).requires_grad_()
    size = x.nbytes
    held = live_bytes(lambda: remat(fn)(x))
    assert held < 1.5 * size  # its result
    with count_ops() as ops:
        remat(fn)(x).sum().backward()
    # The outer call runs again up to what the second one saves: its input, the result
    # of the first. Then each runs again up to the input of its last sine.
    assert ops["sin"] == 6 + 3 + 2 + 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_call_in_a_checkpoint_of_torch_and_the_other_way_round(reentrant):
    from torch.utils.checkpoint import checkpoint

    def program(wrap, note):
        x = leaf()

        def fn(x):
            note(None)
            return x.sin().exp().tanh()

        def outer(x):
            return wrap(fn)(x).cos()

        checkpoint(outer, x, use_reentrant=reentrant).sum().backward()
        if not reentrant:
            inside = lambda x: checkpoint(fn, x, use_reentrant=False).cos()
            wrap(inside)(x).sum().backward()
        return x.grad

    # Plain: the checkpoint's. With remat a call in it runs again once more.
    expected = {True: (3, 2), False: (3 + 3, 2 + 2)}[reentrant]
    assert_as_plain(program, evaluations=expected[0], plain=expected[1])


# --- Parameters and optimizers ---


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_old_norms_of_weights_over_steps(norm):
    def program(wrap, note):
        model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh()).double()
        model.register_forward_pre_hook(lambda *_: note(None))
        return trained(model, make(3, 4, seed=2), wrap(model))

    assert_as_plain(program, evaluations=6, plain=3)


def test_parametrizations_over_steps():
    def program(wrap, note):
        model = parametrizations.spectral_norm(nn.Linear(4, 4).double())
        model.register_forward_pre_hook(lambda *_: note(None))
        call = wrap(model)
        return trained(model, make(3, 4, seed=2), lambda x: call(x).tanh())

    assert_as_plain(program, evaluations=6, plain=3)


def test_parameters_are_unfrozen_between_steps_and_before_a_backward():
    def program(wrap, note):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        model.register_forward_pre_hook(lambda *_: note(None))
        model[0].requires_grad_(False)
        call, x = wrap(model), make(3, 4, seed=2)
        first = call(x).tanh().sum()
        model[0].requires_grad_(True)
        first.backward()
        frozen = model[0].weight.grad
        call(x).tanh().sum().backward()
        assert frozen is None
        return [p.grad for p in model.parameters()]

    assert_as_plain(program, evaluations=4, plain=2)


class LateParameter(nn.Module):
    """Makes a parameter when it first sees an input."""

    def __init__(self, note):
        super().__init__()
        self.weight, self.note = None, note

    def forward(self, x):
        self.note(None)
        if self.weight is None:
            self.weight = nn.Parameter(torch.full((x.shape[-1],), 0.5).double())
        return (x * self.weight).sin().exp()


def test_a_parameter_that_the_forward_makes():
    def program(wrap, note):
        model, x = LateParameter(note), leaf(2)
        y = wrap(model)(x)
        made = model.weight
        y.sum().backward()
        assert model.weight is made
        return x.grad, made.grad

    assert_as_plain(program)


def test_a_lazy_module():
    def program(wrap, note):
        model = nn.Sequential(nn.LazyLinear(4), nn.Tanh()).double()
        call, x = wrap(model), leaf(2)
        call(x).sum().backward()
        model.register_forward_pre_hook(lambda *_: note(None))
        call(x).exp().sum().backward()
        return x.grad, [p.grad for p in model.parameters()]

    assert_as_plain(program)


def test_a_batch_norm_that_is_passed_as_an_argument():
    def program(wrap, note):
        norm, x = nn.BatchNorm1d(4).double(), leaf(2)

        def fn(norm, x):
            note(None)
            return norm(x.sin()).exp()

        wrap(fn)(norm, x).sum().backward()
        return x.grad, norm.weight.grad, norm.running_mean, norm.num_batches_tracked

    assert_as_plain(program)


def test_a_function_and_a_module_passed_as_arguments():
    def program(wrap, note):
        model, x = Router(note).double(), leaf(2)
        model.register_forward_hook(lambda m, args, out: out * 2)

        def fn(call, inner, x):
            return call(inner(x).exp())

        y = wrap(fn)(torch.tanh, model, x)
        (y.sum() + model.loss).backward()
        return x.grad, [p.grad for p in model.parameters()]

    assert_as_plain(program)


# --- Threads ---


def test_forwards_and_backwards_in_several_threads():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    notes = Evaluations()
    model.register_forward_pre_hook(lambda *_: notes.note(None))
    call, found, errors = remat(model), {}, []

    def work(i):
        try:
            x = make(5, 8, seed=i).requires_grad_()
            for _ in range(5):
                y = call(x).exp().sum()
                found[i] = grad(y, [x, *model.parameters()])
        except Exception as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors
    assert len(notes) == 4 * 5 * 2
    for i, got in found.items():
        x = make(5, 8, seed=i).requires_grad_()
        expected = grad(model(x).exp().sum(), [x, *model.parameters()])
        assert all(map(torch.equal, got, expected))


# --- Lifetime ---


@pytest.mark.parametrize("style", ["function", "closure", "module", "forward"])
def test_nothing_is_left_to_the_collector(style):
    gc.collect()
    gc.disable()
    try:
        refs = []

        def run():
            model = Router(Evaluations().note).double()
            x = leaf(2)
            watched = make(3, seed=1)
            fn = {
                "function": lambda x: x.sin().exp(),
                "closure": lambda x: model(x) * watched.sum(),
                "module": model,
                "forward": model.forward,
            }[style]
            y = remat(fn)(x)
            refs.extend(map(weakref.ref, (y, watched, model.inner.weight)))
            y.sum().backward()
            with count_ops() as ops:
                remat(fn)(x).sum()  # its graph is dropped
            refs.append(weakref.ref(x))
            model.__dict__.pop("weights", None)
            model.__dict__.pop("loss", None)
            return sum(ops.values())

        run()  # imports that torch puts off keep a frame alive
        refs.clear()
        assert run() > 0
        assert [ref() is None for ref in refs] == [True] * len(refs)
    finally:
        gc.enable()


def test_tree_leaves_of_a_result_have_the_graph_of_plain():
    def fn(x):
        return {"a": [x.sin(), (x.exp(),)], "n": 3}

    for wrap in (plainly, remat):
        out = tree_leaves(wrap(fn)(leaf()))
        names = [t.grad_fn.name() for t in out if isinstance(t, torch.Tensor)]
        assert names == ["SinBackward0", "ExpBackward0"]
