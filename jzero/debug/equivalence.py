"""Checks that training with jzero equals training on one device, for the user's own loss and state."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jzero.core.base.text import path_str
from jzero.core.base.types import PyTree, State, TrainStateLike
from jzero.core.config.zero import ZeroConfig
from jzero.core.state.adapter import Loss, adapt, plan_if_sharded, plan_of
from jzero.core.state.gather import unshard_train_state
from jzero.core.state.shard import shard_train_state
from jzero.debug.deviations import EquivalenceReport, StepPair, leaf_deviation
from jzero.debug.reference import Reference
from jzero.training import make_train_step

COMPARED = ("loss", "grad_norm", "step_applied", "loss_scale")
"""The metrics that both runs need."""


def check_equivalence(  # noqa: PLR0913  # the options of two functions
    loss_fn: Loss,
    state: State,
    batches: Iterable[PyTree],
    *,
    stage: int | None = None,
    config: ZeroConfig | None = None,
    mesh: Mesh | None = None,
    has_aux: bool = False,
    accumulate_steps: int = 1,
    clip_norm: float | None = None,
    mutable: Sequence[str] = (),
    merge: Mapping[str, str] | None = None,
) -> EquivalenceReport:
    """Trains twice, sharded with jzero and on one device with plain `jax.value_and_grad` and optax, and compares.

    Use it in the tests of a project that trains with jzero. It finds losses that are not a mean over independent
    examples, models that mix examples, optimizers whose state jzero might lay out wrongly, and faults of jzero itself.
    The reference takes each batch at once, whatever `accumulate_steps`. With a precision policy, it keeps masters,
    casts parameters for the loss as the plan says, and gives optax float32 gradients. It multiplies the loss by the
    loss scale of jzero's step, and skips the steps that jzero skipped because of it.

    The reference holds the whole state on one device, and jzero's final state becomes whole on every device: use a
    small model. If the mesh has axes other than the batch's, every device holds and computes the whole reference.
    Dropout differs between the runs: switch it off.

    Args:
      loss_fn: As for `make_train_step`, without `rng`.
      state: A train state of any kind, plain or sharded. It is not consumed.
      batches: One global batch per step.
      stage: ZeRO stage; short for `config=ZeroConfig(stage=stage)`. By default that of a sharded state.
      config: What to partition, and how. By default that of a sharded state.
      mesh: The devices. By default all of them, or those of a sharded state.
      has_aux: As for `make_train_step`; `aux` is not compared.
      accumulate_steps: As for `make_train_step`.
      clip_norm: As for `make_train_step`.
      mutable: As for `make_train_step`; these fields are compared like the parameters.
      merge: As for `make_train_step`.

    Returns:
      An `EquivalenceReport`. `report.check()` raises if the runs deviate.

    Raises:
      ValueError: There are no batches, or `shard_train_state` or the step raises one.
      TypeError: `loss_fn` needs a third argument, such as `rng`, or `batches` is a single batch.

    Example:
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
      >>> report = jzero.check_equivalence(loss_fn, plain_state, [jnp.ones((64, 512))] * 2, stage=3)
      >>> report.check()
      >>> report.worst
      'w'
    """
    _check_loss(loss_fn, mutable)
    batches = _check_batches(batches)
    state, sharded = _plain_and_sharded(state, stage, config, mesh)
    plan = plan_of(sharded)
    step = make_train_step(
        loss_fn,
        has_aux,
        accumulate_steps=accumulate_steps,
        clip_norm=clip_norm,
        mutable=tuple(mutable),
        merge=merge,
        check_rows=False,  # the comparison says more
    )
    measured: list[dict[str, float]] = []
    for batch in batches:
        sharded, metrics = step(sharded, batch)
        measured.append({name: float(metrics[name]) for name in COMPARED if name in metrics})
    plan = step.with_remat("as_written").plan(sharded, batches[0])  # which knows what the loss writes
    ours = _values(adapt(unshard_train_state(sharded)).state, mutable)
    del sharded

    reference = Reference(loss_fn, plan, has_aux=has_aux, mutable=tuple(mutable), clip_norm=clip_norm)
    plain = reference.start(adapt(state).state)
    before = _values(plain, mutable)
    pairs = []
    for batch, ran in zip(batches, measured, strict=True):
        applied = bool(ran["step_applied"])
        plain, loss, norm = reference(plain, batch, scale=ran.get("loss_scale", 1), applied=applied)
        pairs.append(StepPair(ran["loss"], loss, ran["grad_norm"], norm, applied))
    after = _values(plain, mutable)
    leaves = tuple(leaf_deviation(path, ours[path], x, before[path]) for path, x in after.items())
    return EquivalenceReport(plan.config.stage, plan.num_shards, tuple(pairs), leaves)


def _check_loss(loss_fn: Loss, mutable: Sequence[str]) -> None:
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # some callables have no signature; the step rejects other objects
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in positional[2:] if p.default is p.empty and p.name not in mutable]
    if needed:
        raise TypeError(
            f"`loss_fn` needs {needed} beside parameters and batch, which `check_equivalence` does not hand over: "
            "devices fold `rng` with their index, so no run on one device draws the same numbers. Pass a loss without "
            'randomness; fields of the state that the loss changes are named in `mutable=("batch_stats",)`.'
        )


def _check_batches(batches: Iterable[PyTree]) -> list[PyTree]:
    if isinstance(batches, Mapping) or hasattr(batches, "shape"):
        raise TypeError("`batches` must be a sequence of batches: put a single one into a list.")
    batches = list(batches)
    if not batches:
        raise ValueError("`batches` is empty: pass one batch per step.")
    return batches


def _plain_and_sharded(
    state: State, stage: int | None, config: ZeroConfig | None, mesh: Mesh | None
) -> tuple[State, State]:
    """Returns a state unsharded, and sharded as asked for, or else as it was."""
    plan = plan_if_sharded(adapt(state).state)
    if plan is not None:
        config = plan.config if stage is None and config is None else config
        mesh = mesh or plan.explicit_mesh  # type: ignore[assignment]  # that of arrays is concrete
        state = unshard_train_state(state)
    sharded = shard_train_state(state, stage=stage, config=config, mesh=mesh)
    if plan_of(sharded).config.offload.delay:
        raise ValueError(
            "`Offload(delay=1)` applies each gradient one step later, which is not what unsharded training does: check "
            "the same configuration with `delay=0`."
        )
    return state, sharded


def _values(state: TrainStateLike, mutable: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the compared leaves of a plain state, by path."""
    trees = {"": state.params, **{name: getattr(state, name) for name in adapt(state).compared_fields(mutable)}}
    values = {}
    for name, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if not name or jnp.issubdtype(x.dtype, jnp.inexact):
                wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
                values["/".join(filter(None, (name, path_str(path))))] = np.asarray(x, wide)
    return values
