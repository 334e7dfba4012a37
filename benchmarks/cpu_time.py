"""CPU time of a bf16 step beside GSPMD's with a constraint per block, in turns: `python -m benchmarks.cpu_time`.

On 8 virtual CPU devices, at stage 3, a GPT of `benchmarks.families` of 6 layers of 384, 2 x 128 tokens per device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import numpy as np

import jzero
from benchmarks.families import batch_of, jzero_step, strong_step
from benchmarks.family_models import gpt
from benchmarks.gpt import AXIS


def seconds(*, scanned: bool, repeats: int) -> dict[str, list[float]]:
    """Returns the CPU seconds of each step of each engine."""
    mesh = jzero.make_mesh(**{AXIS: -1})
    family = gpt(layers=6, scanned=scanned, seq_len=128, vocab=4096, width=384)._replace(rows=2)
    numbers, like_batch = np.random.default_rng(0), batch_of(family, mesh)
    batch = jax.device_put(numbers.integers(0, 4096, like_batch.shape).astype(np.int32), like_batch.sharding)
    fill = lambda x: jax.device_put((0.02 * numbers.standard_normal(x.shape)).astype(x.dtype), x.sharding)
    steps: dict[str, Any] = {}
    for name, make in {"GSPMD*": strong_step, "jzero": jzero_step}.items():
        step, like = make(family, 3, mesh)
        compiled = step.lower(like, like_batch).compile()
        steps[name] = [compiled, jax.block_until_ready(compiled(jax.tree.map(fill, like), batch))[0]]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):  # in turns, so that all meet the same machine
        for name, run in steps.items():
            started = time.process_time()
            run[1], _ = jax.block_until_ready(run[0](run[1], batch))
            times[name].append(time.process_time() - started)
    return times


def main() -> None:
    """Prints CPU seconds per step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"jax {jax.__version__}\n\n| | GSPMD*, CPU s | jzero, CPU s | ratio |\n|---|---|---|---|")
    for scanned in (True, False):
        times = seconds(scanned=scanned, repeats=options.repeats)
        ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
        cells = " | ".join(f"{statistics.median(x):.2f}" for x in times.values())
        print(f"| {'scanned' if scanned else 'unrolled'} | {cells} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
