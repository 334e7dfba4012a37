"""Faults of one line, each with the test that must fail: whether the suite, or a smaller one, still sees them.

    python -m tests.mutants                  # all, on a copy of the repository, one after another
    python -m tests.mutants frozen_zero_is_positive data_order_ignores_epoch

A fault is killed if pytest says that tests failed, not if it cannot collect them; without any fault, which is tried
first, they must all pass. `tests/test_mutants.py` keeps the table true, and with `-m slow` runs all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("jzero", "examples", "tests", "pyproject.toml")
TIMEOUT = 300


class Mutant(NamedTuple):
    """A plausible mistake that changes results or programs.

    Attributes:
      name: What is wrong.
      file: The file, below `jzero/`.
      old: Text that occurs in it once.
      new: What takes its place.
      test: The test that must fail, as `file::function` below `tests/`.
      cases: Which cases of it suffice, as pytest's `-k` takes them; all by default.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    cases: str = ""


MUTANTS = [
    # Padded leaves, and what an optimizer asks for.
    Mutant(
        "optimizer_leaves_are_stored_arrays",
        "plan/plan.py",
        "return self.opt_treedef.unflatten([leaf.box(x) for",
        "return self.opt_treedef.unflatten([x for",
        "test_padded.py::test_functions_of_parameters_gradients_and_optimizer_state_see_one_shape",
    ),
    Mutant(
        "padded_parameters_planned_as_stored",
        "state/shard.py",
        "return jax.tree.map(_natural_shape, train_state, is_leaf=is_padded)",
        "return train_state",
        "test_padded.py::test_two_optimizers_of_one_nnx_model_take_turns",
    ),
    Mutant(
        "padded_parameters_created_as_stored",
        "state/train_state.py",
        "params, extra = jax.tree.map(gather_padded, (params, extra), is_leaf=is_padded)",
        "pass",
        "test_padded.py::test_a_second_optimizer_over_padded_parameters",
        "jzero",
    ),
    Mutant(
        "consumed_leaf_read",
        "layout/padded.py",
        "        self.check_alive()\n",
        "",
        "test_nnx.py::test_input_is_kept_when_sharding_and_consumed_by_a_step",
    ),
    Mutant(
        "layout_of_another_plan_not_seen",
        "step/inputs.py",
        "if is_padded(x) and x.cut != leaf.cut:",
        "if False:",
        "test_padded.py::test_a_step_refuses_leaves_that_another_plan_laid_out",
    ),
    Mutant(
        "placeholders_of_structure_errors_dropped",
        "_compat.py",
        'return type(type(x)).__name__ == "LeafMeta"',
        "return False",
        "test_padded.py::test_the_gradient_that_a_line_search_keeps_is_that_of_the_stored_parameters",
    ),
    Mutant(
        "optimizer_not_told_the_loss",
        "update/extra_args.py",
        'return {"value": value, "grad": grads} if takes and value is not None else {}',
        "return {}",
        "test_extra_args.py::test_a_train_step_hands_over_the_loss_and_the_gradients",
        "plateau",
    ),
    Mutant(
        "own_update_not_told_the_loss",
        "state/next_state.py",
        "applied=applied, value=value)",
        "applied=applied)",
        "test_extra_args.py::test_a_train_step_hands_over_the_loss_and_the_gradients",
        "own_update",
    ),
    Mutant(
        "line_search_loses_what_it_closes_over",
        "update/run.py",
        "dict(zip(jaxpr.constvars, consts, strict=True))",
        "dict(zip(jaxpr.constvars, map(jnp.zeros_like, consts), strict=True))",
        "test_extra_args.py::test_a_function_for_a_line_search_may_close_over_traced_values",
    ),
    # Rows of the batch.
    Mutant(
        "examples_averaged",
        "step/row_check.py",
        "if not facts.row_dims or mark not in (None, Summed):",
        "if True:",
        "test_row_check.py::test_predictions_of_an_evaluation_step_are_refused",
    ),
    Mutant(
        "function_of_a_sum_taken_for_one_of_a_row",
        "jaxpr/row_values.py",
        "if worst is Kind.COUPLED or any(x.kind is Kind.LINEAR for x in values):",
        "if worst is Kind.COUPLED:",
        "test_coupling.py::test_the_line_that_couples_rows_is_found",
        "perplexity",
    ),
    Mutant(
        "equal_over_some_axes",
        "jaxpr/rows.py",
        "self.axes <= names",
        "self.axes & names",
        "test_rows.py::test_a_reduction_over_some_axes_of_the_batch_does_not_make_values_equal",
    ),
    # Collectives.
    Mutant(
        "reduction_doubled",
        "layout/comm.py",
        "lambda x: lax.psum_scatter(x, self.axis,",
        "lambda x: lax.psum_scatter(x + x, self.axis,",
        "test_engine.py::test_gradients_equal_plain_jax_at_stage_3",
        "[plain]",
    ),
    Mutant(
        "replicas_not_summed",
        "layout/comm.py",
        "return sum_along(self.inner.reduce(x, cut), self.axis)",
        "return self.inner.reduce(x, cut)",
        "test_engine.py::test_hybrid_sharding_replicates_the_shards",
        "[3]",
    ),
    Mutant(
        "predivide_dropped",
        "layout/sums.py",
        "return x if self.predivide == 1 else x / self.predivide",
        "return x",
        "test_loss_scale.py::test_sums_over_devices_do_not_overflow",
    ),
    Mutant(
        "gathered_along_other_axes",
        "layout/parts.py",
        "    if not before:\n",
        "    if True:\n",
        "test_model_axis_constraints.py::test_parts_survive_what_is_done_to_shards",
        "of_its_transpose",
    ),
    # Layout and plan.
    Mutant(
        "stored_size_rounded_down",
        "layout/cut.py",
        "return -(-self.natural_size // number) * number",
        "return max(1, self.natural_size // number) * number",
        "test_layout.py::test_every_device_holds_an_equal_part_and_together_they_hold_the_leaf",
    ),
    Mutant(
        "scanned_dimension_cut",
        "plan/choice.py",
        "if d != scan_dim and d not in taken_dims]",
        "if d not in taken_dims]",
        "test_layout.py::test_scanned_dimensions_and_those_of_other_axes_are_never_cut",
    ),
    Mutant(
        "never_flattened",
        "plan/choice.py",
        "if cut.padding > MAX_PADDING * size and",
        "if cut.padding > MAX_PADDING * size * size and",
        "test_layout.py::test_known_leaves",
    ),
    Mutant(
        "threshold_excluded",
        "plan/param_leaves.py",
        "size > config.persistence_threshold:",
        "size >= config.persistence_threshold:",
        "test_plan.py::test_persistence_threshold_counts_elements_and_includes_the_limit",
    ),
    Mutant(
        "optimizer_state_whole",
        "plan/opt_leaves.py",
        "base=grad.base, cut=grad.cut, reason=grad.reason)",
        "base=grad.base, reason=grad.reason)",
        "test_plan_owners.py::test_optimizer_leaf_is_cut_like_its_parameter",
        "adamw",
    ),
    # The engine: the loss as a jaxpr.
    Mutant(
        "micro_batches_traced_whole",
        "engine/trace.py",
        "parts = num_batch_shards(plan.mesh, plan.config) * accumulate_steps",
        "parts = num_batch_shards(plan.mesh, plan.config)",
        "test_passes.py::test_a_traced_loss_has_whole_parameters_and_the_rows_of_one_device",
    ),
    Mutant(
        "blocks_keep_nothing",
        "engine/recompute.py",
        "functools.partial(jax.checkpoint, policy=keeps_heavy) if is_cheap",
        "jax.checkpoint if is_cheap",
        "test_blocks.py::test_each_block_keeps_its_products_alone",
    ),
    Mutant(
        "policies_shared",
        "engine/recompute.py",
        "key = self.remat, key, self.structures(common)",
        "key = self.remat, self.structures(common)",
        "test_sharing.py::test_barriers_may_differ",
    ),
    Mutant(
        "minus_zero_is_zero",
        "jaxpr/structure.py",
        "return type(value), np.asarray(value).dtype, np.asarray(value).tobytes()",
        "return type(value), np.asarray(value).dtype, complex(np.ravel(value)[0])",
        "test_sharing.py::test_what_is_the_same",
    ),
    Mutant(
        "weight_not_differentiated",
        "engine/differentiate.py",
        "objective = total - _global_loss(total, fixed, sums) * weight",
        "objective = total",
        "test_passes_recompute.py::test_a_weight_that_depends_on_parameters_is_differentiated",
        "[fp32-2]",
    ),
    Mutant(
        "every_constant_reported",
        "step/inputs.py",
        "max(plan.config.persistence_threshold, SMALL)",
        "plan.config.persistence_threshold",
        "test_errors_in_losses.py::test_small_arrays_that_the_loss_closes_over_are_fine",
    ),
    Mutant(
        "values_around_the_step_refused",
        "_compat.py",
        "isinstance(x, jax.core.Tracer) and not any(x._trace is trace for trace in live)",
        "isinstance(x, jax.core.Tracer)",
        "test_custom_rules.py::test_values_from_around_the_step_may_be_closed_over",
    ),
    Mutant(
        "values_of_the_loss_closed_over",
        "engine/differentiate.py",
        "        raise _captures(traced.jaxpr, value, line)",
        "        _captures(traced.jaxpr, value, line)",
        "test_custom_rules.py::test_a_rule_that_closes_over_a_value_of_the_loss_is_named",
        "scan",
    ),
    # Which gradients are reduced, and where.
    Mutant(
        "widened_before_reduced",
        "engine/gradient_rules.py",
        "if are_floating and widens(old, new) else None",
        "if are_floating and widens(new, old) else None",
        "test_passes.py::test_a_gradient_is_reduced_before_it_is_widened",
    ),
    Mutant(
        "tied_reduced_per_use",
        "engine/gradient_rules.py",
        "(leaving.by_use and makers.is_loop_between(x, y))",
        "leaving.by_use",
        "test_passes.py::test_a_tied_gradient_is_summed_first_but_not_across_a_loop",
    ),
    Mutant(
        "tied_held_across_a_loop",
        "engine/gradient_rules.py",
        "(leaving.by_use and makers.is_loop_between(x, y))",
        "False",
        "test_passes.py::test_a_tied_gradient_is_summed_first_but_not_across_a_loop",
    ),
    Mutant(
        "shards_read_by_others",
        "engine/makers.py",
        "and self._uses[atom] == 1 and",
        "and",
        "test_passes.py::test_what_something_else_reads_is_no_shard",
    ),
    Mutant(
        "turns_always_add_shards",
        "engine/reduce_early.py",
        'return int(eqn.params["length"]) * _count_reduced(tried) <= math.prod(how.cut.shape)',
        "return True",
        "test_reductions.py::test_each_gradient_is_reduced_once",
        "constant_of_a_loop",
    ),
    Mutant(
        "shards_kept_as_reduced",
        "engine/roles.py",
        "dtype, comm, levels = jnp.dtype(self.kept_dtype), self.comm",
        "dtype, comm, levels = jnp.dtype(self.sums.dtype_of(self.leaf.compute_dtype)), self.comm",
        "test_reductions.py::test_shards_of_uses_are_summed_in_the_accumulate_dtype",
    ),
    Mutant(
        "reduced_in_every_micro_batch",
        "engine/roles.py",
        "is_cut, is_cut and not reduce_last))",
        "is_cut, is_cut))",
        "test_passes.py::test_the_roles_of_the_stages",
    ),
    Mutant(
        "stage_1_reduces_by_use",
        "engine/roles.py",
        "by_use = self.stage > 1 ",
        "by_use = self.stage > 0 ",
        "test_reductions.py::test_each_gradient_is_reduced_once",
        "constant_of_two_loops",
    ),
    Mutant(
        "whole_parameters_not_awaited",
        "engine/roles.py",
        "is_awaited = is_held_cut or self.stage < 3",
        "is_awaited = is_held_cut",
        "test_waiting.py::test_the_backward_loop_waits_for_the_gradient_of_the_head",
    ),
    # What the walk gathers and holds.
    Mutant(
        "held_into_the_backward_pass",
        "engine/walk.py",
        "            self.held.drop()",
        "            pass",
        "test_passes.py::test_a_weight_that_is_computed_from_itself_is_gathered_once_in_each_pass",
    ),
    Mutant(
        "nothing_kept",
        "engine/walk.py",
        "if new and not self.keeps:",
        "if new:",
        "test_passes.py::test_the_walk_gathers_where_parameters_are_used",
    ),
    Mutant(
        "blocks_gather_per_use",
        "engine/walk.py",
        "order=self.order.enter_block(), held=HeldParameters(keeps=True)",
        "order=self.order.enter_block(), held=HeldParameters(keeps=False)",
        "test_collectives.py::test_what_is_recomputed_gathers_no_parameter_a_third_time",
    ),
    Mutant(
        "gathers_wide",
        "engine/placed.py",
        "gather_param(round_without_derivative(shard, dtype), cut, comm)",
        "gather_param(shard, cut, comm).astype(dtype)",
        "test_precision.py::test_no_gather_of_the_loss_moves_fp32",
        "None and True",
    ),
    Mutant(
        "chains_deferred_without_end",
        "engine/lazy.py",
        "MAX_DEFERRED = 16\n",
        "MAX_DEFERRED = 10**9\n",
        "test_passes.py::test_a_long_chain_of_parameters_alone_is_computed_once",
    ),
    Mutant(
        "shared_leaf_gathered_twice",
        "engine/bundles.py",
        "i = index.setdefault(x, len(leaves))",
        "i = len(leaves)",
        "test_passes.py::test_a_parameter_that_goes_into_a_call_twice_is_gathered_once",
    ),
    Mutant(
        "sliced_along_the_cut",
        "engine/shard_rules.py",
        "if lazy.cut.cuts(d) and (start[d],",
        "if lazy.cut.flat and lazy.cut.cuts(d) and (start[d],",
        "test_reductions.py::test_each_gradient_is_reduced_once",
        "in_columns_1",
    ),
    Mutant(
        "second_rounding_dropped",
        "engine/shard_rules.py",
        "return dataclasses.replace(lazy, wire_dtype=new, dtype=new) if is_as_stored else None",
        "return dataclasses.replace(lazy, wire_dtype=new, dtype=new)",
        "test_passes_recompute.py::test_each_rounding_of_a_chain_of_casts_happens",
    ),
    Mutant(
        "narrower_range_counts_as_wider",
        "engine/shard_rules.py",
        "of_old.nmant <= of_new.nmant and of_old.minexp >= of_new.minexp and of_old.maxexp <= of_new.maxexp",
        "of_old.nmant <= of_new.nmant",
        "test_passes_recompute.py::test_each_rounding_of_a_chain_of_casts_happens",
    ),
    Mutant(
        "constraints_dropped",
        "engine/meshes.py",
        "return constrain_lazy(x, spec) if is_lazy(x) else lax.with_sharding_constraint(x, spec)",
        "return x",
        "test_model_axis_constraints.py::test_shardings_of_calls_are_constraints",
    ),
    # Loops.
    Mutant(
        "this_row_for_the_next",
        "engine/loops.py",
        "_slice_row(self.params[j], at + step)",
        "_slice_row(self.params[j], at)",
        "test_prefetch.py::test_gradients_equal_plain_jax",
        "scan_reversed",
    ),
    Mutant(
        "last_turn_gathers_in_vain",
        "engine/prefetch.py",
        "MOST_IN_VAIN = 1 / 32",
        "MOST_IN_VAIN = 1.0",
        "test_prefetch_reach.py::test_the_last_turn_gathers_little_in_vain",
    ),
    Mutant(
        "rows_not_kept_for_the_backward_loop",
        "engine/loops.py",
        "if is_cut(stack) and stack.stays else None",
        "if False else None",
        "test_passes_recompute.py::test_what_the_loss_recomputes_itself_is_gathered_as_often_as_the_plan_says",
        "False-True",
    ),
    Mutant(
        "parameters_that_stay_dropped",
        "engine/walk.py",
        "if k in needed or self._known[k].stays}",
        "if k in needed}",
        "test_keep.py::test_parameters_that_stay_are_gathered_once",
        "loss_fn",
    ),
    Mutant(
        "a_tied_head_that_stays_gathered_twice",
        "engine/shard_rules.py",
        "    if lazy.stays:  # see",
        "    if False:  # see",
        "test_keep.py::test_parameters_that_stay_are_gathered_once",
        "loss_fn",
    ),
    Mutant(
        "one_block_too_few_kept",
        "engine/recompute.py",
        "max(0, num_blocks(jaxpr) - remat.blocks)",
        "max(0, num_blocks(jaxpr) + 1 - remat.blocks)",
        "test_keep.py::test_the_last_blocks_are_not_recomputed",
        "loss_fn",
    ),
    Mutant(
        "filled_over_the_limit",
        "analysis/fill.py",
        "fits = found.peak <= limit",
        "fits = True",
        "test_fill.py::test_the_compiler_has_the_last_word",
        "1.3",
    ),
    # Waiting rules.
    Mutant(
        "no_fence",
        "engine/order.py",
        "fence = platform.fence if differentiates and plan.regathers else None",
        "fence = None",
        "test_fences.py::test_operands_of_barriers",
    ),
    Mutant(
        "large_parameters_wait_for_one_element",
        "engine/order.py",
        'self.fence == "light" and num_bytes(arrays.values()) > num_bytes(again.values())',
        'self.fence == "light"',
        "test_fences.py::test_operands_of_barriers",
        "tpu",
    ),
    Mutant(
        "loops_do_not_wait",
        "engine/waits.py",
        "eqn = self.delay(eqn, _carried(eqn), due)",
        "pass",
        "test_waiting.py::test_the_backward_loop_waits_for_the_gradient_of_the_head",
        "gpu",
    ),
    Mutant(
        "names_end_at_calls",
        "analysis/sent.py",
        "yield Sent(eqn, first or eqn.params",
        "yield Sent(eqn, eqn.params",
        "test_sent.py::test_each_parameter_travels_as_often_as_counted_by_hand",
        "False-None",
    ),
    Mutant(
        "merged_gathers_pass",
        "analysis/violations.py",
        "key[0] == kind and lacks[key] > MISSING * self.params",
        "False",
        "test_sent.py::test_what_a_compiler_breaks_is_found",
    ),
    Mutant(
        "updates_unseen",
        "analysis/violations.py",
        "bool(found & axes)",
        "bool(found & axes) * (UPDATE not in c.op_name)",
        "test_sent.py::test_what_a_compiler_breaks_is_found",
        "update",
    ),
    Mutant(
        "all_branches_take_time",
        "analysis/schedule.py",
        "key=self.seconds_alone)[-1:]",
        "key=self.seconds_alone)",
        "test_hlo.py::test_of_branches_the_longest_counts",
    ),
    Mutant(
        "all_branches_send",
        "analysis/collectives.py",
        "for c in found))[-1:]",
        "for c in found))",
        "test_hlo.py::test_of_branches_those_collectives_count_that_send_most",
    ),
    Mutant(
        "hops_in_the_other_order",
        "layout/comm.py",
        "for hop in (self.between, self.within):",
        "for hop in (self.within, self.between):",
        "test_two_hops.py::test_two_hops_train_like_one",
        "loss_fn-3",
    ),
    Mutant(
        "late_rows_unshifted",
        "engine/loops.py",
        "parts = [row[None], stack[:-1]] if step < 0 else [stack[1:], row[None]]",
        "parts = [stack]",
        "test_two_hops.py::test_late_hops_change_no_bit",
    ),
    Mutant(
        "nan_lost_in_rounding",
        "layout/blocks.py",
        "scale = jnp.where(jnp.isfinite(y).all(axis=-1), scale, jnp.nan)",
        "scale = jnp.where(jnp.isfinite(most), scale, 0)",
        "test_quantized_blocks.py::test_what_is_not_finite_fills_its_block_alone",
    ),
    Mutant(
        "gradients_rounded_within_nodes",
        "layout/comm.py",
        "comm = TwoHop(within, slow,",
        "comm = TwoHop(slow if rounds == 'none' else Rounded(within, rounds), slow,",
        "test_quantization.py::test_reductions_sum_what_each_device_or_node_rounds",
    ),
    Mutant(
        "new_parameters_in_one_hop",
        "update/transformation.py",
        "len(plan.comm.shard_axes) > 1",
        "False",
        "test_two_hops.py::test_only_the_parts_of_devices_cross_nodes",
        "1",
    ),
    Mutant(
        "replicas_send_nothing",
        "layout/comm.py",
        "*([over_groups] if self.num_replicas > 1 else [])",
        "*[]",
        "test_sent.py::test_micro_batches_and_replicas_count",
    ),
    Mutant(
        "blocks_wait_for_the_next_one",
        "engine/waits.py",
        "due = self.last if self.is_in_blocks else self.reduced",
        "due = self.reduced",
        "test_fences.py::test_blocks_wait_for_the_gradients_of_the_one_after_the_next",
    ),
    Mutant(
        "twice_the_bound",
        "engine/order.py",
        "if ahead > self.limit or i == self._turned_at:",
        "if ahead > 2 * self.limit or i == self._turned_at:",
        "test_prefetch_reach.py::test_gathers_outside_of_loops_wait_for_earlier_uses",
        "plain",
    ),
    Mutant(
        "calls_gather_without_a_fence",
        "engine/rules.py",
        "again = tuple(i for i, x in enumerate(bundle.leaves) if walk.order.was_gathered(x))",
        "again = ()",
        "test_passes_recompute.py::test_what_calls_gather_again_is_not_merged_with_what_was_gathered_before",
    ),
    Mutant(
        "no_barriers_inside_of_loops",
        "engine/rules.py",
        "        if given if isinstance(given, bool) else any(given):\n",
        "        if walk.depth == 0 and (given if isinstance(given, bool) else any(given)):\n",
        "test_passes.py::test_what_a_loop_recomputes_stays_behind_its_barriers",
    ),
    # Micro-batches, sums and norms.
    Mutant(
        "mean_without_micro_batches",
        "engine/gradients.py",
        "parts = num_batch_shards(plan.mesh, plan.config) * self.micro.steps",
        "parts = num_batch_shards(plan.mesh, plan.config)",
        "test_engine_loops.py::test_accumulated_micro_batches_equal_the_whole_batch",
        "[2]",
    ),
    Mutant(
        "unscaled_without_predivide",
        "engine/gradients.py",
        "unscale = inverse * divisor * sums.predivide / loss_scale[0]",
        "unscale = inverse * divisor / loss_scale[0]",
        "test_loss_scale.py::test_sums_over_devices_do_not_overflow",
    ),
    Mutant(
        "devices_draw_alike",
        "engine/gradients.py",
        "key = [jax.random.fold_in(k, index) for k in key]",
        "key = list(key)",
        "test_engine_values.py::test_dropout_key_is_folded_with_the_device",
        "[1]",
    ),
    Mutant(
        "norm_sums_whole_leaves",
        "engine/norms.py",
        "            whole = whole + square",
        "            cut = cut + square",
        "test_accumulation.py::test_clip_norm_equals_optax_clipping",
        "[0]",
    ),
    Mutant(
        "micro_batches_start_from_the_state_before_the_step",
        "engine/gradients.py",
        "inputs[i] = self._as_input(i, x)",
        "inputs[i] = fixed[i]",
        "test_written_state.py::test_written_state_is_what_a_loop_over_the_micro_batches_leaves",
    ),
    Mutant(
        "summed_state_counts_the_value_before_on_each_device",
        "engine/merge.py",
        "return before + sum_over(x.astype(dtype) - before, sums)",
        "return sum_over(x.astype(dtype), sums)",
        "test_written_state.py::test_written_state_is_what_a_loop_over_the_micro_batches_leaves",
    ),
    Mutant(
        "numbers_of_rows_pass",
        "engine/merge.py",
        "suspect and text != _part_of(other, i)[0]",
        "suspect and False",
        "test_written_state.py::test_values_of_one_devices_rows_are_refused_by_name",
    ),
    Mutant(
        "rows_are_averaged",
        "engine/merge.py",
        "    if facts.row_dims:\n",
        "    if False:\n",
        "test_written_state.py::test_values_of_one_devices_rows_are_refused_by_name",
    ),
    # The update.
    Mutant(
        "frozen_zero_is_positive",
        "update/whole.py",
        "np.float32(-0.0)",
        "np.float32(0.0)",
        "test_trained.py::test_negative_zeros_of_frozen_leaves_stay_negative",
    ),
    Mutant(
        "zero_times_infinity_is_zero",
        "plan/trainable.py",
        'name == "mul" and any(zero) and _finite_elsewhere(eqn, zero)',
        'name == "mul" and any(zero)',
        "test_trained.py::test_what_is_not_frozen_is_trained",
        "times and zero",
    ),
    Mutant(
        "skipped_step_applied",
        "state/next_state.py",
        "new = _update(new, update.grads, update.applied, update.value, disk)",
        "new = _update(new, update.grads, None, update.value, disk)",
        "test_loss_scale.py::test_a_skipped_step_changes_nothing_but_the_scale",
        "[1-0]",
    ),
    Mutant(
        "skipped_gathered_parameters",
        "update/whole.py",
        "return new if applied is None else jnp.where(applied, new, old)",
        "return new",
        "test_loss_scale.py::test_a_skipped_step_changes_nothing_but_the_scale",
        "[1-0]",
    ),
    Mutant(
        "skipped_own_update_applied_on_the_host",
        "state/next_state.py",
        "state.replace(tx=dataclasses.replace(tx, applied=applied, value=value), ",
        "state.replace(tx=dataclasses.replace(tx, value=value), ",
        "test_offload_optimizer.py::test_a_skipped_step_changes_nothing_on_the_host",
        "Cleans",
    ),
    Mutant(
        "sums_of_optax_not_laid_out",
        "update/transformation.py",
        "return _compat.when_added(update, lambda total: leaf.store(total.astype(leaf.dtype)))",
        "return update",
        "test_engine_loops.py::test_two_updates_of_parameters_held_whole_keep_their_layout",
    ),
    Mutant(
        "padding_updated",
        "update/chunks.py",
        "        if cut is None or not cut.is_padded:\n            return x",
        "        if True:\n            return x",
        "test_offload_optimizer.py::test_padding_stays_zero",
    ),
    Mutant(
        "padding_counts_in_sums",
        "update/chunks.py",
        "part.without_padding(product, nothing)",
        "part.without_padding(product, 0)",
        "test_offload_optimizer.py::test_numbers_over_state_on_the_host_equal_one_device",
        "device",
    ),
    Mutant(
        "devices_draw_noise_of_one",
        "update/chunks.py",
        "lambda dim: first[dim] + chunk_index(",
        "lambda dim: 0 * first[dim] + chunk_index(",
        "test_offload_optimizer.py::test_stochastic_rounding_draws_the_same_bits_wherever_it_runs",
    ),
    Mutant(
        "muon_on_shards",
        "jaxpr/primitives.py",
        "cumprod cumsum dot_general eig",
        "cumprod cumsum eig",
        "test_collectives.py::test_muon_multiplies_whole_matrices",
    ),
    # Matrices of an update.
    Mutant(
        "dense_matrices_are_sliced",
        "jaxpr/batches.py",
        '_require(dim not in contracted[k], "a product over slices")',
        "pass",
        "test_batches.py::test_what_mixes_slices_has_no_program_of_one",
        "product",
    ),
    Mutant(
        "norms_of_all_slices_count_as_those_of_one",
        "jaxpr/batches.py",
        '_require(dim not in gone, f"`{eqn.primitive.name}` over slices")',
        "pass",
        "test_batches.py::test_what_mixes_slices_has_no_program_of_one",
        "sum",
    ),
    Mutant(
        "matrices_get_numbers_of_others",
        "update/owned.py",
        "(matrices, me * rounds + jnp.arange(rounds))",
        "(matrices, jnp.arange(rounds))",
        "test_matrices.py::test_each_matrix_gets_what_belongs_to_its_parameter_and_its_layer",
        "stack11",
    ),
    Mutant(
        "branches_over_parameters_stay_whole",
        "jaxpr/flat.py",
        "touching = [g for g in groups if g[0] & members]",
        "touching = list(groups)",
        "test_regions.py::test_a_branch_over_several_parameters_becomes_one_for_each",
    ),
    Mutant(
        "the_first_parameter_owns_what_several_move",
        "plan/opt_leaves.py",
        "found[j] = next(iter(reached)) if len(reached) == 1 else None",
        "found[j] = next(iter(reached)) if reached else None",
        "test_matrices.py::test_state_that_several_parameters_move_belongs_to_none",
    ),
    Mutant(
        "one_device_gets_what_is_left",
        "plan/assignment.py",
        "heapq.heapreplace(loads, (load + costs[kind], device))",
        "heapq.heapreplace(loads, (load, device))",
        "test_assignment.py::test_each_unit_is_computed_once_and_no_device_has_much_more_than_the_mean",
    ),
    Mutant(
        "bases_leave_their_devices",
        "plan/matrices.py",
        "if cut is not None and dims and cut.cuts(dims[0]) and cut.is_stored_naturally:",
        "if False:",
        "test_matrices.py::test_bases_of_a_stack_stay_where_its_slices_are_computed",
    ),
    # Precision and the loss scale.
    Mutant(
        "edits_ignored",
        "layout/casts.py",
        "return lax.select(same, master, lax.convert_element_type(param, master.dtype))",
        "return master",
        "test_precision_masters.py::test_an_edit_by_replace_is_taken_over",
        "[bf16-2]",
    ),
    Mutant(
        "truncated_not_rounded",
        "layout/casts.py",
        "(bits + noise) & jnp.uint32(0xFFFF0000)",
        "bits & jnp.uint32(0xFFFF0000)",
        "test_precision_bytes.py::test_stochastic_rounding_is_fair_and_exact_where_it_can_be",
    ),
    Mutant(
        "scale_halves_late",
        "plan/opt_state.py",
        "halve = overflow & (state.hysteresis <= 1)",
        "halve = overflow & (state.hysteresis <= 0)",
        "test_loss_scale.py::test_the_first_scales_by_hand",
    ),
    Mutant(
        "scale_grows_without_end",
        "plan/opt_state.py",
        "jnp.minimum(scale * 2, MAX_LOSS_SCALE)",
        "scale * 2",
        "test_loss_scale.py::test_the_scale_stops_growing",
    ),
    Mutant(
        "widens_by_implicit_promotion",
        "config/precision.py",
        "np.promote_types(dtype, np.float32)",
        "jnp.promote_types(dtype, jnp.float32)",
        "test_strict_promotion.py::test_train_steps",
        "bf16",
    ),
    # Checkpoints.
    Mutant(
        "edits_not_saved",
        "checkpoint/leaves.py",
        "if bool(_is_edited(*near, plan.leaves[i])):",
        "if False:",
        "test_checkpoint.py::test_edited_parameters_are_saved_as_the_optimizer_would_take_them",
    ),
    Mutant(
        "edits_of_masters_on_disk_not_saved",
        "checkpoint/disk_saving.py",
        "if record.param in self.edited:",
        "if False:",
        "test_disk_checkpoints.py::test_edited_parameters_are_saved_as_the_optimizer_would_take_them",
    ),
    Mutant(
        "checksum_counts_padding",
        "checkpoint/checksum.py",
        "inside = inside & (index < natural[dim])",
        "inside = inside & (index >= 0)",
        "test_checksum.py::test_checksums_do_not_depend_on_the_layout",
        "float32",
    ),
    Mutant(
        "worst_is_best",
        "checkpoint/retention.py",
        'return value if self.best_mode == "max" else -value',
        'return value if self.best_mode == "min" else -value',
        "test_checkpoint_manager.py::test_what_is_saved_and_kept",
        "options4",
    ),
    Mutant(
        "two_programs_export_at_once",
        "checkpoint/safetensors_files.py",
        "with only_writer(directory / (stem + SUFFIX)), _named_last",
        "with _named_last",
        "test_export_writers.py::test_of_two_programs_that_export_to_one_path_one_is_told",
    ),
    Mutant(
        "half_an_export_stays",
        "checkpoint/safetensors_files.py",
        "made[i] = made[i].rename(path)",
        "made[i].rename(path)",
        "test_export_writers.py::test_an_export_that_fails_leaves_nothing",
    ),
    Mutant(
        "file_beside_an_index_ignored",
        "checkpoint/safetensors_files.py",
        "if indices and single.exists()",
        "if not indices and single.exists()",
        "test_export.py::test_a_file_beside_an_index_of_other_files",
    ),
    Mutant(
        "renamed_metric_is_worst",
        "checkpoint/retention.py",
        "info.step in best or not self.retention.has_metric(info.metrics) for",
        "info.step in best for",
        "test_checkpoint_manager.py::test_a_metric_with_another_name",
    ),
    Mutant(
        "failing_file_system_is_damage",
        "checkpoint/damage.py",
        'return CheckpointError(f"{where}, since',
        'return DamageError(f"{where}, since',
        "test_checkpoint_interrupts.py::test_an_error_that_passes_is_no_damage",
        "stale-open-1000",
    ),
    Mutant(
        "interrupts_of_libraries_are_errors",
        "checkpoint/damage.py",
        "if isinstance(cause, KeyboardInterrupt | SystemExit | MemoryError | jax.errors.JaxRuntimeError):",
        "if isinstance(cause, MemoryError | jax.errors.JaxRuntimeError):",
        "test_checkpoint_interrupts.py::test_what_libraries_make_of_interrupts_is_no_damage",
        "interrupt",
    ),
    Mutant(
        "damage_is_not_looked_at_again",
        "checkpoint/manager.py",
        "state, report = read()  # what passes",
        "raise  # what passes",
        "test_checkpoint_interrupts.py::test_what_libraries_make_of_interrupts_is_no_damage",
        "passed",
    ),
    Mutant(
        "interrupted_checkpoint_stays",
        "checkpoint/saving.py",
        "_THREAD.run(_remove, written)",
        "pass",
        "test_checkpoint_interrupts.py::test_after_ctrl_c_in_save_checkpoint_nothing_is_left_and_it_can_be_called_again",
    ),
    Mutant(
        "ctrl_c_stops_orbax",
        "checkpoint/uninterrupted.py",
        "if self._process != os.getpid():",
        "if True:\n            return call(*args, **kwargs)\n        if self._process != os.getpid():",
        "test_checkpoint_interrupts.py::test_ctrl_c_in_a_manager_leaves_as_many_checkpoints_as_asked_for",
        "save",
    ),
    Mutant(
        "forks_keep_the_handler",
        "checkpoint/preemption.py",
        "os.register_at_fork(after_in_child=_SIGNAL.forget)",
        "_SIGNAL.forget",
        "test_checkpoint_interrupts.py::test_a_forked_process_has_neither_handlers_nor_hooks",
    ),
    Mutant(
        "deleted_steps_are_remembered",
        "checkpoint/writer.py",
        "if set(self._steps() or ()) - {self._saving_step, *there}:",
        "if False:",
        "test_checkpoint_interrupts.py::test_steps_that_were_deleted_by_hand_are_not_there",
    ),
    Mutant(
        "folders_need_not_be_shared",
        "checkpoint/sharing.py",
        "if jax.process_count() == 1:",
        "if jax.process_count() < 9:",
        "test_multiprocess.py::test_checkpoints_of_two_processes_and_of_one",
    ),
    Mutant(
        "any_dtype_is_an_extra",
        "checkpoint/extras.py",
        "if not can_store(dtype) or not array.size:",
        "if not array.size:",
        "test_checkpoint.py::test_extras_that_cannot_be_saved",
        "extra6 or extra8",
    ),
    # The disk.
    Mutant(
        "pinned_slots_are_written",
        "disk/stores.py",
        "self._unpinned.wait_for(lambda: not self._pins[self.next_slot])",
        "pass",
        "test_disk_files.py::test_a_pinned_generation_stays_while_one_step_commits",
        "ram",
    ),
    Mutant(
        "steps_write_what_they_read",
        "disk/stores.py",
        "slot = self.next_slot\n",
        "slot = self.slot\n",
        "test_disk_files.py::test_a_pass_that_reads_nothing",
    ),
    Mutant(
        "disk_checksums_are_not_compared",
        "disk/stores.py",
        "if self._sums is not None and _sum(buffer)",
        "if False and _sum(buffer)",
        "test_disk_faults.py::test_a_write_that_was_lost_is_found",
    ),
    Mutant(
        "heads_are_compared_with_nothing",
        "disk/stores.py",
        "if self._sums is not None and _sum(buffer)",
        "if self._sums is not None and is_whole and _sum(buffer)",
        "test_disk_params.py::test_the_head_of_a_record_has_a_checksum",
    ),
    Mutant(
        "rows_are_lent_to_two",
        "disk/rows.py",
        "lent = np.asarray(_Lent(buffer, free))",
        "lent, _ = buffer[:], free.append(buffer)",
        "test_disk_params.py::test_rows_come_in_any_order",
    ),
    Mutant(
        "rows_are_read_ahead_of_forward_loops_alone",
        "disk/rows.py",
        "lane.rows[::step]",
        "lane.rows",
        "test_disk_params.py::test_rows_are_read_as_counted_and_no_stack_is_in_memory",
    ),
    Mutant(
        "steps_go_on_without_their_rows",
        "state/disk.py",
        "reader.check()",
        "pass",
        "test_disk_params.py::test_a_read_that_fails_changes_nothing_and_the_step_can_be_repeated",
    ),
    Mutant(
        "overlapping_reads_count_twice",
        "disk/stores.py",
        "self.seconds += 0.0 if self._under_way else time",
        "self.seconds += time",
        "test_disk_files.py::test_rates_count_overlapping_calls_once",
    ),
    Mutant(
        "buffers_are_free_once_visited",
        "disk/pipeline.py",
        "self._visited.put(_Visited(",
        "self._free.put(whole)\n            self._visited.put(_Visited(",
        "test_disk_files.py::test_buffers_are_a_records_own_until_it_is_finished",
    ),
    Mutant(
        "interrupted_pass_is_used_again",
        "disk/pipeline.py",
        "not self._pass.is_fresh or ",
        "",
        "test_disk_faults.py::test_after_ctrl_c_the_step_is_repeated",
        "later and 0.03",
    ),
    Mutant(
        "read_ahead_outlives_a_commit",
        "disk/pipeline.py",
        "key = (order, reads, self.store.generation)",
        "key = (order, reads, 0)",
        "test_disk_files.py::test_what_was_read_ahead_of_another_pass_is_not_used",
    ),
    Mutant(
        "errors_keep_their_store",
        "disk/pipeline.py",
        "self._errors.clear()",
        "pass",
        "test_disk_faults.py::test_an_error_holds_no_space",
    ),
    Mutant(
        "children_keep_files",
        "disk/files.py",
        "os.register_at_fork(after_in_child=_close_in_child)",
        "_close_in_child()",
        "test_disk_faults.py::test_a_forked_child_cannot_disturb",
    ),
    Mutant(
        "files_keep_their_names",
        "disk/files.py",
        "os.unlink(path)",
        "pass",
        "test_disk_files.py::test_every_way_to_open_files_gives_the_same_bytes",
        "named",
    ),
    Mutant(
        "short_writes_end",
        "disk/files.py",
        "done += os.pwritev(self._fd, [buffer[done:].data], offset + done)",
        "os.pwritev(self._fd, [buffer.data], offset)\n                done = buffer.size",
        "test_disk_files.py::test_short_reads_and_writes_are_continued",
    ),
    # Data.
    Mutant(
        "data_order_ignores_epoch",
        "data/order.py",
        "return _permute(place, self.num_examples, (self.seed, epoch))",
        "return _permute(place, self.num_examples, (self.seed, 0))",
        "test_data_order.py::test_orders_differ_by_epoch_and_seed_and_are_not_shared",
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
        "sections_of_tensors_start_at_0",
        "checkpoint/pieces.py",
        "slice(start, start + size)",
        "slice(0, size)",
        "test_mapping.py::test_sections_orders_shapes_and_stacks",
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
        "placed = self.placed(self._config(self.stages[0], 1), 1)",
        "placed = self.placed(self._config(0, 1), 1)",
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
        "return jnp.maximum(jnp.asarray(step) - 1, 0)",
        "return jnp.maximum(jnp.asarray(step), 0)",
        "test_deepspeed_optimizers.py::test_schedule_is_deepspeeds",
    ),
    Mutant(
        "decay_is_never_decoupled",
        "deepspeed/optimizers.py",
        "steps = steps if decoupled else steps[::-1]",
        "steps = steps[::-1]",
        "test_deepspeed_optimizers.py::test_optimizer_is_deepspeeds",
    ),
    Mutant(
        "micro_batch_of_all_devices",
        "deepspeed/batch.py",
        "micro = train // (accumulate * num_devices)",
        "micro = train // accumulate",
        "test_from_deepspeed.py::test_batch_sizes_are_deepspeeds",
    ),
]


def copied(directory: Path) -> Path:
    """Returns a copy of what tests need."""
    for name in COPIED:
        source, target = ROOT / name, directory / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    return directory


def occurrences(mutant: Mutant, root: Path = ROOT) -> int:
    """Returns how often the text of a fault occurs."""
    file = root / "jzero" / mutant.file
    return file.read_text().count(mutant.old) if file.exists() else 0


@contextlib.contextmanager
def applied(mutant: Mutant, root: Path) -> Iterator[None]:
    """Has a fault in a copy."""
    file = root / "jzero" / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        file.write_text(text)


def run_tests(mutants: Sequence[Mutant], root: Path, timeout: float) -> tuple[int, str]:
    """Returns how pytest exits for the tests of faults in a copy (0 passed, 1 failed, else not run), and its output."""
    tests = [f"tests/{test}" for test in dict.fromkeys(x.test for x in mutants)]
    named = [(x.test.split("::")[1], x.cases) for x in mutants]
    cases = " or ".join(dict.fromkeys(f"({name} and {cases})" if cases else name for name, cases in named))
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            [*command, *tests, "-k", cases],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {timeout} s"
    return done.returncode, done.stdout


def failures_without_faults(mutants: Sequence[Mutant], root: Path) -> str:
    """Returns the end of pytest's output if tests of faults fail, or do not run, without them; else nothing."""
    code, output = run_tests(mutants, root, TIMEOUT * len(mutants))
    return "" if code == 0 else f"{output[-3000:]}\nWithout any fault, pytest exits with {code}."


def outcome(mutant: Mutant, root: Path) -> str:
    """Returns what became of a fault."""
    with applied(mutant, root):
        code, _ = run_tests([mutant], root, TIMEOUT)
    return {0: "SURVIVED", 1: "killed"}.get(code, f"NOT RUN (pytest exits with {code})")


class Clock:
    """Seconds that passed, and those of the processors, which other programs do not change."""

    def __init__(self) -> None:
        self.start = self.last = self._now()

    def _now(self) -> tuple[float, float]:
        times = os.times()
        return times.elapsed, times.children_user + times.children_system

    def lap(self) -> str:
        """Returns the seconds since the last call."""
        before, self.last = self.last, self._now()
        return self._text(before)

    def total(self) -> str:
        """Returns the seconds since the start."""
        return self._text(self.start)

    def _text(self, before: tuple[float, float]) -> str:
        passed, used = (now - then for now, then in zip(self._now(), before, strict=True))
        return f"{passed:6.1f} s ({used:.1f} s of CPU)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which faults; all by default")
    names = parser.parse_args().names
    if unknown := set(names) - {x.name for x in MUTANTS}:
        parser.error(f"there are no faults of the names {sorted(unknown)}")
    chosen = [x for x in MUTANTS if not names or x.name in names]
    if missing := [x for x in chosen if occurrences(x) != 1]:
        for mutant in missing:
            print(f"{mutant.name:42} PATTERN occurs {occurrences(mutant)} times in jzero/{mutant.file}")
        return 1
    clock, killed = Clock(), 0
    with tempfile.TemporaryDirectory() as directory:
        root = copied(Path(directory))
        if failures := failures_without_faults(chosen, root):
            print(failures)
            return 1
        print(f"{'without faults':42} {'passed':10} {clock.lap()}", flush=True)
        for mutant in chosen:
            found = outcome(mutant, root)
            killed += found == "killed"
            print(f"{mutant.name:42} {found:10} {clock.lap()}", flush=True)
    print(f"{killed} of {len(chosen)} killed, {clock.total()}")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
