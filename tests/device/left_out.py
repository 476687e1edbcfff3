"""The tests of tests/collect that `make test-device` leaves out on the simulated device, each group with its reason."""

from typing import NamedTuple


class LeftOut(NamedTuple):
    """Tests whose id contains one of these parts."""

    reason: str
    parts: tuple[str, ...]


LEFT_OUT = [
    LeftOut(
        "they run no model, or start processes and compilers, which know nothing of the device",
        (
            "collect/compile/",
            "collect/flops/",
            "collect/fx/",
            "test_cases_compilation.py",
            "test_cases_ranks.py",
            "test_compiled_parts.py",
            "test_deep_graphs.py",
            "test_environment.py",
            "test_launch.py",
            "test_ops_compiled.py",
            "test_both_ranks_are_stopped_where_one_of_them_has_met_nan",
            "test_child_is_stopped_by_a_recording_of_its_own_and_not_by_its_parents",
            "test_warnings.py",
            "test_rows_name_the_dataset_and_its_workers",
            "test_what_is_not_compiled_gives_the_same_rows",
        ),
    ),
    LeftOut(
        "names of modules and containers of tensors are the same on any device",
        ("collect/names/", "collect/structures/"),
    ),
    LeftOut(
        "gloo sends no tensors of the device",
        (
            "collect/collectives/",
            "test_stage_of_a_pipeline_says_which_micro_batch_it_works_on",
            "test_states_are_followed_into_the_optimizer_that_has_them",
        ),
    ),
    LeftOut(
        "they compare two runs to the number, and the engine's own threads count nodes on from run to run",
        ("test_python_mode.py",),
    ),
    LeftOut(
        "they take long, and repeat with more options what other files show there",
        (
            "test_captures_bit_identity.py",
            "test_cases_memory.py",
            "test_mode_sees_nothing_of_recorded_ops_in",
            "test_nothing_of_recorded_ops_is_left_when_the_recording_is_gone",
            "test_memory_of_ours_grows_by_less_than_a_step_takes",
            "test_stash_inside.py",
            "test_tracker_leaves_nothing.py",
        ),
    ),
    LeftOut(
        "they are about main memory, about who reads it, or about how the CPU's kernels are called",
        (
            "test_graph_captures.py",  # it simulates CUDA itself
            "test_memory_is_read_when_a_step_ends",
            "test_values_memory.py",
            "test_values_on_cuda.py",
            "test_whole_tensors.py",
            "test_a_leaf_is_met_when_it_is_first_read",
            "test_an_odd_tensor_has_rows_that_say_why",
            "test_output_that_cannot_be_measured_has_a_note_and_the_next_ones_are_measured",  # rows in main memory
            "test_packed_sequence_",  # its lengths lie in main memory
            "test_any_mixture_of_rows_is_read_back",  # these take main memory for a device
            "test_what_lies_on_a_device_is_read_in_one_transfer_a_kind",
            "test_modes_of_the_users_see_nothing_of_what_is_written_at_a_steps_end",  # a thread writes it there
            "test_profiler_sees_nothing_of",  # it sees the ops that measure where there is no kernel of our own
            "test_dtypes_devices_layouts_and_generators_are_words",
            "test_ops_of_the_recording_thread_are_recorded_alone_with_its_number",  # an argument names the device
            "test_tracker_drop_in.py::test_memory_",
        ),
    ),
    LeftOut(
        "a process that is forked, or is given tensors, has no such device",
        (
            "fork",
            "test_copies_and_files_made_inside_are_those_of_a_plain_model",
            "test_hooked_parameter_is_sent_to_another_process_without_a_warning",
            "test_storage_that_is_shared_with_processes_stays_known",
            "test_workers_of_a_data_loader_change_nothing",
            "test_workers_that_load_data_work_as_ever",
        ),
    ),
    LeftOut(
        "one thread of the device runs all backwards, none of which can wait for another",
        (
            "test_gpts_in_four_threads_are_attributed",
            "test_rows_of_two_backwards_at_once_are_kept_apart",
        ),
    ),
    LeftOut(
        "they compare with tensors in main memory, which no op takes together with those of a device",
        (
            "test_stash.py::test_values_and_gradients_have_the_structure_of_the_output_and_its_bits",
            "test_stash.py::test_stash_gets_the_event_with_arguments_and_may_add_to_its_stash",
            "test_gradients_of_every_output_of_an_architecture_are_those_that_autograd_keeps",
            "test_view_that_a_module_in_place_writes_to_has_the_gradient_it_had",
            "test_whole_tensors_are_kept_with_the_steps_that_are_written",
            "test_backward_that_begins_with_an_edge_of_the_graph_brings_both_gradients_together",
            "test_gradient_that_a_backward_with_inputs_does_not_bring_is_not_waited_for",
            "test_targets_and_constants_are_leaves_of_where_they_are_read",
            "test_transforms_of_functions_are_stashed_as_plain_tensors",
            "test_two_trackers_at_one_leaf_hear_its_gradient_each",
        ),
    ),
    LeftOut(
        "they make tensors on a thread of the autograd engine, where no default device is set",
        (
            "test_module_that_a_backward_runs_has_rows_of_its_phase",
            "test_modules_that_a_function_runs_are_none_of_the_runs",
            "test_gradient_of_what_only_a_recompute_was_given_is_there",
        ),
    ),
    LeftOut(
        "the device's thread may drop an exception a moment after the backward has raised it",
        ("test_exception_of_a_hook_is_not_kept",),
    ),
    LeftOut(
        "gradients are read to see whether they were zeroed, which modtrace does in main memory alone: it would wait",
        ("test_a_step_that_the_grad_scaler_skips_is_a_step",),
    ),
    LeftOut(
        "the simulated device has no kernel for it: the CPU has none, and another device has one of its own",
        (
            "[Mixtral",
            "[batch norm and rnn",
            "test_graph_and_tensors_die_as_they_would_without_a_tracker",
            "test_ops_of_an_lstm",
        ),
    ),
    LeftOut(
        "attention is of other ops there than on the CPU",
        ("[None-36484", "[_flex]", "test_costs_of[attention]"),
    ),
    LeftOut(
        "the simulated device resizes memory when an op has ended, not inside of it, and runs one op at a time",
        (
            "an output that is resized by an op that raises",
            "costs_of_an_independent_count[compiled-6]",
            "costs_of_an_independent_count[python-6]",
            "memory that a set tensor grows",
            "test_modules_that_begin_a_step_while_an_op_runs_do_not_part_it_from_what_it_reads",
        ),
    ),
    LeftOut(
        "torch has no data parallelism and no process groups for it",
        (
            "test_wrapper_parts_are_stripped_and_kept_in_the_raw_path",
            "[DataParallel]",
            "[data parallel without devices",
            "[distributed",
            "[fully sharded",
            "test_cases_data_parallel.py",
            "test_sharded_parameters_count_while_they_are_gathered",
            "test_ddp_has_the_gradients_of_this_rank_and_stays_as_it_is",
            "test_sharded_models_train_on_undisturbed",
        ),
    ),
    LeftOut(
        "the simulated device has no sparse tensors",
        (
            "[sparse gradients",
            "test_sparse_gradient_of_an_embedding_is_measured_by_its_stored_values",
            "test_tensors_without_storage_have_none",
            "test_what_cannot_be_seen_is_unknown",
            "[two optimizers and a sparse one",
        ),
    ),
    LeftOut(
        "it finds a fault of modtrace: with a default device set, a call that Ctrl-C ends inside of an op stays open",
        ("test_op_after_an_exception_is_outside_of_the_calls_that_it_ended[KeyboardInterrupt]",),
    ),
    LeftOut(
        "hooks of saved tensors see nothing of the device's thread (docs/limits.md)",
        ("test_what_the_nodes_of_a_backward_keep_is_charged_to_it",),
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
