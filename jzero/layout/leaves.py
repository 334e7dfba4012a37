"""The layout of one leaf in a plan."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Literal

from jax.sharding import NamedSharding, PartitionSpec

from jzero.jaxpr.sizes import array_bytes
from jzero.layout.cut import Cut
from jzero.layout.mesh import HOST_MEMORY, AnyMesh, names_host_memory, num_parts
from jzero.layout.padded import box, is_padded

PyTree = Any
Memory = Literal["device", "host", "ram", "disk"]


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """Layout of one leaf: an optimizer leaf, a leaf of another field, or a parameter as stored.

    Attributes:
      path: Its key path, such as `"decoder/layer_0/kernel"`.
      shape: Its natural shape.
      dtype: Its dtype.
      mesh: The mesh; may be abstract.
      axes: ZeRO's axes of the mesh, along which devices hold different shards.
      base: The spec of mesh axes other than ZeRO's that it already had.
      cut: Where the ZeRO axis cuts it, or `None` if it stays whole.
      reason: Why it stays whole; empty if it is cut.
      owner: Index of the parameter that an optimizer leaf follows.
      wide: The dtype in which the optimizer computes an optimizer leaf, if the leaf is stored in another.
      is_param: Whether a leaf of another field is a parameter that is not trained.
      compute_dtype: The dtype of such a parameter in the loss; `None` for other leaves.
      memory: Where it lives between steps: on the devices, in pinned memory of each device's host, or in records,
        which programs do not see, in the host's memory or on disk.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    mesh: AnyMesh
    axes: tuple[str, ...]
    base: PartitionSpec = PartitionSpec()
    cut: Cut | None = None
    reason: str = ""
    owner: int | None = None
    wide: Any = None
    is_param: bool = False
    compute_dtype: Any = None
    memory: Memory = "device"

    @property
    def in_records(self) -> bool:
        """Whether programs do not see it."""
        return self.memory in ("ram", "disk")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the global array that holds it."""
        return self.shape if self.cut is None else self.cut.stored_shape

    @property
    def stored_dtype(self) -> Any:
        """Dtype of that array."""
        return self.dtype if self.cut is None else self.cut.dtype_sent(self.dtype)

    @property
    def size(self) -> int:
        """Number of elements, without padding."""
        return math.prod(self.shape)

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

    @property
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
    def bytes_per_device(self) -> int:
        """Bytes of one device's part of the stored array, padding included."""
        return array_bytes(math.prod(self.part_shape), self.stored_dtype)

    @property
    def cut_for_collectives(self) -> Cut | None:
        """Its cut for collectives, see [Note: Collectives beside other mesh axes]."""
        return None if self.cut is None else self.cut.with_other_axes(self.base, dict(self.mesh.shape))

    def box(self, x: Any) -> Any:
        """Returns an array of the stored shape as a leaf of its natural shape: a padded one as a node."""
        return box(x, self.path, self.shape, self.cut)

    def unbox(self, x: Any) -> Any:
        """Returns the array of a leaf: as stored if the leaf is laid out so, else in its natural shape."""
        return x if not is_padded(x) else x.stored if x.cut == self.cut else x.natural


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
    compute_dtype: Any
    update_dtype: Any
    master: StateLeaf | None = None
    trained: bool = True

    @property
    def path(self) -> str:
        """Key path of the parameter."""
        return self.param.path

    def unbox(self, x: Any) -> Any:
        """Returns the array of a parameter, of its gradient or of its master, as `StateLeaf.unbox` does."""
        return self.grad.unbox(x) if is_padded(x) and x.cut == self.grad.cut else self.param.unbox(x)

    @property
    def updated(self) -> StateLeaf:
        """The leaf that the optimizer updates: the master copy, or the parameter itself."""
        return self.param if self.master is None else self.master
