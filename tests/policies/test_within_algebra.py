"""`within` as a value: it combines, compares, hashes, pickles and prints."""

import copy
import pickle

import pytest
import torch
from support.operations import MM, OPS, SIN, op
from support.policies import keys_of

from remat import policies
from remat.policies import (
    Decision,
    dots_saveable,
    everything_saveable,
    nothing_saveable,
    save_from_both_policies,
    save_only_these_names,
    within,
)


SAVE, RECOMPUTE = Decision.SAVE, Decision.RECOMPUTE
W, A, B = within(1000), save_only_these_names("a"), save_only_these_names("b")

EXPRESSIONS = {
    "within(1000)": lambda: within(1000),
    "within(1000, costs='measured')": lambda: within(1000, costs="measured"),
    "within(1000, time_limit=2.5)": lambda: within(1000, time_limit=2.5),
    "(within(1000) | save_only_these_names('a'))": lambda: W | A,
    "(within(1000) & dots_saveable)": lambda: W & dots_saveable,
    "(within(1000) & ~dots_saveable)": lambda: W - dots_saveable,
    "((within(1000) & dots_saveable) | save_only_these_names('a'))": (
        lambda: (W & dots_saveable) | A
    ),
    "((within(1000) & dots_saveable) | (save_only_these_names('a') & dots_saveable))": (
        lambda: (W | A) & dots_saveable
    ),
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_it_prints_as_the_expression_that_makes_it(text):
    policy = EXPRESSIONS[text]()
    assert repr(policy) == text
    assert eval(text, vars(policies)) == policy
    again = EXPRESSIONS[text]()
    assert (policy, hash(policy)) == (again, hash(again))
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy
    others = [make() for other, make in EXPRESSIONS.items() if other != text]
    assert policy not in others


def test_bytes_may_be_a_text():
    assert within("1 KB") == W
    assert within("2GiB") == within(2**31)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: W | A, lambda: A | W),
        (lambda: W & A, lambda: A & W),
        (lambda: W | nothing_saveable, lambda: W),
        (lambda: nothing_saveable | W, lambda: W),
        (lambda: W & everything_saveable, lambda: W),
        (lambda: everything_saveable - dots_saveable & W, lambda: W & ~dots_saveable),
        (lambda: W | None, lambda: W),
        (lambda: [MM] | W, lambda: W | policies.save_ops(MM)),
        (lambda: [MM] & W, lambda: W & policies.save_ops(MM)),
        (lambda: save_from_both_policies(A, W), lambda: A | W),
        (lambda: W | W, lambda: W),
        (lambda: W & W, lambda: W),
        (lambda: within(10) | within(20), lambda: within(20)),
        (lambda: within(20) | within(10), lambda: within(20)),
        (lambda: within(10) & within(20), lambda: within(10)),
        (lambda: within(20) & within(10), lambda: within(10)),
        (lambda: (W | A) | (W | B), lambda: W | (A | B)),
        (lambda: (W | A) | A, lambda: W | A),
        (lambda: (W & A) & (within(10) & B), lambda: within(10) & (A & B)),
        (lambda: W & nothing_saveable, lambda: (W & A) & nothing_saveable),
    ],
)
def test_expressions_that_are_equal(one, other):
    assert one() == other()
    assert hash(one()) == hash(other())


def test_it_says_of_an_operation_what_it_may_do():
    assert [W(each) for each in OPS] == [SAVE] * len(OPS)
    # Other ranks may keep others, and all have to repeat a collective.
    reduce = op(torch.ops._c10d_functional.all_reduce.default)
    assert W(reduce) is RECOMPUTE
    assert (W | policies.save_collectives)(reduce) is SAVE
    assert (W & dots_saveable)(op(SIN)) is RECOMPUTE
    assert (W & dots_saveable)(op(MM, (2, 3), (3, 4), out=(2, 4))) is SAVE
    assert ((W & dots_saveable) | A)(op(SIN, names={"a"})) is SAVE
    away = A.but_offload()
    assert ((W - A) | away)(op(SIN, names={"a"})) is Decision.OFFLOAD
    # Without `- A` the budget may keep it where it is.
    assert (W | away)(op(SIN, names={"a"})) is SAVE


def test_the_names_in_it_are_known():
    assert keys_of(W | A) == {"a"}
    assert keys_of((W & B) | A) == {"a", "b"}


def test_it_holds_a_function_no_longer_than_others_do():
    policy = W | (lambda op: True)
    assert not policy.is_data
    assert W.is_data
    assert W.cache_key == W
    key = policy.cache_key
    assert key != (within(10) | (lambda op: True)).cache_key
    asks = lambda op: True
    assert (W | asks).cache_key == (W | asks).cache_key


@pytest.mark.parametrize("make", [W.but_offload, (W | A).but_offload])
def test_what_a_budget_keeps_is_not_offloaded(make):
    with pytest.raises(
        TypeError, match=r"but_offload\(\) has no meaning.* policy\.but_off"
    ):
        make()
    with pytest.raises(TypeError, match=r"has no meaning"):
        make(A, to="disk")


def test_a_budget_cannot_say_what_to_offload():
    with pytest.raises(TypeError, match=r"but_offload\(within\(1000\)\) has no"):
        dots_saveable.but_offload(W)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"bytes": -1}, ValueError, "within takes a number of bytes; got -1"),
        ({"bytes": "-1GB"}, ValueError, "got the text '-1GB'. Pass bytes"),
        ({"bytes": None}, TypeError, "got None, a NoneType"),
        ({"bytes": 1, "costs": "time"}, ValueError, "takes costs='roofline' or 'meas"),
        ({"bytes": 1, "time_limit": -1}, ValueError, "at least 0; got -1"),
        ({"bytes": 1, "time_limit": float("nan")}, ValueError, "at least 0; got nan"),
        ({"bytes": 1, "time_limit": "1s"}, TypeError, "got '1s', a str"),
        ({"bytes": 1, "time_limit": True}, TypeError, "got True, a bool"),
    ],
)
def test_other_arguments_are_refused(args, error, message):
    with pytest.raises(error, match=message):
        within(**args)
