"""What `import remat` loads, and what is loaded where it is first used.

Loaded modules are counted, each time in a process of its own.
"""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.public import MODULES

import remat
from remat._base import package


ROOT = Path(__file__).parents[2]
# What registers operators and a class that files may name.
LOADED = {"_base", "_torch", "random"}
# What a call needs beside.
CALLED = {
    *("_ambient", "_graph", "_offload", "_partial", "_reach"),
    *("_transform", "policies"),
}
# Of torch, what `import torch, optree` leaves out.
OF_TORCH = {"torch.func._random", "torch.utils.module_tracker"}
# Beside them, a process of its own is a copy of one that has imported remat.
FIRST_USE = """
import os, sys, torch, remat
from torch.nn import functional as F
from torch._subclasses import FakeTensorMode

def use_all():
    assert "remat.nn" not in sys.modules and "remat.random._bind" not in sys.modules
    found = {name: getattr(remat, name) for name in dir(remat)}
    assert found.keys() <= vars(remat).keys()
    assert found["nn"] is sys.modules["remat.nn"]
    return remat.random.bind

def at_once():
    use_all()

def with_another_device():
    with torch.device("meta"):
        use_all()

def with_fakes():
    with FakeTensorMode():
        use_all()

def in_inference_mode():
    with torch.inference_mode():
        use_all()

def in_vmap():
    torch.vmap(lambda x: (use_all(), x)[1])(torch.ones(2))

def in_a_call():
    x = torch.ones(3, requires_grad=True)
    def fn(x):
        if "remat.nn" not in sys.modules:
            use_all()
        return remat.random.bind(remat.random.key(0))(F.dropout)(x.exp(), 0.5)
    out = remat.remat(fn)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())

def in_compiled_code():
    def fn(x):
        with remat.random.bind(remat.random.key(0)):
            x = F.dropout(x, 0.5)
        return remat.chain.fori_loop(0, 4, lambda i, x: remat.remat(torch.sin)(x), x)
    x = torch.ones(8)
    assert "remat.chain" not in sys.modules
    found = torch.compile(fn, backend="eager", fullgraph=True)(x)
    assert "remat.chain" in sys.modules
    assert torch.equal(found, fn(x))

sys.path.insert(0, "tests")
assert "remat._transform" not in sys.modules
for case in (at_once, with_another_device, with_fakes, in_inference_mode, in_vmap,
             in_a_call, in_compiled_code):
    if not os.fork():
        case()
        import smoke
        # What is made at the first use is made by what surrounds it.
        is_made_otherwise = case in (with_another_device, with_fakes, in_inference_mode)
        for check in smoke.CHECKS if is_made_otherwise else smoke.CHECKS[:1]:
            check()
        print(case.__name__, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, case
"""


def run(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    found = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


NOTHING = "import remat"
FUNCTION = "from remat import remat"
ROOM = "from remat import nn"
CALL = "remat.remat(torch.sin)(torch.ones(2, requires_grad=True)).sum().backward()"
STAR = "from remat import *; import remat; print({*dir(remat)} - {*globals()})"
WRONG = "import remat\ntry: remat.fits\nexcept AttributeError as e: print(e)"
# An operation would be in the record of the call that is the first to use a room.
UNSEEN = """
import importlib, pkgutil, remat
from torch.utils._python_dispatch import TorchDispatchMode

class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, *_):
        raise AssertionError(func)

with Refusing():
    for each in pkgutil.walk_packages(remat.__path__, "remat."):
        importlib.import_module(each.name)
"""
# Each in a copy of a process that has imported torch and optree, and nothing of remat.
EACH = """
import json, os, sys, torch, optree
before = {*sys.modules}
for code in json.loads(sys.argv[1]):
    if not os.fork():
        exec(code, {"torch": torch})
        print(json.dumps([*sys.modules.keys() - before]))
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, code
"""
copied = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are copied")


@pytest.fixture(scope="module")
def after():
    """What each statement prints, and the modules of remat that it loads."""
    codes = [NOTHING, FUNCTION, ROOM, f"import remat; {CALL}", STAR, WRONG, UNSEEN]
    room, found = iter(run(EACH, json.dumps(codes)).splitlines()), {}
    for name, code in zip(
        (NOTHING, FUNCTION, ROOM, CALL, STAR, WRONG, UNSEEN), codes, strict=True
    ):
        said = next(room) if code in (STAR, WRONG) else ""
        found[name] = said, {*json.loads(next(room))}
    return found


def rooms(modules):
    of_remat = [name for name in modules if name.startswith("remat.")]
    return {name.split(".")[1] for name in of_remat}


def listed(path):
    """Return what a package imports later: for type checkers, and by its table."""
    nodes = ast.parse((ROOT / path).read_text()).body
    (where,) = (n for n in nodes if isinstance(n, ast.If))
    (assigned,) = where.orelse
    table = eval(ast.unparse(assigned.value.args[1]))
    imports = {(n.module, a.asname) for n in where.body for a in n.names}
    return imports, {(home, name) for home, names in table.items() for name in names}


@copied
def test_importing_loads_what_files_name(after):
    _, loaded = after[NOTHING]
    assert rooms(loaded) == LOADED
    assert "remat.random._samplers" not in loaded
    # All of them are some 200 more.
    assert len(loaded) < 40


@copied
def test_importing_loads_next_to_nothing_of_torch(after):
    loaded = {name for name in after[NOTHING][1] if name.startswith("torch")}
    assert loaded <= OF_TORCH


@copied
def test_the_function_loads_what_a_call_needs(after):
    assert rooms(after[FUNCTION][1]) == LOADED | CALLED
    more = after[CALL][1] - after[FUNCTION][1]
    assert not [name for name in more if name.startswith("remat")]


@copied
def test_a_name_loads_its_room_and_what_that_needs(after):
    more = after[ROOM][1] - after[FUNCTION][1]
    assert rooms(more) - {"_base", "_partial"} == {"nn", "_scope"}


@pytest.mark.parametrize("path", ["remat/__init__.py", "remat/random/__init__.py"])
def test_type_checkers_read_the_imports_that_are_made_later(path):
    imports, table = listed(path)
    assert imports == table
    assert imports


def test_all_names_are_listed_and_are_what_their_modules_have():
    assert {name for _, name in listed("remat/__init__.py")[0]} <= {*dir(remat)}
    for module in map(importlib.import_module, MODULES):
        names = dir(module)
        assert names == sorted({*names})
        assert {*names} <= {name for name in names if hasattr(module, name)}


@copied
def test_what_is_imported_later_runs_no_operation(after):
    assert "remat.rules._keep" in after[UNSEEN][1] - after[NOTHING][1]


@copied
def test_a_star_imports_all_names(after):
    left_out = ast.literal_eval(after[STAR][0])
    assert {n for n in left_out if not n.startswith("_")} == set()


@copied
def test_a_name_that_is_not_there_is_refused(after):
    said, _ = after[WRONG]
    assert "has no attribute 'fits'. Do you mean remat.fit?" in said
    with pytest.raises(ImportError, match="cannot import name 'binds'"):
        from remat.random import binds  # noqa: F401


@pytest.mark.slow
@copied
def test_what_surrounds_the_first_use_does_not_matter():
    cases = run(FIRST_USE).split()
    assert len(cases) == 7


@pytest.mark.parametrize("room", package.IN_ROOMS)
def test_names_that_the_function_says_are_in_a_room_are_there(room):
    found = importlib.import_module(f"remat.{room}")
    for name in package.IN_ROOMS[room]:
        assert callable(getattr(found, name))
        with pytest.raises(TypeError, match=rf"For remat\.{room}\.{name} write"):
            getattr(remat.remat, name)()
