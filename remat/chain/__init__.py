"""Chains: loops and long sequences whose gradient needs few of their carries.

    scan, fori_loop, while_loop, sequential   what users call
    schedules                                 which carries to store: public

    _loops, _sequential   what a step is: arguments are checked here
    _call                 calls a chain as a node, as the plain loop, or in a graph
    _chain                the node
    _forward              its forward, which leaves checkpoints
    _reversal             its backward, which runs a schedule
    _segment              some of the steps, as a program
    _sweep                runs steps with the graph of one at a time
    _columns              what is collected of all steps
    _stored               stored carries, in memory and on disk
    _steps                what is between two steps, as data

    _within     finds the schedule for a budget of bytes
    _alike      which chains need not be measured again
    _measure    what a step takes: runs some on fake tensors
    _budget     budgets, and which schedule of equal steps stays under one
    _staged     the same for the unequal stages of `sequential`

    _segments     schedule: equal segments, each reversed as a whole
    _multilevel   schedule: carries on disk, and the steps between them from memory
    _online       schedule: chains whose length is known only at their end
    _binomial     schedule: the fewest steps run again for a number of checkpoints
    _rotor        plans for chains of unequal stages, under a budget
    _held         what a chain holds while it follows a schedule, and its plot
    _actions      what a schedule says, and what all schedules share

Called by users.
"""

from remat._base import hints as _hints
from remat.chain import schedules as schedules
from remat.chain._loops import (
    fori_loop as fori_loop,
    scan as scan,
    while_loop as while_loop,
)
from remat.chain._sequential import sequential as sequential


_hints.at(__name__)
