"""One leaf of a state: its layout, and conversions between its natural and its stored array."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jzero.core.base.types import DType, PyTree
from jzero.core.jaxpr.sizes import array_bytes
from jzero.core.layout.casts import apply_edits, describe_misfit
from jzero.core.layout.cut import Cut
from jzero.core.layout.mesh import HOST_MEMORY, AnyMesh, names_host_memory, num_parts
from jzero.core.layout.padded import Padded, box, is_padded
from jzero.core.layout.placement import (
    Look,
    Memory,
    gather_arrays,
    memory_of,
    on_device,
    place_array,
    relayout,
    to_memory,
)
from jzero.core.layout.stored import InRecords, Like, Stored, when_read

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One leaf as it is stored: an optimizer leaf, a leaf of another field, a parameter or its gradient.

    `place` puts a natural array where the leaf is stored, and `convert` changes its layout. Inside `jit`, `load`
    returns the natural array of a stored one, `store` the stored one, and `relayout` changes the layout.

    Attributes:
      path: Its key path, such as `"decoder/layer_0/kernel"`.
      shape: Its natural shape.
      mesh: The mesh; may be abstract.
      axes: ZeRO's axes of the mesh, along which devices hold different shards.
      base: Its spec over mesh axes other than ZeRO's.
      cut: Where the ZeRO axis cuts it, or `None` if it stays whole.
      reason: Why it stays whole; empty if it is cut.
      owner: Index of the parameter that an optimizer leaf follows.
      update_dtype: The dtype in which the optimizer computes with an optimizer leaf that is stored in another.
      compute_dtype: The dtype in the loss of a parameter outside the optimizer; `None` for other leaves.
      memory: Where it lives between steps: on the devices, in pinned memory of each device's host, or in records,
        which programs do not see, in the host's memory or on disk.
      is_written: Whether the loss writes it. Then it travels as it is: a rounded value would replace the exact one.
    """

    path: str
    shape: tuple[int, ...]
    dtype: DType
    mesh: AnyMesh
    axes: tuple[str, ...]
    base: PartitionSpec = PartitionSpec()
    cut: Cut | None = None
    reason: str = ""
    owner: int | None = None
    update_dtype: DType | None = None
    compute_dtype: DType | None = None
    memory: Memory = "device"
    is_written: bool = False

    @property
    def is_param(self) -> bool:
        """Whether it is a parameter outside the optimizer."""
        return self.compute_dtype is not None

    @property
    def seen_dtype(self) -> DType:
        """Its dtype in a loss that takes the field that holds it."""
        return self.dtype if self.compute_dtype is None else self.compute_dtype

    @property
    def in_records(self) -> bool:
        """Whether it is in records, which programs do not see."""
        return self.memory == "records"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the global array that holds it."""
        return self.shape if self.cut is None else self.cut.stored_shape

    @property
    def stored_dtype(self) -> DType:
        """Dtype of that array."""
        return self.dtype if self.cut is None else self.cut.dtype_sent(self.dtype)

    @property
    def size(self) -> int:
        """Number of elements, without padding."""
        return math.prod(self.shape)

    @property
    def padded_cut(self) -> Cut | None:
        """Its cut if the stored array has another shape, or other elements, than the natural one."""
        return None if self.cut is None or self.cut.is_stored_naturally else self.cut

    @property
    def taken(self) -> frozenset[int]:
        """Dimensions that other mesh axes cut."""
        return frozenset(d for d, names in enumerate(self.base) if names is not None)

    @property
    def spec(self) -> PartitionSpec:
        """Spec of the stored array."""
        return self._spec(self.base)

    @property
    def manual_spec(self) -> PartitionSpec:
        """Its spec over ZeRO's axes alone; GSPMD handles the other axes."""
        return self._spec(PartitionSpec())

    def _spec(self, base: PartitionSpec) -> PartitionSpec:
        return base if self.cut is None else self.cut.spec(base, self.axes)

    @functools.cached_property
    def device_sharding(self) -> NamedSharding:
        """Sharding of the stored array while it is on the devices."""
        return NamedSharding(self.mesh, self.spec)

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of the stored array in its memory between steps."""
        sharding = self.device_sharding
        return sharding.with_memory_kind(HOST_MEMORY) if self.array_memory == "host" else sharding

    @property
    def array_memory(self) -> Literal["device", "host"]:
        """Where the stored array is while programs run: on the devices, unless these can name its memory."""
        return "host" if self.memory == "host" and names_host_memory(self.mesh) else "device"

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one device's part of the stored array."""
        shape, spec = self.stored_shape, tuple(self.spec)
        return tuple(n // num_parts(self.mesh, names) for n, names in itertools.zip_longest(shape, spec))

    @property
    def column_dim(self) -> int:
        """The dimension of the stored array whose indices are its columns, see `Offload.zenflow`."""
        return self.stored_shape.index(max(self.stored_shape)) if self.cut is None else self.cut.stored_dim

    @property
    def bytes_per_device(self) -> int:
        """Bytes of one device's part of the stored array, padding included."""
        return array_bytes(math.prod(self.part_shape), self.stored_dtype)

    @property
    def cut_for_collectives(self) -> Cut | None:
        """Its cut for collectives, see [Note: Collectives beside other mesh axes]."""
        return None if self.cut is None else self.cut.with_other_axes(self.base, dict(self.mesh.shape))

    @property
    def abstract(self) -> jax.ShapeDtypeStruct | InRecords:
        """The stored array as a shape; of one in records, its place."""
        if self.in_records:
            return InRecords(self.path, self.stored_shape, self.dtype)
        return jax.ShapeDtypeStruct(self.stored_shape, self.stored_dtype, sharding=self.sharding)

    @property
    def as_numbers(self) -> StateLeaf:
        """The layout of the same leaf as numbers on the devices, if it is stored in blocks; else itself."""
        if self.cut is None or self.cut.blocks is None:
            return self
        return dataclasses.replace(self, cut=self.cut.unpacked(), memory="device")

    def written(self) -> StateLeaf:
        """Returns the layout of the same leaf for a loss that writes it."""
        return dataclasses.replace(self, compute_dtype=self.dtype if self.is_param else None, is_written=True)

    def load(self, x: Stored) -> jax.Array:
        """Returns the leaf in its natural shape on the devices, cut if possible. Inside `jit`.

        Args:
          x: The stored array, or one of the natural shape.
        """
        cut, x = self.cut, on_device(x)
        if cut is None:
            return x
        self.check_shape(x)
        is_stored = tuple(x.shape) == cut.stored_shape
        if cut.blocks is not None:
            return self.as_numbers.load(self._unpack(x) if is_stored else x)
        if is_stored:
            x = cut.to_natural(x)
        # A flattened leaf has no natural dimension to cut: the compiler chooses its layout.
        return x if cut.flat else lax.with_sharding_constraint(x, self.device_sharding)

    @overload
    def store(self, x: jax.Array) -> jax.Array: ...
    @overload
    def store(self, x: Stored) -> Stored: ...
    def store(self, x: Stored) -> Stored:
        """Returns the stored array, in its memory, of an array in natural or stored shape. Inside `jit`."""
        if isinstance(x, InRecords) or (self.array_memory == "host" and memory_of(x) == "host"):
            return x
        cut = self.padded_cut
        if cut is not None and tuple(x.shape) == self.shape:
            x = cut.to_stored(x) if cut.blocks is None else self._pack(self.as_numbers.store(x))
        x = lax.with_sharding_constraint(x, self.device_sharding)
        return jax.device_put(x, jax.memory.Space.Host) if self.array_memory == "host" else x

    def place(self, x: ArrayLike, *, look: Look | None = None) -> jax.Array:
        """Returns the stored array of a natural one of any kind, or of a number, as `place_array` does."""
        is_whole = not isinstance(x, jax.Array) and jnp.issubdtype(self.dtype, np.integer)
        if is_whole and (why := describe_misfit(np.asarray(x), self.dtype)):
            raise ValueError(
                f"{self.path} holds {why}: enable wider numbers, `jax.config.update('jax_enable_x64', True)`."
            )
        if self.as_numbers is self:
            return place_array(x, self.dtype, self.sharding, self.padded_cut, look=look)
        return to_memory(self._pack(self.as_numbers.place(x, look=look)), self.sharding)

    def convert(self, x: Stored, to: StateLeaf) -> jax.Array:
        """Returns a stored array of this layout, in a new buffer, as another layout of the same leaf stores it."""
        if to.as_numbers is not to:
            return to_memory(to._pack(self.convert(x, to.as_numbers)), to.sharding)
        numbers, x = self.as_numbers, on_device(x)
        x = x if numbers is self else self._unpack(x)
        return to_memory(relayout(x, numbers.padded_cut, to.padded_cut, to.dtype, to.device_sharding), to.sharding)

    def relayout(self, x: Stored, to: StateLeaf) -> jax.Array:
        """Returns a stored array as another layout of the same leaf stores it, in its own dtype. Inside `jit`."""
        return to.store(on_device(x) if self.cut == to.cut else self.load(x))

    def _pack(self, x: jax.Array) -> jax.Array:
        """Returns the stored array of `as_numbers` in blocks; each device packs its own shard."""
        assert self.cut is not None
        return _packed(x, self.cut, self.device_sharding)

    def _unpack(self, x: jax.Array) -> jax.Array:
        """Returns an array stored in blocks as that of `as_numbers`; each device unpacks its own shard."""
        assert self.cut is not None
        return _unpacked(x, self.cut, self.as_numbers.device_sharding)

    def check_shape(self, x: Like) -> None:
        """Raises unless an array has the natural or the stored shape."""
        if tuple(x.shape) in (self.shape, self.stored_shape):
            return
        if tuple(x.shape[1:]) == self.shape:
            raise ValueError(
                f"{self.path!r} has shape {tuple(x.shape)}, that of the parameter with one more dimension in front: a "
                "gradient of each example? A sharded state takes one gradient per parameter. Aggregate them first, for "
                "example by `update` of `optax.contrib.differentially_private_aggregate` on gradients and parameters "
                "of `jzero.natural_params(state)`, and hand the result to an optimizer without that transformation."
            )
        raise ValueError(
            f"{self.path!r} has shape {tuple(x.shape)}; the plan knows it as {self.shape} (natural) or "
            f"{self.stored_shape} (stored). Hand over "
            "gradients of `jzero.natural_params(state)` or those that `value_and_grad` returns."
        )

    def box(self, x: T) -> T | Padded:
        """Returns an array of the stored shape as a leaf of its natural shape: a padded one as a node."""
        return box(x, self.path, self.shape, self.cut)

    def unbox(self, x: object) -> Any:
        """Returns the array of a leaf: as stored if the leaf is laid out so, else in its natural shape."""
        return x if not isinstance(x, Padded) else x.stored if x.cut == self.cut else x.natural


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Layout of one parameter, its gradient and the optimizer state that follows it.

    Attributes:
      param: The parameter as stored between steps.
      grad: Its gradient as `value_and_grad` returns it; optimizer leaves of its shape follow.
      scan_dim: The dimension that a scan runs over, which is never cut.
      compute_dtype: Its dtype in the loss.
      update_dtype: The dtype of parameter and gradient in the optimizer.
      master: Its master copy in the optimizer state; `None` if `param` is what the optimizer updates.
      trained: Whether it has a gradient.
    """

    param: StateLeaf
    grad: StateLeaf
    scan_dim: int | None
    compute_dtype: DType
    update_dtype: DType
    master: StateLeaf | None = None
    trained: bool = True

    @property
    def path(self) -> str:
        """Key path of the parameter."""
        return self.param.path

    def box(self, x: T) -> T | Padded:
        """Returns a parameter's array of the stored shape as a leaf of its natural shape, as `StateLeaf.box` does."""
        return self.param.box(x)

    def unbox(self, x: object) -> Any:
        """Returns the array of a parameter, of its gradient or of its master, as `StateLeaf.unbox` does."""
        return self.grad.unbox(x) if is_padded(x) and x.cut == self.grad.cut else self.param.unbox(x)

    @property
    def updated(self) -> StateLeaf:
        """The leaf that the optimizer updates: the master copy, or the parameter itself."""
        return self.param if self.master is None else self.master

    def written(self) -> LeafPlan:
        """Returns the layout of the same parameter for a loss that writes it: exact, unless it is trained."""
        dtype = self.compute_dtype if self.trained else self.param.dtype
        return dataclasses.replace(self, param=self.param.written(), compute_dtype=dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def param_as_gradient(self, param: Stored) -> jax.Array:
        """Returns a stored parameter laid out like its gradient."""
        return self.param.relayout(param, self.grad)

    def edited_master(self, param: Stored, master: PyTree) -> PyTree:
        """Returns a master with the edits of its parameter, or the parameter if that is its own master."""
        if self.master is None:
            return param
        # Nobody edits a parameter in records by itself.
        return master if isinstance(param, InRecords) else when_read(master, functools.partial(self.edit_master, param))

    @functools.partial(jax.jit, static_argnums=0)
    def edit_master(self, param: jax.Array, master: jax.Array) -> jax.Array:
        """Returns a stored master with the edits of its parameter, see [Note: Masters]."""
        assert self.master is not None
        return self.master.store(apply_edits(on_device(master), self.param_as_gradient(param)))


def gather_leaves(arrays: Sequence[Stored], leaves: Sequence[StateLeaf]) -> list[jax.Array]:
    """Returns stored leaves whole on every device, in their natural shapes, gathered by one program."""
    if not arrays:
        return []
    replicated = NamedSharding(leaves[0].mesh, PartitionSpec())
    return gather_arrays([on_device(x) for x in arrays], tuple(leaf.cut for leaf in leaves), replicated)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _packed(x: jax.Array, cut: Cut, sharding: NamedSharding) -> jax.Array:
    spec = PartitionSpec(*[None] * cut.packed_dim, sharding.spec[cut.dim])
    packed: jax.Array = jax.shard_map(cut.pack_shard, mesh=sharding.mesh, in_specs=spec, out_specs=sharding.spec)(x)
    return packed


@functools.partial(jax.jit, static_argnums=(1, 2))
def _unpacked(x: jax.Array, cut: Cut, sharding: NamedSharding) -> jax.Array:
    spec, part = PartitionSpec(*[None] * cut.dim, sharding.spec[cut.packed_dim]), cut.for_one_shard()
    numbers: jax.Array = jax.shard_map(part.to_natural, mesh=sharding.mesh, in_specs=spec, out_specs=sharding.spec)(x)
    return numbers
