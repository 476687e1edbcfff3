"""Lists the private names of torch that modtrace uses, and what is lost without each; `modtrace doctor` checks."""

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import CodeType
from typing import Any

_STAGES = "the stages and micro-batches of pipelines"
_MEMORY = "the memory that a checkpoint keeps"
_REGIONS = "telling two checkpointed regions apart"
_GRAPHS = "the ops and kernels inside of compiled code"
_CACHES = "a second process would compile again what has values measured inside of it"
_EDGES = "module calls at a compiled block's edge"
_KEPT = "hooks and values inside of compiled code"
_SELECTIVE = "compiled code with values measured inside raises in selective checkpoints"
_BODIES = "compiling torch.cond and the like with values measured inside"
_TRACED = "what torch.compile traces would be shown as if it ran"
_COMPILATIONS = "which functions torch.compile compiled, how often and why"
_OPS = "recording ops: nothing of modtrace can be imported"
_LEAVING = "taking a mode off that is not the innermost"
_COPIES = "copies of a model without what is on it"
_STOPS = "stopping a run before the compiled step of an optimizer"
_OF_CXX = "collectives that C++ code starts: DDP's buckets, DTensors"
_UNSEEN = "reading a scalar unseen by torch.jit.trace"
_MODE = "torch.utils._python_dispatch.TorchDispatchMode"
_ALL = "names of modules: nothing can be recorded"
_LOADERS = "how long the program waits for a data loader"
_LEFT = "telling whether a recording has left a hook on a model (modtrace verify)"
_SAVED_MEMORY = "the memory that ops save for backward"
_NUMBERS = "the values of such tensors"
_GRAPH_CAPTURES = "captures of CUDA graphs end when rows are read from the GPU"
_DEBUG_SERVER = "the page of torch's debug server"
_CONJUGATES = "statistics of conjugate tensors in torch.func transforms"

#: What is lost without each name: of a module, class or function of torch, an attribute, or a name in the code of a
#: function. Checked on torch 2.11.0, 2.13.0 and 2.14.1 (CPU), which have all of them but for `_RENAMED`; those of
#: compiler_caches.py only on 2.11.0 and 2.13.0.
PRIVATE_NAMES: Mapping[str, str] = {
    # autograd.py
    "torch.autograd._get_sequence_nr": "attribution of backward: nothing can be recorded",
    "torch._C._functions.AccumulateGrad._sequence_nr": "attribution of backward: nothing can be recorded",
    "torch._C._current_autograd_node": "attribution of backward ops",
    "torch._C._current_graph_task_id": "telling recompute from forward: nothing can be recorded",
    "torch._C._will_engine_execute_node": "backward times where backward(inputs=...) prunes the graph",
    "torch.autograd.graph._engine_run_backward": "backward times, and steps that have no optimizer",
    "torch.autograd._engine_run_backward": "the same",
    "torch.autograd.Variable._execution_engine": "the last post_bw hooks come after the backward",
    "torch.autograd.function.BackwardCFunction": "telling custom Functions from checkpoints",
    # call_frames.py
    "torch.nn.Module._call_impl": "finding the code that calls a module: nothing can be recorded",
    "torch.nn.Module._call_impl.self": "places of calls in threads that a model starts itself",
    "torch.nn.Module._call_impl.args": "the batch that a step gets",
    "torch.nn.Module._call_impl.kwargs": "captured inputs that are given by keyword",
    "torch.optim.Optimizer.profile_hook_step.wrapper": "the end of an optimizer's step that raises",
    "torch.distributed.pipelining.stage._PipelineStageBase.forward_one_chunk.fwd_chunk_id": _STAGES,
    "torch.distributed.pipelining.PipelineStage._forward_metadata_inference": "shape inference would be a step",
    "torch.distributed.pipelining.PipelineStage._shape_inference": "the same",
    # debug_server.py
    "torch._C._distributed_c10d._register_handler": _DEBUG_SERVER,
    "torch.distributed.debug._debug_handlers.default_handlers": _DEBUG_SERVER,
    "torch.distributed.debug._frontend.fetch_all": _DEBUG_SERVER,
    "torch.distributed.debug._frontend.Route": _DEBUG_SERVER,
    "torch.distributed.debug._frontend.NavLink": _DEBUG_SERVER,
    # checkpoint.py
    "torch.utils.checkpoint._checkpoint_hook": _REGIONS,
    "torch.utils.checkpoint._checkpoint_hook.__init__.unpack_hook": _REGIONS,
    "torch.utils.checkpoint._checkpoint_hook.__init__.frame": _REGIONS,
    "torch.utils.checkpoint._StopRecomputationError": "an early stop would be shown as raised",
    "torch.utils.checkpoint.CheckpointFunction._backward_cls": "telling a reentrant checkpoint",
    "torch.utils.checkpoint.CheckpointFunction.forward.inputs": _MEMORY,
    "torch.utils.checkpoint.CheckpointFunction.forward.run_function": _MEMORY,
    "torch.utils.checkpoint._CheckpointFrame.__init__.recompute_fn": _MEMORY,
    "torch.utils.checkpoint._CheckpointFrame.__init__.saved_args": _MEMORY,
    "torch.utils.checkpoint._CheckpointFrame.__init__.input_saver": _MEMORY,
    "torch.utils.checkpoint._CheckpointFrame.__init__.recomputed": _MEMORY,
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator.fn": _MEMORY,
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator.kwargs": _MEMORY,
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator.recompute_context": _MEMORY,
    "torch.utils.checkpoint._CachedTorchDispatchMode": "the memory of a selective checkpoint",
    "torch.utils.checkpoint._CachedTorchDispatchMode.__init__.storage": "the memory of a selective checkpoint",
    "torch.utils.checkpoint._VersionWrapper.__init__.val": "the memory of a selective checkpoint",
    "torch.utils.checkpoint._CachingTorchDispatchMode": _SELECTIVE,
    "torch._higher_order_ops.effects.with_effects.py_impl": _SELECTIVE,
    "torch._higher_order_ops.effects.with_effects.python_key_table": _SELECTIVE,
    # collectives.py
    "torch.distributed.distributed_c10d._world.pg_map": _OF_CXX,
    "torch.distributed.distributed_c10d.ProcessGroup._get_sequence_number_for_group": "collectives",
    "torch.distributed.distributed_c10d.ProcessGroup._get_backend_name": "ends of collectives, and numbers on gloo",
    "torch.distributed.distributed_c10d.ProcessGroup._allgather_base": "all-gathers of an older torch",
    "torch.distributed.distributed_c10d.ProcessGroup._reduce_scatter_base": "the same",
    "torch._C._distributed_c10d._dump_fr_trace_json": _OF_CXX,
    "torch._C._distributed_c10d._dump_nccl_trace_json": _OF_CXX,
    "torch.nn.parallel.DistributedDataParallel.__init__._module_parameters": "the layers of DDP's buckets",
    "torch.Tensor._indices": "the bytes of sparse tensors in collectives",
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": "the layers of DDP's buckets",
    # compiled_graphs.py
    "torch._dynamo.backends.common.aot_module_simplified": _GRAPHS,
    "torch._guards.CompileContext.current_compile_id": _GRAPHS,
    "torch._functorch._aot_autograd.utils.make_boxed_func._boxed_call": "what goes into compiled code and comes out",
    "torch._inductor.compile_fx.compile_fx": "the kernels inside of compiled code",
    "torch._inductor.codegen.cpp.CppScheduling.define_kernel": "the kernels inside of compiled code",
    "torch._inductor.config.patch": "the kernels of what inductor has in its cache",
    # compiler_caches.py
    "torch._inductor.config.unsafe_marked_cacheable_functions": _CACHES,
    "torch._functorch._aot_autograd.schemas.SerializableAOTDispatchCompiler.__init__.compiler_fn": _CACHES,
    "torch._higher_order_ops.effects.with_effects": _CACHES,
    # dynamo.py
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": _EDGES,
    "torch._C._dynamo.eval_frame._FrameAction": _EDGES,
    "torch._C._dynamo.eval_frame._FrameExecStrategy": _EDGES,
    "torch._library.effects.EffectType.ORDERED": _KEPT,
    "torch.library._register_effectful_op": _KEPT,
    "torch.fx.experimental.proxy_tensor.get_proxy_mode": _KEPT,
    "torch._dynamo.comptime.comptime": _BODIES,
    "torch._dynamo.comptime.ComptimeContext._i_will_not_complain_if_bc_breaks_InstructionTranslator": _BODIES,
    "torch._dynamo.variables.ConstantVariable.create": _BODIES,
    "torch._dynamo.output_graph.SubgraphTracer.__init__.source_target": _BODIES,
    "torch._dynamo.variables.invoke_subgraph.save_reuse_entry": "right results of nested compile regions",
    "torch._guards.CompileContext": _TRACED,
    # data_loaders.py
    "torch.utils.data.dataloader._BaseDataLoaderIter": _LOADERS,
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__": _LOADERS,
    "torch.utils.data.dataloader._BaseDataLoaderIter.__init__._dataset": "the dataset for which a program waits",
    "torch.utils.data.dataloader._BaseDataLoaderIter.__init__._num_workers": "whether a data loader has workers",
    # device_memory.py
    "torch._C._get_privateuse1_backend_name": "the memory of steps on devices that torch does not know",
    # module_copies.py
    "torch.nn.Module._forward_pre_hooks_with_kwargs": _COPIES,
    "torch.nn.Module._forward_hooks_with_kwargs": _COPIES,
    "torch.nn.Module._forward_hooks_always_called": _COPIES,
    "torch.jit._recursive.create_script_module": "scripting a model while hooks are on it",
    # unseen_steps.py
    "torch._dynamo.eval_frame.set_eval_frame": _STOPS,
    "torch._dynamo.eval_frame._TorchDynamoContext.__call__.cleanups": _STOPS,
    "torch._dynamo.eval_frame._TorchDynamoContext.__call__.fn": _STOPS,
    "torch._dynamo.eval_frame._TorchDynamoContext.__call__.args": _STOPS,
    "torch._dynamo.eval_frame._TorchDynamoContext.__call__.kwargs": _STOPS,
    "torch.optim.lr_scheduler.LRScheduler.__init__.opt_ref": _STOPS,
    "torch.amp.GradScaler._maybe_opt_step": "telling steps that a GradScaler skips from those that no optimizer makes",
    "torch._C._get_dispatch_mode": "telling what higher-order ops trace from calls",
    "torch._C._TorchDispatchModeKey": "telling what higher-order ops trace from calls",
    "torch.nn.Module._compiled_call_impl": "telling that a module was compiled in place",
    "torch._dynamo.eval_frame.OptimizedModule": "telling what torch.compile returned from a model",
    "torch._dynamo.eval_frame.OptimizedModule.__init__._orig_mod": "paths without torch.compile's wrapper",
    "torch._dynamo": "telling modules of the compiler from those of the model",
    "torch._functorch": "the same",
    "torch._inductor": "the same",
    "torch._inductor.config.emulate_precision_casts": "warning that values inside of compiled code change its rounding",
    "torch._higher_order_ops": "the same",
    "torch._dynamo.utils.get_compilation_metrics": _COMPILATIONS,
    "torch._dynamo.utils.CompilationMetrics.compile_id": _COMPILATIONS,
    "torch._dynamo.utils.CompilationMetrics.recompile_reason": "why torch.compile compiled again",
    "torch._dynamo.utils.guard_failures": "why torch.compile compiled again, where several instances share code",
    "torch._dynamo.utils.CompilationMetrics.inductor_fx_local_cache_hit_count": "backwards that come out of caches",
    "torch._dynamo.utils.CompilationMetrics.fail_reason": "why torch.compile did not compile",
    "torch._dynamo.utils.graph_break_reasons": "where graphs of torch.compile break, and why",
    "torch._dynamo.callback.callback_handler.end_callbacks": "the module that a compilation belongs to",
    # graph_captures.py
    "torch.cuda.CUDAGraph.capture_begin": _GRAPH_CAPTURES,
    "torch.cuda.CUDAGraph.capture_end": _GRAPH_CAPTURES,
    "torch.cuda.is_current_stream_capturing": "what is measured while a CUDA graph is captured would be wrong",
    # modes.py
    "torch.utils._python_dispatch.TorchDispatchMode": _OPS,
    "torch.compiler._is_exporting_flag": _KEPT,
    f"{_MODE}.supports_higher_order_operators": "recording models with higher-order ops",
    f"{_MODE}.ignore_compile_internals": "what is compiled would run uncompiled while ops are recorded",
    f"{_MODE}._should_skip_dynamo": "1.3 us an op, and a second to import torch's compiler",
    "torch.utils._python_dispatch._disable_current_modes": "reading a scalar unseen by user modes",
    "torch._C.DisableTorchFunction": "reading tensors unseen by function modes: nothing works",
    "torch._C._get_tracing_state": "captures while torch.jit.trace runs: nothing works",
    "torch._C._set_tracing_state": _UNSEEN,
    "torch._C._len_torch_function_stack": "reading tensors unseen by function modes: nothing works",
    "torch._C._get_function_stack_at": _LEAVING,
    "torch._C._pop_torch_function_stack": _LEAVING,
    "torch._C._push_on_torch_function_stack": _LEAVING,
    "torch._C._len_torch_dispatch_stack": "recording ops: nothing of modtrace can be imported",
    "torch._C._get_dispatch_stack_at": _LEAVING,
    "torch._C._pop_torch_dispatch_stack": _LEAVING,
    "torch._C._push_on_torch_dispatch_stack": _LEAVING,
    "torch.utils._python_dispatch._is_in_torch_dispatch_mode": _LEAVING,
    "torch.utils._python_dispatch._is_in_non_infra_torch_dispatch_mode": _LEAVING,
    "torch.utils._python_dispatch._is_in_any_mode_without_ignore_compile_internals": _LEAVING,
    "torch.utils._python_dispatch.set_is_in_mode_without_ignore_compile_internals": _LEAVING,
    f"{_MODE}.__init__.old_dispatch_mode_flags": _LEAVING,
    f"{_MODE}.__init__.old_non_infra_dispatch_mode_flags": _LEAVING,
    f"{_MODE}.__init__.old_without_ignore_compile_internals_dispatch_mode_flags": _LEAVING,
    "torch.utils._pytree.tree_leaves": "the memory of a selective checkpoint",
    # modules.py
    "torch.nn.Module._modules": _ALL,
    "torch.nn.Module._parameters": _ALL,
    "torch.nn.Module._buffers": _ALL,
    "torch.nn.modules.module._global_forward_hooks_with_kwargs": "one number in a list of torch's after a recording",
    "torch.nn.modules.module._has_any_global_hook": "no warning of torch.compile about our own hooks",
    "torch.nn.Module._replicate_for_data_parallel._is_replica": "paths in replicas of DataParallel",
    "torch.nn.Module._forward_hooks": "paths in replicas of DataParallel",
    "torch.nn.Module._forward_pre_hooks": _LEFT,
    "torch.nn.Module._backward_hooks": _LEFT,
    "torch.nn.Module._backward_pre_hooks": _LEFT,
    "torch.nn.Module._state_dict_hooks": _LEFT,
    # ops.py
    "torch._ops.OpOverload": "recording ops: nothing of modtrace can be imported",
    "torch._ops.OpOverload.__init__._op": "0.3 us an op",
    "torch._ops.OpOverload.__init__._schema": "which arguments an op writes to",
    # saved.py
    "torch._C._autograd._top_saved_tensors_default_hooks": "ops that pack what autograd saves",
    "torch._C._autograd.SavedTensor": _SAVED_MEMORY,
    "torch._C._autograd.SavedTensor.data": _SAVED_MEMORY,
    "torch._C._autograd.SavedTensor.unpack_hook": _SAVED_MEMORY,
    "torch._C._functions": _SAVED_MEMORY,
    "torch._C._functions.MulBackward0._raw_saved_self": _SAVED_MEMORY,
    "torch.autograd.function.BackwardCFunction._raw_saved_tensors": _SAVED_MEMORY,
    # device_events.py
    "torch._C._cuda_getCurrentRawStream": "3 us for each tensor that is measured on a GPU",
    # subclasses.py
    "torch._subclasses.fake_tensor.FakeTensor": "telling fake tensors, which hold no numbers",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "telling tensors not there yet",
    "torch.distributed.tensor.DTensor._local_tensor": _NUMBERS,
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "where the part of a DTensor lies",
    "torch.masked.maskedtensor.core.MaskedTensor._set_data_mask._masked_data": _NUMBERS,
    "torch.masked.maskedtensor.core.MaskedTensor._set_data_mask._masked_mask": _NUMBERS,
    "torch.nested._internal.nested_tensor.NestedTensor._values": _NUMBERS,
    "torch.nested._internal.nested_tensor.NestedTensor._lengths": _NUMBERS,
    "torch.Tensor._values": _NUMBERS,
    "torch.Tensor._is_zerotensor": "zeros that have no memory",
    "torch._mkldnn": "telling tensors of the mkldnn layout",
    # tensors.py
    "torch.Tensor._base": "gradients of views: nothing of modtrace can be imported",
    "torch._C._dispatch_keys": "telling plain tensors by one number: each takes a slower way",
    "torch.Tensor._backward_hooks": "hooks on tensors that a model returns",
    "torch._C._FunctionBase._register_hook_dict": "hooking the gradient of a tensor in 1 us: it takes 3",
    "torch.Tensor._post_accumulate_grad_hooks": "telling whether a recording has left such a hook",
    "torch.Tensor._cdata": "gradients of a parameter after torch.utils.swap_tensors",
    "torch.UntypedStorage._cdata": "the memory that ops save for backward",
    "torch._neg_view": "replaying ops with negated views",
    "torch.Tensor._version": "telling what was written to a tensor since it was seen",
    "torch._C._autograd._unsafe_set_version_counter": "a backward through a tensor that modtrace verify has put back",
    # transforms.py
    "torch._C._functorch.is_functorch_wrapped_tensor": "telling torch.func transforms apart",
    "torch._C._functorch.get_unwrapped": "values inside torch.func transforms",
    "torch._C._functorch.is_batchedtensor": "values inside vmap",
    "torch._C._functorch.peek_interpreter_stack": _CONJUGATES,
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": _CONJUGATES,
    "torch._is_functional_tensor": "telling tensors of torch.func.functionalize",
    "torch._from_functional_tensor": "telling tensors of torch.func.functionalize",
}


#: The names that torch 2.11 has, and those that 2.13 has in their place.
_RENAMED = {
    "torch.distributed.pipelining.PipelineStage._shape_inference": (
        "torch.distributed.pipelining.PipelineStage._forward_metadata_inference"
    ),
    "torch.utils.checkpoint._CheckpointFrame.__init__.input_saver": (
        "torch.utils.checkpoint._CheckpointFrame.__init__.saved_args"
    ),
}
_OTHER_NAMES = _RENAMED | {newer: older for older, newer in _RENAMED.items()}

#: What torch 2.11 neither has nor needs: it traces each call of a nested compile region by itself.
_NOT_IN_OLDEST = {"torch._dynamo.variables.invoke_subgraph.save_reuse_entry"}

#: What can be imported only where a library is installed that torch does without.
_OF_TABULATE = {"torch.distributed.debug._debug_handlers.default_handlers"}

_OF_CUDA = {
    "torch._C._cuda_getCurrentRawStream",
    "torch._C._distributed_c10d._dump_nccl_trace_json",
}


def check_all() -> list[tuple[str, bool, str]]:
    """Returns for every private name: the full name, whether torch has it, and what is lost without it.

    It raises whatever importing torch raises.
    """
    import_module("torch")
    return [(name, is_found(name), lost) for name, lost in PRIVATE_NAMES.items()]


def is_found(name: str) -> bool:
    """Returns whether the installed torch has a name, even if only in a function that took over its holder's code.

    torch 2.14 moved the code of `_checkpoint_without_reentrant_generator` into a function named `..._impl`. Names that
    only torch with CUDA has are not missed without it, nor those that torch 2.11 does without, or a library brings.
    """
    torch = import_module("torch")
    if name in _OF_CUDA and torch.version.cuda is None:
        return True
    if name in _OF_TABULATE and find_spec("tabulate") is None:
        return True
    if name in _NOT_IN_OLDEST and torch.__version__ < "2.12":
        return True
    return _is_there(name) or _is_there(_OTHER_NAMES.get(name, ""))


def _is_there(name: str) -> bool:
    path, _, attribute = name.rpartition(".")
    holders = (_resolve(path), _resolve("_".join((path, "impl"))))
    return any(hasattr(holder, attribute) or attribute in _names_in(holder) for holder in holders)


def _resolve(path: str) -> Any:
    """Returns the object at a dotted path, importing modules on the way; None if there is none."""
    try:
        return pkgutil.resolve_name(path)
    except Exception:  # a module that raises when imported cannot be used either
        return None


def _names_in(holder: Any) -> Iterator[str]:
    """Yields the names that a class annotates, and the names in a function's code."""
    for kind in getattr(holder, "__mro__", ()):
        yield from vars(kind).get("__annotations__", ())
    code = getattr(holder, "__code__", None)
    pending = [] if code is None else [code]
    while pending:
        code = pending.pop()
        yield from (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars, code.co_name)
        for constant in code.co_consts:
            if isinstance(constant, str):
                yield constant
            elif isinstance(constant, CodeType):
                pending.append(constant)
