"""Policies: which intermediates of a rematerialized function may be kept.

A policy is asked about each operation that the function runs, `policy(op) -> Decision`.
"Save" means *may be saved*: a result is kept only if the backward reads it. All are
plain values, so they compare, hash, pickle and print, and combine:

>>> dots_saveable | save_only_these_names("attention")
(dots_saveable | save_only_these_names('attention'))

The names are JAX's, and so is what they do, with these differences:

- `save_anything_except_these_names` does what it says. JAX's saves everything, since
  the operation that makes a value and the one that names it are two; here naming a
  value names the result of the operation that made it.
- `save_from_both_policies(p, q)` is `p | q`, and takes policies that offload.
- Names that are no strings, strings that are no policies, and places that do not exist
  are errors at once. In JAX such a policy is accepted, and keeps nothing.
- Convolution and every kernel of attention are dots, and so is any operator given to
  `register_dot`.

Dots "with no batch dims" are, as in JAX, those that sum once. `x @ w` with `w` a matrix
is one whatever the dimensions of `x`, and so is its einsum: torch runs them as the
product of two matrices. Under `vmap` over both operands a product of matrices becomes
one with a batch, and is recomputed: use `dots_saveable` or names there.
"""

from remat._base.op import Op as Op, Value as Value
from remat.policies._decision import Decision as Decision
from remat.policies._dots import (
    checkpoint_dots as checkpoint_dots,
    checkpoint_dots_with_no_batch_dims as checkpoint_dots_with_no_batch_dims,
    dots_saveable as dots_saveable,
    dots_with_no_batch_dims_saveable as dots_with_no_batch_dims_saveable,
    offload_dot_with_no_batch_dims as offload_dot_with_no_batch_dims,
    register_dot as register_dot,
)
from remat.policies._names import (
    save_and_offload_only_these_names as save_and_offload_only_these_names,
    save_any_names_but_these as save_any_names_but_these,
    save_anything_except_these_names as save_anything_except_these_names,
    save_names_matching as save_names_matching,
    save_only_these_names as save_only_these_names,
)
from remat.policies._policy import (
    Policy as Policy,
    as_policy as as_policy,
    everything_saveable as everything_saveable,
    nothing_saveable as nothing_saveable,
    save_from_both_policies as save_from_both_policies,
    save_ops as save_ops,
)
from remat.policies._sizes import (
    save_larger_than as save_larger_than,
    save_smaller_than as save_smaller_than,
)
