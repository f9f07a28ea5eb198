"""The page on architecture names what exists, and every room; code stays short."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
ROOMS = sorted(
    path.name.removesuffix(".py")
    for path in (ROOT / "remat").iterdir()
    if path.name not in {"__init__.py", "__pycache__", "py.typed"}
)
LOWERINGS = {ROOT / "remat/_transform" / name for name in ("saved.py", "function.py")}
CODE = {path: path.read_text() for path in sorted((ROOT / "remat").rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in CODE.items()}
FILES = sorted(set(re.findall(r"`((?:\w+/)?\w+/\w+\.(?:py|md))`", PAGE)))


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_on_the_map(room):
    assert re.search(rf"\b{room}\b", PAGE.split("## The life of a call")[0])


@pytest.mark.parametrize("room", [r for r in ROOMS if (ROOT / "remat" / r).is_dir()])
def test_every_room_says_what_its_files_are(room):
    folder = ROOT / "remat" / room
    text = (folder / "__init__.py").read_text().split('"""')[1]
    if room.startswith("_") and room != "_torch":
        assert "Called by" in text
        files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert files <= set(re.findall(r"\w+", text))


@functools.cache
def rooms_imported(room):
    """The rooms that a room imports."""
    found = set()
    folder = ROOT / "remat" / room
    for tree in (tree for path, tree in TREES.items() if folder in path.parents):
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name.split(".")[1] for name in modules if name[:6] == "remat."}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_says_who_calls_it(room):
    text = (ROOT / "remat" / room / "__init__.py").read_text()
    called = re.split(r'\n#?\n|"""', text.split("Called by", 1)[1])[0]
    told = {*re.findall(r"`(\w+)`", called)} & {*ROOMS}
    if "all rooms" in called:
        told = {*ROOMS} - {room, "_torch"}
    assert told == {r for r in ROOMS if room in rooms_imported(r)} - {room}
    assert room.startswith("_") or "users" in called


@pytest.mark.parametrize("file", FILES)
def test_every_file_that_the_page_names_exists(file):
    assert (ROOT / "remat" / file).exists() or (ROOT / file).exists()


def test_the_page_names_files():
    assert len(FILES) > 25


def test_the_words_fit_one_screen():
    table = PAGE.split("## Words")[1].split("## Caches")[0]
    words = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)[1:]
    assert 20 < len(words) == len({*words}) <= 30


@pytest.mark.parametrize("title", ["Under base autograd", "Under torch.func"])
def test_the_life_of_a_call_fits_one_screen(title):
    (life,) = re.findall(rf"(?ms)^### {title}.*?(?=^##)", PAGE)
    assert life.count("\n") < 45


AFTERNOON = re.findall(r"(?m)^\| `(\w+/\w+\.py)` \|", PAGE.split("## The life")[0])


def lines_of_code_and_comments(text):
    """How many lines are neither empty nor of a docstring."""
    documented = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and n not in documented for n, line in lines)


def test_the_core_is_read_in_an_afternoon():
    assert len(AFTERNOON) == 9
    texts = [CODE[ROOT / "remat" / name] for name in AFTERNOON]
    assert sum(map(lines_of_code_and_comments, texts)) <= 3300
    for text in texts:
        opening = text.split('"""')[1]
        assert "Invariant:" in opening
        assert "Rejected:" in opening


def test_files_are_short():
    assert CODE.keys() > LOWERINGS
    lines = {path: text.count("\n") for path, text in CODE.items()}
    most = {path: 900 if path in LOWERINGS else 450 for path in CODE}
    assert [path for path, count in lines.items() if count > most[path]] == []


def test_functions_are_short():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 2500
    assert [f.name for f in functions if lines_of(f) > 60] == []


CONTAINERS = {"Counter", "OrderedDict", "defaultdict", "deque", "dict", "frozenset"}
CONTAINERS |= {"list", "set", "tuple"}


def calls_with_types(tree):
    """The lines of functions that call a container's class with types, as list[int]."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    called = [c for f in functions for c in ast.walk(f) if isinstance(c, ast.Call)]
    found = [c.func for c in called if isinstance(c.func, ast.Subscript)]
    return [f.lineno for f in found if getattr(f.value, "id", "") in CONTAINERS]


def test_containers_are_made_without_types():
    """As `list[int]()` costs 15 times what `[]` does."""
    found = [f"{p}:{n}" for p, tree in TREES.items() for n in calls_with_types(tree)]
    assert found == []
    assert calls_with_types(ast.parse("def f():\n    return set[int]()")) == [2]


# Of two classes or aliases of one name, but for case and underscores, why both stay.
MAY_SHARE_A_NAME = {
    "within": "the one is entered like a function: `with within(policy)`"
}


def test_classes_and_aliases_have_names_of_their_own():
    found = [n.strip("_").lower() for tree in TREES.values() for n in names_in(tree)]
    assert len(found) > 400
    twice = {name for name, count in Counter(found).items() if count > 1}
    assert twice == MAY_SHARE_A_NAME.keys()


def names_in(tree):
    """The names of classes, and of what a module gives to a type in their style."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            is_type = isinstance(node.value, (ast.Subscript, ast.BinOp))
            name = ast.unparse(node.targets[0]).strip("_")
            if is_type and re.fullmatch(r"[A-Z]+[a-z]\w*", name):
                yield name


def lines_of(function):
    """How many lines a function has without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines
