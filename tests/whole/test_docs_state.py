"""docs/limits.md on state: what a recompute puts back, watches, and does not see."""

import copy
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from support.claims import gradient, ones, scaled
from torch import nn
from torch.overrides import TorchFunctionMode

from remat import CaptureError, MutationError, RecomputeError, remat
from remat.testing import count_ops


# --- What the function changes ---


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


@pytest.mark.parametrize("passed", [False, True], ids=["captured", "passed"])
def test_containers_within_containers_are_changed_by_the_forward_only(passed):
    held, x = {"inner": {"w": torch.full((3,), 2.0)}}, ones(3)

    def popping(x, held):
        return (x * held["inner"].pop("w")).exp()

    y = remat(popping)(x, held) if passed else remat(lambda x: popping(x, held))(x)
    assert held == {"inner": {}}
    with count_ops() as ops:
        assert torch.equal(gradient(y, x), 2 * y)
    assert ops["exp"] == 1
    assert held == {"inner": {}}


def test_an_embedding_whose_rows_are_scaled_again_is_recomputed_as_it_was():
    def gradients(fn, embed):
        y, inputs = fn(torch.arange(3)), torch.arange(4).flip(0)
        fn(inputs)
        with count_ops() as ops:
            y.sum().backward()
        return ops, embed.weight.grad

    torch.manual_seed(0)
    embed = nn.Embedding(4, 3, max_norm=1.0)
    same = copy.deepcopy(embed)
    ops, grad = gradients(remat(lambda i: embed(i).sin().exp()), embed)
    _, expected = gradients(lambda i: same(i).sin().exp(), same)
    assert torch.equal(grad, expected)
    assert ops["sin"] == 1
    assert torch.equal(embed.weight, same.weight)


def test_an_embedding_whose_rows_are_scaled_is_refused_under_torch_func():
    embed = nn.Embedding(4, 3, max_norm=0.1)
    fn = remat(lambda i, x: (embed(i) * x).sin())

    def loss(x):
        return fn(torch.arange(3), x).sum()

    with pytest.raises(MutationError, match=r"`embed\.weight`"):
        torch.func.grad(loss)(ones(3))


# --- What changes between the call and its backward ---


def test_a_module_of_another_dtype_by_then_fails_in_the_backward():
    module = nn.Linear(3, 3)
    out = remat(lambda x: module(x).sin().exp())(ones(2, 3))
    module.double()
    with pytest.raises(RecomputeError, match="float64"):
        out.sum().backward()


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


def an_entry():
    config = {"scale": 2.0}
    return lambda: config["scale"], lambda value: config.update(scale=value)


def an_attribute():
    options = SimpleNamespace(scale=2.0)
    return lambda: options.scale, lambda value: setattr(options, "scale", value)


def an_object_in_a_list(size):
    held = [SimpleNamespace(scale=2.0) for _ in range(size)]
    return lambda: held[0].scale, lambda value: setattr(held[0], "scale", value)


STATES = {
    "an entry of a dict": an_entry,
    "an attribute of an object": an_attribute,
    "an object in a list of 1000": lambda: an_object_in_a_list(1000),
    "an object in a list of 1001": lambda: an_object_in_a_list(1001),
}


@pytest.mark.parametrize("state", STATES.values(), ids=list(STATES))
def test_what_is_put_back(state):
    x, (read, write) = ones(3), state()
    y = remat(lambda x: scaled(x, read()))(x)
    write(5.0)
    with count_ops() as ops:
        got = gradient(y, x)
    assert ops["mul"] == 1 + 2
    assert torch.equal(got, 2 * (2 * x).cos())
    assert read() == 5.0


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


def test_attributes_of_python_modules_are_not_found_under_torch_func():
    x = ones(3)

    def fn(x):
        return (x * settings.WEIGHT).exp()

    assert torch.equal(gradient(remat(fn)(x), settings.WEIGHT), gradient(fn(x), x))
    with pytest.raises(CaptureError, match="no input of the call"):
        torch.func.grad(lambda x: remat(fn)(x).sum())(x)


def test_attributes_of_python_modules_are_inputs():
    x = ones(3)
    y = remat(lambda x: (x * settings.CONSTANT).square())(x)
    settings.CONSTANT.fill_(2.0)
    with pytest.raises(MutationError, match="was changed in place between"):
        gradient(y, x)
    settings.CONSTANT.fill_(1.0)


def test_attributes_that_are_found_by_computed_names_are_read_as_they_are_by_then():
    x, name = ones(3), "SCALE"
    settings.SCALE = 2.0
    y = remat(lambda x: scaled(x, getattr(settings, name)))(x)
    settings.SCALE = 5.0
    with count_ops() as ops:
        got = gradient(y, x)
    assert ops["mul"] == 1 + 2
    # The sine's part is of the recompute; what the product saved is a number.
    assert torch.equal(got, 2 * (5 * x).cos())


class Config:
    scale = 2.0


def test_attributes_of_classes_are_put_back():
    x = ones(3)
    y = remat(lambda x: scaled(x, Config.scale))(x)
    Config.scale = 5.0
    with count_ops() as ops:
        got = gradient(y, x)
    assert Config.scale == 5.0
    Config.scale = 2.0
    assert ops["mul"] == 1 + 2
    assert torch.equal(got, 2 * (2 * x).cos())


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


# --- What is watched ---


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


@pytest.mark.parametrize("rows", [128, 129])
def test_captured_tensors_without_a_gradient_may_change_if_they_are_small(rows):
    x, table = ones(3), torch.zeros(rows, 128)

    def fn(x):
        table.add_(1)
        return (x * table[0, :3]).sin()

    if rows == 129:
        with pytest.raises(MutationError, match="`table` was changed in place inside"):
            remat(fn)(x)
        return
    with count_ops() as ops:
        got = gradient(remat(fn)(x), x)
    assert ops["add_"] == 2
    assert torch.equal(got, x.cos())
    assert torch.equal(table, torch.ones(rows, 128))


def test_generators_are_read_once():
    def fn(x, numbers):
        return scaled(x, next(numbers))

    numbers, x = (n for n in (2.0, 3.0)), ones(3)
    with pytest.raises(CaptureError, match="`numbers` is a generator"):
        remat(fn)(x, numbers)
    y = remat(lambda x: fn(x, numbers))(x)
    with pytest.raises(RecomputeError, match="reads the generator `numbers`"):
        gradient(y, x)


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
    with pytest.raises(MutationError, match=r"`self\.weight` was changed"):
        y.sum().backward()
    assert torch.equal(module.weight, before / 2)
