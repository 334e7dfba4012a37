"""What `test_fuzz` draws: small models and ways to train them, each a `Case` whose repr runs it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

import jzero
from tests.fuzz_layers import CLASSES, KINDS, LEARNING_RATE, apply

PyTree = Any


class Layer(NamedTuple):
    """One layer: its kind, its width (where the kind has one), and the dtype of its parameters."""

    kind: str
    width: int = 8
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a layout and a way to train; every default is the plainest choice."""

    seed: int = 0
    layers: tuple[Layer, ...] = (Layer("tanh"),)
    extras: tuple[str, ...] = ()
    framework: str = "plain"  # or "flax", for its train state
    loss: str = "mean"  # or "cross_entropy", "weighted", "weighted_by_params"
    l2: bool = False
    aux: bool = False
    poisoned: int | None = None  # the step whose gradient is not a number
    optimizer: str = "sgd"
    entry: str = "train_step"  # or "value_and_grad", "own_loop"
    num_devices: int = 8
    replicas: int = 1
    rows: int = 2  # of each device and micro-batch
    step: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def precision(self) -> jzero.Precision:
        return self.zero_config().policy

    @property
    def parts(self) -> int:
        """Slices of the batch whose means are averaged: micro-batches of devices."""
        return 1 if self.entry == "own_loop" else self.num_devices * dict(self.step).get("accumulate_steps", 1)

    @property
    def depends_on_slices(self) -> bool:
        """Whether the loss of the whole batch is another number than the mean of those of its slices."""
        return any(layer.kind == "cond_each" for layer in self.layers)

    def zero_config(self) -> jzero.ZeroConfig:
        return jzero.ZeroConfig(**dict(self.config), replica_axis="replica" if self.replicas > 1 else None)


EXTRAS = ("scalar", "empty", "unused", "frozen", "frozen_16", "permutation", "mask", "key")
FROZEN = ("frozen", "frozen_16", "permutation", "mask", "key")
TRAINABLE = "(?!(.*/)?(" + "|".join(FROZEN) + ")(/|$)).*"


def _extra(name: str, d: int, normal: Callable[..., Any]) -> Any:
    return {
        "scalar": normal,
        "empty": lambda: np.zeros((0, 5), np.float32),
        "unused": lambda: normal(7, 5),
        "frozen": lambda: normal(d, d),
        "frozen_16": lambda: normal(d, d).astype(jnp.bfloat16),
        "permutation": lambda: np.arange(d, dtype=np.int32)[::-1],
        "mask": lambda: np.arange(d) % 3 > 0,
        "key": lambda: jax.random.key(3),
    }[name]()


def make_params(case: Case, d: int) -> tuple[PyTree, int]:
    """Returns the parameters that go with an input of width `d`, and the width of the last layer."""
    rng = np.random.default_rng(case.seed)

    # In NumPy until the end: each operation of jax would be a program to compile.
    def normal(*shape: int) -> np.ndarray:
        return np.asarray(rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 4), np.float32)

    params: dict[str, Any] = {name: {name: _extra(name, d, normal)} for name in case.extras}
    for i, (name, k, dtype) in enumerate(case.layers):
        leaves = {x: normal(*shape) for x, shape in KINDS[name].shapes(d, k).items()}
        leaves = {x: v * (1 - 0.5j) if name == "complex_leaf" else v.astype(dtype) for x, v in leaves.items()}
        params[f"l{i}_{name}"] = leaves
        # How wide a layer's result is follows from the layer itself.
        h = np.zeros((2, d), np.float32)
        batch = {"x": h, "ids": np.zeros(2, np.int32), "turn": np.int32(0)}
        out = jax.eval_shape(lambda p, h, b, name=name: apply(name, p, h, b), leaves, h, batch)
        d = out.shape[1]
    params["head"] = {"w": normal(d, CLASSES)}
    return jax.device_put(params), d


def forward(case: Case, params: PyTree, h: Any, batch: dict[str, Any]) -> Any:
    """Returns logits `[rows, CLASSES]`."""
    if "permutation" in case.extras:
        h = h[:, params["permutation"]["permutation"]]
    if "mask" in case.extras:
        h = jnp.where(params["mask"]["mask"][None], h, 0.5 * h)
    if "key" in case.extras:
        h = h + jax.random.normal(params["key"]["key"], (h.shape[1],))[None] / 4
    for name in ("frozen", "frozen_16"):
        h = jnp.tanh(h @ params[name][name]) + h if name in case.extras else h
    if "scalar" in case.extras:
        h = h * (1 + params["scalar"]["scalar"])
    if "empty" in case.extras:
        h = h + params["empty"]["empty"].sum()
    for i, layer in enumerate(case.layers):
        h = apply(layer.kind, params[f"l{i}_{layer.kind}"], h.astype(jnp.float32), batch)
    return h @ params["head"]["w"]


def reduced(case: Case, params: PyTree, logits: Any, batch: dict[str, Any]) -> Any:
    """Returns what the loss function returns."""
    if case.loss == "cross_entropy":
        each = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["ids"] % CLASSES)
    else:
        each = jnp.square(logits - batch["y"]).mean(1)
    regular = jnp.zeros(())
    if case.l2:
        leaves = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
        regular = 1e-2 * sum(
            jnp.square(jnp.abs(x.astype(jnp.promote_types(jnp.float32, wide(x))))).sum() for x in leaves
        )
    poison = 0 if case.poisoned is None else 0 * params["head"]["w"].sum() * batch["poison"].sum()  # 0 * inf is NaN
    loss = each.mean() + regular + poison
    if case.loss.startswith("weighted"):
        by_params = 1 + jnp.abs(logits).mean(1) if case.loss == "weighted_by_params" else 1
        weights = batch["weight"] * by_params
        loss = jzero.Weighted((each * weights).sum() + weights.sum() * regular + poison, weights.sum())
    right = (logits.argmax(1) == batch["ids"] % CLASSES).sum()
    return (
        (loss, {"mean": each.mean(), "right": jzero.Summed(right), "each": jzero.PerExample(each)})
        if case.aux
        else loss
    )


def wide(x: Any) -> Any:
    return jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


def make_batch(case: Case, d: int, step: int) -> dict[str, Any]:
    rng = np.random.default_rng(1000 * case.seed + step)
    rows = case.rows * case.num_devices * dict(case.step).get("accumulate_steps", 1)
    # Where losses are scaled, the weight of the first micro-batch says what fp16 has room for.
    least = 1e-3 if case.precision.loss_scale is None else 0.5
    poison = np.zeros(rows, np.float32)
    if step == case.poisoned:
        poison[rng.integers(rows)] = np.inf
    return {
        "x": rng.normal(size=(rows, d)).astype(np.float32),
        "y": rng.normal(size=(rows, CLASSES)).astype(np.float32),
        "ids": rng.integers(0, 50, rows).astype(np.int32),
        "weight": rng.choice(np.float32([0, 0.5, 1, 2]), rows) + np.float32(least),
        "turn": np.int32(rng.integers(0, 3)),
        "poison": poison,
    }


# Adam and its kin divide by the gradient's own size; an eps of 1e-3 keeps that from amplifying the order of summation.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(LEARNING_RATE, eps=1e-3),
    "adamw": lambda: optax.adamw(LEARNING_RATE, eps=1e-3, weight_decay=0.1),
    "clip_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(LEARNING_RATE, eps=1e-3)),
    "lamb": lambda: optax.lamb(LEARNING_RATE, eps=1e-3),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(LEARNING_RATE, min_dim_size_to_factor=4),
    "rmsprop": lambda: optax.rmsprop(LEARNING_RATE, eps=1e-3),
    "schedule": lambda: optax.adamw(optax.linear_schedule(0.0, LEARNING_RATE, 2), eps=1e-3),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=LEARNING_RATE, eps=1e-3),
    "multi_steps": lambda: optax.MultiSteps(optax.adamw(LEARNING_RATE, eps=1e-3), every_k_schedule=2),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "decay_matrices": lambda: optax.chain(
        optax.adam(LEARNING_RATE, eps=1e-3),
        optax.masked(optax.add_decayed_weights(-1e-2), lambda p: jax.tree.map(lambda x: x.ndim >= 2, p)),
    ),
    "muon": lambda: optax.contrib.muon(LEARNING_RATE, eps=1e-3),
}

WIDTHS = (3, 4, 5, 7, 8, 9, 11, 13, 16, 17)
NARROW = ("bfloat16", "float16", "float8_e4m3fn")


def _likely(random: Random, chance: float) -> bool:
    """Whether something holds by chance; where a failing case shrinks, it does not."""
    return random.randrange(20) >= 20 * (1 - chance)


def _layers(random: Random, entry: str) -> tuple[Layer, ...]:
    # XLA's partitioner ends the process over the gradient of a sorted array that is cut unevenly, without jzero too.
    kinds = [kind for kind in KINDS if (kind, entry) != ("sorted_rows", "own_loop")]
    dtype = lambda: random.choice(NARROW) if _likely(random, 0.1) else "float32"
    one = lambda: Layer(random.choice(kinds), random.choice(WIDTHS), dtype())
    return tuple(one() for _ in range(random.randint(1, 3)))


# Growing and halving at once: each step of a run has another scale.
FP16 = jzero.Precision(
    compute_dtype="float16", loss_scale=jzero.DynamicLossScale(initial=2.0**8, hysteresis=1, window=1)
)
PRECISIONS = ("bf16", FP16, jzero.Precision(compute_dtype="bfloat16", reduce_dtype="float32"))
RULES = tuple(
    {"rules": {pattern: rule}}
    for rule in (jzero.LeafRule(replicated=True), jzero.LeafRule(persistent=False), jzero.LeafRule(persistent=True))
    for pattern in (".*", "head/w")
)


def _config(random: Random) -> dict[str, Any]:
    stage = random.choice((3, 3, 3, 2, 1, 0))
    config = {"stage": stage, "persistence_threshold": random.choice((0, 0, 0, 20, 100_000))}
    if _likely(random, 0.5):
        config["precision"] = random.choice((*PRECISIONS, jzero.Precision(skip_nonfinite=True)))
    if _likely(random, 0.3):
        config["reduce_scatter"] = False
    if stage == 3 and _likely(random, 0.7):
        config |= random.choice(({"reshard_after_forward": False}, *({"prefetch_bytes": n} for n in (0, 300, 10**6))))
    return config | (random.choice(RULES) if _likely(random, 0.15) else {})


def _step(random: Random, entry: str) -> dict[str, Any]:
    step: dict[str, Any] = {}
    if entry != "own_loop" and _likely(random, 0.6):
        step["remat"] = random.choice(("cheap", "as_written", True, False))
    if entry == "train_step":
        step |= {"accumulate_steps": random.choice((2, 3))} if _likely(random, 0.5) else {}
        step |= {"reduce": "last"} if step.get("accumulate_steps") and _likely(random, 0.4) else {}
        step |= {"clip_norm": 0.2} if _likely(random, 0.5) else {}
    return step


def _extras(random: Random, entry: str, framework: str) -> tuple[str, ...]:
    extras = set(random.sample(EXTRAS, random.randint(0, 3)))
    if entry == "own_loop":  # `jax.grad` differentiates no integers and no keys
        extras -= set(FROZEN)
    # Flax's `apply_gradients` adds to keys, as jax cannot.
    if entry == "value_and_grad" and framework == "flax":
        extras -= {"key"}
    return tuple(sorted(extras))


def _optimizers(layers: tuple[Layer, ...], extras: tuple[str, ...], policy: jzero.Precision) -> list[str]:
    """Returns those that plain optax itself can train such leaves with."""
    dtypes, able = {layer.dtype for layer in layers}, {*OPTIMIZERS}
    if "float8_e4m3fn" in dtypes:  # optax promotes, which jax refuses for 8-bit floats
        able &= {"sgd"}
    if any(layer.kind == "complex_leaf" for layer in layers):  # of the others some take signs, or cast to reals
        able &= {"adam", "adamw", "momentum", "sgd"}
    if "float16" in dtypes and policy.master is None:  # squares of gradients, kept in float16, underflow
        able &= {"ema", "momentum", "sgd"}
    if "empty" in extras:  # muon divides by the sizes of matrices
        able -= {"muon"}
    return [name for name in OPTIMIZERS if name in able]


LOSSES = ("mean", "cross_entropy", "weighted", "cross_entropy", "weighted", "weighted_by_params")


@st.composite
def cases(draw: Any) -> Case:
    """Draws a case; of each choice the simplest comes first, so that a failing case shrinks."""
    random = draw(st.randoms(use_true_random=False))
    config = _config(random)
    policy = jzero.ZeroConfig(**config).policy
    entry = random.choice(("train_step",) * 4 + ("value_and_grad", "own_loop"))
    if entry == "own_loop" and policy.loss_scale is not None:
        entry = "train_step"  # a loop of one's own would have to scale the loss itself
    framework = random.choice(("plain", "flax"))
    losses = LOSSES[:2] if entry == "own_loop" else LOSSES
    num_devices = random.choice((1, 2, 3, 4, 5, 8, 8, 8))
    layers, extras = _layers(random, entry), _extras(random, entry, framework)
    if any(layer.kind == "cond_each" for layer in layers):  # the reference would have to go over its slices twice
        losses = losses[:5]
    replicas = random.choice((1, 2)) if num_devices in (4, 8) else 1
    return Case(
        seed=random.randint(0, 999),
        layers=layers,
        extras=extras,
        framework=framework,
        loss=random.choice(losses),
        l2=_likely(random, 0.3),
        aux=entry != "own_loop" and _likely(random, 0.3),
        poisoned=random.choice((None, 1)) if policy.skips and entry == "train_step" else None,
        optimizer=random.choice(_optimizers(layers, extras, policy)),
        entry=entry,
        num_devices=num_devices,
        replicas=replicas,
        rows=random.randint(1, 3),
        step=tuple(_step(random, entry).items()),
        config=tuple(config.items()),
    )
