"""Gathers whole states and parameters, and writes edited parameters back to shards."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jzero.core.base.types import DType, PyTree, State
from jzero.core.config.precision import cast_dtype
from jzero.core.config.settings import FLAG, Setting, check, optional
from jzero.core.layout.casts import apply_edits, round_without_derivative
from jzero.core.layout.cut import Cut
from jzero.core.layout.leaves import StateLeaf, gather_leaves
from jzero.core.layout.mesh import AnyMesh
from jzero.core.layout.placement import Look, make_strongly_typed, on_device
from jzero.core.layout.stored import Stored
from jzero.core.plan.plan import ZeroPlan
from jzero.core.processes.agree import agree
from jzero.core.processes.fingerprints import describe_value
from jzero.core.state.access import apply_pending, readable
from jzero.core.state.adapter import adapt_sharded
from jzero.core.state.record_states import kept_in_records
from jzero.core.state.train_state import S, check_alive, plain_state


def unshard_train_state(state: State) -> State:
    """Returns the whole state on every device: natural shapes, no padding, the plain optax transformation.

    Peak memory per device is the shards plus the whole state. With a precision policy, masters become the parameters,
    the optimizer's own state has its own dtypes, and the loss scale is dropped. Frozen parameters have no master, and
    keep their stored dtype.

    Args:
      state: A sharded train state.

    Returns:
      A state of the same class.

    Raises:
      TypeError: The state was not sharded by jzero.
      RuntimeError: A later step overwrote what it has in records.

    Example:
      >>> jzero.unshard_train_state(state).params["w"].shape == plain_state.params["w"].shape
      True
    """
    check_alive(adapt_sharded(state).state)
    adapted = adapt_sharded(apply_pending(state))
    train_state, plan = readable(adapted.state), adapted.state.tx.plan
    plain, layout = plain_state(train_state, plan), plan.plain
    leaves = layout.view.leaves
    gathered = gather_leaves(layout.view.flat(plain), leaves)
    params = plan.view.params.flat(train_state.params)
    for i, (param, leaf) in enumerate(zip(params, plan.leaves, strict=True)):
        if leaf.master is not None:
            gathered[i] = apply_edits(gathered[i], *gather_leaves([param], [leaf.param]))
    natural = [make_strongly_typed(x, y.update_dtype or y.dtype) for x, y in zip(gathered, leaves, strict=True)]
    return adapted.rebuild(layout.view.rebuilt(plain, natural, tx=train_state.tx.inner))


def gather_params(
    state: State,
    *,
    paths: str | None = None,
    masters: bool = False,
    dtype: DTypeLike | None = None,
    shardings: PyTree = None,
) -> PyTree:
    """Returns whole parameters, in their natural shapes, replicated on every device or laid out as you say.

    Peak memory per device is the shards plus the chosen leaves. With `dtype` or `shardings` it is the shards, the
    result as laid out, and one leaf: each shard is cast before it is gathered, one leaf after another.

    Args:
      state: A sharded train state.
      paths: Regular expression over whole key paths, such as `"decoder/.*/kernel"`; leaves that it does not
        match come back as `None`. All leaves by default.
      masters: Whether to return the optimizer's master copies instead of 16-bit parameters.
      dtype: The dtype of floating-point leaves in the result; others keep theirs. By default as stored.
      shardings: Where the result goes, such as `{".*/(q|up)/kernel": PartitionSpec(None, "model")}`: a dictionary from
        regular expressions over whole key paths to a `PartitionSpec` or `NamedSharding` each, of which the first match
        counts (other leaves are whole on every device), or a tree of these with the structure of `state.params`. The
        mesh of a `NamedSharding` may have other axes, over the same devices; specs alone go with it, or else with the
        state's mesh.

    Returns:
      A tree of `jax.Array` with the structure of `state.params`. Shapes are those that the model declares, without
      padding. Dtypes are as stored; at stage 3 of a precision policy, those of the masters, except for persistent
      leaves.

    Raises:
      ValueError: `paths` or a rule matches no leaf, `dtype` is none of floating-point numbers, or a sharding does not
        fit its leaf; the message lists all such leaves.

    Example:
      >>> jzero.gather_params(state, paths="w")["w"].shape == plain_state.params["w"].shape
      True
      >>> spec = jax.sharding.PartitionSpec(None, "data")
      >>> jzero.gather_params(state, dtype="bfloat16", shardings={"w": spec})["w"].addressable_shards[0].data.shape
      (512, 64)

    References:
      DeepSpeed's `GatheredParameters`.
    """
    check("masters", masters, FLAG)
    train_state = readable(adapt_sharded(state).state)
    plan = train_state.tx.plan
    check_alive(train_state)
    chosen, to = _match(plan, paths), check("dtype", dtype, FLOAT)
    targets = None if shardings is None else find_shardings(shardings, plan, chosen)
    params = plan.view.params.flat(train_state.params)
    masters_or_params = (
        plan.view.params.flat(train_state.opt_state.masters) if masters and plan.has_opt_state else params
    )
    indices = [i for i, take in enumerate(chosen) if take]
    stored = [plan.leaves[i].edited_master(params[i], masters_or_params[i]) if masters else params[i] for i in indices]
    leaves = [plan.leaves[i].updated if masters else plan.leaves[i].param for i in indices]
    if to is None and targets is None:
        natural = gather_leaves(stored, leaves)
    else:
        targets = [plan.whole_sharding] * len(indices) if targets is None else targets
        natural = [lay_out(x, leaf, to, target) for x, leaf, target in zip(stored, leaves, targets, strict=True)]
    gathered = iter(natural)
    return plan.view.params.tree([next(gathered) if take else None for take in chosen])


def update_params(state: State, fn: Callable[[PyTree], PyTree], *, paths: str | None = None) -> State:
    """Edits whole parameters and writes them back sharded, masters included. The optimizer state does not change.

    The result shares unedited arrays with `state`: a step consumes both.

    Args:
      state: A sharded train state.
      fn: Takes the tree that `gather_params(state, paths=paths, masters=True)` returns, and returns it with new
        values of the same shapes and dtypes. With several processes, each must return the same values.
      paths: Which leaves to gather, as in `gather_params`; the others do not change.

    Returns:
      The state with the new parameters.

    Raises:
      ValueError: `paths` matches no leaf, or `fn` changed a shape, a dtype or the structure.

    Example:
      >>> zeroed = jzero.update_params(state, lambda p: jax.tree.map(jnp.zeros_like, p), paths="w")
      >>> float(jnp.abs(jzero.gather_params(zeroed)["w"]).max())
      0.0
    """
    state = apply_pending(state)
    adapted = adapt_sharded(state)
    train_state, plan = adapted.state, adapted.state.tx.plan
    chosen = _match(plan, paths)
    edited = fn(gather_params(state, paths=paths, masters=True))
    try:
        new = plan.view.params.flat(edited)
    except ValueError as error:
        raise ValueError(f"`fn` must return a tree of the structure it was given: {error}") from error
    bad = [
        f"  {leaf.path}: {getattr(y, 'dtype', type(y).__name__)}{list(np.shape(y))}, but it is "
        f"{leaf.updated.dtype}{list(leaf.param.shape)}"
        for y, leaf, take in zip(new, plan.leaves, chosen, strict=True)
        if take and (tuple(np.shape(y)) != leaf.param.shape or jax.dtypes.result_type(y) != leaf.updated.dtype)
    ]
    if bad:
        raise ValueError("`fn` must keep shapes and dtypes; these leaves changed:\n" + "\n".join(bad))
    return adapted.rebuild(write_params(train_state, {i: new[i] for i, take in enumerate(chosen) if take}))


def write_params(state: S, values: Mapping[int, ArrayLike]) -> S:
    """Returns the train state with whole values of some parameters, by number, written to them and their masters."""
    plan = state.tx.plan
    edits = dict(values)
    if plan.has_opt_state:
        numbers = range(len(plan.leaves), len(plan.leaves) + len(plan.opt_leaves))
        masters = plan.view.params.nodes(plan.view.opt_state.tree(numbers).masters)
        edits |= {masters[i]: x for i, x in values.items() if plan.leaves[i].master is not None}
    return write_leaves(state, edits)


def write_leaves(state: S, values: Mapping[int, ArrayLike]) -> S:
    """Returns the train state with whole values of some leaves, by number in `plan.view.leaves`.

    All processes must pass the same.
    """
    view, noted = state.tx.plan.view, list[str]()
    placed = agree(
        "the new values of a state",
        state.tx.plan.mesh,
        lambda: {k: view.leaves[k].place(x, look=note_value(noted, view.leaves[k])) for k, x in values.items()},
        lambda _: {"the new values": "\n".join(noted)},
    )
    new = view.rebuilt(state, [placed.get(k, x) for k, x in enumerate(view.flat(state))])
    return kept_in_records(new, like=state)


def note_value(noted: list[str] | None, leaf: StateLeaf) -> Look | None:
    """Returns a function that records the value that this process supplies for a leaf; `None` without a list."""
    return None if noted is None else lambda value: noted.append(describe_value(leaf.path, value))


def natural_params(state: State) -> PyTree:
    """Returns the parameters in their natural shapes. Pure, differentiable, for use inside `jax.jit`.

    For plain `jax.jit` steps that call `jax.grad` themselves; pass the gradients to `state.apply_gradients`.
    Outside `jit` the result is whole on every device (`gather_params`), since jax has no uneven shards.

    Args:
      state: A sharded train state.

    Returns:
      A tree with the structure of `state.params`, in the compute dtypes.

    Raises:
      TypeError: The state was not sharded by jzero.

    Example:
      >>> loss = lambda params: jnp.square(params["w"]).mean()
      >>> step = jax.jit(lambda s: s.apply_gradients(grads=jax.grad(loss)(jzero.natural_params(s))))
      >>> int(step(state).step)
      1
    """
    train_state = adapt_sharded(state).state
    plan = train_state.tx.plan
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(train_state.params)):
        return train_state.tx.natural_params(train_state.params)
    gathered = plan.view.params.flat(gather_params(state))
    return plan.view.params.tree(
        [make_strongly_typed(x, leaf.compute_dtype) for x, leaf in zip(gathered, plan.leaves, strict=True)]
    )


def _match(plan: ZeroPlan, paths: str | None) -> list[bool]:
    chosen = [paths is None or re.fullmatch(paths, leaf.path) is not None for leaf in plan.leaves]
    if plan.leaves and not any(chosen):
        some = ", ".join(repr(leaf.path) for leaf in plan.leaves[:5])
        raise ValueError(
            f"`paths` {paths!r} matches no parameter: it must match a whole path. The first paths are {some}."
        )
    return chosen


Target: TypeAlias = PartitionSpec | NamedSharding
"""Where a parameter is to go."""

KINDS = "a dictionary from regular expressions to a `PartitionSpec` or `NamedSharding` each, or a tree of these"
RULE = (
    "The axes of a spec must be of its mesh, whose devices must be the state's, and their sizes must divide the "
    "dimensions. Write None for a dimension that does not divide; the first rule that matches a path counts."
)


def _float_dtype(value: object) -> DType:
    if not isinstance(value, str | jnp.dtype | type) or not jnp.issubdtype(jnp.dtype(value), jnp.floating):
        raise ValueError
    return jnp.dtype(value)


FLOAT = optional(Setting("a floating-point dtype, such as 'bfloat16'", _float_dtype))


def find_shardings(shardings: PyTree, plan: ZeroPlan, chosen: Sequence[bool]) -> list[NamedSharding]:
    """Returns the sharding of each chosen parameter, as `shardings` of `gather_params` says."""
    asked = _by_rules(shardings, plan) if _are_rules(shardings) else _by_tree(shardings, plan)
    mesh = next((x.mesh for x, _ in asked if isinstance(x, NamedSharding)), plan.mesh)
    checked, wrong = [], []
    for leaf, take, (x, rule) in zip(plan.leaves, chosen, asked, strict=True):
        try:
            checked += [_checked(x, leaf.param, mesh, plan)] if take else []
        except (TypeError, ValueError) as error:
            spec, by = getattr(x, "spec", x), "" if rule is None else f" (by {rule!r})"
            wrong.append(f"  {leaf.path} {list(leaf.param.shape)}: {spec}{by}: {str(error).partition(chr(10))[0]}")
    if wrong:
        raise ValueError("`shardings` do not fit these parameters:\n" + "\n".join(wrong) + f"\n{RULE}")
    return checked


def lay_out(x: Stored, leaf: StateLeaf, dtype: DType | None, sharding: NamedSharding) -> jax.Array:
    """Returns a stored leaf in natural shape, cast and laid out; nothing else of it is on the devices afterwards."""
    on_devices = on_device(x)
    natural = _natural(on_devices, leaf.cut, cast_dtype(leaf.dtype, dtype), on_devices.sharding)
    return jax.block_until_ready(jax.device_put(natural, sharding))


def _are_rules(shardings: object) -> TypeGuard[dict[str, Target]]:
    return isinstance(shardings, dict) and all(
        isinstance(rule, str) and isinstance(x, PartitionSpec | NamedSharding) for rule, x in shardings.items()
    )


def _by_rules(rules: dict[str, Target], plan: ZeroPlan) -> list[tuple[Target, str | None]]:
    """Returns what the rules give each parameter, and the rule that does."""
    unused = [rule for rule in rules if not any(re.fullmatch(rule, leaf.path) for leaf in plan.leaves)]
    if unused:
        some = ", ".join(repr(leaf.path) for leaf in plan.leaves[:5])
        raise ValueError(
            f"These rules of `shardings` match no parameter: {unused}. A rule must match a whole path; the first paths "
            f"are {some}."
        )
    first = [next((rule for rule in rules if re.fullmatch(rule, leaf.path)), None) for leaf in plan.leaves]
    return [(PartitionSpec() if rule is None else rules[rule], rule) for rule in first]


def _by_tree(tree: PyTree, plan: ZeroPlan) -> list[tuple[Target, None]]:
    try:
        return [(x, None) for x in plan.view.params.nodes(tree)]
    except ValueError as error:
        raise ValueError(f"`shardings` must be {KINDS} with the structure of the parameters: {error}") from error


def _checked(x: Target, leaf: StateLeaf, mesh: AnyMesh, plan: ZeroPlan) -> NamedSharding:
    """Returns the sharding of one parameter; raises if it does not fit."""
    if not isinstance(x, PartitionSpec | NamedSharding):
        raise TypeError(f"not a `PartitionSpec` or a `NamedSharding`: a {type(x).__name__}")
    sharding = NamedSharding(mesh, x) if isinstance(x, PartitionSpec) else x
    if set(sharding.mesh.devices.flat) != set(plan.mesh.devices.flat):
        raise ValueError("its mesh is of other devices than the state's")
    sharding.shard_shape(leaf.shape)
    return sharding


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _natural(x: jax.Array, cut: Cut | None, dtype: DType, sharding: NamedSharding) -> jax.Array:
    """Returns a stored leaf in its natural shape, cast, cut as it is stored where that cuts natural shapes."""
    in_blocks = cut is not None and cut.blocks is not None  # integers, which are not the values
    x = x if in_blocks else round_without_derivative(x, dtype)
    if cut is None or cut.is_stored_naturally:
        return lax.with_sharding_constraint(x, sharding)  # so that the result shares no buffer with the state
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    x = lax.with_sharding_constraint(x, replicated)  # before the slice: an uneven array cannot leave `jit`
    return lax.with_sharding_constraint(round_without_derivative(cut.to_natural(x), dtype), replicated)
