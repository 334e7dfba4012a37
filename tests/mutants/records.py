"""Faults of state in records, and of weights in files."""

from tests.mutants.mutant import faults

MUTANTS = faults(r"""
core/records/run.py
  sums_over_records_forget_earlier_ones: test_disk.py::test_each_part_is_kept_once_on_other_meshes
  - [join(x, y) for join, x, y in
  + [y for join, x, y in
  replicated_parts_count_for_each_device: test_disk.py::test_each_part_is_kept_once_on_other_meshes
  - x = values[device] if device == first else
  + x = values[first] if first in values else

core/config/offload.py
  zenflow_is_called_a_disk: test_zenflow.py::test_what_cannot_be
  - return delayed if self.delays_updates else
  + return delayed if self.delay else

core/records/records.py
  columns_on_devices_are_not_saved:
    test_zenflow.py::test_training_resumes_at_an_interval_to_the_bit_and_a_skipped_step_adds_nothing
  - self.pending.overlay(self.index[number], self.views(number, buffer))
  leaves_are_read_without_columns_on_devices:
    test_zenflow.py::test_training_resumes_at_an_interval_to_the_bit_and_a_skipped_step_adds_nothing
  - self.pending.overlay(record, views)

core/records/schedules.py
  steps_of_records_never_commit: test_disk.py::test_state_on_disk_trains_like_state_in_memory
  -     records.pipeline.store.commit()
  -     return Stepped
  +     return Stepped
  gradients_that_wait_are_of_any_copy: test_record_copies.py::test_gradients_that_wait_are_of_one_state
  - self.version += is_applied

core/state/record_states.py
  copies_read_what_later_steps_wrote:
    test_record_copies.py::test_a_copy_is_refused_and_the_newest_state_stays_as_it_is -k ram
  - != records.generation:
  + > records.generation:

core/records/zenflow.py
  numbers_of_states_come_twice: test_record_copies.py::test_no_number_comes_twice
  - target.pending.version = self.version  # no number comes twice

weights/entries.py
  boxes_of_tensors_take_the_parameters_order: test_hf_round_trip.py::test_any_mapping_is_undone_by_its_export
  - near.transposed(self._back)
  + near.transposed(self.permute)
  joined_tensors_start_at_0: test_mapping.py::test_sections_orders_shapes_and_stacks
  - first[source.axis], end = end, end + result[source.axis]
  + first[source.axis], end = 0, end + result[source.axis]
  exports_keep_the_parameters_order: test_hf_round_trip.py::test_any_mapping_is_undone_by_its_export
  - part.reshape(self.ordered).transpose(self._back)
  + part.reshape(self.ordered).transpose(self.permute)

weights/loading.py
  shards_of_parameters_start_at_0: test_load_params.py::test_files_of_another_program_are_loaded_into_shards
  - entry.read(self._tensors[entry.tensor].view, here)
  + entry.read(self._tensors[entry.tensor].view, here.within(box))
""")
