"""How a leaf travels: a `Route` of hops gathers its shards, reduces its gradient, and says what both send.

    data                               one hop: all devices along a mesh axis
    data,context                       one hop over both axes
    data+node                          between the devices of a node, then between nodes; a gather goes the other way
    data+int8(node)+copy(replica)      sums between nodes are of integers; groups along `replica` hold the same shards

N devices have [..., P/N] each of a stored array, [..., P]: see `Cut`. It is cut into parts by device first and node
second, so what a device gathers from other nodes are the neighbours of its own part: a contiguous 1/D of the leaf for D
devices per node, the same on device d of every node. So each hop is one plain collective, and only one crosses nodes.

A `Route` is hashable, so it is a parameter of the equations `zero_gather` and `zero_reduce`. A `Sums`, the same for
every route, says in which dtype values are summed, and what divides them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jzero.core.base.types import DType
from jzero.core.config.precision import cast_dtype, is_float8
from jzero.core.config.zero import Rounded, ZeroConfig
from jzero.core.jaxpr.sizes import array_bytes
from jzero.core.layout.blocks import pack, packed_size, unpack
from jzero.core.layout.cut import Cut, apply_to_parts
from jzero.core.layout.mesh import AnyMesh, axes_within_nodes, num_parts

Sum: TypeAlias = Literal["scatter", "slice", "copy", Rounded]
"""How gradients are summed along a mesh axis.

"scatter": by a reduce-scatter. "slice": by an all-reduce, of which each device keeps its part. "copy": by an
all-reduce, since all devices along the axis hold the same shards. Others: in fp32, after an exchange of blocks of
integers to which each device rounds its summands.
"""


def sent_bytes(kind: str, num_bytes: int, num_devices: int) -> float:
    """Returns what one device sends: (N-1)/N of the array, twice that for an all-reduce."""
    return (2 if kind == "all-reduce" else 1) * num_bytes * (num_devices - 1) / num_devices


def bytes_on_port(kind: str, sent_bytes: float, num_devices: int, num_nodes: int) -> float:
    """Returns the bytes that one network port sends for a collective of a group on several nodes, a port per device.

    A ring leaves each node once, over the ports of all its devices in the group: m/n of what a device sends, for n
    devices on m nodes. In an all-to-all each device sends its n-th parts to the n (1 - 1/m) devices of other nodes.
    """
    if num_nodes == 1:
        return 0.0
    if kind == "all-to-all":
        return sent_bytes * (num_devices - num_devices / num_nodes) / (num_devices - 1)
    return sent_bytes * num_nodes / num_devices


class Collective(NamedTuple):
    """One collective that carries a parameter or gradient.

    Attributes:
      kind: Its name in HLO.
      axes: The mesh axes that it spans.
      num_devices: The devices that take part.
      num_elements: Of the whole array on one device: the result of a gather, the operand of anything else.
      dtype: The dtype that travels.
    """

    kind: str
    axes: tuple[str, ...]
    num_devices: int
    num_elements: int
    dtype: DType

    @property
    def num_bytes(self) -> int:
        """Bytes of that array."""
        return array_bytes(self.num_elements, self.dtype)

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends."""
        return sent_bytes(self.kind, self.num_bytes, self.num_devices)


class Hop(NamedTuple):
    """One collective of a route, over mesh axes that are manual where the methods run.

    Attributes:
      axis: The mesh axis, or several, the slowest-varying first.
      size: The devices along it.
      sum: How gradients are summed along it.
    """

    axis: str | tuple[str, ...]
    size: int
    sum: Sum = "scatter"

    def __str__(self) -> str:
        name = ",".join(self.axes)
        return name if self.sum in ("scatter", "slice") else f"{self.sum}({name})"

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @property
    def num_parts(self) -> int:
        """The number of different parts along the axis."""
        return 1 if self.sum == "copy" else self.size

    def gather(self, x: jax.Array, cut: Cut) -> jax.Array:
        """Returns the parts of all devices, one behind the other."""
        gather = functools.partial(lax.all_gather, axis_name=self.axis, axis=cut.stored_dim, tiled=True)
        return apply_to_parts(gather, x, cut.axes_beside(), cut.axes_beside())

    def reduce(self, x: jax.Array, cut: Cut) -> jax.Array:
        """Returns this device's part of the sum over all devices."""
        if self.sum == "copy":
            return lax.psum(x, self.axis)
        if self.sum == "slice":
            return self.own_part(lax.psum(x, self.axis), cut)
        fn = functools.partial(self._sum_rounded, cut=cut)
        if self.sum == "scatter":
            fn = functools.partial(lax.psum_scatter, axis_name=self.axis, scatter_dimension=cut.stored_dim, tiled=True)
        return apply_to_parts(fn, x, cut.axes_beside(), cut.axes_beside())

    def own_part(self, x: jax.Array, cut: Cut) -> jax.Array:
        """Returns this device's part of an array that all devices hold."""
        size = x.shape[cut.stored_dim] // self.num_parts
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * size, size, axis=cut.stored_dim)

    def _sum_rounded(self, x: jax.Array, cut: Cut) -> jax.Array:
        lead = cut.num_stacked
        rest = jnp.moveaxis(x, cut.dim, lead).shape[lead + 1 :]
        packed = pack(x, cut.dim, lead, self.sum)  # bytes [*stacked, P, K]
        packed = lax.all_to_all(packed, self.axis, lead, lead, tiled=True)
        parts = packed.reshape(*packed.shape[:lead], self.size, -1, packed.shape[-1])
        total = unpack(parts, math.prod(rest), self.sum).sum(lead)  # [*stacked, P/N, S]
        return jnp.moveaxis(total.reshape(*total.shape[: lead + 1], *rest), lead, cut.dim).astype(x.dtype)

    def reduction(self, num_elements: int, cut: Cut, dtype: DType) -> Collective:
        """Returns the collective that reduces an array of so many elements."""
        kind = {"copy": "all-reduce", "slice": "all-reduce", "scatter": "reduce-scatter"}.get(self.sum)
        if kind is None:  # bytes [*stacked, P, K]
            num_elements = num_elements // cut.size_beside * packed_size(cut.size_beside, self.sum)
            kind, dtype = "all-to-all", jnp.dtype(jnp.int8)
        return Collective(kind, self.axes, self.size, num_elements, dtype)


@dataclasses.dataclass(frozen=True)
class Route:
    """How the shards of a leaf, and its gradient, travel.

    Attributes:
      hops: In the order of a reduction: within a node, between nodes, between copies. One of one device does nothing.
    """

    hops: tuple[Hop, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.hops))

    @property
    def _shared(self) -> list[Hop]:
        return [hop for hop in self.hops if hop.size > 1]

    @property
    def _cutting(self) -> list[Hop]:
        return [hop for hop in self.hops if hop.num_parts > 1]

    def gather(self, shard: jax.Array, cut: Cut) -> jax.Array:
        """Returns the stored array. [..., P/N] -> [..., P]."""
        for hop in reversed(self._cutting):
            shard = hop.gather(shard, cut)
        return shard

    def reduce(self, x: jax.Array, cut: Cut) -> jax.Array:
        """Returns this device's shard of the sum over all devices with a part of the batch. [..., P] -> [..., P/N]."""
        for hop in self._shared:
            x = hop.reduce(x, cut)
        return x

    def own_part(self, x: jax.Array, cut: Cut) -> jax.Array:
        """Returns this device's shard of a stored array that all devices hold. [..., P] -> [..., P/N]."""
        for hop in self._cutting:
            x = hop.own_part(x, cut)
        return x

    def gathers(self, cut: Cut, dtype: DType) -> tuple[Collective, ...]:
        """Returns the collectives of a gather of shards of a dtype."""
        found, size = [], math.prod(cut.shard_shape)
        for hop in reversed(self._cutting):
            size *= hop.size
            found.append(Collective("all-gather", hop.axes, hop.size, size, cut.dtype_sent(dtype)))
        return tuple(found)

    def reductions(self, cut: Cut, dtype: DType) -> tuple[Collective, ...]:
        """Returns the collectives of a reduction in a dtype."""
        found, size = [], math.prod(cut.stored_shape)
        for hop in self._shared:
            found.append(hop.reduction(size, cut, dtype))
            size //= hop.num_parts
        return tuple(found)

    @property
    def levels(self) -> tuple[Route, ...]:
        """The route within a node, and the rest; itself if nothing is cut between nodes."""
        first, *others = self.hops
        is_cut = any(hop.num_parts > 1 for hop in others)
        return (Route((first,)), Route(tuple(others))) if is_cut else (self,)

    def legs(self, cut: Cut) -> tuple[Leg, ...]:
        """Returns its levels, each with the cut of what it carries: the leaf for D devices, and 1/D of it for nodes."""
        if len(self.levels) == 1:
            return ((cut, self),)
        within, between = self.levels
        nodes = between.hops[0].size
        of_leaf = dataclasses.replace(cut, num_shards=cut.num_shards // nodes, parts=nodes)
        shape, beside = of_leaf.shard_shape, of_leaf.axes_beside()
        of_part = Cut(cut.stored_dim, shape, nodes, other_axes=beside, num_stacked=cut.num_stacked)
        return (of_leaf, within), (of_part, between)


Leg: TypeAlias = tuple[Cut, Route]
"""A route that runs by itself, and the cut of what it carries."""


def route_of(config: ZeroConfig, mesh: AnyMesh, rounds: Sum | Literal["none"] = "none") -> Route:
    """Returns how parameters and gradients travel, if `rounds` is the kind of blocks that gradients travel in."""
    plain: Sum = "scatter" if config.reduce_scatter else "slice"
    within = axes_within_nodes(config)
    sums: dict[str | tuple[str, ...], Sum] = {within[0] if len(within) == 1 else within: plain}
    if config.node_axis is not None:
        sums[config.node_axis] = plain
    if rounds != "none":
        sums[list(sums)[-1]] = rounds
    if config.replica_axis is not None:
        sums[config.replica_axis] = "copy"
    return Route(tuple(Hop(axis, num_parts(mesh, axis), how) for axis, how in sums.items()))


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Sums:
    """How values of all devices with a part of the batch are summed.

    Attributes:
      axes: The mesh axes over which the batch is split.
      dtype: The dtype of sums of gradients; `None`: their own.
      predivide: The divisor of gradients before they are summed, so that sums over many devices fit into fp16.
      widens_bf16: Whether bf16 is summed as fp32, because the backend cannot sum bf16.
    """

    axes: tuple[str, ...]
    dtype: DType | None = None
    predivide: int = 1
    widens_bf16: bool = False

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else jnp.dtype(self.dtype).name
        return dtype + ("" if self.predivide == 1 else f"/{self.predivide}") or "own"

    def dtype_of(self, dtype: DType) -> DType:
        """Returns the dtype in which gradients of a dtype are summed."""
        dtype = cast_dtype(dtype, self.dtype)
        return jnp.float32 if self._widens(dtype) else dtype

    def prepare(self, x: jax.Array) -> jax.Array:
        """Returns a gradient in the form in which it is summed."""
        x = self.widen(x.astype(cast_dtype(x.dtype, self.dtype)))
        return x if self.predivide == 1 else x / self.predivide

    def widen(self, x: jax.Array) -> jax.Array:
        """Returns `x` in a dtype that the backend can sum over devices; 8 bits are too few for sums."""
        return x.astype(jnp.float32) if self._widens(x.dtype) else x

    def _widens(self, dtype: DType) -> bool:
        return (self.widens_bf16 and dtype == jnp.bfloat16) or is_float8(dtype)


def sum_along(x: T, *axes: str) -> T:
    """Sums arrays along mesh axes, except those with one device, where XLA for CPUs would copy all arrays."""
    shared = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
    return lax.psum(x, shared) if shared else x
