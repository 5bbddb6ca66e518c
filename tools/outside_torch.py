"""torch's own tests of DistributedDataParallel, with Grace's hook in every model; tools/outside.py runs them.

Most of them are written for GPUs. Here GPU number n is the CPU, so that gloo's ranks run them, too.
"""

import argparse
import importlib
import os
import sys
import tempfile
import unittest
from typing import Any

import torch
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

import grace

TESTS = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_ddp_compile_static_graph",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_create_graph",
    "test_ddp_forward_backward_hook",
    "test_ddp_ignore_params_arg",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_logging_data_cpu",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_multiple_nested_unused_params_err_ignore_params",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_python_error_logged",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_sink_noclone",
    "test_ddp_static_graph_nested_types",
    "test_ddp_sync_module_states",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_ddp_zero_output_features",
    "test_detect_ddp_is_actually_static",
    "test_different_graph_across_ranks",
    "test_get_data_parallel_params",
    "test_grads_same_across_ranks_with_no_sync",
    "test_invalid_static_graph",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_skip_all_reduce_unused_parameters",
    "test_stateless_api_with_ddp",
    "test_static_graph_api_cpu",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
)
"""Tests of ``DistributedTest`` that make a DDP model."""
LEFT_OUT = {
    "it registers another hook, and DDP takes one": (
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_ddp_apply_optim_in_backward",
        "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
        "test_ddp_apply_optim_in_backward_ignored_params",
        "test_ddp_comm_hook_logging",
        "test_ddp_hook_parity_allreduce",
        "test_ddp_hook_parity_allreduce_process_group",
        "test_ddp_hook_parity_post_localSGD",
        "test_ddp_hook_parity_powerSGD",
        "test_ddp_hook_pickling_powerSGD",
    ),
    "it uses join(), which Grace's hook refuses": (
        "test_ddp_grad_div_uneven_inputs",
        "test_ddp_join_model_equivalence",
        "test_ddp_join_respects_forward_sync_buffers_false",
        "test_ddp_uneven_input_exception",
        "test_ddp_uneven_input_join_disable",
        "test_ddp_uneven_inputs",
        "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    ),
    "it needs a GPU": (
        "test_DistributedDataParallel_SyncBatchNorm",
        "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
        "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
        "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
        "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
        "test_DistributedDataParallel_SyncBatchNorm_half",
        "test_DistributedDataParallel_non_default_stream",
        "test_DistributedDataParallel_with_amp_and_grad_is_view",
        "test_ddp_device",
        "test_ddp_device_mesh_initialization",
        "test_ddp_inference",
        "test_ddp_logging_data_gpu",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
        "test_ddp_native_mixed_precision_ignored_params",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
        "test_ddp_profiling_torch_profiler",
        "test_sync_bn_logged",
    ),
    "it needs four ranks": (
        "test_ddp_update_process_group_default_group",
        "test_ddp_update_process_group_grad_undefined",
        "test_ddp_update_process_group_new_group",
        "test_ddp_update_process_group_no_find_unused",
        "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
        "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    ),
    "torch itself skips it on Linux": (
        "test_DistributedDataParallel",
        "test_ddp_has_finalized",
        "test_ddp_model_diff_shape_across_ranks",
        "test_ddp_profiling_autograd_profiler",
        "test_ddp_profiling_execution_trace",
        "test_ddp_sync_bn_training_vs_eval",
    ),
}
"""Tests that make a DDP model and are not run, by the reason."""


def is_gpu(value: Any) -> bool:
    """Return True if a value names a GPU."""
    if isinstance(value, str | torch.device):
        return str(value).startswith("cuda")
    return isinstance(value, int) and not isinstance(value, bool)


class GPUsAreTheCPU(TorchFunctionMode):
    """Let tensors that are made on a GPU, or moved to one, stay on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with the CPU in place of GPUs."""
        if function is torch.Tensor.cuda:
            return args[0]
        options = dict(kwargs or {})
        if is_gpu(options.get("device")):
            options["device"] = torch.device("cpu")
        if function in (torch.Tensor.to, torch._C._nn._parse_to):  # the second is that of modules
            args = [torch.device("cpu") if is_gpu(value) else value for value in args]
        return function(*args, **options)


def run_anywhere(*needs: Any) -> Any:
    """Return a decorator that leaves tests as they are, in place of those that skip tests without GPUs."""
    return needs[0] if callable(needs[0]) else lambda test: test


def change_ddp(hook: bool) -> None:
    """Let DistributedDataParallel models stay on the CPU, with Grace's hook from their start."""
    make = DistributedDataParallel.__init__

    def make_with_hook(self, module, device_ids=None, output_device=None, **options):
        """Make the model, and register the hook."""
        make(self, module, **options)
        if hook:
            grace.torch.register_ddp_hook(self, "none")

    DistributedDataParallel.__init__ = make_with_hook


def tests_of_ddp() -> Any:
    """Return the class of the tests, whose ranks are forked."""
    common_distributed.skip_if_lt_x_gpu = run_anywhere
    common_distributed.skip_if_no_gpu = run_anywhere
    common_distributed.init_multigpu_helper = lambda size, backend: {rank: [rank] for rank in range(size)}
    common_distributed.TIMEOUT_DEFAULT = 60
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0
    module = importlib.import_module("torch.testing._internal.distributed.distributed_test")

    class TestDDP(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        """The tests."""

        def setUp(self) -> None:
            """Start the ranks of a test."""
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def run_test(self, *args: Any) -> None:
            """Run a test in a rank."""
            with GPUsAreTheCPU():
                super().run_test(*args)

    return TestDDP


def main() -> int:
    """Run the tests, print how each ended and the count of those that passed, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=TESTS, help="tests; all if left out")
    parser.add_argument("--plain", action="store_true", help="run them without Grace's hook")
    chosen = parser.parse_args()
    folder = tempfile.mkdtemp()
    os.environ.update(BACKEND="gloo", WORLD_SIZE="2", TEMP_DIR=folder)
    for part in ("barrier", "test_dir"):
        os.mkdir(os.path.join(folder, part))
    kind = tests_of_ddp()
    change_ddp(not chosen.plain)
    passed = 0
    for name in chosen.names:
        result = unittest.TestResult()
        kind(name).run(result)
        good = result.wasSuccessful() and not result.skipped
        passed += good
        print(f"{name}: {'passed' if good else 'FAILED'}", flush=True)
        for _, said in [*result.errors, *result.failures, *result.skipped]:
            print(said[-3000:], flush=True)
    print(f"{passed} of {len(chosen.names)} passed (torch {torch.__version__})")
    return 0 if passed == len(chosen.names) else 1


if __name__ == "__main__":
    sys.exit(main())
