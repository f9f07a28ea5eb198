"""Records of the planner, by hand or random: no tensors, no torch operations."""

import torch
from hypothesis import strategies as st

from remat._base.op import Op
from remat._partial.plan import Record, Step, Within


def pure(reads, *makes, **flags):
    """An operation that reads some storages and makes others."""
    return Step(Op("pure"), tuple(reads), makes, **flags)


def view(of):
    return Step(Op("view"), (of,), (of,))


def in_place(target, *reads):
    return Step(Op("in_place"), (target, *reads), (target,), (target,))


def collective(target):
    """Writes in place what the processes have, `all_reduce` say."""
    op = Op(torch.ops.c10d.allreduce_.default)
    return Step(op, (target,), (target,), (target,))


def draw(*reads, makes):
    return Step(Op("draw"), reads, (makes,), draws=True)


def draw_like(of, makes):
    """Draws as many as another has elements, `rand_like` say."""
    return Step(Op("draw_like"), (of,), (makes,), draws=True, metadata_only=(0,))


def dropout(of, out, mask):
    return Step(Op("dropout"), (of,), (out, mask), draws=True, metadata_only=(1,))


def draw_in_place(target):
    return Step(
        Op("draw_"), (target,), (target,), (target,), draws=True, metadata_only=(0,)
    )


def zeros_like(of, makes):
    return Step(Op("zeros_like"), (of,), (makes,), metadata_only=(0,))


def record(*steps, inputs=(0,), roots=(), inside=(), within=()):
    """Storages are numbered from 0 by the inputs; `roots` are those of each output."""
    calls = (Within(*map(frozenset, call)) for call in within)
    how = {"inside": tuple(inside), "within": tuple(calls)}
    return Record(steps, inputs, tuple(map(frozenset, roots)), **how)


# --- Random records ---


KINDS = ["pure", "pure", "pure", "view", "in_place", "runs", "twice"]
KINDS += ["draw", "draw_like", "dropout", "draw_in_place", "zeros_like"]


def step_of(kind, one, reads, new):
    match kind:
        case "view":
            return view(one)
        case "in_place":
            return in_place(one, *reads)
        case "twice":
            return pure(reads, new, new + 1)
        case "draw":
            return draw(*reads, makes=new)
        case "draw_like":
            return draw_like(one, new)
        case "dropout":
            return dropout(one, new, new + 1)
        case "draw_in_place":
            return draw_in_place(one)
        case "zeros_like":
            return zeros_like(one, new)
        case _:
            return pure(reads, new, always_runs=kind == "runs")


@st.composite
def records(choose):
    leaves = choose(st.integers(1, 3))
    known, steps = [*range(leaves)], []
    for kind in choose(st.lists(st.sampled_from(KINDS), max_size=10)):
        one = choose(st.sampled_from(known))
        reads = choose(st.lists(st.sampled_from(known), max_size=3))
        step = step_of(kind, one, reads, len(known))
        steps.append(step)
        known += [s for s in step.makes if s not in known]
    roots = choose(st.lists(st.lists(st.sampled_from(known), max_size=3), max_size=3))
    return record(*steps, inputs=(*range(leaves),), roots=roots)


def subsets(of):
    return st.sets(st.sampled_from([*of])) if of else st.just(set())
