"""What comparing processes adds to the first call: `python -m benchmarks.agreement`.

Two processes of four CPU devices each, with gloo over loopback, call `shard_train_state` for a GPT with about 1 GB of
fp32 parameters and AdamW, whose moments each process supplies as well. Then they trace, lower, compile and run the
first step, with one sequence of 8 tokens per device. The checks are the checksums of all values and the fingerprint of
the program. CPU seconds stand beside wall-clock seconds, which other work on the machine stretches. `--no-checks` runs
the same with `check_processes=False`.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PROCESSES, DEVICES = 2, 4


class Stopwatch:
    """Adds up the time of calls: on the clock, and of the CPU in their thread."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, timed."""

        def timed(*args: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            result = fn(*args)
            self.wall += time.perf_counter() - wall
            self.cpu += time.thread_time() - cpu
            return result

        return timed


def work(options: argparse.Namespace) -> None:
    """Shards and trains a step as one of the processes, and prints what that took."""
    import jax  # only workers need it, after their settings

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{options.port}", PROCESSES, options.worker)
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jzero
    from benchmarks.gpt import GPT, Size, init_of, loss_of
    from jzero.core.processes import fingerprints
    from jzero.core.state import gather
    from jzero.core.step import agreement

    model = GPT(Size(1024, options.layers, vocab=2048), remat=False)
    drawn = 0.02 * np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    params = jax.tree.map(
        lambda x: jnp.asarray(np.resize(drawn, x.shape)), jax.eval_shape(init_of(model), jax.random.key(0))
    )
    plain = jax.block_until_ready(jzero.TrainState.create(params=params, tx=optax.adamw(1e-3)))
    batch = np.zeros((PROCESSES * DEVICES, 9), np.int32)
    checks = Stopwatch()
    gather.describe_value = checks.around(fingerprints.describe_value)
    agreement.describe_program = checks.around(fingerprints.describe_program)
    wall, cpu = time.perf_counter(), time.process_time()
    state = jax.block_until_ready(jzero.shard_train_state(plain, stage=3, check_processes=options.checks))
    sharded, sharded_cpu = time.perf_counter() - wall, time.process_time() - cpu
    step = jzero.make_train_step(loss_of(model), check_processes=options.checks)
    state, _ = jax.block_until_ready(step(state, batch))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        f"| {options.worker} | {sharded:.2f} | {wall:.2f} | {checks.wall:.2f} | {checks.wall / wall:.1%} "
        f"| {sharded_cpu:.2f} | {cpu:.2f} | {checks.cpu:.2f} | {checks.cpu / cpu:.1%} |",
        flush=True,
    )


def main() -> None:
    """Measures in two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--no-checks", dest="checks", action="store_false")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    print(
        "| process | shard, s | and first step | checks | share | shard, s of CPU | and first step | checks | share |"
    )
    print("|" + "---|" * 9, flush=True)
    command = [sys.executable, "-m", "benchmarks.agreement", *sys.argv[1:], "--port", port]
    processes = [subprocess.Popen([*command, "--worker", str(i)]) for i in range(PROCESSES)]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
