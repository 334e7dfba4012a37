"""Moves a state's arrays between device and host memory."""

from __future__ import annotations

from collections.abc import Collection

import jax

from jzero.core.base.types import State, TrainStateLike
from jzero.core.config.settings import NAMES, check
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import HOST_MEMORY, check_host_memory
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.state_fields import frozen_fields, other_fields
from jzero.core.state.adapter import adapt_sharded
from jzero.core.state.train_state import check_alive


def offload_train_state(state: State, *, include: Collection[str] = ("params", "opt_state")) -> State:
    """Moves parts of a state to host memory, to make room on the devices: for evaluation, generation, another model.

    Each array moves to pinned memory of its device's host, sharded as before, and leaves the device at once, so the
    input cannot be used afterwards. Training steps reject such a state until `reload_train_state` moves it back, bit
    for bit. It can be saved to a checkpoint, which copies one leaf at a time to the device. Peak device memory does not
    rise.

    Args:
      state: A sharded train state.
      include: Fields to move: `"params"` (with frozen ones), `"opt_state"` (with masters), or other fields by name.

    Returns:
      The state, with these arrays on the host.

    Raises:
      ValueError: There is no such field, or the devices have no pinned host memory; the message says what they have.
      RuntimeError: The backend left an array on the device.
      TypeError: The state was not sharded by jzero.

    Example:
      >>> away = jzero.offload_train_state(jzero.shard_train_state(plain_state, stage=3), include=["opt_state"])
      >>> away.opt_state[0].mu["w"].sharding.memory_kind, away.params["w"].sharding.memory_kind
      ('pinned_host', 'device')
      >>> jzero.reload_train_state(away).opt_state[0].mu["w"].sharding.memory_kind
      'device'

    References:
      DeepSpeed's `engine.offload_states` and `engine.reload_states`.
    """
    adapted = adapt_sharded(state)
    train_state = adapted.state
    plan: ZeroPlan = train_state.tx.plan
    check_alive(train_state)
    chosen = _chosen_fields(train_state, include)
    check_host_memory(plan.mesh)
    return adapted.rebuild(_move(train_state, plan, chosen, HOST_MEMORY))


def reload_train_state(state: State) -> State:
    """Moves everything that `offload_train_state` moved to the host back to the devices. Consumes its input.

    Args:
      state: A sharded train state.

    Returns:
      The state with every array back in its place on the devices, bit for bit.

    Raises:
      TypeError: The state was not sharded by jzero.

    Example:
      >>> away = jzero.offload_train_state(jzero.shard_train_state(plain_state, stage=3))
      >>> back = jzero.reload_train_state(away)
      >>> bool((jzero.get_full_param(back, "w") == plain_state.params["w"]).all())
      True
    """
    adapted = adapt_sharded(state)
    plan = adapted.state.tx.plan
    check_alive(adapted.state)
    return adapted.rebuild(_move(adapted.state, plan, None, None))


def _chosen_fields(train_state: TrainStateLike, include: Collection[str]) -> frozenset[str]:
    names = check("include", include, NAMES)
    others = other_fields(train_state)
    fields = {"params", "opt_state", *others}
    if not set(names) <= fields:
        raise ValueError(f"`include` must name fields of the state, a collection of {sorted(fields)}: got {include!r}.")
    frozen = frozen_fields(train_state) if "params" in names else ()
    return frozenset({*names, *frozen})


def _move(
    train_state: TrainStateLike, plan: ZeroPlan, chosen: frozenset[str] | None, kind: str | None
) -> TrainStateLike:
    """Moves the arrays of some fields (`None` for all) to a kind of memory (`None`: the plan's); consumes them."""
    moving = None if chosen is None else {id(leaf) for name in chosen for leaf in plan.leaves_of(name)}

    def move(x: jax.Array, leaf: StateLeaf) -> jax.Array:
        target = leaf.sharding if kind is None else leaf.device_sharding.with_memory_kind(kind)
        target_kind = target.memory_kind or plan.mesh.local_devices[0].default_memory().kind
        if (moving is not None and id(leaf) not in moving) or x.sharding.memory_kind == target_kind:
            return x
        moved = jax.block_until_ready(jax.device_put(x, target))  # one at a time, so that only one exists twice
        if moved.sharding.memory_kind != target_kind:
            raise RuntimeError(
                f"{leaf.path} was to be in {target_kind!r} memory, but is in {moved.sharding.memory_kind!r}."
            )
        x.delete()
        return moved

    return plan.view.map(move, train_state)
