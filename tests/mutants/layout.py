"""Faults of layouts: padded leaves, rows of the batch, collectives, the plan."""

from tests.mutants.mutant import faults

MUTANTS = faults(r"""
core/layout/box.py
  boxes_that_overlap_make_an_array: test_box.py::test_boxes_that_do_not_make_an_array
  - return inside and apart and
  + return inside and

core/update/program.py
  gradients_as_their_user_lays_them: test_update_split.py::test_an_update_constrains_only_what_may_lie_otherwise
  - place(g.reduced, i, leaf, "grads", is_laid_out=False)
  + place(g.reduced, i, leaf, "grads")
  flattened_leaves_updated_in_natural_shape:
    test_traced_collectives.py::test_updates_gather_what_is_flattened_only_if_they_need_more_than_elements_and_sums
  - return off_device_params(plan) | {i for i, cut in enumerate(grads) if cut is not None and cut.flat}
  + return off_device_params(plan)

core/update/chunks.py
  padding_of_flattened_leaves_not_seen_by_updates: test_padded.py::test_flattened_leaves_are_updated_as_they_are_stored
  - lambda dim: lax.broadcasted_iota(jnp.int32, leaf.stored_shape, dim)
  + lambda dim: jnp.zeros(leaf.stored_shape, jnp.int32)

core/plan/choice.py
  small_odd_leaves_padded: test_plan.py::test_small_leaves_that_no_dimension_divides_are_whole_at_every_stage
  - if size <= most_unpadded:
  + if size < most_unpadded:
  scanned_dimension_cut: test_layout.py::test_every_cut
  - if d != scan_dim and d not in taken_dims]
  + if d not in taken_dims]
  never_flattened: test_layout.py::test_known_leaves
  - if cut.padding > MAX_PADDING * size and
  + if cut.padding > MAX_PADDING * size * size and

core/layout/padded.py
  flax_reads_stored_arrays: test_padded.py::test_flax_reads_and_writes_natural_shapes
  - flax_types.register_array(Padded, lambda x: x.natural, _from_flax)
  + flax_types.register_array(Padded, lambda x: x.stored, _from_flax)
  consumed_leaf_read: test_nnx.py::test_pair_trains_like_plain_nnx
  - self.check_alive()

core/plan/trees.py
  optimizer_leaves_are_stored_arrays:
    test_padded.py::test_functions_of_parameters_gradients_and_optimizer_state_see_one_shape
  - return self.treedef.unflatten([leaf.box(x) for
  + return self.treedef.unflatten([x for

core/state/request.py
  padded_parameters_planned_as_stored: test_padded.py::test_two_optimizers_of_one_nnx_model_take_turns
  - natural = jax.tree.map(_natural_shape, state, is_leaf=is_padded)
  + natural = state

core/state/train_state.py
  padded_parameters_created_as_stored: test_padded.py::test_a_second_optimizer_over_padded_parameters
  - params, extra = jax.tree.map(gather_padded, (params, extra), is_leaf=is_padded)
  + pass

core/update/whole.py
  arguments_that_an_optimizer_refuses_are_errors:
    test_extra_args.py::test_a_part_of_an_optimizer_gets_the_arguments_that_it_takes
  - if found is None or found[1] in given or found[1] not in extra:
  + if True:
  notes_on_every_error_of_an_optimizer:
    test_extra_args.py::test_an_error_of_an_optimizer_that_has_nothing_to_do_with_its_arguments_is_its_own
  - if _compares_trees(error):
  + if True:
  optimizer_not_told_the_loss: test_extra_args.py::test_a_train_step_hands_over_the_loss_and_the_gradients
  - return {} if value is None else {"value": value, "grad": grads}
  + return {}

integrations/nnx.py
  raw_nnx_leaves_chosen_by_their_stored_shape: test_nnx.py::test_raw_arrays_chosen_by_path_and_size_train_like_plain_nnx
  - nnx.split(model, nnx.Any(lambda path, _: path in padded, optimizer.wrt), nnx.Param, ...)
  + nnx.split(model, optimizer.wrt, nnx.Param, ...)

core/step/inputs.py
  layout_of_another_plan_not_seen: test_padded.py::test_a_step_refuses_leaves_that_another_plan_laid_out
  - if isinstance(x, Padded) and x.cut != leaf.cut:
  + if False:

core/base/compat.py
  placeholders_of_structure_errors_dropped:
    test_padded.py::test_the_gradient_that_a_line_search_keeps_is_that_of_the_stored_parameters
  - return type(type(x)).__name__ == "LeafMeta"
  + return False
  out_sharding_dropped: test_explicit_axes.py::test_what_the_model_says_is_a_constraint
  - said = sharding_said(eqn)
  + said = None

core/state/next_state.py
  own_update_not_told_the_loss: test_extra_args.py::test_a_train_step_hands_over_the_loss_and_the_gradients
  - applied=applied, value=value)
  + applied=applied)

core/update/run.py
  line_search_loses_what_it_closes_over:
    test_extra_args.py::test_a_function_for_a_line_search_may_close_over_traced_values
  - dict(zip(self.split.jaxpr.constvars, program.consts, strict=True))
  + dict(zip(self.split.jaxpr.constvars, map(jnp.zeros_like, program.consts), strict=True))

core/step/row_check.py
  examples_averaged: test_row_check.py::test_predictions_of_an_evaluation_step_are_refused
  - if not facts.row_dims or mark in (Weighted, PerExample):
  + if True:

core/jaxpr/row_facts.py
  function_of_a_sum_taken_for_one_of_a_row: test_coupling.py::test_the_line_that_couples_rows_is_found
  - eqn, how) if total.kind is RowKind.LINEAR else total
  + eqn, how) if False else total
  counts_of_rows_are_constants: test_marks.py::test_what_has_no_extreme_and_is_no_constant_is_named
  - not self.reads and self.growth in (0, -math.inf)
  + not self.reads

core/jaxpr/growth.py
  means_are_sums: test_row_check.py::test_a_sum_is_a_mean_if_its_factor_follows_the_number_of_rows
  - return float(np.log2(two / one)) if are_numbers else UNKNOWN
  + return 0.0

core/jaxpr/row_rules.py
  any_quotient_is_a_mean: test_row_check.py::test_a_plain_mean_is_known_from_one_trace
  - and bool(divisor.val == terms)

core/arrays/collectives.py
  maxima_lose_what_is_not_a_number: test_marks.py::test_what_is_not_a_number_is_not_lost
  - jnp.where(lax.pmax(jnp.isnan(x)
  + jnp.where(0 * lax.pmax(jnp.isnan(x)

core/jaxpr/rows.py
  equal_over_some_axes: test_rows.py::test_a_reduction_over_some_axes_of_the_batch_does_not_make_values_equal
  - self.axes <= names
  + self.axes & names
  vmapped_axes_stay: test_rows.py::test_dimensions_that_hold_rows_are_followed
  - [summed(x, dims) for x in ins]
  + ins

core/base/guard.py
  checks_that_fail_stop_steps: test_row_check.py::test_a_check_that_fails_stops_no_step
  - return None
  + raise

core/layout/route.py
  reduction_doubled: test_engine.py::test_gradients_equal_plain_jax_at_stage_3 -k jit_casting
  - x = hop.reduce(x, cut)
  + x = hop.reduce(x + x, cut)
  replicas_not_summed: test_engine.py::test_gradients_equal_plain_jax_at_every_stage
  - if self.sum == "copy":
  -             return lax.psum(x, self.axis)
  + if self.sum == "copy":
  +             return x
  predivide_dropped: test_loss_scale.py::test_sums_over_devices_do_not_overflow
  - return x if self.predivide == 1 else x / self.predivide
  + return x

core/layout/cut.py
  gathered_along_other_axes: test_model_axis.py::test_parts_survive_what_is_done_to_shards
  - if not before:
  + if True:
  stored_size_rounded_down: test_layout.py::test_every_cut
  - return -(-self.natural_size // number) * number
  + return max(1, self.natural_size // number) * number

core/plan/param_leaves.py
  stored_blocks_follow_the_devices:
    test_quantized_base.py::test_an_integer_base_keeps_its_bits_where_its_numbers_would_be_cut_otherwise
  - choose_packed_cut(param.cut) if
  + param.cut if
  threshold_excluded: test_plan.py::test_persistence_threshold_counts_elements_and_includes_the_limit
  - size > config.persistence_threshold:
  + size >= config.persistence_threshold:

core/plan/opt_leaves.py
  optimizer_state_whole: test_plan.py::test_optimizer_leaf_is_cut_like_its_parameter
  - base=grad.base, cut=grad.cut, reason=grad.reason)
  + base=grad.base, reason=grad.reason)
  optimizer_state_taken_as_it_is: test_plan.py::test_an_optimizer_is_traced_for_one_parameter_of_each_kind
  - for n, x in made.items()}:
  + for n, x in made.items()} and some is None:

core/layout/set_mesh.py
  states_mesh_is_not_set: test_set_mesh.py::test_calls -k explicit-step
  - if not (is_foreign(compat.NO_MESH) if own is None else _departs(own)):
  + if True:
  results_stay_on_the_states_mesh: test_set_mesh.py::test_calls -k explicit-step
  - if not explicit_axes(current) or current.manual_axes or _only([tree]) is not None:
  + if True:
  inputs_keep_their_mesh: test_set_mesh.py::test_calls -k explicit-steps_in_jit
  - if not is_of_other_mesh(x):
  + if True:
  records_run_while_a_mesh_is_set: test_set_mesh.py::test_calls -k explicit-on_disk
  - found.add(compat.NO_MESH if plan.has_records else mesh)
  + found.add(mesh)

core/layout/mesh.py
  rows_of_a_device_are_cut_in_types: test_explicit_axes.py::test_what_the_model_says_is_a_constraint
  - sizes = tuple(1 if name in names else mesh.shape[name] for name in mesh.axis_names)
  + sizes = tuple(mesh.shape[name] for name in mesh.axis_names)

core/engine/trace.py
  parameters_lose_their_types: test_explicit_axes.py::test_calls_beside_steps
  - sharding = NamedSharding(plan.loss_mesh, spec) if any(spec) else None
  + sharding = None
  rows_divided_among_devices_that_share_them: test_context.py::test_a_loss_of_parts_of_rows_equals_one_device
  - specs = [PartitionSpec(row_axes(plan.config)) if
  + specs = [PartitionSpec(batch_axes(plan.config)) if

core/state/init.py
  states_are_born_whole_along_other_axes: test_expert_parallel.py::test_the_plan_says_both_axes
  - kinds[i] = kinds[i].update(sharding=sharding)
  + pass

core/engine/gradients.py
  weights_of_parts_of_rows_not_summed: test_context.py::test_a_loss_of_parts_of_rows_equals_one_device
  - batch_axes(config),
  + row_axes(config),
""")
