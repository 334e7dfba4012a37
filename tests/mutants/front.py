"""Faults of data, published models, settings, estimates, the monitor and DeepSpeed configurations."""

from tests.mutants.mutant import faults

MUTANTS = faults(r"""
data/position.py
  data_order_ignores_epoch: test_data_loader.py::test_orders_differ_by_epoch_and_seed_and_are_not_shared
  - return _permute(place, self.num_examples, (self.seed, epoch))
  + return _permute(place, self.num_examples, (self.seed, 0))
  windows_are_shuffled_alike_in_each_epoch: test_data_loader.py::test_windows_are_shuffled_inside_and_among_themselves
  - _permute(offset, size, (self.seed, epoch, number))
  + _permute(offset, size, (self.seed, 0, number))
  empty_batch_at_the_end: test_data_loader.py::test_schedule_is_that_of_brute_force
  - if self.drop_remainder else -(-num_examples // self.batch_size)
  + if self.drop_remainder else num_examples // self.batch_size + 1

data/pipeline.py
  padding_has_weight: test_data_loader.py::test_training_on_a_padded_remainder_equals_optax_on_the_examples
  - np.array(real, np.float32)]
  + np.ones(len(real), np.float32)]

data/loader.py
  loaders_need_not_agree: test_multiprocess.py::test_two_processes_share_files_and_one_goes_on
  - {"the data": made.description()}
  + {}

weights/draft.py
  exports_lack_what_paths_leaves_out: test_hf_round_trip.py::test_what_paths_leaves_out_is_copied
  - copied = [tensor for name, tensor in there.items() if name in left_out and name not in made]
  + copied = []

  decoding_gets_memory_that_is_used_again: test_export.py::test_what_decode_is_given_stays_as_it_is
  - x.shape, keeps=True) for
  + x.shape) for

weights/entries.py
  sections_of_tensors_start_at_0: test_mapping.py::test_sections_orders_shapes_and_stacks
  - zip(box, (start, size), strict=True)
  + zip(box, (0, size), strict=True)

weights/config.py
  families_read_fields_of_others: test_hf_parity.py::test_a_family_reads_its_own_fields_only
  - if name in own or name in COMMON}
  + }
  yarn_scales_queries_alone: test_hf_parity.py::test_logits_are_those_of_transformers -k gpt_oss
  - * turned**2,
  + * turned,
  an_estimate_refuses_what_cannot_be_computed: test_memory_story.py::test_a_folder_says_its_sizes_itself
  - return config_of(*read_fields(path))[0]
  + return read_config(path)

weights/families.py
  adapters_of_experts_are_those_of_their_neighbours: test_adapters.py::test_adapters_of_packed_experts_come_back
  - (1, k * count, count)
  + (1, (k + 1) % rows * count, count)

core/jaxpr/sizes.py
  products_of_experts_take_no_time: test_step_memory.py::test_each_row_of_a_ragged_product_meets_one_matrix
  - "ragged_dot_general":
  + "ragged_dot":
  four_bits_count_a_byte: test_quantized_base.py::test_two_numbers_take_a_byte
  - return -(-size * _bits(dtype) // 8)
  + return size * int(jnp.dtype(dtype).itemsize)

core/layout/blocks.py
  largest_nf4_scale_overflows: test_quantization.py::test_blocks_are_those_of_the_definition
  - jnp.minimum(scale, _LARGEST_SCALE)
  + scale
  nf4_levels_are_even: test_quantization.py::test_blocks_are_those_of_the_definition
  - _levels(z) if kind == "nf4"
  + z.astype(jnp.float32) / 8 if kind == "nf4"

core/state/gather.py
  gathered_parameters_keep_their_dtype: test_gather.py::test_values_are_those_of_numpy
  - cast_dtype(leaf.dtype, dtype)
  + leaf.dtype
  written_parameters_leave_their_masters: test_inspect.py::test_a_parameter_that_was_set_is_trained_on
  - if plan.leaves[i].master is not None}
  + if False}

core/plan/param_leaves.py
  averages_in_extra_stay_whole: test_extra.py::test_losses_and_loops_change_it
  - return bool(leaves) and treedef == params_treedef
  + return False and treedef == params_treedef

estimate/step_memory.py
  ledger_without_gradients: test_memory_story.py::test_all_four_agree_on_the_states_to_the_byte
  - BytesPerDevice(self.params, self.grads, self.opt_state)
  + BytesPerDevice(self.params, 0, self.opt_state)
  estimates_forget_updates_of_records: test_disk_analysis.py::test_the_estimate_counts_what_passes_through_a_device
  - if sum(after.values()) > temporaries.peak:
  + if False:

estimate/buffers.py
  terms_of_sums_written_late: test_postponed.py::test_expensive_terms_of_a_sum_are_written_beside_it
  - waits=self.is_summed(x)
  + waits=False
  divided_sums_compute_again: test_step_time.py::test_what_a_divided_sum_needs_is_written_where_it_was_computed
  - if divides or not self.operations[self._first_reader[y]].backward:
  + if not self.operations[self._first_reader[y]].backward:

estimate/traced.py
  scans_compute_all_levels_again: test_postponed.py::test_what_is_made_of_slices_of_slices_is_written
  - slices > MOST_SLICES and
  + False and
  dilations_fused: test_postponed.py::test_on_tpus_a_pad_between_elements_is_a_kernel_of_its_own
  - (is_dilation and self.program.fuses_products)
  + (False and is_dilation)

estimate/footprint.py
  normalized_in_place: test_postponed.py::test_what_is_normalized_on_gpus_is_not_written_over
  - {t: x.buffers for t, x in program.normalizations()}
  + {}

machines/machine.py
  topology_of_any_kind: test_settings.py::test_whatever_an_argument_of_choices_is_given_it_says_what_it_takes
  - spelt(name) if isinstance(name, str) else ""
  + spelt(name)

analysis/search.py
  recomputation_compared_at_stage_0: test_fit.py::test_what_the_configuration_excludes_is_not_searched
  - config = self._config(self.stages[0], num_replicas)
  + config = self._config(0, num_replicas)
  a_step_keeps_more_than_fit_was_given: test_kept_by_default.py::test_fit_keeps_what_a_step_would_within_its_limit
  - hardware=self.hardware, hbm_bytes=self.limit
  + hardware=self.hardware

monitor/sinks.py
  rest_of_a_line_not_written: test_monitor_sinks.py::test_a_full_disk_is_an_error_and_no_line_is_written_in_part
  - while rest:
  + if rest:
  sinks_stay_with_a_file_that_was_replaced: test_monitor_sinks.py::test_two_sinks_of_one_file_take_turns
  - return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
  + return True

deepspeed/schedules.py
  rate_one_step_early: test_deepspeed.py::test_schedule_is_deepspeeds
  - return jnp.maximum(step - 1, 0)
  + return jnp.maximum(step, 0)

deepspeed/optimizers.py
  decay_is_never_decoupled: test_deepspeed.py::test_optimizer_is_deepspeeds
  - return steps if decoupled or p.adam_w_mode else steps[::-1]
  + return steps[::-1]

deepspeed/conversion.py
  rules_of_outer_blocks_do_not_count: test_from_deepspeed_keys.py::test_stage_0_has_nothing_to_offload_or_to_refuse
  - if letter == "."]
  + if letter == "."][-1:]
  refused_values_give_arguments: test_from_deepspeed_keys.py::test_stage_3_keys_mean_nothing_before
  - if owner and (ruling is None or ruling.verdict == "honoured"):
  + if owner:

deepspeed/facts.py
  micro_batch_of_all_devices: test_from_deepspeed.py::test_batch_sizes_are_deepspeeds
  - rest = product if train is None else train // product
  + rest = product if train is None else train // (product // num_devices)

deepspeed/auto_values.py
  set_overwrites_a_written_floor: test_cli_commands.py::test_a_floor_of_a_warm_up_stays_where_the_rate_is_set
  - if key in present and (key != FLOOR or key in autos)}
  + if key in present}

core/base/text.py
  tables_wrap_as_text: test_html.py::test_terminals_get_lines_that_fit
  - last = self.indent + sum(n + 2 for n in sizes[:-1])
  + last = 0
  json_has_infinity: test_html.py::test_json_has_no_infinity_and_no_nan
  - if isinstance(x, float) and not math.isfinite(x) else x
  + if isinstance(x, float) and math.isnan(x) else x

core/processes/exchange.py
  each_length_of_a_text_compiles_a_program: test_processes.py::test_texts_of_many_lengths_compile_few_programs
  - np.zeros(1 << max(10, int(sizes.max() - 1).bit_length()), np.uint8)
  + np.zeros(int(sizes.max()), np.uint8)

monitor/readings.py
  monitor_knows_metrics_of_disks_only: test_monitor.py::test_every_metric_of_a_step_with_records_is_logged_by_its_name
  - path not in STEP_METRICS
  + "disk" not in path

weights/safetensors_files.py
  indices_lead_anywhere: test_from_outside.py::test_an_index_stays_in_its_folder
  - return inner.is_relative_to(outer)
  + return True

core/config/settings.py
  one_listed_part_of_a_type_lists_all: test_settings.py::test_a_field_takes_what_its_type_lists
  - return tuple(itertools.chain(*of_parts)) if all(of_parts) else ()
  + return tuple(itertools.chain(*of_parts))
  true_is_a_size: test_from_outside.py::test_values_of_the_wrong_kind_are_refused
  - if not isinstance(value, int) or isinstance(value, bool) or value < least:
  + if not isinstance(value, int) or value < least:

analysis/memory_table.py
  whole_gradients_count_against_the_device: test_memory_story.py::test_the_verdict_is_one_for_all_and_an_exit_status
  - used = self.states.params + self.states.opt_state if
  + used = self.states_bytes if

cli/decoder.py
  keys_of_own_tokens_alone: test_cli_parts.py::test_the_loss_in_parts_of_rows_is_that_of_whole_rows
  - key, value = (lax.all_gather(x, context, axis=1, tiled=True) for x in (key, value))
  + pass

analysis/alike.py
  layouts_of_another_stage_count_as_alike: test_fit.py::test_rows_that_are_alike_are_one_and_all_are_there_on_demand
  - if len(differs) == 1 and differs[0] != apart:
  + if len(differs) == 1:

core/base/guard.py
  warnings_name_lines_of_jzero: test_warnings.py::test_a_warning_names_the_users_line_once
  - partition(".")[0] in ("jax", "jzero")
  + partition(".")[0] == "jzero"
""")
