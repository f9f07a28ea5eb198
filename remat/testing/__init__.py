"""Assertions and counters: two functions should be equal, and one should cost less.

All are in `_assertions`, but `memory_timeline` and `check_replay`, of `remat._report`.
Equality alone proves nothing about a transform, which may be the identity. So tests
check both.

Called by users.
"""

from remat._report.check_replay import (
    Agreement as Agreement,
    check_replay as check_replay,
)
from remat._report.timeline import (
    MemoryTimeline as MemoryTimeline,
    memory_timeline as memory_timeline,
)
from remat.testing._assertions import (
    assert_same as assert_same,
    assert_same_gradients as assert_same_gradients,
    count_ops as count_ops,
    live_bytes as live_bytes,
    peak_bytes as peak_bytes,
)
