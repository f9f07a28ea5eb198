"""Which files belong to Python or to an installed package, and which are the user's.

A package is installed in a folder called `site-packages` or `dist-packages`, wherever
that is. A link there leads to where a file is, as of an editable install.

Invariant: an answer depends on the file alone, and what is not known is the user's.
Rejected: to read what installers note of their packages, as of `pip install --target`.
To walk such a package takes time, and is right.
"""

import functools
import os
import re
import sysconfig

import torch


def _folder_of(file: str | None) -> str:
    """Return the folder of a file, with a separator at its end."""
    return os.path.join(os.path.dirname(os.path.abspath(file or "")), "")


_PATHS = sysconfig.get_paths()
STANDARD = tuple(os.path.join(_PATHS[k], "") for k in ("stdlib", "platstdlib"))
TORCH = _folder_of(torch.__file__)  # also where a checkout of it is installed
OURS = _folder_of(os.path.dirname(__file__))
_IN_PACKAGES = re.compile(r".*[\\/](?:site|dist)-packages[\\/]", re.DOTALL).match


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Say whether a file is Python's or an installed package's."""
    if file.startswith((TORCH, OURS)) or is_standard(file):
        return True
    return _IN_PACKAGES(os.path.realpath(file)) is not None


def is_standard(file: str) -> bool:
    """Say whether a file is of the standard library."""
    return file.startswith(STANDARD) and not _IN_PACKAGES(file)
