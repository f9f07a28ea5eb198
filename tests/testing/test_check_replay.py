"""`check_replay` finds equal what is replayed, and says what it compared."""

import itertools
import re
import types
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from support.tables import rows
from support.zoo import ZOO, make, plainly
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import dropout
from torch.utils._pytree import tree_leaves

from remat import (
    MutationError,
    RecomputeError,
    policies,
    remat as ckpt,
)
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page", ["testing.md", "residuals.md"])
def test_the_examples_of_the_page_print_what_it_says(page, capsys):
    namespace = {"__name__": "example"}
    assert examples(page)
    for code, printed in examples(page):
        exec(compile(code, "model.py", "exec"), namespace)
        assert capsys.readouterr().out.split() == printed.split()


# --- Differences that it finds ---


def line_of(fn, offset=1):
    return f"{__file__}:{fn.__code__.co_firstlineno + offset}, in {fn.__name__}"


def in_turn(*values):
    """Return what gives the values one after the other, in a recompute too."""
    queue = SimpleQueue()
    for value in values:
        queue.put(value)
    return queue.get_nowait


def difference(fn, *args, **kwargs):
    """What is said of the first operation that differs."""
    with pytest.raises(RecomputeError, match=r"^remat: recomputing `") as caught:
        check_replay(fn, *args, **kwargs)
    return str(caught.value)


# --- Python ---


def test_another_operation_is_shown_with_both_sequences():
    count = in_turn(*range(9))

    def f(x):
        h = x.sin().exp()
        h = h.cos() if count() == 0 else h.tanh().abs()
        return h * x

    text = difference(f, make(3, seed=1))
    assert text.startswith("remat: recomputing `test_another")
    assert f"Operation 2, aten.tanh.default at {line_of(f, 2)}, was aten.cos" in text
    first, then = f"# {line_of(f, 1)}", f"# {line_of(f, 2)}"
    assert text.splitlines()[1:] == [
        "  forward (4 operations):",
        f"    0: aten.sin.default  {first}",
        f"    1: aten.exp.default  {first}",
        f"  > 2: aten.cos.default  {then}",
        f"    3: aten.mul.Tensor  # {line_of(f, 3)}",
        "  recompute (5 operations):",
        f"    0: aten.sin.default  {first}",
        f"    1: aten.exp.default  {first}",
        f"  > 2: aten.tanh.default  {then}",
        f"    3: aten.abs.default  {then}",
        f"    4: aten.mul.Tensor  # {line_of(f, 3)}",
    ]


def test_an_error_in_the_recomputation_alone_is_shown_with_the_first_difference():
    flag = in_turn(True, False)

    def f(x):
        h = x.sin() if flag() else x.cos()
        if h[0] != x.sin()[0]:
            raise ValueError("this cannot be")
        return h

    with pytest.raises(RecomputeError, match=r"aten\.cos\.default .* was aten\.sin"):
        check_replay(f, make(3, seed=1))


def test_errors_of_the_function_itself_are_its_own():
    def f(x):
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        check_replay(f, torch.ones(3))


def test_a_leaf_may_not_be_changed_as_by_a_call():
    with pytest.raises(RecomputeError, match=r"Operation 0, aten\.mul_\.Tensor"):
        check_replay(lambda x: x.mul_(2.0), torch.ones(3))


def test_an_argument_may_not_be_changed_as_by_remat():
    x = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(MutationError, match="`y` was changed in place"):
        check_replay(lambda x, y: x * y.mul_(2.0), x, torch.ones(3, 3))


UNSEEN = {
    "results": (lambda x, same: (x.sin(),) * (1 + same), "the recompute returned"),
    "gradients": (
        lambda x, same: (x if same else x.detach()).sin(),
        "outputs that require grad",
    ),
    "residuals": (
        lambda x, same: (x if same else x.detach()).exp() * x,
        r"saves something else[\s\S]*no graph",
    ),
}


@rows("fn, match", UNSEEN)
def test_a_difference_that_no_operation_shows_is_found(fn, match):
    flag = in_turn(True, False)
    with pytest.raises(RecomputeError, match=match):
        check_replay(lambda x: fn(x, flag()), torch.ones(3))


# --- Tensors ---


Table = types.ModuleType("Table")  # its attribute is behind a computed name
Table.value = torch.ones(3)


def test_a_global_tensor_that_changed_is_found():
    name = "value"

    def f(x):
        h = x.sin()
        table = getattr(Table, name)
        setattr(Table, name, table * 1.5)
        return h * table

    text = difference(f, make(3, seed=1).float())
    assert f"aten.mul.Tensor at {line_of(f, 3)}, differs: input 0 (float32[3]) " in text
    assert "differs in 3 of 3 elements, by up to 0.5." in text
    assert "It is from outside of the function, and had another value in" in text


def adds_to(array):
    def f(x):
        array[1] += 0.25
        return x.sin() * torch.from_numpy(array[:3])

    return f


def test_memory_that_numpy_changed_is_found():
    f = adds_to(np.arange(600_000.0))  # too large to be watched
    text = difference(f, make(3, seed=1))
    where = f"at {line_of(f, 2)}, differs: input 0 (float64[3]) differs in 1 of 3 "
    assert where + "elements, by up to 0.25. It is from outside of the function" in text


def test_memory_of_a_small_array_of_numpy_is_put_back():
    small = np.array([1.0, 2.0, 3.0])
    assert check_replay(adds_to(small), make(3, seed=1)).operations == 3


library = torch.library.Library("check_replay_test", "FRAGMENT")
library.define("noisy(Tensor x) -> Tensor")
library.define("scribble(Tensor(a!) x) -> ()")
_calls = itertools.count(1)


@torch.library.impl(library, "noisy", "CPU")
def _noisy(x):
    out = x * 2
    out[0] += next(_calls)
    return out


@torch.library.impl(library, "scribble", "CPU")
def _scribble(x):
    x[-1] = next(_calls)


def test_a_difference_in_a_call_inside_is_found():
    count = in_turn(*range(9))

    @ckpt
    def inner(x):
        return x.sin() * count()

    @ckpt
    def outer(x):
        return inner(x.exp())

    text = difference(outer, make(3, seed=1))
    assert text.startswith(
        "remat: recomputing `test_a_difference_in_a_call_inside_is_found.<loc"
    )
    assert f"Operation 2, aten.mul.Tensor at {line_of(inner.__wrapped__, 2)}" in text


def noisy_and_read(x):
    h = x.sin()
    with torch.no_grad():
        noise = torch.ops.check_replay_test.noisy(h)
    return (noise * h).exp()


def scribbled_and_read(x):
    h = x.exp()
    with torch.no_grad():
        torch.ops.check_replay_test.scribble(h[1:])
    return h.detach() * x


def caught(x, turn):
    try:
        h = x * turn()
    except RuntimeError:
        h = x * 1.0
    return h.exp().sin()


def sines(x, turn):
    for _ in range(turn()):
        x = x.sin()
    return x


def scaled(x, turn):
    return x[:1] * torch.tensor(turn())


# What `turn` gives in the forward and in the recompute, a function, and what is said.
DIFFERENCES = {
    "a number": (
        *((0, 1), lambda x, turn: x.sin() + turn(), "Operation 1, aten.add.Tensor at"),
        "has the arguments (_, 1), in the forward (_, 0)",
    ),
    "more": (
        *((2, 3), sines, "Operation 2, aten.sin.default at"),
        *("is one more than the forward ran.", "  > nothing more\n"),
    ),
    "fewer": (
        *((3, 2), sines, "Operation 2, aten.sin.default at"),
        *("did not run.", "\n  > nothing more"),
    ),
    "another input": (
        *((0, 1), lambda x, turn: (x.sin(), x.cos())[turn()] * x, "Operation 2, aten."),
        *("mul.Tensor at", "differs: output 0", "It reads another tensor."),
    ),
    "another shape": (
        *((2, 3), lambda x, turn: torch.cat([x] * 2)[: turn()].sin(), "aten.slice."),
        "has the arguments (_, 0, 0, 3), in the forward (_, 0, 0, 2)",
    ),
    "an operation": (
        *((), lambda x, turn: noisy_and_read(x), "1, check_replay_test.noisy.default"),
        "output 0 (float64[4]) differs in 1 of 4 elements, by up to 1.",
        "It read the same tensors: the operation itself gives another",
    ),
    "an operation that writes": (
        *((), lambda x, turn: scribbled_and_read(x), "test.scribble.default at"),
        "what it wrote to (0) (float64[3]) differs in 1 of 3 elements",
    ),
    "a sign of zero": ((0.0, -0.0), scaled, "differs in 1 of 1 elements, by up to 0."),
    "the smallest": (
        torch.tensor([1.0, 1.0 + 2.0**-52], dtype=torch.double),
        lambda x, turn: x * turn(),
        "differs in 1 of 1 elements, by up to 2.22045e-16.",
    ),
    "flags": (
        *(([True, True], [True, False]), scaled),
        "(bool[2]) differs in 1 of 2 elements. It",
    ),
    "numbers": (
        ([4], [7]),
        scaled,
        "(int64[1]) differs in 1 of 1 elements, by up to 3.",
    ),
    "complex": (
        *(([0j], [3 + 4j]), scaled),
        "(complex64[1]) differs in 1 of 1 elements, by up to 5.",
    ),
    "nan": (([float("nan")], [1.0]), scaled, "by up to nan"),
    "shapes": (
        *(([1.0], [1.0, 2.0]), scaled),
        "is float32[2], where it was float32[1]",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_the_first_difference_is_said_with_its_line(case):
    values, fn, *said = DIFFERENCES[case]
    turn = in_turn(*values)
    text = difference(lambda x: fn(x, turn), make(4, seed=1))
    assert [each for each in said if each not in text] == []
    assert f" at {__file__}:" in text


def test_only_the_first_difference_is_reported_even_if_the_function_catches_errors():
    turn = in_turn(1.0, 2.0)
    text = difference(lambda x: caught(x, turn), make(3, seed=1))
    assert re.findall(r"Operation \d", text) == ["Operation 0"]
