"""The only package that touches private torch API: an upgrade has one place to look.

Invariant: every name says which upstream change would delete it.
"""

from remat._compat._autograd import (
    MODAL_NODES as MODAL_NODES,
    AccumulateGrad as AccumulateGrad,
    base_dual_level_active as base_dual_level_active,
    detach_dual as detach_dual,
    dual_level_active as dual_level_active,
    forward_ad_enabled as forward_ad_enabled,
    grad_mode as grad_mode,
    is_graph_held as is_graph_held,
    is_held as is_held,
    is_shared as is_shared,
    on_backward as on_backward,
    pull_back as pull_back,
    pull_in_grad_mode as pull_in_grad_mode,
    saved_tensors as saved_tensors,
    set_grad_enabled as set_grad_enabled,
    snapshot as snapshot,
    without_hooks as without_hooks,
    without_tangent as without_tangent,
)
from remat._compat._levels import (
    JVP as JVP,
    VMAP as VMAP,
    apply_at_level as apply_at_level,
    base_tensor as base_tensor,
    batch as batch,
    batched as batched,
    call_below as call_below,
    call_below_vmap as call_below_vmap,
    current_layer as current_layer,
    grad_level as grad_level,
    is_batch_of_cotangents as is_batch_of_cotangents,
    is_of_level_above as is_of_level_above,
    kind_of as kind_of,
    leaf_at as leaf_at,
    lifted as lifted,
    plain_apply as plain_apply,
    requires_grad_at_any_level as requires_grad_at_any_level,
    unwrap_dead as unwrap_dead,
    unwrap_for_grad as unwrap_for_grad,
    with_autograd as with_autograd,
    wrap_for_grad as wrap_for_grad,
)
from remat._compat._process import (
    default_generators as default_generators,
    device_generators as device_generators,
    read_settings as read_settings,
    write_settings as write_settings,
)
from remat._compat._state import (
    TORCH_NODES as TORCH_NODES,
    eager_only as eager_only,
    function_mode_count as function_mode_count,
    function_modes as function_modes,
    is_autocast_active as is_autocast_active,
    is_device_mode as is_device_mode,
    is_parametrization_cached as is_parametrization_cached,
    is_unwatched as is_unwatched,
    must_inline as must_inline,
    native_random as native_random,
    register_torch_node as register_torch_node,
    swap_parametrization_cache as swap_parametrization_cache,
    under_function_modes as under_function_modes,
)
