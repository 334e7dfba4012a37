"""Faults of data, published models, settings, estimates, the monitor and DeepSpeed configurations."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    # Data.
    Mutant(
        "data_order_ignores_epoch",
        "data/order.py",
        "return _permute(place, self.num_examples, (self.seed, epoch))",
        "return _permute(place, self.num_examples, (self.seed, 0))",
        "test_data_order.py::test_orders_differ_by_epoch_and_seed_and_are_not_shared",
    ),
    Mutant(
        "windows_are_shuffled_alike_in_each_epoch",
        "data/order.py",
        "_permute(offset, size, (self.seed, epoch, number))",
        "_permute(offset, size, (self.seed, 0, number))",
        "test_data_order.py::test_windows_are_shuffled_inside_and_among_themselves",
    ),
    Mutant(
        "padding_has_weight",
        "data/pipeline.py",
        "np.array(real, np.float32)]",
        "np.ones(len(real), np.float32)]",
        "test_data_loader.py::test_training_on_a_padded_remainder_equals_optax_on_the_examples",
        "[1]",
    ),
    Mutant(
        "empty_batch_at_the_end",
        "data/position.py",
        "if self.drop_remainder else -(-num_examples // self.batch_size)",
        "if self.drop_remainder else num_examples // self.batch_size + 1",
        "test_data_order.py::test_schedule_is_that_of_brute_force",
    ),
    # Published models, adapters, memory.
    Mutant(
        "exports_lack_what_paths_leaves_out",
        "checkpoint/draft.py",
        "copied = [tensor for name, tensor in there.items() if name in left_out]",
        "copied = []",
        "test_hf_round_trip.py::test_what_paths_leaves_out_is_copied",
        "[llama]",
    ),
    Mutant(
        "sections_of_tensors_start_at_0",
        "checkpoint/pieces.py",
        "slice(start, start + size)",
        "slice(0, size)",
        "test_mapping.py::test_sections_orders_shapes_and_stacks",
    ),
    Mutant(
        "families_read_fields_of_others",
        "pretrained/config.py",
        "if name in own or name in COMMON}",
        "}",
        "test_hf_config.py::test_a_family_reads_its_own_fields_only",
    ),
    Mutant(
        "an_estimate_refuses_what_cannot_be_computed",
        "pretrained/config.py",
        "    return config_of(*read_fields(path))[0]",
        "    return read_config(path)",
        "test_memory_story.py::test_a_folder_says_its_sizes_itself",
    ),
    Mutant(
        "largest_nf4_scale_overflows",
        "layout/blocks.py",
        "jnp.minimum(scale, _LARGEST_SCALE)",
        "scale",
        "test_quantized_blocks.py::test_blocks_are_those_of_the_definition",
        "nf4",
    ),
    Mutant(
        "nf4_levels_are_even",
        "layout/blocks.py",
        '_levels(z) if kind == "nf4"',
        'z.astype(jnp.float32) / 8 if kind == "nf4"',
        "test_quantized_blocks.py::test_blocks_are_those_of_the_definition",
    ),
    Mutant(
        "gathered_parameters_keep_their_dtype",
        "state/layouts.py",
        "cast_dtype(leaf.dtype, dtype)",
        "leaf.dtype",
        "test_gather.py::test_values_are_those_of_numpy",
    ),
    Mutant(
        "averages_in_extra_stay_whole",
        "plan/param_leaves.py",
        "return bool(leaves) and treedef == params_treedef",
        "return False and treedef == params_treedef",
        "test_extra.py::test_losses_and_loops_change_it",
    ),
    Mutant(
        "four_bits_count_a_byte",
        "jaxpr/sizes.py",
        "return -(-size * _bits(jnp.dtype(dtype)) // 8)",
        "return size * int(jnp.dtype(dtype).itemsize)",
        "test_four_bits.py::test_two_numbers_take_a_byte",
    ),
    Mutant(
        "ledger_without_gradients",
        "analysis/step_memory.py",
        "BytesPerDevice(self.params, self.grads, self.opt_state)",
        "BytesPerDevice(self.params, 0, self.opt_state)",
        "test_memory_story.py::test_all_four_agree_on_the_states_to_the_byte",
    ),
    # Settings.
    Mutant(
        "topology_of_any_kind",
        "analysis/machines.py",
        'name.lower() if isinstance(name, str) else ""',
        "name.lower()",
        "test_settings.py::test_whatever_an_argument_of_choices_is_given_it_says_what_it_takes",
    ),
    # Fit.
    Mutant(
        "recomputation_compared_at_stage_0",
        "analysis/search.py",
        "config = self._config(self.stages[0], 1)",
        "config = self._config(0, 1)",
        "test_fit.py::test_what_the_configuration_excludes_is_not_searched",
        "host",
    ),
    # The monitor.
    Mutant(
        "rest_of_a_line_not_written",
        "monitor/sinks.py",
        "            while rest:",
        "            if rest:",
        "test_monitor_sinks.py::test_a_full_disk_is_an_error_and_no_line_is_written_in_part",
        "JsonLines",
    ),
    # DeepSpeed.
    Mutant(
        "rate_one_step_early",
        "deepspeed/schedules.py",
        "return jnp.maximum(step - 1, 0)",
        "return jnp.maximum(step, 0)",
        "test_deepspeed_optimizers.py::test_schedule_is_deepspeeds",
    ),
    Mutant(
        "decay_is_never_decoupled",
        "deepspeed/optimizers.py",
        "return steps if decoupled or p.adam_w_mode else steps[::-1]",
        "return steps[::-1]",
        "test_deepspeed_optimizers.py::test_optimizer_is_deepspeeds",
    ),
    Mutant(
        "rules_of_outer_blocks_do_not_count",
        "deepspeed/verdicts.py",
        'if letter == "."]',
        'if letter == "."][-1:]',
        "test_from_deepspeed_keys.py::test_stage_0_has_nothing_to_offload_or_to_refuse",
    ),
    Mutant(
        "refused_values_give_arguments",
        "deepspeed/verdicts.py",
        'if owner and (ruling is None or ruling.verdict == "honoured"):',
        "if owner:",
        "test_from_deepspeed_keys.py::test_stage_3_keys_mean_nothing_before",
    ),
    Mutant(
        "micro_batch_of_all_devices",
        "deepspeed/facts.py",
        "rest = product if train is None else train // product",
        "rest = product if train is None else train // (product // num_devices)",
        "test_from_deepspeed.py::test_batch_sizes_are_deepspeeds",
    ),
    Mutant(
        "monitor_knows_metrics_of_disks_only",
        "monitor/readings.py",
        "path not in STEP_METRICS",
        '"disk" not in path',
        "test_monitor.py::test_every_metric_of_a_step_with_records_is_logged_by_its_name",
        "[delay]",
    ),
]
