"""The lowering of a call that is traced: a recompute that is part of the graph.

Dynamo makes the function the body of one node. AOTAutograd runs that node while it
traces, and so calls the body, and make_fx the function itself, as one recursive
Function. `Vjp` puts a barrier before the recompute, and a `Tape` gives it what the
policy keeps and the states of its draws.

Invariant: what leaves this file for Dynamo to trace are plain functions. What the
lowering of a node depends on is in its graph or in its key.
Rejected: to have Dynamo trace the Function. Under torch.func it drops a backward.
"""

import functools
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from remat._base.calls import CallsOfNodes, in_place
from remat._base.context import within
from remat._base.errors import CaptureError, Label, label_of
from remat._base.operators import named
from remat._base.types import Fn, Opaque
from remat._offload.inputs import HINT, warn_of_inputs
from remat._partial.barrier import behind
from remat._partial.decide import warn_once
from remat._partial.names import BY_RULE
from remat._partial.options import DEFAULT, Options
from remat._partial.tape import TapedCall
from remat._torch.autograd import base_dual_level_active
from remat._torch.graphs import counted_levels, is_below_tracer, is_under_jvp
from remat._torch.nodes import (
    OF_THIS_PROCESS,
    UnknownLevelError,
    as_node,
    is_body,
    let_dynamo_see_nodes,
    run_body,
)
from remat._torch.tracing import constant_in_traces, eager_only, has_proxies, uncompiled
from remat._transform.changes import changed_by
from remat._transform.lowering import (
    Lowering,
    call_as_function,
    call_lowered,
    lowering_of,
)
from remat.policies import nothing_saveable, save_only_these_names
from remat.policies._data import identity_of, offloads_to_disk, policy_parts, whole


def call_traced(
    fn: Fn, name: str, where: str, options: Options, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function in a trace, which Dynamo traces, as `call_in_graph`."""
    if lowering_of(options) is Lowering.INLINED:
        return fn(*args, **kwargs)
    return call_in_graph(fn, name, where, options, *args, **kwargs)


def call_in_graph(
    fn: Fn, name: str, where: str, options: Options, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function whose lowering is `TRACED`.

    Dynamo traces this, for each call: what is asked here costs time to compile.
    Messages say the name of the function, and where it was rematerialized.
    """
    if torch.compiler.is_dynamo_compiling():
        parts, policy = policy_parts(options.policy)  # one of them is None
        flags = options.prune, options.rng, options.higher_order, options.offload_inputs
        key = _key_in_trace(name, where, flags, parts, policy)
        if not key:
            return _call_uncompiled(fn, name, where, options, args, kwargs)
        return call_as_node(key, fn, *args, **kwargs)
    return _call(fn, label_of(name, where), options, args, kwargs)


def call_as_node(key: str, fn: Fn, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function as one node of the graph that Dynamo makes, with that key."""
    return as_node(functools.partial(_lower, key), fn, *args, **kwargs)


@constant_in_traces
def _key_in_trace(name: str, where: str, flags: Any, parts: Any, policy: Any) -> str:
    """Return the key of a node; "" if no compiled code can follow the policy."""
    options = Options(whole(parts, policy), *flags)
    if options.offload_inputs:
        warn_of_inputs(label_of(name, where), f"compiled code holds them{HINT}")
    return "" if offloads_to_disk(options.policy) else key_of(name, where, options)


def _call_uncompiled(
    fn: Fn, name: str, where: str, options: Options, args: Any, kwargs: Any
) -> Any:
    label = label_of(name, where)
    return call_lowered(lowering_of(options), fn, label, args, kwargs, options)


uncompiled(
    _call_uncompiled,
    "remat: a policy offloads to disk, which compiled code cannot. Offload to "
    "'pinned_host' there. Without fullgraph=True the call runs uncompiled.",
)


# --- The keys of nodes ---
#
# A node holds a key, as it takes no objects. The key is part of the graph and so of the
# key of AOTAutograd's cache on disk: two nodes that are lowered in different ways have
# different keys, in every process.


_CALLS: dict[str, tuple[Label, Options]] = {}
_NUMBERED: dict[tuple[str, str, Options], str] = {}
_PROCESS = secrets.token_hex(8)


def key_of(name: str, where: str, options: Options) -> str:
    """Return what tells a node's label and options. Dynamo calls it as it traces."""
    let_dynamo_see_nodes()
    policy = identity_of(options.joined())
    if policy is None:
        number = f"{OF_THIS_PROCESS} {_PROCESS} {len(_NUMBERED)}"
        key = _NUMBERED.setdefault((name, where, options), f"{name} {number}")
    else:
        # The other options concern eager recomputes only.
        flags = options.prune, options.rng, options.higher_order
        text = repr((name, where, policy, flags, _sources()))
        key = f"{name} {hashlib.sha256(text.encode()).hexdigest()}"
    _CALLS.setdefault(key, (label_of(name, where), options))
    return key


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


# --- A node runs ---


def _lower(key: str, body: Any) -> Fn:
    """Return what runs a node that Dynamo made of a call."""
    return functools.partial(_run_node, body, *_CALLS[key])


@eager_only
def _run_node(
    body: Any, label: Label, options: Options, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a node of Dynamo's graph, without AOTAutograd on tensors as they are."""
    if not is_body(body):  # the graph broke at the call: it is the user's function
        return _call(body, label, options, args, kwargs)
    try:
        return _run_body_of_node(body, label, options, args)
    except UnknownLevelError:
        raise CaptureError(_OTHER_LEVEL.format(label=label)) from None


_OTHER_LEVEL = (
    "remat: {label} uses a level of torch.func that it did not open, in compiled code. "
    "Pass it the tensors as arguments, or open the level inside."
)


def _run_body_of_node(body: Any, label: Label, options: Options, args: Any) -> Any:
    with counted_levels():
        changed, is_shared = changed_by(body)
    if is_shared:
        warn_once(_SHARED.format(label=label))
        return _plain(functools.partial(run_body, body), label, options)(*args)
    if _names_by_rule(body):
        kept = save_only_these_names(BY_RULE) | (options.policy or nothing_saveable)
        options = replace(options, policy=kept)
    at = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    fn = _of_tensors(Opaque(body), args, at, changed)
    # The recompute starts from what a changed input was before. The barrier copies it:
    # inductor makes a clone again in the backward, from what the input is by then.
    tensors = [behind(args[i], [args[i]]) if i in changed else args[i] for i in at]
    policy = options.joined()
    asks = policy is not None and policy.asks_modules
    calls = CallsOfNodes(body.graph, label) if asks else None
    out = _call(fn, label, options, tensors, {}, calls)
    if not changed:
        return out
    out, news = out
    for i, new in zip(changed, news, strict=True):
        # In no_grad where the new value is constant: what is changed may be a leaf.
        with torch.set_grad_enabled(torch.is_grad_enabled() and new.requires_grad):
            args[i].copy_(new)
    return out


def _names_by_rule(body: Any) -> bool:
    """Say whether a rule within keeps something (`remat.custom_vjp`)."""
    graphs = [m.graph for m in body.modules() if isinstance(m, GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    return any(node.target is named and node.args[1:] == (BY_RULE,) for node in nodes)


_SHARED = (
    "remat: {label} changes an input in place that shares memory with another input or "
    "with its result. In compiled code such a call is not recomputed, and saves no "
    "memory. Change a copy."
)


def _of_tensors(
    body: Opaque, args: Sequence[Any], at: Sequence[int], changed: Sequence[int]
) -> Fn:
    """Return the body as a function of its tensors, `at` these. It changes none."""
    constants = Opaque([None if isinstance(a, Tensor) else a for a in args])

    def run(*tensors: Tensor) -> Any:
        leaves = [*constants.value]
        for i, tensor in zip(at, tensors, strict=True):
            leaves[i] = tensor.clone() if i in changed else tensor
        out = run_body(body.value, *leaves)
        return (out, [leaves[i] for i in changed]) if changed else out

    return run


@eager_only
def _call(
    fn: Fn, label: Label, options: Options, args: Any, kwargs: Any, calls: Any = None
) -> Any:
    if not is_below_tracer():
        with counted_levels():
            return call_lowered(lowering_of(options), fn, label, args, kwargs, options)
    plain = _plain(fn, label, options)
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    policy = options.joined()
    is_jvp = is_under_jvp() or base_dual_level_active()
    followed = None if is_jvp else policy
    refuses = options.rng == "error"
    kept = TapedCall(label, followed, refuses_draws=refuses, calls=calls)
    taped = _taped(fn, policy, Opaque(kept))
    with counted_levels():
        return call_as_function(
            taped,
            label,
            args,
            kwargs,
            DEFAULT,
            plain,
            may_read_early=kept.may_read_early,
        )


def _plain(fn: Fn, label: Label, options: Options) -> Fn:
    """Return what runs where nothing is recomputed; it may refuse draws."""
    if options.rng != "error":
        return fn
    return _taped(fn, None, Opaque(TapedCall(label, None, refuses_draws=True)))


def _taped(fn: Fn, policy: Any, kept: Opaque) -> Fn:
    if kept.value.calls is None:
        fn = in_place(fn, policy)

    def taped(*args: Any, **kwargs: Any) -> Any:
        if not has_proxies():  # AOTAutograd asks for metadata first: nothing is kept
            return fn(*args, **kwargs)
        tape = kept.value.next_tape(tree_leaves((args, kwargs)))
        with within(policy, under_mode=True), tape:
            out = fn(*args, **kwargs)
            tape.returned(out)
            return out

    vars(taped)["__wrapped__"] = fn  # names its arguments
    return taped
