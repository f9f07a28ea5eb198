"""The measures that judge everything else: operations and bytes, counted exactly."""

import gc
import pickle
import random
import weakref

import pytest
import torch
from support.runs import assert_replayed, gradients, leaf
from support.tables import rows
from support.transforms import some
from support.zoo import plainly
from torch import nn
from torch.func import jvp

from remat import remat
from remat.testing import count_ops, live_bytes, memory_timeline, peak_bytes


def sines(count):
    def fn(x):
        for _ in range(count):
            x = x.sin()
        return x

    return fn


# --- count_ops -----------------------------------------------------------------


def test_counts_by_name_and_zero_for_absent():
    x = torch.randn(3, 3)
    with count_ops() as ops:
        (x @ x).sin().add_(1)
    assert (ops["mm"], ops["sin"], ops["add_"]) == (1, 1, 1)
    assert (ops["add"], ops["cos"]) == (0, 0)


def test_counts_only_inside_the_block():
    x = torch.randn(3)
    x.sin()
    with count_ops() as ops:
        x.sin()
    x.sin()
    assert ops["sin"] == 1


def test_counts_go_on_while_the_block_runs():
    x = torch.randn(3, requires_grad=True)
    with count_ops() as ops:
        y = sines(3)(x).sum()
        forward = ops.copy()
        y.backward()
    assert (forward["sin"], forward["cos"]) == (3, 0)
    assert (ops["sin"], ops["cos"]) == (3, 3)


# Not the table's jvp: it takes the cosine of its input for a tangent.
WAYS = some("grad", "vmap_grad", "grad_vmap") | {
    "jvp": lambda fn, x: jvp(fn, (x,), (x,))
}


@rows("transform", WAYS)
def test_counts_each_kernel_once_under_transforms(transform):
    with count_ops() as ops:
        transform(lambda x: sines(3)(x).sum(), torch.randn(4))
    assert (ops["sin"], ops["cos"]) == (3, 3)


def test_counts_nested_blocks_both():
    x = torch.randn(3)
    with count_ops() as outer:
        x.sin()
        with count_ops() as inner:
            x.sin()
    assert (outer["sin"], inner["sin"]) == (2, 1)


def test_counts_custom_ops_with_their_namespace():
    @torch.library.custom_op("remat_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with count_ops() as ops:
        double(torch.randn(3))
    assert (ops["remat_test::double"], ops["double"]) == (1, 0)


# --- bytes ---------------------------------------------------------------------

UNIT = 4096  # bytes of 1,024 float32


def backward_of(fn):
    x = torch.randn(UNIT // 4, requires_grad=True)

    def step():
        fn(x).sum().backward()
        x.grad = None

    return step


def test_timeline_lists_every_allocation_and_free():
    x = torch.randn(UNIT // 4)
    found = memory_timeline(lambda x: x.sin().cos().sum(), x)
    assert [*zip(found.ops, found.bytes, strict=True)] == [
        ("sin", UNIT),
        ("cos", 2 * UNIT),
        ("", UNIT),  # sin freed
        ("sum", UNIT + 4),
        ("", 4),  # cos freed
    ]
    assert (found.peak, found.peak_op) == (2 * UNIT, "cos")


def test_timeline_names_the_operations_of_a_recompute_and_of_a_backward():
    x = torch.randn(UNIT // 4, requires_grad=True)
    plain, ours = (
        memory_timeline(lambda fn: fn(x).backward(), wrap(lambda x: sines(8)(x).sum()))
        for wrap in (lambda fn: fn, remat)
    )
    assert (plain.ops.count("sin"), ours.ops.count("sin")) == (8, 8 + 7)
    assert plain.ops.count("cos") == ours.ops.count("cos") == 8
    assert plain.ops.count("SinBackward0") > 0
    assert plain.bytes[:8] == tuple(UNIT * i for i in range(1, 9))
    assert max(ours.bytes[: ours.ops.index("sum")]) == 2 * UNIT


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("wrap", [plainly, remat])
def test_the_timeline_of_a_model_without_values_is_that_of_one_with_them(wrap, passed):
    def built():
        layers = [nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))]
        return nn.Sequential(*(wrap(layer) for layer in layers * 4))

    def step(model, x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    found = []
    for device in "cpu", "meta":
        with torch.device(device):
            model, x = built(), torch.ones(64, 8)
            step(model, x)  # torch sets up what it needs for these operations
        model.zero_grad()
        refers = lambda m=model, x=x: step(m, x)
        found.append(memory_timeline(*((step, model, x) if passed else (refers,))))
    real, meta = found
    assert (meta.peak, meta.peak_op) == (real.peak, real.peak_op)
    kept = sum(p.nbytes for p in model.parameters()) + 4  # gradients and the loss
    assert meta.bytes[-1] == real.bytes[-1] == kept


def test_timeline_passes_arguments_and_keyword_arguments():
    def fn(count, *, times):
        return torch.zeros(count * times)

    assert memory_timeline(fn, 5, times=3).bytes == (60,)


def test_a_timeline_is_a_value_that_shows_as_a_table():
    x = torch.randn(UNIT // 4)
    find = lambda: memory_timeline(lambda x: x.sin().cos().sin(), x)
    found = find()
    assert pickle.loads(pickle.dumps(found)) == found == find()
    with pytest.raises(AttributeError, match="cannot assign"):
        found.bytes = ()
    name = find.__qualname__.removesuffix("<lambda>") + "<lambda>.<locals>.<lambda>"
    assert repr(found) == (
        f"<MemoryTimeline of `{name}`: 5 events, peak of 8.0 KiB in cos>"
    )
    lines = str(found).splitlines()
    assert lines[1].split() == [
        "operation",
        "allocations",
        "allocated",
        "freed",
        "peak",
    ]
    assert [line.split() for line in lines[2:-1]] == [
        ["sin", "2", "8,192", "0", "8,192"],
        ["cos", "1", "4,096", "0", "8,192"],
        ["Python", "0", "0", "8,192", "4,096"],
    ]
    assert lines[-1] == "peak: 8,192 bytes; at the end: 4,096"
    assert "<table" in found._repr_html_()


def test_a_timeline_is_drawn_in_mib(pyplot):
    found = memory_timeline(backward_of(sines(4)))
    axes = found.plot()
    (line,) = axes.get_lines()
    assert [*line.get_ydata()] == [size / 2**20 for size in found.bytes]
    assert line.get_markevery() == [found.bytes.index(found.peak)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        f"peak of 20.0 KiB in {found.peak_op}"
    ]
    assert axes.get_ylabel() == "memory alive, MiB"
    ours = pyplot.figure().add_subplot()
    assert found.plot(ours) is ours
    assert memory_timeline(lambda: None).plot().get_legend() is None


def test_two_timelines_share_axes(pyplot):
    plain = memory_timeline(backward_of(sines(4)))
    axes = plain.plot(label="plain")
    again = memory_timeline(backward_of(remat(sines(4))))
    assert again.plot(axes, "remat") is axes
    curves = axes.get_lines()
    drawn = [[*curve.get_ydata()] for curve in curves]
    assert drawn == [[size / 2**20 for size in t.bytes] for t in (plain, again)]
    assert len({curve.get_color() for curve in curves}) == 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "plain: 20.0 KiB",
        f"remat: {again.peak / 2**10:.1f} KiB",
    ]


def test_a_larger_timeline_is_drawn_whole_below_the_legend(pyplot):
    small, large = (memory_timeline(backward_of(sines(n))) for n in (2, 9))
    axes = large.plot(small.plot(label="small"), "large")
    axes.figure.draw_without_rendering()
    legend = axes.get_legend().get_window_extent()
    assert axes.get_ylim()[0] == 0
    assert axes.transData.transform((0, large.peak / 2**20))[1] < legend.y0
    assert axes.bbox.contains(legend.x0, legend.y0)
    assert axes.bbox.contains(legend.x1, legend.y1)


@pytest.mark.parametrize("run", ["first", "second"])
def test_peak_resolves_single_tensors(run):
    del run
    # 16 sines; the sum and its cotangent are 4 bytes each when the peak is reached.
    assert peak_bytes(backward_of(sines(16))) == 17 * UNIT + 8
    assert peak_bytes(backward_of(sines(4))) == 5 * UNIT + 8


@pytest.mark.parametrize(
    "measure", [peak_bytes, live_bytes, lambda fn: memory_timeline(fn).bytes]
)
def test_a_measure_is_zero_when_nothing_is_allocated(measure):
    assert not measure(lambda: None)


@pytest.mark.parametrize("count", [1, 3, 1001])
def test_live_bytes_are_exact(count):
    x = torch.zeros(count, requires_grad=True)
    assert live_bytes(lambda: x.detach().sin().cos()) == 4 * count
    assert live_bytes(lambda: x.sin().cos()) == 8 * count
    assert live_bytes(lambda: [x.sin().cos(), torch.zeros(7)]) == 8 * count + 28


def test_live_bytes_include_what_the_call_stores_elsewhere():
    stash = []
    assert live_bytes(lambda: stash.append(torch.zeros(100))) == 400


def cyclic():
    cycle = [torch.zeros(100)]
    cycle.append(cycle)
    return weakref.ref(cycle[0])


def test_live_bytes_show_memory_held_by_a_cycle():
    assert live_bytes(cyclic) == 400


def test_an_earlier_cycle_is_not_subtracted():
    held = cyclic()
    assert live_bytes(lambda: torch.zeros(10)) == 40
    assert held() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_before(enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        peak_bytes(lambda: None)
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            peak_bytes(lambda: 1 / 0)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_an_error_leaves_no_profiler_running():
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        peak_bytes(lambda: 1 / 0)
    assert peak_bytes(lambda: torch.zeros(3)) == 12


# --- Runs ---


def noisy(x):
    return (x * torch.rand(64)).sin().exp()


def program(wrap):
    return torch.autograd.grad(wrap(noisy)(X).sum(), X)


X = leaf()


def scaled(fn):
    """A remat whose values are off by the last bits."""
    return lambda x: remat(fn)(x) * (1 + 1e-6)


def drawing(fn):
    """A remat that moves a stream."""
    return lambda x: (remat(fn)(x), random.random())[0]


def test_a_remat_passes():
    assert_replayed(program, sin=(1, 2), evaluations=(1, 2))
    assert_replayed(gradients(noisy, X), sin=2)


WRONG = {
    "identity": (plainly, "ran .* not"),
    "values": (scaled, "differs in value"),
    "streams": (drawing, "differs|expected"),
}


@pytest.mark.parametrize(("wrap", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_remat_fails(wrap, message):
    with pytest.raises(AssertionError, match=message):
        assert_replayed(program, wrap=wrap, sin=2)


@pytest.mark.parametrize(
    "counts", [{"sin": 3}, {"sin": (2, 2)}, {"evaluations": 1}, {"cos": 0}]
)
def test_other_counts_fail(counts):
    with pytest.raises(AssertionError, match="plain and rematerialized ran"):
        assert_replayed(program, **counts)


def test_gradients_that_vanish_fail():
    with pytest.raises(AssertionError, match="only zeros"):
        assert_replayed(gradients(lambda x: (x * 0).sin(), X), sin=2)
