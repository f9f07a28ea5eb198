"""Offloading beside a computation: copies on a stream of their own.

Where there is no accelerator, a stand-in takes the place of its streams: what is sent
to one is done only when it is waited for, so that a wait that is missing shows.
"""

import contextlib
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from support.offloading import LAYOUTS, STORES, assert_same_bits, back
from support.tables import rows
from torch.utils._python_dispatch import TorchDispatchMode

from remat._offload import offload as _offload
from remat._offload.offload import Fetched, Origin, in_file, in_host_memory, origin_of


# --- A stand-in for streams -------------------------------------------------------


class Event:
    def __init__(self, stream, position):
        self.stream, self.position = stream, position


# The streams that are entered, and what they were asked to do.
entered, log = [], []


class Stream:
    """Does what it is sent only once somebody waits for it."""

    is_computing = False

    def __init__(self, device=None):
        self.device, self.sent, self.done = device, [], 0

    def send(self, job):
        self.sent.append(job)

    def run(self, position):
        while self.done < position:
            job, self.sent[self.done] = self.sent[self.done], None
            self.done += 1
            job()

    def wait_event(self, event):
        self.send(lambda: event.stream.run(event.position))
        if self.is_computing:  # which does everything at once
            self.run(len(self.sent))

    def wait_stream(self, other):
        assert other.is_computing
        log.append("wait")

    def record_event(self):
        return Event(self, len(self.sent))

    def __enter__(self):
        entered.append(self)

    def __exit__(self, *_):
        entered.pop()


class Accelerator(TorchDispatchMode):
    """Sends the copies that are made in a stream to that stream."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and entered:
            (stream,) = entered
            to, source = args[0].detach(), args[1].detach()
            stream.send(lambda: torch.ops.aten.copy_(to, source))
            log.append("copy")
            return args[0]
        return func(*args, **(kwargs or {}))


DEVICE = torch.device("cuda", 0)


@pytest.fixture
def lane(monkeypatch):
    """Have the CPU stand in for a device; return the stream of its copies."""
    computing = Stream()
    computing.is_computing = True
    log.clear()
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: computing)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda _, stream: log.append("keep" if stream.is_computing else "kept"),
    )
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(_offload, "undisturbed", contextlib.nullcontext)
    monkeypatch.setattr(_offload, "_LANES", {})
    cpu = torch.device("cpu")
    monkeypatch.setattr(_offload, "room", lambda n, _: nothing(n))
    monkeypatch.setattr(_offload, "_pinned", nothing)
    lane = _offload._LANES[cpu] = _offload._lane_of(DEVICE)
    with Accelerator():
        yield lane._stream


def nothing(nbytes):
    """Memory that holds nothing of use."""
    return torch.full((nbytes,), 111, dtype=torch.uint8)


def sent(*xs):
    """What was stored in the host's memory, to be taken back to the device."""
    stored = [in_host_memory(x) for x in xs]
    assert log.count("copy") == log.count("kept") == len(xs)
    log.clear()
    return Fetched(stored, [Origin(DEVICE, x.stride()) for x in xs])


def randn(count):
    return [torch.randn(5) for _ in range(count)]


# --- With the stand-in ------------------------------------------------------------


def test_a_copy_to_the_host_waits_for_the_computation_and_keeps_its_source(lane):
    x = torch.randn(3, 4).t()
    stored = in_host_memory(x)
    assert log == ["wait", "copy", "kept"]
    assert (stored.shape, stored.stride()) == (x.shape, x.stride())
    assert lane.done == 0
    assert not torch.equal(stored, x)
    lane.run(1)
    assert torch.equal(stored, x)


def test_a_copy_back_has_been_waited_for(lane):
    xs = [torch.randn(3, k + 2).t() for k in range(4)]
    xs[2] = torch.randn(8, 9)[::2, ::3]
    stored = sent(*xs)
    assert lane.done == 0
    for k, x in enumerate(xs):
        assert_same_bits(stored.take(k), x)
    assert log.count("copy") == log.count("keep") == 4


def test_the_next_one_is_on_its_way_while_one_is_used(lane):
    xs = randn(3)
    stored = sent(*xs)
    assert (log, lane.done) == (["copy"], 0)
    assert_same_bits(stored.take(0), xs[0])
    assert log == ["copy", "copy", "keep"]
    assert (lane.done, len(lane.sent)) == (4, 5)
    assert_same_bits(stored.take(1), xs[1])
    assert_same_bits(stored.take(2), xs[2])
    assert log.count("copy") == 3
    assert lane.done == len(lane.sent) == 6


def test_another_order_is_right_and_costs_copies(lane):
    xs = randn(4)
    stored = sent(*xs)
    for k in (2, 0, 1, 3, 3):
        assert_same_bits(stored.take(k), xs[k])
    # One for each taken, and those on their way that were not taken: 0, 3 and 2.
    assert log.count("copy") == 5 + 3


def test_no_more_than_the_next_one_is_held(lane, monkeypatch):
    alive, back_of = weakref.WeakSet(), _offload._Lane.back

    def noting(self, host):
        arriving = back_of(self, host)
        alive.add(arriving.data)
        return arriving

    monkeypatch.setattr(_offload._Lane, "back", noting)
    xs = randn(6)
    stored = sent(*xs)
    for k in (0, 1, 2, 4, 1, 5):
        taken = stored.take(k)
        lane.run(len(lane.sent))
        assert len(alive) <= 1
        assert_same_bits(taken, xs[k])
    assert len(alive) == 0


def test_a_tensor_that_need_not_come_back_does_not_stop_the_copies(lane):
    xs = randn(3)
    stored = [in_host_memory(x) for x in xs]
    origins = [Origin(DEVICE, x.stride()) for x in xs]
    origins[1] = origin_of(xs[1])
    lane.run(3)
    log.clear()
    some = Fetched(stored, origins)
    some.take(0)
    assert some.take(1) is stored[1]
    assert log.count("copy") == 2
    assert_same_bits(some.take(2), xs[2])
    assert log.count("copy") == 2


def test_a_file_comes_back_to_a_device(lane, folder):
    xs = [torch.randn(3, 4).t(), torch.randn(8, 9)[::2, ::3]]
    files = Fetched([in_file(x) for x in xs], [Origin(DEVICE, x.stride()) for x in xs])
    for k, x in enumerate(xs):
        assert_same_bits(files.take(k), x)
    assert log.count("copy") == log.count("keep") == 2


def test_a_device_without_streams_is_copied_from_and_to_all_the_same(monkeypatch):
    def failing(_):
        raise RuntimeError("no streams")

    monkeypatch.setattr(torch, "Stream", failing)
    monkeypatch.setattr(_offload, "_LANES", {})
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    x = torch.randn(8, 9)[::2, ::3]
    stored = in_host_memory(x)
    assert list(_offload._LANES.items()) == [(x.device, None)]
    assert stored.stride() == (3, 1)
    assert_same_bits(back(stored, x), x)


def test_threads_share_the_lane_of_a_device(monkeypatch):
    """Else a copy back could overtake the copy away."""
    start = Barrier(8)

    class Slow(Stream):
        def __init__(self, device):
            start.wait(timeout=60)
            super().__init__(device)

    monkeypatch.setattr(torch, "Stream", Slow)
    monkeypatch.setattr(_offload, "_LANES", {})
    with ThreadPoolExecutor(8) as pool:
        lanes = [*pool.map(_offload._lane_of, [DEVICE] * 8, timeout=120)]
    assert len({id(lane) for lane in lanes}) == 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned")
def test_memory_of_the_host_is_plain_where_none_can_be_pinned():
    memory = _offload._pinned(100)
    assert (memory.numel(), memory.dtype) == (100, torch.uint8)
    assert not memory.is_pinned()


# --- With a device ----------------------------------------------------------------


def on_cuda(*shape):
    return torch.randn(shape, device="cuda")


@pytest.mark.gpu
@rows("layout, count", LAYOUTS)
@rows("store", STORES)
def test_every_layout_comes_back_to_cuda(layout, count, store, folder):
    x = torch.empty_strided(
        layout.shape, layout.stride(), dtype=layout.dtype, device="cuda"
    )
    _offload._unexpanded(x).copy_(_offload._unexpanded(layout).resolve_neg())
    stored = store(x)
    assert stored.device.type == "cpu"
    assert stored.untyped_storage().nbytes() == count * x.element_size()
    assert_same_bits(back(stored, x), x)
    assert count == 0 or stored.is_pinned() == (store is in_host_memory)


def busied(weights):
    """Keep the device busy."""
    for _ in range(5):
        weights = weights @ weights
        weights = weights / weights.norm()
    return weights


@pytest.mark.gpu
def test_memory_freed_at_once_is_not_used_before_it_is_copied():
    """The copies are late, and the memory is asked for."""
    stored, origins = [], []
    weights = on_cuda(4096, 4096)
    for k in range(20):
        weights = busied(weights)
        x = torch.full((2**22,), float(k), device="cuda")
        stored.append(in_host_memory(x))
        origins.append(origin_of(x))
        del x
        torch.full((2**22,), -1.0, device="cuda")
    late = Fetched(stored, origins)
    for k in range(20):
        taken = late.take(k)
        weights = busied(weights)
        assert bool((taken == k).all())
        del taken
        torch.full((2**22,), -2.0, device="cuda")


@pytest.mark.gpu
def test_an_offloaded_tensor_is_not_on_the_device():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    xs = [on_cuda(2**20) for _ in range(8)]
    origins = [origin_of(x) for x in xs]
    stored = [in_host_memory(x) for x in xs]
    del xs
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    away = Fetched(stored, origins)
    torch.cuda.reset_peak_memory_stats()
    for k in range(8):
        away.take(k).sin_()
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 3 * 2**22


@pytest.mark.gpu
def test_the_copies_run_on_a_stream_of_their_own():
    x = on_cuda(2**20)
    stored = in_host_memory(x)
    lane = _offload._lane_of(x.device)
    assert lane._stream != torch.accelerator.current_stream(x.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        taken = Fetched([stored], [origin_of(x)]).take(0)
        total = taken.double().sum()
    side.synchronize()
    assert total == x.double().sum()
