"""Names of functions, random streams and graph nodes; and where a report can be made.

Invariant: a thing has the same name in every report. Rejected: a report under a
transform. A function has several graphs there, and no argument says which is meant.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from remat._ambient.streams import Stream
from remat._base.errors import Label, label_of, name_in, note
from remat._base.program import Program
from remat._partial.options import Options
from remat._torch import current_layer, dual_level_active
from remat._transform.function import Primal
from remat._transform.levels import Below
from remat._transform.module import recomputed_by


def refuse_transforms(report: str, instead: str) -> None:
    """Raise a RuntimeError under a transform of torch.func or a trace."""
    if current_layer() is not None or dual_level_active():
        raise RuntimeError(_TRANSFORMED.format(report=report, instead=instead))
    if torch.compiler.is_compiling():
        raise RuntimeError(_COMPILED.format(report=report))


_TRANSFORMED = (
    "remat: {report} was called under a transform of torch.func or forward-mode AD, "
    "where tensors have several graphs. Call it outside, on {instead}."
)
_COMPILED = (
    "remat: {report} was called in a function that torch.compile traces. Call it "
    "outside, on the function that is not compiled."
)


@contextmanager
def one_by_one(report: str, args: Sequence[Any]) -> Iterator[None]:
    """Note on an error of the function that its arguments may be meant one by one."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        if len(args) == 1 and isinstance(args[0], (tuple, list)):
            kind = type(args[0]).__name__
            note(error, _ONE_BY_ONE.format(report=report, kind=kind))
        raise


_ONE_BY_ONE = (
    "remat: {report} was given one argument for the function, a {kind}. To pass what "
    "is in it, write {report}(fn, *args), not {report}(fn, args)."
)


def unwrapped(fn: Any) -> tuple[Any, str, Options]:
    """Return the function that is recomputed, its label, and the options."""
    found = recomputed_by(fn)
    if found is None:
        return fn, label_of_function(fn), Options()
    inner, call = found
    return inner, call.__remat_label__, call._options


def label_of_function(fn: Any) -> Label:
    """Return the label of a function that is not rematerialized."""
    return label_of(getattr(fn, "__qualname__", type(fn).__qualname__))


def stream_name(stream: Any) -> str:
    """Return the name of a random stream, or of a generator that was passed."""
    return stream.name if isinstance(stream, Stream) else "a torch.Generator"


def reader_of(node: Any) -> str:
    """Return the name of the operation that a graph node is the backward of."""
    program = getattr(node, "program", None)
    if isinstance(program, Program):
        call = call_behind(program)
        return "remat" if call is None else f"remat({name_in(call.label)})"
    name = re.sub(r"Backward\d*$", "", type(node).__name__)
    if isinstance(node, torch.autograd.function.FunctionCtx):
        return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def call_behind(program: Any) -> Primal | None:
    """Return the call that a program is, or evaluates; None if it is another rule."""
    while isinstance(program, Below):
        program = program.program
    return program if isinstance(program, Primal) else None
