"""`remat(module)` is a module: it trains, moves, saves and loads as that one."""

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from support.runs import assert_replayed, replayed, saved_and_loaded
from support.tables import rows
from support.zoo import make, ops_of
from torch import nn
from torch.func import grad
from torch.nn.utils import parametrize

from remat import policies, remat
from remat.nn import apply
from remat.testing import assert_same, count_ops


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, *, times=1):
        return x + self.down(self.up(x).tanh().exp()) * self.scale * times

    def extra_repr(self):
        return "extra"


class Model(nn.Module):
    """Registers what it makes of its blocks."""

    def __init__(self, wrap):
        super().__init__()
        self.first, self.rest = wrap(Block()), nn.Sequential(wrap(Block()), Block())

    def forward(self, x):
        return self.rest(self.first(x)).square().sum()


def model_of(wrap):
    torch.manual_seed(0)
    return Model(wrap)


def plainly(module):
    return module


def tanhs(model, x):
    ops = ops_of(lambda: model(x).backward())
    return ops["tanh"]


X = make(3, 4, seed=2).float()


# --- It is the module ---


@replayed(tanh=(9, 15))
def test_it_trains_with_its_parent(wrap):
    model = model_of(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(X)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, [*model.parameters()]


@pytest.mark.parametrize(
    "names",
    [
        lambda m: [*m.state_dict()],
        lambda m: [n for n, _ in m.named_parameters()],
        lambda m: [n for n, _ in m.named_buffers()],
        lambda m: [(n, type(c).__name__) for n, c in m.named_modules()],
    ],
    ids=["state_dict", "parameters", "buffers", "modules"],
)
def test_names_are_those_without_it(names):
    wrapped = model_of(remat)
    assert names(wrapped) == names(model_of(plainly))
    assert tanhs(wrapped, X) == 5


def test_it_is_an_instance_of_the_class_that_it_wraps():
    block = remat(Block())
    assert isinstance(block, Block)
    assert type(block).__name__ == "Block"
    assert issubclass(type(block), Block)
    assert type(block) is not Block


def test_it_shares_all_that_the_module_has():
    block = Block()
    wrapped = remat(block)
    wrapped.up = nn.Linear(4, 4)
    wrapped.note = "seen"
    wrapped.eval()
    assert block.up is wrapped.up
    assert (block.note, block.training) == ("seen", False)
    wrapped.double()
    assert block.down.weight.dtype == torch.float64


def test_the_module_itself_stays_plain():
    block = Block()
    wrapped = remat(block)
    assert tanhs(lambda x: block(x).sum(), X) == 1
    assert tanhs(lambda x: wrapped(x).sum(), X) == 2


def test_keyword_arguments_and_the_signature_of_forward():
    wrapped = remat(Block())
    assert inspect.signature(wrapped.forward) == inspect.signature(Block().forward)
    assert_same(wrapped(X, times=2), Block.forward(wrapped, X, times=2))


def test_hooks_fire_once_around_the_recompute():
    fired = []
    wrapped = remat(Block())
    wrapped.register_forward_pre_hook(lambda *_: fired.append("before"))
    wrapped.register_forward_hook(lambda m, args, out: fired.append(m) or out * 2)
    y = wrapped(X)
    assert tanhs(lambda x: wrapped(x).sum(), X) == 2
    assert fired == ["before", wrapped, "before", wrapped]
    assert_same(y, wrapped.forward(X) * 2)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, saved_and_loaded], ids=["copy", "save"]
)
@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_copies_and_pickles_recompute_and_share_nothing(again, policy):
    model = model_of(lambda module: remat(module, policy=policy))
    other = again(model)
    assert type(other.first) is type(model.first)
    assert tanhs(other, X) == tanhs(model, X) == 5
    assert_same(
        [p.grad for p in other.parameters()], [p.grad for p in model.parameters()]
    )
    assert not {*map(id, model.parameters())} & {*map(id, other.parameters())}
    assert other.first.up is other.first._modules["up"]


def test_a_copy_of_a_parent_keeps_the_module_and_its_view_one():
    block = Block()
    both = nn.ModuleList([block, remat(block)])
    plain, view = copy.deepcopy(both)
    assert plain.up.weight is view.up.weight
    with torch.no_grad():
        plain.up.weight.add_(1)
    assert_same(plain(X), view(X))


class Twice(nn.Module):
    """The block of the golden table."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(make(4, 4, seed=3))

    def forward(self, x):
        return torch.tanh(self.weight @ torch.tanh(self.weight @ x))


@pytest.mark.parametrize(("policy", "again"), [(None, 2), (policies.dots_saveable, 0)])
def test_a_view_of_a_view_keeps_both_policies(policy, again):
    wrapped, x = remat(remat(Twice(), prune=True), policy=policy), make(4, 4, seed=2)
    x.requires_grad_()
    for _ in range(2):  # recorded, then with the record
        with count_ops() as ops:
            wrapped(x).sum().backward()
        assert (ops["tanh"], ops["mm"]) == (2 + 2, 6 + again)


def test_what_is_not_there_is_an_attribute_error_of_the_module():
    with pytest.raises(AttributeError, match="'Block' object has no attribute 'left'"):
        _ = remat(Block()).left


def test_to_another_dtype_and_device():
    wrapped = remat(Block()).to(torch.float64)
    assert tanhs(lambda x: wrapped(x).sum(), X.double()) == 2
    assert remat(Block()).to("meta")(X.to("meta")).shape == X.shape


# --- Where the module is not an ordinary one ---


def test_a_lazy_module_stays_rematerialized_after_it_is_called():
    wrapped = nn.Sequential(remat(nn.LazyLinear(4)), nn.Tanh())
    wrapped(X)
    assert tanhs(lambda x: remat(wrapped)(x).exp().sum(), X) == 2
    assert isinstance(wrapped[0], nn.Linear)
    assert wrapped[0].weight.shape == (4, 4)
    assert "recompute" not in repr(wrapped)
    assert type(wrapped[0]) is not nn.Linear


@pytest.mark.parametrize(("later", "ran"), [(False, (2, 4)), (True, (2, 3))])
def test_a_module_whose_forward_is_replaced(later, ran):
    def program(wrap):
        torch.manual_seed(0)
        wrapped = block = Block()
        if later:
            wrapped = block = wrap(block)
        forward = block.forward
        block.forward = lambda x: forward(x).tanh()
        if not later:
            wrapped = wrap(block)
        wrapped(X).sum().backward()
        return [p.grad for p in block.parameters()]

    assert_replayed(program, tanh=ran)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module():
    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.weight).sin().exp()

    wrapped = nn.ModuleList([remat(torch.jit.script(Scripted()))])
    assert [n for n, _ in wrapped.named_parameters()] == ["0.weight"]
    x = torch.ones(3)
    with count_ops() as ops:
        for _ in range(3):
            wrapped[0](x).sum().backward()
    assert ops["sin"] == 3 * 2
    expected = 3 * torch.cos(x) * torch.sin(x).exp()
    assert_same(wrapped[0].weight.grad, expected, reassociated=True)


def test_a_compiled_module_is_recomputed():
    compiled = torch.compile(Block(), backend="eager")
    wrapped = nn.Sequential(remat(compiled))
    assert next(iter(wrapped.state_dict())) == "0._orig_mod.scale"
    assert tanhs(lambda x: wrapped(x).sum(), X) == 2


@pytest.mark.parametrize("first", ["wrap", "parametrize"])
# One more where the parametrization is registered.
@replayed(tanh=(3, 4))
def test_a_parametrization(wrap, first):
    torch.manual_seed(0)
    block = Block()
    if first == "wrap":
        block.up = wrap(block.up)
    parametrize.register_parametrization(block.up, "weight", nn.Tanh())
    if first == "parametrize":
        block.up = wrap(block.up)
    block(X).sum().backward()
    return [p.grad for p in block.parameters()]


def traced():
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


IN_PLACE = {"view": remat, "in place": lambda m: apply(m, m)}


@rows("wrap", IN_PLACE)
def test_a_module_of_fx_is_copied_and_compiled_again(wrap):
    wrapped = wrap(traced())
    for again in (wrapped, copy.deepcopy(wrapped), saved_and_loaded(wrapped)):
        again.recompile()
        assert_same(again(X), again.get_submodule("0")(X).tanh())
        with count_ops() as ops:
            again(X).exp().sum().backward()
        assert ops["addmm"] == 2


@rows("wrap", IN_PLACE)
def test_a_replica_has_parameters_of_its_own(wrap):
    replica = wrap(Block())._replicate_for_data_parallel()
    for name in ("up", "down"):
        replica._modules[name] = nn.Linear(4, 4)
    assert tanhs(lambda x: replica(x).sum(), X) == 2
    assert replica.up.weight.grad is not None


@pytest.mark.parametrize(
    ("wrap", "strict"), [(remat, False), (IN_PLACE["in place"], True)]
)
def test_it_is_exported(wrap, strict):
    wrapped = wrap(Block())
    exported = torch.export.export(wrapped, (X,), strict=strict).module()
    assert_same(exported(X), wrapped(X))
    assert tanhs(lambda x: wrapped(x).sum(), X) == 2


class Final(type):
    def __new__(cls, name, bases, names, *, tag):
        return super().__new__(cls, name, bases, names)

    def __init__(cls, name, bases, names, *, tag):
        super().__init__(name, bases, names)


def test_a_class_that_nothing_can_be_derived_of_is_named():
    class Tagged(Block, metaclass=Final, tag=1):
        pass

    with pytest.raises(TypeError, match=r"derived of .*Tagged.* remat\("):
        remat(Tagged())
    module = Tagged()
    module.forward = remat(module.forward)
    assert tanhs(lambda x: module(x).sum(), X) == 2


def test_a_class_that_registers_its_subclasses():
    made = []

    class Registered(Block):
        def __init_subclass__(cls, *, name, **kwargs):
            made.append(name)

    assert isinstance(remat(Registered()), Registered)
    assert made == []


# --- Lifetimes ---


@pytest.mark.usefixtures("_no_collector")
def test_both_are_freed_without_the_collector():
    block = Block()
    wrapped = remat(block)
    wrapped(X).sum().backward()
    refs = weakref.ref(block), weakref.ref(wrapped), weakref.ref(block.up)
    del wrapped
    assert (refs[0]() is block, refs[1]()) == (True, None)
    del block
    assert [ref() for ref in refs] == [None] * 3


def test_a_class_is_freed_with_those_made_of_it():
    class Local(Block):
        pass

    remat(Local())(X).sum().backward()
    ref = weakref.ref(Local)
    del Local
    gc.collect()
    assert ref() is None


def test_a_class_is_made_once_for_each_place():
    blocks = [remat(Block()) for _ in range(3)]
    assert len({*map(type, blocks)}) == 1
    assert type(remat(Block())) is not type(blocks[0])


def test_pickles_hold_the_class_of_the_module():
    text = pickle.dumps(remat(nn.Linear(2, 2)))
    assert b"Linear" in text
    assert isinstance(pickle.loads(text), nn.Linear)


# --- A view and its module have one state ---


class Counting(nn.Module):
    """Changes its own attributes, and what it holds depends on what it computed."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        h = self.linear(x).sin()
        self.size = h.detach().square().mean()
        return nn.functional.dropout(h * self.calls, 0.9, self.training)


def differentiate_twice(module, x):
    (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


DERIVATIVES = {
    "backward": ({}, lambda m, x: m(x).sum().backward()),
    "grad": ({}, lambda m, x: grad(lambda x: m(x).sum())(x)),
    "jacfwd": ({}, lambda m, x: torch.func.jacfwd(m, randomness="same")(x)),
    "higher_order": ({"higher_order": True}, lambda m, x: m(x).sum().backward()),
    "second": ({"higher_order": True}, differentiate_twice),
}


@pytest.mark.parametrize("case", DERIVATIVES)
def test_a_view_shares_the_state_after_a_call_that_changed_it(case):
    options, differentiate = DERIVATIVES[case]
    torch.manual_seed(0)
    module = Counting()
    view, x = remat(module, **options), torch.ones(2, 4, requires_grad=True)
    assert ops_of(lambda: differentiate(view, x))["sin"] >= 2 or case == "jacfwd"
    assert view is not module
    assert vars(view) is vars(module)
    assert view.calls == module.calls == 1
    view.eval()
    assert view(x).all()  # without dropout
    assert copy.deepcopy(view).training is False


class Reading(nn.Module):
    """Reads what a call left in an attribute of its block."""

    def __init__(self, wrap):
        super().__init__()
        self.block = wrap(Leaving())

    def forward(self, x):
        y = self.block(self.block(x))
        return (y * self.block.loss).sin().sum() + self.block.loss


class Leaving(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4), 0.0

    def forward(self, x):
        h = self.linear(x).sin()
        self.loss = h.exp().mean()
        return h.cos()


def test_a_recompute_reads_through_a_view_what_the_module_was_left():
    torch.manual_seed(0)
    plain, ours = Reading(plainly), remat(Reading(remat))
    ours.load_state_dict(plain.state_dict())
    for _ in range(2):
        for model in plain, ours:
            with count_ops() as ops:
                model(torch.ones(2, 4)).backward()
        assert ops["exp"] > 2
    assert_same(*([p.grad for p in of.parameters()] for of in (ours, plain)))
    assert ours.block.linear.weight.grad.any()


def test_a_recompute_reads_a_view_that_the_module_itself_holds():
    module = Counting()
    module.itself = [remat(module)]
    outer = remat(lambda x: (module.itself[0].calls * x).sin() + 0 * module(x))
    x = torch.ones(2, 4, requires_grad=True)
    out = outer(x) + outer(x)
    module.calls = 100
    assert ops_of(lambda: out.sum().backward())["sin"] == 4
    # 0 calls before the first one, 1 before the second.
    expected = torch.full_like(x, torch.tensor(1.0).cos().item())
    assert_same(x.grad, expected)
    assert vars(module.itself[0]) is vars(module)
    assert module.calls == 100


class Scaled(nn.Module):
    __slots__ = ("factor",)

    def __init__(self):
        super().__init__()
        self.scale = self.factor = 1.0
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return (x * self.scale * self.factor).sin()


@pytest.mark.parametrize("differentiate", ["backward", "grad"])
def test_a_recompute_reads_the_slots_of_a_view_as_they_were(differentiate):
    view, x = remat(Scaled()), torch.ones(1, requires_grad=True)
    view.factor = 2.0

    def fn(x):
        view.factor += 1
        return (x * view.factor).sin()

    if differentiate == "grad":
        with count_ops() as ops:
            got = grad(lambda x: remat(fn)(x).sum())(x.detach())
        after = 3.0
    else:
        out = remat(fn)(x)
        view.factor = after = 10.0
        with count_ops() as ops:
            (got,) = torch.autograd.grad(out, x)
    # Plain code has one product less: that of the forward, which runs again.
    assert ops["mul"] == (4 if differentiate == "grad" else 3)
    assert view.factor == after
    assert_same(got, 3 * torch.tensor([3.0]).cos())


def test_a_view_whose_class_changes_before_the_backward_has_it_back_for_a_recompute():
    view, x = remat(Scaled()), torch.ones(1, requires_grad=True)
    out = remat(lambda x: (view.scale * x).sin())(x)
    scale = view.scale
    other = type("Other", (type(view),), {"scale": property(lambda _: 7.0)})
    object.__setattr__(view, "__class__", other)
    with count_ops() as ops:
        out.backward()
    assert ops["mul"] == 1 + 2
    assert_same(x.grad, scale * torch.tensor([scale]).cos())
    assert type(view) is other
