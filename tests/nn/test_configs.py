"""What a config file may say: `remat.nn.apply(model, config)` with texts and dicts."""

import json

import pytest
import torch
from support.tables import rows
from support.zoo import make, ops_of
from torch import nn

import remat
from remat.testing import assert_same, peak_bytes


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(self.up(x).tanh().exp())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Block(), Block()

    def forward(self, x):
        return self.mlp(self.attn(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


X = make(3, 4, seed=2).float()


def model_of():
    torch.manual_seed(0)
    return Model()


def described(model):
    """The modules that are recomputed, each with its policy as text."""
    return {name: repr(found.policy) for name, found in remat.nn.applied(model).items()}


def blocks(*numbers, policy="None"):
    return {f"layers.{n}": policy for n in numbers}


# A config, the keyword arguments, and what is recomputed.
CONFIGS = {
    "full": ("full", {}, blocks(0, 1, 2, 3)),
    "none": ("none", {}, {}),
    "every second": ("every_2", {}, blocks(0, 2)),
    "every one": ("every_1", {}, blocks(0, 1, 2, 3)),
    "a policy": ("dots", {}, blocks(0, 1, 2, 3, policy="dots_saveable")),
    "a policy by its name": (
        "dots_with_no_batch_dims_saveable",
        {},
        blocks(0, 1, 2, 3, policy="dots_with_no_batch_dims_saveable"),
    ),
    "every second under a policy": (
        "every_2",
        {"policy": "dots"},
        blocks(0, 2, policy="dots_saveable"),
    ),
    "every second, said by the policy": (
        ["layers.*"],
        {"policy": "every_2"},
        blocks(0, 2),
    ),
    "a policy by a text": (
        None,
        {"policy": "dots"},
        blocks(*range(4), policy="dots_saveable"),
    ),
    "a part of a layer": (
        {"layers.*.mlp": "dots"},
        {},
        {f"layers.{n}.mlp": "dots_saveable" for n in range(4)},
    ),
    "each its own": (
        {"layers.0": "none", "layers.[12]": "full", "Layer": "budget:1kB"},
        {},
        {**blocks(1, 2), "layers.3": "within(1000)"},
    ),
    "every second of a key": ({"layers.*": "every_2"}, {}, blocks(0, 2)),
    "by place, below": (
        {"layers.1": {"mlp.up": "save", None: "recompute"}},
        {},
        blocks(1, policy="as_policy({'mlp.up': 'save'})"),
    ),
    "null": ({"layers.1": None}, {}, blocks(1)),
}


@rows("config, options, expected", CONFIGS)
def test_what_a_config_says(config, options, expected):
    keys = isinstance(config, dict) and any(
        isinstance(value, dict) for value in config.values()
    )
    if not keys:  # as if it was read from a file; JSON has no key None
        config = json.loads(json.dumps(config))
    model = remat.nn.apply(model_of(), config, **options)
    assert described(model) == expected
    plain = model_of()
    plain(X).backward()
    tanhs = ops_of(lambda: model(X).backward())["tanh"]
    assert (tanhs > 8) == bool(expected)
    assert_same(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
    )


def applied(config, **options):
    return remat.nn.apply(model_of(), config, **options)


REFUSED = {
    "an unknown policy": (
        lambda: applied({"layers.*.mlp": "dotz"}),
        r"apply, 'layers\.\*\.mlp': 'dotz' is no policy. Do you mean 'dots'\? Write",
    ),
    "an object": (lambda: applied({"layers.*": 3}), r"apply, 'layers\.\*': .*policy"),
    "under a class": (
        lambda: applied({Layer: "x"}),
        "apply, 'Layer': 'x' is no policy",
    ),
    "by place": (
        lambda: applied({"layers.*": {"mlp": "sav"}}),
        r"apply, 'layers\.\*': remat: 'sav' is no policy",
    ),
    "a key": (
        lambda: applied({"layer.*": "full"}),
        r"'layer\.\*' selects no module of this Model. Do you mean 'layers",
    ),
    "a mode": (lambda: applied("ful"), r"'ful' selects .* Do you mean 'full'\?"),
    "a class": (lambda: applied("Laye"), r"Do you mean 'Layer'\?"),
    "every none": (lambda: applied("every_0"), "'every_0' selects no module"),
    "a budget": (
        lambda: applied("budget:much"),
        "number of bytes; got the text 'much'",
    ),
    "a budget of a key": (
        lambda: applied({"layers.*": "budget:much"}),
        r"apply, 'layers\.\*' takes a number of bytes",
    ),
    "a policy": (
        lambda: applied(None, policy="dotz"),
        "apply, policy: 'dotz' is no policy",
    ),
    "two policies": (
        lambda: applied("dots", policy="save"),
        "gives each module a policy",
    ),
    "a budget and a policy": (
        lambda: applied("budget:1GB", policy="dots"),
        "'budget:1GB' plans a whole step, so leave out `policy`",
    ),
    "no blocks": (lambda: remat.nn.apply(Block(), "full"), "has no list of blocks"),
}


@rows("call, message", REFUSED)
def test_an_error_names_the_key(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# --- A budget ---


def wide():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64) for _ in range(8)))


BATCH = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))


def step(model):
    model(BATCH).square().sum().backward()


def peak_of(model):
    step(model)  # a plan is made in the first one
    for parameter in model.parameters():
        parameter.grad = None
    return peak_bytes(lambda: step(model))


def test_a_budget_is_planned_with_the_first_batch():
    plan = remat.fit(wide(), BATCH, budget="4MB")
    budget = plan.resident + (plan.plain_peak - plan.resident) // 2
    model, plain = remat.nn.apply(wide(), f"budget:{budget}"), wide()
    assert [found.by for found in remat.nn.applied(model).values()] == ["remat.fit"]
    model.eval()
    with torch.no_grad():
        model(BATCH)  # follows no plan, and makes none
    model.train()
    step(plain)
    step(model)
    grads = [p.grad for p in model.parameters()]
    assert_same(grads, [p.grad for p in plain.parameters()])
    assert peak_of(model) <= budget - plan.resident < peak_of(plain)
    remat.nn.remove(model)
    assert not remat.nn.applied(model)


def test_the_first_call_recomputes():
    model = remat.nn.apply(wide(), "budget: 2.2 MB")
    assert ops_of(lambda: step(model))["tanh"] > 8


def test_a_budget_that_is_too_small_is_refused_each_time():
    model = remat.nn.apply(wide(), "budget:1kB")
    for _ in range(2):
        with pytest.raises(
            remat.BudgetError, match=r"for Sequential stays under 1 kB \(1,000 bytes\)"
        ):
            step(model)


def test_a_budget_is_refused_where_no_plan_can_be_made():
    model = remat.nn.apply(wide(), "budget:4MB")
    params = dict(model.named_parameters())
    with pytest.raises(ValueError, match="cannot be under a transform"):
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (BATCH,)).sum())(
            params
        )
    with pytest.raises(ValueError, match=r"is recomputed already, by remat\.fit"):
        remat.nn.apply(model)
