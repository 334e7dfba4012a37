"""What options that change numbers cost in loss: `python -m benchmarks.losses [integers] [late]`.

300 steps of a small GPT on bytes: the mean of the last 50 losses, and its difference to that of the first way from the
same seed, on the same batches.

* integers: rounding on the links (`Quantization`), on 2 x 2 virtual CPU devices, in fp32;
* late: updates that nobody waits for (`delay=1`, ZenFlow), on four, in bf16.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

from benchmarks.common import parser_of

LENGTH, ROWS, TAIL, PLAIN = 64, 16, 50, 64


def ways(case: str) -> dict[str, tuple[Any, Any]]:
    """Returns for each way its configuration, and that after `PLAIN` steps if it changes then."""
    import jzero

    if case == "integers":
        two = {"node_axis": "node", "secondary_params": True}
        kinds = ("exact", "gather=int8", "reduce=int8", "reduce=int4", "gather=int8,reduce=int4",
                 "gather=int8,reduce=int8")  # fmt: skip
        given = {kind: dict(pair.split("=") for pair in kind.split(",") if "=" in pair) for kind in kinds}
        make = lambda x: jzero.ZeroConfig(stage=3, persistence_threshold=0, quantization=jzero.Quantization(**x), **two)
        return {kind: (make(x), None) for kind, x in given.items()}
    host = jzero.Offload(optimizer="host", compute="host")
    late = dataclasses.replace(host, delay=1)
    flow = lambda **x: dataclasses.replace(host, zenflow=jzero.ZenFlow(**x))
    config = lambda x: x and jzero.ZeroConfig(stage=3, precision="bf16", persistence_threshold=0, offload=x)
    offloads = {
        "Adam": (host, None),
        "delay=1": (late, None),
        f"delay=1 after {PLAIN} steps": (host, late),
        "ZenFlow": (flow(), None),
        "ZenFlow, waits": (flow(overlap=False), None),
        f"ZenFlow after {PLAIN} steps": (flow(warm_up_steps=PLAIN), None),
    }
    return {name: (config(start), config(then)) for name, (start, then) in offloads.items()}


def tail_of(case: str, configs: tuple[Any, Any], seed: int, options: argparse.Namespace) -> float:
    """Returns the mean of the last losses of one run."""
    import numpy as np
    import optax

    import jzero
    from benchmarks.engines import loss_of
    from benchmarks.family_models import gpt
    from examples.text_data import load_corpus, sample_batch

    model = gpt(layers=3, scanned=True, seq_len=LENGTH, vocab=256, width=128, head=32, tied=False)
    if case == "integers":
        mesh, schedule = jzero.make_mesh(node=2, data=2), optax.cosine_decay_schedule(3e-3, options.steps, 0.1)
    else:
        mesh = jzero.make_mesh()
        schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 20, max(options.steps, 21), 3e-4)
    plain = jzero.TrainState.create(params=params_of(model, seed), tx=optax.adamw(schedule))
    state = jzero.shard_train_state(plain, config=configs[0], mesh=mesh)
    step, rng, losses = jzero.make_train_step(loss_of(model), clip_norm=1.0), np.random.default_rng(seed), []
    text = load_corpus().train
    for number in range(options.steps):
        if configs[1] is not None and number == PLAIN:
            state = jzero.shard_train_state(state, config=configs[1], mesh=mesh, donate=True)
        state, metrics = step(state, sample_batch(text, rng, batch_size=ROWS, seq_len=LENGTH))
        losses.append(float(metrics["loss"]))
    return statistics.mean(losses[-TAIL:])


def params_of(model: Any, seed: int) -> Any:
    """Returns parameters from which small models learn quickly: biases are 0, matrices keep the variance."""
    import jax

    def draw(path: Any, x: Any) -> Any:
        name = path[-1].key
        if name.endswith(("scale", "bias")):
            return x * 0 + name.endswith("scale")
        wide = 1 if name in ("embed", "positions") else 50 * x.shape[-2] ** -0.5
        return x * wide * (0.4 if name in ("out", "down") else 1)

    return jax.tree_util.tree_map_with_path(draw, model.init(jax.random.key(seed)))


def main() -> None:
    """Prints one line for each run, and one for each way."""
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help="of integers, late; both by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", help="ways beside the first")
    options = parser.parse_args()
    if unknown := set(options.cases) - {"integers", "late"}:
        parser.error(f"no cases {sorted(unknown)}: choose of integers, late")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    for case in options.cases or ("integers", "late"):
        first: dict[int, float] = {}
        for name, configs in ways(case).items():
            if first and options.only and name not in options.only:
                continue
            off = []
            for seed in options.seeds:
                tail = tail_of(case, configs, seed, options)
                off.append(tail - first.setdefault(seed, tail))
                print(f"{name:26} seed {seed}  {tail:.4f}  {off[-1]:+.4f}", flush=True)
            print(f"{name:26} mean    {statistics.mean(off):+.4f}", flush=True)


if __name__ == "__main__":
    main()
