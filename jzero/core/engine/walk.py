"""The walk: gathers parameters where an equation uses them.

    Walk.__call__(jaxpr, inputs) -> list[Value]

The program has its reductions and waits, and its inputs are lazy parameters and arrays. So

    b:f32[8,64] = dot_general[...] x w          # w: [512, 64]

becomes, on each of N devices,

    a:f32[512,64] = zero_gather[path=w ...] w   # [512/N, 64] -> [512, 64]
    b:f32[8,64] = dot_general[...] x a

Forward and backward pass are equations of one program, and the walk's own output is never differentiated. So data
dependence and `order` alone decide when a parameter is gathered again.

[Note: Short reuse]
A whole parameter is kept until an equation gathers another one, or until the backward pass begins, since the loss's
largest activations are near there. So a weight that several equations read in a row, such as one divided by its norm,
is gathered once. Loop bodies and recomputed blocks keep parameters to their end.

[Note: Parameters that stay]
A parameter with `stays` is gathered once and kept to its last use, forward or backward: all of them by
`reshard_after_forward=False`, some by `Keep`. It is gathered before a call or a recomputed block that reads it, so that
layers still share functions, and in the dtype of a cast if that cast alone reads it there. To the walk, the result of
an operation on its shard is another parameter, which would be gathered by itself. So a tied head is transposed after
the gather. A forward loop stacks the rows that it gathers, and the backward loop scans that stack.

    MeshFacts.in_equation(eqn) -> Meshes

An equation that names mesh axes, or has a mesh in a type, must be walked.

[Note: Meshes in types]
The loss is traced and differentiated outside the step's `shard_map`. The result of a sharding constraint carries its
mesh in its type, where ZeRO's axes are automatic like all others, and so does everything computed from it. Inside the
`shard_map`, ZeRO's axes are manual. An equation without jaxprs takes the types of its new inputs. An equation that
contains jaxprs keeps their types, which then do not match. So the walk enters these equations, or traces them again
inside the step.

If the mesh has Explicit axes, the loss is traced and differentiated on one that has them, too, and one device along
ZeRO's: each device has its own rows. So a line of the model may name ZeRO's axes as in a program without jzero, and as
jax leaves axes of one device out of types, it need not. In the walk all other axes are Auto: `reshard`, and what a line
says as `out_sharding`, become sharding constraints over these. No jaxpr may keep the mesh of the trace, since XLA ends
the process where a mesh of another size is in a program.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import NamedSharding

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.base.types import DType, Params
from jzero.core.engine.lazy import (
    Deferred,
    LazyRows,
    ParamKey,
    RowOf,
    ShardedParam,
    SharedLeaves,
    Static,
    Value,
    defer,
    is_constant,
    is_cut,
    is_lazy,
    is_unevaluated,
)
from jzero.core.engine.order import Order
from jzero.core.engine.placed import PLACED
from jzero.core.engine.shard_rules import apply_on_shard, constrain_lazy
from jzero.core.jaxpr.edit import params_retraced
from jzero.core.jaxpr.equations import reads_of
from jzero.core.jaxpr.identity import IdDict
from jzero.core.jaxpr.interpret import evaluate


class Meshes(NamedTuple):
    """Facts about some jaxprs.

    Attributes:
      named: One names mesh axes, in a constraint or a `shard_map`, so everything around it must be walked.
      carried: One has a mesh in a type, or depends on the mesh of its trace, see [Note: Meshes in types].
    """

    named: bool
    carried: bool


class MeshFacts:
    """Facts about the meshes in the jaxprs of one trace; looks at each jaxpr once."""

    def __init__(self) -> None:
        self._facts: IdDict[Jaxpr, Meshes] = IdDict()

    def in_equation(self, eqn: JaxprEqn) -> Meshes:
        """Returns facts about the jaxprs in an equation."""
        inner = [self.of(jaxpr) for jaxpr in compat.contained_jaxprs(eqn)]
        return Meshes(any(x.named for x in inner), any(x.carried for x in inner)) if inner else Meshes(False, False)

    def of(self, jaxpr: AnyJaxpr) -> Meshes:
        """Returns facts about a jaxpr."""
        opened, _ = compat.open_jaxpr(jaxpr)
        if opened not in self._facts:
            inside = [self.in_equation(eqn) for eqn in opened.eqns]
            named = any(map(names_mesh, opened.eqns)) or any(x.named for x in inside)
            atoms = itertools.chain(opened.constvars, opened.invars, *((*e.invars, *e.outvars) for e in opened.eqns))
            # The lowering of these reads the manual axes off the mesh of the trace.
            asks = any(eqn.primitive in PLACED or eqn.primitive.name == "axis_index" for eqn in opened.eqns)
            carried = named or asks or any(x.carried for x in inside) or any(map(compat.has_mesh, atoms))
            self._facts[opened] = Meshes(named, carried)
        return self._facts[opened]


def names_mesh(eqn: JaxprEqn) -> bool:
    """Whether an equation itself names axes of the mesh."""
    if eqn.primitive.name in ("sharding_constraint", "shard_map"):
        return True
    if eqn.primitive.name == "reshard":
        return compat.sharding_said(eqn) is not None
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))  # those of a `jit`
    return any(isinstance(s, NamedSharding) for s in shardings)


def constrain(x: Value, sharding: object) -> Value:
    """Applies a sharding constraint over the axes that are not manual: inside the step, ZeRO's are."""
    spec = compat.free_spec(sharding.spec) if isinstance(sharding, NamedSharding) else None
    if spec is None or isinstance(x, LazyRows):
        return x
    # The constraint of a lazy parameter applies to its shard, [D/N, F].
    return constrain_lazy(x, spec) if is_lazy(x) else lax.with_sharding_constraint(x, spec)


_TRACED_ANEW = frozenset(
    "composite cond custom_linear_solve custom_vmap_call reduce reduce_window scatter scatter-add scatter-max "
    "scatter-min scatter-mul scatter-sub select_and_scatter while".split()
)

CalledFunction: TypeAlias = Callable[[SharedLeaves], tuple[SharedLeaves, Static[tuple[int, ...]]]]
Rule: TypeAlias = "Callable[[Walk, JaxprEqn, list[Value]], Sequence[Value]]"


class HeldParameters:
    """Whole parameters, and values made of literals alone, kept for later equations, see [Note: Short reuse].

    Attributes:
      keeps: Whether to keep all of them to the end of the walk.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self._arrays: dict[ParamKey, dict[DType, jax.Array]] = {}  # by parameter and the dtype of the gather
        self._params: dict[ParamKey, ShardedParam] = {}  # keeps shards alive, since their identities are keys
        self._constants: IdDict[Deferred, jax.Array] = IdDict()

    def constant(self, x: Deferred) -> jax.Array:
        """Returns a value made of literals alone, such as a mask or a table of angles, traced once for all its uses."""
        if x not in self._constants:
            inputs = [self.constant(y) if isinstance(y, Deferred) else y for y in x.inputs]
            self._constants[x] = x.operation.apply(cast("list[jax.Array]", inputs))
        return self._constants[x]

    def fill(self, x: ShardedParam) -> ShardedParam:
        """Returns a parameter, with the whole array if that is kept."""
        if not is_cut(x):
            return x
        arrays = self._arrays.get(x.key, {})
        unsharded = arrays.get(x.wire_dtype, next(iter(arrays.values()), None))
        return x if unsharded is None else dataclasses.replace(x, unsharded=unsharded)

    def get(self, x: object) -> jax.Array | None:
        """Returns the kept array of a parameter, if any."""
        return next(iter(self._arrays.get(x.key, {}).values()), None) if isinstance(x, ShardedParam) else None

    def keep(self, params: Sequence[ShardedParam]) -> None:
        """Keeps parameters that were gathered for one equation; drops the others, unless all are kept."""
        new = [x for x in params if x.wire_dtype not in self._arrays.get(x.key, {})]
        if new and not self.keeps:  # another gather ends the reuse
            self._drop_but({x.key for x in params})
        for x in new:
            assert x.unsharded is not None
            self._arrays.setdefault(x.key, {})[x.unsharded.dtype] = x.unsharded
            self._params[x.key] = x

    def drop(self) -> None:
        """Drops everything, unless it is kept to the end."""
        if not self.keeps:
            self._drop_but(set())
            self._constants = IdDict()

    def _drop_but(self, needed: set[ParamKey]) -> None:
        self._arrays = {k: x for k, x in self._arrays.items() if k in needed or self._params[k].stays}


@dataclasses.dataclass
class Walk:
    """A walk over one sequence of equations.

    Attributes:
      rules: How it applies equations that contain jaxprs, or that lazy values pass unchanged, by primitive.
      axes: The manual mesh axes: ZeRO's and the replicas'.
      order: Records what happened so far, and makes gathers wait.
      held: The whole parameters that are kept.
      pipelines_reductions: Whether loops run the hops between nodes of their reductions in the next iteration.
      depth: How many loops enclose this walk.
      gathered_rows: The stacks whose rows were gathered, with the dtypes of the gathers, in their order: complete once
        the body of the loop has been evaluated. Walks of blocks and calls inside of it add to the same list.
      meshes: Mesh facts about the jaxprs of this trace.
      functions: Functions of this trace's calls, by jaxpr and the inputs that were gathered before.
      warned: Shapes of the stacks that users were warned about.
    """

    rules: Mapping[str, Rule]
    axes: frozenset[str]
    order: Order
    held: HeldParameters
    pipelines_reductions: bool
    depth: int = 0
    gathered_rows: list[tuple[RowOf, DType]] = dataclasses.field(default_factory=list)
    meshes: MeshFacts = dataclasses.field(default_factory=MeshFacts)
    functions: IdDict[AnyJaxpr, dict[tuple[int, ...], CalledFunction]] = dataclasses.field(default_factory=IdDict)
    warned: set[tuple[int, ...]] = dataclasses.field(default_factory=set)

    def enter_block(self, *, of_loop: bool = False) -> Walk:
        """Returns the walk over a recomputed block or a loop body, which keeps parameters to its end."""
        of_body = dataclasses.replace(self, order=self.order.enter_block(), held=HeldParameters(keeps=True))
        return dataclasses.replace(of_body, depth=self.depth + 1, gathered_rows=[]) if of_loop else of_body

    def enter_call(self, gathered: Sequence[Value]) -> Walk:
        """Returns the walk over a called function; `gathered` are its inputs that were gathered before."""
        return dataclasses.replace(self, order=self.order.enter_call(gathered), held=HeldParameters(keeps=False))

    def __call__(self, jaxpr: AnyJaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Evaluates a jaxpr, given arrays and lazy values. Outputs are lazy if they are made of parameters alone."""
        return evaluate(jaxpr, inputs, self._apply)

    def _apply(self, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
        if self.order.enter_pass(is_backward=compat.is_transposed(eqn)):
            self.held.drop()  # the largest activations are near, see [Note: Short reuse]
        name = eqn.primitive.name
        lazy = any(map(is_unevaluated, inputs))
        rule = self.rules.get(name)
        if rule is not None:
            # Meshes must be adjusted even if nothing is lazy, see [Note: Meshes in types].
            is_of_mesh = name == "reshard" or names_mesh(eqn) or self.meshes.in_equation(eqn).carried
            if lazy or is_of_mesh:
                return rule(self, eqn, inputs)
        # Values made of literals alone, such as masks, are deferred to their use, too: jax has moved them out of loops.
        elif (lazy or all(map(is_constant, inputs))) and not self.meshes.in_equation(eqn).carried:
            result = self._without_arrays(eqn, inputs)
            if result is not None:
                return [result]
        return self.bind_unsharded(eqn, inputs)

    def _without_arrays(self, eqn: JaxprEqn, inputs: list[Value]) -> ShardedParam | Deferred | None:
        """Returns the result of an equation over parameters and literals, if it can wait; `None` if it cannot."""
        operands = [x for x in inputs if not isinstance(x, LazyRows)]
        if len(operands) < len(inputs):
            return None
        return apply_on_shard(eqn, operands) or defer(eqn, operands)  # on the shard first: its gather moves less

    def bind_unsharded(self, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[jax.Array]:
        """Gathers the inputs of an equation, and applies it."""
        name, meshes, inputs = eqn.primitive.name, self.meshes.in_equation(eqn), self.gather(inputs)
        anew: Params = {}
        if meshes.carried and name in _TRACED_ANEW:  # see [Note: Meshes in types]
            inner = self.enter_block()
            anew = params_retraced(eqn, lambda jaxpr: functools.partial(inner.evaluate_unsharded, jaxpr))
        elif meshes.named:
            raise ValueError(
                f"The loss holds a sharding constraint or `shard_map` inside a `{name}`, which jzero "
                "cannot look into. Move it out of that function."
            )
        outputs = compat.bind(eqn, inputs, **anew)
        self.order.note_used(outputs)
        return outputs

    def evaluate_unsharded(self, jaxpr: AnyJaxpr, *inputs: Value) -> list[jax.Array]:
        """Evaluates a jaxpr, and gathers its outputs."""
        return self.gather(self(jaxpr, inputs))

    def gather(self, values: Sequence[Value | None]) -> list[jax.Array]:
        """Gathers values that are used together. Only a loop gathers elsewhere: one iteration ahead."""
        values = [self._gather_rows(x) if isinstance(x, LazyRows) else x for x in values]
        values = [self.held.constant(x) if isinstance(x, Deferred) and is_constant(x) else x for x in values]
        if not any(map(is_lazy, values)):
            return cast("list[jax.Array]", values)
        shared = SharedLeaves.of(cast("list[Value]", values))
        # [D/N, F], with [D, F] if that is still held
        leaves = [self.held.fill(x) if isinstance(x, ShardedParam) else x for x in shared.leaves]
        self.gathered_rows += [(x.row_of, x.wire_dtype) for x in leaves if is_cut(x) and x.row_of is not None]
        params = [x for x in leaves if isinstance(x, ShardedParam)]
        # Parameters that differ only in their final dtype share an array.
        gathered: dict[tuple[ParamKey, DType], jax.Array] = {}
        arrays: list[Value] = []
        for before, x in zip(leaves, self.order.order_use(leaves), strict=True):
            if not isinstance(x, ShardedParam) or not isinstance(before, ShardedParam):
                arrays.append(x)
                continue
            key = before.key, x.wire_dtype  # a shard that waits is another object: the old one is the key
            unsharded = gathered[key] if key in gathered else gathered.setdefault(key, x.gather())  # [D, F]
            arrays.append(unsharded.astype(x.dtype))  # widening casts follow the gather
        self.held.keep([dataclasses.replace(x, unsharded=gathered[x.key, x.wire_dtype]) for x in params])
        return SharedLeaves(tuple(arrays), shared.expressions).compute()

    def gather_staying(self, jaxpr: AnyJaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Returns the inputs of a jaxpr, those that stay gathered; see [Note: Parameters that stay]."""
        shared, (body, _) = SharedLeaves.of(inputs), compat.open_jaxpr(jaxpr)
        variables = IdDict(zip(inputs, body.invars, strict=True))
        leaves = list(shared.leaves)
        staying = {i: x for i, x in enumerate(leaves) if isinstance(x, ShardedParam) and x.stays}
        if not staying:
            return list(inputs)
        read = {i: _as_read(x, body, variables.get(x)) for i, x in staying.items()}
        self.gather([x for x in map(self.held.fill, read.values()) if is_cut(x)])
        for i, x in read.items():
            leaves[i] = dataclasses.replace(staying[i], unsharded=self.held.fill(x).unsharded)
        return SharedLeaves(tuple(leaves), shared.expressions).values()

    def _gather_rows(self, x: LazyRows) -> jax.Array:
        """Gathers all rows of a loop's result."""
        stacks, shared = self.gather(x.stacks), self.gather(x.shared)  # stacks: [L, D, F]
        unsharded = dataclasses.replace(x, shared=tuple(shared))
        return jax.vmap(lambda rows: SharedLeaves.of([unsharded.row(rows)]).compute()[0])(stacks)  # [L, ...]


def _as_read(x: ShardedParam, jaxpr: Jaxpr, var: Var | None) -> ShardedParam:
    """Returns a parameter as a jaxpr reads it: cast, if casts to one dtype are all that read it."""
    reads = [] if var is None else list(reads_of(jaxpr, var))
    dtypes = {eqn.params.get("new_dtype") for eqn in reads}
    cast = apply_on_shard(reads[0], [x]) if len(dtypes) == 1 and None not in dtypes else None
    return cast or x
