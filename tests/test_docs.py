"""Every Python example in the README and the docs runs, page by page, in order.

What docs/limits.md says in words is tested below, in the order of that page.
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
from torch import nn
from torch.autograd import forward_ad
from torch.func import jacrev
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat.random as keyed
from remat import CaptureError, MutationError, RandomnessError, remat
from remat.testing import count_ops


ROOT = Path(__file__).parent.parent
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


def ones(*shape):
    return torch.ones(*shape, requires_grad=True)


def gradient(out, leaf):
    return torch.autograd.grad(out.sum(), leaf)[0]


def test_side_effects_run_again():
    ran = []

    def fn(x):
        ran.append(1)
        return x.sin()

    remat(fn)(ones(3)).sum().backward()
    assert len(ran) == 2


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_attributes_and_variables_are_handed_over_from_the_first_run_only():
    calls, scale = 0, torch.ones(3)

    def fn(x):
        nonlocal calls
        calls += 1
        return x.sin() * scale

    module = Counting(3, 3)
    with count_ops() as ops:
        (remat(module)(ones(3)) + remat(fn)(ones(3))).sum().backward()
    assert ops["sin"] == 2, "recomputed"
    assert (module.calls, calls) == (1, 1)


def test_what_a_captured_container_of_tensors_becomes_is_handed_over_once():
    held, seen, empty = {"w": torch.ones(3), "v": 1}, [torch.ones(3)], []

    def fn(x):
        held["last"] = held.pop("v")
        seen.append(None)
        empty.append(None)
        return x.sin()

    with count_ops() as ops:
        remat(fn)(ones(3)).sum().backward()
    assert ops["sin"] == 2
    assert [*held] == ["w", "last"]
    assert (len(seen), len(empty)) == (2, 2)


def test_other_changes_to_containers_are_refused():
    held = {"inner": {"w": torch.ones(3)}}
    with pytest.raises(CaptureError, match="a container within a captured dict"):
        remat(lambda x: x * held["inner"].pop("w"))(ones(3))
    with pytest.raises(CaptureError, match="changed a container that it was passed"):
        remat(lambda x, held: x * held.pop("w"))(ones(3), {"w": torch.ones(3)})


def test_a_change_to_a_captured_set_of_tensors_is_lost():
    held = {torch.ones(3)}

    def fn(x):
        held.add(torch.zeros(3))
        return x.sin()

    with count_ops() as ops:
        remat(fn)(ones(3)).sum().backward()
    assert ops["sin"] == 2
    assert len(held) == 1


def test_loop_variables_and_module_attributes_are_those_of_the_forward():
    x, out = ones(3), torch.zeros(3)
    for scale in (1.0, 2.0, 3.0):
        out = out + remat(lambda x: x.sin() * scale)(x)  # noqa: B023
    dropout = nn.Dropout(0.5)
    y = remat(dropout)(x)
    dropout.eval()
    assert torch.equal(gradient(y, x), y)
    with count_ops() as ops:
        got = gradient(out, x)
    assert torch.allclose(got, 6 * x.cos())
    assert ops["sin"] == 3


def test_entries_of_plain_containers_and_attributes_of_objects_are_read_again():
    config, options, x = {"scale": 1.0}, SimpleNamespace(scale=1.0), ones(3)
    y = remat(lambda x: x * config["scale"] * options.scale)(x)
    config["scale"], options.scale = 5.0, 2.0
    assert torch.equal(gradient(y, x), torch.full((3,), 10.0))


class Scale(TorchFunctionMode):
    factor = 2.0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * self.factor if func is torch.Tensor.sin else out


def test_the_attributes_of_a_mode_without_tensors_are_those_of_the_backward():
    x = ones(3)
    with Scale() as mode:
        y = remat(torch.Tensor.sin)(x)
    mode.factor = 5.0
    assert torch.equal(gradient(y, x), 5 * x.cos())


settings = ModuleType("settings")
settings.CONSTANT = torch.ones(3)
settings.WEIGHT = ones(3)


def test_attributes_of_python_modules_are_not_found():
    with pytest.raises(CaptureError, match="no input of the call"):
        remat(lambda x: x * settings.WEIGHT)(ones(3))
    x = ones(3)
    y = remat(lambda x: (x * settings.CONSTANT).square())(x)
    settings.CONSTANT.fill_(2.0)
    assert torch.equal(gradient(y, x), torch.full((3,), 8.0))


local = threading.local()


def test_a_stream_in_a_thread_local_variable_is_not_found():
    local.stream = random.Random(5)
    x = ones(3)
    y = remat(lambda x: x * local.stream.random())(x)
    assert not torch.equal(gradient(y, x), y)


@pytest.mark.parametrize(("others", "found"), [(100, True), (500, False)])
def test_a_stream_is_looked_for_among_three_hundred_values(others, found):
    x = ones(3)
    held = [random.Random(5)], [[i] for i in range(others)]
    source = itertools.repeat(held)
    y = remat(lambda x: x * next(source)[0][0].random())(x)
    assert torch.equal(gradient(y, x), y) is found


def test_what_the_operating_system_draws_is_not_replayed():
    x, source = ones(3), random.SystemRandom()
    y = remat(lambda x: x * source.random())(x)
    assert not torch.equal(gradient(y, x), y)
    y = remat(lambda x: x * np.random.default_rng().random())(x)
    assert not torch.equal(gradient(y, x), y)


FIRST_USE_OF_NUMPY = """
import numpy, torch
from remat import remat

x = torch.ones(3, requires_grad=True)
for _ in range(2):
    y = remat(lambda x: x * numpy.random.rand())(x)
    print(torch.equal(torch.autograd.grad(y.sum(), x)[0], y))
"""


def test_the_first_use_of_numpy_random_is_replayed():
    command = [sys.executable, "-c", FIRST_USE_OF_NUMPY]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["True", "True"]


def test_a_closure_over_a_model_takes_all_of_it():
    model = nn.ModuleDict({"block": nn.Linear(3, 3), "other": nn.Linear(3, 3)})
    inputs = {
        remat(fn)(ones(3)).grad_fn: size
        for fn, size in ((lambda x: model["block"](x), 5), (model["block"], 3))
    }
    assert [len(node.next_functions) for node in inputs] == list(inputs.values())


def test_inside_a_module_is_a_replica():
    seen = []

    class Module(nn.Linear):
        def forward(self, x):
            seen.append(self)
            return super().forward(x)

    module = Module(3, 3)
    remat(module)(ones(3))
    assert seen[0] is not module


def test_an_intermediate_that_leaves_has_no_gradient():
    kept = []

    def fn(x):
        kept.append(x.sin())
        return x.cos()

    remat(fn)(ones(3))
    with pytest.raises(CaptureError, match="left it other than by being returned"):
        kept.pop().sum().backward()
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


def test_a_result_that_hides_tensors_is_refused():
    with pytest.raises(CaptureError, match="Return a pytree of tensors"):
        remat(lambda x: SimpleNamespace(y=x.sin()))(ones(3))


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
        return super().forward(x)


def test_an_assignment_to_data_is_refused():
    with pytest.raises(MutationError, match="`weight` was changed"):
        remat(Assigning(3, 3))(ones(3))


def test_an_assignment_to_the_data_of_a_frozen_parameter_is_not_seen():
    module = Assigning(3, 3).requires_grad_(False)
    before = module.weight.clone()
    remat(module)(ones(3)).sum().backward()
    assert torch.equal(module.weight, before / 4)


def both(x, y):
    return x.sin(), y.exp()


def test_two_partial_backwards_need_the_graph_retained():
    x, y = ones(3), ones(3)
    a, b = remat(both)(x, y)
    a.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        b.sum().backward()
    a, b = remat(both)(x, y)
    a.sum().backward(retain_graph=True)
    b.sum().backward()
    assert torch.equal(y.grad, y.exp())


def test_a_gradient_costs_what_all_inputs_that_require_grad_cost():
    def fn(x, y):
        return x.sin() * y.exp()

    muls = {}
    for requires_grad in (True, False):
        x, y = ones(3), torch.ones(3, requires_grad=requires_grad)
        out = remat(fn)(x, y)
        with count_ops() as ops:
            gradient(out, x)
        assert (ops["sin"], ops["exp"]) == (1, 1)
        muls[requires_grad] = ops["mul"]
    assert muls == {True: 5, False: 3}


def test_shared_memory_is_protected_but_not_under_forward_mode():
    x = ones(3, 3) * 1
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        remat(lambda x: x[0])(x).mul_(2)
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        remat(lambda x: (y := x.sin(), y.view(-1)))(x)[0].mul_(2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, 3), torch.ones(3, 3))
        remat(lambda x: x[0])(dual).mul_(2)


def test_a_view_as_complex_is_a_copy():
    x = ones(3, 2)
    view, copy = (fn(x) for fn in (torch.view_as_complex, remat(torch.view_as_complex)))
    assert torch.equal(view, copy)
    assert view.data_ptr() == x.data_ptr() != copy.data_ptr()


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


def test_backward_inside_is_refused():
    with pytest.raises(CaptureError, match=r"calls backward\(\)"):
        remat(lambda x: x.sum().backward())(ones(3))


def test_intermediates_can_be_kept_detached():
    kept = []

    def fn(x):
        kept.append(x.sin().detach())
        return x.cos()

    for _ in range(3):
        with count_ops() as ops:
            remat(fn)(ones(3)).sum().backward()
        assert ops["cos"] == 2, "recomputed"


def test_torch_checkpoint_inside():
    x = ones(3)
    y = remat(lambda x: torch_checkpoint(torch.sin, x, use_reentrant=False))(x)
    with count_ops() as ops:
        assert torch.equal(gradient(y, x), x.cos())
    assert ops["sin"]
    y = remat(lambda x: torch_checkpoint(torch.sin, x, use_reentrant=True))(x)
    with pytest.raises(RuntimeError, match=r"incompatible with \.grad\(\)"):
        y.sum().backward()


def drop_squares(x):
    return nn.functional.dropout(x * x)


def drop_squares_by_key(x):
    return keyed.dropout(keyed.key(0), x * x, 0.5)


def test_a_batch_of_cotangents_is_of_the_draws_of_the_forward():
    torch.manual_seed(3)
    y = drop_squares(torch.ones(8))
    torch.manual_seed(3)
    assert torch.equal(jacrev(remat(drop_squares))(torch.ones(8)), (2 * y).diag())


def test_a_batch_of_recomputations_that_draw_is_refused():
    x, match = ones(8), "random operation"
    y = remat(drop_squares)(x)
    with pytest.raises(RuntimeError, match=match):
        torch.autograd.grad(y, x, torch.eye(8), is_grads_batched=True)
    with pytest.raises(RuntimeError, match=match):
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


def test_a_generator_made_in_the_first_call_and_kept_is_not_replayed_then():
    kept, x = {}, ones(8)

    def fn(x):
        if "g" not in kept:
            kept["g"] = torch.Generator().manual_seed(0)
        return x * torch.rand(8, generator=kept["g"])

    for replayed in False, True:
        y = remat(fn)(x)
        assert torch.equal(gradient(y, x), y.detach()) == replayed


def test_the_count_of_spawned_generators_is_not_replayed():
    x, source = ones(8), np.random.default_rng(0)
    y = remat(lambda x: x * float(source.spawn(1)[0].random()))(x)
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
    y = remat(lambda x: x * settings.state.generator.random())(x)
    assert not torch.equal(gradient(y, x), y.detach())


def test_a_generator_that_is_only_copied_is_not_replayed():
    x, source = ones(8), random.Random(5)
    y = remat(lambda x: x * copy.copy(source).random())(x)
    source.random()
    assert not torch.equal(gradient(y, x), y.detach())
