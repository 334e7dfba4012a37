"""The train state for plain pytrees, and functions of the leaves of any train state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import optax

from jzero.core.base.text import few, path_str
from jzero.core.base.types import Optimizer, PyTree, TrainStateLike
from jzero.core.config.precision import is_key
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.padded import is_padded
from jzero.core.layout.placement import gather_padded, memory_of
from jzero.core.layout.set_mesh import in_own_mesh
from jzero.core.plan.opt_state import ZeroOptState
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.planner import own_opt_state
from jzero.core.plan.state_fields import check_leaves, check_optimizer

S = TypeVar("S", bound=TrainStateLike)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A train state for plain pytrees: Equinox, Haiku, hand-written models. Fields as in Flax's `TrainState`.

    Attributes:
      step: Number of steps taken, an `int32` scalar.
      params: A pytree of arrays.
      opt_state: The optimizer's state for `params`.
      tx: The optax transformation; static.
      apply_fn: A function that the training loop needs; static.
      extra: A pytree of further arrays: moving averages, coefficients, random keys. What has the structure and
        shapes of `params` is laid out like them; the rest is whole on every device. A loss that changes it takes it as
        `extra=` and returns the new value in `aux`: `make_train_step(loss_fn, has_aux=True, mutable=("extra",))`.

    Example:
      >>> state = jzero.TrainState.create(params={"w": jnp.ones((4, 4))}, tx=optax.sgd(0.1))
      >>> int(state.apply_gradients(grads=state.params).step)
      1
    """

    step: jax.Array | int
    params: PyTree
    opt_state: PyTree
    tx: Optimizer = dataclasses.field(metadata={"static": True})
    apply_fn: Callable[..., Any] | None = dataclasses.field(default=None, metadata={"static": True})
    extra: PyTree = None

    @classmethod
    def create(
        cls,
        *,
        params: PyTree,
        tx: optax.GradientTransformation,
        apply_fn: Callable[..., Any] | None = None,
        extra: PyTree = None,
    ) -> TrainState:
        """Returns the state before the first step.

        Args:
          params: A pytree of arrays. Padded parameters of a sharded state are gathered, whole on every device.
          tx: An optax transformation.
          apply_fn: Kept as it is.
          extra: Kept as it is; padded leaves are gathered, too.

        Raises:
          TypeError: `tx` is no optax transformation, or a leaf is no array.
        """
        check_optimizer(tx)
        check_leaves({"params": params, "extra": extra})
        params, extra = jax.tree.map(gather_padded, (params, extra), is_leaf=is_padded)
        step = jax.numpy.zeros((), "int32")
        return cls(step=step, params=params, opt_state=tx.init(params), tx=tx, apply_fn=apply_fn, extra=extra)

    @in_own_mesh
    def apply_gradients(self, *, grads: PyTree) -> TrainState:
        """Returns the state after one optimizer step with `grads`."""
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = jax.tree.map(_add_update, self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state)

    def replace(self, **changes: Any) -> TrainState:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def _add_update(param: jax.Array, update: jax.Array) -> PyTree:
    """Returns a parameter after its update, as optax adds the two; random keys do not change."""
    with jax.numpy_dtype_promotion("standard"):  # whatever the user set for arithmetic
        return param if is_key(jax.dtypes.result_type(param)) else optax.apply_updates(param, update)


def check_alive(tree: PyTree) -> None:
    """Raises if leaves are shapes, or arrays that an earlier step consumed, on which jaxlib 0.10 may crash."""
    leaves = jax.tree.leaves(tree)
    # Each call of a step runs this: there are fewer types than leaves, and a list is twice as fast as a generator.
    kinds = set(map(type, leaves))
    concrete = {kind for kind in kinds if issubclass(kind, jax.Array)}  # not tracers
    if jax.ShapeDtypeStruct in kinds:
        raise TypeError(
            "This state has shapes but no values, as `abstract_train_state` and `jax.eval_shape` return it. Shard a "
            "state with values, make one with `jzero.init_train_state`, or restore a checkpoint into it: "
            "`state = jzero.restore_checkpoint(path, state)`."
        )
    if any([x.is_deleted() for x in leaves if type(x) in concrete]):  # noqa: C419
        raise RuntimeError(
            "This state was consumed: its arrays were deleted when an earlier step reused their memory. Go on with the "
            "state that the step returned (`state, metrics = step(state, batch)`)."
        )


def require_planned_memory(state: TrainStateLike, plan: ZeroPlan, *, with_opt_state: bool = True) -> None:
    """Raises unless the arrays of a traced state are in the memory that the plan gives them."""
    on_host: list[StateLeaf] = []
    on_devices: list[StateLeaf] = []

    for x, leaf in zip(plan.view.flat(state), plan.view.leaves, strict=True):
        memory = leaf.array_memory
        if isinstance(x, jax.Array) and memory_of(x) != memory:
            (on_devices if memory == "host" else on_host).append(leaf)
    wrong = [leaf.path for leaf in (*on_host, *on_devices) if with_opt_state or leaf not in plan.opt_leaves]
    if wrong:
        where = "are in host memory" if on_host else "are on the devices, but the plan keeps them in host memory"
        raise RuntimeError(
            f"Parts of this state {where}: {few(wrong, 3)}. Bring everything back to its place with "
            "`state = jzero.reload_train_state(state)`."
        )


def plain_state(state: S, plan: ZeroPlan, *, take_edits: bool = False) -> S:
    """Returns a stored state with masters instead of parameters and the user's own optimizer state: `plan.plain`.

    Args:
      state: The stored state.
      plan: Its plan.
      take_edits: Whether to copy edits of the parameters to the masters, as the optimizer would.
    """
    if not plan.has_opt_state:
        return state
    params, masters = plan.view.params.flat(state.params), plan.view.params.flat(state.opt_state.masters)
    masters_or_params = [
        leaf.edited_master(x, m) if take_edits else x if leaf.master is None else m
        for x, m, leaf in zip(params, masters, plan.leaves, strict=True)
    ]
    return state.replace(params=plan.plain.view.params.stored(masters_or_params), opt_state=state.opt_state.inner)


def stored_state(state: S, plan: ZeroPlan, before: object = None) -> S:
    """Returns a plain state with the state that the precision policy adds; its leaves do not change.

    Args:
      state: A state laid out as `plan.plain`.
      plan: The plan.
      before: The optimizer state of an earlier layout, whose loss scale and counter continue.
    """
    params = plan.view.params.nodes(state.params)  # padded ones as nodes, so that masters are, too
    added = own_opt_state(plan, params)
    if added is None:
        return state
    if isinstance(before, ZeroOptState):
        added = added.continuing(before)
    return state.replace(opt_state=dataclasses.replace(added, inner=state.opt_state))


def write_fields(state: S, changed: Mapping[str, Mapping[str, jax.Array]]) -> S:
    """Returns `state` with new arrays, given by field and by path in the field."""

    def new(field: str) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: changed[field].get(path_str(path), x), getattr(state, field)
        )

    return state.replace(**{field: new(field) for field in changed}) if changed else state
