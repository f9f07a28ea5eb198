"""What is remembered of a module, and that it keeps nothing alive."""

import copy
import gc
import pickle
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.changes import ODD, Block, Inner, is_remembered
from support.runs import assert_replayed, replayed
from support.tables import rows
from support.zoo import make, ops_of
from torch import nn

from remat import remat
from remat._reach import roots as _roots
from remat.testing import assert_same, count_ops


def leaf():
    return make(4, 4, seed=2).requires_grad_()


def call_and_backward(model, times=1):
    """The output of the last call; each is recomputed."""
    with count_ops() as ops:
        for _ in range(times):
            y = remat(model)(leaf())
            y.sum().backward()
    assert ops["exp"] == 2 * times
    return y


# --- What is remembered ------------------------------------------------------------


class Slotted:
    __slots__ = ("scale",)


REMEMBERED = {
    "slots": lambda m: setattr(m, "slotted", Slotted()),
    "hook": lambda m: m.inner[0].register_forward_hook(lambda *_: None),
    "large": lambda m: setattr(m, "many", [*range(2000)]),
}


@pytest.fixture
def walks(monkeypatch):
    """The roots that were walked so far."""
    found, walk = [], _roots.lay_out
    monkeypatch.setattr(
        _roots, "lay_out", lambda root: found.append(root) or walk(root)
    )
    return found


@rows("change", REMEMBERED)
def test_a_module_is_walked_once(change, walks):
    model = Block().double()
    change(model)
    call_and_backward(model)
    assert any(root is model for root in walks)
    walks.clear()
    call_and_backward(model, times=3)
    assert not walks
    assert is_remembered(model)


class Counting(Block):
    """Changes in each forward what is assigned in a tree."""

    def __init__(self):
        super().__init__()
        self.count, self.last = 0, None

    def forward(self, x):
        self.count += 1
        self.first.factor = 0.1 * self.count
        self.first._buffers["scale"] = self.first.scale + 1
        self.shape, self.last = x.shape, super().forward(x)
        self.activation = self.last.detach()
        return self.last * 2


def test_a_module_whose_numbers_change_in_each_call_is_not_walked_again(walks):
    model = Counting().double()
    call_and_backward(model, times=2)
    walks.clear()
    call_and_backward(model, times=4)
    assert not walks


# --- Nothing is kept alive ---------------------------------------------------------


@pytest.fixture
def _no_collector():
    with count_ops():
        Block()  # the first under a mode leaves a cycle of frames of torch's
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("is_used", [False, True], ids=["no graph", "graph alive"])
def test_a_module_is_freed(is_used):
    model = Block().double()
    y = call_and_backward(model, times=3)
    assert is_remembered(model)
    refs = [weakref.ref(v) for v in (*model.modules(), model.part)]
    if not is_used:
        del y  # whose graph leads to the parameters, as in plain code
        refs += [weakref.ref(p) for p in model.parameters()]
    key = id(model)
    del model
    assert [ref() for ref in refs] == [None] * len(refs)
    assert key not in _roots._LAYOUTS


@pytest.mark.usefixtures("_no_collector")
@replayed(exp=2)
def test_a_module_is_freed_before_the_backward_and_its_parameters_get_gradients(wrap):
    model, x = Block().double(), leaf()
    params = [*model.parameters()]
    y = wrap(model)(x).sum()
    refs = [weakref.ref(v) for v in model.modules()]
    del model
    assert [ref() for ref in refs] == [None] * len(refs)
    return torch.autograd.grad(y, params)


@pytest.mark.usefixtures("_no_collector")
def test_what_was_replaced_is_freed():
    model = Block().double()
    call_and_backward(model, times=2)
    refs = [weakref.ref(model.first), weakref.ref(model.second.linear.weight)]
    model.first = Inner().double()
    model.second.linear.weight = nn.Parameter(torch.ones(4, 4).double())
    assert [ref() for ref in refs] == [None, None]
    call_and_backward(model, times=2)


CYCLES = {name: ODD[name] for name in ODD if name.endswith("holds the model")} | {
    "a hook that holds the model": lambda m: m.first.register_forward_hook(
        lambda _, args, out: m and out
    )
}


@rows("change", CYCLES)
def test_a_module_in_a_cycle_is_collected(change):
    model = Block().double()
    change(model)
    call_and_backward(model, times=2)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_copies_and_pickles_hold_nothing_of_a_call():
    model = Block()
    plain = set(vars(model))
    call_and_backward(model.double(), times=2)
    assert set(vars(model)) == plain
    assert set(vars(copy.deepcopy(model))) == plain
    assert set(vars(pickle.loads(pickle.dumps(model)))) == plain


# --- Other modules and threads -----------------------------------------------------


TABLE = weakref.WeakKeyDictionary()


class ByIdentity(nn.Module):
    """Finds what belongs to it by itself, which a copy of it would not."""

    def forward(self, x):
        return (x * TABLE[self]).sin().exp()


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Tanh()

    def forward(self, x):
        return self.last(self.inner(x))


def test_a_module_that_is_gone_leaves_other_threads_as_they_were():
    child = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    found = ByIdentity()
    TABLE[found] = 2.0
    of_a_module_that_is_gone = lambda: remat(Around(child))(leaf()).sum()
    assert ops_of(lambda: of_a_module_that_is_gone().backward())["addmm"] == 2
    x, plain = leaf(), leaf()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: remat(found)(x).sum().backward()).result()
    found(plain).sum().backward()
    assert_same(x.grad, plain.grad)


# --- The code of its classes -----------------------------------------------------

SOURCE = None
GENERATOR = torch.Generator()


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x).sin() * noise(x)).exp()


def noise(x):
    return 1.0 if SOURCE is None else torch.rand(x.shape, generator=SOURCE)


def drawing(x):
    return torch.rand(x.shape, generator=GENERATOR)


def draw_in_forward(self, x):
    return (self.linear(x).sin() * drawing(x)).exp()


def check_noise(model):
    def program(wrap):
        GENERATOR.manual_seed(1)
        y = wrap(model)(x).sum()
        return torch.autograd.grad(y, [*model.parameters()]), GENERATOR.get_state()

    x = torch.randn(2, 4)
    assert_replayed(program, sin=2)


REBOUND = {
    "global": lambda mp: mp.setitem(globals(), "SOURCE", GENERATOR),
    "function": lambda mp: mp.setitem(globals(), "noise", drawing),
    "method": lambda mp: mp.setattr(Noisy, "forward", draw_in_forward),
    "code": lambda mp: mp.setattr(noise, "__code__", drawing.__code__),
}


@rows("change", REBOUND)
def test_streams_that_code_comes_to_reach_are_replayed(change, monkeypatch):
    model = Noisy()
    check_noise(model)
    change(monkeypatch)
    for _ in range(2):
        check_noise(model)


def test_a_class_is_freed():
    class Local(Noisy):
        """Made in a notebook's cell, say."""

    model = Local()
    check_noise(model)
    ref = weakref.ref(Local)
    del Local, model
    gc.collect()
    assert ref() is None


def test_the_class_of_a_module_that_lives_lets_others_go(monkeypatch):
    class Other:
        """What a global refers to for a while."""

        def __new__(cls, x):
            return 1.0

    monkeypatch.setitem(globals(), "noise", Other)
    model = Noisy()
    check_noise(model)
    ref = weakref.ref(Other)
    monkeypatch.undo()
    del Other
    gc.collect()
    assert ref() is None
    check_noise(model)


# --- Hooks that hold the whole model, on a block that is a call of its own ---


class Trainer:
    def __init__(self, count):
        self.step, self.model = (
            0,
            nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)
            ),
        )
        for block in self.model:
            block[0].register_forward_hook(self.scaled)

    def scaled(self, _module, _args, out):
        return out * (1 + self.step)


def calls_of_a_step(count):
    """The calls in Python of the first block's forward and backward."""
    trainer = Trainer(count)
    block, x, calls = remat(trainer.model[0]), torch.ones(2, 4), []

    def step():
        block(x).sum().backward()

    step()
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(lambda _frame, event, _arg: calls.append(event))
        try:
            step()
        finally:
            sys.setprofile(None)
    return calls.count("call")


def test_a_call_costs_as_much_beside_many_blocks_as_beside_few():
    assert calls_of_a_step(64) <= 1.05 * calls_of_a_step(2)
