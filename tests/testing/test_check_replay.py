"""`check_replay` finds equal what is replayed, and says what it compared."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tables import rows
from support.zoo import ZOO, make, plainly
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap
from torch.nn.functional import dropout
from torch.utils._pytree import tree_leaves

import remat.random
from remat import checkpoint_name, policies, remat as ckpt
from remat.testing import Agreement, check_replay, count_ops, peak_bytes


# --- What agrees ---


@rows("wrap", {"plain": plainly, "remat": ckpt})
@pytest.mark.parametrize("case", sorted(ZOO))
def test_functions_that_depend_on_their_inputs_alone_agree(case, wrap):
    fn, call = ZOO[case]
    w, x = make(4, 4, seed=1), make(4, 4, seed=2).requires_grad_()
    found = check_replay(lambda w, x: call(wrap(fn), w, x), w, x)
    with count_ops() as ops:
        call(fn, w, x)
    assert found.operations == sum(ops.values()) - ops["detach"]
    assert found.values > 0
    assert found.nbytes > 0


def test_what_is_compared_is_counted():
    def f(x):
        h = x.sin()  # and x itself, which it is the first to read
        h.t()[0].exp()  # the view is not compared, its exponential is
        return h.mul_(2.0)

    assert check_replay(f, make(4, 4, seed=1)) == Agreement(5, 4, 3 * 128 + 32)


def test_each_operation_runs_once_in_the_forward_and_once_again():
    with count_ops() as ops:
        check_replay(lambda x: x.sin().sin().cos(), torch.ones(3))
    assert (ops["sin"], ops["cos"]) == (4, 2)


@pytest.mark.parametrize("prune", [True, False])
def test_a_policy_and_pruning_leave_nothing_out(prune):
    policy = policies.everything_saveable
    with count_ops() as ops:
        check_replay(
            ckpt(lambda x: x.sin().sin(), policy=policy, prune=prune), torch.ones(3)
        )
    assert ops["sin"] == 4


def test_dropout_and_noise_are_replayed():
    generator = torch.Generator().manual_seed(3)

    def f(x, generator):
        noise = torch.randn(100) + torch.rand(100, generator=generator)
        return dropout(x * noise * np.random.rand(), 0.5)

    assert check_replay(f, make(100, seed=1), generator).operations > 4


def test_dropout_by_a_key_is_replayed():
    key = remat.random.key(0)
    drop = functools.partial(remat.random.dropout, key, p=0.5)
    assert check_replay(drop, make(100, seed=1)).operations > 0


def test_streams_move_once():
    states = []
    for run in (lambda fn, x: fn(x), check_replay):
        torch.manual_seed(0)
        run(dropout, torch.ones(8))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    torch.manual_seed(0)
    assert not torch.equal(torch.get_rng_state(), states[0])


def test_buffers_are_updated_once():
    norm, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = make(8, 4, seed=1).float()
    other(x)
    check_replay(norm, x)
    assert norm.num_batches_tracked == 1
    assert torch.equal(norm.running_mean, other.running_mean)


def test_autocast_is_replayed():
    w, x = make(4, 4, seed=1).float(), make(4, 4, seed=2).float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = check_replay(lambda w, x: (x @ w).relu(), w, x)
    outside = check_replay(lambda w, x: (x @ w).relu(), w, x)
    assert inside.operations > outside.operations  # the casts


@rows("wrap", {"plain": plainly, "remat": ckpt})
def test_a_module_agrees_and_its_parameters_get_no_gradient(wrap):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x = make(2, 3, 8, seed=1).float()
    assert check_replay(wrap(layer), x).operations > 20
    assert all(p.grad is None for p in layer.parameters())


def test_memory_that_nobody_has_written_is_not_compared():
    def f(x):
        out = torch.empty(4, 1000, dtype=x.dtype)
        out[1:] = x[1:]
        return torch.empty_like(x).new_empty(3, 3), out[1:].sin() * x.new_zeros(1000)

    check_replay(f, make(4, 1000, seed=1))


def test_nan_and_signs_of_zero_are_compared_bit_for_bit():
    def f(x):
        return (x * float("nan")).exp() + torch.zeros(3) * -1.0

    assert check_replay(f, torch.ones(3)).values > 4


def test_other_layouts_and_dtypes_are_compared():
    def f(x):
        sparse = (x * (x > 0)).to_sparse()
        complex_ = torch.view_as_complex(torch.stack([x, x], -1)).conj()
        halves = x.half(), x.bfloat16(), x.to(torch.float8_e4m3fn), x > 0
        return (sparse * 2).to_dense(), complex_ * 2, halves, x.long(), x[:0].sin()

    assert check_replay(f, make(4, 4, seed=1)).values > 12


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_compared():
    def f(x):
        ragged = torch.nested.as_nested_tensor([x[0], x[1][:3]])
        return torch.nested.to_padded_tensor((ragged * 2.0).sin(), 0.0)

    assert check_replay(f, make(2, 5, 8, seed=1)).nbytes > 3 * 64 * 8


def test_calls_and_gradients_inside_a_call_agree():
    @ckpt(policy=policies.save_only_these_names("y"), prune=True)
    def inner(x):
        return (checkpoint_name(x.sin(), "y").exp() * x).sum()

    def f(x):
        slopes = vmap(grad(inner))(x) + grad(inner)(x)
        for _ in range(3):
            slopes = slopes + grad(inner)(x * slopes)
        return slopes * inner(x)

    assert check_replay(ckpt(f), make(4, 4, seed=1)).operations > 30


def test_compiled_functions_run_eagerly():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: dropout(x.sin(), 0.5).sin(), backend="eager")
    x = make(100, seed=1)
    compiled(x)
    with count_ops() as ops:
        assert check_replay(lambda x: compiled(x) * 2.0, x).operations >= 5
    assert ops["sin"] == 4
    torch.compiler.reset()


def test_a_function_may_have_no_floating_point_arguments():
    assert check_replay(lambda i: i * 2, torch.arange(3)).operations == 1
    weight = make(3, seed=1).requires_grad_()
    assert check_replay(lambda: weight.sin()).operations == 1
    assert check_replay(lambda: None).operations == 0


def test_the_arguments_and_the_caller_s_graph_are_left_alone():
    x = make(3, seed=1).requires_grad_()
    h = x.sin()
    check_replay(lambda h: h.exp(), h)
    assert (h._version, x.grad) == (0, None)
    assert torch.equal(torch.autograd.grad(h.sum(), x)[0], x.cos())


# --- Where it is refused, what it costs ---


def test_check_replay_is_refused_under_transforms():
    with pytest.raises(RuntimeError, match="check_replay was called under a transform"):
        grad(lambda x: (check_replay(torch.sin, x), x.sum())[1])(torch.ones(3))
    check_replay(grad(lambda x: ckpt(torch.sin)(x).sum()), torch.ones(3))


def test_tensors_without_values_are_refused():
    with pytest.raises(RuntimeError, match="meta or fake tensor has none"):
        check_replay(torch.sin, torch.ones(3, device="meta"))
    with FakeTensorMode(), pytest.raises(RuntimeError, match="fake tensor has none"):
        check_replay(torch.sin, torch.ones(3))


def test_check_replay_takes_the_memory_of_a_copy_of_all_values():
    size, steps = 4000, 10

    def f(x):
        for _ in range(steps):
            x = x.sin()
        return x

    x = torch.ones(size)
    check_replay(f, x)
    found = check_replay(f, x)
    assert found.nbytes == (steps + 1) * 4 * size
    most = peak_bytes(lambda: check_replay(f, x))
    # The copies; what the graph of a forward holds; a result, and its bits compared.
    assert found.nbytes <= most <= 2 * found.nbytes + 16 * size


def test_the_values_compared_are_dropped_and_nothing_is_left():
    x, kept = torch.ones(1000), []

    def f(x):
        return x.sin().sin()

    check_replay(f, x)
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        kept.append(check_replay(f, x))
    events = profiler.kineto_results.events()
    assert sum(e.nbytes() for e in events if e.name() == "[memory]") == 0
    assert tree_leaves(kept[0]) == [Agreement(2, 3, 12000)]


def examples(page):
    """Examples of a page that print, with what the page says that they print."""
    text = (Path(__file__).parents[2] / "docs" / "api" / page).read_text()
    pair = re.compile(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL
    )
    return [match.groups() for match in pair.finditer(text)]


@pytest.mark.parametrize("page", ["testing.md", "residuals.md"])
def test_the_examples_of_the_page_print_what_it_says(page, capsys):
    namespace = {"__name__": "example"}
    assert examples(page)
    for code, printed in examples(page):
        exec(compile(code, "model.py", "exec"), namespace)
        assert capsys.readouterr().out.split() == printed.split()
