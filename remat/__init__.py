"""JAX's `jax.checkpoint` for PyTorch: recompute values instead of storing them."""

# First, as it says which Python the others cannot read.
from remat._base import interpreter as _interpreter  # noqa: F401  # isort: skip

import typing as _typing

from remat import random as random
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
from remat._base.package import advise as _advise, later as _later
from remat._base.pytree import register as register


# Imported where they are first used. A type checker reads the imports;
# tests/transform/test_import.py compares them with the table.
if _typing.TYPE_CHECKING:
    from remat import chain as chain, compat as compat, nn as nn, policies as policies
    from remat._fit.api import fit as fit
    from remat._fit.plan import (
        FitSegment as FitSegment,
        Followed as Followed,
        Plan as Plan,
    )
    from remat._partial.names import checkpoint_name as checkpoint_name
    from remat._report.compare import (
        ComparedPolicy as ComparedPolicy,
        Comparison as Comparison,
        compare as compare,
    )
    from remat._report.explain import explain as explain
    from remat._report.peak import (
        HeldValues as HeldValues,
        Holder as Holder,
        Peak as Peak,
    )
    from remat._report.reports import (
        ExplainedInput as ExplainedInput,
        ExplainedOp as ExplainedOp,
        Explanation as Explanation,
    )
    from remat._report.residuals import (
        SavedResidual as SavedResidual,
        print_saved_residuals as print_saved_residuals,
        saved_residuals as saved_residuals,
    )
    from remat._scope.api import scope as scope
    from remat._transform.api import checkpoint as checkpoint, remat as remat
    from remat.rules._custom_vjp import custom_vjp as custom_vjp
    from remat.rules._keep import keep as keep
else:
    __getattr__, __dir__ = _later(
        __name__,
        {
            "remat": ("chain", "compat", "nn", "policies"),
            "remat._fit.api": ("fit",),
            "remat._fit.plan": ("FitSegment", "Followed", "Plan"),
            "remat._partial.names": ("checkpoint_name",),
            "remat._report.compare": ("ComparedPolicy", "Comparison", "compare"),
            "remat._report.explain": ("explain",),
            "remat._report.peak": ("HeldValues", "Holder", "Peak"),
            "remat._report.reports": ("ExplainedInput", "ExplainedOp", "Explanation"),
            "remat._report.residuals": (
                *("SavedResidual", "print_saved_residuals", "saved_residuals"),
            ),
            "remat._scope.api": ("scope",),
            "remat._transform.api": ("checkpoint", "remat"),
            "remat.rules._custom_vjp": ("custom_vjp",),
            "remat.rules._keep": ("keep",),
        },
    )

__version__ = "0.1.0"

_advise(__name__)
