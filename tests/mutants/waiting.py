"""Faults of the rules by which operations wait for each other."""

from tests.mutants.mutant import faults

MUTANTS = faults(r"""
core/engine/order.py
  second_gathers_do_not_wait: test_waits.py::test_operands_of_barriers
  - second_gather = platform.second_gather if differentiates and plan.regathers else None
  + second_gather = None
  large_parameters_wait_for_one_element: test_waits.py::test_operands_of_barriers
  - how == "light" and num_bytes(arrays.values()) <= num_bytes(again.values())
  + False
  twice_the_bound: test_prefetch.py::test_gathers_outside_of_loops_wait_for_earlier_uses -k chain-as_written
  - if ahead > self.limit or i == self._turned_at:
  + if ahead > 2 * self.limit or i == self._turned_at:

core/engine/waits.py
  loops_do_not_wait: test_waits.py::test_the_backward_loop_waits_for_the_gradient_of_the_head
  - eqn = self.delay(eqn, _carried(eqn), self.due + self.latest)
  + pass
  blocks_wait_for_the_next_one: test_waits.py::test_blocks_wait_for_the_gradients_of_the_one_after_the_next
  - self.delay(eqn, cotangent, self.due)
  + self.delay(eqn, cotangent, self.due + self.latest)
  all_joined_parts_wait: test_waits.py::test_what_was_joined_waits_for_what_is_added_later
  - if v in made) > after
  + if v in made) > 0
  joined_parts_wait_for_one_element: test_waits.py::test_what_was_joined_waits_for_what_is_added_later
  - for how in ("barrier", "select"):
  + for how in ("select",):

estimate/traced_collectives.py
  names_end_at_calls: test_traced_collectives.py::test_each_parameter_travels_as_often_as_counted_by_hand
  - eqn, first or eqn.params
  + eqn, eqn.params

analysis/violations.py
  merged_gathers_pass: test_traced_collectives.py::test_what_a_compiler_breaks_is_found
  - key[0] == kind and lacks[key] > MISSING * self.params
  + False
  merged_uses_are_missing: test_traced_collectives.py::test_gathers_of_one_pass_may_be_merged_but_not_those_of_both
  - round(amount * min(
  + round(amount * max(
  updates_unseen: test_traced_collectives.py::test_what_a_compiler_breaks_is_found
  - bool(group_axes & axes)
  + bool(group_axes & axes) * (UPDATE not in c.op_name)

analysis/schedule.py
  all_branches_take_time: test_hlo.py::test_of_branches_the_longest_counts
  - for branch in branches[:1]:
  + for branch in branches:
  the_least_time_is_that_of_the_longest: test_hlo.py::test_the_shortest_branches_tell_the_least_time
  - reverse=longest)
  + reverse=True)
  updates_run_their_shortest_branch: test_hlo.py::test_of_an_update_the_longest_branch_is_usual
  - longest = self.longest or _part(x.op_name) == "update"
  + longest = self.longest

analysis/collectives.py
  all_branches_send: test_hlo.py::test_of_branches_those_collectives_count_that_send_most
  - for c in branch))[-1:]
  + for c in branch))

core/layout/route.py
  hops_in_the_other_order: test_two_hops.py::test_two_hops_train_like_one_device -k loss_fn-3
  -         for hop in reversed(self._cutting):
  -             shard
  +         for hop in self._cutting:
  +             shard
  gradients_rounded_within_nodes: test_quantization.py::test_reductions_sum_what_each_device_or_node_rounds
  - sums[list(sums)[-1]] = rounds
  + sums = dict.fromkeys(sums, rounds)
  replicas_send_nothing: test_traced_collectives.py::test_micro_batches_and_replicas_count
  -         for hop in self._shared:
  -             found
  +         for hop in self._cutting:
  +             found
  devices_alone_gather: test_two_hops.py::test_the_plan_tells_bytes_by_level
  - if hop.num_parts > 1]
  + if hop.num_parts > 0]

core/engine/placed.py
  late_hops_divide_again: test_two_hops.py::test_late_hops_divide_gradients_once
  - dataclasses.replace(params["sums"], dtype=None, predivide=1)
  + dataclasses.replace(params["sums"], dtype=None)

core/engine/loops.py
  late_rows_unshifted: test_two_hops.py::test_late_hops_change_no_bit
  - parts = [row[None], stack[:-1]] if step < 0 else [stack[1:], row[None]]
  + parts = [stack]

core/layout/blocks.py
  nan_lost_in_rounding: test_quantization.py::test_what_is_not_finite_fills_its_block_alone
  - scale = jnp.where(jnp.isfinite(y).all(axis=-1), scale, jnp.nan)
  + scale = jnp.where(jnp.isfinite(most), scale, 0)

core/update/transformation.py
  new_parameters_in_one_hop: test_two_hops.py::test_only_the_parts_of_devices_cross_nodes
  - len(plan.route.levels) > 1
  + False

core/engine/rules.py
  calls_gather_without_waiting: test_passes.py::test_what_calls_gather_again_is_not_merged_with_what_was_gathered_before
  - again = tuple(i for i, x in enumerate(shared.leaves) if walk.order.was_gathered(x))
  + again = ()
  no_barriers_inside_of_loops: test_passes.py::test_what_a_loop_recomputes_stays_behind_its_barriers
  - if prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse):
  + if walk.depth == 0 and (prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)):

estimate/footprint.py
  on_tpus_gradients_in_loops_do_not_wait: test_postponed.py::test_in_a_loop_they_stay_to_the_end_of_an_iteration
  - if gpu or in_loop else
  + if gpu else
  on_tpus_no_loop_runs_last:
    test_postponed.py::test_on_tpus_loops_run_last_whose_results_the_backward_pass_does_not_need
  - elif t < start and op.inner is not None:
  + elif t < 0:

analysis/compiled_step.py
  fit_judges_by_the_longest_branches: test_confirm.py::test_branches_that_a_usual_step_leaves_out
  - timeline.least, timeline.seconds
  + timeline.seconds, timeline.seconds

estimate/step_time.py
  estimated_times_are_those_of_the_longest_branches: test_step_time.py::test_of_a_conditional_a_usual_step_counts
  - x.times * min(compute_seconds
  + x.times * max(compute_seconds

estimate/buffers.py
  rows_of_any_length_fill_tiles: test_step_time.py::test_rows_of_a_softmax_that_fill_no_tile_are_read_again
  - fills = self.fuses_products or op.row >= FILLED * 2 ** (op.row - 1).bit_length()
  + fills = True
""")
