"""What is public in remat, and what its reference pages say of it.

A *public name* is one that a public module imports as itself (`from remat._x import
name as name`), or defines without an underscore. A *page* is one of `docs/api/`.

`missing` lists what a page or a docstring lacks. The rules:

- Every name has an entry on a page: a directive with its full name. Names that are
  another package's are named on a page as code, and are described there.
- Every function, class and method that a page shows has types for all arguments and the
  result.
- Every function and class has an example, `>>>` in its docstring. A value (a policy, a
  type) has one in the text below its assignment. An alias has that of its object.
- An error has an example on `docs/api/errors.md`, which raises it.

Invariant: modules and pages are arguments, so a test can pass made-up ones.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any


MODULES = (
    *("remat", "remat.nn", "remat.policies", "remat.random", "remat.chain"),
    *("remat.chain.schedules", "remat.testing", "remat.compat", "remat.rules"),
)


@dataclass(frozen=True)
class Name:
    """A public name of a module; its home defines it, an alias by another name."""

    module: str
    name: str
    home: str
    own: str

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def value(self) -> Any:
        return getattr(import_module(self.module), self.name)

    @property
    def is_foreign(self) -> bool:
        """Whether another package defines it."""
        return self.home.partition(".")[0] != self.module.partition(".")[0]

    @property
    def is_value(self) -> bool:
        return not (inspect.isclass(self.value) or inspect.isroutine(self.value))


# --- What is public -------------------------------------------------------------------


def _tree(module: str) -> ast.Module:
    return ast.parse(Path(import_module(module).__file__).read_text())


def _statements(module: str) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those that only type checkers read."""
    for node in _tree(module).body:
        is_condition = isinstance(node, ast.If)
        if is_condition and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from node.body
        else:
            yield node


def _target(node: ast.stmt) -> str:
    """The name that a statement defines; "" if it defines none."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def _named(module: str) -> Iterator[Name]:
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.asname:
                    yield Name(module, alias.asname, node.module, alias.name)
        elif _target(node):
            yield Name(module, _target(node), module, _target(node))


def _at_home(name: Name) -> Name:
    """Follow imports to the module that defines a name, and an alias to its object."""
    found = name
    while not found.is_foreign:
        own = {n.name: n for n in _named(found.home)}.get(found.own)
        if own is None:  # imported there for use, and public here
            sources = _imports(found.home)
            if found.own not in sources:
                break
            home, original = sources[found.own]
        elif own.home == found.home:
            break
        else:
            home, original = own.home, own.own
        found = Name(name.module, name.name, home, original)
    return found


def _imports(module: str) -> dict[str, tuple[str, str]]:
    """Where the names come from that a module imports: a module, and a name there."""
    nodes = (n for n in _tree(module).body if isinstance(n, ast.ImportFrom))
    return {a.asname or a.name: (n.module, a.name) for n in nodes for a in n.names}


def public_names(modules: Sequence[str]) -> list[Name]:
    """Return the public names of modules that are no modules themselves."""
    named = (name for module in modules for name in _named(module))
    seen = (n for n in named if not n.name.startswith("_"))
    return [_at_home(n) for n in seen if not isinstance(n.value, ModuleType)]


# --- What is said of it ---------------------------------------------------------------


def text_of(name: Name) -> str:
    """Return the docstring of a name; of a value, the text below its assignment."""
    if not name.is_value:
        return inspect.getdoc(name.value) or ""
    body = _tree(name.home).body
    for node, after in zip_longest(body, body[1:]):
        if _target(node) != name.own:
            continue
        if isinstance(after, ast.Expr):
            return inspect.cleandoc(ast.literal_eval(after.value))
        if isinstance(node.value, ast.Name):  # an alias
            return text_of(replace(name, own=node.value.id))
    return ""


def entries(page: str) -> set[str]:
    """Return the full names that a page documents with a directive of their own."""
    return set(re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)", page, re.MULTILINE))


def raised(page: str) -> set[str]:
    """Return the full names of errors that examples of a page raise, or catch."""
    found = re.findall(r"^([\w.]+Error): ", page, re.MULTILINE)
    return {*found, *re.findall(r"^\.\.\. except ([\w.]+Error) as", page, re.MULTILINE)}


def untyped(function: Any) -> list[str]:
    """Return what has no type: names of arguments, and "the result"."""
    signature = inspect.signature(function)
    found = [
        parameter.name
        for place, parameter in enumerate(signature.parameters.values())
        if parameter.annotation is parameter.empty
        and not (place == 0 and parameter.name in {"self", "cls"})
    ]
    is_typed = signature.return_annotation is not signature.empty
    return found if is_typed else [*found, "the result"]


def functions_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a function, or what a class says of calls: its methods and properties."""
    if not inspect.isclass(value):
        yield "", value
        return
    for name, member in vars(value).items():
        member = member.fget if isinstance(member, property) else member
        member = getattr(member, "__func__", member)
        made = getattr(member, "__module__", None) != value.__module__
        # Dataclasses, tuples and enums write their own; the fields have types.
        is_written = inspect.isfunction(member) and not made
        is_written = is_written and "<string>" not in member.__code__.co_filename
        if is_written and (not name.startswith("_") or name == "__init__"):
            yield f".{name}", member


# --- What is missing ------------------------------------------------------------------


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _types(name: Name) -> Iterator[str]:
    for suffix, function in functions_of(name.value):
        for what in untyped(function):
            if not (what == "the result" and suffix == ".__init__"):
                yield f"{name.full}{suffix}: no type for {what}"


def missing(
    modules: Sequence[str], pages: str, errors: str, home: str = "remat"
) -> list[str]:
    """Return what the text of all pages, and of that on errors, and docstrings lack."""
    found = []
    listed = entries(pages)
    for name in public_names(modules):
        if name.is_foreign:
            if f"`{name.name}`" not in pages:
                found.append(f"{name.full}: not named on a page")
            continue
        if name.full not in listed:
            found.append(f"{name.full}: no entry")
        if _is_error(name.value):
            if f"{home}.{name.name}" not in raised(errors):
                found.append(f"{name.full}: no example on the page of errors")
        elif ">>>" not in text_of(name):
            found.append(f"{name.full}: no example")
        if not name.is_value:
            found += _types(name)
    return found
