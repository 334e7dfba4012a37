"""Faults of what a step keeps, of rows of tables, and of kernels."""

from tests.mutants.mutant import faults

MUTANTS = faults(r"""
core/engine/kept_blocks.py
  scores_of_kept_blocks_recomputed: test_keep.py::test_no_product_of_the_last_blocks_is_recomputed
  - functools.partial(jax.checkpoint, policy=keeps_products)
  + jax.checkpoint
  products_kept_on_tpus: test_keep.py::test_kept_blocks_are_as_written_where_the_compiler_fuses_products
  - if has_loop or fuses_products:
  + if has_loop:
  weights_named: test_keep.py::test_weights_of_batched_products_are_not_kept
  - comes = [not compat.is_literal(v) and v in from_products for v in eqn.invars]
  + comes = [True for v in eqn.invars]
  stacks_kept_to_be_copied: test_keep.py::test_a_loop_whose_shares_are_read_in_another_layout_is_not_kept
  - not any(map(_copies_shares, attention))
  + True

core/jaxpr/repeats.py
  complex_results_kept: test_keep.py::test_complex_numbers_are_not_kept
  - can_be_saved(compat.result_types(primitive, avals, params))
  + can_be_saved(avals)
  all_lanes_of_statistics_saved: test_kernels.py::test_one_lane_of_the_statistics_is_saved
  - is_kept |= primitive.name == "slice" and
  + is_kept &= primitive.name != "slice" or not

core/base/compat.py
  late_operations_forgotten: test_high_primitives.py::test_layers_with_such_operations_train_at_stage_3
  - effects=new_effects)
  + effects=new_effects, is_high=False)
  layers_without_jvp_recomputed: test_high_primitives.py::test_layers_with_such_operations_train_at_stage_3
  - all(kind.jvp is not HighPrimitive.jvp for kind in high)
  + True
  literals_of_kernels_name_their_mesh: test_kernels.py::test_heads_over_another_axis
  - return literal(value_of(atom), _here(atom.aval))
  + return literal(atom.val, _here(atom.aval))

core/engine/recompute.py
  loops_keep_no_operands: test_keep.py::test_a_loop_that_is_kept_saves_what_its_batched_products_read
  - apply=naming_operands(()) if keeps else compat.bind
  + apply=compat.bind
  one_block_too_few_kept: test_keep.py::test_no_product_of_the_last_blocks_is_recomputed
  - max(0, total - remat.blocks)
  + max(0, total + 1 - remat.blocks)

analysis/fill.py
  filled_over_the_limit: test_fill.py::test_the_compiler_has_the_last_word
  - fits = figures.peak <= limit
  + fits = True

estimate/keeping.py
  kept_beyond_the_share: test_kept_by_default.py::test_as_many_blocks_stay_as_fit
  - return choice.peak <= KEPT_SHARE * limit
  + return True
  more_kept_than_plain_jax_saves: test_kept_by_default.py::test_no_more_is_kept_than_plain_jax_saves
  - (sum(x <= left for x in itertools.accumulate(more)),
  + (total,
  large_last_blocks_as_written: test_kept_by_default.py::test_large_last_blocks_are_not_left_as_written
  - POSTPONED * written[-1].num_bytes <= left
  + True
  moved_values_take_memory: test_kept_by_default.py::test_nothing_is_estimated_where_all_values_of_the_loss_fit
  - own = 0 if eqn.primitive.name in MOVES else
  + own =
  blocks_sought_once: test_kept_by_default.py::test_as_many_blocks_stay_as_fit
  - for _ in range(SECANTS):
  + for _ in range(0):
  rows_kept_by_default: test_kept_by_default.py::test_rows_of_stacks_do_not_stay
  - kept = [leaf for leaf in cut if leaf.scan_dim is None or leaf.param.shape not in looped]
  + kept = cut

machines/limits.py
  kept_beside_nothing_else: test_memory_left.py::test_a_second_state_takes_its_share
  - others = 0 if own is None else
  + others = 0 if True else

core/step/choice.py
  kept_whatever_the_compiler_says: test_memory_left.py::test_a_program_that_needs_more_than_estimated_does_not_run
  - fits = self._agreement.least(state.tx.plan, *given, left) >= 0
  + fits = self._agreement.least(state.tx.plan, *given, left) is not None

core/processes/agree.py
  processes_keep_what_fits_in_the_first: test_multiprocess.py::test_processes_keep_what_fits_in_all_of_them
  - self.number = min(message.number for message in entries.values())
  + self.number = mine.number

core/step/jitted.py
  kept_whatever_the_batch: test_kept_by_default.py::test_a_larger_batch_is_decided_anew
  - if jitted is None or shapes != expected.shapes:
  + if jitted is None:
  arrays_of_the_last_state_are_not_looked_at: test_errors_in_states.py::test_consumed_state_is_refused
  - elif compat.CRASHES_ON_DELETED and plan.mesh.size > 1:
  + elif False:

core/layout/lookups.py
  rows_of_others_added: test_lookups.py::test_lookups_equal_plain_jax -k 3-3-0
  - at = jnp.where((at >= 0) & (at < size) & (ids >= 0), at, size)
  + at = jnp.where((at < size) & (ids >= 0), at, size)

core/engine/loops.py
  tables_gathered_before_loops: test_lookups.py::test_lookups_in_loops_equal_plain_jax -k in_a_loop-3-8-1
  - (is_constant(x) or is_looked_up(x))
  + is_constant(x)

core/jaxpr/lookups.py
  lookups_of_a_loop_counted_once: test_lookups.py::test_a_table_travels_whole_if_all_its_lookups_would_send_more
  - tables[0].add(times * lookup.num_rows,
  + tables[0].add(lookup.num_rows,

attention/kernels.py
  kernels_of_recomputed_layers_run_twice: test_fused_attention.py::test_recomputed_layers_do_not_run_their_kernel_twice
  - return prim.name == "custom_vjp_call" and _has_kernel(params["call_jaxpr"])
  + return False

core/jaxpr/kernels.py
  hidden_blocks_of_attention_count: test_kernel_costs.py::test_blocks_that_a_mask_hides_do_not_count
  - if index is None:
  + if True:
  rows_stay_rows_in_blocks_of_several: test_kernels.py::test_a_kernel_over_the_whole_batch_is_unknown
  - if len(places) != 1 or None in places or
  + if

attention/exchange.py
  late_pieces_do_not_see_early_ones: test_windows_in_parts.py::test_windows_see_what_one_device_sees
  - back + lax.ppermute(ends[0], self.axis, turn)
  + back
  whole_pieces_are_exchanged: test_windows_in_parts.py::test_windows_alone_are_sent
  - max(0, size - left) :
  + 0:

estimate/block_costs.py
  what_judges_blocks_shares_no_function: test_kept_by_default.py::test_what_judges_blocks_traces_them_for_the_step
  - functions_of(jaxpr)
  + type(functions_of(jaxpr))()
""")
