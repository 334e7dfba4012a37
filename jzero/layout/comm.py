"""How a parameter travels: gathers of its shards, reductions of its gradient, and the bytes of both.

In: a shard, [..., P/N] on each of N devices, and its `Cut`. Out: the stored array, [..., P]; and back, summed. A `Comm`
is hashable, so it is a parameter of the equations `zero_gather` and `zero_reduce`. Each one is a few lines:

    Direct("data")                              gathers and reduces over one mesh axis
    Rounded(Direct("data"), "int8")             the same, but exchanges gradients in blocks of integers
    TwoHop(Direct("data"), Direct("node"), 2)   between nodes first, then within a node; sums the other way
    Replicated(Direct("data"), "copy", 2)       the same in each of two groups of devices, whose sums are added

A `Sums`, the same for every `Comm`, says in which dtype values are summed, and what divides them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jzero._types import DType
from jzero.config.zero import ZeroConfig
from jzero.jaxpr.sizes import array_bytes
from jzero.layout.blocks import pack, packed_size, unpack
from jzero.layout.cut import Cut
from jzero.layout.mesh import AnyMesh
from jzero.layout.parts import apply_to_parts
from jzero.layout.sums import sum_along

PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}
"""How often devices send an array, but for their own part, by HLO's name of the collective."""


class Hop(NamedTuple):
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
        """Bytes that one device sends: (N-1)/N of the array, twice that for an all-reduce."""
        return PASSES[self.kind] * self.num_bytes * (self.num_devices - 1) / self.num_devices


class Comm(Protocol):
    """How the shards of a parameter, and its gradient, travel. Mesh axes are manual where its methods run."""

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The mesh axes along which devices hold different shards."""

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes along which devices have different rows of the batch, the slowest-varying first."""

    def gather(self, shard: jax.Array, cut: Cut) -> jax.Array:
        """Returns the stored array. [..., P/N] -> [..., P]."""

    def reduce(self, x: jax.Array, cut: Cut) -> jax.Array:
        """Returns this device's shard of the sum over all devices with a part of the batch. [..., P] -> [..., P/N]."""

    def split(self) -> Levels | None:
        """Returns the stages within and between nodes; `None` if there is one level."""

    def gather_hops(self, cut: Cut, dtype: DType) -> tuple[Hop, ...]:
        """Returns the collectives of a gather of shards of a dtype."""

    def reduce_hops(self, cut: Cut, dtype: DType) -> tuple[Hop, ...]:
        """Returns the collectives of a reduction in a dtype."""


class Levels(NamedTuple):
    """The two stages of communication over several nodes. Between them, each of a node's D devices has 1/D of the leaf.

    Attributes:
      within: From 1/D to the whole leaf, and back.
      between: From shards to 1/D, and back, replicas included.
      num_nodes: The number of nodes.
    """

    within: Comm
    between: Comm
    num_nodes: int

    def cut_within(self, cut: Cut) -> Cut:
        """Returns how a leaf is cut into parts for the devices of a node; each is cut over nodes evenly."""
        return dataclasses.replace(cut, num_shards=cut.num_shards // self.num_nodes, parts=self.num_nodes)

    def cut_between(self, cut: Cut) -> Cut:
        """Returns how one such part is cut over nodes."""
        within_node = self.cut_within(cut)
        return Cut(
            cut.stored_dim,
            within_node.shard_shape,
            self.num_nodes,
            other_axes=within_node.axes_beside(),
            num_stacked=cut.num_stacked,
        )


@dataclasses.dataclass(frozen=True)
class Direct:
    """All devices along one mesh axis exchange their shards.

    Attributes:
      axis: The mesh axis.
      scatters: Whether gradients are reduced by a reduce-scatter, or by an all-reduce and a slice.
    """

    axis: str
    scatters: bool = True

    def __str__(self) -> str:
        return self.axis

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """See `Comm`."""
        return (self.axis,)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """See `Comm`."""
        return (self.axis,)

    def gather(self, shard: jax.Array, cut: Cut) -> jax.Array:
        """See `Comm`."""
        return apply_to_parts(
            lambda x: lax.all_gather(x, self.axis, axis=cut.stored_dim, tiled=True),
            shard,
            cut.axes_beside(),
            cut.axes_beside(),
        )

    def reduce(self, x: jax.Array, cut: Cut) -> jax.Array:
        """See `Comm`."""
        if not self.scatters:
            return own_part(sum_along(x, self.axis), cut, self)
        return apply_to_parts(
            lambda x: lax.psum_scatter(x, self.axis, scatter_dimension=cut.stored_dim, tiled=True),
            x,
            cut.axes_beside(),
            cut.axes_beside(),
        )

    def split(self) -> None:
        """See `Comm`."""

    def gather_hops(self, cut: Cut, dtype: DType) -> tuple[Hop, ...]:
        """See `Comm`."""
        sent = cut.dtype_sent(dtype)
        return (Hop("all-gather", self.shard_axes, cut.num_shards, math.prod(cut.stored_shape), sent),)

    def reduce_hops(self, cut: Cut, dtype: DType) -> tuple[Hop, ...]:
        """See `Comm`."""
        kind = "reduce-scatter" if self.scatters else "all-reduce"
        return (Hop(kind, self.shard_axes, cut.num_shards, math.prod(cut.stored_shape), dtype),)


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Along one mesh axis, devices exchange gradients in blocks of integers, and sum what they get in fp32.

    Each summand is rounded once, by the device that has it. Parameters are gathered as they are.

    Attributes:
      inner: How parameters travel.
      kind: `int8` or `int4`.
    """

    inner: Direct
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}({self.inner})"

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """See `Comm`."""
        return self.inner.shard_axes

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """See `Comm`."""
        return self.inner.batch_axes

    def gather(self, shard: jax.Array, cut: Cut) -> jax.Array:
        """See `Comm`."""
        return self.inner.gather(shard, cut)

    def reduce(self, x: jax.Array, cut: Cut) -> jax.Array:
        """See `Comm`."""
        axis, lead = self.inner.axis, cut.num_stacked

        def exchange(x: jax.Array) -> jax.Array:
            rest = jnp.moveaxis(x, cut.dim, lead).shape[lead + 1 :]
            packed = pack(x, cut.dim, lead, self.kind)  # bytes [*stacked, P, K]
            packed = lax.all_to_all(packed, axis, lead, lead, tiled=True)
            parts = packed.reshape(*packed.shape[:lead], lax.axis_size(axis), -1, packed.shape[-1])
            total = unpack(parts, math.prod(rest), self.kind).sum(lead)  # [*stacked, P/N, S]
            return jnp.moveaxis(total.reshape(*total.shape[: lead + 1], *rest), lead, cut.dim).astype(x.dtype)

        return apply_to_parts(exchange, x, cut.axes_beside(), cut.axes_beside())

    def split(self) -> None:
        """See `Comm`."""

    def gather_hops(self, cut: Cut, dtype: DType) -> tuple[Hop, ...]:
        """See `Comm`."""
        return self.inner.gather_hops(cut, dtype)

    def reduce_hops(self, cut: Cut, dtype: DType) -> tuple[Hop, ...]:
        """See `Comm`."""
        rows = math.prod(cut.stored_shape) // cut.size_beside  # [*stacked, P, K]
        size = rows * packed_size(cut.size_beside, self.kind)
        return (Hop("all-to-all", self.shard_axes, cut.num_shards, size, jnp.dtype(jnp.int8)),)


@dataclasses.dataclass(frozen=True)
class TwoHop:
    """Devices exchange shards with those of other nodes, then within their node; sums go the other way.

    A leaf is cut into N parts by device first and node second, so what a device gathers from other nodes are the
    neighbours of its own part: a contiguous 1/D of the leaf for D devices per node, the same on device d of every node.
    So only the first hop crosses nodes, and each is a plain collective.

    Attributes:
      within: Communication within a node.
      between: Communication between nodes.
      num_nodes: The number of nodes.
    """

    within: Direct
    between: Direct | Rounded
    num_nodes: int

    def __str__(self) -> str:
        return f"{self.within}+{self.between}"

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """See `Comm`."""
        return (*self.within.shard_axes, *self.between.shard_axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """See `Comm`."""
        return (*self.between.batch_axes, *self.within.batch_axes)

    def gather(self, shard: jax.Array, cut: Cut) -> jax.Array:
        """See `Comm`."""
        for hop in (self.between, self.within):  # [..., P/N] -> [..., P/D] -> [..., P]
            if lax.axis_size(hop.shard_axes[0]) > 1:
                shard = hop.gather(shard, cut)
        return shard

    def reduce(self, x: jax.Array, cut: Cut) -> jax.Array:
        """See `Comm`."""
        for hop in (self.within, self.between):  # [..., P] -> [..., P/D] -> [..., P/N]
            if lax.axis_size(hop.shard_axes[0]) > 1:
                x = hop.reduce(x, cut)
        return x

    def split(self) -> Levels | None:
        """See `Comm`."""
        return Levels(self.within, self.between, self.num_nodes) if self.num_nodes > 1 else None

    def gather_hops(self, cut: Cut, dtype: DType) -> tuple[Hop, ...]:
        """See `Comm`."""
        levels = Levels(self.within, self.between, self.num_nodes)
        between, within = levels.cut_between(cut), levels.cut_within(cut)
        hops = self.between.gather_hops(between, cut.dtype_sent(dtype)) + self.within.gather_hops(within, dtype)
        return tuple(hop for hop in hops if hop.num_devices > 1)

    def reduce_hops(self, cut: Cut, dtype: DType) -> tuple[Hop, ...]:
        """See `Comm`."""
        levels = Levels(self.within, self.between, self.num_nodes)
        hops = self.within.reduce_hops(levels.cut_within(cut), dtype) + self.between.reduce_hops(
            levels.cut_between(cut), dtype
        )
        return tuple(hop for hop in hops if hop.num_devices > 1)


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Groups of devices hold the same shards; each gathers within itself, and sums are added over groups.

    Attributes:
      inner: How shards travel within a group.
      axis: The mesh axis over groups.
      num_replicas: The number of groups.
    """

    inner: Comm
    axis: str
    num_replicas: int

    def __str__(self) -> str:
        return f"{self.inner}×{self.axis}"

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """See `Comm`."""
        return self.inner.shard_axes

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """See `Comm`."""
        return (self.axis, *self.inner.batch_axes)

    def gather(self, shard: jax.Array, cut: Cut) -> jax.Array:
        """See `Comm`."""
        return self.inner.gather(shard, cut)

    def reduce(self, x: jax.Array, cut: Cut) -> jax.Array:
        """See `Comm`."""
        return sum_along(self.inner.reduce(x, cut), self.axis)

    def split(self) -> Levels | None:
        """See `Comm`."""
        levels = self.inner.split()
        return levels and levels._replace(between=dataclasses.replace(self, inner=levels.between))

    def gather_hops(self, cut: Cut, dtype: DType) -> tuple[Hop, ...]:
        """See `Comm`."""
        return self.inner.gather_hops(cut, dtype)

    def reduce_hops(self, cut: Cut, dtype: DType) -> tuple[Hop, ...]:
        """See `Comm`."""
        over_groups = Hop("all-reduce", (self.axis,), self.num_replicas, math.prod(cut.shard_shape), dtype)
        return (*self.inner.reduce_hops(cut, dtype), *([over_groups] if self.num_replicas > 1 else []))


def comm_of(config: ZeroConfig, mesh: AnyMesh, rounds: str = "none") -> Comm:
    """Returns how parameters and gradients travel, if `rounds` is the kind of blocks that gradients travel in."""
    within = Direct(config.axis, config.reduce_scatter)
    last = within if config.node_axis is None else Direct(config.node_axis)
    slow = last if rounds == "none" else Rounded(last, rounds)
    comm: Comm = slow
    if config.node_axis is not None:
        comm = TwoHop(within, slow, int(mesh.shape[config.node_axis]))
    if config.replica_axis is not None:
        comm = Replicated(comm, config.replica_axis, int(mesh.shape[config.replica_axis]))
    return comm


def shard_index(comm: Comm) -> jax.Array:
    """Returns the number of this device's shard."""
    axes = comm.shard_axes
    return lax.axis_index(axes[0] if len(axes) == 1 else axes)


def own_part(stored: jax.Array, cut: Cut, comm: Comm) -> jax.Array:
    """Returns this device's shard of a stored array that all devices hold. [..., P] -> [..., P/N]."""
    size = cut.stored_size // cut.num_shards
    return lax.dynamic_slice_in_dim(stored, shard_index(comm) * size, size, axis=cut.stored_dim)
