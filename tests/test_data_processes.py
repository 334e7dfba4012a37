"""Three real processes that read files of unequal counts, and others that go on; `test_multiprocess.py` has two."""

import json

import pytest

from tests import data_results, data_worker, real_processes


def run_processes(scenario, num_processes, directory):
    """Runs a function of the worker in several processes; returns what each printed."""
    arguments = lambda index, port: [scenario, index, num_processes, port, directory]
    outputs = real_processes.run_processes("tests.data_worker", arguments, num_processes)
    for status, _, errors in outputs:
        assert status == 0, errors
    return [json.loads(output.splitlines()[-1]) for _, output, _ in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("others", [1, 2])
def test_three_processes_share_files_and_others_go_on(others, tmp_path):
    """One test, so that processes are started once: three that end an epoch and save; this one, or two, go on."""
    data_worker.write_files(tmp_path)
    first = run_processes("train_first", 3, tmp_path)
    data_results.assert_files_are_shared(first)
    rest = [data_worker.train_rest(tmp_path)] if others == 1 else run_processes("train_rest", others, tmp_path)
    data_results.assert_others_go_on(first, rest)
