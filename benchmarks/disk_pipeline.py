"""Records of optimizer state through the pipeline of a disk, beside plain reads and writes of the same bytes.

    python -m benchmarks.disk_pipeline FOLDER --gigabytes 1 --record-mebibytes 16

`FOLDER` is on the disk; four times the bytes are taken there meanwhile. Plain: as many threads read one file and write
another, block by block, and wait for nothing. Pipeline: each record is read, visited, and written into the other slot,
by itself or with AdamW, which jax computes on the CPU while reads and writes go on. All in turns in one run, medians;
ratios are medians of the ratios within a round, since disks and machines are noisy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero.core.disk.files import PAGE, check_folder
from jzero.core.disk.pipeline import Pipeline
from jzero.core.disk.rates import PlainFiles
from jzero.core.disk.stores import DiskStore

FIELDS = ("master", "mean", "variance")
GIB = 2**30


def make_adamw() -> Callable[[int, np.ndarray], Callable[[np.ndarray], None]]:
    """Returns a visitor that updates a record, three fields of fp32 one after the other, by AdamW."""
    tx = optax.adamw(1e-3)

    @jax.jit
    def update(fields: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:  # three times [E]
        master, mean, variance = fields
        (adam, *others) = tx.init(master)
        state = (adam._replace(count=jnp.int32(7), mu=mean, nu=variance), *others)
        updates, (adam, *_) = tx.update(0.01 * master, state, master)
        return optax.apply_updates(master, updates), adam.mu, adam.nu

    def visit(record: int, buffer: np.ndarray) -> Callable[[np.ndarray], None]:
        new = update(fields_of(buffer))

        def finish(buffer: np.ndarray) -> None:
            for field, x in zip(fields_of(buffer), new, strict=True):
                np.copyto(field, np.asarray(x))

        return finish

    return visit


def fields_of(buffer: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the fields of a record, three times fp32 `[E]`, as views."""
    return tuple(buffer.view(np.float32).reshape(len(FIELDS), -1))


def fill(record: int, buffer: np.ndarray) -> None:
    """Writes the state after no step, with parameters that file systems cannot compress."""
    master, *moments = fields_of(buffer)
    master[:] = np.random.default_rng(record).standard_normal(master.size, np.float32)
    for moment in moments:
        moment[:] = 0


def run(pipeline: Pipeline, visit: Any) -> tuple[float, float]:
    """Returns the seconds of a step, and those in which its thread waited."""
    stats = pipeline.run(visit)
    pipeline.store.commit()
    return stats.seconds, stats.waited_seconds


def measure(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Returns the seconds and the seconds waited of each round, by what was done."""
    folder = check_folder(options.folder, "FOLDER")
    record = int(options.record_mebibytes * 2**20) // (len(FIELDS) * PAGE) * len(FIELDS) * PAGE
    records = max(1, round(options.gigabytes * 1e9 / record))
    store = DiskStore(folder, [record] * records, checksum=not options.no_checksum)
    plain = PlainFiles(folder, store.num_bytes, threads=options.threads, block=record)
    pipeline = Pipeline(store, options.threads)
    print(f"{records} records of {record / 2**20:.2f} MiB, {options.threads} threads each way, jax {jax.__version__}")
    print(f"the file system lacks: {', '.join(store.fallbacks) or 'nothing'}; checksums: {not options.no_checksum}\n")
    nothing, adamw = (lambda record, buffer: None), make_adamw()
    for _ in range(2):  # both slots, since a first write takes longer
        pipeline.run(fill, reads=False)
        store.commit()
    runs: dict[str, Callable[[], tuple[float, float]]] = {
        "plain reads": lambda: (plain.seconds(read=True, write=False), 0),
        "plain writes": lambda: (plain.seconds(read=False, write=True), 0),
        "plain, both at once": lambda: (plain.seconds(read=True, write=True), 0),
        "pipeline": lambda: run(pipeline, nothing),
        "pipeline with AdamW": lambda: run(pipeline, adamw),
        "AdamW alone": lambda: (update_alone(adamw, pipeline.buffers[0], records), 0),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(options.repeats + 1):
        for name, call in runs.items():
            seconds = call()
            if number:  # the first round compiles
                times[name].append(seconds)
    plain.close()
    store.close()
    rates = {name: [store.num_bytes / GIB / seconds for seconds, _ in rounds] for name, rounds in times.items()}
    report(times, rates)
    return times


def update_alone(visit: Any, buffer: np.ndarray, records: int) -> float:
    """Returns the seconds to update as many records, all of the same bytes."""
    started = time.perf_counter()
    for record in range(records):
        visit(record, buffer)(buffer)
    return time.perf_counter() - started


def report(times: dict[str, list[tuple[float, float]]], rates: dict[str, list[float]]) -> None:
    """Prints a table."""
    print("| | seconds | GiB/s each way | of plain, both at once | of it the caller waits |\n|---|---|---|---|---|")
    for name, rounds in times.items():
        ratio = statistics.median(a / b for a, b in zip(rates[name], rates["plain, both at once"], strict=True))
        seconds = statistics.median(seconds for seconds, _ in rounds)
        waited = statistics.median(waited / seconds for seconds, waited in rounds)
        wait = f"{waited:.2f}" if name.startswith("pipeline") else ""
        print(f"| {name} | {seconds:.2f} | {statistics.median(rates[name]):.2f} | {ratio:.2f} | {wait} |")


def main() -> None:
    """Measures one disk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--gigabytes", type=float, default=1, help="bytes of one slot")
    parser.add_argument("--record-mebibytes", type=float, default=16)
    parser.add_argument("--threads", type=int, default=2, help="reads at a time, and as many writes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-checksum", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    measure(options)


if __name__ == "__main__":
    main()
