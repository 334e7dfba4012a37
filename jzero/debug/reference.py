"""Training on one device with plain jax and optax, the reference of `check_equivalence`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jzero.core.arrays.collectives import fold_keys
from jzero.core.base.types import DType, PyTree, TrainStateLike
from jzero.core.config.precision import is_key, scale_by, widen
from jzero.core.engine.outputs import Weighted
from jzero.core.engine.rules import start_walk
from jzero.core.engine.trace import carried_leaves, param_shape
from jzero.core.engine.walk import MeshFacts
from jzero.core.engine.written_variables import Changed, by_field, by_path, unchanged_shape
from jzero.core.layout.casts import round_to
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import AnyMesh, batch_axes
from jzero.core.layout.placement import overwrite, place_array
from jzero.core.layout.set_mesh import set_if_explicit
from jzero.core.plan.plan import ZeroPlan
from jzero.core.state.adapter import Loss, adapt
from jzero.core.state.train_state import write_fields
from jzero.core.update.whole import call_update, extra_args

A = TypeVar("A", jax.Array, jax.ShapeDtypeStruct)


class Reference:
    """Training on one device.

    It uses only four parts of jzero: the dtypes of the plan, the layout of a state, what a step hands to an optimizer
    that asks for the loss, and the walk, to evaluate a loss that names a mesh on another mesh.
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
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self._steps: dict[Hashable, Callable[..., tuple[TrainStateLike, jax.Array, jax.Array, jax.Array]]] = {}

    def start(self, state: TrainStateLike) -> TrainStateLike:
        """Returns a plain state on one device: the values that jzero stores, in optax's compute dtypes."""
        plan = self.plan

        def place(x: jax.Array, leaf: StateLeaf) -> jax.Array:
            return _cast(_cast(self._place(x), leaf.dtype), leaf.update_dtype)

        state = plan.plain.view.map(place, state)
        params = plan.view.params.flat(state.params)
        in_update_dtype = [_cast(x, leaf.update_dtype) for x, leaf in zip(params, plan.leaves, strict=True)]
        return state.replace(params=plan.view.params.tree(in_update_dtype))

    def __call__(
        self, state: TrainStateLike, batch: PyTree, *, scale: float, applied: bool
    ) -> tuple[TrainStateLike, float, float]:
        """Returns the state after one step, its loss, and the norm of its gradient.

        Args:
          state: The state before the step.
          batch: The whole batch.
          scale: The loss scale of jzero's step.
          applied: Whether jzero applied the step; if the precision policy skips steps, the reference skips with it.
        """
        batch = jax.tree.map(self._place, batch)
        leaves, treedef = jax.tree.flatten(batch)
        kind = (treedef, *((x.shape, x.dtype) for x in leaves))
        if kind not in self._steps:
            step = functools.partial(self._step, self._trace_on_mesh(state, batch))
            self._steps[kind] = jax.jit(step, out_shardings=self.replicated)
        with jax.set_mesh(self.mesh):
            new, loss, norm, weight = self._steps[kind](state, batch, jnp.float32(scale))
        skips = float(weight) == 0 or (self.plan.config.policy.skips and not applied)
        return (state if skips else new), float(loss), float(norm)

    def _place(self, x: ArrayLike) -> jax.Array:
        if not isinstance(x, jax.Array):
            x = np.asarray(x)
            return place_array(x, jax.dtypes.canonicalize_dtype(x.dtype), self.replicated)
        if not x.is_fully_addressable:  # with several processes, it is whole on each
            x = x.addressable_data(0)
        return place_array(x, x.dtype, self.replicated)

    def _step(
        self, traced: Loss | None, state: TrainStateLike, batch: PyTree, scale: jax.Array
    ) -> tuple[TrainStateLike, jax.Array, jax.Array, jax.Array]:
        view, leaves = self.plan.view.params, self.plan.leaves
        params = view.nodes(state.params)
        rounded = [round_to(x, leaf.compute_dtype) for x, leaf in zip(params, leaves, strict=True)]
        _, carried = self._bind(state)
        trained = self._select_trained(rounded)
        (_, (total, weight, changed)), scaled_grads = jax.shard_map(
            traced or self._loss_and_grads(state),
            mesh=self.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=self._manual,
            check_vma=False,
        )(trained, rounded, batch, carried, scale)
        divisor = jnp.where(weight == 0, 1, weight)
        grads = {i: _divide(g, divisor, scale) for i, g in scaled_grads.items()}
        norm = jnp.sqrt(sum((jnp.sum(jnp.square(jnp.abs(g))) for g in grads.values()), jnp.zeros(())))
        factors = [] if self.clip_norm is None else [jnp.minimum(1, self.clip_norm / (norm + 1e-6))]
        for_optax = [
            scale_by(grads[i], *factors).astype(leaf.update_dtype) if i in grads else jnp.zeros_like(x)
            for i, (x, leaf) in enumerate(zip(params, leaves, strict=True))
        ]
        loss, for_optax, tx = _divide(total, divisor), view.tree(for_optax), state.tx
        update = functools.partial(call_update, tx, extra_args(loss, for_optax))
        written = _overwrite_fields(state, changed).replace(tx=optax.GradientTransformation(tx.init, update))
        return written.apply_gradients(grads=for_optax).replace(tx=tx), loss, norm, weight

    def _loss_and_grads(self, state: TrainStateLike) -> Loss:
        """Returns `fn(trained, rounded, batch, carried, scale) -> ((_, (sum, weight, changed)), grads)`."""
        call, _ = self._bind(state)
        view = self.plan.view.params

        def scaled_loss(
            trained: dict[int, jax.Array],
            rounded: list[jax.Array],
            batch: PyTree,
            carried: dict[str, PyTree],
            scale: jax.Array,
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, PyTree]]:
            params = view.tree([trained.get(i, x) for i, x in enumerate(rounded)])
            read = jax.tree.map(lambda x: fold_keys(x, 0) if is_key(x.dtype) else x, carried)  # as the first device
            seen = by_field(read)  # now: the loss may write into the trees
            result, changed = call(params, batch, **read)
            loss, aux = result if self.has_aux else (result, {})
            changed = {**changed, **{name: by_path(aux[name]) for name in self.mutable}}
            changed |= {name: _keep_keys(changed[name], seen[name], by_path(carried[name])) for name in read}
            total, weight = (loss.sum, loss.weight) if isinstance(loss, Weighted) else (loss, jnp.int32(1))
            total = widen(total)
            return total * scale.astype(total.dtype), (total, jax.lax.stop_gradient(weight), changed)

        return jax.value_and_grad(scaled_loss, has_aux=True)

    def _trace_on_mesh(self, state: TrainStateLike, batch: PyTree) -> Loss | None:
        """Returns a function like `_loss_and_grads`, on the reference's mesh; `None` unless the loss names a mesh."""
        _, carried = self._bind(state)
        rounded = [param_shape(leaf.param, leaf.compute_dtype, self.plan) for leaf in self.plan.leaves]
        batch, carried = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (batch, carried))
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        names = [(name, 1) for name in self.axes]
        trace = jax.make_jaxpr(self._loss_and_grads(state), axis_env=names, return_shape=True)
        with set_if_explicit(self.plan.loss_mesh):
            jaxpr, out_shape = trace(self._select_trained(rounded), rounded, batch, carried, scale)
        if not MeshFacts().of(jaxpr).carried:
            return None
        walk = start_walk(frozenset(self._manual))

        def evaluate(*inputs: PyTree) -> PyTree:
            return jax.tree.unflatten(
                jax.tree.structure(out_shape), walk.evaluate_unsharded(jaxpr, *jax.tree.leaves(inputs))
            )

        return evaluate

    def _select_trained(self, params: Sequence[A]) -> dict[int, A]:
        """Returns the parameters that have gradients, by index."""
        return {
            i: x
            for i, (x, leaf) in enumerate(zip(params, self.plan.leaves, strict=True))
            if leaf.trained and jnp.issubdtype(x.dtype, jnp.inexact)
        }

    @property
    def _manual(self) -> set[str]:
        """The manual axes: those of size one, and those of copies."""
        return {name for name in self.mesh.axis_names if name in self.axes or name not in self.plan.mesh.axis_names}

    def _bind(self, state: TrainStateLike) -> tuple[Loss, dict[str, PyTree]]:
        """Returns `fn(params, batch, **carried) -> (result, changed)`, and the carried state."""
        bound, carried = adapt(state).bind_loss(self.loss_fn, self.mutable, unchanged_shape)
        values, treedef = jax.tree.flatten(carried)
        layouts = carried_leaves(self.plan, carried)
        rounded = [
            round_to(x, leaf.seen_dtype) if leaf.is_param else x for x, leaf in zip(values, layouts, strict=True)
        ]
        carried = treedef.unflatten(rounded)

        def call(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, dict[str, dict[str, jax.Array]]]:
            result, changed = bound(*args, **kwargs)
            values = {field: {path: x.value for path, x in of_field.items()} for field, of_field in changed.items()}
            return result, values

        return call, carried


def _keep_keys(
    written: Mapping[str, jax.Array], read: Mapping[str, jax.Array], stored: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns what the loss wrote to a field; keys that it left as it read them are those that are stored."""
    return {
        path: jnp.where(x == read[path], stored[path], x) if is_key(read[path].dtype) else x
        for path, x in written.items()
    }


def _overwrite_fields(state: TrainStateLike, changed: Changed) -> TrainStateLike:
    """Returns a plain state with the values that the loss wrote."""
    old = {field: by_path(getattr(state, field)) for field in changed}
    new = {
        field: {path: overwrite(old[field][path], jnp.asarray(x)) for path, x in values.items()}
        for field, values in changed.items()
    }
    return write_fields(state, new)


def _mesh_of_one(mesh: AnyMesh, axes: tuple[str, ...]) -> Mesh:
    """Returns a mesh whose `axes` have size one, for models that name them.

    Without other axes the mesh has one device. With other axes, or if a mesh is set (jax does not allow another size),
    it has all devices, in their order, so that all processes run one program; devices along the axes of copies do the
    same work. Axes of size one come first: jax 0.12 crashes if they follow an axis that the loss itself makes manual.
    """
    assert isinstance(mesh, Mesh)
    if set(mesh.axis_names) == set(axes) and jax.sharding.get_abstract_mesh().empty:
        return Mesh(np.array(mesh.local_devices[:1]).reshape((1,) * len(axes)), axes)
    others = [f"copies along {name}" if name in axes else name for name in mesh.axis_names]
    return Mesh(mesh.devices.reshape(*(1 for _ in axes), *mesh.devices.shape), (*axes, *others))


def _cast(x: jax.Array, dtype: DType | None) -> jax.Array:
    return x if dtype is None or x.dtype == dtype else x.astype(dtype)


def _divide(x: jax.Array, *divisors: jax.Array) -> jax.Array:
    """Returns `x` in fp32 or wider, divided by one number after another."""
    x = widen(x)
    for divisor in divisors:
        x = x / divisor.astype(x.dtype)
    return x
