"""Every Python example in the README and the docs runs, page by page, in order.

What docs/limits.md says in words is tested below, and what docs/randomness.md says of
draws that are not replayed or not seen.
"""

import copy
import itertools
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from support.zoo import Evaluations
from torch import nn
from torch.autograd import forward_ad
from torch.func import jacrev
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat.random as keyed
from remat import (
    CaptureError,
    MutationError,
    RandomnessError,
    RecomputeError,
    remat,
)
from remat.testing import count_ops


ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    """The examples of a page, each with the line it starts at."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start(1)), match[1]


WITH_EXAMPLES = [page for page in PAGES if any(blocks(page))]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_the_examples_of_the_page_run(page):
    namespace = {"__name__": "example"}
    for line, code in blocks(page):
        # Blank lines in front make a traceback name the line in the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_the_readme_and_the_quickstart_have_examples():
    assert {"README.md", "quickstart.md"} <= {page.name for page in WITH_EXAMPLES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_point_at_files(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
        # Notebooks are copied next to the pages when the docs are built.
        path = page.parent / target
        if page.parent.name == "docs" and target.startswith("notebooks/"):
            path = ROOT / target
        assert path.exists(), f"{page.name} links to {target}"


# --- docs/limits.md ---


def test_the_limits_are_a_page():
    assert len((ROOT / "docs/limits.md").read_text().split()) < 750


def ones(*shape):
    return torch.ones(*shape, requires_grad=True)


def gradient(out, leaf):
    return torch.autograd.grad(out.sum(), leaf)[0]


def test_prints_run_again_and_changes_to_lists_do_not(capsys):
    ran = []

    def fn(x):
        ran.append(1)
        print("here")  # noqa: T201
        return x.sin().exp()

    remat(fn)(ones(3)).sum().backward()
    assert len(ran) == 1
    assert capsys.readouterr().out.split() == ["here", "here"]


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_attributes_and_variables_are_changed_by_the_forward_only():
    calls, scale = 0, torch.ones(3)

    def fn(x):
        nonlocal calls
        calls += 1
        return x.sin().sin() * scale

    module = Counting(3, 3)
    with count_ops() as ops:
        (
            remat(lambda x: module(x).cos())(ones(3)) + remat(fn)(ones(3))
        ).sum().backward()
    assert (ops["sin"], ops["addmm"]) == (2 + 1 + 1, 2), "recomputed"
    assert (module.calls, calls) == (1, 1)


def test_captured_containers_are_changed_by_the_forward_only():
    held, seen, tensors = {"w": torch.ones(3), "v": 1}, [], {torch.ones(3)}

    def fn(x):
        held["last"] = held.pop("v")
        seen.append(None)
        tensors.add(torch.zeros(3))
        return x.sin().sin()

    with count_ops() as ops:
        remat(fn)(ones(3)).sum().backward()
    assert ops["sin"] == 3
    assert [*held] == ["w", "last"]
    assert (len(seen), len(tensors)) == (1, 2)


def test_containers_within_and_those_passed_are_changed_by_the_forward_only():
    held, x = {"inner": {"w": torch.full((3,), 2.0)}}, ones(3)

    def popping(x, held):
        return (x * held["inner"].pop("w")).exp()

    for fn, args in ((lambda x: popping(x, held), ()), (popping, (held,))):
        held["inner"]["w"] = torch.full((3,), 2.0)
        y = remat(fn)(x, *args)
        assert held == {"inner": {}}
        with count_ops() as ops:
            assert torch.equal(gradient(y, x), 2 * y)
        assert ops["exp"] == 1
        assert held == {"inner": {}}


def test_loop_variables_and_module_attributes_are_those_of_the_forward():
    x, out, want = ones(3), torch.zeros(3), torch.zeros(3)
    for scale in (1.0, 2.0, 3.0):
        fn = lambda x: (x.sin() * scale).exp()  # noqa: B023
        out, want = out + remat(fn)(x), want + fn(x)
    dropout = nn.Dropout(0.5)
    y = remat(dropout)(x)
    dropout.eval()
    assert torch.equal(gradient(y, x), y)
    with count_ops() as ops:
        got = gradient(out, x)
    assert torch.equal(got, gradient(want, x))
    assert ops["exp"] == 3


def test_entries_of_containers_and_attributes_of_objects_are_those_of_the_forward():
    config, options, x = {"scale": 1.0}, SimpleNamespace(scale=1.0), ones(3)
    y = remat(lambda x: (x * config["scale"] * options.scale).exp())(x)
    config["scale"], options.scale = 5.0, 2.0
    with count_ops() as ops:
        assert torch.equal(gradient(y, x), y)
    assert ops["exp"] == 1
    assert (config["scale"], options.scale) == (5.0, 2.0)


class Scale(TorchFunctionMode):
    factor = 2.0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * self.factor if func is torch.Tensor.sin else out


def test_the_attributes_of_a_mode_are_those_of_the_forward():
    def fn(x):
        return x.sin().exp()

    x = ones(3)
    with Scale() as mode:
        y, want = remat(fn)(x), fn(x)
    mode.factor = 5.0
    with count_ops() as ops:
        got = gradient(y, x)
    assert torch.equal(got, gradient(want, x))
    assert (ops["sin"], ops["exp"]) == (1, 1)


settings = ModuleType("settings")
settings.CONSTANT = torch.ones(3)
settings.WEIGHT = ones(3)


def test_attributes_of_python_modules_are_not_found():
    x = ones(3)

    def fn(x):
        return (x * settings.WEIGHT).exp()

    assert torch.equal(gradient(remat(fn)(x), settings.WEIGHT), gradient(fn(x), x))
    with pytest.raises(CaptureError, match="no input of the call"):
        torch.func.grad(lambda x: remat(fn)(x).sum())(x)
    y = remat(lambda x: (x * settings.CONSTANT).square())(x)
    settings.CONSTANT.fill_(2.0)
    assert torch.equal(gradient(y, x), torch.full((3,), 8.0))


class Config:
    scale = 2.0


def scaled(x, scale):
    return (x * scale).sin()


def test_attributes_of_classes_are_read_as_they_are_by_then():
    x = ones(3)
    y = remat(lambda x: scaled(x, Config.scale))(x)
    Config.scale = 5.0
    with count_ops() as ops:
        got = gradient(y, x)
    Config.scale = 2.0
    assert ops["sin"] == 0
    # The sine's part is of the recompute; what the product saved is a number.
    assert torch.equal(got, 2 * (5 * x).cos())


def test_what_hooks_close_over_is_neither_put_back_nor_are_its_changes_dropped():
    module, seen, factor = nn.Linear(3, 3), [], [2.0]

    def hook(module, args, out):
        seen.append(None)
        return out * factor[0]

    module.register_forward_hook(hook)
    x = ones(3)
    y, want = remat(lambda x: module(x).sin())(x), module(x).sin()
    assert len(seen) == 2
    factor[0] = 5.0
    with count_ops() as ops:
        got = gradient(y, x)
    assert ops["addmm"] + ops["addmv"] == 1
    assert len(seen) == 3
    assert not torch.equal(got, gradient(want, x))


@pytest.mark.parametrize(("size", "is_put_back"), [(1000, True), (1001, False)])
def test_arrays_are_put_back_up_to_a_thousand_entries(size, is_put_back):
    x, array = ones(3), np.ones(size)

    def fn(x):
        array[0] += 1
        return scaled(x, float(array[0]))

    y = remat(fn)(x)
    with count_ops() as ops:
        got = gradient(y, x)
    assert ops["mul"] == 1 + 2
    assert torch.equal(got, 2 * (2 * x).cos()) is is_put_back
    assert array[0] == (2 if is_put_back else 3)


@pytest.mark.parametrize("size", [1000, 1001])
def test_objects_in_a_list_are_put_back_however_many_they_are(size):
    x, held = ones(3), [SimpleNamespace(scale=2.0) for _ in range(size)]
    y = remat(lambda x: scaled(x, held[0].scale))(x)
    held[0].scale = 5.0
    with count_ops() as ops:
        got = gradient(y, x)
    assert ops["mul"] == 1 + 2
    assert torch.equal(got, 2 * (2 * x).cos())


@pytest.mark.parametrize(
    ("size", "error", "match"),
    [
        (1000, MutationError, r"`held\[0\]` was changed in place"),
        (1001, RecomputeError, "`held` changed since the call"),
    ],
)
def test_tensors_in_a_list_are_watched_however_many_they_are(size, error, match):
    x, held = ones(3), [torch.full((3,), 2.0) for _ in range(size)]
    y = remat(lambda x: (x * held[0].cos()).sin())(x)
    held[0].fill_(5.0)
    with pytest.raises(error, match=match):
        gradient(y, x)


@pytest.mark.parametrize(("rows", "may_change"), [(128, True), (129, False)])
def test_captured_tensors_without_a_gradient_may_change_if_they_are_small(
    rows, may_change
):
    x, table = ones(3), torch.zeros(rows, 128)

    def fn(x):
        table.add_(1)
        return (x * table[0, :3]).sin()

    if may_change:
        with count_ops() as ops:
            got = gradient(remat(fn)(x), x)
        assert ops["add_"] == 2
        assert torch.equal(got, x.cos())
        assert torch.equal(table, torch.ones(rows, 128))
    else:
        with pytest.raises(MutationError, match="`table` was changed in place inside"):
            remat(fn)(x)


def test_a_derivative_inside_runs_the_function_once_more():
    ran = Evaluations()

    def fn(x):
        ran.note(None)
        (inner,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        return inner.tanh()

    x = ones(3)
    got = gradient(remat(fn)(x), x)
    assert len(ran) == 3
    assert torch.equal(got, gradient(fn(x), x))


def test_generators_are_read_once():
    def fn(x, numbers):
        return scaled(x, next(numbers))

    numbers, x = (n for n in (2.0, 3.0)), ones(3)
    with pytest.raises(CaptureError, match="`numbers` is a generator"):
        remat(fn)(x, numbers)
    y = remat(lambda x: fn(x, numbers))(x)
    with pytest.raises(RecomputeError, match="reads the generator `numbers`"):
        gradient(y, x)


def times(x, number):
    """The backward reads the number as a tensor, made again in a recompute."""
    return x * torch.tensor(float(number))


local = threading.local()


def test_a_stream_in_a_thread_local_variable_is_not_found():
    local.stream = random.Random(5)
    x = ones(3)
    y = remat(lambda x: times(x, local.stream.random()))(x)
    assert not torch.equal(gradient(y, x), y)


@pytest.mark.parametrize(("others", "found"), [(100, True), (500, False)])
def test_a_stream_is_looked_for_among_three_hundred_values(others, found):
    x = ones(3)
    held = [random.Random(5)], [[i] for i in range(others)]
    source = itertools.repeat(held)
    y = remat(lambda x: times(x, next(source)[0][0].random()))(x)
    assert torch.equal(gradient(y, x), y) is found


def test_what_the_operating_system_draws_is_not_replayed():
    x, source = ones(3), random.SystemRandom()
    y = remat(lambda x: times(x, source.random()))(x)
    assert not torch.equal(gradient(y, x), y)
    y = remat(lambda x: times(x, np.random.default_rng().random()))(x)
    assert not torch.equal(gradient(y, x), y)


FIRST_USE_OF_NUMPY = """
import numpy, torch
from remat import remat

x = torch.ones(3, requires_grad=True)
for _ in range(2):
    y = remat(lambda x: x * torch.tensor(float(numpy.random.rand())))(x)
    print(torch.equal(torch.autograd.grad(y.sum(), x)[0], y))
"""


def test_the_first_use_of_numpy_random_is_replayed():
    command = [sys.executable, "-c", FIRST_USE_OF_NUMPY]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["True", "True"]


def test_inside_a_module_is_itself():
    seen = Evaluations()

    class Module(nn.Linear):
        def forward(self, x):
            seen.note(self)
            return super().forward(x).exp()

    module = Module(3, 3)
    remat(module)(ones(3)).sum().backward()
    assert [m is module for m in seen] == [True, True]


def test_an_intermediate_that_leaves_has_its_gradient_at_base():
    kept = []

    def fn(x):
        kept.append(x.sin().sin())
        return x.cos()

    x = ones(3)
    with count_ops() as ops:
        remat(fn)(x)
        got = gradient(kept.pop(), x)
    assert ops["sin"] == 2 + 1
    assert torch.equal(got, gradient(x.sin().sin(), x))
    with pytest.raises(CaptureError, match="left it other than by being returned"):
        torch.func.grad(lambda x: remat(fn)(x).sum())(torch.ones(3))


def test_an_intermediate_that_leaves_under_func_and_autocast_is_refused():
    kept, x, w = [], torch.ones(3, 3), torch.ones(3, 3)

    def fn(x, w):
        kept.append(x @ w)
        return x.cos() @ w

    def loss(x, w):
        return (remat(fn)(x, w) + kept[-1]).float().sum()

    match = "left it other than by being returned"
    with torch.autocast("cpu"), pytest.raises(CaptureError, match=match):
        torch.func.grad(loss, argnums=(0, 1))(x, w)


def test_a_result_may_be_any_object_at_base():
    def fn(x):
        return SimpleNamespace(y=x.sin().sin())

    x = ones(3)
    with count_ops() as ops:
        got = gradient(remat(fn)(x).y, x)
    assert ops["sin"] == 2 + 1
    assert torch.equal(got, gradient(fn(x).y, x))
    with pytest.raises(CaptureError, match="Return a pytree of tensors"):
        torch.func.grad(lambda x: remat(fn)(x).y.sum())(torch.ones(3))


class Halving(nn.Linear):
    def forward(self, x):
        self.weight.data.mul_(0.5)
        return super().forward(x)


def test_writes_through_data_are_not_seen():
    module = Halving(3, 3)
    before = module.weight.detach().clone()
    remat(module)(ones(3)).sum().backward()
    assert torch.equal(module.weight, before / 4)


class Assigning(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data / 2
        return super().forward(x).exp()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_assignment_to_data_is_refused_where_it_would_be_done_again(is_frozen):
    module = Assigning(3, 3).requires_grad_(not is_frozen)
    before = module.weight.detach().clone()
    y = remat(module)(ones(3))
    with pytest.raises(MutationError, match="`weight` was changed"):
        y.sum().backward()
    assert torch.equal(module.weight, before / 2)


def both(x, y):
    return x.sin(), y.exp()


def test_two_partial_backwards_work_as_in_plain_code():
    x, y = ones(3), ones(3)
    with count_ops() as ops:
        a, b = remat(both)(x, y)
        a.sum().backward()
        b.sum().backward()
    # Nothing is recomputed for the first: its backward reads `x` alone.
    assert (ops["sin"], ops["exp"]) == (1 + 1, 1 + 1)
    assert torch.equal(x.grad, x.cos())
    assert torch.equal(y.grad, y.exp())


def test_a_gradient_costs_what_the_inputs_asked_for_cost():
    def fn(x, y):
        return x.sin() * y.exp()

    x, y = ones(3), ones(3)
    out, plain = remat(fn)(x, y), fn(x, y)
    with count_ops() as ops:
        gradient(out, x)
    with count_ops() as plain_ops:
        gradient(plain, x)
    assert (ops["sin"], ops["exp"]) == (1, 1)
    assert ops["mul"] == plain_ops["mul"] == 2


def test_results_that_share_memory_may_be_changed_in_place():
    for fn in (lambda x: x.sin().sin()[0], lambda x: x.sin().sin().view(-1)):
        results = []
        for wrap in (remat, lambda f: f):
            x = ones(3, 3)
            with count_ops() as ops:
                out = wrap(fn)(x * 1).mul_(2)
                results.append(gradient(out.exp(), x))
            assert ops["sin"] == (3 if wrap is remat else 2)
        assert torch.equal(*results)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, 3), torch.ones(3, 3))
        remat(lambda x: x[0])(dual).mul_(2)


def test_a_view_is_a_view():
    x = ones(3, 2)
    for fn in torch.view_as_complex, torch.t:
        assert remat(fn)(x).data_ptr() == x.data_ptr()


def test_a_tangent_that_plain_leaves_none_is_zeros():
    x, y = torch.ones(3), ones(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3))
        plain = forward_ad.unpack_dual(both(dual, y)[1])
        ours = forward_ad.unpack_dual(remat(both)(dual, y)[1])
    assert plain.tangent is None
    assert torch.equal(ours.tangent, torch.zeros(3))


def test_a_constant_may_require_grad_under_forward_mode():
    x, y = torch.ones(3), ones(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3))
        outs = remat(lambda x, y: (x.sin() * y, y.detach().cos()))(dual, y)
    assert outs[1].requires_grad


def test_backward_inside_runs_once_at_base():
    def fn(x):
        x.sin().sum().backward()
        return x.exp()

    x = ones(3)
    with count_ops() as ops:
        remat(fn)(x).sum().backward()
    assert ops["exp"] == 2
    assert torch.equal(x.grad, x.cos() + x.exp())
    with pytest.raises(CaptureError, match=r"calls backward\(\)"):
        torch.func.grad(lambda x: remat(fn)(x).sum())(torch.ones(3))


def test_intermediates_can_be_kept_detached():
    kept = []

    def fn(x):
        kept.append(x.sin().detach())
        return x.cos().cos()

    for _ in range(3):
        with count_ops() as ops:
            remat(fn)(ones(3)).sum().backward()
        assert ops["cos"] == 2 + 1, "recomputed"
    assert len(kept) == 3


def test_torch_checkpoint_inside():
    def sines(x):
        return x.sin().sin()

    for is_reentrant in (False, True):
        x = ones(3)
        y = remat(lambda x: torch_checkpoint(sines, x, use_reentrant=is_reentrant))(x)  # noqa: B023
        with count_ops() as ops:
            y.sum().backward()
        assert ops["sin"]
        assert torch.equal(x.grad, gradient(sines(x), x))


def drop_squares(x):
    return nn.functional.dropout(x * x)


def drop_squares_by_key(x):
    return keyed.dropout(keyed.key(0), x * x, 0.5)


def test_a_batch_of_cotangents_is_of_the_draws_of_the_forward():
    torch.manual_seed(3)
    y = drop_squares(torch.ones(8))
    torch.manual_seed(3)
    assert torch.equal(jacrev(remat(drop_squares))(torch.ones(8)), (2 * y).diag())


def test_a_batch_of_cotangents_at_base_is_of_the_draws_of_the_forward():
    x = ones(8)
    y = remat(drop_squares)(x)
    with count_ops() as ops:
        (got,) = torch.autograd.grad(y, x, torch.eye(8), is_grads_batched=True)
    assert ops["bernoulli_"] == 1
    assert torch.equal(got, (2 * y).diag())


def test_a_batch_of_recomputations_that_draw_is_refused():
    with pytest.raises(RuntimeError, match="random operation"):
        jacrev(jacrev(remat(drop_squares)))(torch.ones(8))


def test_a_batch_of_recomputations_may_draw_from_keys():
    x, fn = ones(8), remat(drop_squares_by_key)
    y = fn(x)
    (got,) = torch.autograd.grad(y, x, torch.eye(8), is_grads_batched=True)
    assert torch.equal(got, (2 * y).diag())
    assert torch.equal(jacrev(jacrev(fn))(x).sum((1, 2)), 2 * y)


def test_draws_are_refused_but_in_traces():
    fn = remat(drop_squares, rng="error")
    refused = pytest.raises(RandomnessError, match="drew from a global random stream")
    for x in ones(3), torch.ones(3):
        for mode in torch.enable_grad, torch.no_grad:
            with refused, mode():
                fn(x)
    make_fx(fn)(ones(3))


def test_a_refused_draw_leaves_the_stream_of_python_alone():
    before = random.getstate()
    with pytest.raises(RandomnessError, match="stream of: Python's random"):
        remat(lambda x: x * random.random(), rng="error")(ones(3))
    assert random.getstate() == before


def test_what_has_no_keyed_version_is_refused_in_bind():
    state = torch.get_rng_state()
    with (
        pytest.raises(RandomnessError, match=r"aten\.poisson.* no\nkeyed version"),
        keyed.bind(keyed.key(0)),
    ):
        torch.poisson(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_that_drops_in_bind_is_written_out():
    q = torch.ones(1, 2, 4, 8)
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    for p, calls in ((0.0, 1), (0.5, 0)):
        with count_ops() as ops, keyed.bind(keyed.key(0)):
            nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=p)
        assert ops[fused] == calls


def test_a_generator_made_in_the_first_call_and_kept_is_replayed():
    kept, x = {}, ones(8)

    def fn(x):
        if "g" not in kept:
            kept["g"] = torch.Generator().manual_seed(0)
        return x * torch.rand(8, generator=kept["g"])

    for _ in range(2):
        y = remat(fn)(x)
        with count_ops() as ops:
            assert torch.equal(gradient(y, x), y.detach())
        assert ops["rand"] == 1


def test_the_count_of_spawned_generators_is_not_replayed():
    x, source = ones(8), np.random.default_rng(0)
    y = remat(lambda x: times(x, source.spawn(1)[0].random()))(x)
    assert not torch.equal(gradient(y, x), y.detach())


def test_a_thread_that_a_bound_block_starts_draws_from_the_global_stream():
    drawn = []
    thread = threading.Thread(target=lambda: drawn.append(torch.rand(3)))
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    with keyed.bind(keyed.key(0)):
        thread.start()
        thread.join()
    assert torch.equal(drawn[0], want)


def test_a_coroutine_that_waits_in_a_bound_block_leaves_it_open():
    def waiting():
        with keyed.bind(keyed.key(0)):
            yield

    block = waiting()
    next(block)
    meanwhile = torch.rand(3)
    assert not [*block]
    assert torch.equal(meanwhile, keyed.bind(keyed.key(0))(torch.rand)(3))


def test_seeding_in_a_bound_block_seeds_the_global_stream_and_changes_no_draw():
    torch.manual_seed(11)
    want = torch.rand(3)
    with keyed.bind(keyed.key(0)):
        torch.manual_seed(11)
        drawn = torch.rand(3)
    assert torch.equal(torch.rand(3), want)
    assert torch.equal(drawn, keyed.bind(keyed.key(0))(torch.rand)(3))


def test_a_compiled_function_in_a_bound_block_is_not_compiled():
    traced = []

    def backend(graph, inputs):
        traced.append(inputs)
        return graph

    fn = torch.compile(drop_squares, backend=backend)
    whole = torch.compile(drop_squares, backend=backend, fullgraph=True)
    bind = keyed.bind(keyed.key(0))
    with bind:
        assert torch.equal(fn(torch.ones(9)), bind(drop_squares)(torch.ones(9)))
        with pytest.raises(RuntimeError, match="fullgraph"):
            whole(torch.ones(9))
    assert not traced


def test_a_refused_draw_undoes_one_of_another_thread_at_that_moment():
    library = torch.library.Library("remat_test_docs", "DEF")
    library.define("slow(Tensor x) -> Tensor")

    def slow(x):
        thread = threading.Thread(target=torch.rand, args=(3,))
        thread.start()
        thread.join()
        return x.clone()

    library.impl("slow", slow, "CPU")
    state = torch.get_rng_state()
    refused = pytest.raises(RandomnessError, match="slow")
    with refused, keyed.bind(keyed.key(0)):
        torch.ops.remat_test_docs.slow(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_in_an_object_of_a_module_is_not_found():
    x = ones(8)
    settings.state = SimpleNamespace(generator=random.Random(5))
    y = remat(lambda x: times(x, settings.state.generator.random()))(x)
    assert not torch.equal(gradient(y, x), y.detach())


def test_a_generator_that_is_only_copied_is_not_replayed():
    x, source = ones(8), random.Random(5)
    y = remat(lambda x: times(x, copy.copy(source).random()))(x)
    source.random()
    assert not torch.equal(gradient(y, x), y.detach())
