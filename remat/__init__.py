"""JAX's `jax.checkpoint` for PyTorch: recompute values instead of storing them."""

# First, as it says which Python the others cannot read.
from remat._base import interpreter as _interpreter  # noqa: F401  # isort: skip

from remat import (
    chain as chain,
    compat as compat,
    nn as nn,
    policies as policies,
    random as random,
)
from remat._base.context import is_recomputing as is_recomputing
from remat._base.errors import (
    BudgetError as BudgetError,
    CaptureError as CaptureError,
    KeyReuseError as KeyReuseError,
    MutationError as MutationError,
    OffloadError as OffloadError,
    RandomnessError as RandomnessError,
    RecomputeError as RecomputeError,
    RematError as RematError,
)
from remat._base.register import register as register
from remat._fit.api import fit as fit
from remat._fit.plan import (
    FitBlock as FitBlock,
    FitCandidate as FitCandidate,
    FitPlan as FitPlan,
)
from remat._fit.step_plan import (
    FitSegment as FitSegment,
    Followed as Followed,
    StepPlan as StepPlan,
)
from remat._partial.names import checkpoint_name as checkpoint_name
from remat._report.compare import compare as compare
from remat._report.explain import explain as explain
from remat._report.holders import (
    HeldValues as HeldValues,
    Holder as Holder,
    Peak as Peak,
)
from remat._report.reports import (
    ComparedPolicy as ComparedPolicy,
    Comparison as Comparison,
    ExplainedInput as ExplainedInput,
    ExplainedOp as ExplainedOp,
    Explanation as Explanation,
)
from remat._report.residuals import (
    Residual as Residual,
    print_saved_residuals as print_saved_residuals,
    saved_residuals as saved_residuals,
)
from remat._scope.api import scope as scope
from remat._transform.api import remat as remat


checkpoint = remat
__version__ = "0.2.0"
