"""Chains: loops and long sequences whose gradient needs few of their carries.

In: a step and a carry, or modules in a row. Out: the last carry, with one node that
saves some carries and runs the steps between them again.

    scan, fori_loop, while_loop, sequential   what users call
    schedules                                 which carries to store: public

    _loops      what a step is
    _call       calls a chain as a node, as the plain loop, or in a graph
    _chain      the node, and its backward, which runs a schedule
    _forward    its forward, which leaves checkpoints
    _segment    some of the steps, as a program
    _steps      what is between two steps, how one runs, and what is stored

    _budget     what a step takes, and which schedule stays under a budget

    _schedules, _actions    the schedules; what they say, and what is held

Called by users.
"""

from remat._base.package import advise as _advise
from remat.chain import schedules as schedules
from remat.chain._loops import (
    fori_loop as fori_loop,
    scan as scan,
    sequential as sequential,
    while_loop as while_loop,
)


_advise(__name__)
