"""Every nesting of up to three transforms gives what plain code gives.

Products of order above three are left out: `hessian` counts as two.

What counts as right is computed. If plain torch raises, remat may raise, too. So for
a dual level around a `jvp` or within one, and for a dual level within `vmap`. If remat
does not raise, it has to be right. What is right then is known where `jvp` stands
for `linearize` and for a dual level: by definition they give the same.

Plain torch is wrong where it differs from that, without an error. `linearize` within
`grad` gives only the part of the gradient that comes from the tangent, for it makes the
value of the input a constant. `linearize` of `jacrev` of a product by a matrix is
wrong, too. There remat may be as wrong, or right, or raise.
"""

import pytest
from support.nestings import (
    AS_JVP,
    BACKWARDS,
    OPTIONS,
    SUBJECTS,
    assert_equal,
    attempt,
    is_close,
    nestings,
    subject,
)
from support.tables import rows
from support.zoo import assert_not_vanishing

from remat._partial.cache import CACHES


# torch.func.linearize's own.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr Node:UserWarning"
)


def subjects_of(names):
    """All; but two where torch traces three transforms, which takes a second each."""
    is_slow = len(names) > 2 and "linearize" in names
    return ("frozen first", "chain") if is_slow else SUBJECTS


CASES = {
    f"{' of '.join(names)}, {name}": (names, name)
    for names in nestings(depth=3, order=3)
    for name in subjects_of(names)
}
NUMBERS = {case: number for number, case in enumerate(CASES.values())}
# What can be put around a dual level and in it.
AROUND = {"grad", "vjp", "jacrev", *BACKWARDS, "forward_ad"}


def is_fast(names, name):
    """Pairs of one subject that plain torch takes, and of the others each one alone."""
    if len(names) == 1:
        return name == "frozen first" or names[0] not in AS_JVP
    if len(names) > 2 or name != "frozen first" or "linearize" in names:
        return False
    if "hessian" in names and "grad" not in names:  # of order three: a second each
        return False
    is_one_dual_level = AROUND.issuperset(names) and len({*names}) > 1
    return "forward_ad" not in names or is_one_dual_level


FAST = [case for case, (names, name) in CASES.items() if is_fast(names, name)]


def options_for(names, name):
    """All for up to two transforms; for three none, and another one for each case.

    A nesting of three has each of them with some subject. Under `linearize` nothing is
    saved, and it is slow: there it is as for three.
    """
    if len(names) < 3 and "linearize" not in names:
        return OPTIONS
    none, *others = OPTIONS
    another = others[NUMBERS[names, name] % len(others)]
    return {how: OPTIONS[how] for how in (none, another)}


def tried(names, name, options):
    """What calls give: with a record of what ran, later ones differ from the first."""
    CACHES.clear()
    made = subject(name, names, options)
    calls = 2 if options and "linearize" not in names else 1
    return [attempt(names, made) for _ in range(calls)]


@rows("names, name", CASES, fast=FAST)
def test_a_nesting_gives_what_plain_code_gives(names, name):
    plain = attempt(names, subject(name, names, None))
    right = plain
    if not AS_JVP.keys().isdisjoint(names):
        names_right = [AS_JVP.get(n, n) for n in names]
        right = attempt(names_right, subject(name, names, None))
    is_right = plain.error is None and is_close(plain.result, right.result)
    allowed = [a.result for a in (plain, right) if a.error is None]
    for how, options in options_for(names, name).items():
        for ours in tried(names, name, options):
            if is_right:
                if ours.error is not None:
                    raise ours.error
                assert_equal(ours.result, plain.result)
                assert ours.evaluations > plain.evaluations, how
            elif ours.error is None and allowed:
                assert any(is_close(ours.result, result) for result in allowed), how
    if plain.error is not None:
        pytest.skip(f"plain torch raises: {str(plain.error).splitlines()[0]}")
    assert right.error is None
    if not is_right:
        pytest.skip("plain torch is wrong")
    assert_not_vanishing(plain.result)
