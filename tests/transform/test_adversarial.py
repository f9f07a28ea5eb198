"""What torch's checkpoint gets right, `remat` gets right; else it is right or says no.

The programs and the configurations are those of `support.adversarial`.
"""

from collections.abc import Iterator

import pytest
from support.adversarial.configurations import OURS
from support.adversarial.contexts import CONTEXTS
from support.adversarial.known import read
from support.adversarial.serving import Server
from support.adversarial.themes import load


PROGRAMS, KNOWN = load(), read()
# Themes with as many programs as there are pairs of two kinds.
MANY = "asked/", "built/", "dropped/", "filled/", "fixed/", "held/", "lifted/"


def known(*key):
    """Return the mark of what is known to fail, at times or always."""
    reason = KNOWN.get(key)
    if reason is None:
        return []
    return [pytest.mark.xfail(reason=reason, strict="at times" not in reason)]


def cases():
    """All pairs: fast are all programs by default, and one in five in another way.

    Most hold a value, or ask for it, in one of many ways. Of these one in six is fast.
    """
    others = [name for name in OURS if name != "default"]
    for k, name in enumerate(PROGRAMS):
        fast = {"default"} if k % 5 else {"default", others[k // 5 % len(others)]}
        if name.startswith(MANY):
            fast = {[*OURS][k // 6 % len(OURS)]} if k % 6 == 0 else set()
        for configuration in OURS:
            marks = known(name, configuration)
            if configuration not in fast:
                marks.append(pytest.mark.slow)
            case = f"{configuration} {name}"
            yield pytest.param(name, configuration, marks=marks, id=case)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as serving:
        yield serving


def cases_below_transforms():
    """All pairs. One program in eight is fast under vjp, and one in forty elsewhere."""
    for k, name in enumerate(PROGRAMS):
        for j, context in enumerate(CONTEXTS):
            marks = known(name, context)
            if (k % 8, j) != (0, 0) and k % 40 != 4 + 8 * j:
                marks.append(pytest.mark.slow)
            yield pytest.param(name, context, marks=marks, id=f"{context} {name}")


@pytest.mark.parametrize(("name", "context"), [*cases_below_transforms()])
def test_it_is_right_below_torch_func_or_says_no(server, name, context):
    outcome = server.outcome_of(name, context)
    if outcome.kind == "right":
        assert (outcome.evaluations > 0) == PROGRAMS[name].recomputes
    elif outcome.kind != "none":  # then plain code raises below this transform
        assert outcome.kind == "refused", outcome.message
        assert "remat" in outcome.message


@pytest.mark.parametrize(("name", "configuration"), [*cases()])
def test_no_worse_than_torchs_checkpoint(server, name, configuration):
    outcome = server.outcome_of(name, configuration)
    if outcome.kind == "right":
        # An identity would not run again. Of "small" a graph may hold all it needs.
        is_run_again = outcome.evaluations > 0
        assert is_run_again == PROGRAMS[name].recomputes or configuration == "small"
        return
    assert outcome.kind == "refused", outcome.message
    assert "remat" in outcome.message
    torchs = server.outcome_of(name, "torch")
    assert torchs.kind != "right", f"only remat refuses this: {outcome.message}"


def test_what_is_known_is_there():
    assert {name for name, _ in KNOWN} <= PROGRAMS.keys()


@pytest.mark.parametrize("configuration", ["torch", "default"])
def test_a_crash_is_one_outcome(server, configuration):
    assert server.outcome_of("no such program", configuration).kind == "crashed"
    name = next(iter(PROGRAMS))
    assert server.outcome_of(name, "plain") == ("right", "", 0)
