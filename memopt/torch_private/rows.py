"""The table of torch's private names and patches that memopt uses; imports no torch."""

from __future__ import annotations

from memopt.torch_private import specimens
from memopt.torch_private.operator_names import OPERATORS
from memopt.torch_private.table import LATER, Row, rows
from memopt.torch_private.tracing_rows import TRACING

TENSORS = (
    *rows("notice updates in place", "torch.Tensor", "_version"),
    *rows("find the tensor that a view is of", "torch.Tensor", "_base"),
    *rows(
        "find the hooks on a gradient and put them aside",
        "torch.Tensor",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
    ),
    *rows("see whether autograd holds a tensor", "torch.Tensor", "_use_count"),
    *rows("tell storages apart", "torch.UntypedStorage", "_cdata"),
    *rows("see who holds a storage", "torch._C", "_storage_Use_Count"),
    *rows("copy what a forward assigns to .data", "torch._C._autograd", "_get_data_attr"),
    *rows(
        "lay tensors into memory that a plan manages",
        "torch._C",
        "_construct_storage_from_data_pointer",
    ),
    *rows("make views fast", "torch._C._dynamo.guards", "_reinterpret_tensor"),
    *rows("compare tensors' layouts fast", "torch._C._dynamo.guards", "TensorGuards"),
    *rows("make tensors that are stored conjugated or negated", "torch", "_conj", "_neg_view"),
    *rows("tell operators that Python runs", "torch.library", "_impls"),
    *rows(
        "tell classes of tensors that take part in every operation",
        "torch._C",
        "_disabled_torch_function_impl",
    ),
    *rows(
        "read and make shards",
        "torch.distributed.tensor.DTensor",
        "_local_tensor",
        "_spec",
        needs="distributed",
    ),
    *rows(
        "charge what a loop holds of a pipeline's outputs",
        "torch.distributed.pipelining.schedules._PipelineSchedule",
        "_merge_outputs",
        needs="distributed",
    ),
    *rows(
        "charge what FullyShardedDataParallel holds",
        "torch.distributed.fsdp._flat_param.FlatParameter",
        "_local_shard",
        needs="distributed",
    ),
)
MODULES = (
    *rows(
        "read what a module registers",
        "torch.nn.Module",
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
    ),
    *rows(
        "find a module's hooks",
        "torch.nn.Module",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks",
        "_forward_pre_hooks",
    ),
    *rows("plan a model's own calls", "torch.nn.Module", "_call_impl", "_compiled_call_impl"),
    *rows("load a planned module's state", "torch.nn.Module", "_load_from_state_dict"),
    *rows(
        "find the hooks on all modules",
        "torch.nn.modules.module",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    ),
    *rows("plan RNNs whose weights are computed", "torch.nn.RNNBase", "_init_flat_weights"),
    *rows("know batch norms", "torch.nn.modules.batchnorm", "_BatchNorm"),
    *rows(
        "put a cache of parametrized tensors aside",
        "torch.nn.utils.parametrize",
        "_cache",
        "_cache_enabled",
    ),
    *rows(
        "find the DistributedDataParallel around a model",
        "torch.nn.parallel.DistributedDataParallel",
        "_get_active_ddp_module",
        needs="distributed",
    ),
    *rows(
        "find an optimizer's hooks",
        "torch.optim.Optimizer",
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
    ),
    *rows(
        "find the hooks on all optimizers",
        "torch.optim.optimizer",
        "_global_optimizer_pre_hooks",
        "_global_optimizer_post_hooks",
    ),
    *rows(
        "tell learning-rate schedulers of a step",
        "torch.optim.Optimizer",
        "_opt_called",
        of=specimens.optimizer_after_a_step,
        instead="a scheduler may warn that it is called before its optimizer",
    ),
    *rows(
        "take back the step of a gradient scaler that failed",
        "torch.amp.GradScaler",
        "_per_optimizer_states",
        of=specimens.gradient_scaler,
    ),
    *rows(
        "clip gradients in groups as eager does",
        "torch.utils._foreach_utils",
        "_group_tensors_by_device_and_dtype",
    ),
    *rows(
        "take nested values apart",
        "torch.utils._pytree",
        "TreeSpec",
        "register_pytree_node",
        "tree_flatten",
        "tree_leaves",
        "tree_map",
        "tree_map_only",
        "tree_structure",
        "tree_unflatten",
    ),
)
AUTOGRAD = (
    *rows(
        "know whether, and in which, backward a thread is",
        "torch._C",
        "_current_graph_task_id",
        "_current_autograd_node",
    ),
    *rows(
        "know which gradients a backward is for",
        "torch._C",
        "_will_engine_execute_node",
    ),
    *rows(
        "know whether a thread is inside of torch.func's transforms",
        "torch._C._functorch",
        "maybe_current_level",
        "pop_dynamic_layer_stack_and_undo_to_depth",
    ),
    *rows(
        "allow hooks on saved tensors after a trace that fails",
        "torch._C._autograd",
        "_saved_tensors_hooks_enable",
        "_saved_tensors_hooks_get_disabled_error_message",
    ),
    *rows(
        "know whether a gradient is a batch of them",
        "torch._C._functorch",
        "is_legacy_batchedtensor",
    ),
    *rows("know whether torch.jit.trace traces a thread", "torch._C", "_is_tracing"),
    *rows("know whether forward-mode AD is on", "torch.autograd.forward_ad", "_current_level"),
    *rows("name autograd's nodes in their order", "torch.autograd.graph.Node", "_sequence_nr"),
    *rows(
        "order the hooks on gradients",
        "torch.autograd.graph.Node",
        "_set_sequence_nr",
        of=specimens.accumulating_node,
        instead="hooks on gradients are called in another order than without a plan",
    ),
    *rows(
        "keep what a backward with retain_graph=True keeps",
        "torch._C._autograd",
        "_get_current_graph_task_keep_graph",
    ),
    *rows("be called when a backward is over", "torch.autograd.Variable", "_execution_engine"),
    *rows("tell ranks of a backward that fails", "torch.autograd", "_engine_run_backward"),
    *rows(
        "know whose node of autograd's it is",
        "torch.autograd.function.BackwardCFunction",
        "_forward_cls",
        of=specimens.functions_node,
    ),
    *rows(
        "drop the gradients of outputs while a backward runs",
        "torch.autograd.Function",
        "boxed_grads_call",
        versions=LATER,
        instead="the gradients of outputs stay until the backward ends, and are charged so",
    ),
    *rows(
        "put hooks on saved tensors aside",
        "torch._C._autograd",
        "_top_saved_tensors_default_hooks",
        "_pop_saved_tensors_default_hooks",
        "_push_saved_tensors_default_hooks",
    ),
    *rows("see whether torch's profiler runs", "torch.autograd", "_profiler_enabled"),
    *rows(
        "see whether the caller has a profile",
        "torch.autograd.profiler",
        "KinetoStepTracker._step_dict",
    ),
    *rows(
        "end its own profile before another begins", "torch.autograd.profiler", "_prepare_profiler"
    ),
    *rows("read allocations in a profile", "torch._C._profiler", "_EventType"),
    *rows("keep ranges out of its own profile", "torch.autograd.profiler", "_enable_profiler"),
    *rows("keep ranges out of its own profile", "torch._C._profiler", "RecordScope"),
)
MODES = (
    *rows(
        "see and put aside the modes around a call",
        "torch.utils._python_dispatch",
        "TorchDispatchMode",
        "_get_current_dispatch_mode_stack",
        "_disable_current_modes",
    ),
    *rows(
        "know tensors that consist of others",
        "torch.utils._python_dispatch",
        "is_traceable_wrapper_subclass",
    ),
    *rows(
        "see and put aside the function modes around a call",
        "torch.overrides",
        "_get_current_function_mode_stack",
        "_pop_mode",
        "_push_mode",
    ),
    *rows(
        "see fast whether there are modes",
        "torch._C",
        "_len_torch_function_stack",
        "_len_torch_dispatch_stack",
    ),
    *rows("know the default device", "torch.utils._device", "CURRENT_DEVICE", "DeviceContext"),
    *rows(
        "give kernels that are called from a kernel autograd",
        "torch._C",
        "_dispatch_tls_local_exclude_set",
        "_dispatch_tls_local_include_set",
        "_ForceDispatchKeyGuard",
    ),
    *rows("run kernels without autograd's part", "torch._C", "_AutoDispatchBelowAutograd"),
    *rows("estimate autocast of a device that is not here", "torch.autocast", "__init__"),
    *rows(
        "estimate fused attention of a device that is not here",
        "torch.nn.functional",
        "scaled_dot_product_attention",
    ),
)
DEVICES = (
    *rows(
        "let cuBLAS give its workspaces back",
        "torch._C",
        "_cuda_clearCublasWorkspaces",
        needs="cuda",
    ),
    *rows("know which kernels a device has", "torch._C", "_dispatch_has_kernel_for_dispatch_key"),
    *rows(
        "find ranks and their groups",
        "torch.distributed.distributed_c10d",
        "_get_default_store",
        "_resolve_process_group",
        needs="distributed",
    ),
    *rows(
        "trace differentiable collectives",
        "torch.distributed._functional_collectives",
        "REDUCE_OP_TO_STR",
        needs="distributed",
    ),
    *rows(
        "wait for ranks as long as their group does",
        "torch.distributed.ProcessGroup",
        "_get_backend",
        "_device_types",
        needs="distributed",
        instead="ranks wait as long for each other as torch's default is",
    ),
    *rows(
        "wait for ranks as long as their group does",
        "torch._C._distributed_c10d.Backend.Options",
        "_timeout",
        needs="distributed",
        instead="ranks wait as long for each other as torch's default is",
    ),
    *rows(
        "plan for ranks that are not there",
        "torch.testing._internal.distributed.fake_pg",
        "FakeStore",
        needs="distributed",
    ),
)

ABSENCES = (
    *rows(
        "hear what a trace does not find",
        "torch._dynamo",
        "exc.ObservedAttributeError",
        "exc.handle_observed_exception",
        "exc.unimplemented",
        "symbolic_convert.is_stdlib",
        "symbolic_convert.InstructionTranslatorBase.load_builtin_from_argval",
        "symbolic_convert.InstructionTranslatorBase._load_attr",
        "variables.PythonModuleVariable.call_obj_hasattr",
        "variables.ConstDictVariable.getitem_const_raise_exception_if_absent",
    ),
    *rows(
        "hear what a trace does not find",
        "torch._dynamo.variables",
        "BuiltinVariable.call_function",
        "UserDefinedObjectVariable.has_key_in_generic_dict",
        versions=("2.11",),
    ),
    *rows(
        "hear what a trace does not find",
        "torch._dynamo.variables",
        "builtin.GetAttrBuiltinVariable.call_function",
        "dicts.DunderDictVariable.install_dict_contains_guard",
        "dicts.DunderDictVariable.install_dict_keys_match_guard",
        versions=LATER,
    ),
)

NUMPY = (
    *rows(
        "know the numbers that a forward computes in NumPy",
        "torch._dynamo",
        "variables.NumpyVariable.call_function",
        "variables.builder.VariableBuilder._wrap",
        "guards.GuardBuilder.EQUALS_MATCH",
        "variables.lists.BaseListVariable",
        "utils.numpy_to_tensor_wrapper",
        "utils.numpy_attr_wrapper",
        "utils.numpy_method_wrapper",
        "utils.numpy_operator_wrapper",
    ),
    *rows(
        "read the numbers that a forward counts in",
        "torch._dynamo",
        "variables.LazyConstantVariable.create",
        versions=LATER,
    ),
)

INNER_GRADIENTS = (
    *rows("trace derivatives in a forward", "torch._dynamo.config", "trace_autograd_ops"),
    *rows(
        "trace derivatives in a forward",
        "torch._dynamo.output_graph.OutputGraph",
        "_check_requires_grad_intermediate_outputs",
        versions=LATER,
    ),
)

ROWS: tuple[Row, ...] = (
    *TENSORS,
    *MODULES,
    *AUTOGRAD,
    *MODES,
    *DEVICES,
    *ABSENCES,
    *NUMPY,
    *INNER_GRADIENTS,
    *TRACING,
    *OPERATORS,
)
TABLE = {row.name: row for row in ROWS}
