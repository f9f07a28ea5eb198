"""Policies by place: which operations a dict's keys mean, in every lowering."""

import copy
import functools
import gc
import pickle
import warnings
import weakref
from collections import OrderedDict

import pytest
import torch
from support.operations import MM, RECOMPUTE, SAVE, op
from support.traced import Graphs
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat import chain, checkpoint_name, compat, explain, policies, saved_residuals
from remat.policies import Decision, Op, as_policy, dots_saveable, within
from remat.testing import assert_same, count_ops


aten = torch.ops.aten


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return checkpoint_name(self.query(x).sin(), "context")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())

    def forward(self, x):
        return self.mlp(self.attn(x)).sigmoid() * x


class Model(nn.Module):
    def __init__(self, wrap=lambda block: block):
        super().__init__()
        self.layers = nn.ModuleList([wrap(Block()) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def model(**options):
    torch.manual_seed(0)
    return Model(**options)


def inputs():
    return torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()


# --- What a key means ---


NESTED = Op(
    aten.mm.default,
    names=frozenset({"logits"}),
    module="layers.1.attn.qkv",
    classes=("torch.nn.modules.linear.Linear", "model.Attention"),
)
KEYS = {
    "layers": True,
    "layers.1": True,
    "layers.1.attn.qkv": True,
    "layers.*.attn": True,
    "lay*": True,
    "layers.1.at": False,
    "layers.11": False,
    "attn": False,
    "layers.*": True,
    "logits": True,
    "logit": False,
    "aten.mm": True,
    "aten::mm": True,
    "aten.mm.default": True,
    "torch.ops.aten.mm": True,
    "aten.mm.out": False,
    "aten.m": False,
    "model.Attention": True,
    "Attention": False,
}


@pytest.mark.parametrize(("key", "matches"), KEYS.items())
def test_a_key_means(key, matches):
    assert as_policy({key: "save"})(NESTED) is (SAVE if matches else RECOMPUTE)
    assert as_policy({key: "recompute", None: "save"})(NESTED) is (
        RECOMPUTE if matches else SAVE
    )


ORDER = ["logits", "layers.1.attn", "layers.*.attn", "layers", nn.Linear]
ORDER += ["model.Attention", MM, aten.mm, None]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_nearest_key_decides(first):
    """A name, the longest path, the innermost class, the overload, the packet."""
    known = ORDER[first:]
    places = dict.fromkeys(reversed(known), "recompute") | {known[0]: "save"}
    assert as_policy(places)(NESTED) is SAVE
    assert as_policy(dict(reversed(places.items())))(NESTED) is SAVE


ALIKE = ["layers.1.attn", "layers.1.*", "layers.*.attn", "*.1.attn", "lay*.*.attn"]


@pytest.mark.parametrize("first", range(len(ALIKE)))
def test_of_paths_as_long_fewer_stars_decide_and_then_the_first(first):
    places = dict.fromkeys(ALIKE[first:], "recompute") | {ALIKE[first]: "save"}
    assert as_policy(places)(NESTED) is SAVE
    backwards = dict(reversed(places.items()))
    is_alone = ALIKE[first].count("*") < min(
        (key.count("*") for key in ALIKE[first + 1 :]), default=9
    )
    assert as_policy(backwards)(NESTED) is (SAVE if is_alone else RECOMPUTE)


VALUES = {
    "save": SAVE,
    "recompute": RECOMPUTE,
    "offload": Decision.OFFLOAD,
    "disk": Decision.OFFLOAD_TO_DISK,
    "dots_saveable": SAVE,
    Decision.OFFLOAD: Decision.OFFLOAD,
    CheckpointPolicy.PREFER_SAVE: SAVE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: Decision.OFFLOAD,
    CheckpointPolicy.MUST_RECOMPUTE: RECOMPUTE,
    dots_saveable: SAVE,
    None: RECOMPUTE,
}


@pytest.mark.parametrize(("value", "decision"), VALUES.items(), ids=str)
def test_a_value_means(value, decision):
    assert as_policy({"layers": value})(NESTED) is decision


def test_several_names_of_a_value_keep_it_nearest():
    both = op(names={"a", "b"})
    assert as_policy({"a": "offload", "b": "save", "aten.sin": "recompute"})(both)
    assert as_policy({"a": "offload", "b": "recompute"})(both) is Decision.OFFLOAD


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({3: "save"}, "3, a int, is no place. The keys of a policy are"),
        ({"": "save"}, "is no place"),
        ({nn.Module: "save"}, "is no place"),
        ({nn.Linear(2, 2): "save"}, "is no place"),
        (
            {"a": "dots_savable"},
            r"'dots_savable' is no policy. Do you mean .*dots_saveable\?",
        ),
        ({"a": "as_policy"}, "'as_policy' is no policy"),
        ({"a": True}, r"everything_saveable\?"),
        ({"a": within(3)}, "a place cannot have within"),
    ],
)
def test_other_keys_and_values_are_refused(places, message):
    with pytest.raises(TypeError, match=message):
        remat.remat(torch.sin, policy=places)


PLACES = {
    "layers.1": "save",
    aten.mm: dots_saveable,
    nn.Linear: Decision.OFFLOAD,
    Exponential: "recompute",
    None: "dots_saveable",
}


def test_it_is_a_value():
    policy = as_policy(PLACES)
    assert policy == as_policy(dict(PLACES))
    assert hash(policy) == hash(as_policy(PLACES))
    assert policy != as_policy(PLACES | {"layers.1": "recompute"})
    assert pickle.loads(pickle.dumps(policy)) == policy == copy.deepcopy(policy)
    assert eval(repr(policy), vars(policies)) == policy
    assert repr(as_policy({"a.b": "save"})) == "as_policy({'a.b': 'save'})"


def test_it_combines():
    places = {"layers.1": "save"}
    assert (dots_saveable | places)(NESTED) is SAVE
    assert (places | dots_saveable) == as_policy(places) | dots_saveable
    assert (everything := policies.everything_saveable - places)(NESTED) is RECOMPUTE
    assert everything(op()) is SAVE
    assert as_policy(places).but_offload({"layers.*.attn": "save"})(NESTED).offloads
    assert repr(within(8) & places) == "(within(8) & as_policy({'layers.1': 'save'}))"
    assert policies.every_other(places)(NESTED) is SAVE


@pytest.mark.parametrize(
    ("policy", "saved", "not_saved"),
    [
        (policies.save_only_these_names("q") | dots_saveable, "q", "k"),
        (policies.save_any_names_but_these("k"), "q", "k"),
        (policies.save_names_matching("q."), "q1", "k"),
        (as_policy({"q": "offload", "k": "recompute", None: "save"}), "q", "k"),
        (policies.everything_saveable - policies.save_only_these_names("k"), "q", "k"),
        (as_policy(lambda op: "q" in op.names), "q", "k"),
        (within(10) & policies.save_only_these_names("q"), "q", "k"),
    ],
    ids=str,
)
def test_a_policy_says_whether_it_saves_a_name(policy, saved, not_saved):
    assert policy.saves(saved) is True
    assert policy.saves(not_saved) is False


# --- Where an operation is, in every lowering ---


class Seen:
    """A policy function that notes where operations are."""

    def __init__(self):
        self.found = {}

    def __call__(self, op):
        last = tuple(name.rpartition(".")[2] for name in op.classes)
        self.found.setdefault((op.packet.__name__, op.module, last, op.nth))
        return False


def eagerly(fn):
    fn(inputs()).sum().backward()


def under_func(fn):
    torch.func.grad(lambda x: fn(x).sum())(inputs().detach())


def under_vmap(fn):
    torch.func.vmap(fn)(inputs()[None]).sum().backward()


def traced(fn):
    make_fx(lambda x: torch.autograd.grad(fn(x).sum(), x))(inputs())


def compiled(fn):
    torch._dynamo.reset()
    torch.compile(fn, backend="aot_eager", fullgraph=True)(inputs()).sum().backward()


def counted(run, fn):
    """The operations of a run. Of compiled code they are those of its graphs."""
    if run is not compiled:
        with count_ops() as ops:
            run(fn)
        return ops
    torch._dynamo.reset()
    graphs = Graphs()
    torch.compile(fn, backend=graphs, fullgraph=True)(inputs()).sum().backward()
    return graphs.forward + graphs.backward


LOWERINGS = [eagerly, under_func, under_vmap, traced, compiled]
IN_BLOCK = [
    ("sin", "attn", ("Attention", "Block")),
    ("tanh", "mlp.1", ("Tanh", "Sequential", "Block")),
    ("sigmoid", "", ("Block",)),
]


@pytest.mark.parametrize("run", LOWERINGS)
def test_an_operation_knows_its_module(run):
    seen = Seen()
    run(remat.remat(model(), policy=seen))
    expected = {
        (name, ".".join(filter(None, (f"layers.{i}", path))), classes, i)
        for name, path, classes in IN_BLOCK
        for i in range(2)
    }
    names = [name for name, *_ in IN_BLOCK]
    found = {
        # The root of what is compiled has no name in Dynamo's graph.
        (name, path, tuple(c for c in classes if c != "Model"), nth)
        for name, path, classes, nth in seen.found
        if name in names
    }
    assert found == expected


def test_a_function_has_a_class():
    seen = Seen()
    eagerly(remat.remat(lambda x: Exponential.apply(x.exp()), policy=seen))
    assert {*seen.found} == {("exp", "", (), 0), ("exp", "", ("Exponential",), 1)}
    fn = remat.remat(
        lambda x: Exponential.apply(x.exp()).sin(), policy={Exponential: "save"}
    )
    for _ in range(2):
        with count_ops() as ops:
            eagerly(fn)
        assert ops["exp"] == 3  # that of the Function does not run again


def test_a_function_in_compiled_code_is_told_as_unknown():
    # Each policy is told of once.
    places = {Exponential: "save", None: [aten.tan]}
    fn = remat.remat(lambda x: Exponential.apply(x).sin(), policy=places)
    text = "test_by_place.Exponential', .*; torch.compile tells of no Functions"
    with pytest.warns(UserWarning, match=text):
        ops = counted(compiled, fn)
    assert ops["exp"] == 2


def exchanged(block):
    block.attn, block.mlp = block.mlp, block.attn


def renamed(block):
    block.mlp = nn.Sequential(block.mlp[1], block.mlp[0])


def replaced(block):
    block.attn = Attention()


CHANGES = {
    exchanged: [("sin", "mlp"), ("tanh", "attn.1")],
    renamed: [("sin", "attn"), ("tanh", "mlp.0")],
    replaced: [("sin", "attn"), ("tanh", "mlp.1")],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_path_is_where_the_module_is_now(change):
    block = Block()
    eagerly(remat.remat(block, policy=Seen()))
    change(block)
    seen = Seen()
    eagerly(remat.remat(lambda x: Block.forward(block, x), policy=seen))
    found = {(n, path) for n, path, *_ in seen.found if n in ("sin", "tanh")}
    assert found == {*CHANGES[change]}


def test_a_module_is_known_once_it_is_registered():
    block, parts = Block(), [nn.Tanh()]
    block.mlp = nn.Linear(4, 4)
    block.forward = lambda x: parts[0](Block.forward(block, x))
    paths = []
    for _ in range(2):
        seen = Seen()
        eagerly(remat.remat(block, policy=seen))
        paths += [path for name, path, *_ in seen.found if name == "tanh"]
        block.last = parts[0]
    assert paths == ["Tanh", "last"]


def ways(block):
    return {
        "module": block,
        "method": block.forward,
        "call": block.__call__,
        "closure": lambda x: block.mlp(block.attn(x)).sigmoid(),
    }


@pytest.mark.parametrize("way", ways(Block()))
def test_a_path_begins_at_what_is_rematerialized(way):
    seen = Seen()
    eagerly(remat.remat(ways(Block())[way], policy=seen))
    assert {(n, path) for n, path, *_ in seen.found if n in ("sin", "tanh")} == {
        ("sin", "attn"),
        ("tanh", "mlp.1"),
    }


@functools.cache
def run_by_plain_code(run):
    return counted(run, model())


def run_again(run, fn):
    """How many more products, tanh and sigmoid than plain code runs."""
    ops, plain = counted(run, fn), run_by_plain_code(run)
    return tuple(ops[name] - plain[name] for name in ("mm", "tanh", "sigmoid"))


def test_blocks_whose_parts_have_other_names_share_no_plan():
    ran = []
    for names in ("ab", "ca"):
        parts = [(name, nn.Linear(4, 4, bias=False)) for name in names]
        block = nn.Sequential(nn.Sequential(OrderedDict(parts)), nn.Tanh())
        with count_ops() as ops:
            eagerly(remat.remat(block, policy={"0.a": "save"}))
        ran.append(ops["mm"])
    # What a layer saved for its backward stays: the result of the one before it, too.
    assert ran == [6 + 1, 6]


# What a backward runs again: products, tanh and sigmoid.
SAVED = {
    "nothing": (None, (4, 2, 2)),
    "a layer": ({"layers.1": "save"}, (2, 1, 1)),
    "by a star": ({"layers.*.mlp": "save"}, (2, 0, 2)),
    "a class": ({Attention: "save"}, (2, 2, 2)),
    "a name": ({"context": "save"}, (4, 2, 2)),
    "an operator": ({"aten.mm": "save"}, (0, 2, 2)),
    "all but": ({"layers.0.attn": "recompute", None: "save"}, (1, 0, 0)),
}


@pytest.mark.parametrize("run", [eagerly, under_func, compiled])
@pytest.mark.parametrize("case", SAVED)
def test_it_saves(case, run):
    places, again = SAVED[case]
    fn = remat.remat(model(), policy=places)
    for _ in range(1 if run is compiled else 2):
        assert run_again(run, fn) == again


@pytest.mark.parametrize("policy", [None, dots_saveable])
@pytest.mark.parametrize("run", [eagerly, under_func, compiled])
def test_a_call_within_follows_the_places_of_the_call_around(run, policy):
    """As it follows names that say the same."""

    def nested(places):
        blocks = model(wrap=lambda block: remat.remat(block, policy=policy))
        fn = remat.remat(blocks, policy=places)
        if run is not compiled:  # the second call follows the record of the first
            run_again(run, fn)
        return run_again(run, fn)

    assert nested({"layers.*.attn": "save"}) != nested(None)
    assert nested({Attention: "save"}) == nested({"layers.*.attn": "save"})
    assert nested({"layers.0": "save", "layers.1": "save"}) == nested({None: "save"})


# --- Wherever a policy is accepted ---


def in_a_scope(places):
    def run(x):
        with remat.scope(places):
            return model()(x)

    return run


def applied(places):
    found = model()
    remat.nn.apply(found, {"layers.1": places})
    return found


WHERE = {
    "remat": lambda: remat.remat(model(), policy={"layers.1.attn": "save"}),
    "apply": lambda: applied({"attn": "save"}),
    "scope": lambda: in_a_scope({"layers.1.attn": "save"}),
    "checkpoint": lambda: (
        lambda x: compat.checkpoint(
            model(), x, policy={"layers.1.attn": CheckpointPolicy.MUST_SAVE}
        )
    ),
    "within": lambda: remat.remat(
        model(), policy=within(10**6) & {"layers.1.attn": "save"}
    ),
}
ELSEWHERE = {"apply": (1, 1, 1), "within": (3, 2, 2)}


@pytest.mark.parametrize("where", WHERE)
def test_it_is_accepted_by(where):
    assert run_again(eagerly, WHERE[where]()) == ELSEWHERE.get(where, (3, 2, 2))


def test_it_is_accepted_by_chains_and_reports():
    blocks, counts = [*model().layers], []
    for places in ({"attn": "save", "mlp": "save"}, {"attn": "recompute"}):
        run = functools.partial(chain.sequential, blocks, policy=places)
        counts.append(run_again(eagerly, run)[0])
    assert counts[0] < counts[1]
    found = explain(model(), inputs(), policy={"layers.*.attn": "save"})
    assert [op.name for op in found.ops if op.fate == "saved"] == ["mm", "sin"] * 2
    compared = remat.compare(
        model(), inputs(), policies=[as_policy({"layers": "save"})]
    )
    assert "layers" in str(compared)
    held = saved_residuals(
        remat.remat(model(), policy={"layers.1.attn": "save"}), inputs()
    )
    assert sum("named 'context'" in r.origin for r in held) == 1


def test_gradients_are_those_of_plain_code():
    for places in ({"layers.1": "save"}, {Attention: "offload", "aten.mm": "disk"}):
        grads = []
        for fn in model(), remat.remat(model(), policy=places):
            x = inputs()
            fn(x).sum().backward()
            grads.append([x.grad, *(p.grad for p in fn.parameters())])
        assert_same(*grads)


# --- Keys that match nothing ---


def told(run):
    """The warnings of keys: their line, and what they say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [
        (w.filename, w.lineno, str(w.message).partition(" the policy has the key ")[2])
        for w in caught
        if "the policy has the key" in str(w.message)
    ]


MISSPELT = {
    "a path": ("layers.1.atn1", "layers.1.attn"),
    "the end of one": ("mlp.0", "layers.0.mlp.0"),
    "one from further out": ("model.layers.1.attn", "layers.1.attn"),
    "a name": ("contexts", "context"),
    "an operator": ("aten.mn", "aten.mm"),
}


TOLD = [eagerly, under_func, traced, compiled]


@pytest.mark.parametrize("run", TOLD)
@pytest.mark.parametrize("case", MISSPELT)
def test_a_key_that_matches_nothing_is_told_once_at_the_users_line(case, run):
    key, near = MISSPELT[case]
    # Another policy for each: the program is told of each once.
    places = {
        key: "save",
        "layers.0": "save",
        None: [aten.tanh, [aten.exp, aten.cos, aten.sin, aten.neg][TOLD.index(run)]],
    }
    fn = remat.remat(model(), policy=places)
    found = told(lambda: run(fn))
    line = test_a_key_that_matches_nothing_is_told_once_at_the_users_line.__code__
    assert {file for file, *_ in found} == {__file__}
    assert {number for _, number, _ in found} <= {*range(line.co_firstlineno, 10**4)}
    texts = [text for *_, text in found if text.startswith(repr(key))]
    assert [text.endswith(f" Do you mean {near!r}?") for text in texts] == [True]
    assert told(lambda: run(fn)) == []


def test_reports_tell_of_keys():
    policy = {"layers.1.atten": "save"}
    found = told(lambda: saved_residuals(remat.remat(model(), policy=policy), inputs()))
    assert [text[:16] for *_, text in found] == ["'layers.1.atten'"]
    advice = explain(model(), inputs(), policy={"layers.1.attm": "save"}).advice
    assert any("Do you mean 'layers.1.attn'?" in line for line in advice)


def test_a_scope_tells_of_keys():
    found = told(lambda: eagerly(in_a_scope({"layers.0.ttn": "save"})))
    assert [text[:14] for *_, text in found] == ["'layers.0.ttn'"]


def test_a_key_that_some_block_matches_is_not_told():
    def run():
        places = {"attn": "save", "router": "save"}
        moe = nn.Sequential(OrderedDict(router=nn.Linear(4, 4)))
        blocks = [remat.remat(each, policy=places) for each in (Block(), moe)]
        eagerly(lambda x: blocks[1](blocks[0](x)))

    assert told(run) == []


# --- As proposed for torch (pull requests 186277, 186382, 185282, 176190) ---


def test_name_is_an_identity():
    x = inputs()
    assert compat.name(x, "x") is x


def test_an_argument_of_the_function_is_passed_on():
    x = inputs()
    assert_same(compat.checkpoint(lambda x, policy: x * policy, x, policy=2), x * 2)


def test_two_policies_for_one_checkpoint_are_refused():
    contexts = lambda: compat.create_selective_checkpoint_contexts([MM])
    with pytest.raises(ValueError, match="a policy or a context_fn, and got both"):
        compat.checkpoint(
            torch.sin, inputs(), context_fn=contexts, policy={"a": "save"}
        )


# --- What it costs ---


def test_a_policy_that_asks_for_no_module_costs_nothing():
    """No hook on modules is called, in the call that is recorded or later."""
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    seen = []

    class Asking(nn.Module):
        def forward(self, x):
            seen.append(len(hooks))
            return (x @ x.mT).sin()

    for policy in (dots_saveable, {aten.mm: "save"}, lambda op: op.nbytes > 8):
        for _ in range(2):
            eagerly(remat.remat(Asking(), policy=policy))
    assert {*seen} == {0}
    with warnings.catch_warnings(action="ignore"):
        eagerly(remat.remat(Asking(), policy={"layers": "save"}))
    assert 1 in seen
    assert not hooks


@pytest.mark.parametrize("way", ["remat", "func", "scope"])
def test_no_module_is_held(way):
    found = model()
    gone = weakref.ref(found)
    places = {"layers.1.attn": "save"}
    gc.disable()
    try:
        if way == "scope":
            with remat.scope(places):
                out = found(inputs())
            out.sum().backward()
            del out
        else:
            run = eagerly if way == "remat" else under_func
            run(remat.remat(found, policy=places))
        del found
        assert gone() is None
    finally:
        gc.enable()
