"""Faults of state in records, and of weights in files."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    # Records.
    Mutant(
        "sums_over_records_forget_earlier_ones",
        "core/records/run.py",
        "[join(x, y) for join, x, y in",
        "[y for join, x, y in",
        "test_disk.py::test_each_part_is_kept_once_on_other_meshes",
    ),
    Mutant(
        "zenflow_is_called_a_disk",
        "core/config/offload.py",
        "return delayed if self.delays_updates else",
        "return delayed if self.delay else",
        "test_zenflow.py::test_what_cannot_be",
    ),
    Mutant(
        "replicated_parts_count_for_each_device",
        "core/records/run.py",
        "x = values[device] if device == first else",
        "x = values[first] if first in values else",
        "test_disk.py::test_each_part_is_kept_once_on_other_meshes",
    ),
    Mutant(
        "columns_on_devices_are_not_saved",
        "core/records/records.py",
        "        self.pending.overlay(self.index[number], self.views(number, buffer))\n",
        "",
        "test_zenflow.py::test_training_resumes_at_an_interval_to_the_bit_and_a_skipped_step_adds_nothing",
    ),
    Mutant(
        "leaves_are_read_without_columns_on_devices",
        "core/records/records.py",
        "            self.pending.overlay(record, views)\n",
        "",
        "test_zenflow.py::test_training_resumes_at_an_interval_to_the_bit_and_a_skipped_step_adds_nothing",
    ),
    Mutant(
        "steps_of_records_never_commit",
        "core/records/schedules.py",
        "    records.pipeline.store.commit()\n    return Stepped",
        "    return Stepped",
        "test_disk.py::test_state_on_disk_trains_like_state_in_memory",
    ),
    Mutant(
        "copies_read_what_later_steps_wrote",
        "core/state/record_states.py",
        "!= records.generation:",
        "> records.generation:",
        "test_record_copies.py::test_a_copy_is_refused_and_the_newest_state_stays_as_it_is",
        "ram",
    ),
    Mutant(
        "gradients_that_wait_are_of_any_copy",
        "core/records/schedules.py",
        "        self.version += is_applied\n",
        "",
        "test_record_copies.py::test_gradients_that_wait_are_of_one_state",
    ),
    Mutant(
        "numbers_of_states_come_twice",
        "core/records/zenflow.py",
        "            target.pending.version = self.version  # no number comes twice\n",
        "",
        "test_record_copies.py::test_no_number_comes_twice",
    ),
    # Weights.
    Mutant(
        "boxes_of_tensors_take_the_parameters_order",
        "weights/entries.py",
        "near.transposed(self._back)",
        "near.transposed(self.permute)",
        "test_hf_round_trip.py::test_any_mapping_is_undone_by_its_export",
    ),
    Mutant(
        "joined_tensors_start_at_0",
        "weights/entries.py",
        "first[source.axis], end = end, end + result[source.axis]",
        "first[source.axis], end = 0, end + result[source.axis]",
        "test_mapping.py::test_sections_orders_shapes_and_stacks",
    ),
    Mutant(
        "exports_keep_the_parameters_order",
        "weights/entries.py",
        "part.reshape(self.ordered).transpose(self._back)",
        "part.reshape(self.ordered).transpose(self.permute)",
        "test_hf_round_trip.py::test_any_mapping_is_undone_by_its_export",
    ),
    Mutant(
        "shards_of_parameters_start_at_0",
        "weights/loading.py",
        "entry.read(self._tensors[entry.tensor].view, here)",
        "entry.read(self._tensors[entry.tensor].view, here.within(box))",
        "test_load_params.py::test_files_of_another_program_are_loaded_into_shards",
    ),
]
