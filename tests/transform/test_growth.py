"""Many calls leave nothing behind: no object, and no entry of a cache."""

import gc
import importlib
import pkgutil

import pytest
import torch
from support.tables import rows
from support.watch import Watch
from support.zoo import Evaluations
from torch import nn
from torch.func import grad, vmap

import remat as package
from remat import remat


pytestmark = pytest.mark.usefixtures("_no_collector")


def caches():
    """Return the sizes of the containers that the package's modules hold."""
    sizes = {}
    for info in pkgutil.walk_packages(package.__path__, "remat."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if name == "TORCH_NODES":  # torch's own, which its lazy imports add to
                continue
            if isinstance(value, (dict, list, set)) and not name.startswith("__"):
                sizes[info.name, name] = len(value)
            elif hasattr(value, "cache_info") and not isinstance(value, type):
                sizes[info.name, name] = value.cache_info().currsize
    return sizes


def fresh_step():
    """Run a step with a function, a closure and a module that are new each time."""
    scale = torch.linspace(1, 2, 4)
    layer = nn.Linear(4, 4)
    calls = Evaluations()

    def fn(x):
        calls.note(1)
        return (layer(x) * scale).tanh().exp()

    remat(fn)(torch.ones(4, requires_grad=True)).sum().backward()
    grad(lambda x: remat(fn)(x).sum())(torch.ones(4))
    vmap(grad(lambda x: remat(fn)(x).sum()))(torch.ones(2, 4))
    assert len(calls) == 6


def training_step():
    scale = torch.linspace(1, 2, 4)
    calls = Evaluations()

    def fn(x):
        calls.note(None)
        return (x * scale).tanh().exp()

    remat(fn)(torch.ones(4, requires_grad=True)).sum().backward()
    assert len(calls) == 2
    calls.clear()


def count_objects():
    """Count tensors and remat's own objects; torch.func leaves closures of its own."""
    return sum(
        issubclass(type(item), torch.Tensor)
        or str(getattr(type(item), "__module__", "")).startswith("remat")
        for item in gc.get_objects()
    )


def test_the_object_count_sees_a_tensor_left_behind():
    before = count_objects()
    left = torch.ones(3)
    assert count_objects() == before + 1
    del left
    assert count_objects() == before


# What is repeated, and what does not grow with it.
GROWTH = {
    "caches": (fresh_step, caches),
    "own_objects": (fresh_step, count_objects),
    "objects_of_any_kind": (training_step, lambda: len(gc.get_objects())),
}


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
@rows("step, measure", GROWTH)
def test_repeated_calls_leave_nothing_behind(step, measure, times):
    measure()  # which imports what is imported later
    for _ in range(3):
        step()
    before = measure()
    for _ in range(times):
        step()
    after = measure()
    assert after == before or (step is training_step and after - before < 5)


def test_new_code_is_remembered_only_up_to_a_bound():
    """Each round compiles new code, as running a notebook cell again does."""
    x = torch.linspace(0, 1, 4)
    source = "def fn(x):\n    calls.note(1)\n    return x.sin().exp().sum()"

    def run(times):
        for _ in range(times):
            scope = {"calls": Evaluations()}
            exec(source, scope)
            grad(remat(scope["fn"]))(x)
            assert len(scope["calls"]) == 2

    caches()  # which imports what is imported later
    run(20)
    before = caches()
    run(200)
    grown = {name: size - before[name] for name, size in caches().items()}
    assert max(grown.values()) <= 200, "at most one entry for each code object"


def test_a_namespace_made_by_exec_is_freed():
    watch = Watch()
    scope = {"weight": watch(torch.linspace(1, 2, 4)), "calls": Evaluations()}
    exec("def fn(x):\n    calls.note(1)\n    return (x * weight).sin().sum()", scope)
    remat(scope["fn"])(torch.ones(4, requires_grad=True)).backward()
    assert len(scope["calls"]) == 2
    del scope
    gc.collect()  # a function and its namespace are a cycle of Python's own
    assert watch.alive == 0
