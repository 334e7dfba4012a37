"""Rules of the walk for equations that contain jaxprs, and for equations that lazy parameters pass unchanged.

    RULES[name](walk, eqn, inputs) -> Sequence[Value]

For example, a recomputed block, which gathers once for its recomputation and its backward pass,

    c = checkpoint[jaxpr={ lambda ; a:f32[512,64] b:f32[8,512]. let ... }] w x

is evaluated in place, with `w` lazy, behind a barrier that keeps the compiler from merging it with its forward pass.

[Note: Branches and loops]
Devices may differ in the branch of a `cond`, or in the iterations of a `while`, so a collective inside would hang. The
walk gathers parameters before such an equation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import PartitionSpec

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.engine.lazy import (
    Deferred,
    LazyRows,
    ShardedParam,
    SharedLeaves,
    Static,
    Value,
    defer,
    has_param,
    is_cut,
    is_lazy,
    is_unevaluated,
)
from jzero.core.engine.loops import scan
from jzero.core.engine.order import Order
from jzero.core.engine.placed import named_p
from jzero.core.engine.shard_rules import apply_on_shard
from jzero.core.engine.walk import CalledFunction, HeldParameters, Rule, Walk, constrain
from jzero.core.jaxpr.edit import is_recomputed, params_retraced
from jzero.core.jaxpr.identity import IdDict
from jzero.core.jaxpr.interpret import propagate
from jzero.core.jaxpr.lookups import lookup_of
from jzero.core.jaxpr.primitives import CALLS, REMAT, RUNS, called_jaxpr
from jzero.core.jaxpr.structure import is_worth_a_call
from jzero.core.layout.lookups import hop_of_rows
from jzero.core.layout.placement import memory_of, on_device

_EMPTY = Static("empty")
BranchValue: TypeAlias = Value | Static[str] | None
"""A value in a branch that is lazy or empty; `None` for one that only running the branch makes."""


def _call(walk: Walk, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    """Keeps a long call as a call, unless its equations depend on what the walk did before it."""
    jaxpr = called_jaxpr(eqn)
    in_shardings = eqn.params.get("in_shardings") or [None] * len(inputs)
    out_shardings = eqn.params.get("out_shardings") or [None] * len(eqn.outvars)
    inputs = [constrain(x, sharding) for x, sharding in zip(inputs, in_shardings, strict=True)]
    # A function cannot keep whole parameters for later equations, nor count the bytes gathered before it.
    may_be_shared = eqn.primitive.name in CALLS and not walk.held.keeps and walk.order.limit is None
    outputs = (
        _call_function(walk, eqn, jaxpr, inputs) if may_be_shared and is_worth_a_call(jaxpr) else walk(jaxpr, inputs)
    )
    return [constrain(x, sharding) for x, sharding in zip(outputs, out_shardings, strict=True)]


def _call_function(walk: Walk, eqn: JaxprEqn, jaxpr: AnyJaxpr, inputs: list[Value]) -> Sequence[Value]:
    """Calls a jaxpr's function. There is one function per key; `jax.jit` distinguishes the layouts of inputs."""
    shared = SharedLeaves.of(walk.gather_staying(jaxpr, inputs))
    if is_recomputed(eqn):
        leaves, _ = walk.order.order_block(list(shared.leaves))
        shared = SharedLeaves(tuple(leaves), shared.expressions)
    # Parameters that were gathered before the call are gathered behind a barrier inside it, as elsewhere.
    again = tuple(i for i, x in enumerate(shared.leaves) if walk.order.was_gathered(x))
    functions = walk.functions.setdefault(jaxpr, {})
    if again not in functions:
        functions[again] = _make_function(walk, eqn, jaxpr, again)
    # Layers share one function, see `placed`.
    paths = {f"input {i}": x.path for i, x in enumerate(shared.leaves) if isinstance(x, ShardedParam)}
    named = [_name(x, f"input {i}") for i, x in enumerate(shared.leaves)]
    outputs, gathered = functions[again](SharedLeaves(tuple(named), shared.expressions))
    walk.order.note_gathered(shared.leaves[i] for i in gathered.value)
    # If the function returns one of its input shards, the result is that input itself, so that the walk recognizes it.
    arrays = jax.tree.leaves(shared)
    places = jax.tree.map(
        lambda x: arrays[x.value] if isinstance(x, Static) else x, outputs, is_leaf=lambda x: isinstance(x, Static)
    )
    results = [dataclasses.replace(x, path=paths[x.path]) if isinstance(x, ShardedParam) else x for x in places.leaves]
    return SharedLeaves(tuple(results), places.expressions).values()


def _name(x: Value, name: str) -> Value:
    """Returns a leaf of shared leaves as a function that layers share takes it."""
    if not isinstance(x, ShardedParam):
        return x
    return dataclasses.replace(x, path=name, shard=named_p.bind(x.shard, path=x.path))


def _make_function(walk: Walk, eqn: JaxprEqn, jaxpr: AnyJaxpr, again: tuple[int, ...]) -> CalledFunction:
    """Returns a jaxpr's function, from shared leaves to such and the indices of the leaves that it gathers."""
    anew = walk.enter_call([])  # the function outlives this walk, so it must not hold the walk's tracers

    def call(shared: SharedLeaves) -> tuple[SharedLeaves, Static[tuple[int, ...]]]:
        inner = anew.enter_call([shared.leaves[i] for i in again])
        outputs = SharedLeaves.of(inner(jaxpr, shared.values()))
        gathered = tuple(i for i, x in enumerate(shared.leaves) if inner.order.was_gathered(x))
        place = IdDict((x, i) for i, x in enumerate(jax.tree.leaves(shared)))  # to recognize inputs that it returns
        return jax.tree.map(lambda x: Static(place[x]) if x in place else x, outputs), Static(gathered)

    call.__name__ = eqn.params.get("name", "jit")
    return jax.jit(call)


# Recomputed blocks.


def _checkpoint(walk: Walk, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    """Evaluates a block in place, and keeps the parameters that it gathers to its end."""
    prevent_cse, inputs = eqn.params["prevent_cse"], walk.gather_staying(eqn.params["jaxpr"], inputs)
    if is_recomputed(eqn):
        shared = SharedLeaves.of(inputs)
        leaves, may_be_ahead = walk.order.order_block(list(shared.leaves))
        if prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse):
            # Parameters that are kept from the forward pass, or that already wait, stay as they are.
            stays = [isinstance(x, ShardedParam) and (x.stays or may_be_ahead) for x in leaves]
            leaves = _put_behind_barrier(leaves, stays)
        inputs = SharedLeaves(tuple(leaves), shared.expressions).values()
    outputs = walk.enter_block()(eqn.params["jaxpr"], inputs)
    walk.order.note_used(outputs)
    return outputs


def _put_behind_barrier(values: list[Value], stays: list[bool]) -> list[Value]:
    """Returns values behind one barrier: none exists before all do, and none is merged with its earlier uses."""

    def on_devices(x: Value | None) -> Value | None:
        return dataclasses.replace(x, shard=on_device(x.shard)) if isinstance(x, ShardedParam) else x

    delayed = [None if stay else x for x, stay in zip(values, stays, strict=True)]
    leaves, treedef = jax.tree.flatten(jax.tree.map(on_devices, delayed, is_leaf=lambda x: isinstance(x, ShardedParam)))
    # The same array is one operand.
    arrays = IdDict((x, None) for x in leaves if isinstance(x, jax.Array) and memory_of(x) == "device")
    behind = IdDict(zip(arrays, lax.optimization_barrier(list(arrays)), strict=True))
    new = treedef.unflatten([behind.get(x, x) for x in leaves])
    return [x if stay else y for x, y, stay in zip(values, new, stays, strict=True)]


# Rows of tables.


def _look_up(walk: Walk, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    """Looks up rows of a parameter in its shards, unless it is held whole."""
    table = walk.held.fill(inputs[0]) if isinstance(inputs[0], ShardedParam) else None
    if table is None or table.lookups == "none" or not is_cut(table) or has_param(inputs[1]):
        return walk.bind_unsharded(eqn, inputs)
    lookup = lookup_of(eqn)
    if lookup is None or hop_of_rows(table.cut, table.route, reduces=False) is None:
        return walk.bind_unsharded(eqn, inputs)
    return [table.look_up(walk.gather(inputs[1:])[0], lookup)]


# Equations that lazy parameters pass unchanged.


def _barrier(walk: Walk, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    done = iter(compat.bind(eqn, [x for x in inputs if not is_unevaluated(x)]))  # lazy values pass beside it
    return [x if is_unevaluated(x) else next(done) for x in inputs]


def _constraint(walk: Walk, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    return [constrain(inputs[0], compat.sharding_said(eqn))]


def _cond(walk: Walk, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    """Evaluates a `cond`, whose branches return each other's residuals as empty values. Parameters stay lazy."""
    lazily: list[Value | None] = [None] * len(eqn.outvars)
    if any(map(is_lazy, inputs)):
        by_branch = [_lazy_outputs(branch, inputs[1:]) for branch in eqn.params["branches"]]
        returned = [[x for x in values if x is not _EMPTY] for values in zip(*by_branch, strict=True)]
        lazily = [x[0] if len(x) == 1 else None for x in returned]  # one branch alone fills it
    if all(x is None for x in lazily):
        return walk.bind_unsharded(eqn, inputs)

    def others(branch: AnyJaxpr, *operands: jax.Array) -> list[Value]:
        outputs = walk.enter_block().evaluate_unsharded(branch, *operands)
        return [x for x, y in zip(outputs, lazily, strict=True) if y is None]

    anew = params_retraced(eqn, lambda branch: functools.partial(others, branch))
    outputs = iter(compat.bind(eqn, walk.gather(inputs), **anew))  # see [Note: Branches and loops]
    return [next(outputs) if y is None else y for y in lazily]


def _lazy_outputs(jaxpr: AnyJaxpr, inputs: Sequence[Value]) -> list[BranchValue]:
    """Returns, for each output of a branch, its lazy value, `_EMPTY` if the branch leaves it empty, else `None`."""

    def apply(eqn: JaxprEqn, values: list[BranchValue]) -> list[BranchValue]:
        unknown: list[BranchValue] = [None] * len(eqn.outvars)
        if eqn.primitive.name in ("empty", "empty2") or any(x is _EMPTY for x in values):
            return [_EMPTY, *unknown[1:]]
        operands = [x for x in values if x is not None and not isinstance(x, Static | LazyRows)]
        if any(map(is_lazy, operands)) and len(operands) == len(values):
            return [apply_on_shard(eqn, operands) or defer(eqn, operands), *unknown[1:]]
        return unknown

    opened, _ = compat.open_jaxpr(jaxpr)
    values: list[BranchValue] = [*[None] * len(opened.constvars), *(x if is_lazy(x) else None for x in inputs)]
    outputs = propagate(opened, values, apply, compat.value_of)
    return [x if x is _EMPTY or is_lazy(x) else None for x in outputs]


def _shard_map(walk: Walk, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    """Applies the loss's own `shard_map`, on the mesh of the step."""
    axes = compat.shard_map_axes(eqn)
    if axes & walk.axes:
        raise ValueError(
            f"The loss calls `jax.shard_map` over {sorted(axes)}, but {sorted(axes & walk.axes)} is ZeRO's own: "
            "the loss already runs once per device along it, on the local part of the batch. Name other axes in "
            "`axis_names`, or drop the `shard_map` and use collectives over the axis directly."
        )
    names = jax.sharding.get_abstract_mesh().axis_names
    beside = [name for name in names if name not in walk.axes | axes]
    is_unsorted = max(map(names.index, walk.axes)) > min(map(names.index, axes), default=len(names))
    if beside and is_unsorted and compat.CRASHES_ON_UNSORTED_AXES:
        raise ValueError(
            f"The loss calls `jax.shard_map` over {sorted(axes)}, which the mesh {names} has before ZeRO's axes, "
            f"{sorted(walk.axes)}, and {beside} beside them: jax {jax.__version__} would end the process. Make a "
            "mesh with ZeRO's axes first, e.g. `jzero.make_mesh(data=…, model=…)`."
        )
    lazily = _cast_to_varying(eqn, inputs)
    inner = walk.enter_block()

    def body(*xs: jax.Array) -> tuple[jax.Array, ...]:
        outputs = inner.evaluate_unsharded(eqn.params["jaxpr"], *xs)
        return tuple(x for x, y in zip(outputs, lazily, strict=True) if y is None)

    fn = jax.shard_map(
        body,
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=tuple(spec for spec, y in zip(eqn.params["out_specs"], lazily, strict=True) if y is None),
        axis_names=set(axes),
        check_vma=eqn.params["check_vma"],
    )
    outputs = iter(fn(*walk.gather(inputs)))  # parameters: [D, F], whole
    results = [next(outputs) if y is None else y for y in lazily]
    walk.order.note_used(results)
    return results


def _cast_to_varying(eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Deferred | None]:
    """Returns a lazy value for each result of a `shard_map` that is a parameter cast to vary: copies; else `None`."""
    jaxpr, sizes = eqn.params["jaxpr"], jax.sharding.get_abstract_mesh().shape
    pairs = zip(inputs, eqn.params["in_specs"], strict=True)
    sources: dict[Var, tuple[Value | None, PartitionSpec | None]] = dict(zip(jaxpr.invars, pairs, strict=True))
    for inner in jaxpr.eqns:
        if inner.primitive.name in ("pvary", "pcast") and not compat.is_literal(inner.invars[0]):
            sources[inner.outvars[0]] = sources.get(inner.invars[0], (None, None))

    def copies(var: Var, spec: PartitionSpec) -> Deferred | None:
        x, in_spec = (None, None) if compat.is_literal(var) else sources.get(var, (None, None))
        names, *others = spec or (None,)
        # Copies along dimension 0 of a parameter that enters uncut; others are gathered.
        if not is_lazy(x) or in_spec != PartitionSpec() or names is None or any(others):
            return None
        number = math.prod(sizes[name] for name in (names if isinstance(names, tuple) else (names,)))
        one = jax.ShapeDtypeStruct(x.shape, x.dtype)  # one device's copy, [D, F]
        joined = jax.make_jaxpr(lambda *xs: lax.concatenate(xs, 0))(*[one] * number)  # [number * D, F]
        return defer(compat.open_jaxpr(joined)[0].eqns[0], [x] * number) if x.shape else None

    return [copies(v, spec) for v, spec in zip(jaxpr.outvars, eqn.params["out_specs"], strict=True)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(RUNS - REMAT, _call),
    **dict.fromkeys(REMAT, _checkpoint),
    "gather": _look_up,
    "scan": scan,
    "cond": _cond,
    "optimization_barrier": _barrier,
    # jax adds it if a mesh is set, too; then it changes nothing, since no axis is Explicit.
    "reshard": _constraint,
    "shard_map": _shard_map,
    "sharding_constraint": _constraint,
}


def start_walk(axes: frozenset[str], order: Order | None = None, *, pipelines_reductions: bool = False) -> Walk:
    """Returns the walk over a program."""
    return Walk(RULES, axes, order or Order(), HeldParameters(keeps=False), pipelines_reductions=pipelines_reductions)
