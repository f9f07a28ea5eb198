"""What may stand for a policy, and what is refused with advice."""

import math
import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from support.operations import MM, OFFLOAD, RECOMPUTE, SAVE, aten, op
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from remat._base.sizes import bytes_in
from remat.policies import (
    Decision,
    as_policy,
    dots_saveable,
    everything_saveable,
    nothing_saveable,
    offload_dot_with_no_batch_dims,
    register_dot,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_larger_than,
    save_names_matching,
    save_only_these_names,
    save_ops,
    save_smaller_than,
)


def without_address(value):
    """Name a parameter; tests run in parallel need the same names in each process."""
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


@pytest.mark.parametrize(
    ("obj", "policy"),
    [
        (None, nothing_saveable),
        (dots_saveable, dots_saveable),
        (SAVE, everything_saveable),
        (RECOMPUTE, nothing_saveable),
        ([MM], save_ops(MM)),
        ((MM, aten.bmm), save_ops(MM, aten.bmm)),
        ({MM}, save_ops(MM)),
        (frozenset(), save_ops()),
        (CheckpointPolicy.MUST_SAVE, everything_saveable),
        (CheckpointPolicy.PREFER_SAVE, everything_saveable),
        (CheckpointPolicy.MUST_RECOMPUTE, nothing_saveable),
        (CheckpointPolicy.PREFER_RECOMPUTE, nothing_saveable),
    ],
    ids=without_address,
)
def test_a_stand_in_for_a_policy_is_accepted(obj, policy):
    assert as_policy(obj) == policy


def test_torchs_offloading_is_to_pinned_memory():
    for member in CheckpointPolicy:
        if "OFFLOAD" in member.name:
            assert as_policy(member)(op()) is OFFLOAD


@pytest.mark.parametrize("answer", [*Decision, *CheckpointPolicy, True, False])
def test_a_function_answers_with_a_decision_or_a_bool(answer):
    want = {True: SAVE, False: RECOMPUTE}.get(answer, answer)
    if isinstance(answer, CheckpointPolicy):
        want = as_policy(answer)(op())
    assert as_policy(lambda op: answer)(op()) is want
    assert as_policy(lambda ctx, op, *args, **kwargs: answer)(op()) is want


@dataclass(frozen=True)
class Larger:
    """A policy as a user's object."""

    than: int

    def __call__(self, op):
        """Save what is larger."""
        return op.nbytes > self.than


@pytest.mark.parametrize(
    "fn",
    [
        Larger(100),
        Larger(100).__call__,
        lambda op: op.nbytes > 100,
        lambda op, than=100: op.nbytes > than,
        lambda *ops: ops[0].nbytes > 100,
        lambda op, *rest, **options: op.nbytes > 100,
        partial(lambda than, op: op.nbytes > than, 100),
        partial(lambda op, than: op.nbytes > than, than=100),
    ],
)
def test_a_function_of_one_argument_is_asked_of_the_operation(fn):
    assert as_policy(fn)(op(out=(26,))) is SAVE
    assert as_policy(fn)(op(out=(25,))) is RECOMPUTE


def test_functions_that_are_equal_are_equal_policies():
    assert as_policy(Larger(8)) == as_policy(Larger(8))
    assert hash(as_policy(Larger(8))) == hash(as_policy(Larger(8)))
    assert as_policy(Larger(8)) != as_policy(Larger(9))


@pytest.mark.parametrize(
    ("obj", "advice"),
    [
        ("nothing", "remat.policies.nothing_saveable"),
        ("save_only_these_name", "remat.policies.save_only_these_names"),
        ("dots_savable", "remat.policies.dots_saveable"),
        ("full", "a str. A policy is one of remat.policies, None"),
        ("", "a str. A policy is one of"),
        (False, "remat.policies.nothing_saveable"),
        (1, "1, a int. A policy is"),
        ({"policy": 1}, "1, a int. A policy is"),
        (Larger, "It is a class: pass an instance"),
        (save_only_these_names, r"It makes policies: pass save_only_these_names\("),
        (save_ops, r"It makes policies: pass save_ops\("),
        (
            partial(create_selective_checkpoint_contexts, [MM]),
            "Pass its argument instead",
        ),
        (lambda: True, "neither as policy"),
        (lambda ctx, op: True, "neither as policy"),
    ],
    ids=without_address,
)
def test_another_object_is_refused_with_advice(obj, advice):
    with pytest.raises(TypeError, match=rf"^remat: (not a )?policy.*{advice}"):
        as_policy(obj)


def test_a_function_that_is_not_hashable_is_refused():
    @dataclass
    class Mutable:
        than: int

        def __call__(self, op):
            return True

    with pytest.raises(TypeError, match=r"not hashable.*frozen dataclass"):
        as_policy(Mutable(3))


@pytest.mark.parametrize("answer", [None, 1, "save", torch.tensor(True), [True]])
def test_an_answer_that_is_no_decision_is_refused(answer):

    def broken(op):
        return answer

    want = (
        r"policy as_policy\(.*broken\) returned .* for aten.sin.default at model.py:7"
    )
    for policy in (as_policy(broken), dots_saveable | broken, ~as_policy(broken)):
        with pytest.raises(TypeError, match=want):
            policy(op())


def test_an_error_in_a_function_reaches_the_user():
    def broken(op):
        raise KeyError(op.source)

    with pytest.raises(KeyError, match=r"model\.py"):
        (dots_saveable | broken)(op())


# --- Arguments of the functions that make policies ---


def names_of_two(saved, offloaded, **places):
    return save_and_offload_only_these_names(
        names_which_can_be_saved=saved, names_which_can_be_offloaded=offloaded, **places
    )


NAMES = (
    save_only_these_names,
    save_any_names_but_these,
    save_anything_except_these_names,
)
PLACE = r"offloads to one of 'pinned_host', 'disk'; got"
SIZES = save_larger_than, save_smaller_than
REFUSED = [
    *(
        (make, (["a", "b"],), TypeError, f"{make.__name__}.* a list: unpack it")
        for make in NAMES
    ),
    *(
        (make, ("a", 3), TypeError, f"{make.__name__}: a name is a string; got 3")
        for make in NAMES
    ),
    (
        names_of_two,
        (["a", "b"], ["b"]),
        ValueError,
        "'b' can be saved and can be offloaded",
    ),
    (names_of_two, ("abc", []), TypeError, "takes a list of names; got 'abc'"),
    (names_of_two, ([], [1]), TypeError, "a name is a string; got 1"),
    (
        offload_dot_with_no_batch_dims,
        ("pinned_host", "device"),
        ValueError,
        "offloads from 'device'; got 'pinned_host'",
    ),
    (
        partial(names_of_two, offload_src="cuda"),
        ((), ()),
        ValueError,
        "offloads from 'device'; got 'cuda'",
    ),
    (save_names_matching, ("(",), ValueError, r"'\(' is not a regular expression"),
    *(
        (save_names_matching, (bad,), TypeError, "takes a regular expression; got")
        for bad in (3, None, b"a", re.compile(b"a"))
    ),
    *(
        (make, (bad,), TypeError, f"{make.__name__} takes a number of bytes")
        for make in SIZES
        for bad in ("1M", None, True, torch.tensor(3))
    ),
    *(
        (make, (bad,), ValueError, f"{make.__name__} takes a number of byte")
        for make in SIZES
        for bad in (-1, float("nan"))
    ),
    *(
        (register_dot, (bad,), TypeError, "register_dot takes operators")
        for bad in ("mm", torch.mm, None, 3)
    ),
]


@pytest.mark.parametrize(
    ("make", "args", "error", "match"), REFUSED, ids=without_address
)
def test_a_wrong_argument_is_refused(make, args, error, match):
    with pytest.raises(error, match=match):
        make(*args)


@pytest.mark.parametrize("dst", ["cpu", "unpinned_host", None, "Disk", ["disk"]])
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda dst: dots_saveable.but_offload(to=dst), f"but_offload {PLACE}"),
        (
            lambda dst: offload_dot_with_no_batch_dims("device", dst),
            f"offload_dot_with_no_batch_dims {PLACE}",
        ),
        (lambda dst: names_of_two((), (), offload_dst=dst), PLACE),
    ],
    ids=["but_offload", "offload_dot_with_no_batch_dims", "names"],
)
def test_a_place_to_offload_to_exists(make, match, dst):
    with pytest.raises(ValueError, match=match):
        make(dst)


@pytest.mark.parametrize(
    "make", [save_ops, lambda bad: as_policy([MM, bad])], ids=["save_ops", "as_policy"]
)
@pytest.mark.parametrize(
    ("bad", "advice"),
    [
        ("aten::mm", r"Do you mean torch.ops.aten.mm\?"),
        ("mm", r"Do you mean torch.ops.aten.mm\?"),
        (torch.mm, r"Do you mean torch.ops.aten.mm\?"),
        (nn.functional.linear, r"Do you mean torch.ops.aten.linear\?"),
        ("no such thing", "got 'no such thing', a str"),
        (3, "got 3, a int"),
        ([MM], "a list"),
    ],
    ids=without_address,
)
def test_operators_are_what_torch_ops_holds(bad, advice, make):
    with pytest.raises(TypeError, match=f"save_ops takes operators.*{advice}"):
        make(bad)


# --- Numbers of bytes, as people write them ---


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        (12, 12),
        (2.0, 2),
        ("0", 0),
        ("7", 7),
        ("7B", 7),
        ("8GB", 8 * 10**9),
        (" 8 gb ", 8 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5KiB", 1536),
        (".5 kb", 500),
        ("1.2345 KB", 1234),
        ("0.1 TiB", 2**40 // 10),
        ("3TB", 3 * 10**12),
        ("9007199254740993", 2**53 + 1),  # no float
    ],
)
def test_bytes_are_read(size, nbytes):
    found = bytes_in(size, "within")
    assert (found, type(found)) == (nbytes, int)


@pytest.mark.parametrize(
    "size",
    ["", "GB", "-1", "-1GB", "8 G", "8 GBs", "1e9", "1,000", "8 Gb/s", "٣GB", "a B"],
)
def test_another_text_is_refused_with_what_is_accepted(size):
    with pytest.raises(ValueError, match=r"remat: fit takes.*text '.*'.*'800 MB'"):
        bytes_in(size, "fit")


@pytest.mark.parametrize("size", [-1, -0.5, 0.5, math.nan, math.inf, -math.inf])
def test_another_number_is_refused(size):
    with pytest.raises(ValueError, match=r"remat: within takes a number of bytes; got"):
        bytes_in(size, "within")


@pytest.mark.parametrize("size", [None, True, b"8GB", [1], 1j])
def test_what_is_no_number_is_refused(size):
    with pytest.raises(
        TypeError, match=r"got .*, a (NoneType|bool|bytes|list|complex)"
    ):
        bytes_in(size, "within")
