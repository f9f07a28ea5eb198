"""`compare`: a row for each policy, of a function or its blocks, and budgets."""

import functools

import pytest
import torch
from support.explained import CASES, POLICIES, SQUARE, blk, case_of, example, two
from support.kept import total
from support.tables import crossed
from support.zoo import make, plainly
from torch import nn
from torch.nn import functional as F  # noqa: N812

from remat import compare, explain, policies, remat, saved_residuals
from remat._base.context import here
from remat._partial import budget, solver
from remat.policies import within
from remat.policies._within import NO_SCIPY
from remat.testing import count_ops


def names(comparison):
    return [row.name for row in comparison.rows]


def row_named(comparison, name):
    (row,) = [row for row in comparison.rows if row.name == name]
    return row


def costs(row):
    """All of a row but its name."""
    sizes = row.saved_bytes, row.peak_bytes, row.offloaded_bytes
    return *sizes, row.recomputed_flops, row.recomputed_share


# --- A function without blocks ---


@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_what_explain_says(name):
    fn, args = case_of(name)
    compared = compare(fn, *args, policies=POLICIES.values(), prune=True)
    reports = [explain(fn, *args, policy=p, prune=True) for p in POLICIES.values()]
    plain, full, *rest = compared.rows
    plain_bytes = reports[0].plain_bytes
    assert plain.name == "plain"
    assert costs(plain) == (plain_bytes, plain_bytes, 0, 0, 0)
    assert full == rest[0]
    for row, report in zip(rest, reports, strict=True):
        assert row.name == str(report.policy or "nothing_saveable")
        assert row.saved_bytes == report.saved_bytes
        assert row.peak_bytes == report.peak_bytes
        assert row.offloaded_bytes == report.offloaded_bytes
        assert row.recomputed_flops == report.recomputed_flops
        assert row.recomputed_share == report.recomputed_share


def test_the_function_is_called_once_for_all_policies():
    calls = []

    def f(w, x):
        calls.append(None)
        return blk(w, x)

    found = compare(f, *example(*SQUARE), policies=POLICIES.values())
    assert (len(found.rows), len(calls)) == (2 + len(POLICIES), 1)


def test_a_mapping_gives_rows_names():
    args = example(*SQUARE)
    found = compare(blk, *args, policies={"a": None, "b": policies.dots_saveable})
    _, full, a, b = found.rows
    assert names(found) == ["plain", "nothing_saveable", "a", "b"]
    assert costs(a) == costs(full)
    assert costs(b) == costs(compare(blk, *args).rows[3])
    assert b.saved_bytes > a.saved_bytes


def test_remat_around_the_whole_function_is_no_block():
    args = example(*SQUARE)
    assert names(compare(remat(blk), *args))[0] == "plain"
    assert compare(remat(blk), *args).rows[0] == compare(blk, *args).rows[0]


# --- As written ---


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks of remat, and a head of plain code."""

    def __init__(self, wrap=remat, count=3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(16, 16)
        self.wrap = wrap

    def forward(self, x):
        for block in self.blocks:
            x = self.wrap(block)(x)
        return self.head(x).sin()


BATCH = torch.ones(32, 16)
WRAPS = {
    "remat": remat,
    "dots": remat(policy=policies.dots_saveable),
    "everything": remat(policy=policies.everything_saveable),
    "two deep": lambda fn: remat(remat(fn)),
}


def recomputed_flops(model):
    """What a backward recomputes of the two matmuls of each block."""
    for _ in range(2):  # the first call records
        loss = model(BATCH).sum()
        with count_ops() as ops:
            loss.backward()
    return ops["addmm"] * 2 * 32 * 16 * 64


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_function_with_blocks_is_shown_as_written_and_plain(wrap):
    model, plain = Model(WRAPS[wrap]), Model(plainly)
    found = compare(model, BATCH, policies=[policies.dots_saveable])
    first = ["as written", "plain", "nothing_saveable", "dots_saveable"]
    assert names(found) == first
    as_written, as_plain = found.rows[:2]
    assert as_written.saved_bytes == total(saved_residuals(model, BATCH))
    assert as_plain.saved_bytes == total(saved_residuals(plain, BATCH))
    assert as_plain.recomputed_flops == 0
    assert as_written.recomputed_flops == recomputed_flops(model)
    assert (as_written.recomputed_flops > 0) == (wrap in {"remat", "two deep"})
    assert as_plain == compare(plain, BATCH).rows[0]


def test_a_policy_reaches_into_calls_within():
    dots = policies.dots_saveable
    found = compare(two, *example(*SQUARE), policies=[dots], prune=True)
    assert names(found) == ["as written", "plain", "nothing_saveable", "dots_saveable"]
    assert [row.recomputed_flops // (2 * 64**3) for row in found.rows] == [4, 0, 6, 0]


def test_what_a_block_offloads_is_counted_apart():
    policy = policies.dots_saveable.but_offload(to="disk")
    model, near = Model(remat(policy=policy)), Model(WRAPS["dots"])
    away, kept = (compare(m, BATCH, policies=[]).rows[0] for m in (model, near))
    assert away.offloaded_bytes == 3 * 32 * 64 * 4
    assert away.saved_bytes + away.offloaded_bytes == kept.saved_bytes
    residuals = [r for r in saved_residuals(model, BATCH) if r.place]
    assert total(residuals) == away.offloaded_bytes


def test_a_block_that_is_not_differentiated_is_none():
    def f(x):
        with torch.no_grad():
            y = remat(torch.sin)(x)
        return (x * y).sin()

    assert names(compare(f, torch.ones(3), policies=[])) == [
        "plain",
        "nothing_saveable",
    ]


def test_blocks_with_higher_order_are_plain_in_the_plain_row():
    found = compare(Model(remat(higher_order=True)), BATCH, policies=[])
    assert found.rows[0].name == "as written"
    assert found.rows[1] == compare(Model(plainly), BATCH).rows[0]


# --- Policies of blocks ---


def calls_of(model):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(None))
    return calls


def test_a_function_with_blocks_is_called_once_for_each_row_that_needs_it():
    model = Model()
    calls = calls_of(model)
    rows = {"none": {"*": None}, "dots": {"Block": policies.dots_saveable}}
    assert len(compare(model, BATCH, policies=rows).rows) == 5
    assert len(calls) == 4, "nothing_saveable is planned on the record of the first"


@crossed("wrap, policy", WRAPS, POLICIES)
def test_a_row_for_all_blocks_is_the_function_written_so(wrap, policy):
    policy = POLICIES[policy]
    again = remat(policy=policy)
    written = Model((lambda fn: again(again(fn))) if wrap == "two deep" else again)
    found = compare(Model(WRAPS[wrap]), BATCH, policies={"all": {"*": policy}})
    want, plain, *_ = compare(written, BATCH, policies=[]).rows
    assert costs(found.rows[-1]) == costs(want)
    assert found.rows[1] == plain


def of_functions(wrap):
    """A model of two functions, which are wrapped once."""
    up, down = wrap(up_by), wrap(down_by)
    return lambda w, x: down(w, up(w, x)), up, down


def up_by(w, x):
    return (w @ x.tanh()).tanh()


def down_by(w, x):
    return (w @ x.sin()).sin()


DOTS = policies.dots_saveable
DOT = 64 * 64 * 4


@pytest.mark.parametrize(
    ("keys", "dots"),
    [
        (lambda up, down: {"up_by": DOTS}, 1),
        (lambda up, down: {"*_by": DOTS}, 2),
        (lambda up, down: {up: DOTS}, 1),
        (lambda up, down: {up_by: DOTS}, 1),
        (lambda up, down: {up: DOTS, down_by: DOTS}, 2),
        (lambda up, down: {up: None, "*": DOTS}, 1),
        (lambda up, down: {down: None, up: None}, 0),
    ],
)
def test_blocks_are_given_by_name_or_object(keys, dots):
    model, up, down = of_functions(remat)
    found = compare(model, *example(*SQUARE), policies={"row": keys(up, down)})
    as_written, row = found.rows[0], row_named(found, "row")
    assert row.saved_bytes == as_written.saved_bytes + dots * DOT
    assert row.recomputed_flops == as_written.recomputed_flops - dots * 2 * 64**3


class Method(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16, 16))

    @remat
    def forward(self, x):
        return (self.scale @ x).sin()


@pytest.mark.parametrize(
    ("key", "dots"),
    [
        (lambda a, b: a, 1),
        (lambda a, b: remat(a), 1),
        (lambda a, b: a.forward, 1),
        (lambda a, b: Method.forward, 2),
        (lambda a, b: "Method.*", 2),
    ],
)
def test_a_decorated_method_is_a_block_of_each_object(key, dots):
    a, b = Method(), Method()
    rows = {"row": {key(a, b): DOTS}}
    found = compare(lambda x: b(a(x)), torch.ones(16, 16), policies=rows)
    spared = found.rows[0].recomputed_flops - row_named(found, "row").recomputed_flops
    assert spared == dots * 2 * 16**3


def test_the_blocks_keep_their_own_options_afterwards():
    block = remat(blk, policy=DOTS)
    rows = {"none": {"*": None}, "everything": {block: policies.everything_saveable}}
    args = example(*SQUARE)
    found = compare(lambda *args: block(*args), *args, policies=rows)
    sizes = {row.name: row.saved_bytes for row in found.rows}
    assert sizes["none"] < sizes["as written"] < sizes["plain"] + 1
    assert block._options.policy == DOTS
    assert here().reporter is None
    again = compare(lambda *args: block(*args), *args, policies=rows)
    assert [*map(costs, again.rows)] == [*map(costs, found.rows)]


def test_a_policy_of_no_block_is_an_error_that_names_the_blocks():
    match = r"the block 'Blok', but `Model` calls no such .* It calls: 'Block'\."
    with pytest.raises(ValueError, match=match):
        compare(Model(), BATCH, policies={"typo": {"Blok": None}})
    with pytest.raises(ValueError, match="It calls: none"):
        compare(blk, *example(*SQUARE), policies={"no blocks": {"*": None}})
    assert here().reporter is None


@pytest.mark.parametrize("policy", [{"row": {"*": "dots"}}, {"row": "dots"}, ["dots"]])
def test_what_is_no_policy_is_an_error(policy):
    with pytest.raises(TypeError, match="dots"):
        compare(Model(), BATCH, policies=policy)


@pytest.mark.parametrize(
    "policy", [DOTS, lambda op: op.func is torch.ops.aten.mm.default]
)
def test_one_policy_is_a_list_of_one(policy):
    found = compare(two, *example(*SQUARE), policies=policy)
    assert found == compare(two, *example(*SQUARE), policies=[policy])


# --- The peak without gradients ---


def test_the_peak_without_gradients_is_what_is_saved_and_the_largest_block():
    def model(wrap, x):
        small = wrap(lambda x: x.sin().sin().sin())
        large = wrap(lambda x: functools.reduce(lambda x, _: x.sin(), range(9), x))
        return small(large(small(x)))

    x = torch.ones(256)
    as_written, plain, none = compare(
        functools.partial(model, remat), x, policies=[]
    ).rows
    # Three inputs; and what the nine sines save besides their input.
    assert (as_written.saved_bytes, as_written.peak_bytes) == (3 * 1024, 11 * 1024)
    assert (plain.saved_bytes, plain.peak_bytes) == (15 * 1024, 15 * 1024)
    # Around the blocks: one input, two more, then the nine sines.
    assert (none.saved_bytes, none.peak_bytes) == (1 * 1024, 11 * 1024)


def test_a_block_in_a_block_holds_what_is_around_it():
    def inner(x):
        return functools.reduce(lambda x, _: x.sin(), range(4), x)

    def outer(x):
        return remat(inner)(remat(inner)(x).cos()).cos()

    x = torch.ones(256)
    as_written, *_ = compare(lambda x: remat(outer)(x), x, policies=[]).rows
    # x; what outer saves: two inputs of cosines, and that of the second inner; then
    # the three sines in there.
    assert as_written.saved_bytes == 1024
    assert as_written.peak_bytes == (1 + 3 + 3) * 1024


# --- What budgets reach ---


SIZE = 64
W, V = make(SIZE, 4 * SIZE, seed=1), make(4 * SIZE, SIZE, seed=2)
X = make(8 * SIZE, SIZE, seed=3)


def layers(w, v, x):
    for _ in range(3):
        x = x + F.gelu(F.layer_norm(x, (SIZE,)) @ w) @ v
    return x


@pytest.fixture(scope="module")
def compared():
    return compare(layers, W, V, X)


def test_the_front_goes_from_nothing_to_everything(compared):
    sizes = [row.saved_bytes for row in compared.front]
    assert sizes == sorted(sizes)
    named = {row.name: row for row in compared.rows}
    assert sizes[0] == named["nothing_saveable"].saved_bytes
    assert compared.front[0].recomputed_flops == max(
        row.recomputed_flops for row in compared.rows
    )
    assert compared.front[-1].recomputed_flops == 0
    assert compared.front[-1].saved_bytes <= named["everything_saveable"].saved_bytes


def test_no_policy_is_below_the_front(compared):
    for row in compared.rows:
        for reached in compared.front:
            fewer = row.saved_bytes <= reached.saved_bytes
            assert not (fewer and row.recomputed_flops < reached.recomputed_flops)


def test_the_front_is_what_explain_says(compared):
    for row in compared.front:
        nbytes = int(row.name.removeprefix("within(").removesuffix(")"))
        found = explain(layers, W, V, X, policy=within(nbytes))
        assert row.saved_bytes == found.saved_bytes
        assert row.recomputed_flops == found.recomputed_flops
        assert found.budget.nbytes <= nbytes
        assert found.saved_bytes <= nbytes + sum(row.nbytes for row in found.inputs)


def test_the_table_has_the_rows_of_the_front_that_no_policy_has(compared):
    shown = str(compared)
    for row in compared.front[1:-1]:
        assert f"{row.saved_bytes:,}" in shown
    assert compared.front[1].name in shown
    assert compared.front[0].name not in shown  # as nothing_saveable
    assert shown.count("within(") <= len(compared.front) - 1


def test_the_plot_has_a_line_for_it(compared):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = compared.plot(pyplot.figure().add_subplot())
    (line,) = [each for each in axes.lines if each.get_linestyle() == "--"]
    points = [*zip(*line.get_data(), strict=True)]
    reached = {(r.saved_bytes / 2**20, r.recomputed_flops) for r in compared.front}
    assert {*points} <= reached
    assert points[-1][1] == 0
    assert line.get_label() == "policies.within(...)"
    pyplot.close("all")


def test_a_function_with_blocks_has_no_front():
    block = remat(layers)
    found = compare(lambda w, v, x: block(w, v, block(w, v, x)), W, V, X)
    assert found.front == ()


def test_without_scipy_the_front_is_left_out(monkeypatch, compared):
    def no_scipy():
        raise ImportError(NO_SCIPY)

    monkeypatch.setattr(solver, "_scipy", no_scipy)
    budget._known.cache_clear()
    budget._searched.cache_clear()
    found = compare(layers, W, V, X)
    assert found.rows == compared.rows
    assert found.front == ()
