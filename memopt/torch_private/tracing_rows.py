"""Rows of the table for tracing, partitioning and compiling graphs: Dynamo, AOTAutograd, fake
tensors, Inductor; imports no torch."""

from __future__ import annotations

from memopt.torch_private import specimens
from memopt.torch_private.table import Row, rows

_EXPORT = "torch._dynamo.functional_export"
_VARIABLES = "torch._dynamo.variables"
_AOT = "torch._functorch._aot_autograd"
_FUNCTIONS = f"{_VARIABLES}.torch.TorchInGraphFunctionVariable"

DYNAMO = (
    *rows("capture a model as one graph", _EXPORT, "_dynamo_graph_capture_for_export"),
    *rows("trace as running, not as exporting", _EXPORT, "_compiling_state_context"),
    *rows("trace as running, not as exporting", f"{_VARIABLES}.torch", "tracing_state_functions"),
    *rows("trace as running, not as exporting", "torch.compiler", "_is_exporting_flag"),
    *rows(
        "run a custom function's code as it is run, and not compiled",
        "torch.compiler",
        "_is_compiling_flag",
    ),
    *rows(
        "take a custom function into the graph without tracing it",
        "torch._dynamo.trace_rules",
        "_allowed_callable_ids",
    ),
    *rows(
        "find the custom function that cannot be traced",
        f"{_VARIABLES}.misc.AutogradFunctionVariable",
        "call_apply",
    ),
    *rows(
        "find the sub-module that cannot be traced",
        f"{_VARIABLES}.nn_module",
        "record_nn_module_stack",
        instead="sub-modules around the one that cannot be traced are traced one by one",
    ),
    *rows(
        "find the operator that has no fake kernel",
        "torch._subclasses.fake_tensor",
        "UnsupportedOperatorException",
    ),
    *rows("hear what a trace read", _EXPORT, "fullgraph_capture"),
    *rows(
        "leave out guards that nobody reads",
        _EXPORT,
        "_suggest_or_raise_constraint_violation",
        instead="a trace compiles guards that nobody reads, which takes longer",
    ),
    *rows(
        "trace a frame of its own around a model",
        _EXPORT,
        "ModuleToTrace",
        "ExportTracerOutput",
        "pytree",
    ),
    *rows(
        "name the traced model in expressions",
        f"{_EXPORT}.ModuleToTrace",
        "_export_root",
        "in_spec",
        of=specimens.traced_frame,
    ),
    *rows(
        "trace no hooks on the frame around a model",
        "torch._dynamo.convert_frame",
        "get_traced_fn",
    ),
    *rows("evaluate what a trace read", "torch._dynamo.guards", "_get_closure_vars"),
    *rows(
        "hear what a forward changes",
        "torch._dynamo.side_effects.SideEffects",
        "codegen_update_mutated",
        "_get_modified_vars",
        "is_modified",
    ),
    *rows("hear what a forward changes", f"{_VARIABLES}.base.VariableTracker", "visit"),
    *rows(
        "hear what a forward changes",
        f"{_VARIABLES}.base",
        "AttributeMutationExisting",
        "ValueMutationExisting",
    ),
    *rows(
        "hear what a forward changes",
        _VARIABLES,
        "ConstDictVariable",
        "DeletedVariable",
        "lists.DequeVariable",
        "ListVariable",
        "NumpyNdarrayVariable",
        "SetVariable",
        "SymNodeVariable",
        "TensorVariable",
        "torch_function.TorchFunctionModeStackVariable",
    ),
    *rows(
        "hear what a forward changes in objects that are containers",
        f"{_VARIABLES}.UserDefinedObjectVariable",
        "_base_vt",
        versions=("2.13", "2.14"),
    ),
    *rows(
        "keep whole, and answer, what Dynamo would take apart or answer itself",
        _FUNCTIONS,
        "_get_handlers",
    ),
    *rows(
        "trace equal blocks once",
        f"{_VARIABLES}.invoke_subgraph",
        "InvokeSubgraphHigherOrderVariable._call_function",
        "InvokeSubgraphHigherOrderVariable.create_wrapped_node",
        "stamp_out_subgraph",
        "build_subgraph_input_mapping",
        "is_reusable",
        "build_fingerprint_with_pytree",
        "classify_vt",
        "InputFingerprint",
        versions=("2.13", "2.14"),
    ),
    *rows("trace equal blocks once", f"{_VARIABLES}.UserFunctionVariable", "call_function"),
    *rows(
        "trace equal blocks once",
        "torch._guards.ChainedSource",
        "clone",
        versions=("2.13", "2.14"),
    ),
    *rows("trace equal blocks once", _VARIABLES, "TupleVariable"),
    *rows(
        "trace equal blocks once",
        f"{_VARIABLES}.higher_order_ops",
        "TorchHigherOrderOperatorVariable",
        "are_same_graph_modules",
    ),
    *rows("answer whether a model is compiled", "torch._utils", "is_compiling"),
    *rows("answer whether a model is compiled", "torch._dynamo.external_utils", "is_compiling"),
    *rows("make constants in a trace", f"{_VARIABLES}.constant", "ConstantVariable"),
    *rows(
        "answer what a trace knows of tensors and their classes",
        f"{_VARIABLES}.builtin",
        "GetAttrBuiltinVariable._call_getattr",
        "SetAttrBuiltinVariable._call_setattr",
        versions=("2.13", "2.14"),
    ),
    *rows(
        "give operators lists of the user's own classes",
        f"{_VARIABLES}.user_defined",
        "UserDefinedListVariable.as_proxy",
        versions=("2.13", "2.14"),
    ),
    *rows(
        "answer what a trace knows of tensors and their classes",
        "torch._dynamo.symbolic_convert",
        "generic_getattr",
        versions=("2.14",),
    ),
    *rows(
        "trace a forward that looks at values",
        "torch._dynamo.symbolic_convert",
        "InstructionTranslatorBase",
        "InstructionTranslatorBase.dispatch_table",
    ),
    *rows(
        "leave out what a forward says",
        f"{_VARIABLES}.misc",
        "IgnoredFunctionVariable.call_function",
        "LoggingLoggerVariable.call_method",
    ),
    *rows(
        "leave out what a forward says",
        "torch._dynamo",
        "_dynamo_marked_constant",
        of=specimens.constant_function,
    ),
    *rows(
        "trace checkpoints as they are called",
        f"{_VARIABLES}.higher_order_ops.CheckpointHigherOrderVariable",
        "_call_function",
    ),
    *rows(
        "trace checkpoints as they are called",
        _VARIABLES,
        "NestedUserFunctionVariable",
        "UserDefinedObjectVariable",
        "UserFunctionVariable",
        "UserMethodVariable",
    ),
    *rows(
        "trace without copies of parameters",
        f"{_VARIABLES}.builder",
        "_clone_input",
        instead="while a model is captured its parameters are in memory once more",
    ),
    *rows(
        "trace without copies of parameters",
        f"{_VARIABLES}.tensor",
        "get_real_value",
        instead="while a model is captured its parameters are in memory once more",
    ),
    *rows("look at a trace from inside", "torch._dynamo.comptime", "comptime"),
    *rows("explain what cannot be captured", "torch._dynamo.exc", "TorchDynamoException"),
    *rows("explain what cannot be captured", "torch._numpy", "random"),
    *rows("keep what the caller has compiled", "torch._dynamo", "reset", "graph_break"),
    *rows(
        "trace as eager computes",
        "torch._dynamo.config",
        "allow_rnn",
        "enable_dynamo_decompositions",
        "ignore_logging_functions",
        "side_effect_replay_policy",
    ),
    *rows("trace as eager computes", "torch._dynamo.utils", "_get_dynamo_config_for_logging"),
    *rows(
        "hear what is not compiled", "torch._dynamo.convert_frame", "CatchErrorsWrapper.__call__"
    ),
    *rows("hear what is not compiled", "torch._dynamo.eval_frame", "innermost_backend"),
    *rows(
        "hear what is not compiled", "torch._dynamo.utils", "counters", "get_compilation_metrics"
    ),
    *rows(
        "explain shapes that depend on values",
        "torch.fx.experimental.symbolic_shapes",
        "PendingUnbackedSymbolNotFound",
        "GuardOnDataDependentSymNode",
    ),
)
AOT = (
    *rows(
        "make and compile a joint graph",
        "torch._functorch.aot_autograd",
        "aot_export_joint_with_descriptors",
        "aot_compile_joint_with_descriptors",
    ),
    *rows("know a joint graph's inputs and outputs", _AOT, "descriptors"),
    *rows(
        "compile without a log that nobody reads",
        f"{_AOT}.schemas.AOTConfig",
        "enable_log",
        instead="every joint graph is written down for a log, which takes longer",
    ),
    *rows(
        "call kernels directly in the first step, too",
        f"{_AOT}.runtime_wrappers",
        "_FirstInvocationContext",
        "_FirstInvocationContext.__init__",
        versions=("2.13", "2.14"),
    ),
    *rows(
        "call kernels directly in the first step, too",
        f"{_AOT}.runtime_wrappers._FirstInvocationContext",
        "_is_first",
        versions=("2.13", "2.14"),
        of=specimens.first_call,
    ),
    *rows("let retain_graph=True work", f"{_AOT}.schemas.AOTState", "fw_metadata"),
    *rows("let retain_graph=True work", f"{_AOT}.schemas.ViewAndMutationMeta", "bw_donated_idxs"),
    *rows("trace with a symbol for a length", "torch._dynamo", "maybe_mark_dynamic"),
    *rows(
        "run one capture at several lengths",
        f"{_AOT}.schemas",
        "MemoryFormatMeta",
        "PlainTensorMeta.memory_format",
        "ViewAndMutationMeta.subclass_tangent_meta",
    ),
    *rows(
        "hand lists of arguments to AOTAutograd's functions",
        f"{_AOT}.utils",
        "_boxed_call",
        of=specimens.boxed_function,
    ),
    *rows(
        "give gradients that have a backward",
        f"{_AOT}.runtime_wrappers.CompiledFunction",
        "_double_backward",
        of=specimens.compiled_function,
    ),
    *rows(
        "trace joint graphs as eager computes",
        "torch._functorch.config",
        "backward_pass_autocast",
        "donated_buffer",
    ),
    *rows("trace casts as eager makes them", "torch", "_mirror_autograd_meta_to"),
    *rows(
        "trace casts as eager makes them",
        "torch.fx.experimental.proxy_tensor",
        "disable_autocast_cache",
    ),
    *rows(
        "describe traced values once",
        "torch.fx.experimental.proxy_tensor",
        "_extract_tensor_metadata",
        instead="every traced value is described twice, which takes longer",
    ),
    *rows(
        "write no code of graphs that never run",
        "torch.fx._lazy_graph_module",
        "_use_lazy_graph_module",
        "_make_graph_module",
    ),
)
FAKES = (
    *rows("compute shapes alone", "torch._subclasses.fake_tensor", "FakeTensor", "FakeTensorMode"),
    *rows(
        "correct what fake kernels give",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "cache_clear",
        "dispatch",
    ),
    *rows("trace updates in place", "torch._subclasses.functional_tensor", "FunctionalTensor"),
    *rows(
        "trace updates in place",
        "torch._subclasses.functional_tensor.FunctionalTensor",
        "to_functional",
        "from_functional",
        "replace_",
        "commit_update",
        "sync",
    ),
)
INDUCTOR = (
    *rows("find a C++ compiler", "torch._inductor.cpp_builder", "get_cpp_compiler"),
    *rows("find Triton", "torch.utils._triton", "has_triton"),
    *rows("compile regions at once", "torch._inductor.async_compile.AsyncCompile", "wait"),
    *rows("compile regions", "torch._inductor.compile_fx", "compile_fx_inner"),
    *rows("compile regions", "torch._inductor.decomposition", "select_decomp_table"),
    *rows("compile regions", "torch._inductor.inductor_prims", "force_stride_order"),
    *rows("compile regions", "torch._inductor.config", "fx_graph_cache", "reorder_for_peak_memory"),
    *rows("compile regions", "torch._guards", "tracing", "TracingContext"),
    *rows("trace equal blocks once", "torch.fx.Graph", "_codegen", of=specimens.empty_graph),
    *rows("compile regions", "torch.fx.experimental.symbolic_shapes", "ShapeEnv"),
    *rows("compile regions", "torch.fx.experimental.proxy_tensor", "make_fx"),
    *rows(
        "keep what torch tries out of a DTensor's operators out of a trace",
        "torch.distributed.tensor._sharding_prop.ShardingPropagator",
        "_propagate_tensor_meta_non_cached",
        needs="distributed",
    ),
    *rows(
        "keep what torch tries out of a DTensor's operators out of a trace",
        "torch.fx.experimental.proxy_tensor",
        "disable_proxy_modes_tracing",
    ),
    *rows(
        "call compiled regions directly",
        "torch._inductor.output_code.CompiledFxGraph",
        "current_callable",
        instead="compiled regions are called through torch, which takes longer",
    ),
    *rows(
        "divide a joint graph inside of torch.compile",
        "torch._functorch",
        "config.activation_memory_budget",
        "config.enable_autograd_cache",
        "partitioners.min_cut_rematerialization_partition",
    ),
    *rows(
        "divide a joint graph inside of torch.compile",
        "torch._inductor.custom_graph_pass",
        "CustomPartitionerFn",
    ),
)
TRACING: tuple[Row, ...] = (*DYNAMO, *AOT, *FAKES, *INDUCTOR)
