"""Trains on scikit-learn's digits in as many processes as the cluster starts, and resumes where it stopped.

    python examples/multi_process/train.py                 # one process, eight virtual CPU devices or all accelerators
    python examples/multi_process/launch_local.py          # two processes on this machine
    sbatch examples/multi_process/slurm.sh                 # SLURM: `srun ... train.py --cluster`
    kubectl apply -f examples/multi_process/jobset.yaml    # Kubernetes: one pod per node, `train.py --cluster`

A SIGTERM (time limit, preemption, a drained node) to any process makes all of them write a checkpoint after the same
step and exit with status 75. Started again with the same `--checkpoints`, they resume, even with another number of
processes.
"""

import argparse
import logging
import os
import pathlib
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jzero

STOPPED_EXIT_CODE = 75  # "try again later" in sysexits.h: the work is not done, but it is saved
PRINT_EVERY = 10


def main() -> None:
    """Trains up to a step, from scratch or from the newest checkpoint."""
    args = parse_args()
    start_process(args)
    index, count = jax.process_index(), jax.process_count()
    print(f"process {index} of {count}: {jax.local_device_count()} of {jax.device_count()} devices", flush=True)

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)  # [1797, 64]
    model = nn.Sequential([nn.Dense(args.width), nn.relu, nn.Dense(args.width), nn.relu, nn.Dense(10)])

    def make_state(key: jax.Array) -> TrainState:
        params = model.init(key, images[:1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["images"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    # The network is the slowest link, so a parameter crosses it once per step, and then stays within each process.
    levels = {"node_axis": "node", "secondary_params": args.stage == 3} if args.nodes else {}
    config = jzero.ZeroConfig(stage=args.stage, persistence_threshold=1000, **levels)
    mesh = jzero.make_mesh(node=args.nodes, data=-1) if args.nodes else None
    state = jzero.init_train_state(make_state, jax.random.key(0), config=config, mesh=mesh)
    step = jzero.make_train_step(loss_fn)
    manager = jzero.CheckpointManager(
        args.checkpoints,
        max_to_keep=2,
        save_interval_steps=args.save_every,
        preemption_exit_code=STOPPED_EXIT_CODE,
    )
    if index == 0:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("jzero").setLevel(logging.INFO)  # says what takes long
        print(jzero.plan_of(state), flush=True)
    with manager:
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(state, donate=True)
            done = int(state.step)
        print(f"process {index} starts after step {done}", flush=True)
        for number in range(done + 1, args.steps + 1):
            # Each process has the whole batch, and the step places the rows for its devices. The batch depends only on
            # the step number, so the checkpoint need not store a position.
            rows = np.random.default_rng(number).choice(len(images), args.batch_size, replace=False)
            state, metrics = step(state, {"images": images[rows], "labels": labels[rows]})
            # Every process calls this at every step: it also checks for a SIGTERM.
            manager.save(state, step=number, force=number == args.steps)
            if number % PRINT_EVERY == 0 and index == 0:
                print(f"step {number}: loss {metrics['loss']:.6f}", flush=True)
    print(f"process {index} is done after step {args.steps}", flush=True)


def start_process(args: argparse.Namespace) -> None:
    """Connects this process with the others, if there are any. Must run before anything asks for a device."""
    if args.cluster:
        # JAX finds the other processes by SLURM, Kubernetes, Open MPI or a TPU pod. This needs the option, and is not
        # tried silently: processes that do not find each other would each train the same model, unnoticed.
        jax.distributed.initialize()
    elif "JAX_PROCESS_ID" in os.environ:  # from launch_local.py, with JAX_COORDINATOR_ADDRESS, which JAX reads itself
        jax.distributed.initialize(
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
            process_id=int(os.environ["JAX_PROCESS_ID"]),
            cluster_detection_method="deactivate",
        )
    else:
        os.environ.setdefault("PJRT_NPROC", "32")  # threads for two steps at once; see ../cpu_devices.py
        jax.config.update("jax_num_cpu_devices", 8)  # has no effect on accelerators


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train on digits with ZeRO, in one process or in many.")
    parser.add_argument("--cluster", action="store_true", help="let JAX find the other processes of this job")
    parser.add_argument("--checkpoints", type=pathlib.Path, default=pathlib.Path("multi_process_checkpoints"))
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--nodes", type=int, help="hosts: gather between them once per step")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step over all devices")
    parser.add_argument("--steps", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    main()
