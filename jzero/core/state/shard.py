"""The public calls that plan and shard train states."""

from __future__ import annotations

import functools

from jax.sharding import Mesh

from jzero.core.base.types import PyTree, State
from jzero.core.config.settings import FLAG, check
from jzero.core.config.zero import ZeroConfig, refers_to_config
from jzero.core.layout.mesh import AnyMesh
from jzero.core.plan.plan import ZeroPlan
from jzero.core.processes.agree import agree, check_wait
from jzero.core.processes.fingerprints import describe_plan
from jzero.core.state.adapter import adapt
from jzero.core.state.record_states import apply_pending
from jzero.core.state.request import Placement, check_has_devices


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
    return Placement(adapt(state).state, stage, config, mesh, trainable).make_plan()


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
    placement = Placement(adapted.state, stage, config, mesh, trainable)
    placement.check_values()
    wait_s = check_wait(check_processes)
    compare = functools.partial(agree, "shard_train_state", placement.mesh, wait_s=wait_s)
    plan = compare(placement.make_plan, lambda plan: {"the training state": describe_plan(plan)})
    if placement.old is not None:
        placement.state = apply_pending(placement.state, donate=donate)
    values: list[str] = []
    return adapted.rebuild(
        compare(
            lambda: placement.place(plan, donate=donate, values=None if wait_s is None else values),
            lambda _: {"the initial values": "\n".join(values)},
        )
    )


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
    placement = Placement(adapted.state, stage, config, mesh, trainable)
    return adapted.rebuild(placement.abstract(placement.make_plan()))
