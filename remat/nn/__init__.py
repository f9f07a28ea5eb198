"""Rematerialized modules: which submodules of a model are recomputed.

In: a model. Out: the same model, whose blocks are recomputed in a backward.

    _apply      recompute chosen submodules in place, and undo it
    _applied    what recomputes which module: listed, shown, refused a second time; the
                switches that libraries have for it
    _select     which modules are meant, by objects or by the texts of a config; the
                repeated blocks of a model
    _enable     the gradient checkpointing of transformers and diffusers, done by remat
    _followed   modules whose calls follow a plan for a whole step, which the first
                call may make

Called by users, and by `_fit`, whose plans modules follow.
"""

from remat._base.package import advise as _advise
from remat.nn._applied import Applied as Applied, applied as applied
from remat.nn._apply import apply as apply, remove as remove
from remat.nn._enable import enable as enable
from remat.nn._select import blocks as blocks


_advise(__name__)
