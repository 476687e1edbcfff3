"""The tests of `make test-device` that cannot run on the simulated device, each group with its reason."""

from typing import NamedTuple


class LeftOut(NamedTuple):
    """Tests whose id contains one of these parts."""

    reason: str
    parts: tuple[str, ...]


LEFT_OUT = [
    LeftOut(
        "they are about main memory, about who reads it, or about how the CPU's kernels are called",
        (
            "test_values_memory.py",
            "test_values_on_cuda.py",
            "test_whole_tensors.py",
            "test_a_leaf_is_met_when_it_is_first_read",
            "test_a_fork_goes_on_with_what_is_known",  # a fork has no device
            "test_an_odd_tensor_has_rows_that_say_why",
            "test_packed_sequence_",  # its lengths lie in main memory
            "test_any_mixture_of_rows_is_read_back",  # these take main memory for a device
            "test_what_lies_on_a_device_is_read_in_one_transfer_a_kind",
        ),
    ),
    LeftOut(
        "they compare with tensors in main memory, which no op takes together with those of a device",
        (
            "test_stash.py::test_values_are_the_outputs_bit_by_bit",
            "test_stash.py::test_dataclass_is_stashed_as_a_new_one_of_its_class",
            "test_stash.py::test_gradients_are_tuples_and_equal_the_formula",
            "test_stash.py::test_gradients_of_a_dataclass_are_one_in_a_tuple",
            "test_stash.py::test_stash_gets_the_event_with_arguments_and_may_add_to_its_stash",
            "test_gradients_of_every_output_of_an_architecture_are_those_that_autograd_keeps",
            "test_model_output_keeps_its_class_and_its_gradients",
            "test_view_that_a_module_in_place_writes_to_has_the_gradient_it_had",
            "test_whole_tensors_are_kept_with_the_steps_that_are_written",
        ),
    ),
    LeftOut(
        "they make tensors on a thread of the autograd engine, where no default device is set",
        (
            "test_module_that_a_backward_runs_has_rows_of_its_phase",
            "test_modules_that_a_function_runs_are_none_of_the_runs",
        ),
    ),
    LeftOut(
        "they name the autocast or the gradient scaler of the CPU",
        (
            "test_overflow_under_autocast_in_half_precision",
            "test_overflow_of_one_optimizer_that_is_skipped_does_not_stop_another",
            "test_overflow_that_a_grad_scaler_skips_is_neither_told_nor_a_reason_to_stop",
        ),
    ),
    LeftOut(
        "gradients are read to see whether they were zeroed, which modtrace does in main memory alone: it would wait",
        ("test_a_step_that_the_grad_scaler_skips_is_a_step",),
    ),
    LeftOut(
        "the simulated device has no kernel for it: the CPU has none, and another device has one of its own",
        ("[Mixtral", "test_ops_of_an_lstm"),
    ),
    LeftOut(
        "torch has no data parallelism and no process groups for it",
        (
            "test_wrapper_parts_are_stripped_and_kept_in_the_raw_path",
            "[DataParallel]",
            "test_ddp_has_the_gradients_of_this_rank_and_stays_as_it_is",
            "test_sharded_models_train_on_undisturbed",
        ),
    ),
    LeftOut(
        "the simulated device has no sparse tensors",
        (
            "test_sparse_gradients_of_an_embedding_leave_its_output_dense",
            "test_sparse_gradient_comes_as_it_is",
            "test_sparse_gradient_moves_only_the_rows_it_has",
        ),
    ),
    LeftOut(
        "they have two backwards meet at a barrier, and a device has one thread, which runs one node at a time",
        ("test_cases_threads.py::test_backwards_at_once_in_two_threads",),
    ),
    LeftOut(
        "without ops and events of calls the nodes that a backward makes on the device's thread are not marked, and "
        "those of all numbers that both threads have given are unknown (docs/limits.md)",
        (
            "test_a_gradient_taken_inside_a_forward_is_a_backward_of_what_it_goes_through[False]",
            "test_a_double_backward[False]",
        ),
    ),
]
