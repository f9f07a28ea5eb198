"""Keys go wherever a tensor goes: copies, pytrees, transforms, graphs."""

import copy
import doctest
import pickle
from pathlib import Path

import pytest
import torch
from support.draws import KEYS, K
from support.tables import rows
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree

from remat import random, remat
from remat._base import pytree
from remat.testing import assert_same, count_ops


# --- Copies ------------------------------------------------------------------------


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle 2": lambda k: pickle.loads(pickle.dumps(k, 2)),
    "pickle 5": lambda k: pickle.loads(pickle.dumps(k, 5)),
}


@rows("copied", COPIES)
@pytest.mark.parametrize("keys", [K, KEYS, random.key(2**64 - 1)], ids=repr)
def test_a_copy_is_an_equal_key(copied, keys):
    assert copied(keys) == keys
    assert copied({"k": [keys]})["k"][0].data.dtype == torch.uint64


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_key_is_saved_and_loaded(tmp_path, weights_only):
    torch.save(KEYS, tmp_path / "keys")
    assert torch.load(tmp_path / "keys", weights_only=weights_only) == KEYS


def test_a_key_moved_to_its_own_device_keeps_its_memory():
    assert KEYS.to("cpu").data is KEYS.data


# --- A pytree ----------------------------------------------------------------------


def test_data_is_the_only_leaf():
    for flatten in (pytree.flatten, _pytree.tree_flatten):
        leaves, treedef = flatten({"k": KEYS, "n": 1})
        assert [type(leaf) for leaf in leaves] == [torch.Tensor, int]
    leaves, treedef = pytree.flatten({"k": KEYS})
    assert pytree.paths(treedef) == ["['k'].data"]
    assert pytree.unflatten(treedef, leaves)["k"] == KEYS


def test_a_tree_may_hold_what_is_no_data():
    named = _pytree.tree_map(lambda _: "here", [K])
    assert named[0].data == "here"
    assert repr(named[0]) == "Key('here')"
    assert pytree.unflatten(pytree.flatten([K])[1], [None])[0].data is None


def test_the_path_of_a_leaf_is_an_attribute():
    (path, _), *_ = _pytree.tree_flatten_with_path([K])[0]
    assert _pytree.keystr(path) == "[0].data"


def test_the_structure_of_a_key_is_saved_and_loaded():
    treedef = _pytree.tree_flatten(K)[1]
    text = _pytree.treespec_dumps(treedef)
    assert _pytree.treespec_loads(text) == treedef


# --- Transforms --------------------------------------------------------------------


def draws(key):
    return random.normal(key, (3,))


def test_vmap_takes_and_returns_keys():
    assert_same(vmap(draws)(KEYS[0]), torch.stack([draws(k) for k in KEYS[0]]))
    assert vmap(random.split)(KEYS[0]) == random.wrap_key_data(
        random.split(KEYS[0]).data.transpose(0, 1)
    )
    assert vmap(lambda k: k)(KEYS) == KEYS
    assert vmap(lambda k: k[1])(KEYS) == KEYS[:, 1]


X = torch.tensor([0.5, 1.0, 2.0])


def loss(x, key=K):
    a, b = random.split(key)
    return ((draws(a) * x).sin() * random.uniform(b, (3,))).sum()


def test_remat_returns_keys():
    leaf = X.clone().requires_grad_()
    with count_ops() as ops:
        y, keys = remat(lambda x, k: (x.sin().exp(), random.split(k)))(leaf, K)
        y.sum().backward()
    assert keys == random.split(K)
    assert ops["sin"] == 2


def test_make_fx_takes_and_returns_keys():
    def fn(key):
        a, b = random.split(key)
        return random.fold_in(a, 3), draws(b)

    traced = make_fx(fn)(K)
    assert_same(traced(K)[1], fn(K)[1])
    assert traced(KEYS[0, 0])[0] == fn(KEYS[0, 0])[0]
    assert len(traced.graph.nodes) <= 12
    assert make_fx(vmap(fn))(KEYS[0])(KEYS[1])[0] == vmap(fn)(KEYS[1])[0]
    fake = make_fx(fn, tracing_mode="symbolic")(K)
    assert_same(fake(K)[1], fn(K)[1])


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_functions_take_and_return_keys(backend):
    torch._dynamo.reset()

    def fn(key, tree):
        a, b = random.split(key)
        keys = [random.fold_in(k, i) for i, k in enumerate(random.split(b, 3))]
        made = random.key_data(random.wrap_key_data(random.key_data(a)))
        assert len(keys) == 3
        return {"a": a, "twin": random.clone(tree["k"][0])}, draws(keys[1]), made

    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    got, want = (f(K, {"k": KEYS}) for f in (compiled, fn))
    assert got[0] == want[0]
    assert_same(got[1:], want[1:])
    assert_same(compiled(KEYS[0, 0], {"k": KEYS})[1], fn(KEYS[0, 0], {"k": KEYS})[1])


def test_compiled_transforms_of_functions_that_take_keys():
    torch._dynamo.reset()
    fn = vmap(grad(loss), in_dims=(None, 0))
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    assert_same(compiled(X, KEYS[0]), fn(X, KEYS[0]), reassociated=True)


STEPS = [*range(20), 2**40, 2**63 - 1]
LARGE = [2**63, 2**64 - 1, 2**64 - 2, 3, 4]
COMPILED = {
    "fold_in": (lambda n: random.fold_in(K, n).data, STEPS, 2),
    "fold_in of many": (lambda n: random.fold_in(KEYS, n).data, STEPS, 2),
    "key": (lambda n: random.key(n).data, [*STEPS, -1, -(2**63)], 2),
    "fold_in, large": (lambda n: random.fold_in(K, n).data, LARGE, 3),
    "key, large": (lambda n: random.key(n).data, LARGE, 3),
}


@rows("make, numbers, graphs", COMPILED, fast=("fold_in", "key, large"))
def test_a_number_that_varies_is_compiled_for_all_at_once(make, numbers, graphs):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(make, backend=counter, fullgraph=True)
    for number in numbers:
        assert_same(compiled(number), make(number))
    assert counter.frame_count <= graphs


def test_the_examples_of_the_reference_page_run():
    page = Path(__file__).parents[2] / "docs" / "api" / "random.md"
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    ran = doctest.testfile(str(page), module_relative=False, optionflags=options)
    assert ran.failed == 0
    assert ran.attempted > 10
