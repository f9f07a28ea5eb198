"""The only room that uses private torch API: an upgrade of torch has one place to look.

    autograd        the engine, graphs and what they saved, hooks, dual numbers
    levels          the levels of torch.func
    batches         tensors below all levels, and at them again
    modes           function modes and dispatch modes
    tracing         Dynamo, torch.fx, TorchScript
    graphs          graphs that AOTAutograd and make_fx make; collectives
    nodes           nodes of Dynamo's graphs, and runs of their bodies
    operators       what `torch.ops` holds; keyed draws; classes of pytrees; operations
                    that compute something else where a mode is entered
    fakes           fake tensors, of operations that were done before
    tensors         tensors without data, fake tensors and copies; storages
    replicas        copies of replicas that send nothing
    shards          the same for shards; storages that change their size
    noted           what a run does to torch's state that torch tells nobody
    process         settings, global generators, autocast, torch's checkpoint
    versions        whether torch is one that is known

Called by all rooms.

Invariant: every name says which upstream change would delete it, and has a test in
`tests/torch`.
Rejected: private API where it is used. An upgrade would be read for in all files.
"""

# First, as it says which torch lacks what the others import.
from remat._torch import versions as versions  # isort: skip

from remat._torch.autograd import (
    NODES_ASKING_GRAD_MODE as NODES_ASKING_GRAD_MODE,
    AccumulateGrad as AccumulateGrad,
    are_hooks_allowed as are_hooks_allowed,
    base_dual_level_active as base_dual_level_active,
    current_node as current_node,
    current_task as current_task,
    dual_level_active as dual_level_active,
    execution_group as execution_group,
    grad_mode as grad_mode,
    held_by as held_by,
    hooks_here as hooks_here,
    is_for_transforms as is_for_transforms,
    is_forward_ad_enabled as is_forward_ad_enabled,
    is_graph_held as is_graph_held,
    is_held as is_held,
    keeps_graph as keeps_graph,
    leave_hooks_on as leave_hooks_on,
    marked as marked,
    nodes_made as nodes_made,
    once_differentiable_function as once_differentiable_function,
    pack_saved as pack_saved,
    pop_hooks as pop_hooks,
    pull_back as pull_back,
    pull_in_grad_mode as pull_in_grad_mode,
    push_hooks as push_hooks,
    reads_what_is_written_late as reads_what_is_written_late,
    resume_hooks as resume_hooks,
    saved_by as saved_by,
    saved_tensors as saved_tensors,
    sequence_number as sequence_number,
    set_grad_enabled as set_grad_enabled,
    suspend_hooks as suspend_hooks,
    top_hooks as top_hooks,
    unpack_hooks_of as unpack_hooks_of,
    when_done as when_done,
    without_hooks as without_hooks,
    writes_to_leaf as writes_to_leaf,
)
from remat._torch.batches import (
    Wrapping as Wrapping,
    lowered as lowered,
    raised as raised,
    unwrapped as unwrapped,
)
from remat._torch.graphs import (
    AddedNodes as AddedNodes,
    CollectivesInGraph as CollectivesInGraph,
    FunctionalValue as FunctionalValue,
    TracedMode as TracedMode,
    bottoms as bottoms,
    counted_levels as counted_levels,
    draw_again as draw_again,
    draw_and_keep_state as draw_and_keep_state,
    finished as finished,
    forget_saved_by_traced as forget_saved_by_traced,
    is_below_tracer as is_below_tracer,
    is_under_jvp as is_under_jvp,
    let_graphs_draw as let_graphs_draw,
    lower_to_alias as lower_to_alias,
    unlevelled as unlevelled,
    wait_for as wait_for,
)
from remat._torch.levels import (
    GRAD as GRAD,
    JVP as JVP,
    VMAP as VMAP,
    SingleLevelFunction as SingleLevelFunction,
    apply_at_level as apply_at_level,
    are_all_vmaps as are_all_vmaps,
    base_tensor as base_tensor,
    batch as batch,
    batch_size as batch_size,
    batched as batched,
    batched_again as batched_again,
    batched_here as batched_here,
    below_all_levels as below_all_levels,
    call_at_jvp as call_at_jvp,
    call_below as call_below,
    call_below_vmap as call_below_vmap,
    current_layer as current_layer,
    grad_level as grad_level,
    is_batch_of_cotangents as is_batch_of_cotangents,
    is_legacy_batch as is_legacy_batch,
    is_of_ended_vmap as is_of_ended_vmap,
    is_of_level_above as is_of_level_above,
    is_of_torch_func as is_of_torch_func,
    is_shared_by_examples as is_shared_by_examples,
    kind_of as kind_of,
    kinds_here as kinds_here,
    leaf_at as leaf_at,
    levels_requiring_grad as levels_requiring_grad,
    lifted as lifted,
    requires_grad_above as requires_grad_above,
    requires_grad_at_any_level as requires_grad_at_any_level,
    taken_apart_at_jvp as taken_apart_at_jvp,
    transforms as transforms,
    unbatched as unbatched,
    unpack_dual as unpack_dual,
    unwrap_dead as unwrap_dead,
    unwrap_for_grad as unwrap_for_grad,
    without_dead_levels as without_dead_levels,
    without_grad_mode as without_grad_mode,
    without_node as without_node,
    wrap_for_grad as wrap_for_grad,
)
from remat._torch.modes import (
    LeanDispatchMode as LeanDispatchMode,
    alias as alias,
    as_one_operation as as_one_operation,
    below_autograd as below_autograd,
    call_kernel as call_kernel,
    compiled_outside_modes as compiled_outside_modes,
    detached as detached,
    dispatch_mode_count as dispatch_mode_count,
    dispatch_modes as dispatch_modes,
    flat_view as flat_view,
    function_mode_count as function_mode_count,
    function_modes as function_modes,
    is_unwatched as is_unwatched,
    leave_dispatch_mode as leave_dispatch_mode,
    leave_function_mode as leave_function_mode,
    modes_between as modes_between,
    no_torch_functions as no_torch_functions,
    outside_all_dispatch_modes as outside_all_dispatch_modes,
    outside_dispatch_mode as outside_dispatch_mode,
    torch_functions as torch_functions,
    under_dispatch_modes as under_dispatch_modes,
    under_function_modes as under_function_modes,
    undisturbed as undisturbed,
    unseen as unseen,
    viewed as viewed,
    without_dispatch_mode as without_dispatch_mode,
)
from remat._torch.nodes import (
    OF_THIS_PROCESS as OF_THIS_PROCESS,
    UnknownLevelError as UnknownLevelError,
    as_node as as_node,
    faking as faking,
    inputs_of_body as inputs_of_body,
    is_body as is_body,
    let_dynamo_see_nodes as let_dynamo_see_nodes,
    modules_of_node as modules_of_node,
    run_body as run_body,
)
from remat._torch.noted import (
    Noted as Noted,
    Renorm as Renorm,
    Renorms as Renorms,
    later_renorms as later_renorms,
    renorms_taken_back as renorms_taken_back,
    seed as seed,
)
from remat._torch.operators import (
    CHOOSING as CHOOSING,
    TORCH_NODES as TORCH_NODES,
    HigherOrderOperator as HigherOrderOperator,
    OpOverload as OpOverload,
    OpOverloadPacket as OpOverloadPacket,
    is_composite as is_composite,
    is_operator as is_operator,
    is_view_op as is_view_op,
    kernel_of as kernel_of,
    native_random as native_random,
    overload_of as overload_of,
    register_torch_node as register_torch_node,
)
from remat._torch.process import (
    MODULE_HOOKS as MODULE_HOOKS,
    answer_calls as answer_calls,
    autocast_depth as autocast_depth,
    checkpoint_depth as checkpoint_depth,
    checkpoint_settings as checkpoint_settings,
    default_generators as default_generators,
    device_generators as device_generators,
    has_hooks_on_all_modules as has_hooks_on_all_modules,
    hook_all_modules as hook_all_modules,
    hooks_of_trackers as hooks_of_trackers,
    is_autocast_active as is_autocast_active,
    is_of_checkpoint as is_of_checkpoint,
    new_cast as new_cast,
    parametrization_cache as parametrization_cache,
    read_settings as read_settings,
    remove_hooks_since as remove_hooks_since,
    selective_policy as selective_policy,
    swap_parametrization_cache as swap_parametrization_cache,
    twister_memory as twister_memory,
    twister_state as twister_state,
    unhook_all_modules as unhook_all_modules,
    write_settings as write_settings,
)
from remat._torch.replicas import (
    copied_without_sending as copied_without_sending,
    holds_gradients as holds_gradients,
    in_buckets as in_buckets,
    replicas_in as replicas_in,
)
from remat._torch.shards import (
    copies_of_shards as copies_of_shards,
    is_flat as is_flat,
    is_sending as is_sending,
    is_wrapper as is_wrapper,
    sent_to_nobody as sent_to_nobody,
    shards_in as shards_in,
    telling_of_resized as telling_of_resized,
)
from remat._torch.tensors import (
    DEVICE_OF as DEVICE_OF,
    NO_VALUES as NO_VALUES,
    SHARED_COPY as SHARED_COPY,
    AddressAnswers as AddressAnswers,
    StorageRef as StorageRef,
    as_fake as as_fake,
    copied_as_fake as copied_as_fake,
    empty_in as empty_in,
    fake_device as fake_device,
    fake_mode as fake_mode,
    fake_mode_here as fake_mode_here,
    foreach_of_fakes as foreach_of_fakes,
    has_no_memory as has_no_memory,
    is_fake as is_fake,
    is_lazy as is_lazy,
    is_shared as is_shared,
    no_torch_function as no_torch_function,
    preserved_version as preserved_version,
    refuse_data_ptr as refuse_data_ptr,
    scales_put_back as scales_put_back,
    shared_copy as shared_copy,
    storage_id as storage_id,
    tensor_without_data as tensor_without_data,
    use_count as use_count,
    without_log_of_fakes as without_log_of_fakes,
)
from remat._torch.tracing import (
    are_sizes_equal as are_sizes_equal,
    constant_in_traces as constant_in_traces,
    eager_only as eager_only,
    has_proxies as has_proxies,
    is_compiled as is_compiled,
    is_in_compiled_code as is_in_compiled_code,
    is_symbolic as is_symbolic,
    is_traced_symbolically as is_traced_symbolically,
    makes_graph as makes_graph,
    must_inline as must_inline,
    not_scriptable as not_scriptable,
    show_to_traced_modes as show_to_traced_modes,
    size_hint as size_hint,
    telling_what_is_read as telling_what_is_read,
    uncompiled as uncompiled,
)
