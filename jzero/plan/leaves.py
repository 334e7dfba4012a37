"""The layout of one leaf in a plan."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from jzero.jaxpr.sizes import array_bytes
from jzero.plan.comm import Comm, shard_spec
from jzero.plan.layout import Cut
from jzero.plan.mesh import AnyMesh
from jzero.plan.padded import box, is_padded

PyTree = Any
Memory = Literal["device", "host", "ram", "disk"]


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """Layout of one leaf: an optimizer leaf, a leaf of another field, or a parameter as stored.

    Attributes:
      path: Its key path, such as `"decoder/layer_0/kernel"`.
      shape: Its natural shape.
      dtype: Its dtype.
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

    def spec(self, comm: Comm) -> PartitionSpec:
        """Spec of the stored array."""
        return shard_spec(comm, self.cut, self.base)

    def manual_spec(self, comm: Comm) -> PartitionSpec:
        """Its spec over ZeRO's axes alone; GSPMD handles the other axes."""
        return shard_spec(comm, self.cut, PartitionSpec())

    def box(self, x: Any) -> Any:
        """Returns an array of the stored shape as a leaf of its natural shape: a padded one as a node."""
        return box(x, self.path, self.shape, self.cut)

    def unbox(self, x: Any) -> Any:
        """Returns the array of a leaf: as stored if the leaf is laid out so, else in its natural shape."""
        return x if not is_padded(x) else x.stored if x.cut == self.cut else x.natural

    def for_collectives(self, mesh: AnyMesh) -> Cut | None:
        """Returns its cut for collectives, see [Note: Collectives beside other mesh axes]."""
        return None if self.cut is None else self.cut.with_other_axes(self.base, dict(mesh.shape))

    def bytes_per_device(self, mesh: AnyMesh, comm: Comm) -> int:
        """Bytes of one device's part of the stored array, padding included."""
        parts = 1 if self.cut is None else self.cut.num_shards
        if len(self.base):  # only the sizes of the axes count, so the mesh may be abstract
            names = jax.tree.leaves(tuple(self.spec(comm)))
            parts = math.prod(int(mesh.shape[name]) for name in names)
        return array_bytes(math.prod(self.stored_shape) // parts, self.stored_dtype)


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
