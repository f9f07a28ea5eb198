"""Schedules: which carries of a chain to store, and which steps to run again.

A schedule is a value that says what a chain does with its steps and carries. It runs
nothing itself, and knows no tensor.

>>> schedule = Binomial(checkpoints=3)
>>> list(schedule.forward(2))[-1]
Advance(start=1, stop=2)
>>> schedule.evaluations(10)
Evaluations(forward=10, backward=18)

In all schedules, the number of checkpoints includes carry 0, the input of the chain.
"""

from remat.chain._actions import (
    Action as Action,
    Advance as Advance,
    Drop as Drop,
    Evaluations as Evaluations,
    Load as Load,
    Reverse as Reverse,
    Save as Save,
    Schedule as Schedule,
    Storage as Storage,
)
from remat.chain._binomial import (
    Binomial as Binomial,
    advances as advances,
    beta as beta,
    repetitions as repetitions,
)
from remat.chain._multilevel import Multilevel as Multilevel
from remat.chain._online import Online as Online, Placer as Placer
from remat.chain._segments import (
    EveryStep as EveryStep,
    Sqrt as Sqrt,
    Uniform as Uniform,
)
