"""Refuses draws from the global random streams, naming the operation and the line.

Invariant: after the error, the stream that was drawn from is as it was before.
Rejected: refusing every operation that torch tags as random. Attention is tagged, and
draws nothing without dropout; another may have been passed a generator. Nor do the tags
say all: an operation that somebody registered may call a random one.
"""

import functools
from typing import Any

import torch
from typing_extensions import override

from remat._ambient.streams import device_streams, global_streams, moved_since
from remat._base.errors import RandomnessError
from remat._base.operators import Observer
from remat._base.source import user_line
from remat._base.types import Fn
from remat._torch.operators import OpOverload


class Guard(Observer):
    """Raises the error of `drew_in` on an operation that moves a global stream."""

    unseen = frozenset()

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def is_off(self) -> bool:
        """Say whether draws are let through at present."""
        return False

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not _may_draw(func) or self.is_off():
            return super().run(func, args, kwargs)
        streams = [global_streams().streams[0], *device_streams()]
        before = [(s, s.read()) for s in streams]
        out = super().run(func, args, kwargs)
        moved = moved_since(before)
        if not moved:
            return out
        for stream, state in moved:
            stream.write(state)
        raise RandomnessError(self._message.format(op=func, where=user_line()))


# The tags of these namespaces can be trusted.
_TAGGED = ("aten", "prims", "prim", "remat")


@functools.cache
def _may_draw(func: Any) -> bool:
    if not isinstance(func, OpOverload) or func.namespace not in _TAGGED:
        return True
    return is_tagged_random(func)


def is_tagged_random(func: Any) -> bool:
    """Say whether an operation draws random numbers, by its tag."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Say whether an operation draws random numbers, by its tag and its arguments."""
    if not is_tagged_random(func):
        return False
    # Attention draws only for its dropout.
    for k, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[k] if k < len(args) else kwargs.get("dropout_p", 0.0)
            return given != 0.0
    return True


def out_of_place(func: Any) -> Any:
    """Return the operation that returns what this one, a draw, writes."""
    base, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    name = f"{base}.{overload}"
    base, overload = _OUT_OF_PLACE.get(name, name.replace("_.", ".")).split(".")
    return getattr(getattr(torch.ops.aten, base), overload)


_OUT_OF_PLACE = {
    "bernoulli_.float": "bernoulli.p",
    "normal_.default": "normal_functional.default",
    "random_.default": "random.default",
    "random_.from": "random.from",
    "random_.to": "random.to",
    "rrelu_with_noise.default": "rrelu_with_noise_functional.default",
}


def with_defaults(func: Any, args: Any, kwargs: Any) -> Any:
    """Return positional arguments with those that torch.fx drops, as default values.

    The operation out of place may have no defaults: `bernoulli_(p=0.5)`, `bernoulli`.
    """
    missing = func._schema.arguments[len(args) :]
    rest = [a for a in missing if not a.kwarg_only and a.name not in kwargs]
    return *args, *(a.default_value for a in rest)


def without_draws(fn: Fn, label: str) -> Fn:
    """Return `fn` refusing to draw from a global stream, torch's or another."""
    message = drew_in(label)

    def run(*args: Any, **kwargs: Any) -> Any:
        streams = global_streams()
        before = streams.read()
        with Guard(message):
            result = fn(*args, **kwargs)
        each = zip(streams.streams, before, streams.read(), strict=True)
        for stream, old, new in each:
            if old != new:
                stream.write(old)
                raise RandomnessError(_DREW.format(label=label, stream=stream.name))
        return result

    return run


def drew_in(label: str) -> str:
    """Return the message of an error, with `{op}` and `{where}` to be filled in."""
    return _DREW_IN.format(label=label.replace("{", "{{").replace("}", "}}"))


_DREW = (
    "remat: {label} drew from the global random stream of: {stream}, which "
    "rng='error' refuses. Pass a key of remat.random, or a generator, and draw from it."
)
_DREW_IN = (
    "remat: {label} drew from a global random stream in {{op}}, at {{where}}, which "
    "rng='error' refuses. Pass a key and draw with remat.random, or call the function "
    "under remat.random.bind(key), or pass a torch.Generator."
)
