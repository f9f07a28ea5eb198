"""Bytes in memory and bytes in files that are mapped into it, told apart.

The profiler reports both as allocations, and what is offloaded to disk would count as
kept in memory, by `remat.testing` as well. Torch makes such maps in one place; what has
been mapped there is a file's.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch.autograd.profiler import profile


os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # not a line for each start


def timelines(fn: Callable[[], object]) -> tuple[list[int], list[int]]:
    """Run ``fn`` and return the bytes alive after each event, in memory and in files.

    As ``remat.testing.memory_timeline``: beyond what was alive before, until the last
    event before the result is dropped, without collecting garbage meanwhile.
    """
    mapped: set[int] = set()
    from_file: Any = torch.UntypedStorage.from_file

    def noted(*args: Any, **kwargs: Any) -> Any:
        storage = from_file(*args, **kwargs)
        mapped.add(storage.data_ptr())
        return storage

    profiler: Any = profile(profile_memory=True)
    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(torch.UntypedStorage, "from_file", noted), profiler:
            result = fn()
        del result
    finally:
        gc.enable()
    events = [*allocations(profiler.kineto_results.experimental_event_tree())]
    events.sort(key=lambda event: event.start_time_ns)
    sizes = [(e.typed[1].alloc_size, e.typed[1].ptr in mapped) for e in events]
    memory = accumulate(0 if in_file else size for size, in_file in sizes)
    files = accumulate(size if in_file else 0 for size, in_file in sizes)
    return [*memory], [*files]


def allocations(events: Iterable[Any]) -> Iterator[Any]:
    """Yield the allocations and frees in a tree of events."""
    for event in events:
        if event.typed[0].name == "Allocation":
            yield event
        yield from allocations(event.children)
