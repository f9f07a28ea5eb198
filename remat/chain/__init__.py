"""Chains: many steps in a row, whose backward needs few of their carries.

    schedules     which carries to store, and which steps to run again: public
    _segments     equal segments, each reversed as a whole
    _multilevel   carries on disk, and the steps between them reversed from memory
    _online       chains whose length is known only at their end
    _rotor        the best plan for stages of different work and sizes, under a budget
    _plan         such a plan, its work and its peak
    _binomial     the fewest steps run again for a number of checkpoints
    _actions      what a schedule says, and what all schedules share

Called by users.
"""
