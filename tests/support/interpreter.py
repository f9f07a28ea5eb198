"""An interpreter of schedules without tensors, which refuses every wrong action."""

import functools
import math
from collections import Counter

from hypothesis import strategies as st

from remat.chain.schedules import Advance, Drop, Evaluations, Load, Reverse, Save


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

    `memory` limits the stored carries, and `width` the steps reversed at once.
    """

    def __init__(self, length, *, memory=math.inf, width=math.inf):
        self.length, self.width = length, width
        self.most = memory
        self.stored = set()
        self.live = None
        self.reversed_to = length
        self.evaluations = 0
        self.peak = 0
        self.done = Counter()
        self.unused = set()  # stored carries that nobody loaded yet

    def forward(self, actions):
        """Run a forward, and return how many steps it ran."""
        self.live, self.evaluations, self.returning = 0, 0, False
        for action in actions:
            allowed = isinstance(action, Advance | Save | Drop)
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
            case Save(step):
                self.save(step)
            case Load(step):
                require(step in self.stored, f"carry {step} is not stored")
                self.live = step
                self.unused.discard(step)
            case Drop(step):
                require(step in self.stored, f"carry {step} is not stored")
                # A forward that doesn't know its length stores carries in vain.
                useless = step in self.unused and self.returning
                require(not useless, f"carry {step} was stored in vain")
                self.stored.remove(step)

    def evaluate(self, start, stop):
        require(self.live == start, f"carry {start} is not live, but {self.live} is")
        require(start < stop <= self.length, f"no steps from {start} to {stop}")
        require(stop <= self.reversed_to, f"step {stop - 1} is reversed already")
        self.evaluations += stop - start

    def pull(self, stop, start):
        late = f"carry {stop} has no cotangent, but {self.reversed_to} has"
        require(stop == self.reversed_to, late)
        self.live, self.reversed_to = None, start

    def save(self, step):
        require(self.live == step, f"carry {step} is not live, but {self.live} is")
        require(step not in self.stored, f"carry {step} is stored already")
        require(step < self.length, "the result needs no checkpoint")
        self.stored.add(step)
        self.unused.add(step)
        count = len(self.stored)
        self.peak = max(self.peak, count)
        require(count <= self.most, f"{count} carries in memory")


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
