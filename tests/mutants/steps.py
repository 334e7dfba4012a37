"""Faults of steps: micro-batches, updates, matrices, precision and the loss scale."""

from tests.mutants.mutant import faults

MUTANTS = faults(r"""
core/engine/gradients.py
  mean_without_micro_batches: test_fuzz.py::test_a_small_case_trains_like_plain_optax
  - parts = num_batch_shards(plan.mesh, plan.config) * self.micro.steps
  + parts = num_batch_shards(plan.mesh, plan.config)
  unscaled_without_predivide: test_loss_scale.py::test_sums_over_devices_do_not_overflow
  - unscale = inverse * divisor * sums.predivide / loss_scale[0]
  + unscale = inverse * divisor / loss_scale[0]
  devices_draw_alike: test_engine_values.py::test_dropout_key_is_folded_with_the_device
  - key = [jax.random.fold_in(k, index) for k in key]
  + key = list(key)
  micro_batches_start_from_the_state_before_the_step:
    test_written_state.py::test_written_state_is_what_a_loop_over_the_micro_batches_leaves
  - inputs[i] = self._as_input(i, x)
  + inputs[i] = fixed[i]
  devices_draw_alike_from_keys_in_the_state:
    test_written_state.py::test_devices_draw_different_numbers_from_keys_in_the_state
  - return fold_keys(x, batch_index(self.sums))
  + return x
  maxima_go_from_micro_batch_to_micro_batch: test_written_state.py::test_maxima_are_those_of_the_whole_batch
  - old if is_of_whole_batch(kind) else merge_written
  + merge_written

core/engine/norms.py
  norm_sums_whole_leaves: test_accumulation.py::test_clip_norm_equals_optax_clipping
  - replicated = lax.add(replicated, cast(square
  + sharded = lax.add(sharded, cast(square

core/engine/merge.py
  summed_state_counts_the_value_before_on_each_device:
    test_written_state.py::test_written_state_is_what_a_loop_over_the_micro_batches_leaves
  - return old + sum_over(x.astype(dtype) - old, sums)
  + return sum_over(x.astype(dtype), sums)
  numbers_of_rows_pass: test_written_state.py::test_values_of_one_devices_rows_are_refused_by_name
  - if power not in (0, -math.inf)
  + if False
  keys_without_their_dtype_pass: test_written_state.py::test_a_key_without_its_dtype_is_refused_by_name
  - attempt(_draws, traced, i)
  + False
  maxima_of_one_device: test_written_state.py::test_maxima_are_those_of_the_whole_batch
  - extreme(x, sums, lax.pmax)
  + x
  minima_of_the_last_micro_batch: test_written_state.py::test_maxima_are_those_of_the_whole_batch
  - lambda x: widen(x).min(0)
  + lambda x: x[-1]
  rows_are_averaged: test_written_state.py::test_values_of_one_devices_rows_are_refused_by_name
  - if facts.row_dims:
  + if False:

core/step/loss.py
  values_before_the_loss_are_read_after_it: test_fields.py::test_what_the_loss_writes_in_place_is_kept
  - split_mutable(aux, before, written_shape)
  + split_mutable(aux, by_field(carried), written_shape)
  teachers_in_the_compute_dtype: test_fields.py::test_a_teacher_that_the_loss_moves_keeps_its_own_dtype
  - if seen.seen_dtypes != plan.seen_dtypes:
  + if False:

core/plan/traffic.py
  what_is_written_travels_in_blocks: test_fields.py::test_a_teacher_that_the_loss_moves_keeps_its_own_dtype
  - if leaf.is_written:
  + if False:

core/base/compat.py
  booleans_without_a_dtype: test_engine_values.py::test_constants_of_a_training_step
  - value = np.bool_(literal.val) if isinstance(literal.val, bool) else literal.val
  + value = literal.val

core/engine/written_variables.py
  numbers_of_python_in_their_own_width: test_engine_values.py::test_constants_of_a_training_step
  - can_represent(dtype, kind)
  + False

core/update/whole.py
  frozen_zero_is_positive: test_trained.py::test_negative_zeros_of_frozen_leaves_stay_negative
  - np.float32(-0.0)
  + np.float32(0.0)
  skipped_gathered_parameters: test_loss_scale.py::test_a_skipped_step_changes_nothing_but_the_scale
  - return new if applied is None else jnp.where(applied, new, old)
  + return new

core/plan/trainable.py
  zero_times_infinity_is_zero: test_trained.py::test_what_is_not_frozen_is_trained
  - name == "mul" and any(zero) and _finite_elsewhere(eqn, zero)
  + name == "mul" and any(zero)

core/state/next_state.py
  skipped_step_applied: test_loss_scale.py::test_a_skipped_step_changes_nothing_but_the_scale
  - new = _update(new, update.grads, update.applied, update.value, done)
  + new = _update(new, update.grads, None, update.value, done)
  skipped_own_update_applied_on_the_host: test_offload_optimizer.py::test_a_skipped_step_changes_nothing_on_the_host
  - tx=dataclasses.replace(tx, applied=applied, value=value)
  + tx=dataclasses.replace(tx, value=value)

core/update/transformation.py
  sums_of_optax_not_laid_out: test_engine.py::test_two_updates_of_parameters_held_whole_keep_their_layout
  - return compat.when_added(update, lambda total: leaf.store(total.astype(leaf.dtype)))
  + return update

core/update/kernels.py
  padding_updated: test_offload_optimizer.py::test_padding_stays_zero
  -         if cut is None or not cut.is_padded:
  -             return x
  +         if True:
  +             return x
  padding_counts_in_sums: test_offload_optimizer.py::test_numbers_over_state_on_the_host_equal_one_device
  - part.without_padding(product, neutral)
  + part.without_padding(product, 0)

core/update/chunks.py
  devices_draw_noise_of_one: test_offload_optimizer.py::test_stochastic_rounding_draws_the_same_bits_wherever_it_runs
  - lambda dim: first[dim] + chunk_index(
  + lambda dim: 0 * first[dim] + chunk_index(

core/jaxpr/primitives.py
  muon_on_shards: test_collectives.py::test_muon_multiplies_whole_matrices
  - cumprod cumsum dot_general eig
  + cumprod cumsum eig

core/jaxpr/batches.py
  dense_matrices_are_sliced: test_batches.py::test_what_mixes_slices_has_no_program_of_one
  - _require(dim not in contracted[k], "a product over slices")
  + pass
  norms_of_all_slices_count_as_those_of_one: test_batches.py::test_what_mixes_slices_has_no_program_of_one
  - _require(dim not in gone, f"`{eqn.primitive.name}` over slices")
  + pass

core/update/owned.py
  matrices_get_numbers_of_others: test_matrices.py::test_each_matrix_gets_what_belongs_to_its_parameter_and_its_layer
  - (matrices, me * rounds + jnp.arange(rounds))
  + (matrices, jnp.arange(rounds))

core/jaxpr/flat.py
  branches_over_parameters_stay_whole: test_regions.py::test_a_branch_over_several_parameters_becomes_one_for_each
  - touching = [g for g in groups if g[0] & members]
  + touching = list(groups)

core/plan/opt_leaves.py
  the_first_parameter_owns_what_several_move: test_matrices.py::test_state_that_several_parameters_move_belongs_to_none
  - owners_now[j] = next(iter(reached)) if len(reached) == 1 else None
  + owners_now[j] = next(iter(reached)) if reached else None

core/plan/assignment.py
  one_device_gets_what_is_left:
    test_assignment.py::test_each_unit_is_computed_once_and_no_device_has_much_more_than_the_mean
  - heapq.heapreplace(loads, (load + costs[kind], device))
  + heapq.heapreplace(loads, (load, device))

core/plan/matrices.py
  bases_leave_their_devices: test_matrices.py::test_bases_of_a_stack_stay_where_its_slices_are_computed
  - if cut is not None and dims and cut.cuts(dims[0]) and cut.is_stored_naturally:
  + if False:

core/layout/casts.py
  edits_ignored: test_precision.py::test_an_edit_by_replace_is_taken_over
  - return lax.select(same, master, lax.convert_element_type(param, master.dtype))
  + return master
  truncated_not_rounded: test_precision_bytes.py::test_stochastic_rounding_is_fair_and_exact_where_it_can_be
  - (bits + noise) & jnp.uint32(0xFFFF0000)
  + bits & jnp.uint32(0xFFFF0000)

core/plan/opt_state.py
  scale_halves_late: test_loss_scale.py::test_the_first_scales_by_hand
  - halve = overflow & (state.hysteresis <= 1)
  + halve = overflow & (state.hysteresis <= 0)
  scale_grows_without_end: test_loss_scale.py::test_the_scale_stops_growing
  - jnp.minimum(scale * 2, MAX_LOSS_SCALE)
  + scale * 2

core/config/precision.py
  widens_by_implicit_promotion: test_strict_promotion.py::test_train_steps
  - np.promote_types(dtype, np.float32)
  + jnp.promote_types(dtype, jnp.float32)
""")
