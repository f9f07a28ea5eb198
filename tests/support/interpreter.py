"""An interpreter of schedules without tensors, which refuses every wrong action."""

import math
from collections import Counter

from remat.chain.schedules import (
    Advance,
    Drop,
    Evaluations,
    Load,
    Reverse,
    Save,
    Storage,
)


class WrongScheduleError(AssertionError):
    """An action that a chain cannot or must not do."""


def require(condition, message):
    if not condition:
        raise WrongScheduleError(message)


class Interpreter:
    """Runs the actions of a schedule on step numbers, and counts.

    Args:
        length: How many steps the chain has.
        limits: How many carries each storage may hold at once.
        width: How many steps may be reversed at once.
    """

    def __init__(self, length, *, memory=math.inf, disk=0, width=math.inf):
        self.length, self.width = length, width
        self.limits = {Storage.MEMORY: memory, Storage.DISK: disk}
        self.stored = {}
        self.live = None
        self.reversed_to = length
        self.evaluations = 0
        self.peak = Counter()
        self.done = Counter()
        self.written, self.read = [], []  # on disk

    def forward(self, actions):
        """Run a forward, and return how many steps it ran."""
        self.live, self.evaluations = 0, 0
        for action in actions:
            allowed = isinstance(action, Advance | Save | Drop)
            require(allowed, f"{action} in a forward")
            self.step(action)
        require(self.live == self.length, "the forward does not reach the result")
        return self.evaluations

    def backward(self, actions):
        """Run a backward, and return how many steps it ran."""
        self.live, self.evaluations = None, 0
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
                self.live = None
                require(stop - start <= self.width, f"{action} is too wide")
                require(stop == self.reversed_to, f"{action} is out of order")
                self.reversed_to = start
            case Save(step, storage):
                self.save(step, storage)
            case Load(step):
                require(step in self.stored, f"carry {step} is not stored")
                if self.stored[step] is Storage.DISK:
                    self.read.append(step)
                self.live = step
            case Drop(step):
                require(step in self.stored, f"carry {step} is not stored")
                del self.stored[step]

    def evaluate(self, start, stop):
        require(self.live == start, f"carry {start} is not live, but {self.live} is")
        require(start < stop <= self.length, f"no steps from {start} to {stop}")
        require(stop <= self.reversed_to, f"step {stop - 1} is reversed already")
        self.evaluations += stop - start

    def save(self, step, storage):
        require(self.live == step, f"carry {step} is not live, but {self.live} is")
        require(step not in self.stored, f"carry {step} is stored already")
        require(step < self.length, "the result needs no checkpoint")
        self.stored[step] = storage
        if storage is Storage.DISK:
            self.written.append(step)
        count = sum(kind is storage for kind in self.stored.values())
        self.peak[storage] = max(self.peak[storage], count)
        require(count <= self.limits[storage], f"{count} carries in {storage}")
