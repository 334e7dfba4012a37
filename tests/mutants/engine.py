"""Faults of the engine: what is reduced, gathered and held, and where."""

from tests.mutants.mutant import faults

MUTANTS = faults(r"""
core/engine/trace.py
  micro_batches_traced_whole: test_passes.py::test_a_traced_loss_has_whole_parameters_and_the_rows_of_one_device
  - parts = num_row_shards(plan.mesh, plan.config) * accumulate_steps
  + parts = num_row_shards(plan.mesh, plan.config)

core/engine/recompute.py
  blocks_keep_nothing: test_blocks.py::test_each_block_keeps_its_products_alone
  - apply, wrap = compat.bind, functools.partial(jax.checkpoint, policy=keeps_heavy)
  + apply, wrap = compat.bind, jax.checkpoint
  policies_shared: test_sharing.py::test_what_is_kept_and_what_is_fenced_may_differ
  - (self.remat, prevent_cse, id(policy))
  + (self.remat,)

core/jaxpr/structure.py
  minus_zero_is_zero: test_sharing.py::test_what_is_the_same
  - return type(value), np.asarray(value).dtype, np.asarray(value).tobytes()
  + return type(value), np.asarray(value).dtype, complex(np.ravel(value)[0])

core/engine/differentiate.py
  weight_not_differentiated: test_passes.py::test_a_weight_that_depends_on_parameters_is_differentiated
  - objective = total - _global_loss(total, fixed, sums) * weight
  + objective = total
  values_of_the_loss_closed_over: test_engine.py::test_a_rule_that_closes_over_a_value_of_the_loss_is_named
  - raise _captures(traced.jaxpr, value, line)
  + _captures(traced.jaxpr, value, line)

core/step/inputs.py
  every_constant_reported: test_errors.py::test_small_arrays_that_the_loss_closes_over_are_fine
  - max(plan.config.persistence_threshold, SMALL)
  + plan.config.persistence_threshold

core/base/compat.py
  values_around_the_step_refused: test_engine.py::test_values_from_around_the_step_may_be_closed_over
  - isinstance(x, jax.core.Tracer) and not any(x._trace is trace for trace in live)
  + isinstance(x, jax.core.Tracer)

core/engine/gradient_rules.py
  widened_before_reduced: test_passes.py::test_a_gradient_is_reduced_before_it_is_widened
  - if are_floating and widens(old, new) else None
  + if are_floating and widens(new, old) else None
  tied_reduced_per_use: test_passes.py::test_a_tied_gradient_is_summed_first_but_not_across_a_loop_over_layers
  - (reduction.by_use and def_use.is_loop_between(x, y))
  + reduction.by_use
  tied_held_across_a_loop: test_passes.py::test_a_tied_gradient_is_summed_first_but_not_across_a_loop_over_layers
  - (reduction.by_use and def_use.is_loop_between(x, y))
  + False
  shards_read_by_others: test_passes.py::test_what_something_else_reads_is_no_shard
  - and self._uses[atom] == 1
  any_loop_stands_between: test_passes.py::test_a_tied_gradient_is_summed_first_but_not_across_a_loop_over_layers
  - x.primitive.name == "scan" and mixes(x)
  + x.primitive.name == "scan"

core/engine/reduce_early.py
  turns_always_add_shards: test_reductions.py::test_each_gradient_is_reduced_once -k constant_of_a_loop
  - return int(eqn.params["length"]) * num_reduced <= math.prod(how.cut.shape)
  + return True

core/engine/roles.py
  shards_kept_as_reduced: test_reductions.py::test_shards_of_uses_are_summed_in_the_accumulate_dtype
  - dtype = jnp.dtype(self.sum_dtype)
  + dtype = jnp.dtype(self.sums.dtype_of(self.leaf.compute_dtype))
  reduced_in_every_micro_batch: test_passes.py::test_the_roles_of_the_stages
  - is_cut, is_cut and not reduce_last)
  + is_cut, is_cut)
  stage_1_reduces_by_use: test_reductions.py::test_each_gradient_is_reduced_once -k constant_of_two_loops
  - by_use = self.stage > 1
  + by_use = self.stage > 0
  whole_parameters_not_awaited: test_waits.py::test_the_backward_loop_waits_for_the_gradient_of_the_head
  - is_awaited = is_sharded or self.stage < 3
  + is_awaited = is_sharded

core/engine/walk.py
  held_into_the_backward_pass: test_passes.py::test_a_weight_that_is_computed_from_itself_is_gathered_once_in_each_pass
  - self.held.drop()
  + pass
  nothing_kept: test_collectives.py::test_what_is_recomputed_gathers_no_parameter_a_third_time
  - if new and not self.keeps:
  + if new:
  blocks_gather_per_use: test_collectives.py::test_what_is_recomputed_gathers_no_parameter_a_third_time
  - order=self.order.enter_block(), held=HeldParameters(keeps=True)
  + order=self.order.enter_block(), held=HeldParameters(keeps=False)
  tables_traced_at_each_use: test_passes.py::test_a_table_made_of_literals_is_traced_once_in_each_pass_not_at_each_use
  - if x not in self._constants:
  + if True:
  constraints_dropped: test_model_axis.py::test_shardings_of_calls_are_constraints
  - return constrain_lazy(x, spec) if is_lazy(x) else lax.with_sharding_constraint(x, spec)
  + return x
  parameters_that_stay_dropped: test_keep.py::test_parameters_that_stay_are_gathered_once
  - if k in needed or self._params[k].stays}
  + if k in needed}

core/engine/placed.py
  gathers_wide: test_precision.py::test_no_gather_of_the_loss_moves_fp32
  - gather_param(round_without_derivative(shard, dtype), cut, route)
  + gather_param(shard, cut, route).astype(dtype)
  names_of_parameters_lowered: test_sharing.py::test_parameters_of_a_kind_are_gathered_and_reduced_by_one_function
  - return lambda *xs, path="", **params: once(tuple(sorted(params.items())), *xs)
  + return rule

core/engine/lazy.py
  chains_deferred_without_end: test_passes.py::test_a_long_chain_of_parameters_alone_is_computed_once
  - MAX_DEFERRED = 16
  + MAX_DEFERRED = 10**9
  shared_leaf_gathered_twice: test_passes.py::test_a_parameter_that_goes_into_a_call_twice_is_gathered_once
  - i = index.setdefault(x, len(leaves))
  + i = len(leaves)

core/engine/shard_rules.py
  sliced_along_the_cut: test_reductions.py::test_each_gradient_is_reduced_once -k in_columns_1
  - if lazy.cut.cuts(d) and (start[d],
  + if lazy.cut.flat and lazy.cut.cuts(d) and (start[d],
  second_rounding_dropped: test_passes.py::test_each_rounding_of_a_chain_of_casts_happens
  - return dataclasses.replace(lazy, wire_dtype=new, dtype=new) if is_as_stored else None
  + return dataclasses.replace(lazy, wire_dtype=new, dtype=new)
  narrower_range_counts_as_wider: test_passes.py::test_each_rounding_of_a_chain_of_casts_happens
  - of_old.nmant <= of_new.nmant and of_old.minexp >= of_new.minexp and of_old.maxexp <= of_new.maxexp
  + of_old.nmant <= of_new.nmant
  a_tied_head_that_stays_gathered_twice: test_keep.py::test_parameters_that_stay_are_gathered_once
  - if lazy.stays:  # see
  + if False:  # see

core/engine/loops.py
  this_row_for_the_next: test_prefetch.py::test_gradients_equal_plain_jax -k scan_reversed
  - _slice_row(self.params[j], index + step)
  + _slice_row(self.params[j], index)
  last_turn_gathers_in_vain: test_prefetch.py::test_the_last_turn_gathers_little_in_vain
  - MOST_IN_VAIN = 1 / 32
  + MOST_IN_VAIN = 1.0
  rows_not_kept_for_the_backward_loop:
    test_passes.py::test_what_the_loss_recomputes_itself_is_gathered_as_often_as_the_plan_says
  - if is_cut(stack) and stack.stays else None
  + if False else None
""")
