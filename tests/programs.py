"""Writes what is traced and lowered for fixed train steps, before and after a change that must not show there.

    python -m tests.programs before     # on the code as it was
    python -m tests.programs after      # on the code as it is
    diff -rq before after

Texts hold no addresses, source lines or modules of `jzero`, so that files may move.
"""

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

import jzero
from tests import engine_losses, models

OPAQUE = (
    engine_losses.branches,
    engine_losses.while_loop,
    engine_losses.custom_rules,
    engine_losses.fori_indexing_the_stack,
    engine_losses.scan_carrying_weights,
    engine_losses.tied,
)
SCANS = (
    engine_losses.scan_reversed_with_outputs,
    engine_losses.nested_jit,
    engine_losses.remat_with_policy,
    engine_losses.loop_after_layers_that_count,
)


class Program(NamedTuple):
    """A train step; `make` returns the loss, a plain state and a batch."""

    make: Callable[[], tuple[Any, Any, Any]]
    config: jzero.ZeroConfig
    options: dict[str, Any]


def gpt(**kwargs: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = models.GPT(d_model=40, **kwargs)
        return models.gpt_loss(model), models.gpt_state(model, optax.adamw(1e-3)), models.tokens(16)

    return make


def mlp(tx: Any = None) -> Callable[[], Any]:
    def make() -> Any:
        state = jzero.TrainState.create(params=models.mlp_params(), tx=tx or optax.adamw(1e-3))
        return models.mlp_loss, state, models.mlp_batch(16)

    return make


def sum_of(*losses: Callable[..., Any]) -> Callable[[], Any]:
    def loss(params: Any, batch: Any) -> Any:
        return sum(fn(params, batch) for fn in losses)

    def make() -> Any:
        return loss, jzero.TrainState.create(params=engine_losses.params(), tx=optax.adam(1e-3)), engine_losses.batch()

    return make


def program(make: Callable[[], Any], stage: int, options: dict[str, Any] | None = None, **fields: Any) -> Program:
    return Program(make, jzero.ZeroConfig(stage=stage, persistence_threshold=0, **fields), options or {})


HOST = jzero.Offload(optimizer="host", params="host", chunk_bytes=4096)
LATE = jzero.Offload(optimizer="host", compute="host", delay=1)
PROGRAMS = {
    "stage_0_scanned": program(gpt(), 0, {"remat": True}),
    "stage_1_tied_micro_batches": program(gpt(tied=True), 1, {"accumulate_steps": 2}),
    "stage_1_bf16_clipped": program(mlp(), 1, {"clip_norm": 1.0}, precision="bf16"),
    "stage_2_unrolled_cheap": program(gpt(scan=False, layers=3), 2, {"remat": "cheap"}),
    "stage_2_fp16_micro_batches": program(mlp(), 2, {"accumulate_steps": 2}, precision="fp16"),
    "stage_2_muon": program(mlp(optax.contrib.muon(1e-3)), 2),
    "stage_3_scanned": program(gpt(), 3),
    "stage_3_scanned_bf16_prefetch": program(gpt(layers=64), 3, precision="bf16", prefetch_bytes=10**6),
    "stage_3_unrolled_prefetch": program(gpt(scan=False), 3, {"remat": "as_written"}, prefetch_bytes=10**5),
    "stage_3_offloaded_activations": program(gpt(), 3, {"remat": "offload"}),
    "stage_3_opaque": program(sum_of(*OPAQUE), 3, {"remat": "as_written"}),
    "stage_3_loops_recomputed": program(sum_of(*SCANS), 3, {"remat": True}),
    "stage_3_kept": program(gpt(scan=False), 3, {"remat": False}, reshard_after_forward=False),
    "stage_3_offload": program(mlp(), 3, precision="bf16", offload=HOST),
    "stage_3_delayed": program(mlp(), 3, offload=LATE),
}


def texts(program: Program) -> dict[str, str]:
    """Returns a program's texts, by the ends of their files' names."""
    loss, state, batch = program.make()
    state = jzero.shard_train_state(state, config=program.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = jzero.make_train_step(loss, **program.options).trace(state, batch)
    return {"jaxpr": normalized(str(traced.jaxpr)), "mlir": normalized(traced.lower().as_text())}


def normalized(text: str) -> str:
    """Returns a program's text without addresses, source lines and the modules of functions."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    text = re.sub(r"(\s(at|from) )?/\S+\.py:\d+(:\d+)?", "", text)
    return re.sub(r"\bjzero(\.\w+)+\.(?=\w)", "jzero.", text)


def main() -> None:
    """Writes each text into a file of its own."""
    (folder,) = map(Path, sys.argv[1:])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    folder.mkdir(parents=True, exist_ok=True)
    for name, program in PROGRAMS.items():
        for end, text in texts(program).items():
            (folder / f"{name}.{end}").write_text(text)
            print(f"{name}.{end}: {len(text):,} characters", flush=True)


if __name__ == "__main__":
    main()
