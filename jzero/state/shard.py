"""The public calls that plan and shard train states."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jzero._text import path_str
from jzero._types import PyTree, State, TrainStateLike
from jzero.arrays.fingerprints import describe_plan
from jzero.arrays.processes import agree, check_wait
from jzero.config.settings import FLAG, check
from jzero.config.zero import ZeroConfig, refers_to_config
from jzero.layout.leaves import StateLeaf
from jzero.layout.mesh import AnyMesh, axes_of_config, batch_axes, make_mesh
from jzero.layout.on_disk import ChangedFiles, OnDisk
from jzero.layout.padded import is_padded, unbox
from jzero.layout.placement import gather_padded
from jzero.plan.plan import ZeroPlan
from jzero.plan.planner import make_plan
from jzero.plan.trainable import restrict_opt_state, restrict_optimizer
from jzero.state.adapter import adapt, plan_if_sharded
from jzero.state.disk import checked_files
from jzero.state.gather import note_value
from jzero.state.pending import apply_pending
from jzero.state.train_state import check_alive, map_state, plain_state, stored_state
from jzero.update.transformation import ZeroTransformation


@refers_to_config("plan_train_state")
def plan_train_state(
    state: State,
    stage: int | None = None,
    *,
    config: ZeroConfig | None = None,
    mesh: AnyMesh | None = None,
    trainable: PyTree | str | None = None,
) -> ZeroPlan:
    """Plans where every leaf of a train state would live. Pure: places nothing.

    Args:
      state: A train state in natural shapes, concrete or abstract (`jax.ShapeDtypeStruct` leaves), or one
        already sharded by jzero.
      stage: ZeRO stage; short for `config=ZeroConfig(stage=stage)`.
      config: What to partition, and how. By default that of an already sharded state.
      mesh: The devices; all of them by default. A `jax.sharding.AbstractMesh` plans for a
        machine that you do not have.
      trainable: Which parameters are trained, as for `shard_train_state`.

    Returns:
      A `ZeroPlan`; `print` it for a table.

    Raises:
      ValueError: The configuration does not fit the mesh or the state.
      TypeError: The state has leaves that are not arrays; the message lists them.

    Example:
      >>> mesh = jax.sharding.AbstractMesh((512,), ("data",))
      >>> jzero.plan_train_state(plain_state, stage=1, mesh=mesh).num_shards
      512
    """
    return _request(adapt(state).state, stage, config, mesh, trainable).make_plan()


@refers_to_config("shard_train_state")
def shard_train_state(  # noqa: PLR0913  # what to place, how and where
    state: State,
    stage: int | None = None,
    *,
    config: ZeroConfig | None = None,
    mesh: Mesh | None = None,
    trainable: PyTree | str | None = None,
    donate: bool = False,
    check_processes: bool | float = True,
) -> State:
    """Places a train state over the devices, as the stage says. Values do not change.

    With a precision policy, parameters and optimizer state take its dtypes, and `opt_state` becomes a `ZeroOptState`
    that holds the optimizer's own state (`inner`) and the masters.

    Args:
      state: A Flax `TrainState` or subclass, an `nnx.ModelAndOptimizer`, a `(model, nnx.Optimizer)` pair, or a
        `jzero.TrainState`. An already sharded state is sharded again. A new one over the padded parameters of a sharded
        state (a second optimizer) is taken in natural shapes.
      stage: ZeRO stage; short for `config=ZeroConfig(stage=stage)`.
      config: What to partition, and how. By default that of an already sharded state.
      mesh: The devices. By default all of them, or those of an already sharded state.
      trainable: Which parameters are trained: a tree of booleans with the structure of `params` (or a prefix of
        it), or a regular expression over whole key paths such as `".*/lora_[ab]"`. The others get no
        gradient, no master copy and no optimizer state. By default those that the optimizer updates. Random keys are
        never trained.
      donate: Free each input leaf as soon as it is placed. The input cannot be used afterwards.
      check_processes: Whether several processes check that they have the same configuration, leaves and values. A
        number says how many seconds they wait for each other, 300 by default.

    Returns:
      A state of the caller's own class. Every leaf is a committed `jax.Array` on the mesh, in its stored shape; its
      `tx` carries the plan. It shares no buffer with the input.

    Raises:
      ValueError: The configuration does not fit the mesh or the state, or processes disagree; the message says how.
      TypeError: The state has leaves that are not arrays.

    Example:
      >>> state = jzero.shard_train_state(plain_state, stage=3)
      >>> jzero.plan_of(state).config.stage
      3

    References:
      Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
    """
    check("donate", donate, FLAG)
    check_has_devices(mesh)
    adapted = adapt(state)
    _check_concrete(adapted.state)
    check_alive(adapted.state)
    request = _request(adapted.state, stage, config, mesh, trainable)
    wait_s = check_wait(check_processes)
    compare = functools.partial(agree, "shard_train_state", request.mesh, wait_s=wait_s)
    plan = compare(request.make_plan, lambda plan: {"the training state": describe_plan(plan)})
    if request.old is not None:
        adapted = adapt(apply_pending(state, donate=donate))
    values: list[str] = []
    look = None if wait_s is None else values
    placed = compare(
        lambda: _place(adapted.state, request.old, plan, request.tx, donate=donate, values=look),
        lambda _: {"the initial values": "\n".join(values)},
    )
    return adapted.rebuild(placed)


def _place(
    train_state: TrainStateLike,
    old: ZeroPlan | None,
    plan: ZeroPlan,
    tx: Any,
    *,
    donate: bool,
    values: list[str] | None,
) -> TrainStateLike:
    """Moves a state from the layout `old` to `plan`; records the values that this process supplies in `values`."""
    plan.check_host_memory()
    files = checked_files(ZeroTransformation(tx, plan))
    arrays = _arrange(train_state, old, plan, tx)
    uses = collections.Counter(map(id, jax.tree.leaves(arrays)))
    for_disk: dict[str, Any] = {}

    def place(x: Any, leaf: StateLeaf) -> Any:
        if files is not None and leaf.in_records:  # once all that belongs to its parameter is known
            for_disk[leaf.path] = x
            return files.node(leaf)
        return place_now(x, leaf)

    def place_now(x: Any, leaf: StateLeaf) -> jax.Array:
        in_memory = unbox(x).read() if isinstance(unbox(x), OnDisk) else x
        placed = leaf.place(gather_padded(in_memory), look=note_value(values, leaf))
        if old is not None or donate or is_padded(x):  # one leaf at a time, so that at most one is whole
            jax.block_until_ready(placed)
        x = unbox(x)
        uses[id(x)] -= 1
        if donate and isinstance(x, jax.Array) and not uses[id(x)]:
            x.delete()
        return placed

    placed = map_state(place, plan, arrays, tx=ZeroTransformation(tx, plan), with_nodes=True, with_disk=True)
    if files is not None:
        files.fill(lambda i: [place_now(for_disk[x.path], x) for x in plan.disk_fields[i]], plan.disk_fields)
        files.pipeline.store.commit()
    if donate:  # free the leaves that the new state does not need
        for x in jax.tree.leaves(train_state):
            if isinstance(x, jax.Array) and not x.is_deleted():
                x.delete()
    return placed


@refers_to_config("abstract_train_state")
def abstract_train_state(
    state: State,
    *,
    stage: int | None = None,
    config: ZeroConfig | None = None,
    mesh: AnyMesh | None = None,
    trainable: PyTree | str | None = None,
) -> State:
    """Returns the result of `shard_train_state` as shapes with shardings: to restore into, or to lower steps with.

    Places nothing, so it takes no device memory.

    Args:
      state: A train state, plain or sharded before, concrete or abstract (`jax.eval_shape(make_state, key)`).
      stage: ZeRO stage; short for `config=ZeroConfig(stage=stage)`.
      config: What to partition, and how. By default that of an already sharded state.
      mesh: The devices, possibly those of a machine that you do not have.
      trainable: Which parameters are trained, as for `shard_train_state`.

    Returns:
      A state of the caller's own class with `jax.ShapeDtypeStruct` leaves; its `tx` carries the plan.

    Raises:
      ValueError: The configuration does not fit the mesh or the state.
      TypeError: The state has leaves that are not arrays; the message lists them.

    Example:
      >>> like = jzero.abstract_train_state(plain_state, stage=3)
      >>> like.params["w"].sharding.shard_shape(like.params["w"].shape)
      (64, 512)
    """
    adapted = adapt(state)
    request = _request(adapted.state, stage, config, mesh, trainable)
    plan = request.make_plan()

    def shape(x: Any, leaf: StateLeaf) -> jax.ShapeDtypeStruct | OnDisk:
        if leaf.in_records:
            return OnDisk(leaf.path, leaf.stored_shape, leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.stored_shape, leaf.stored_dtype, sharding=leaf.sharding)

    stored = stored_state(request.natural, plan)
    return adapted.rebuild(map_state(shape, plan, stored, tx=ZeroTransformation(request.tx, plan), with_disk=True))


class _Request(NamedTuple):
    """What to lay out, and how.

    Attributes:
      natural: The state to plan for, with natural shapes.
      tx: Its optimizer, not wrapped, restricted to the trained parameters.
      config: What to partition.
      mesh: The devices.
      old: The plan of a state that was sharded before.
    """

    natural: TrainStateLike
    tx: optax.GradientTransformation
    config: ZeroConfig
    mesh: AnyMesh
    old: ZeroPlan | None

    def make_plan(self) -> ZeroPlan:
        """Returns the plan."""
        return make_plan(self.natural, self.tx, self.config, self.mesh)


def _request(
    train_state: TrainStateLike, stage: int | None, config: ZeroConfig | None, mesh: Any, trainable: PyTree | str | None
) -> _Request:
    """Returns what the arguments of a call ask for; what they leave open stays as it was before."""
    old = plan_if_sharded(train_state)
    config = resolve_config(stage, config, old)
    mesh = resolve_mesh(mesh, config, old)
    natural = _natural_state(train_state, old)
    return _Request(*restrict(natural, natural.tx, trainable), config, mesh, old)


def restrict(state: TrainStateLike, tx: Any, trainable: PyTree | str | None) -> tuple[Any, Any]:
    """Returns a plain state and its optimizer, restricted to the trained parameters."""
    new_tx = restrict_optimizer(tx, trainable, state.params)
    if new_tx is tx:
        return state, tx
    return state.replace(opt_state=restrict_opt_state(new_tx, state.params, state.opt_state)), new_tx


def _arrange(train_state: TrainStateLike, old: ZeroPlan | None, plan: ZeroPlan, tx: Any) -> TrainStateLike:
    """Returns the state in the structure that `plan` stores. Padded leaves are nodes, which know their own layout."""
    plain, old_tx, before = train_state, train_state.tx, None
    if old is not None:
        plain = map_state(_known_shape, old.plain, plain_state(train_state, old, take_edits=True), with_disk=True)
        old_tx, before = train_state.tx.inner, train_state.opt_state
    if tx is not old_tx:
        shapes = plan.params_treedef.unflatten(
            [jax.ShapeDtypeStruct(leaf.param.shape, leaf.param.dtype) for leaf in plan.leaves]
        )
        plain = plain.replace(opt_state=restrict_opt_state(tx, shapes, plain.opt_state))
    return stored_state(plain, plan, before)


def _known_shape(x: Any, leaf: StateLeaf) -> Any:
    """Returns a leaf that knows its natural shape; one on disk will once it is read."""
    is_there = isinstance(x, OnDisk) and x.files is not None
    return dataclasses.replace(x, files=ChangedFiles(x.files, leaf.box)) if is_there else x


def resolve_config(stage: int | None, config: ZeroConfig | None, old: ZeroPlan | None = None) -> ZeroConfig:
    """Returns the configuration by `stage=` or `config=`, or else that of an already sharded state."""
    if isinstance(stage, ZeroConfig):
        raise TypeError("A configuration is passed by name, `config=...`: got a `ZeroConfig` as `stage`.")
    if config is None:
        if stage is None:
            if old is not None:
                return old.config
            raise ValueError("Say what to partition: pass `stage=` (0, 1, 2 or 3) or `config=jzero.ZeroConfig(...)`.")
        return ZeroConfig(stage=stage)  # type: ignore[arg-type]  # checked by ZeroConfig
    if not isinstance(config, ZeroConfig):
        raise TypeError(f"`config` must be a `jzero.ZeroConfig`: got {type(config).__name__}.")
    if stage is not None and stage != config.stage:
        raise ValueError(f"`stage={stage}` contradicts `config.stage={config.stage}`: pass one of them.")
    return config


def resolve_mesh(mesh: Any, config: ZeroConfig, old: ZeroPlan | None = None) -> Any:
    """Returns the mesh, or that of an already sharded state, or one of all devices."""
    if mesh is not None:
        return mesh
    if old is not None:
        return old.mesh
    for field, what in (("replica_axis", "replicas"), ("node_axis", "nodes")):
        if (name := getattr(config, field)) is not None:
            sizes = ", ".join(f"{axis}=..." for axis in batch_axes(config))
            raise ValueError(
                f"`{field}={name!r}` needs a mesh that says how many {what} there are: pass "
                f"`mesh=jzero.make_mesh({sizes})`."
            )
    axes: dict[str, Any] = {**axes_of_config(config)}
    return make_mesh(**axes)


def check_has_devices(mesh: Any) -> None:
    """Raises if a mesh is abstract."""
    if isinstance(mesh, AbstractMesh):
        raise TypeError(
            "An `AbstractMesh` has no devices to place arrays on: pass a mesh of devices, such as `jzero.make_mesh()`. "
            "`plan_train_state` and `abstract_train_state` take either, since they place nothing."
        )


def _check_concrete(train_state: TrainStateLike) -> None:
    abstract = [
        path_str(path)
        for path, x in jax.tree_util.tree_leaves_with_path(train_state)
        if isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer)
    ]
    if abstract:
        raise TypeError(
            f"`shard_train_state` places arrays, but these leaves are abstract: {abstract[:5]}. Call it outside `jit`; "
            "plan an abstract state with `plan_train_state`, make one that is born sharded with `init_train_state`."
        )


def _natural_shape(x: Any) -> Any:
    """Returns a padded leaf of another sharded state as a natural shape; anything else as it is."""
    if not is_padded(x):
        return x
    spec, cut = getattr(getattr(x.stored, "sharding", None), "spec", ()), x.cut_now
    other_spec = PartitionSpec(*[None if cut.cuts(d) else names for d, names in enumerate(spec)])
    sharding = NamedSharding(x.stored.sharding.mesh, other_spec) if any(other_spec) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _natural_state(train_state: TrainStateLike, old: ZeroPlan | None) -> TrainStateLike:
    """Returns the state to plan for: abstract, in natural shapes, with its own optimizer, if it was sharded before."""
    if old is None:
        return jax.tree.map(_natural_shape, train_state, is_leaf=is_padded)
    plain = plain_state(train_state, old)

    def abstract(x: Any, leaf: StateLeaf) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(old.mesh, leaf.base) if any(leaf.base) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.update_dtype or leaf.dtype, sharding=sharding)

    return map_state(abstract, old.plain, plain, tx=plain.tx.inner, with_disk=True)
