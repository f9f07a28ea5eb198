"""The bytes that torch's allocators give out, counted by the profiler and nothing else.

Plans are measured with it: no code of remat's says how large a step was.
"""

import gc

from torch.autograd.profiler import profile


def most_allocated(run, *args, **kwargs):
    """Run a function; return the most bytes alive beyond those before, and a result."""
    gc.collect()
    with profile(profile_memory=True) as profiler:
        result = run(*args, **kwargs)
    changes, todo = [], [*profiler.kineto_results.experimental_event_tree()]
    while todo:
        event = todo.pop()
        todo += event.children
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = most = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        live += nbytes
        most = max(most, live)
    return most, result
