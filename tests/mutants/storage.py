"""Faults of checkpoints and of state on disk."""

from tests.mutants.mutant import faults

MUTANTS = faults(r"""
core/processes/agree.py
  processes_that_are_given_up_are_not_told: test_multiprocess.py::test_a_process_that_is_alone_is_told_so
  - presence.give_up(self.client, missing, complaint)

core/processes/exchange.py
  failures_of_others_are_not_heard: test_multiprocess.py::test_checkpoints_of_two_processes_and_of_one
  - if not kinds:
  + if error is None:
  damage_that_others_found_is_no_damage: test_multiprocess.py::test_checkpoints_of_two_processes_and_of_one
  - joint = RuntimeError if joint is Exception else joint
  + joint = RuntimeError

checkpoint/retention.py
  earliest_of_equal_checkpoints_is_best: test_checkpoint_manager.py::test_metrics_that_are_equal_no_numbers_or_not_there
  - key=lambda step: (scores[step], step)
  + key=lambda step: (scores[step], -step)
  earliest_of_equal_checkpoints_are_kept:
    test_checkpoint_manager.py::test_metrics_that_are_equal_no_numbers_or_not_there
  - ranked.sort(key=lambda info: self.retention.score(info.metrics))
  + ranked.sort(key=lambda info: (self.retention.score(info.metrics), -info.step))
  worst_is_best: test_checkpoint_manager.py::test_what_is_saved_and_kept
  - return value if self.best_mode == "max" else -value
  + return value if self.best_mode == "min" else -value
  renamed_metric_is_worst: test_checkpoint_manager.py::test_a_metric_with_another_name
  - info.step in best or not self.retention.has_metric(info.metrics) for
  + info.step in best for

checkpoint/leaves.py
  edits_not_saved: test_checkpoint.py::test_edited_parameters_are_saved_as_the_optimizer_would_take_them
  - (not is_here or _is_edited(on_device(master), on_device(param), leaf)):
  + not is_here:

checkpoint/disk_saving.py
  edits_of_masters_on_disk_not_saved:
    test_disk_checkpoints.py::test_edited_parameters_are_saved_as_the_optimizer_would_take_them
  - if record.param in self.edited:
  + if False:

checkpoint/orbax_io.py
  chunks_have_no_checksums: test_checkpoint_faults.py::test_any_damaged_file_is_noticed_or_does_not_matter
  - spec["metadata"]["codecs"] = CODECS
  + spec["metadata"]["codecs"] = CODECS[:1]

checkpoint/saving.py
  first_device_writes_all_that_is_replicated: test_checkpoint.py::test_devices_with_the_same_arrays_share_the_writing
  - replica = loads.index(min(loads))
  + replica = 0
  interrupted_checkpoint_stays:
    test_checkpoint_interrupts.py::test_after_ctrl_c_in_save_checkpoint_nothing_is_left_and_it_can_be_called_again
  - _THREAD.run(_remove, written)
  + pass

checkpoint/format_1.py
  checksums_of_format_1_are_not_compared:
    test_checkpoint_faults.py::test_a_leaf_of_format_1_that_differs_from_its_checksum_is_damaged
  - if noted is not None and total % 2**32 != noted:
  + if noted is not None and False:
  checksums_of_format_1_begin_anew_in_each_part: test_checkpoint_faults.py::test_sums_of_format_1
  - np.arange(first + at, first + at + len(part)
  + np.arange(at, at + len(part)

weights/safetensors_files.py
  two_programs_export_at_once: test_export.py::test_of_two_programs_that_export_to_one_path_one_is_told
  - with only_writer(directory / (stem + SUFFIX)), _named_last
  + with _named_last
  half_an_export_stays: test_export.py::test_an_export_that_fails_leaves_nothing
  - temporary[i] = temporary[i].rename(path)
  + temporary[i].rename(path)
  file_beside_an_index_ignored: test_export.py::test_a_file_beside_an_index_of_other_files
  - and single.exists() and single not in
  + and not single.exists() and single not in
  any_index_is_the_models: test_export.py::test_a_file_beside_an_index_of_other_files
  - files = named[:1] or sorted(
  + files = sorted(

checkpoint/damage.py
  failing_file_system_is_damage:
    test_checkpoint_interrupts.py::test_an_error_that_passes_is_no_damage -k stale-open-1000
  - return CheckpointError(f"{where}, since
  + return DamageError(f"{where}, since
  interrupts_of_libraries_are_errors: test_checkpoint_interrupts.py::test_what_libraries_make_of_interrupts_is_no_damage
  - if isinstance(cause, KeyboardInterrupt | SystemExit | MemoryError | jax.errors.JaxRuntimeError):
  + if isinstance(cause, MemoryError | jax.errors.JaxRuntimeError):

checkpoint/manager.py
  damage_is_not_looked_at_again: test_checkpoint_interrupts.py::test_what_libraries_make_of_interrupts_is_no_damage
  - state, report = read()  # what passes
  + raise  # what passes

checkpoint/uninterrupted.py
  ctrl_c_stops_orbax:
    test_checkpoint_interrupts.py::test_ctrl_c_in_a_manager_leaves_as_many_checkpoints_as_asked_for -k save
  - if self._process != os.getpid():
  + if True:
  +             return call(*args, **kwargs)
  +         if self._process != os.getpid():

checkpoint/preemption.py
  forks_keep_the_handler: test_checkpoint_interrupts.py::test_a_forked_process_has_neither_handlers_nor_hooks
  - os.register_at_fork(after_in_child=_SIGNAL.forget)
  + _SIGNAL.forget

checkpoint/writer.py
  deleted_steps_are_remembered: test_checkpoint_interrupts.py::test_steps_that_were_deleted_by_hand_are_not_there
  - if set(self._steps() or ()) - {self._saving_step, *there}:
  + if False:

checkpoint/lock.py
  folders_need_not_be_shared: test_multiprocess.py::test_checkpoints_of_two_processes_and_of_one
  - if jax.process_count() == 1:
  + if jax.process_count() < 9:

checkpoint/extras.py
  any_dtype_is_an_extra: test_checkpoint.py::test_extras_that_cannot_be_saved
  - if not can_store(dtype) or not array.size:
  + if not array.size:

core/disk/stores.py
  pinned_slots_are_written: test_disk_files.py::test_a_pinned_generation_stays_while_one_step_commits -k ram
  - self._unpinned.wait_for(lambda: not self._pins[self.next_slot])
  + pass
  steps_write_what_they_read: test_disk_files.py::test_a_pass_that_reads_nothing
  - slot = self.next_slot
  + slot = self.slot
  disk_checksums_are_not_compared: test_disk_faults.py::test_a_write_that_was_lost_is_found
  - if self._sums is not None and _sum(buffer)
  + if False and _sum(buffer)
  heads_are_compared_with_nothing: test_disk_params.py::test_the_head_of_a_record_has_a_checksum
  - if self._sums is not None and _sum(buffer)
  + if self._sums is not None and is_whole and _sum(buffer)
  overlapping_reads_count_twice: test_disk_files.py::test_rates_count_overlapping_calls_once
  - self.seconds += 0.0 if self._under_way else time
  + self.seconds += time

core/disk/rows.py
  rows_are_lent_to_two: test_disk_params.py::test_rows_come_in_any_order
  - lent = np.asarray(_Lent(buffer, free))
  + lent, _ = buffer[:], free.append(buffer)
  rows_are_read_ahead_of_forward_loops_alone:
    test_disk_params.py::test_rows_are_read_as_counted_and_no_stack_is_in_memory
  - lane.rows[::step]
  + lane.rows

core/state/record_states.py
  steps_go_on_without_their_rows:
    test_disk_params.py::test_a_read_that_fails_changes_nothing_and_the_step_can_be_repeated
  - reader.check()
  + pass
  optimizers_of_a_plan_share_an_update: test_in_turns.py::test_each_state_and_step_keeps_its_own
  - @functools.lru_cache(maxsize=8)
  - def record_update(tx: ZeroTransformation) -> RecordUpdate:
  + def record_update(tx, kept={}):
  +     return kept.setdefault(tx.plan, _record_update(tx))
  +
  +
  + def _record_update(tx):

core/disk/pipeline.py
  a_pass_ends_before_its_readers: test_disk_faults.py::test_ctrl_c_twice_leaves_no_read_under_way
  - self._wait_for_ends(self._begun)
  + self._wait_for_ends(())
  buffers_are_free_once_visited: test_disk_files.py::test_buffers_are_a_records_own_until_it_is_finished
  - self._visited.put(_Visited(
  + self._free.put(whole)
  +             self._visited.put(_Visited(
  interrupted_pass_is_used_again: test_disk_faults.py::test_ctrl_c_twice_leaves_no_read_under_way
  - not self._pass.is_fresh or
  read_ahead_outlives_a_commit: test_disk_files.py::test_what_was_read_ahead_of_another_pass_is_not_used
  - key = (order, reads, self.store.generation)
  + key = (order, reads, 0)
  errors_keep_their_store: test_disk_faults.py::test_an_error_holds_no_space
  - self._errors.clear()
  + pass

core/records/schedules.py
  interrupted_wait_starts_the_update_again: test_zenflow.py::test_ctrl_c_while_a_step_waits_starts_no_second_update
  -             if done.exception() is not None:  # if Ctrl-C ends this, the pass goes on
  -                 self._done = None
  +             try:
  +                 done.result()
  +             except BaseException:
  +                 self._done = None
  +                 raise

core/disk/files.py
  children_keep_files: test_disk_faults.py::test_a_forked_child_cannot_disturb
  - os.register_at_fork(after_in_child=_close_in_child)
  + _close_in_child()
  files_keep_their_names: test_disk_files.py::test_every_way_to_open_files_gives_the_same_bytes
  - os.unlink(path)
  + pass
  short_writes_end: test_disk_files.py::test_short_reads_and_writes_are_continued
  - done += os.pwritev(self._fd, [buffer[done:].data], offset + done)
  + os.pwritev(self._fd, [buffer.data], offset)
  +                 done = buffer.size

checkpoint/parts.py
  large_parts_are_read_by_turns: test_export.py::test_while_a_part_is_in_use_the_next_is_under_way
  - while len(under_way) > (part is not None) and (
  + while under_way and (

  parts_that_are_kept_are_overwritten: test_export.py::test_memory_is_used_again_unless_parts_are_kept
  - spare = memory if reuse else spare
  + spare = memory

  each_part_takes_new_memory: test_export.py::test_memory_is_used_again_unless_parts_are_kept
  - spare = memory if reuse else spare
  + pass

  small_parts_keep_the_memory_of_large_ones: test_export.py::test_memory_is_used_again_unless_parts_are_kept
  - if size <= spare.nbytes < 2 * size
  + if size <= spare.nbytes

  parts_are_read_into_the_part_in_use: test_export.py::test_memory_is_used_again_unless_parts_are_kept
  - spare = none
  + pass
""")
