"""Steps with Muon on 8 virtual CPU devices, of two versions of jzero in turns, and what SOAP's state takes.

    python benchmarks/matrix_steps.py --versions before=../jzero-before now=. [--repeats 9]

Each version is a directory with a checkout. Two layers of 320 and 640 units in fp32 at stage 3, 64 rows. Each engine
has a process of its own; they take turns, step by step, so that all meet the same machine. The ratios are medians of
those of steps side by side. On virtual devices the same cores do everything: what the devices compute twice shows.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

WIDTH, HIDDEN, LAYERS, ROWS = 320, 640, 2, 64
ODD = {"in": (24, 40), "up": (40, 56), "down": (56, 40), "out": (40, 37)}
"""The model of SOAP's state."""
DECAY = 0.9


def soap(learning_rate: float) -> Any:
    """Returns SOAP for matrices: Adam in the eigenbases of Shampoo's statistics; QR turns the bases at each step."""
    import jax
    import jax.numpy as jnp
    import optax

    def init(params: Any) -> Any:
        eye = lambda x: {"l": jnp.eye(x.shape[0]), "r": jnp.eye(x.shape[1])}
        zeros = jax.tree.map(jnp.zeros_like, params)
        bases = jax.tree.map(eye, params)
        return {"mu": zeros, "nu": zeros, "stats": bases, "bases": bases}

    def one(g: Any, mu: Any, nu: Any, stats: Any, bases: Any) -> tuple[Any, ...]:
        new = {"l": DECAY * stats["l"] + g @ g.T, "r": DECAY * stats["r"] + g.T @ g}
        turned = {side: jnp.linalg.qr(new[side] @ bases[side])[0] for side in "lr"}
        into = lambda x: turned["l"].T @ x @ turned["r"]
        mu, nu = DECAY * mu + (1 - DECAY) * g, DECAY * nu + (1 - DECAY) * into(g) ** 2
        step = turned["l"] @ (into(mu) / (jnp.sqrt(nu) + 1e-8)) @ turned["r"].T
        return -learning_rate * step, mu, nu, new, turned

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, tree = jax.tree.flatten(updates)
        names = ("mu", "nu", "stats", "bases")
        updates, *new = zip(*map(one, leaves, *(tree.flatten_up_to(state[name]) for name in names)), strict=True)
        return tree.unflatten(updates), dict(zip(names, map(tree.unflatten, new), strict=True))

    return optax.GradientTransformation(init, update)


def work(optimizer: str) -> None:
    """Answers each line of the input with the seconds of one step; of SOAP, tells bytes of state once."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import jax.numpy as jnp
    import optax

    import jzero

    print(pathlib.Path(jzero.__file__).parent, flush=True)
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    normal = lambda i, shape: 0.1 * jax.random.normal(jax.random.key(i), shape)
    if optimizer == "soap":
        params: Any = {name: normal(i, shape) for i, (name, shape) in enumerate(ODD.items())}
        state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=soap(1e-3)), config=config)
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
        print(json.dumps({"held": held, "planned": jzero.plan_of(state).bytes_per_device.opt_state}), flush=True)
        return
    params = [{"up": normal(i, (WIDTH, HIDDEN)), "down": normal(i + 9, (HIDDEN, WIDTH))} for i in range(LAYERS)]

    def loss(params: Any, x: jax.Array) -> jax.Array:  # [rows, WIDTH]
        for layer in params:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return jnp.square(x).mean()

    tx = optax.contrib.muon(1e-3) if optimizer == "muon" else optax.adamw(1e-3)
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=tx), config=config)
    step, batch = jzero.make_train_step(loss), normal(0, (ROWS, WIDTH))
    for _ in range(2):
        state, _ = jax.block_until_ready(step(state, batch))
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        print(time.perf_counter() - started, flush=True)


class Worker:
    """A process of one version and optimizer."""

    def __init__(self, checkout: str, optimizer: str) -> None:
        path = str(pathlib.Path(checkout).resolve())
        environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, "--work", optimizer]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, cwd=path, stdin=pipe, stdout=pipe, text=True)
        folder = self.answer()
        if folder != str(pathlib.Path(path, "jzero")):
            raise RuntimeError(f"{command} with PYTHONPATH={path} found jzero in {folder}")

    def answer(self) -> str:
        """Returns the next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def seconds(self) -> float:
        """Returns the time of one more step."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return float(self.answer())

    def end(self) -> None:
        """Ends it."""
        self.process.communicate()


def main() -> None:
    """Measures the versions in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs=2, metavar="LABEL=DIRECTORY", help="the older one, the newer one")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    (old, old_path), (new, new_path) = (x.split("=", 1) for x in options.versions)
    for label, path in ((old, old_path), (new, new_path)):
        worker = Worker(path, "soap")
        print(f"SOAP's state per device, {label}: {worker.answer()}")
        worker.end()
    runs = {(old, "muon"): old_path, (new, "muon"): new_path, (new, "adamw"): new_path}
    workers = {key: Worker(path, key[1]) for key, path in runs.items()}
    for worker in workers.values():
        assert worker.answer() == "ready"
    times = {key: list[float]() for key in runs}
    for _ in range(options.repeats):
        for key, worker in workers.items():
            times[key].append(worker.seconds())
    for worker in workers.values():
        worker.end()
    for (label, optimizer), seconds in times.items():
        print(f"{optimizer}, {label}: {1e3 * statistics.median(seconds):.1f} ms")
    for a, b in (((old, "muon"), (new, "muon")), ((new, "muon"), (new, "adamw"))):
        ratios = sorted(x / y for x, y in zip(times[a], times[b], strict=True))
        print(f"{a} / {b}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
