"""An interpreter of schedules without tensors, which refuses every wrong action."""

import functools
import math
from collections import Counter

from hypothesis import strategies as st

from remat.chain.schedules import (
    Advance,
    Backward,
    Drop,
    Evaluations,
    Load,
    RecordStep,
    Reverse,
    Save,
    Storage,
)


LENGTHS = st.integers(0, 200)
SLOTS = st.integers(1, 20)
WIDTHS = st.integers(1, 7)


class WrongScheduleError(AssertionError):
    """An action that a chain cannot or must not do."""


def require(condition, message):
    if not condition:
        raise WrongScheduleError(message)


class Interpreter:
    """Runs the actions of a schedule on step numbers, and counts.

    `limits` are of carries in each storage, and `width` of the steps reversed at once.
    """

    def __init__(self, length, *, memory=math.inf, disk=0, width=math.inf):
        self.length, self.width = length, width
        self.limits = {Storage.MEMORY: memory, Storage.DISK: disk}
        self.stored = {}
        self.live = None
        self.recorded = set()  # the steps that wait for their backward
        self.reversed_to = length
        self.evaluations = 0
        self.peak = Counter()
        self.done = Counter()
        self.written, self.read = [], []  # on disk
        self.unused = set()  # stored carries that nobody loaded yet

    def forward(self, actions):
        """Run a forward, and return how many steps it ran."""
        self.live, self.evaluations, self.returning = 0, 0, False
        for action in actions:
            allowed = isinstance(action, Advance | Save | Drop | RecordStep)
            require(allowed, f"{action} in a forward")
            self.step(action)
        require(self.live == self.length, "the forward does not reach the result")
        return self.evaluations

    def backward(self, actions):
        """Run a backward, and return how many steps it ran."""
        self.live, self.evaluations, self.returning = None, 0, True
        for action in actions:
            self.step(action)
        require(self.reversed_to == 0, f"step {self.reversed_to - 1} is not reversed")
        require(not self.stored, f"carries {list(self.stored)} are still stored")
        require(not self.recorded, f"steps {list(self.recorded)} are still recorded")
        return self.evaluations

    def run(self, schedule):
        """Run both passes of a schedule."""
        forward = self.forward(schedule.forward(self.length))
        return Evaluations(forward, self.backward(schedule.backward(self.length)))

    def step(self, action):
        """Do one action."""
        self.done[type(action)] += 1
        match action:
            case Advance(start, stop):
                self.evaluate(start, stop)
                self.live = stop
            case Reverse(start, stop):
                self.evaluate(start, stop)
                require(stop - start <= self.width, f"{action} is too wide")
                self.pull(stop, start)
            case RecordStep(step):
                self.evaluate(step, step + 1)
                require(step not in self.recorded, f"step {step} is recorded already")
                self.recorded.add(step)
                self.live = step + 1
            case Backward(step):
                require(step in self.recorded, f"step {step} is not recorded")
                self.pull(step + 1, step)
                self.recorded.remove(step)
            case Save(step, storage):
                self.save(step, storage)
            case Load(step):
                require(step in self.stored, f"carry {step} is not stored")
                if self.stored[step] is Storage.DISK:
                    self.read.append(step)
                self.live = step
                self.unused.discard(step)
            case Drop(step):
                require(step in self.stored, f"carry {step} is not stored")
                # A forward that doesn't know its length stores carries in vain.
                useless = step in self.unused and self.returning
                require(not useless, f"carry {step} was stored in vain")
                del self.stored[step]

    def evaluate(self, start, stop):
        require(self.live == start, f"carry {start} is not live, but {self.live} is")
        require(start < stop <= self.length, f"no steps from {start} to {stop}")
        require(stop <= self.reversed_to, f"step {stop - 1} is reversed already")
        self.evaluations += stop - start

    def pull(self, stop, start):
        late = f"carry {stop} has no cotangent, but {self.reversed_to} has"
        require(stop == self.reversed_to, late)
        self.live, self.reversed_to = None, start

    def save(self, step, storage):
        require(self.live == step, f"carry {step} is not live, but {self.live} is")
        require(step not in self.stored, f"carry {step} is stored already")
        require(step < self.length, "the result needs no checkpoint")
        self.stored[step] = storage
        self.unused.add(step)
        if storage is Storage.DISK:
            self.written.append(step)
        count = sum(kind is storage for kind in self.stored.values())
        self.peak[storage] = max(self.peak[storage], count)
        require(count <= self.limits[storage], f"{count} carries in {storage}")


def assert_as_predicted(schedule, length, **limits):
    """Run a schedule, compare the counts, and return the interpreter."""
    interpreter = Interpreter(length, **limits)
    found, predicted = interpreter.run(schedule), schedule.evaluations(length)
    require(found == predicted, f"it ran {found}, but predicted {predicted}")
    return interpreter


@functools.cache
def fewest_advances(length, slots):
    """t(l, c) by trying all splits."""
    if length <= 1 or slots == 1:
        return length * (length - 1) // 2
    rest = slots - 1
    return min(
        k + fewest_advances(length - k, rest) + fewest_advances(k, slots)
        for k in range(1, length)
    )


class ByteInterpreter(Interpreter):
    """Counts bytes and work as well, for a chain of unequal stages."""

    def __init__(self, stages, input_bytes=0):
        super().__init__(len(stages))
        self.stages = stages
        self.carries = [input_bytes, *(stage.output_bytes for stage in stages)]
        given = [0, *(stage.gradient_bytes for stage in stages)]
        pairs = zip(self.carries, given, strict=True)
        self.gradients = [carry if g is None else g for carry, g in pairs]
        self.most_bytes = self.work = 0

    def step(self, action):
        match action:
            case Advance(start, stop) if stop > start + 1:
                for k in range(start, stop):
                    self.step(Advance(k, k + 1))
                return
            case Advance(start):
                stage = self.stages[start]
                self.note(stage.output_bytes + stage.extra_bytes, stage.forward_cost)
            case RecordStep(step):
                stage = self.stages[step]
                self.note(stage.saved_bytes + stage.forward_extra, stage.forward_cost)
            case Backward(step) if step in self.recorded:
                stage = self.stages[step]
                extra = self.gradients[step] + stage.backward_extra
                self.note(extra, stage.backward_cost)
        super().step(action)

    def note(self, extra, work):
        """Note what exists during an action."""
        self.most_bytes = max(self.most_bytes, self.held() + extra)
        self.work += work

    def held(self):
        """What exists between actions. Recorded steps hold their input and output."""
        carries = {*self.stored, *self.recorded, self.live} - {None, 0}
        plain = (self.carries[k] for k in carries if k - 1 not in self.recorded)
        residuals = (self.stages[k].saved_bytes for k in self.recorded)
        gradient = self.gradients[self.reversed_to]
        return self.carries[0] + sum(plain) + sum(residuals) + gradient
