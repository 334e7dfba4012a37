"""The public calls that plan and shard train states."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from jzero.core.base.text import path_str
from jzero.core.base.types import PyTree, State, TrainStateLike
from jzero.core.config.settings import FLAG, check
from jzero.core.config.zero import ZeroConfig, refers_to_config
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import AnyMesh
from jzero.core.layout.padded import is_padded, unbox
from jzero.core.layout.placement import gather_padded
from jzero.core.layout.stored import InRecords, when_read
from jzero.core.plan.plan import ZeroPlan
from jzero.core.processes.agree import agreement, check_wait
from jzero.core.processes.fingerprints import describe_plan
from jzero.core.state.access import apply_pending, readable
from jzero.core.state.adapter import adapt
from jzero.core.state.gather import note_value
from jzero.core.state.record_states import checked_records, records_of
from jzero.core.state.request import Request, check_has_devices, check_has_memories, request_of, with_optimizer
from jzero.core.state.train_state import check_alive, plain_state, stored_state
from jzero.core.update.transformation import ZeroTransformation


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
    return request_of(adapt(state).state, stage, config, mesh, trainable).plan()


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
    train_state = adapted.state
    request = request_of(train_state, stage, config, mesh, trainable)
    _check_values(train_state, request)
    wait_s = check_wait(check_processes)
    agreeing = functools.partial(agreement, "shard_train_state", request.mesh, wait_s=wait_s)
    with agreeing() as compared:
        plan = request.plan()
        compared.facts = lambda: {"the training state": describe_plan(plan)}
    if request.old is not None:
        train_state = apply_pending(train_state, donate=donate)
    values: list[str] = []
    with agreeing() as compared:
        placed = _place(train_state, request, plan, donate=donate, values=None if wait_s is None else values)
        compared.facts = lambda: {"the initial values": "\n".join(values)}
    return adapted.rebuild(placed)


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
    request = request_of(adapted.state, stage, config, mesh, trainable)
    plan = request.plan()
    tx = ZeroTransformation(request.natural.tx, plan)
    return adapted.rebuild(plan.view.rebuilt(adapted.state, [x.abstract for x in plan.view.leaves], tx=tx))


def _check_values(state: TrainStateLike, request: Request) -> None:
    """Raises unless the state has values to place."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    abstract = [path_str(path) for path, x in leaves if isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer)]
    if abstract:
        raise TypeError(
            f"`shard_train_state` places arrays, but these leaves are abstract: {abstract[:5]}. Call it outside "
            "`jit`; plan an abstract state with `plan_train_state`, make one that is born sharded with "
            "`init_train_state`."
        )
    check_alive([x for _, x in leaves])
    if request.old is not None and request.old.has_records:  # before `donate` frees anything
        records_of(state)


def _place(
    state: TrainStateLike, request: Request, plan: ZeroPlan, *, donate: bool, values: list[str] | None
) -> TrainStateLike:
    """Returns the state on the devices, as `plan` stores it; notes the values that this process supplies."""
    check_has_memories(plan)
    tx = ZeroTransformation(request.natural.tx, plan)
    records = checked_records(tx)
    plain = state if request.old is None else _plain_values(state, request.old)
    trained = with_optimizer(plain, request.natural.params, tx.inner)
    nodes = plan.view.nodes(stored_state(trained, plan, state.opt_state))  # padded ones know their own layout
    uses = collections.Counter(map(id, jax.tree.leaves(nodes)))

    def place(x: Any, leaf: StateLeaf) -> jax.Array:
        array = unbox(x)
        natural = gather_padded(array.read() if isinstance(array, InRecords) else x)
        placed = leaf.place(natural, look=note_value(values, leaf))
        if request.old is not None or donate or is_padded(x):  # one leaf at a time, so that at most one is whole
            jax.block_until_ready(placed)
        uses[id(array)] -= 1
        if donate and isinstance(array, jax.Array) and not uses[id(array)]:
            array.delete()
        return placed

    leaves = list(zip(nodes, plan.view.leaves, strict=True))
    for_records = {leaf.path: x for x, leaf in leaves if leaf.in_records}
    stored = [place(x, leaf) if records is None or not leaf.in_records else records.node(leaf) for x, leaf in leaves]
    if records is not None:  # all that belongs to one parameter at once
        records.fill((i, [place(for_records[x.path], x) for x in own]) for i, own in plan.record_fields.items())
        records.pipeline.store.commit()
    if donate:  # free the leaves that the new state does not need
        for x in jax.tree.leaves(state):
            if isinstance(x, jax.Array) and not x.is_deleted():
                x.delete()
    return plan.view.rebuilt(state, stored, tx=tx)


def _plain_values(state: TrainStateLike, old: ZeroPlan) -> TrainStateLike:
    """Returns the plain values of a sharded state, which know their natural shapes; on disk, once they are read."""
    view = old.plain.view
    leaves = view.flat(plain_state(readable(state), old, take_edits=True))
    known = [when_read(x, y.box) if isinstance(x, InRecords) else x for x, y in zip(leaves, view.leaves, strict=True)]
    return view.rebuilt(state, known, tx=state.tx.inner)
