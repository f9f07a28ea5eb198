"""Keys are made, derived, indexed and compared, and are no numbers."""

import functools
import operator

import numpy as np
import pytest
import torch
from support.draws import FOLDED, KEYS, SPLIT, K, raw
from support.tables import rows
from torch.func import grad, vmap

from remat import random
from remat.random import Key
from remat.testing import assert_same


FOLD = functools.partial(random.fold_in, K)


# --- Making keys -------------------------------------------------------------------


def test_the_keys_of_a_seed_are_those_of_torch():
    assert_same(K.data, raw(42, 0))
    assert_same(random.split(K, 3).data, SPLIT)
    assert_same(random.fold_in(K, 7).data, FOLDED)
    assert (K.shape, K.ndim, K.device) == ((), 0, K.data.device)


@pytest.mark.parametrize(
    ("seed", "word"),
    [
        *((0, 0), (2**64 - 1, 2**64 - 1), (2**63, 2**63)),
        *((-1, 2**64 - 1), (-(2**63), 2**63), (True, 1), (torch.tensor(3), 3)),
    ],
)
def test_a_seed_is_any_integer_of_64_bits(seed, word):
    assert random.key(seed).data.tolist() == [word, 0]


def test_a_key_is_made_on_a_device():
    assert random.key(1, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert random.key(1).device.type == "meta"
    meta = K.to("meta")
    assert random.split(meta, 3).shape == (3,)
    assert random.fold_in(meta, 1).device.type == "meta"
    assert "meta" in repr(meta)


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (torch.zeros(2), TypeError, "torch.uint64, got torch.float32"),
        (torch.zeros(2, dtype=torch.int64), TypeError, "torch.uint64, got torch.int64"),
        (42, TypeError, r"got int. To make a key, use remat.random.key\(seed\)"),
        (torch.zeros((), dtype=torch.uint64), ValueError, r"an offset; got \[\]"),
        (torch.zeros(3, dtype=torch.uint64), ValueError, r"an offset; got \[3\]"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        *(Key, random.wrap_key_data, random.key_data, random.split, random.clone),
        *(lambda d: random.fold_in(d, 1), random.uniform),
    ],
)
def test_data_that_is_no_key_is_refused(use, data, error, match):
    with pytest.raises(error, match=match):
        use(data)


# --- Deriving keys -----------------------------------------------------------------


def test_split_gives_a_new_dimension_in_front():
    assert random.split(K).shape == (2,)
    assert random.split(KEYS).shape == (2, 2, 3)
    assert random.split(KEYS, 0).shape == (0, 2, 3)
    a, b = random.split(KEYS)
    assert a.shape == b.shape == (2, 3)
    assert a[1, 2] == random.split(KEYS[1, 2])[0]
    assert b[0, 1] == random.split(KEYS[0, 1])[1]


def test_split_into_a_shape_is_the_flat_split_reshaped():
    assert_same(random.split(K, (2, 3)).data, random.split(K, 6).data.view(2, 3, 2))
    assert random.split(KEYS, (4, 5)).shape == (4, 5, 2, 3)
    assert random.split(K, ()).shape == ()
    assert random.split(K, ()) == random.split(K, 1)[0]


def test_numbers_of_numpy_are_numbers():
    assert random.split(K, np.int64(3)) == random.split(K, 3)
    assert random.split(K, (np.int32(3), 2)) == random.split(K, (3, 2))
    assert random.fold_in(K, np.uint64(2**64 - 1)) == random.fold_in(K, 2**64 - 1)
    assert random.key(np.int64(-1)) == random.key(-1)
    for shape in (np.int64(4), (np.int64(4),), np.array([4]), [4]):
        assert_same(random.uniform(K, shape), random.uniform(K, 4))


def test_fold_in_broadcasts_keys_and_numbers():
    out = random.fold_in(KEYS, torch.tensor([5, 6, 7]))
    assert out.shape == (2, 3)
    assert out[1, 2] == random.fold_in(KEYS[1, 2], 7)
    assert random.fold_in(KEYS[:, :1], torch.arange(4)).shape == (2, 4)


def test_a_raw_key_gives_a_raw_key_of_the_same_bits():
    data = KEYS.data
    assert_same(random.split(data, 3), random.split(KEYS, 3).data)
    assert_same(random.fold_in(data, 3), random.fold_in(KEYS, 3).data)
    assert_same(random.clone(data), data)
    assert_same(random.key_data(data), data)
    assert_same(random.uniform(data, 3), random.uniform(KEYS, 3))


def test_a_clone_is_an_equal_key_with_memory_of_its_own():
    twin = random.clone(KEYS)
    assert twin == KEYS
    assert twin.data.data_ptr() != KEYS.data.data_ptr()


def test_raw_keys_of_torch_are_keys():
    theirs = pytest.importorskip("torch.func._random").key(42)
    assert_same(random.split(theirs, 3), SPLIT)
    assert random.wrap_key_data(theirs) == K


# --- An array of keys --------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        *(0, -1, slice(1, None), (1, 2), (slice(None), 0), None, Ellipsis, (..., 0)),
        *((0, ...), (None, 1, ..., None, 2), [1, 0], torch.tensor([[0, 1]])),
        *((torch.tensor([0, 1]), torch.tensor([2, 0])), ([1], slice(None), None)),
        *(torch.tensor([True, False]), torch.ones(2, 3, dtype=torch.bool), ()),
        (..., torch.tensor([True, False, True])),
        *([True, False], ([[True, False, True]] * 2,), np.ones((2, 3), bool)),
        *(np.array([1, 0]), np.int64(1), torch.tensor(1)),
    ],
)
def test_an_index_is_into_the_shape_of_the_keys(index):
    # A number for each key stands in for it.
    numbers = torch.arange(6).view(2, 3)
    flat = KEYS.data.view(6, 2)
    assert_same(KEYS[index].data, flat[numbers[index]])


def test_keys_are_iterated_over_and_counted():
    assert len(KEYS) == 2
    assert [k.shape for k in KEYS] == [(3,)] * 2
    a, b, c = KEYS[1]
    assert [a, b, c] == [KEYS[1, i] for i in range(3)]
    assert a in KEYS[1]


# --- What is refused ---------------------------------------------------------------


MANY = r"3 indices for keys of shape \(2, 3\)"
NO_INTEGER = "cannot be interpreted as an integer"
SOME = torch.ones(2, 3, dtype=torch.bool)
# What is called, with what, and the error.
REFUSED = {
    "a seed too large": (random.key, 2**64, OverflowError, "has more than 64 bits"),
    "too small": (random.key, -(2**63) - 1, OverflowError, "has more than 64 bits"),
    "a float for a seed": (random.key, 1.0, TypeError, NO_INTEGER),
    "a text for a seed": (random.key, "1", TypeError, NO_INTEGER),
    "no seed": (random.key, None, TypeError, NO_INTEGER),
    "a negative number": (FOLD, -1, ValueError, r"from 0 to 2\*\*64 - 1, got -1"),
    "a number too large": (FOLD, 2**64, ValueError, r"0 to 2\*\*64 - 1, got 18446744"),
    "a float": (FOLD, 1.0, TypeError, NO_INTEGER),
    "floats": (FOLD, torch.ones(2), TypeError, "integers, got a tensor of torch.flo"),
    "bools": (FOLD, SOME, TypeError, "integers, got a tensor of torch.bool"),
    "complex": (FOLD, torch.ones(2) * 1j, TypeError, "a tensor of torch.complex64"),
    "three indices": (KEYS.__getitem__, (0, 0, 0), IndexError, MANY),
    "four indices": (KEYS.__getitem__, (..., 0, 0, 0), IndexError, MANY),
    "a mask and an index": (KEYS.__getitem__, (SOME, 0), IndexError, MANY),
    "of NumPy": (KEYS.__getitem__, (SOME.numpy(), 0), IndexError, MANY),
    "a list": (KEYS.__getitem__, (SOME.tolist(), slice(None)), IndexError, MANY),
    "an index of one": (K.__getitem__, 0, IndexError, "1 ind.*use remat.random.split"),
    "a negative count": (
        *(lambda n: random.split(K, n), (2, -1)),
        *(ValueError, r"cannot split a key into \(2, -1\) keys"),
    ),
    "assigned to": (
        *(lambda data: setattr(K, "data", data), KEYS.data),
        *(AttributeError, "cannot assign to field 'data'"),
    ),
    "the length of one": (len, K, TypeError, r"len\(\) of one key"),
    "the items of one": (iter, K, TypeError, "one key cannot be iterated over"),
    "hashed": (hash, K, TypeError, "a key cannot be hashed"),
    "asked for its truth": (bool, K, TypeError, "neither true nor false.*None"),
}


@rows("use, what, error, match", REFUSED)
def test_what_is_no_key_no_seed_and_no_index_is_refused(use, what, error, match):
    with pytest.raises(error, match=match):
        use(what)


# --- Equality ----------------------------------------------------------------------


def test_equality_is_of_the_bits():
    assert (random.key(42) == K) is True
    assert (random.key(43) == K) is False
    assert random.key(43) != K
    assert random.wrap_key_data(raw(42, 1)) != K
    assert KEYS[0] != KEYS
    assert K not in (K.data.tolist(), 42)


def test_repr_shows_one_key_and_the_shape_of_many():
    assert repr(K) == "Key(seed=42, offset=0)"
    assert repr(KEYS) == "Key(shape=(2, 3), device='cpu')"


def test_a_key_has_a_repr_under_transforms():
    shown = []
    show = lambda k: shown.append(repr(k)) or k.data
    vmap(show)(KEYS)
    grad(lambda x, k: show(k) is None or x)(torch.ones(()), K)
    vmap(vmap(show))(KEYS)
    assert len(shown) == 3
    assert all(s.startswith("Key(") for s in shown)
    assert "BatchedTensor" in shown[-1]


BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow, operator.matmul, operator.and_, operator.or_),
    *(operator.xor, operator.lshift, operator.rshift, operator.lt, operator.ge),
]


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("other", [1, 2.0, torch.ones(2), K], ids=str)
def test_there_is_no_arithmetic_on_keys(op, other):
    for args in ((K, other), (other, K)):
        with pytest.raises(TypeError, match=r"unsupported operand|not supported"):
            op(*args)


@pytest.mark.parametrize(
    "op",
    [
        *(operator.neg, operator.pos, operator.inv, abs, int, float, complex, range),
        *(round, lambda k: divmod(k, 2), lambda k: divmod(2, k)),
    ],
)
def test_a_key_is_no_number(op):
    with pytest.raises(TypeError, match=r"Key|key"):
        op(K)


@pytest.mark.parametrize("op", [torch.sin, lambda k: torch.add(k, 1), torch.stack])
def test_torch_does_not_take_a_key_for_a_tensor(op):
    with pytest.raises(TypeError, match=r"Key|Tensors"):
        op(K)


def test_key_data_and_wrap_key_data_are_inverse():
    assert random.key_data(KEYS) is KEYS.data
    assert random.wrap_key_data(random.key_data(KEYS)) == KEYS
