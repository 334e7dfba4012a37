"""The models of `examples/llm/` by compilation, for `benchmarks.slow_links`: experts divided, and long contexts."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
import jzero.hf
from jzero.machines.machine import machine
from jzero.machines.topologies import topology_devices

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "llm"))
import balance
import expert_parallel
import pretrain
import training
from decoder import Decoder

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "torch_dtype": "bfloat16",
}
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 5e5,
    "torch_dtype": "bfloat16",
}
CONTEXTS: dict[str, dict[str, Any]] = {
    "context 8, 16 parts of the loss": {},
    "loss of all tokens at once": {"loss_chunks": 1},
    "no recomputation": {"remat": False},
    "activations offloaded": {"remat": "offload"},
    "optimizer state offloaded": {"offload": "host"},
    "context 16": {"context": 16},
    "context 2": {"context": 2, "loss_chunks": 64},
    "no context": {"context": 1, "loss_chunks": 128},
    "context 4": {"context": 4, "loss_chunks": 32},
    "fused": {"attention": "splash"},
    "fused, windows of 4,096": {"attention": "splash", "sizes": {"model_type": "mistral", "sliding_window": 4096}},
    "4,096 tokens": {"seq": 4096, "context": 1, "loss_chunks": 1},
    "4,096 tokens, fused": {"seq": 4096, "context": 1, "loss_chunks": 1, "attention": "splash"},
    "1,048,576 tokens": {"seq": 2**20, "context": 64},
    "1,048,576 tokens, fused": {"seq": 2**20, "context": 64, "attention": "splash"},
}
ESTIMATED = ("no recomputation", "activations offloaded", "optimizer state offloaded", "context 2", "1,048,576 tokens")
"""Contexts that take long to compile, and are only reckoned from the trace."""
RINGS = {f"{seq:,} tokens, {size} devices": (seq, size) for size in (8, 32, 64) for seq in (2**15, 2**17, 2**20)}


def decoder_of(sizes: dict[str, Any], *options: str) -> tuple[Decoder, argparse.Namespace]:
    """Returns the model, and what `pretrain.py` makes of options."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(sizes))
        args = pretrain.parse_args([f"--config={folder}", "--data=none", *options])
        return Decoder(jzero.hf.read_config(folder)), args


def shapes_of(model: Decoder) -> Any:
    """Returns the shapes of its parameters."""
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def abstract_state(params: Any, config: jzero.ZeroConfig, mesh: Any) -> Any:
    """Returns a state as shapes, of parameters that may be cut already."""
    tx = training.make_optimizer(3e-4, 1000)
    plain = jax.eval_shape(lambda params: jzero.TrainState.create(params=params, tx=tx), params).replace(params=params)
    return jzero.abstract_train_state(plain, config=config, mesh=mesh)


def batch_of(rows: int, seq: int, mesh: Any) -> dict[str, Any]:
    """Returns the shapes of a batch."""
    split = NamedSharding(mesh, P("data"))
    shapes = {"tokens": ((rows, seq + 1), jnp.int32), "weights": ((rows,), jnp.float32)}
    return {name: jax.ShapeDtypeStruct(*x, sharding=split) for name, x in shapes.items()}


def experts(topology: str, name: str, sizes: dict[str, Any], seq: int = 4096) -> dict[str, Any]:
    """Returns what mixtures of experts take whose experts are on each device, or divided among some."""
    from benchmarks import experts_by_hand

    *kind, among = name.split()
    model, args = decoder_of(sizes, f"--experts={among}")
    apart = {} if among == "1" else {expert_parallel.EXPERTS: int(among)}
    mesh = jzero.make_mesh(devices=topology_devices(topology), **apart, data=-1)

    if kind == ["hand"]:
        with experts_by_hand.exchanged(experts_by_hand.BOTH):
            step, args = experts_by_hand.step_by_hand(mesh, sizes, seq)
            return compiled_figures(step, args, topology, mesh=mesh)

    def cut(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        spec = P(None, *apart) if expert_parallel.of_experts(path) else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree_util.tree_map_with_path(cut, shapes_of(model))
    state = abstract_state(params, training.zero_config(args), mesh)
    step = balance.make_step(training.of_parts(model, args).clone(mesh=mesh if apart else None), args)
    with experts_by_hand.exchanged() if kind else contextlib.nullcontext():
        return figures(step, state, batch_of(mesh.size, seq, mesh), topology)


def contexts(topology: str, name: str, sizes: dict[str, Any], seq: int | None = None) -> dict[str, Any]:
    """Returns what one way to train at long contexts takes."""
    how = {"context": 8, "loss_chunks": 16, "remat": None, "offload": "none", "attention": "plain", **CONTEXTS[name]}
    seq = seq or how.pop("seq", 2**17)
    sizes = {**sizes, **how.pop("sizes", {})}
    args = argparse.Namespace(**how, seq=seq, precision="bf16", persistence_threshold=100_000)
    mesh = jzero.make_mesh(devices=topology_devices(topology), **training.mesh_axes(args))
    model, _ = decoder_of(sizes)
    config = dataclasses.replace(training.zero_config(args), offload=jzero.Offload(optimizer=args.offload))
    state = abstract_state(shapes_of(model), config, mesh)
    loss_fn = training.next_token_loss(training.of_parts(model, args))
    step = jzero.make_train_step(loss_fn, clip_norm=1.0, remat=args.remat)
    return figures(step, state, batch_of(mesh.shape["data"], seq, mesh), topology, compiles=name not in ESTIMATED)


def rings(topology: str, name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns what gathered keys and values take by arithmetic, beside parts that go around a ring; of one layer.

    A recomputed layer multiplies weights four times and runs attention 2 + 3.5 times; splash's backward pass has 7
    products where the forward pass has 2. Gathering exposes all that it sends: keys and values twice, their gradients
    once. A ring hides it behind attention, and sends keys, values and fp32 gradients in the backward pass.
    """
    (seq, size), hardware = RINGS[name], machine(topology)
    width, head = sizes["hidden_size"], sizes["hidden_size"] // sizes["num_attention_heads"]
    of_keys = 2 * sizes["num_key_value_heads"] * head
    weights = width * (2 * width + of_keys + 3 * sizes["intermediate_size"])
    attention = 2 * seq**2 * width / size / hardware.flops["bf16"]  # causal, forward
    products = 2 * weights * seq / size / hardware.flops["bf16"]
    gathered = 2 * seq * of_keys
    sent = gathered * (size - 1) / size
    link = hardware.intra_link_bytes_per_s * min(1, 2 / hardware.num_links)  # of a torus, those of one axis
    port, nodes = hardware.inter_link_bytes_per_s or link, -(-size // hardware.devices_per_node)
    gather = max(sent / link, sent * nodes / size / port if nodes > 1 else 0.0)  # through the ports of all devices
    turn = sent / (port if nodes > 1 else link)  # through one device's
    by_gathers = 5.5 * attention + 4 * products + 3 * gather
    by_ring = 2 * max(attention, turn) + max(3.5 * attention, 3 * turn) + 4 * products
    seconds = {"attention": attention, "products": products, "gather": gather, "turn": turn}
    return {"gathered": gathered, "part": gathered // size, **seconds, "of_ring": by_gathers / by_ring}


def figures(step: Any, state: Any, batch: Any, topology: str, *, compiles: bool = True) -> dict[str, Any]:
    """Returns the figures of a step: estimated from its trace, and compiled."""
    started = time.perf_counter()
    memory = jzero.estimate_step_memory(step, state, batch, topology=topology)
    found: dict[str, Any] = {"states": memory.arguments, "estimated": memory.peak, "jax": jax.__version__}
    found = (compiled_figures(step, (state, batch), topology) if compiles else {}) | found
    return found | {"took_seconds": round(time.perf_counter() - started, 1)}


def compiled_figures(step: Any, args: tuple[Any, ...], topology: str, **where: Any) -> dict[str, Any]:
    """Returns the figures of a compiled step; `least` is its time if tokens are even, by the shortest branches."""
    try:
        report = jzero.analyze(step, *args, topology=topology, **where)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"note": "refused: too large"}
    sent = collections.Counter[str]()
    for row in report.collectives:
        sent[row.axis] += round(row.sent_bytes)
    return {
        "jax": jax.__version__,
        "states": report.memory.arguments,
        "peak": report.memory.peak,
        "seconds": None if report.timeline is None else report.timeline.seconds,
        "least": None if report.timeline is None else report.timeline.least,
        "exposed": report.exposed_communication,
        "sent_bytes": sum(sent.values()),
        "sent": dict(sent),
        "nic_bytes": report.nic_bytes,
        "violations": list(report.violations),
    }
