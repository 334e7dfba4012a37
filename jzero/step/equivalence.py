"""Checks that training with jzero equals training on one device, for the user's own loss and state."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jzero._text import Report, path_str
from jzero._types import PyTree, State, TrainStateLike
from jzero.config.zero import ZeroConfig
from jzero.state.adapter import Loss, adapt, plan_if_sharded, plan_of
from jzero.state.gather import unshard_train_state
from jzero.state.shard import shard_train_state
from jzero.step.reference import Reference
from jzero.step.train_step import make_train_step

Row = Sequence[str]

MAX_ROWS = 20
COMPARED = ("loss", "grad_norm", "step_applied", "loss_scale")
"""The metrics that both runs need."""


@dataclasses.dataclass(frozen=True)
class StepPair:
    """One step of both runs.

    Attributes:
      loss: The loss with jzero.
      reference_loss: The loss on one device.
      grad_norm: Global norm of the gradients before clipping, with jzero.
      reference_grad_norm: The same on one device.
      applied: Whether jzero applied the step. Skipped steps are not compared.
    """

    loss: float
    reference_loss: float
    grad_norm: float
    reference_grad_norm: float
    applied: bool


@dataclasses.dataclass(frozen=True)
class LeafDeviation:
    """How far one leaf ends from the reference.

    Attributes:
      path: Its key path; for state that the loss changes, after the name of the field.
      absolute: Largest difference of an element.
      relative: The same, divided by the largest element of the reference.
      drift: Norm of the difference, divided by the norm of the reference's change of the leaf; near 1 the two runs have
        nothing in common. Use this number in 16 bits, where noise reverses the steps of single elements.
    """

    path: str
    absolute: float
    relative: float
    drift: float


@dataclasses.dataclass(frozen=True)
class EquivalenceReport(Report):
    """Deviations of a run with jzero from one on a single device. `print` it for a table; made by `check_equivalence`.

    Attributes:
      stage: The ZeRO stage.
      num_shards: N, the size of the ZeRO axis.
      steps: One `StepPair` per batch.
      leaves: One `LeafDeviation` per parameter (masters, in natural shapes) and per floating leaf of the state that
        the loss changes, after the last step.

    Example:
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).sum()  # should be a mean
      >>> report = jzero.check_equivalence(loss_fn, plain_state, [jnp.ones((64, 512))], stage=3)
      >>> report.check()
      Traceback (most recent call last):
      AssertionError: The loss deviates by 0.875, more than 0.0001. ...
    """

    stage: int
    num_shards: int
    steps: tuple[StepPair, ...]
    leaves: tuple[LeafDeviation, ...]

    @property
    def loss(self) -> float:
        """Largest relative deviation of the loss in an applied step; infinite if no step was applied."""
        return max((_relative_deviation(x.loss, x.reference_loss) for x in self._applied), default=math.inf)

    @property
    def grad_norm(self) -> float:
        """Largest relative deviation of the gradient norm in an applied step; infinite if no step was applied."""
        return max((_relative_deviation(x.grad_norm, x.reference_grad_norm) for x in self._applied), default=math.inf)

    @property
    def params(self) -> float:
        """Largest relative deviation of a leaf."""
        return max((leaf.relative for leaf in self.leaves), default=0.0)

    @property
    def drift(self) -> float:
        """Largest drift of a leaf."""
        return max((leaf.drift for leaf in self.leaves), default=0.0)

    @property
    def worst(self) -> str:
        """Key path of the leaf with the largest relative deviation."""
        return max(self.leaves, key=lambda leaf: leaf.relative).path if self.leaves else ""

    @property
    def farthest(self) -> str:
        """Key path of the leaf with the largest drift."""
        return max(self.leaves, key=lambda leaf: leaf.drift).path if self.leaves else ""

    @property
    def _applied(self) -> list[StepPair]:
        return [x for x in self.steps if x.applied]

    def check(self, *, loss: float = 1e-4, grad_norm: float = 1e-4, params: float = 1e-4, drift: float = 0.1) -> None:
        """Raises if a deviation is too large.

        The defaults suit float32 and tens of steps, where another order of summation costs about 1e-6. In 16 bits,
        2e-2 is usual for the first two. `params` must then allow for some steps of the learning rate, since noise
        reverses single elements, and `drift` tells whether a leaf is trained correctly. Adam ignores a constant factor
        in the gradients: only the loss and the gradient norm show it. Adam also turns pure rounding noise into full
        steps. So parameters whose gradient is zero up to rounding (a bias before a normalization) deviate without
        meaning anything: switch them off (`use_bias=False`).

        Args:
          loss: Largest allowed relative deviation of the loss.
          grad_norm: Largest allowed relative deviation of the gradient norm.
          params: Largest allowed relative deviation of a leaf.
          drift: Largest allowed drift of a leaf.

        Raises:
          AssertionError: Some deviation is larger, or not a number; the message has the table.
        """
        compared = [
            ("loss deviates", self.loss, loss),
            ("gradient norm deviates", self.grad_norm, grad_norm),
            (f"leaf {self.worst!r} deviates", self.params, params),
            (f"leaf {self.farthest!r} drifts", self.drift, drift),
        ]
        over = [f"The {what} by {x:.3g}, more than {limit:g}." for what, x, limit in compared if x > limit]
        if over:
            raise AssertionError(" ".join(over) + f"\n\n{self}")

    def __str__(self) -> str:
        skipped = [i for i, x in enumerate(self.steps) if not x.applied]
        head = [
            f"jzero (ZeRO stage {self.stage}, N={self.num_shards}) against one device with plain optax, "
            f"{len(self.steps)} steps",
            f"largest relative deviation: loss {self.loss:.2g}, gradient norm {self.grad_norm:.2g}, "
            f"leaves {self.params:.2g} ({self.worst}); largest drift: {self.drift:.2g} ({self.farthest})",
            *([f"steps that jzero skipped: {skipped}"] if skipped else []),
        ]
        steps: list[Row] = [("step", "loss", "reference", "deviation", "grad norm", "reference", "deviation")]
        steps += [(str(i), *_step_cells(x)) for i, x in enumerate(self.steps)]
        leaves: list[Row] = [("leaf", "absolute", "relative", "drift")]
        worst_first = sorted(self.leaves, key=lambda leaf: leaf.relative, reverse=True)
        leaves += [(x.path, f"{x.absolute:.2g}", f"{x.relative:.2g}", f"{x.drift:.2g}") for x in worst_first]
        return "\n\n".join(["\n".join(head), _table(steps), _table(leaves)])


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
    plan = plan_if_sharded(adapt(state).state)
    if plan is not None:
        config = plan.config if stage is None and config is None else config
        mesh = mesh or plan.mesh  # type: ignore[assignment]  # that of arrays is concrete
        state = unshard_train_state(state)
    sharded = shard_train_state(state, stage=stage, config=config, mesh=mesh)
    plan = plan_of(sharded)
    if plan.config.offload.delay:
        raise ValueError(
            "`Offload(delay=1)` applies each gradient one step later, which is not what unsharded training does: check "
            "the same configuration with `delay=0`."
        )
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
    leaves = tuple(_leaf_deviation(path, ours[path], x, before[path]) for path, x in after.items())
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


def _relative_deviation(x: float, reference: float) -> float:
    return _part(abs(x - reference), abs(reference))


def _part(difference: float, size: float) -> float:
    """Returns `difference / size`; infinity if that is not a number."""
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    return difference / size if size else math.inf if difference else 0.0


def _leaf_deviation(path: str, ours: np.ndarray, reference: np.ndarray, before: np.ndarray) -> LeafDeviation:
    if not (np.isfinite(ours).all() and np.isfinite(reference).all()):
        return LeafDeviation(path, math.inf, math.inf, math.inf)
    absolute, largest = (float(np.max(np.abs(x), initial=0.0)) for x in (ours - reference, reference))
    apart, moved = (float(np.linalg.norm(x)) for x in (ours - reference, reference - before))
    return LeafDeviation(path, absolute, _part(absolute, largest), _part(apart, moved))


def _step_cells(x: StepPair) -> tuple[str, ...]:
    pairs = ((x.loss, x.reference_loss), (x.grad_norm, x.reference_grad_norm))
    return tuple(cell for a, b in pairs for cell in (f"{a:.7g}", f"{b:.7g}", f"{_relative_deviation(a, b):.2g}"))


def _table(rows: Sequence[Row]) -> str:
    hidden = len(rows) - 1 - MAX_ROWS
    rows = rows[: MAX_ROWS + 1]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(lines + ([f"... {hidden} more"] if hidden > 0 else []))
