"""Policies: which intermediates of a rematerialized function to save.

A policy is asked about each operation that the function runs: `policy(op) -> Decision`.
A result that the policy saves is kept only if the backward reads it. Policies are plain
values: they compare, hash, pickle, print and combine.

>>> dots_saveable | save_only_these_names("attention")
(dots_saveable | save_only_these_names('attention'))

The names and their meanings are JAX's, with these differences:

- `save_anything_except_these_names` does what it says. In JAX it saves everything,
  because one operation makes a value and another operation names it. Here the name
  belongs to the result of the operation that made the value.
- `save_from_both_policies(p, q)` is `p | q`, and accepts policies that offload.
- A name that is not a string, a string in place of a policy, and an unknown destination
  are errors at once. JAX accepts such a policy, which then saves nothing.
- Convolutions and all attention kernels are dots, and so is any operator that is passed
  to `register_dot`.

Dots "with no batch dims" are products of two matrices or vectors, as in JAX. `x @ w`
with a matrix `w` is such a product for every number of dimensions of `x`, and so is its
einsum: torch runs both as the product of two matrices. Under `vmap` over both operands
the product has a batch dimension and is recomputed. Use `dots_saveable` or names there.
"""

# In: an operation, as data. Out: whether its result is saved, and where.
#
# Called by users, and by rooms that take or ask a policy: `_transform`, `_partial`,
# `_report`, `_scope`, `_graph`, `_fit`, `rules`, `chain`, `nn` and `compat`.

from remat._base.op import Op as Op, Value as Value
from remat._base.package import advise as _advise
from remat.policies._functions import Decision as Decision
from remat.policies._names import (
    save_and_offload_only_these_names as save_and_offload_only_these_names,
    save_any_names_but_these as save_any_names_but_these,
    save_anything_except_these_names as save_anything_except_these_names,
    save_names_matching as save_names_matching,
    save_only_these_names as save_only_these_names,
)
from remat.policies._operations import (
    checkpoint_dots as checkpoint_dots,
    checkpoint_dots_with_no_batch_dims as checkpoint_dots_with_no_batch_dims,
    decisions_saveable as decisions_saveable,
    dots_saveable as dots_saveable,
    dots_with_no_batch_dims_saveable as dots_with_no_batch_dims_saveable,
    offload_dot_with_no_batch_dims as offload_dot_with_no_batch_dims,
    register_cost as register_cost,
    register_dot as register_dot,
    save_collectives as save_collectives,
    save_from_both_policies as save_from_both_policies,
    save_larger_than as save_larger_than,
    save_ops as save_ops,
    save_smaller_than as save_smaller_than,
)
from remat.policies._places import every_other as every_other
from remat.policies._policy import (
    Policy as Policy,
    as_policy as as_policy,
    everything_saveable as everything_saveable,
    nothing_saveable as nothing_saveable,
)
from remat.policies._within import within as within


_advise(__name__)
