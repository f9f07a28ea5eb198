"""Which files belong to Python or to an installed package, and which are the user's.

A package is installed in a folder called `site-packages` or `dist-packages`, wherever
that is, or in another folder of `sys.path` that has the package's `dist-info`
(`pip install --target`). An editable install is the user's own code, which stays where
it is. If a project holds its environment, or the environment a project, the innermost
folder decides.

Invariant: an answer depends on the file and on `sys.path` alone. It is found once for
each file, and again after `sys.path` changed.
Rejected: the folders that `site` names. They are those of this interpreter, and not
those of a `.pth` file, of another environment on `sys.path` or of a container's image.
"""

import csv
import functools
import json
import os
import re
import sys
import sysconfig
import urllib.parse
import urllib.request
from collections.abc import Iterator
from importlib import metadata

import torch


def _folder_of(file: str | None) -> str:
    """Return the folder of a file, with a separator at its end."""
    return os.path.join(os.path.dirname(os.path.abspath(file or "")), "")


_PATHS = sysconfig.get_paths()
STANDARD = tuple(os.path.join(_PATHS[k], "") for k in ("stdlib", "platstdlib"))
TORCH = _folder_of(torch.__file__)  # also where a checkout of it is installed
OURS = _folder_of(os.path.dirname(__file__))
_SITES = tuple(os.path.join(_PATHS[k], "") for k in ("purelib", "platlib"))
_SITE = re.compile(r".*[\\/](?:site|dist)-packages[\\/]", re.DOTALL)


class _Answers:
    """Which files are a package's, while `sys.path` is as it is here: oldest first."""

    __slots__ = ("of", "path")

    def __init__(self) -> None:
        self.path = [*sys.path]
        self.of: dict[str, bool] = {}


_SIZE = 4096
_answers = _Answers()


def is_installed(file: str) -> bool:
    """Say whether a file is Python's or an installed package's."""
    global _answers
    answers = _answers
    if answers.path != sys.path:
        answers = _answers = _Answers()
    known = answers.of.get(file)
    if known is None:
        if len(answers.of) >= _SIZE:
            answers.of.pop(next(iter(answers.of)), None)
        known = answers.of[file] = _is_installed(file)
    return known


def is_standard(file: str) -> bool:
    """Say whether a file is of the standard library."""
    return file.startswith(STANDARD) and not _site_of(file)


def _is_installed(file: str) -> bool:
    if file.startswith((TORCH, OURS)) or is_standard(file):
        return True
    site = _site_of(file) or _target_of(file)
    return bool(site) and not _is_editable(file, site)


def _site_of(file: str) -> str:
    """Return the innermost folder of packages that a file is in, or ""."""
    found = _SITE.match(file)
    if found is not None:
        return found.group()
    return next((site for site in _SITES if file.startswith(site)), "")


# --- Other folders of `sys.path` ---


def _target_of(file: str) -> str:
    """Return the folder of `sys.path` that a package is installed in, or ""."""
    for folder in _folders():
        if file.startswith(folder):
            top = file[len(folder) :].replace("\\", "/").partition("/")[0]
            if top in _installed_in(folder, _changed(folder)):
                return folder
    return ""


def _folders() -> Iterator[str]:
    for entry in sys.path:
        if isinstance(entry, str):
            yield os.path.join(os.path.abspath(entry), "")


def _changed(folder: str) -> int:
    """Return when a folder changed, by which what is known of it is found again."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0  # an archive, or not there


@functools.lru_cache(maxsize=256)
def _installed_in(folder: str, changed: int) -> frozenset[str]:
    """Return the files and folders that distributions have put into a folder."""
    del changed  # only for the cache
    records = (dist.read_text("RECORD") for dist in _distributions(folder))
    lines = (line for text in records if text for line in csv.reader(text.splitlines()))
    return frozenset(line[0].partition("/")[0] for line in lines if line)


def _distributions(folder: str) -> Iterator[metadata.Distribution]:
    if os.path.isdir(folder):
        yield from metadata.distributions(path=[folder])


# --- Editable installs ---


def _is_editable(file: str, site: str) -> bool:
    """Say whether a file is of an editable install that is not outside of a folder."""
    # It may be a link: `flit install --symlink` puts one into the folder of packages.
    roots = [r for f in _folders() for r in _editable_in(f, _changed(f))]
    if not roots:
        return False
    real, site = os.path.realpath(file), os.path.join(os.path.realpath(site), "")
    inner = site if real.startswith(site) else _site_of(real)
    return any(real.startswith(r) and len(r) > len(inner) for r in roots)


@functools.lru_cache(maxsize=256)
def _editable_in(folder: str, changed: int) -> tuple[str, ...]:
    """Return the projects whose editable installs a folder of `sys.path` notes."""
    del changed  # only for the cache
    found = (_project_of(dist) for dist in _distributions(folder))
    return tuple(project for project in found if project)


def _project_of(dist: metadata.Distribution) -> str:
    """Return the folder of an editable install, "" of another distribution."""
    try:
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
        if not origin.get("dir_info", {}).get("editable"):
            return ""
        path = urllib.parse.urlsplit(origin["url"]).path
    except (ValueError, KeyError, AttributeError):
        return ""  # not what the specification says
    return os.path.join(os.path.realpath(urllib.request.url2pathname(path)), "")
