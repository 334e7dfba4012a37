"""Sharded parameters: a shard and how to gather it. They stay lazy through casts, slices and other cheap operations.

    ShardedParam.gather() -> jax.Array

The stored shard is [D/N, F] on each of N devices; an equation that reads it gathers the whole parameter, [D, F]. The
result of an equation over parameters alone stays lazy if possible: either the equation slices or casts the shard itself
(`shard_rules`), or it is repeated at each use (`Deferred`). So in

    { lambda ; w:f32[512,64] x:f32[8,512]. let
        a:bf16[512,64] = convert_element_type[new_dtype=bfloat16] w
        b:f32[8,64] = dot_general[...] x a
      in (b,) }

`a` is `w`'s shard with `wire_dtype=bf16`, [64, 64] on each of 8 devices, and `dot_general` gathers it.

    SharedLeaves.of(values) -> SharedLeaves

Values that share parameters, such as `w` and `2 * w`, have the distinct leaves `(w,)`, and each is an expression of
them. So a parameter that occurs in two values is gathered once, and all values can be passed to a function as a pytree.
`LazyRows` holds lazy values that the iterations of a loop return, one for each iteration.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jzero.core.base import compat
from jzero.core.base.types import DType
from jzero.core.engine.placed import gather_p, read_p
from jzero.core.jaxpr.lookups import Lookup
from jzero.core.jaxpr.primitives import CHEAP
from jzero.core.jaxpr.sizes import array_bytes
from jzero.core.layout.casts import round_without_derivative
from jzero.core.layout.cut import Cut
from jzero.core.layout.placement import on_device
from jzero.core.layout.route import Route
from jzero.core.plan.traffic import GatherPlan, Lookups

if TYPE_CHECKING:
    from typing_extensions import TypeIs
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from jzero.core.jaxpr.identity import IdDict

MAX_DEFERRED = 16
"""Most operations in one deferred value; longer chains (a recurrence over parameters, say) are computed once and
kept."""


class RowOf(NamedTuple):
    """The stack whose row, or part of a row, a lazy parameter is.

    Attributes:
      depth: How many loops enclose the row's loop.
      stack: Index of the stack among those that the loop scans.
    """

    depth: int
    stack: int


ParamKey: TypeAlias = tuple[int, Cut]
"""The identity of a shard, and which part of its parameter it is."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard", "unsharded"],
    meta_fields=["cut", "route", "wire_dtype", "dtype", "row_of", "path", "on_disk", "stays", "lookups"],
)
@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """A parameter that is gathered where it is used.

    Attributes:
      shard: This device's part, on the device or in host memory, [..., P/N]; for a parameter on disk a handle,
        int32 [2], for a stack on disk one per row, int32 [L, 2].
      unsharded: The gathered parameter, if it was gathered before; usable if its dtype is `wire_dtype`. [..., D]
      cut: The position of the part in the natural shape.
      route: How it travels.
      wire_dtype: The dtype of the gather: the shard is cast to it first.
      dtype: The dtype of the value: the gathered array is cast to it. Never narrower than `wire_dtype`.
      row_of: In the body of a loop, the stack that it comes from.
      path: Its key path; inside a function that layers share, which input it is.
      on_disk: The dtype of its rows on disk, which the gather reads; `None` if it is in memory.
      stays: Whether it stays whole from its first to its last use, in both passes.
      lookups: Which of its reads look up rows in its shards, see `jzero.core.layout.lookups`.
    """

    shard: jax.Array
    unsharded: jax.Array | None
    cut: Cut
    route: Route
    wire_dtype: DType
    dtype: DType
    row_of: RowOf | None = None
    path: str = ""
    on_disk: DType | None = None
    stays: bool = False
    lookups: Lookups = "none"

    @property
    def shape(self) -> tuple[int, ...]:
        """Natural shape."""
        return self.cut.shape

    @property
    def key(self) -> ParamKey:
        """Identifies the parameter while its shard is alive."""
        return id(self.shard), self.cut  # a cast keeps the shard, a slice makes another

    def drop_leading(self) -> ShardedParam:
        """Returns it with the layout of one slice; a scan has already sliced the arrays."""
        return dataclasses.replace(self, cut=self.cut.drop_leading())  # natural shape [L, D, F] -> [D, F]

    def gather(self) -> jax.Array:
        """Returns the whole parameter, in `wire_dtype`. [..., P/N] -> [..., D]."""
        if not is_cut(self):
            assert self.unsharded is not None
            return self.unsharded
        shard = self.shard if self.on_disk is None else self._read()
        return gather_p.bind(shard, path=self.path, cut=self.cut, dtype=self.wire_dtype, route=self.route)

    def look_up(self, ids: jax.Array, lookup: Lookup) -> jax.Array:
        """Returns rows of the parameter."""
        how = {"path": self.path, "cut": self.cut, "dtype": self.wire_dtype, "route": self.route, "lookup": lookup}
        return gather_p.bind(self.shard, ids, **how).astype(self.dtype)

    def _read(self) -> jax.Array:
        """Returns the row of a stack on disk. [2] -> [..., P/N]."""
        if self.shard.ndim > 1:
            raise ValueError(
                f"The loss uses {self.path!r}, of shape {self.shape}, as a whole, but it is on disk "
                "(`Offload(params='disk')`), from which a scan over its first dimension reads one row after another. "
                "Use its rows inside of the scan, or keep parameters in the host's memory (`params='host'`)."
            )
        return read_p.bind(self.shard, shape=self.cut.shard_shape, dtype=self.on_disk)


def make_lazy(stored: jax.Array, plan: GatherPlan, dtype: DType) -> Leaf:
    """Returns a stored parameter of a dtype as an input of the walk: lazy if it is cut, [..., P/N], else an array.

    If it travels in blocks, it is rounded here, so that all uses see the same values. If it is secondary, it is
    gathered between nodes here, so that all uses gather within the node: [..., P/D].
    """
    leaf, cut, shard = plan.leaf, plan.leaf.cut_for_collectives, stored
    if cut is None:  # already in the compute dtype, unless the parameter is not trained
        return round_without_derivative(stored, dtype)
    dtype = jnp.dtype(dtype)  # never that of random keys: they are not cut
    if leaf.in_records:  # a handle of each row, [L, 2]
        return ShardedParam(stored, None, cut, plan.route, dtype, dtype, path=leaf.path, on_disk=jnp.dtype(leaf.dtype))
    sent = plan.cut_sent(cut, dtype)
    if sent != cut:
        with jax.named_scope("zero_quantize"):
            shard = sent.pack_shard(on_device(shard))  # bytes [*stacked, P/N · K]
    (cut, route), *before = plan.legs(sent)
    for part, between in before:
        shard = gather_p.bind(shard, path=leaf.path, cut=part, dtype=sent.dtype_sent(dtype), route=between)
    return ShardedParam(shard, None, cut, route, dtype, dtype, path=leaf.path, stays=plan.stays, lookups=plan.lookups)


class Operation(NamedTuple):
    """An equation's operation as a static, comparable value."""

    key: Hashable
    eqn: JaxprEqn

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operation) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def apply(self, inputs: Sequence[jax.Array]) -> jax.Array:
        """Returns the operation's result."""
        with np.errstate(over="ignore"):  # jax casts literals by NumPy, which warns if they become infinite
            return compat.bind(self.eqn, inputs)[0]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["inputs"], meta_fields=["operation"])
@dataclasses.dataclass(frozen=True)
class Deferred:
    """A cheap operation on lazy values alone, repeated at each use; of literals alone, once in each loop or block.

    Attributes:
      inputs: ShardedParam values, or arrays of one element.
    """

    inputs: tuple[Operand, ...]
    operation: Operation

    @property
    def shape(self) -> tuple[int, ...]:
        """Natural shape."""
        return tuple(compat.type_of(self.operation.eqn.outvars[0]).shape)

    @property
    def dtype(self) -> DType:
        """Dtype of the value."""
        return compat.type_of(self.operation.eqn.outvars[0]).dtype

    @property
    def num_operations(self) -> int:
        """Operations that one use repeats; a shared operation counts each time."""
        return 1 + sum(x.num_operations for x in self.inputs if isinstance(x, Deferred))


Leaf: TypeAlias = "jax.Array | ShardedParam"
Operand: TypeAlias = "jax.Array | ShardedParam | Deferred"  # where it is an array, a literal's number, too


def is_lazy(x: object) -> TypeIs[ShardedParam | Deferred]:
    """Whether `x` is a lazy value."""
    return isinstance(x, ShardedParam | Deferred)


def is_cut(x: object) -> TypeGuard[ShardedParam]:
    """Whether `x` is a parameter that must be gathered before use."""
    # An array in another dtype was rounded otherwise, so it does not count.
    return isinstance(x, ShardedParam) and (x.unsharded is None or x.unsharded.dtype != x.wire_dtype)


def is_looked_up(x: object) -> bool:
    """Whether `x` is a parameter of which rows are looked up, and nothing else is read."""
    return isinstance(x, ShardedParam) and x.lookups == "all"


def is_constant(x: object) -> bool:
    """Whether a value is made of literals alone, so that the compiler knows it."""
    if isinstance(x, Deferred):
        return all(map(is_constant, x.inputs))
    return isinstance(x, bool | int | float | complex | np.ndarray | np.generic) and np.size(x) == 1


def has_param(x: object) -> bool:
    """Whether a value is made of parameters; others that are lazy are made of literals and arrays of one element."""
    return isinstance(x, ShardedParam) or (isinstance(x, Deferred) and any(map(has_param, x.inputs)))


def num_bytes(values: Iterable[Leaf]) -> int:
    """Returns the bytes of arrays, and of parameters when gathered."""

    def dtype(x: Leaf) -> DType:
        return jnp.dtype(x.wire_dtype if isinstance(x, ShardedParam) else x.dtype)

    return sum(array_bytes(math.prod(x.shape), dtype(x)) for x in values)


def defer(eqn: JaxprEqn, inputs: Sequence[Operand]) -> Deferred | None:
    """Returns the equation's result as a deferred value, if it is cheap and takes only parameters and numbers."""
    if eqn.primitive.name not in CHEAP or len(eqn.outvars) != 1:
        return None
    # An activation among the inputs would stay in memory until the last use.
    if not all(is_lazy(x) or np.size(x) == 1 for x in inputs):
        return None
    if sum(x.num_operations for x in inputs if isinstance(x, Deferred)) >= MAX_DEFERRED:
        return None
    key: Hashable
    try:
        # By value, so that equations that do the same share one result within a `SharedLeaves`.
        key = (eqn.primitive, tuple(sorted(eqn.params.items())), eqn.outvars[0].aval)
        hash(key)
    except TypeError:  # `eqn.params` cannot be sorted or hashed: the equation itself is the key
        key = id(eqn)
    return Deferred(tuple(inputs), Operation(key, eqn))


T = TypeVar("T")
Expression: TypeAlias = "int | tuple[Operation, tuple[Expression, ...]]"
Expressions: TypeAlias = tuple[Expression, ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["expressions"])
@dataclasses.dataclass(frozen=True)
class SharedLeaves:
    """Values, as distinct leaves and expressions of them.

    Attributes:
      leaves: The distinct lazy parameters and arrays.
      expressions: One per value: the index of a leaf, or an operation with the expressions of its inputs.
    """

    leaves: tuple[Value, ...]
    expressions: Expressions

    @classmethod
    def of(cls, values: Iterable[Value]) -> SharedLeaves:
        """Splits arrays and lazy values."""
        leaves: list[Value] = []  # distinct, in the order of their first use
        index: IdDict[Value, int] = IdDict()

        def expression(x: Value) -> Expression:
            if isinstance(x, Deferred):
                return x.operation, tuple(map(expression, x.inputs))  # hashable, so that equal ones run once
            i = index.setdefault(x, len(leaves))
            if i == len(leaves):
                leaves.append(x)
            return i

        expressions = tuple(map(expression, values))
        return cls(tuple(leaves), expressions)

    def values(self) -> list[Value]:
        """Returns the values; equal values are one object."""
        return self._make(lambda operation, inputs: Deferred(tuple(cast("list[Operand]", inputs)), operation))

    def compute(self) -> list[jax.Array]:
        """Returns the values as arrays, if all leaves are arrays; equal values are computed once."""
        return self._make(lambda operation, inputs: operation.apply(inputs))

    def _make(self, apply: Callable[[Operation, list[T]], T]) -> list[T]:
        results: dict[Expression, T] = {}

        def value(x: Expression) -> T:
            if isinstance(x, int):
                return cast("T", self.leaves[x])
            if x not in results:  # an operation that two values share runs once
                results[x] = apply(x[0], [value(y) for y in x[1]])
            return results[x]

        return [value(x) for x in self.expressions]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static(Generic[T]):
    """A static value that a function returns from its trace, instead of an array."""

    value: T


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["stacks", "shared"], meta_fields=["places", "expression"]
)
@dataclasses.dataclass(frozen=True)
class LazyRows:
    """Lazy values that the iterations of a loop returned, one for each iteration, such as cast weights.

    Attributes:
      stacks: Leaves that differ from iteration to iteration: stacks of parameters and arrays, with a leading dimension.
      shared: Leaves that are the same in all iterations.
      places: For each leaf of a row, whether it is shared, and its index in `shared` or `stacks`.
      expression: What a row is, as in `SharedLeaves`.
    """

    stacks: tuple[Leaf, ...]  # [L, D/N, F] for a parameter, else [L, ...]
    shared: tuple[Value, ...]
    places: tuple[tuple[bool, int], ...]
    expression: Expression

    def row(self, rows: Sequence[Leaf]) -> Value:
        """Returns the lazy value of one iteration, given that iteration's row of each stack."""
        leaves = tuple(self.shared[i] if is_shared else rows[i] for is_shared, i in self.places)  # parameters: [D/N, F]
        return SharedLeaves(leaves, (self.expression,)).values()[0]


Value: TypeAlias = "jax.Array | ShardedParam | Deferred | LazyRows"
"""A value of the walk."""


def is_unevaluated(x: object) -> TypeIs[ShardedParam | Deferred | LazyRows]:
    """Whether `x` is a lazy value, or rows of them."""
    return is_lazy(x) or isinstance(x, LazyRows)
