"""Creates train states in shards.

[Note: Creating leaves on the host]
A program makes arrays on the devices before they move to the host. One program for the whole state would hold more on
the devices than training ever does. So separate programs make the leaves that go to the host: each makes about an
eighth of them, at least one leaf, and parameters together with the masters that they are rounded from. What goes to
disk is made and written likewise, a parameter with all its optimizer state.

[Note: One leaf at a time]
A compiler that sees all initializers at once may start them all, and hold the random bits of the whole model. So each
equation that draws a large array combines its key with a zero computed from the array drawn before. (An optimization
barrier would be clearer, but compilers drop it before they schedule.) This sends one scalar per array between devices.
GPT with 3.4M parameters on 8 devices: 0.40 MB of temporaries instead of 2.2 MB, largest leaf 1.05 MB.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding

from jzero.core.base import compat
from jzero.core.base.compat import Atom
from jzero.core.base.types import PyTree, State, TrainStateLike
from jzero.core.config.precision import is_key
from jzero.core.config.settings import KEYS, check
from jzero.core.config.zero import ZeroConfig, refers_to_config
from jzero.core.jaxpr.equations import find_needed
from jzero.core.jaxpr.interpret import Piece, evaluate
from jzero.core.jaxpr.references import check_references
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import AnyMesh
from jzero.core.layout.placement import make_strongly_typed, place_array
from jzero.core.layout.set_mesh import for_program, from_program, set_if_explicit
from jzero.core.layout.stored import InRecords
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.planner import make_plan
from jzero.core.plan.state_fields import check_state_fields, other_fields
from jzero.core.plan.table import format_bytes
from jzero.core.processes.agree import PROGRAM, agree, check_wait
from jzero.core.processes.fingerprints import describe_inputs, describe_plan, describe_program
from jzero.core.records.records import Records
from jzero.core.state.adapter import StateAdapter, adapt
from jzero.core.state.record_states import check_update, open_records
from jzero.core.state.request import (
    check_has_devices,
    check_has_memories,
    resolve_config,
    resolve_mesh,
    restrict,
    with_optimizer,
)
from jzero.core.state.train_state import stored_state
from jzero.core.update.transformation import ZeroTransformation


@refers_to_config("init_train_state")
def init_train_state(  # noqa: PLR0913  # those of `shard_train_state`
    make_state: Callable[[jax.Array], State],
    key: jax.Array,
    *,
    stage: int | None = None,
    config: ZeroConfig | None = None,
    mesh: Mesh | None = None,
    trainable: PyTree | str | None = None,
    zeros: str | None = None,
    check_processes: bool | float = True,
) -> State:
    """Creates a train state in shards: no device ever holds the whole model.

    jzero traces `make_state` once and compiles it as one program whose outputs are the shards; separate programs make
    the leaves that go to the host, a few at a time. The values are the same on any mesh.

    Args:
      make_state: Takes a PRNG key and returns a train state of any kind that `shard_train_state` takes. A parameter
        stays cut over other mesh axes if it is the result of `jax.lax.with_sharding_constraint`.
      key: The key.
      stage: ZeRO stage; short for `config=ZeroConfig(stage=stage)`.
      config: What to partition, and how.
      mesh: The devices; all of them by default.
      trainable: Which parameters are trained, as for `shard_train_state`.
      zeros: Regular expression over whole key paths of parameters, such as `r"(?!.*/lora_[ab]).*"`: those start as
        zeros instead of what `make_state` draws for them, since `load_params` or a checkpoint will replace them. What
        is made of them, such as a copy in the optimizer state, is made of zeros. Random keys do not change.
      check_processes: Whether several processes check that they make the same state from the same key. A number says
        how many seconds they wait for each other, 300 by default.

    Returns:
      The state, as `shard_train_state(make_state(key), ...)` would place it.

    Raises:
      ValueError: `key` is not a key, `zeros` matches no parameter, the configuration does not fit the mesh or the
        state, or processes disagree; the message says how.
      TypeError: `make_state` is not a function.

    Example:
      >>> make_state = lambda key: jzero.TrainState.create(
      ...     params={"w": jax.random.normal(key, (512, 512))}, tx=optax.adam(1e-3))
      >>> state = jzero.init_train_state(make_state, jax.random.key(0), stage=3)
      >>> state.params["w"].addressable_shards[0].data.shape
      (64, 512)

    References:
      DeepSpeed's `zero.Init`.
    """
    if not callable(make_state):
        raise TypeError(
            "`make_state` must be a function that takes a key and returns a train state: got "
            f"{type(make_state).__name__}. A state that is there already goes to `shard_train_state`."
        )
    check("key", key, KEYS)
    check_has_devices(mesh)
    config = resolve_config(stage, config)
    mesh = resolve_mesh(mesh, config)

    def describe(lowered: LoweredInit) -> dict[str, str]:
        return {
            "the training state": describe_plan(lowered.plan),
            "the key": describe_inputs((), key),
            PROGRAM: "\n".join(map(describe_program, lowered.programs)),
        }

    logging.getLogger("jzero").info("Tracing the function that makes the state.")
    programs, rebuild, plan = agree(
        "init_train_state",
        mesh,
        lambda: lower_init(make_state, key, config, mesh, trainable=trainable, zeros=zeros),
        describe,
        wait_s=check_wait(check_processes),
    )
    num_bytes = plan.bytes_per_device.params + plan.bytes_per_device.opt_state
    logging.getLogger("jzero").info("Making a state with %s on each device.", format_bytes(num_bytes))
    placed = place_array(key, key.dtype, plan.whole_sharding)
    return rebuild(jax.block_until_ready(program.compile()(placed)) for program in programs)


class LoweredInit(NamedTuple):
    """What creates a state.

    Attributes:
      programs: The lowered programs, each of which makes some leaves from the key.
      rebuild: Makes the state of their outputs; takes them one after another, and writes those for the disk at once.
    """

    programs: list[jax.stages.Lowered]
    rebuild: Callable[[Iterable[list[jax.Array]]], State]
    plan: ZeroPlan


def lower_init(
    make_state: Callable[[jax.Array], State],
    key: jax.Array,
    config: ZeroConfig,
    mesh: Mesh,
    *,
    trainable: PyTree | str | None = None,
    zeros: str | None = None,
) -> LoweredInit:
    """Lowers the programs of `init_train_state`."""
    with set_if_explicit(mesh):
        adapted, jaxpr = _trace_factory(make_state, key)
    shapes = adapted.state
    natural = restrict(shapes, trainable)
    plan = make_plan(natural, config, mesh)
    check_has_memories(plan)
    tx = ZeroTransformation(natural.tx, plan)
    check_update(tx)
    inner, consts = compat.open_jaxpr(jaxpr)
    treedef = jax.tree.structure(shapes)

    def stored(state: TrainStateLike) -> TrainStateLike:
        """Returns the state in the structure that the plan stores, with unchanged leaves."""
        return stored_state(with_optimizer(state, shapes.params, tx.inner), plan)

    leaves = plan.view.leaves
    numbers = treedef.unflatten(range(treedef.num_leaves))
    numbered = stored(numbers)
    zeroed = set[int]() if zeros is None else _find_zeroed(zeros, plan, numbers, inner.outvars)
    made_from = [x if isinstance(x, int) else None for x in plan.view.flat(numbered)]
    groups = _groups(leaves, made_from, plan)

    def make_leaves(number: int, key: jax.Array) -> list[jax.Array]:
        group = groups[number]
        sources = {source for k in group if (source := made_from[k]) is not None}
        with set_if_explicit(mesh):
            outputs = one_leaf_at_a_time(
                inner, consts, for_program(key), sources, side_effects=number == 0, zeroed=zeroed
            )
        values = plan.view.flat(stored(treedef.unflatten(from_program(outputs))))
        return [leaves[k].store(make_strongly_typed(values[k], leaves[k].dtype)) for k in group]

    def rebuild(results: Iterable[list[jax.Array]]) -> State:
        arrays = _collected(plan, leaves, groups, results)
        state = plan.view.rebuilt(numbered, [arrays[k] for k in range(len(leaves))], tx=tx)
        return adapted.rebuild(state)

    abstract = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=plan.whole_sharding)
    programs = []
    for number, group in enumerate(groups):
        shardings = [leaves[k].sharding for k in group]
        programs.append(jax.jit(functools.partial(make_leaves, number), out_shardings=shardings).lower(abstract))
    return LoweredInit(programs, rebuild, plan)


def state_shapes(make_state: Callable[[jax.Array], State], mesh: AnyMesh | None) -> TrainStateLike:
    """Returns the state that a function makes, as shapes, cut over the axes of a mesh as its constraints say."""
    key = jax.eval_shape(lambda: jax.random.key(0))  # on no device: the mesh that is set may have none
    with contextlib.nullcontext() if mesh is None else set_if_explicit(mesh):
        return _trace_factory(make_state, key)[0].state


def _trace_factory(make_state: Callable[[jax.Array], State], key: jax.Array) -> tuple[StateAdapter, ClosedJaxpr]:
    """Returns what `make_state` returns, as shapes, and its jaxpr."""
    adapters: list[StateAdapter] = []

    def call(key: jax.Array) -> TrainStateLike:
        adapters.append(adapt(make_state(key)))
        check_state_fields(adapters[-1].state)
        return adapters[-1].state

    jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(key)
    check_references(jaxpr, "The function that makes the state")
    kinds = list(map(compat.shape_struct_of, jaxpr.out_avals))  # with the Explicit axes that cut them
    for i, sharding in _constraints(compat.open_jaxpr(jaxpr)[0]).items():
        kinds[i] = kinds[i].update(sharding=sharding)
    adapters[-1].state = jax.tree.unflatten(jax.tree.structure(shapes), kinds)
    return adapters[-1], jaxpr


def _constraints(jaxpr: Jaxpr) -> dict[int, NamedSharding]:
    """Returns the shardings of the outputs that are results of `jax.lax.with_sharding_constraint`, by number."""
    constraints = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
    said = {eqn.outvars[0]: compat.sharding_said(eqn) for eqn in constraints}
    return {i: x for i, v in enumerate(jaxpr.outvars) if not compat.is_literal(v) and (x := said.get(v)) is not None}


def _find_zeroed(pattern: str, plan: ZeroPlan, numbers: TrainStateLike, outvars: Sequence[Atom]) -> set[int]:
    """Returns the numbers of the parameters, trained or not, that are to be zeros.

    Args:
      pattern: Matches their paths.
      plan: The plan.
      numbers: The state, with numbers for its leaves.
      outvars: Their variables. One that is also a parameter that does not match keeps its value.
    """
    try:
        matches = re.compile(pattern).fullmatch
    except (re.error, TypeError) as error:
        raise ValueError(f"`zeros` must be a regular expression over whole paths: got {pattern!r}: {error}.") from error
    others = zip(jax.tree.leaves(other_fields(numbers)), plan.other_leaves, strict=True)
    frozen = [(k, leaf.path.partition("/")[2], leaf.dtype) for k, leaf in others if leaf.is_param]
    trained = zip(jax.tree.leaves(numbers.params), plan.leaves, strict=True)
    params = [*((k, leaf.path, leaf.param.dtype) for k, leaf in trained), *frozen]
    zeroed = {k for k, path, dtype in params if matches(path) and not is_key(dtype)}
    if not zeroed:
        some = ", ".join(repr(path) for _, path, _ in params[:5])
        raise ValueError(f"`zeros` {pattern!r} matches no parameter. It must match a whole path; the first are {some}.")
    drawn = {id(outvars[k]) for k, _, _ in params if k not in zeroed}
    return {k for k in zeroed if id(outvars[k]) not in drawn}


def _collected(
    plan: ZeroPlan, leaves: Sequence[StateLeaf], groups: Sequence[list[int]], results: Iterable[list[jax.Array]]
) -> dict[int, jax.Array | InRecords]:
    """Returns the leaves that programs make, by number; writes those for the disk after each program."""
    records = open_records(plan) if plan.has_records else None
    arrays: dict[int, jax.Array | InRecords] = {}
    for group, outputs in zip(groups, results, strict=True):
        group_arrays = dict(zip(group, outputs, strict=True))
        arrays.update(group_arrays)
        if records is not None:
            arrays.update(_to_records(records, {k: leaves[k] for k in group}, group_arrays))
    if records is not None:
        records.pipeline.store.commit()
    return arrays


def _to_records(
    records: Records, leaves: Mapping[int, StateLeaf], arrays: Mapping[int, jax.Array]
) -> dict[int, InRecords]:
    """Writes the leaves for the disk, all of each parameter's; returns what stands for them in the state."""
    there = {leaf.path: k for k, leaf in leaves.items() if leaf.in_records}
    params = [(i, fields) for i, fields in records.plan.record_fields.items() if fields[0].path in there]
    records.fill((i, [arrays[there[x.path]] for x in fields]) for i, fields in params)
    return {k: records.node(leaves[k]) for k in there.values()}


def _groups(leaves: Sequence[StateLeaf], made_from: Sequence[int | None], plan: ZeroPlan) -> list[list[int]]:
    """Returns the indices of the leaves that each program makes, see [Note: Creating leaves on the host].

    Args:
      leaves: The layouts of all leaves.
      made_from: For each leaf the index of its source, if any: a parameter and its master have the same source.
      plan: The plan.
    """
    units: dict[tuple[str, int] | int, list[int]] = {}
    for k, (source, leaf) in enumerate(zip(made_from, leaves, strict=True)):
        if leaf.in_records and leaf.owner is not None:  # with its parameter: a record holds all that it has
            source = made_from[leaf.owner]  # noqa: PLW2901
        units.setdefault(("nothing", k) if source is None else source, []).append(k)
    leaves_devices = {name: any(leaves[k].memory != "device" for k in unit) for name, unit in units.items()}
    on_devices = [k for name, unit in units.items() if not leaves_devices[name] for k in unit]
    elsewhere = [unit for name, unit in units.items() if leaves_devices[name]]
    sizes = [sum(leaves[k].bytes_per_device for k in unit) for unit in elsewhere]
    most = max([*sizes, sum(sizes) // 8], default=0)
    groups: list[list[int]] = [on_devices] if on_devices else []
    filled = most + 1  # so that the first unit begins a group
    for unit, size in zip(elsewhere, sizes, strict=True):
        if filled + size > most:
            groups.append([])
            filled = 0
        groups[-1] += unit
        filled += size
    return groups


LARGE = 1024
"""Fewest elements of an array whose drawing counts as an initializer."""


def one_leaf_at_a_time(
    jaxpr: Jaxpr,
    consts: Sequence[jax.Array],
    key: jax.Array,
    needs: Collection[int],
    *,
    side_effects: bool,
    zeroed: Collection[int],
) -> list[jax.Array | int]:
    """Evaluates the jaxpr of a state factory, see [Note: One leaf at a time].

    Args:
      jaxpr: The jaxpr.
      consts: Its constants.
      key: Its argument.
      side_effects: Whether to run equations with side effects even if nothing needs their outputs.
      needs: Indices of the outputs that are needed; the others come back as zeros.
      zeroed: Indices of outputs that become zeros, as does what is made of them.
    """
    # No constants: the compiler would fold what is made of them, such as blocks of 8 bits, which takes minutes.
    zero = _zero_of(jax.random.key_data(key).reshape(-1)[0]) if zeroed else None
    blank = {k: _full(v, zero) for k, v in enumerate(jaxpr.outvars) if k in zeroed}
    blank_variables = {v: blank[k] for k, v in enumerate(jaxpr.outvars) if k in zeroed and not compat.is_literal(v)}
    outvars = [v for k, v in enumerate(jaxpr.outvars) if k in needs and k not in zeroed]
    needed = find_needed(jaxpr, outvars, side_effects=side_effects, available=blank_variables)
    last: jax.Array | None = None

    def apply(eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
        nonlocal last
        draws = _draws(eqn)
        if draws and last is not None:
            inputs = [_delay_key(x, last) if _is_key(x) else x for x in inputs]
        outputs = compat.bind(eqn, inputs)
        if draws:
            last = next(x for v, x in zip(eqn.outvars, outputs, strict=True) if v in needed.variables)
        return [blank_variables.get(v, x) for v, x in zip(eqn.outvars, outputs, strict=True)]

    program = Piece([*jaxpr.invars, *blank_variables], outvars, [eqn for eqn, _ in needed.equations], jaxpr.constvars)
    values = iter(evaluate(program, [*consts, key, *blank_variables.values()], apply))
    return [blank[k] if k in zeroed else next(values) if k in needs else 0 for k in range(len(jaxpr.outvars))]


def _draws(eqn: JaxprEqn) -> bool:
    """Whether an equation makes a large array from a PRNG key."""
    out = compat.type_of(eqn.outvars[0])
    is_number = jnp.issubdtype(out.dtype, jnp.number)
    return is_number and math.prod(out.shape) >= LARGE and any(_is_key(v.aval) for v in eqn.invars)


def _is_key(x: object) -> bool:
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _delay_key(key: jax.Array, drawn: jax.Array) -> jax.Array:
    """Returns `key`, which does not exist before the array `drawn` does."""
    first = lax.convert_element_type(drawn[(0,) * drawn.ndim], jnp.float32)
    zero = _zero_of(lax.bitcast_convert_type(first, jnp.uint32))
    return jax.random.wrap_key_data(jax.random.key_data(key) ^ zero, impl=jax.random.key_impl(key))


def _zero_of(bits: jax.Array) -> jax.Array:
    """Returns 0 in uint32, which compilers take for something computed from `bits`."""
    return lax.shift_right_logical(lax.shift_right_logical(bits, jnp.uint32(16)), jnp.uint32(16))


def _full(variable: Atom, zero: jax.Array | None) -> jax.Array:
    """Returns an array like a variable that is 0 everywhere."""
    assert zero is not None
    aval = compat.type_of(variable)
    return jnp.broadcast_to(lax.convert_element_type(zero, aval.dtype), aval.shape)
