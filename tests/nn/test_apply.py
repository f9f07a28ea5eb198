"""`remat.nn.apply` recomputes chosen submodules, in place, and `remove` undoes it."""

import copy

import pytest
import torch
from support.runs import replayed, saved_and_loaded
from support.tables import rows
from support.zoo import make, ops_of
from torch import nn
from torch.func import functional_call, grad
from torch.nn.utils import parametrize

import remat
from remat import policies
from remat.testing import assert_same


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.down(self.up(x).tanh().exp())


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).sin().exp()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = Other()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().sum()


X = make(3, 4, seed=2).float()


def model_of(kind=Model):
    torch.manual_seed(0)
    return kind()


def counted(model, x=X):
    ops = ops_of(lambda: model(x).backward())
    return ops["tanh"], ops["sin"]


def applied(select=None, **options):
    return remat.nn.apply(model_of(), select, **options)


# --- What is selected ---


SELECTORS = {
    "none": (None, (6, 1)),
    "a class": (Block, (6, 1)),
    "classes": ([Block, Other], (6, 2)),
    "a name": ("layers.1", (4, 1)),
    "a wildcard": ("layers.*", (6, 1)),
    "a list and another": ("[lh]*", (3, 2)),
    "one part, not the model": ("*", (3, 2)),
    "a part of a name": ("layers.[02]", (5, 1)),
    "several parts": ("**", (6, 2)),
    "a function": (lambda name, m: name.endswith("2") or name == "head", (4, 2)),
    "a function of a module": (lambda m: isinstance(m, (Block, Other)), (6, 2)),
    "a function that may take a name": (lambda m, name="": m == "head", (3, 2)),
    "names and classes": (("layers.0", Other), (4, 2)),
    "the name of a class": ("Block", (6, 1)),
    "names of classes": (["Block", "Other"], (6, 2)),
}


@rows("select, expected", SELECTORS)
def test_what_a_selector_selects(select, expected):
    model = applied(select)
    assert counted(model) == expected
    plain = model_of()
    plain(X).backward()
    grads = [p.grad for p in model.parameters()]
    assert_same(grads, [p.grad for p in plain.parameters()])


def test_modules_themselves():
    model = model_of()
    remat.nn.apply(model, [model.layers[0], model.head])
    assert counted(model) == (4, 2)
    remat.nn.remove(model)
    assert counted(remat.nn.apply(model, model.head)) == (3, 2)


def test_a_check_function_by_torchs_name():
    model = applied(check_fn=lambda module: isinstance(module, Other))
    assert counted(model) == (3, 2)
    with pytest.raises(TypeError, match="`check_fn` says which modules"):
        applied("layers.*", check_fn=lambda module: True)


def test_a_policy_for_each_module():
    selectors = {
        "layers.0": policies.everything_saveable,
        Block: policies.dots_saveable,
        "head": None,
    }
    model = applied(selectors)
    found = [module._remat_spec.options.policy for module in model.layers]
    assert found == [policies.everything_saveable] + [policies.dots_saveable] * 2
    counted(model)
    assert counted(model) == (5, 2)


@pytest.mark.parametrize("policy", [policies.dots_saveable, policies.nothing_saveable])
def test_one_policy_for_all(policy):
    model = applied(policy=policy)
    saves = policy is policies.dots_saveable
    counted(model)
    assert ops_of(lambda: model(X).backward())["addmm"] == (7 if saves else 10)


# --- The model stays what it is ---


def test_it_returns_the_model_and_its_blocks_stay_the_objects_they_are():
    model = model_of()
    layers = [*model.layers]
    assert remat.nn.apply(model) is model
    assert [*model.layers] == layers
    assert all(isinstance(layer, Block) for layer in layers)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, saved_and_loaded], ids=["copy", "save"]
)
def test_copies_and_pickles_recompute(again):
    model = applied(policy=policies.dots_saveable)
    other = again(model)
    assert counted(other) == counted(model) == (6, 1)
    with pytest.raises(
        ValueError, match=r"`layers\.0` \(Block\) is recomputed already"
    ):
        remat.nn.apply(other)
    assert counted(remat.nn.remove(other)) == (3, 1)
    assert counted(model) == (6, 1)


def test_hooks_run_once_outside_of_the_recompute():
    model, fired = model_of(), []
    model.layers[0].register_forward_hook(lambda *_: fired.append("before apply"))
    remat.nn.apply(model)
    model.layers[0].register_forward_pre_hook(lambda *_: fired.append("after apply"))
    model.layers[0].register_full_backward_hook(lambda *_: fired.append("backward"))
    assert counted(model, X.clone().requires_grad_()) == (6, 1)
    assert fired == ["after apply", "before apply", "backward"]


@replayed(tanh=(3, 6), reassociated=True)
def test_under_functional_call_and_grad(wrap):
    model = model_of()
    if wrap is remat.remat:
        remat.nn.apply(model)
    params = {n: p.detach() * 1.5 for n, p in model.named_parameters()}
    return grad(lambda params: functional_call(model, params, (X,)))(params)


def test_a_module_that_is_used_twice_is_selected_once():
    block = Block()
    model = nn.Sequential(block, block, nn.ModuleList())
    model = remat.nn.apply(model[:2], Block)
    assert ops_of(lambda: model(X).sum().backward())["tanh"] == 4


# --- Undone ---


def test_a_module_with_a_forward_of_its_own():
    model = model_of()
    forward = model.head.forward
    model.head.forward = lambda x: forward(x).tanh()
    remat.nn.apply(model, Other)
    assert counted(model) == (3 + 2, 2)
    assert counted(remat.nn.remove(model)) == (3 + 1, 1)


def test_remove_undoes_it():
    model = applied([Block, Other])
    assert remat.nn.remove(model) is model
    assert {*map(type, model.layers)} == {Block}
    assert counted(model) == (3, 1)
    assert counted(remat.nn.apply(model)) == (6, 1)


def test_remove_puts_back_the_modules_that_remat_was_applied_to():
    blocks = Block(), Block()
    model = nn.Sequential(remat.remat(blocks[0]), remat.remat(remat.remat(blocks[1])))
    assert ops_of(lambda: remat.nn.remove(model)(X).sum().backward())["tanh"] == 2
    assert [*model] == [*blocks]
    assert remat.nn.remove(remat.remat(blocks[0])) is blocks[0]


@replayed(tanh=(3, 6))
def test_remove_between_a_forward_and_its_backward(wrap):
    model = model_of()
    if wrap is remat.remat:
        remat.nn.apply(model)
    loss = model(X)
    remat.nn.remove(model)
    loss.backward()
    return [p.grad for p in model.parameters()]


# --- Refused ---


def test_twice_is_refused_and_names_the_module_and_the_line():
    model = applied()
    message = r"`layers\.0` \(Block\) is recomputed already, since .*test_apply\.py:\d+"
    with pytest.raises(ValueError, match=message):
        remat.nn.apply(model)
    assert counted(model) == (6, 1)


def test_a_refused_module_leaves_the_others_as_they_were():
    model = applied("layers.1")
    with pytest.raises(
        ValueError, match=r"`layers\.1` \(Block\) is recomputed already"
    ):
        remat.nn.apply(model, Block)
    assert counted(model) == (4, 1)


REFUSED = {
    "no such name": (lambda: applied("layer.*"), "'layer.*' selects no module of this"),
    "no such class": (lambda: applied(nn.Conv2d), "Conv2d selects no module of this"),
    "no name": (lambda: applied(""), "'' is no name of a module"),
    "no name among others": (lambda: applied({"head": None, " ": None}), "' ' is no"),
    "one of two": (lambda: applied([Block, "haed"]), "'haed' selects no module"),
    "a list": (
        lambda: applied("layers"),
        r"`layers` is a ModuleList, which has no `forward`.*: 'layers\.\*'",
    ),
    "lists": (lambda: applied([Block, nn.ModuleList]), "`layers` is a ModuleList"),
    "a list itself": (
        lambda: remat.nn.apply(nn.ModuleDict({"a": Block()}), nn.ModuleDict),
        r"the model itself is a ModuleDict.*Select the modules in it: '\*'",
    ),
    "no blocks": (lambda: remat.nn.apply(Other()), "has no list of blocks"),
    "no selectors": (lambda: applied([]), r"\[\] selects nothing"),
    "no submodules": (lambda: remat.nn.apply(nn.Tanh(), "x"), "has no modules inside"),
    "two policies": (
        lambda: applied({Block: None}, policy=policies.dots_saveable),
        "gives each module a policy",
    ),
    "prune": (lambda: applied(prune="never"), "prune='never'"),
    "no model": (lambda: remat.nn.apply(3), "int is not a module"),
    "no selector": (lambda: applied(3), "3 is not a selector. Pass a class"),
    "a module": (lambda: applied(nn.Tanh()), "a Tanh that is not in it selects no"),
    "a policy": (
        lambda: applied(policies.dots_saveable),
        r"pass a policy by name: remat.nn.apply\(model, policy=dots_saveable\)",
    ),
    "another class": (lambda: applied(dict), "is not a selector. Pass a class"),
    "no policy": (lambda: applied(policy=3), "policy"),
    "remove": (lambda: remat.nn.remove([]), "list is not a module"),
}


@rows("call, message", REFUSED)
def test_what_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_is_refused():
    model = nn.ModuleDict({"scripted": torch.jit.script(nn.Linear(2, 2))})
    with pytest.raises(TypeError, match="`scripted` is a TorchScript module"):
        remat.nn.apply(model, "scripted")


def test_remove_after_a_library_derived_a_class_is_refused():
    model = applied()
    model.layers[0].extra = nn.Parameter(torch.ones(2))
    parametrize.register_parametrization(model.layers[0], "extra", nn.Tanh())
    with pytest.raises(TypeError, match=r"`layers\.0` is of the class Parametrized"):
        remat.nn.remove(model)
    assert counted(model) == (6, 1)
