"""Graphs with rematerialized calls are stored in AOTAutograd's cache on disk.

A second process takes them from there, unless something changed that their lowering
depends on. Each process compares its gradients with those of eager code.
"""

import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
import torch._dynamo.variables.higher_order_ops  # noqa: F401 - as while Dynamo traces

from remat import policies, remat
from remat._transform import traced
from remat.policies import Decision
from remat.policies._data import identity_of


PRELUDE = """
import json, sys
import torch
from torch._dynamo.utils import counters
from remat import checkpoint_name, policies, remat
from remat.policies import Decision
"""
PROGRAM = """
def block(w, x):
    return torch.tanh(checkpoint_name(torch.tanh(x @ w), "inner") @ w)

def rows(policy):
    fn = remat(block, policy=policy)
    return lambda w, x: fn(w, fn(w, x)).square().sum()

def nested(outer, inner, factor=2.0):
    inner = remat(block, policy=inner)
    fn = remat(lambda w, x: inner(w, x * factor).sin(), policy=outer)
    return lambda w, x: fn(w, fn(w, x)).square().sum()

def in_branches(policy):
    fn = remat(block, policy=policy)
    def loss(w, x):
        branches = (lambda w, x: fn(w, x)), (lambda w, x: fn(w, x.sin()))
        return torch.cond(x.sum() > 0, *branches, (w, x)).square().sum()
    return loss

def gradient(loss):
    w = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
    return torch.autograd.grad(loss(w, torch.linspace(0, 1, 32).reshape(4, 8)), w)[0]

def found(loss):
    torch._dynamo.reset()
    counters.clear()
    got = gradient(torch.compile(loss, fullgraph=True))
    torch.testing.assert_close(got, gradient(loss))
    assert got.abs().max() > 1e-3
    names = "hit", "miss", "bypass"
    return {n: counters["aot_autograd"][f"autograd_cache_{n}"] for n in names}

def asks(op):
    return "mm" in str(op.func)

FACTOR = 2.0

@torch._dynamo.allow_in_graph
def opaque(x):
    return x.sin() * FACTOR

def with_a_name_alone():
    fn = remat(lambda w, x: torch.tanh(opaque(x @ w) @ w))
    return lambda w, x: fn(w, fn(w, x)).square().sum()

def with_a_name_inside():
    inner = remat(lambda w, x: torch.tanh(opaque(x @ w) @ w))
    fn = remat(lambda w, x: inner(w, x).sin())
    return lambda w, x: fn(w, fn(w, x)).square().sum()

LOSSES = eval(sys.argv[1])
print(json.dumps({name: found(loss) for name, loss in LOSSES.items()}))
"""
HIT = {"hit": 1, "miss": 0, "bypass": 0}
MISS = {"hit": 0, "miss": 1, "bypass": 0}
BYPASS = {"hit": 0, "miss": 0, "bypass": 1}


def found(folder, losses, change=""):
    """What the cache said of each loss, in a process of its own."""
    file = folder / "program.py"
    file.write_text(PRELUDE + change + PROGRAM)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(file), losses],
        capture_output=True,
        text=True,
        check=False,
        # Sets have another order in each process.
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def written(losses):
    """A dict of losses as code."""
    return f"dict([{', '.join(f'({name!r}, {of})' for name, of in losses.items())}])"


@pytest.mark.slow
def test_a_second_process_takes_what_the_first_has_compiled(tmp_path):
    dots, names = "policies.dots_saveable", "policies.save_only_these_names('inner')"
    losses = {
        "none": "rows(None)",
        "dots": f"rows({dots})",
        "nested": f"nested({dots}, None)",
        "a function": "rows(asks)",
        "a function inside": "nested(None, asks)",
        "a function in branches": "in_branches(asks)",
    }

    first = found(tmp_path, written(losses))
    functions = {name for name in losses if "function" in name}
    assert all(first[name] == MISS for name in losses.keys() - functions)
    second = found(tmp_path, written(losses))
    assert all(second[name] == HIT for name in losses.keys() - functions)
    # What a user's function says may change from one process to another.
    for name in functions:
        assert not first[name]["hit"]
        assert not second[name]["hit"]
    assert first["a function"] == first["a function inside"] == BYPASS

    changed = {
        "the outer policy": "nested(policies.everything_saveable, None)",
        "the inner policy": f"nested({dots}, {names})",
        "a constant": f"nested({dots}, None, 3.0)",
    }
    assert found(tmp_path, written(changed)) == dict.fromkeys(changed, MISS)
    newer = "from remat._transform import traced; traced._sources = lambda: 'new'\n"
    assert found(tmp_path, written({"none": "rows(None)"}), newer) == {"none": MISS}


def nodes_of_calls(loss):
    """Return the operators of the calls in the graph that Dynamo makes of a loss."""
    found = set()

    def backend(graph, inputs):
        names = (getattr(n.target, "__name__", "") for n in graph.graph.nodes)
        found.update(name for name in names if name.startswith("remat"))
        return graph.forward

    torch.compile(loss, backend=backend, fullgraph=True)(torch.eye(8), torch.ones(4, 8))
    return found


def test_a_call_whose_graph_only_names_a_function_may_not_be_cached(monkeypatch):
    program = ModuleType("program_in_a_graph")
    monkeypatch.setitem(sys.modules, program.__name__, program)
    exec(PRELUDE + PROGRAM.partition("LOSSES")[0], vars(program))
    assert nodes_of_calls(program.with_a_name_inside()) == {"remat_uncached"}
    assert nodes_of_calls(program.rows(None)) == {"remat"}


BUILT_IN = {
    "nothing": "policies.nothing_saveable",
    "everything": "policies.everything_saveable",
    "dots": "policies.dots_saveable",
    "unbatched dots": "policies.dots_with_no_batch_dims_saveable",
    "names": "policies.save_only_these_names('inner', 'other')",
    "other names": "policies.save_any_names_but_these('inner', 'other')",
    "all but names": "policies.save_anything_except_these_names('inner', 'other')",
    "pattern": "policies.save_names_matching('in.*')",
    "operators": "policies.save_ops(torch.ops.aten.mm, torch.ops.aten.tanh)",
    "larger": "policies.save_larger_than(100)",
    "smaller": "policies.save_smaller_than(1000)",
    "collectives": "policies.save_collectives",
    "both": "policies.save_from_both_policies("
    "policies.dots_saveable, policies.save_only_these_names('inner'))",
    "not": "~policies.dots_saveable & policies.save_larger_than(10)",
    "offload": "policies.save_and_offload_only_these_names("
    "names_which_can_be_saved=['other'], names_which_can_be_offloaded=['inner'], "
    "offload_src='device', offload_dst='pinned_host')",
    "budget": "policies.within(1000)",
}


# --- Identities ---


def known():
    return {name: eval(policy) for name, policy in BUILT_IN.items()}


IDENTITIES = """
import torch
from remat import policies
from remat.policies._data import identity_of
for policy in POLICIES:
    print(identity_of(policy))
"""


@pytest.mark.slow
def test_every_built_in_policy_has_an_identity_of_its_own():
    identities = {name: identity_of(policy) for name, policy in known().items()}
    assert None not in identities.values()
    assert len({*identities.values()}) == len(identities)
    policy_list = f"[{', '.join(BUILT_IN.values())}]"
    for seed in ("1", "2"):  # of the order of sets
        done = subprocess.run(
            [sys.executable, "-c", IDENTITIES.replace("POLICIES", policy_list)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.stdout.splitlines() == [*identities.values()]


class Own(policies.Policy):
    """Nobody knows what its code reads."""

    def decide(self, op):
        return Decision.SAVE


def test_what_asks_a_users_code_has_no_identity():
    function = policies.as_policy(lambda op: True)
    for policy in (Own(), function, function | policies.dots_saveable, ~function):
        assert identity_of(policy) is None


def block(w, x):
    return torch.tanh(x @ w)


def key_of(where="here.py:1", name="block", **options):
    options = remat(block, **options).__remat_options__[1]
    return traced.key_of(name, where, options)


def test_a_key_tells_what_the_lowering_depends_on():
    keys = [
        *(key_of(), key_of(where="here.py:2"), key_of(name="other")),
        *(key_of(policy=policies.dots_saveable), key_of(rng="error")),
        *(key_of(higher_order=True), key_of(policy=policies.everything_saveable)),
    ]
    assert len({*keys}) == len(keys)
    assert key_of() == key_of()
    label, options = traced._CALLS[key_of(rng="error")]
    assert "block" in str(label)
    assert options.rng == "error"


def test_a_key_of_a_users_function_is_known_in_this_process_alone():
    fn = policies.as_policy(lambda op: True)
    assert key_of(policy=fn) == key_of(policy=fn)
    assert key_of(policy=fn) != key_of(policy=policies.as_policy(lambda op: True))
    assert traced._PROCESS in key_of(policy=fn)
    assert traced._PROCESS not in key_of()


def test_the_sources_of_remat_are_in_a_key(monkeypatch):
    before = key_of()
    monkeypatch.setattr(traced, "_sources", lambda: "another version")
    assert key_of() != before
