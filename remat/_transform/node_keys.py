"""Keys of nodes: what tells the call that a node of Dynamo's graph was made of.

A node holds a key, as it takes constants and no objects. The key is part of the graph,
and so of the key of AOTAutograd's cache on disk: two nodes that are lowered in
different ways have different keys, in every process.

Invariant: what the lowering of a node depends on is in its graph or in its key.
Rejected: a number for each call. Another process would give it to another call.
"""

import functools
import hashlib
import secrets
from pathlib import Path

from remat._base.labels import Label, label_of
from remat._partial.options import Options
from remat._torch import OF_THIS_PROCESS
from remat.policies._data import identity_of


_CALLS: dict[str, tuple[Label, Options]] = {}
_NUMBERED: dict[tuple[str, str, Options], str] = {}
_PROCESS = secrets.token_hex(8)


def key_of(name: str, where: str, options: Options) -> str:
    """Return the key of a call, which `call_of` finds.

    Args:
        name: of the function.
        where: it was rematerialized.
        options: of `remat`.
    """
    policy = identity_of(options.joined())
    if policy is None:
        number = f"{OF_THIS_PROCESS} {_PROCESS} {len(_NUMBERED)}"
        key = _NUMBERED.setdefault((name, where, options), f"{name} {number}")
    else:
        key = f"{name} {_digest_of(name, where, policy, options)}"
    _CALLS.setdefault(key, (label_of(name, where), options))
    return key


def call_of(key: str) -> tuple[Label, Options]:
    """Return the label and the options of a call."""
    return _CALLS[key]


def _digest_of(name: str, where: str, policy: str, options: Options) -> str:
    # The others are for a recompute in the backward, and a graph holds its own.
    flags = options.prune, options.rng, options.higher_order
    text = repr((name, where, policy, flags, _sources()))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """Return a digest of remat's own code, which lowers a node.

    Its version would not do: of an editable install the code changes without it. Code
    that cannot be read, as in a zip file, has another digest in each process.
    """
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    if not root.is_dir():
        return _PROCESS
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()
