"""Checks that training with jzero gives what training on one device gives, for the user's own loss and state."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero._text import path_str
from jzero.arrays.casts import round_to
from jzero.arrays.placement import place_array
from jzero.config.zero import ZeroConfig
from jzero.engine.meshes import MeshFacts
from jzero.engine.outputs import Weighted
from jzero.engine.trace import carried_leaves
from jzero.engine.walk import Walk
from jzero.engine.written import Written
from jzero.plan.leaves import StateLeaf
from jzero.plan.mesh import batch_axes
from jzero.plan.plan import ZeroPlan
from jzero.state.gather import unshard_train_state
from jzero.state.shard import shard_train_state
from jzero.state.train_state import adapt, map_state, plan_if_sharded, plan_of
from jzero.step.train_step import make_train_step

__all__ = ["EquivalenceReport", "LeafDeviation", "StepPair", "check_equivalence"]

PyTree = Any
State = Any
Loss = Callable[..., Any]
Row = Sequence[str]

MAX_ROWS = 20


@dataclasses.dataclass(frozen=True)
class StepPair:
    """One step of both runs.

    Attributes:
      loss: The loss with jzero.
      reference_loss: The loss on one device.
      grad_norm: Global norm of the gradients before clipping, with jzero.
      reference_grad_norm: The same on one device.
      applied: Whether jzero applied the step. One that it skipped is not compared.
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
      path: Its key path; for state that the loss changes with the name of the field in front.
      absolute: Largest difference of an element.
      relative: The same as a part of the largest element of the reference.
      drift: Norm of the difference as a part of the norm of what the reference moved the leaf: near 1 they have nothing
        in common. The number to look at in 16 bits, where noise turns the steps of single elements around.
    """

    path: str
    absolute: float
    relative: float
    drift: float


@dataclasses.dataclass(frozen=True)
class EquivalenceReport:
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
        return max((_relative(x.loss, x.reference_loss) for x in self._applied), default=math.inf)

    @property
    def grad_norm(self) -> float:
        """Largest relative deviation of the gradient norm in an applied step; infinite if no step was applied."""
        return max((_relative(x.grad_norm, x.reference_grad_norm) for x in self._applied), default=math.inf)

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
        """Raises if a deviation is larger than it may be.

        The defaults suit float32 and some tens of steps, where summation in another order costs about 1e-6. In 16 bits
        2e-2 for the first two is usual, `params` has to allow for some steps of the learning rate, since noise turns
        single elements around, and `drift` tells whether a leaf is trained rightly. Adam does not see a constant factor
        in the gradients: that shows in the loss and in the gradient norm alone. Adam also makes full steps of pure
        rounding noise, so that parameters whose gradient is zero but for rounding (a bias before a normalisation)
        deviate and mean nothing: switch them off (`use_bias=False`).

        Args:
          loss: Largest relative deviation of the loss that is allowed.
          grad_norm: Largest relative deviation of the gradient norm that is allowed.
          params: Largest relative deviation of a leaf that is allowed.
          drift: Largest drift of a leaf that is allowed.

        Raises:
          AssertionError: Some deviation is larger, or not a number; the message has the table.
        """
        found = [
            ("loss deviates", self.loss, loss),
            ("gradient norm deviates", self.grad_norm, grad_norm),
            (f"leaf {self.worst!r} deviates", self.params, params),
            (f"leaf {self.farthest!r} drifts", self.drift, drift),
        ]
        over = [f"The {what} by {x:.3g}, more than {limit:g}." for what, x, limit in found if x > limit]
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
) -> EquivalenceReport:
    """Trains twice, sharded with jzero and on one device with plain `jax.value_and_grad` and optax, and compares.

    For the tests of a project that trains with jzero: finds losses that are no mean over independent examples, models
    that mix examples, optimizers whose state jzero might lay out wrongly, and faults of jzero itself. The reference
    takes each batch at once, whatever `accumulate_steps`. Under a precision policy it keeps masters, hands the loss
    what the plan says that it sees, and gives optax gradients in float32; it multiplies the loss with the scale that
    jzero used in the step, and skips the steps that jzero skipped because of it.

    The reference holds the whole state on one device, and the end of the run with jzero on each: take a small model.
    Where the mesh has axes beside the batch's, which the loss may name, each device holds and computes all of it.
    Dropout differs between the runs: switch it off.

    Args:
      loss_fn: As for `make_train_step`, without `rng`.
      state: A train state of any kind, plain or sharded. It is not consumed.
      batches: One global batch per step.
      stage: ZeRO stage; short for `config=ZeroConfig(stage=stage)`. That of a sharded state by default.
      config: What to partition, and how. That of a sharded state by default.
      mesh: Over which devices; all of them, or those of a sharded state, by default.
      has_aux: As for `make_train_step`; `aux` is not compared.
      accumulate_steps: As for `make_train_step`.
      clip_norm: As for `make_train_step`.
      mutable: As for `make_train_step`; these fields are compared like the parameters.

    Returns:
      An `EquivalenceReport`. `report.check()` raises if the runs deviate.

    Raises:
      ValueError: There are no batches, or what `shard_train_state` and the step raise.
      TypeError: `loss_fn` needs a third argument, such as `rng`, or `batches` is a single batch.

    Example:
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
      >>> report = jzero.check_equivalence(loss_fn, plain_state, [jnp.ones((64, 512))] * 2, stage=3)
      >>> report.check()
      >>> report.worst
      'w'
    """
    _check_loss(loss_fn, mutable)
    batches = _checked(batches)
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
        loss_fn, has_aux, accumulate_steps=accumulate_steps, clip_norm=clip_norm, mutable=tuple(mutable)
    )
    measured: list[dict[str, float]] = []
    for batch in batches:
        sharded, metrics = step(sharded, batch)
        measured.append({name: float(x) for name, x in metrics.items() if name != "aux"})
    ours = _values(adapt(unshard_train_state(sharded)).state, mutable)
    del sharded

    reference = _Reference(loss_fn, plan, has_aux=has_aux, mutable=tuple(mutable), clip_norm=clip_norm)
    plain = reference.start(adapt(state).state)
    before = _values(plain, mutable)
    pairs = []
    for batch, ran in zip(batches, measured, strict=True):
        plain, pair = reference(plain, batch, ran)
        pairs.append(pair)
    after = _values(plain, mutable)
    leaves = tuple(_leaf_deviation(path, ours[path], x, before[path]) for path, x in after.items())
    return EquivalenceReport(plan.config.stage, plan.num_shards, tuple(pairs), leaves)


class _Reference:
    """Training on one device.

    Of jzero it knows the dtypes of the plan, how a state is written, and how a loss that names a mesh is evaluated on
    another one.
    """

    def __init__(
        self, loss_fn: Loss, plan: ZeroPlan, *, has_aux: bool, mutable: tuple[str, ...], clip_norm: float | None
    ) -> None:
        self.loss_fn = loss_fn
        self.plan = plan
        self.has_aux = has_aux
        self.mutable = mutable
        self.clip_norm = clip_norm
        self.axes = batch_axes(plan.config)
        self.mesh = _mesh_of_one(plan.mesh, self.axes)
        self.whole = NamedSharding(self.mesh, PartitionSpec())
        self._steps: dict[Any, Callable[..., Any]] = {}

    def start(self, state: Any) -> Any:
        """Returns a plain state on one device: the values that jzero stores, in the dtypes that optax computes in."""
        plan = self.plan

        def place(x: Any, leaf: StateLeaf) -> jax.Array:
            return _cast(_cast(self._place(x), leaf.dtype), leaf.wide)

        state = map_state(place, plan.plain, state)
        params = plan.flat_params(state.params)
        wide = [_cast(x, leaf.update_dtype) for x, leaf in zip(params, plan.leaves, strict=True)]
        return state.replace(params=plan.params_treedef.unflatten(wide))

    def __call__(self, state: Any, batch: PyTree, ran: Mapping[str, float]) -> tuple[Any, StepPair]:
        """Returns the state after one step, and the step beside that of jzero, `ran`."""
        batch = jax.tree.map(self._place, batch)
        leaves, treedef = jax.tree.flatten(batch)
        kind = (treedef, *((x.shape, x.dtype) for x in leaves))
        if kind not in self._steps:
            step = functools.partial(self._step, self._traced(state, batch))
            self._steps[kind] = jax.jit(step, out_shardings=self.whole)
        with jax.set_mesh(self.mesh):
            new, loss, norm, weight = self._steps[kind](state, batch, jnp.float32(ran.get("loss_scale", 1)))
        applied = bool(ran["step_applied"])
        pair = StepPair(ran["loss"], float(loss), ran["grad_norm"], float(norm), applied)
        skips = float(weight) == 0 or (self.plan.config.policy.skips and not applied)
        return (state if skips else new), pair

    def _place(self, x: Any) -> jax.Array:
        if not isinstance(x, jax.Array):
            x = np.asarray(x)
            return place_array(x, jax.dtypes.canonicalize_dtype(x.dtype), self.whole)
        if not x.is_fully_addressable:  # of several processes: whole on each
            x = x.addressable_data(0)
        return place_array(x, x.dtype, self.whole)

    def _step(
        self, traced: Loss | None, state: Any, batch: PyTree, scale: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
        treedef, leaves = self.plan.params_treedef, self.plan.leaves
        params = treedef.flatten_up_to(state.params)
        seen = [round_to(x, leaf.compute_dtype) for x, leaf in zip(params, leaves, strict=True)]
        _, carried = self._bind(state)
        trained = self._trained(seen)
        (_, (total, weight, changed)), found = jax.shard_map(
            traced or self._loss_and_grads(state),
            mesh=self.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=self._manual,
            check_vma=False,
        )(trained, seen, batch, carried, scale)
        divisor = jnp.where(weight == 0, 1, weight)
        grads = {i: g.astype(jnp.promote_types(g.dtype, jnp.float32)) / divisor / scale for i, g in found.items()}
        norm = jnp.sqrt(sum((jnp.sum(jnp.square(jnp.abs(g))) for g in grads.values()), jnp.zeros(())))
        factor = 1 if self.clip_norm is None else jnp.minimum(1, self.clip_norm / (norm + 1e-6))
        for_optax = [
            (grads[i] * factor).astype(leaf.update_dtype) if i in grads else jnp.zeros_like(x)
            for i, (x, leaf) in enumerate(zip(params, leaves, strict=True))
        ]
        written = state.absorb(changed) if hasattr(state, "absorb") else state.replace(**changed)
        new = written.apply_gradients(grads=treedef.unflatten(for_optax))
        return new, total / divisor, norm, weight

    def _loss_and_grads(self, state: Any) -> Loss:
        """Returns `fn(trained, seen, batch, carried, scale) -> ((_, (sum, weight, changed)), grads)`."""
        call, _ = self._bind(state)
        treedef = self.plan.params_treedef

        def scaled_loss(trained: dict[int, Any], seen: list[Any], batch: PyTree, carried: Any, scale: Any) -> Any:
            whole = treedef.unflatten([trained.get(i, x) for i, x in enumerate(seen)])
            result, changed = call(whole, batch, **carried)
            loss, aux = result if self.has_aux else (result, {})
            changed = {**changed, **{name: aux[name] for name in self.mutable}}
            total, weight = (loss.sum, loss.weight) if isinstance(loss, Weighted) else (loss, jnp.int32(1))
            total = total.astype(jnp.promote_types(total.dtype, jnp.float32))
            return total * scale.astype(total.dtype), (total, jax.lax.stop_gradient(weight), changed)

        return jax.value_and_grad(scaled_loss, has_aux=True)

    def _traced(self, state: Any, batch: PyTree) -> Loss | None:
        """Returns what evaluates loss and gradients on the mesh of the reference if the loss names its own mesh.

        It is differentiated where it is called, under whatever is set there, and takes what `_loss_and_grads` takes.
        """
        _, carried = self._bind(state)
        seen = [jax.ShapeDtypeStruct(leaf.param.shape, leaf.compute_dtype) for leaf in self.plan.leaves]
        batch, carried = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (batch, carried))
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        names = [(name, 1) for name in self.axes]
        trace = jax.make_jaxpr(self._loss_and_grads(state), axis_env=names, return_shape=True)
        jaxpr, out_shape = trace(self._trained(seen), seen, batch, carried, scale)
        if not MeshFacts().of(jaxpr).carried:
            return None
        walk = Walk.start(frozenset(self._manual))

        def evaluate(*inputs: Any) -> Any:
            return jax.tree.unflatten(jax.tree.structure(out_shape), walk.all_whole(jaxpr, *jax.tree.leaves(inputs)))

        return evaluate

    def _trained(self, params: list[Any]) -> dict[int, Any]:
        """Returns those of the parameters that have gradients, by index."""
        return {
            i: x
            for i, (x, leaf) in enumerate(zip(params, self.plan.leaves, strict=True))
            if leaf.trained and jnp.issubdtype(x.dtype, jnp.inexact)
        }

    @property
    def _manual(self) -> set[str]:
        """The axes of size one, and those of copies."""
        return {name for name in self.mesh.axis_names if name in self.axes or name not in self.plan.mesh.axis_names}

    def _bind(self, state: Any) -> tuple[Loss, dict[str, PyTree]]:
        """Returns `fn(params, batch, **carried) -> (result, changed)`, and what is carried."""
        if not hasattr(state, "bind_loss"):
            carried = {name: getattr(state, name) for name in self.mutable}
            return lambda *args, **kwargs: (self.loss_fn(*args, **kwargs), {}), carried
        bound, carried = state.bind_loss(self.loss_fn, self.axes)
        values, treedef = jax.tree.flatten(carried)
        layouts = carried_leaves(self.plan, carried)
        seen = [x if leaf is None else round_to(x, leaf.compute_dtype) for x, leaf in zip(values, layouts, strict=True)]
        carried = treedef.unflatten(seen)

        def call(*args: Any, **kwargs: Any) -> Any:
            result, changed = bound(*args, **kwargs)
            return result, jax.tree.map(lambda x: x.value, changed, is_leaf=lambda x: isinstance(x, Written))

        return call, carried


def _mesh_of_one(mesh: Any, axes: tuple[str, ...]) -> Mesh:
    """Returns a mesh whose `axes` have size one, for models that name them.

    Without further axes it is of one device. Else, or where a mesh is set, whose size jax lets nobody change, it is of
    all, in their order, so that all processes run one program: along the axes of copies each device does the same.
    Those of size one come first: jax 0.12 ends the process where they come after one that the loss makes manual itself.
    """
    assert isinstance(mesh, Mesh)
    if set(mesh.axis_names) == set(axes) and jax.sharding.get_abstract_mesh().empty:
        return Mesh(np.array(mesh.local_devices[:1]).reshape((1,) * len(axes)), axes)
    others = [f"copies along {name}" if name in axes else name for name in mesh.axis_names]
    return Mesh(mesh.devices.reshape(*(1 for _ in axes), *mesh.devices.shape), (*axes, *others))


def _check_loss(loss_fn: Any, mutable: Sequence[str]) -> None:
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # some callables have no signature; the step finds what is no callable
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in positional[2:] if p.default is p.empty and p.name not in mutable]
    if needed:
        raise TypeError(
            f"`loss_fn` needs {needed} beside parameters and batch, which `check_equivalence` does not hand over: "
            "devices fold `rng` with their index, so no run on one device draws the same numbers. Pass a loss without "
            'randomness; fields of the state that the loss changes are named in `mutable=("batch_stats",)`.'
        )


def _checked(batches: Any) -> list[PyTree]:
    if isinstance(batches, Mapping) or hasattr(batches, "shape"):
        raise TypeError("`batches` must be a sequence of batches: put a single one into a list.")
    batches = list(batches)
    if not batches:
        raise ValueError("`batches` is empty: pass one batch per step.")
    return batches


def _values(state: Any, mutable: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns what is compared of a plain state, by path."""
    trees = {"": state.params, **{name: getattr(state, name) for name in mutable}}
    if hasattr(state, "bind_loss"):
        trees["rest"] = state.rest
    found = {}
    for name, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if not name or jnp.issubdtype(x.dtype, jnp.inexact):
                wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
                found["/".join(filter(None, (name, path_str(path))))] = np.asarray(x, wide)
    return found


def _relative(x: float, reference: float) -> float:
    return _part(abs(x - reference), abs(reference))


def _part(difference: float, size: float) -> float:
    """Returns `difference / size`, infinite where that is no number."""
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    return difference / size if size else math.inf if difference else 0.0


def _leaf_deviation(path: str, ours: np.ndarray, reference: np.ndarray, before: np.ndarray) -> LeafDeviation:
    if not (np.isfinite(ours).all() and np.isfinite(reference).all()):
        return LeafDeviation(path, math.inf, math.inf, math.inf)
    absolute, largest = (float(np.max(np.abs(x), initial=0.0)) for x in (ours - reference, reference))
    apart, moved = (float(np.linalg.norm(x)) for x in (ours - reference, reference - before))
    return LeafDeviation(path, absolute, _part(absolute, largest), _part(apart, moved))


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if dtype is None or x.dtype == dtype else x.astype(dtype)


def _step_cells(x: StepPair) -> tuple[str, ...]:
    pairs = ((x.loss, x.reference_loss), (x.grad_norm, x.reference_grad_norm))
    return tuple(cell for a, b in pairs for cell in (f"{a:.7g}", f"{b:.7g}", f"{_relative(a, b):.2g}"))


def _table(rows: Sequence[Row]) -> str:
    hidden = len(rows) - 1 - MAX_ROWS
    rows = rows[: MAX_ROWS + 1]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(lines + ([f"... {hidden} more"] if hidden > 0 else []))
