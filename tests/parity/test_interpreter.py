"""Python is as remat expects where it reads bytecode and memory, or that is said."""

import re
import struct
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from remat._base import interpreter


ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"

# What each check is of: a name, and something else for it to be.
BROKEN = {
    "bytecode": [("names_used", lambda code: interpreter.NamesUsed((), (), (), False))],
    "flags of classes": [
        ("is_made_by_statement", lambda cls: True),
        ("may_refer_to_others", lambda cls: cls is not str),
    ],
    "read-only views of mappings": [
        ("mapping_of", lambda proxy: None),
        ("mapping_of", lambda proxy: proxy),
    ],
    "reference counts": [("sys", type("", (), {"getrefcount": lambda value: 1 << 30}))],
}


@pytest.mark.parametrize("what", interpreter.CHECKS)
def test_this_python_is_as_expected(what):
    assert interpreter.CHECKS[what]()


@pytest.mark.parametrize(
    ("what", "name", "other"),
    [(what, *change) for what, changes in BROKEN.items() for change in changes],
)
def test_a_check_fails_if_python_does_something_else(what, name, other, monkeypatch):
    monkeypatch.setattr(interpreter, name, other)
    assert interpreter.differences() == [what]


@pytest.mark.parametrize("what", interpreter.CHECKS)
def test_every_check_is_tried(what):
    assert what in BROKEN


def test_a_check_that_raises_has_failed(monkeypatch):
    monkeypatch.delattr(interpreter, "names_used")
    assert interpreter.differences() == ["bytecode"]


# --- Names in bytecode ---


PROGRAMS = {
    "a global": ("return a", "a", "", ""),
    "a global that is called": ("return f(1)", "f", "", "f"),
    "a method": ("return x.seed(1)", "", "", "seed"),
    "a method that is only read": ("return x.seed", "", "", ""),
    "a method of a global": ("return a.b.seed(1)", "a", "", "seed"),
    "an assigned global": ("global a; a = 1", "", "a", ""),
    "a global that is added to": ("global a; a += 1", "a", "a", ""),
    "a deleted global": ("global a; del a", "", "a", ""),
    "a nested function": ("return lambda: g(a)", "g a", "", "g"),
    "a comprehension": ("return [g(i) for i in a]", "a g", "", "g"),
    "a nested class": (
        "class C:\n    b = a",
        "__name__ a",
        "__module__ __qualname__ b",
        "",
    ),
    "a word that looks like a name": ("return 'seed NULL'", "", "", ""),
    "a name that looks like a call": ("return x.NULL + NULL", "NULL", "", ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_global_names_of_code_are_found(name):
    body, loaded, stored, called = PROGRAMS[name]
    used = used_by(body)
    assert {*used.loaded} == {*loaded.split()}
    # Python 3.13 notes more of a class: where it begins, what its methods assign.
    assert {*used.stored} - {"__firstlineno__", "__static_attributes__"} == {
        *stored.split()
    }
    # What builds a class is no global.
    assert used.called - {"__build_class__"} == {*called.split()}


def used_by(body):
    source = f"def fn(x):\n{textwrap.indent(body, '    ')}"
    return interpreter.names_used(compile(source, "<test>", "exec").co_consts[0])


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax of Python 3.12")
def test_global_names_of_generic_classes_are_found():
    used = used_by("class C:\n    class D[T](a): pass")
    assert "a" in used.loaded


# --- Identities ---


def test_identities_are_read_in_memory():
    values = [object(), None, 1, "word"]
    assert interpreter.identities is interpreter._read_in_memory
    for count in range(len(values)):
        expected = struct.pack(f"{count}P", *map(id, values[:count]))
        assert interpreter._read_in_memory(values[:count]) == expected
        assert interpreter._read_one_by_one(iter(values[:count])) == expected


def test_identities_are_asked_one_by_one_where_they_lie_elsewhere(monkeypatch):
    monkeypatch.setattr(interpreter, "_read_in_memory", lambda values: b"")
    assert interpreter.reader_of_identities() is interpreter._read_one_by_one


# --- At import ---


def imported(before):
    """Import remat after the code `before`; return what it warned of or raised."""
    code = f"""
import sys, warnings
{textwrap.dedent(before)}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        import remat
    except ImportError as error:
        print(error, "torch" in sys.modules, sep="\\n")
print(*(f"{{w.category.__name__}}: {{w.message}}" for w in caught), sep="\\n")
"""
    run = [sys.executable, "-c", code]
    result = subprocess.run(
        run, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300
    )
    assert result.stderr == ""
    return result.stdout.splitlines()


def test_a_free_threaded_python_is_refused_before_torch_is_imported():
    message, has_torch, _ = imported(
        """
        sys.version = sys.version.replace("(", "free-threading build (", 1)
        """
    )
    assert message.startswith("remat: this Python 3.")
    assert "is a free-threaded build" in message
    assert has_torch == "False"


def test_a_python_that_differs_is_one_warning_at_import():
    (line,) = imported(
        """
        import dis
        dis.get_instructions = lambda code: ()
        """
    )
    version = re.escape(sys.version.split()[0])
    assert re.match(
        rf"RuntimeWarning: remat: Python {version} differs .* in: bytecode\. ", line
    )


@pytest.mark.slow
def test_a_python_that_was_run_is_no_warning():
    assert imported("") == [""]


def test_the_check_costs_little():
    # As calls: some 600 today, of which the bytecode is most, in half a millisecond.
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        interpreter.examine()
    finally:
        sys.setprofile(None)
    assert 0 < calls < 3000


# --- Only there, and what was run ---


def test_no_other_file_reads_bytecode_or_flags():
    reads = re.compile(r"^import dis$|\.__flags__\b|\bopcode\b", re.MULTILINE)
    files = (ROOT / "remat").rglob("*.py")
    found = [path.name for path in files if reads.search(path.read_text())]
    assert found == ["interpreter.py"]


def test_this_python_is_one_that_is_run():
    assert HERE in interpreter.RUN


def test_the_project_declares_the_pythons_that_were_run():
    named = [c.rpartition(" :: ")[2] for c in PROJECT["classifiers"] if "Python" in c]
    assert [version for version in named if "." in version] == [*interpreter.RUN]
    assert PROJECT["requires-python"] == f">={interpreter.RUN[0]}"
