"""Kills programs that restore, train, save and export, again and again at random moments, and looks for what was lost.

`python -m tests.fault_run --kills 500` says at the end how often it killed what, and fails if anything was lost. A
program that begins after a kill goes on from the newest checkpoint. Nothing is lost if that is not older than what was
reported as complete before, if every checkpoint and every complete export holds, to the bit, what its step must have
(so each batch was seen once), and if no killed program leaves processes, nor files on the disk of its state.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

import jzero
import jzero.data

NUM_DEVICES = 4
RATE = 2.0**-10  # of a power of two every step is exact
SHAPES = {"even": (256, 512), "odd": (257, 509), "small": (3,)}
KEEP = 2
LOCKED = "waiting for the lock"
IMPORTED = "core.state.shard core.step.train_step checkpoint.manager weights.exporting data.loader training estimate"
CONTEXT = multiprocessing.get_context("forkserver")  # several kills a second: programs begin with all imported
CONTEXT.set_forkserver_preload(["optax", "safetensors.numpy", *(f"jzero.{name}" for name in IMPORTED.split())])


class Options(NamedTuple):
    """How to train.

    Attributes:
      directory: Where checkpoints and exports are.
      compiled: Where compiled programs are kept.
      scratch: A folder for state on a disk; none for state in memory.
      workers: Processes that read the data.
      programs: How many train in the directory at a time; the lock lets one of them save.
    """

    directory: str
    compiled: str
    scratch: str | None = None
    workers: int = 0
    programs: int = 1


class Numbers:
    """Examples, of which batch i holds the number i % 3 + 1."""

    def __len__(self) -> int:
        return 3 * NUM_DEVICES

    def __getitem__(self, index: int) -> Any:
        return {"x": float(index // NUM_DEVICES + 1)}


class Training(NamedTuple):
    """One program's part: how it trains, and whom it tells before each thing that it does."""

    options: Options
    parent: Connection

    def say(self, what: str, of: Any) -> None:
        self.parent.send((time.monotonic(), what, of))

    @property
    def config(self) -> jzero.ZeroConfig:
        config = jzero.ZeroConfig(stage=3, persistence_threshold=10)
        if self.options.scratch is None:
            return config
        offload = jzero.Offload(optimizer="disk", path=self.options.scratch, chunk_bytes=1 << 16)
        return dataclasses.replace(config, precision="bf16", offload=offload)  # its masters are in records

    def restore(self, manager: jzero.CheckpointManager, batches: Any) -> Any:
        """Returns the newest state; looks at each, unless the program that holds the lock may delete the older."""
        self.say("at", "restore")
        like = jzero.abstract_train_state(jax.eval_shape(make), config=self.config)
        for step in manager.all_steps() if self.options.programs == 1 else []:
            check(jzero.unshard_train_state(manager.restore(like, step=step)).params, step)
        if manager.all_steps():
            state = manager.restore(like, data_iterator=batches)
        else:
            state = jzero.shard_train_state(make(), config=self.config)
        check(jzero.unshard_train_state(state).params, int(state.step))
        self.say("start", int(state.step))
        return state

    def export(self, state: Any) -> None:
        """Looks at the exports that are there, and writes another."""
        self.say("at", "export")
        exports = pathlib.Path(self.options.directory, "exports")
        for export in exports.glob("*"):
            if files := list(export.glob("*.safetensors")):
                check(load_file(files[0]), int(export.name))
                shutil.rmtree(export)
        jzero.export_params(state, exports / str(int(state.step)))

    def go_on(self, manager: jzero.CheckpointManager) -> None:
        """Trains from the newest checkpoint on, and saves after each step."""
        batches = iter(
            jzero.data.make_loader(
                Numbers(), batch_size=NUM_DEVICES, shuffle=False, num_epochs=None, num_workers=self.options.workers
            )
        )
        state = self.restore(manager, batches)
        for batch in batches:
            self.say("at", "step")
            state, _ = STEP(state, batch)
            self.say("at", "save")
            manager.save(state, data_iterator=batches)
            self.say("complete", int(state.step) - 1)  # `save` waits for the one before
            if state.step % 2:
                self.export(state)
                manager.wait()
                self.say("complete", int(state.step))


STEP = jzero.make_train_step(lambda params, batch: sum(x.sum() for x in params.values()) * batch["x"].mean())


def make() -> jzero.TrainState:
    return jzero.TrainState.create(params={x: jnp.zeros(shape) for x, shape in SHAPES.items()}, tx=optax.sgd(RATE))


def check(params: Any, step: int) -> None:
    right = np.float32(-RATE * sum(i % 3 + 1 for i in range(step)))
    wrong = [name for name in SHAPES if (np.asarray(params[name]) != right).any()]
    assert not wrong, f"{wrong} at step {step}"


def train(options: Options, parent: Connection, compiles: bool) -> None:
    """Trains for ever, and where another program holds the lock begins again."""
    os.setpgid(0, 0)  # with the processes that it starts
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".* is memory, not a disk")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_compilation_cache_dir", options.compiled)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    # A program that may be killed writes none: jax would read half a file.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if compiles else 1e9)
    training = Training(options, parent)
    while True:
        try:
            with jzero.CheckpointManager(pathlib.Path(options.directory, "run"), max_to_keep=KEEP) as manager:
                training.go_on(manager)
        except jzero.CheckpointError as error:
            if "End that one" not in str(error):
                raise
            training.say("at", LOCKED)


class Program:
    """A process that trains, and what it has said: when, what, and of which step."""

    def __init__(self, options: Options, compiles: bool = False) -> None:
        self.pipe, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=train, args=(options, theirs, compiles))
        self._process.start()
        theirs.close()
        self.said: list[tuple[float, str, Any]] = []

    def listen(self) -> bool:
        """Waits for its next message; returns whether there is one."""
        try:
            self.said.append(self.pipe.recv())
        except EOFError:
            return False
        return True

    def kill(self) -> None:
        """Ends it as losing power would, and waits for the end of the processes that it has started."""
        assert self._process.is_alive(), "It has ended by itself"
        self._process.kill()
        self._process.join()
        while self.listen():
            pass
        ends = time.monotonic() + 60
        while _lives(self._process.pid or 0):
            assert time.monotonic() < ends, "A killed program has left processes"
            time.sleep(0.01)
        self._process.close()
        self.pipe.close()

    def check(self, complete: list[tuple[float, int]]) -> None:
        """Whether it went on from what was complete by then, in any program."""
        began = [moment for moment, what in self.all("at") if what == "restore"]
        for moment, (_, step) in zip(began, self.all("start"), strict=False):
            least = max((number for before, number in complete if before < moment), default=0)
            assert step >= least, f"Step {step} was restored after {least} was complete"

    def all(self, word: str) -> list[tuple[float, Any]]:
        return [(moment, of) for moment, what, of in self.said if what == word]


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def run(options: Options, kills: int, seed: int) -> dict[str, int]:
    """Kills so many programs, and starts others; returns how often it killed what."""
    moments, ended = random.Random(seed), []
    for _ in range(2):  # the second restores: together they compile everything
        ended.append(Program(options, compiles=True))
        while not ended[-1].all("complete")[4:] and ended[-1].listen():
            pass
        ended[-1].kill()
    running = [Program(options) for _ in range(options.programs)]
    for _ in range(kills):
        for _ in range(moments.randint(1, 10 * options.programs)):
            wait([program.pipe for program in running])
            for program in running:
                if program.pipe.poll():
                    program.listen()
        time.sleep(moments.uniform(0, 0.1))
        ended.append(running.pop(moments.randrange(options.programs)))
        ended[-1].kill()
        running.append(Program(options))
    for program in running:
        while not program.all("start") and program.listen():
            pass
        program.kill()
    programs = ended + running
    for program in programs:
        program.check([x for other in programs for x in other.all("complete")])
    counts = collections.Counter(program.all("at")[-1][1] if program.all("at") else "start" for program in ended[2:])
    return {**counts, "refused the lock": sum(what == LOCKED for program in programs for _, what in program.all("at"))}


def main() -> int:
    """Runs what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", metavar="DIRECTORY", help="for state on a disk; by default it is in memory")
    parser.add_argument("--workers", type=int, default=0, help="processes that read the data")
    parser.add_argument("--programs", type=int, default=1, help="how many train in one directory at a time")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as compiled:
        options = Options(directory, compiled, asked.scratch, asked.workers, asked.programs)
        counts = run(options, asked.kills, asked.seed)
        left = sorted(os.listdir(pathlib.Path(directory, "run")))
    print(f"{asked.kills} kills, nothing lost, in {time.monotonic() - began:.0f} s: {counts}; left: {left}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
