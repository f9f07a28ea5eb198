"""Schedules: which carries of a chain to store, and which steps to run again.

A schedule is a value that says what a chain does with its steps and carries. It runs
nothing itself, and knows no tensor.

>>> schedule = Binomial(checkpoints=3)
>>> list(schedule.forward(2))[-1]
Advance(start=1, stop=2)
>>> schedule.evaluations(10)
Evaluations(forward=10, backward=18)

Which one to choose:

- `Sqrt`, `Uniform`: each step runs twice. Segments of several steps are reversed as a
  whole, so the residuals of all their steps exist at once.
- `EveryStep`: each step runs twice and is reversed alone, but all carries are stored.
- `Binomial`: the fewest steps for a number of checkpoints (Revolve).
- `Online`: for a chain whose length is known only at its end.

The number of checkpoints always includes carry 0, the input of the chain. `plot` draws
what a schedule holds over time.
"""

from remat.chain._actions import (
    Action as Action,
    Advance as Advance,
    Drop as Drop,
    Evaluations as Evaluations,
    Held as Held,
    Load as Load,
    Reverse as Reverse,
    Save as Save,
    Schedule as Schedule,
    held as held,
    plot as plot,
)
from remat.chain._schedules import (
    Binomial as Binomial,
    EveryStep as EveryStep,
    Online as Online,
    Sqrt as Sqrt,
    Uniform as Uniform,
)
