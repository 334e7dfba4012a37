"""Expert parallelism: devices along a mesh axis have different experts, and rows of their own.

The axis is not ZeRO's. A parameter of experts is cut over it by expert, and over the other axes by ZeRO; all else is
the same along it. Before experts multiply, each device gets the tokens of all devices along the axis; afterwards the
results of its experts are added to those of the others and go back. Since no token is dropped, an exchange of only
those that go to its experts (`jax.lax.all_to_all`) would need as much room, and send as much.

Shapes: N tokens of a device, G = N times the devices along the axis, E experts of a device; others as in `experts`.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experts import WAYS
from jzero.hf import Experts, ModelConfig

EXPERTS = "experts"
"""The mesh axis along which devices have different experts."""


class Apart(NamedTuple):
    """Tokens sorted by experts that are on different devices; what each device has is cut along dimension 0.

    Its methods are those of `experts.WAYS`, of the parts of all devices one after another.
    """

    mesh: Mesh
    count: int  # E of all devices together
    sorted: Any  # what `experts.WAYS` makes on each device

    @classmethod
    def of(cls, mesh: Mesh, product: str, logits: jax.Array, config: Experts) -> "Apart":
        """Returns the order of tokens by their experts."""
        count = config.count // mesh.shape[EXPERTS]

        def of_device(logits: jax.Array) -> Any:
            first = lax.axis_index(EXPERTS) * count
            return WAYS[product].of(_of_all(logits), config, first, count)

        return cls(mesh, config.count, _on_each(mesh, of_device, logits))

    def spread(self, x: jax.Array) -> jax.Array:
        """Sends tokens to all devices along the axis, each of which sorts those for its experts."""
        return _on_each(self.mesh, lambda own, x: own.spread(_of_all(x)), self.sorted, x)

    def multiply(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Multiplies with kernels that are cut by expert."""
        return _on_each(self.mesh, lambda own, x, kernel: own.multiply(x, kernel), self.sorted, x, kernel)

    def rows(self, bias: jax.Array) -> jax.Array:
        """Returns the bias of each row."""
        return _on_each(self.mesh, lambda own, bias: own.rows(bias), self.sorted, bias)

    def collect(self, y: jax.Array) -> jax.Array:
        """Adds the results of all experts of a token, on the device that has it."""

        def of_device(own: Any, y: jax.Array) -> jax.Array:
            sums = own.collect(y)  # [G, O], of the experts here
            return lax.psum_scatter(sums, EXPERTS, tiled=True)  # [N, O]

        return _on_each(self.mesh, of_device, self.sorted, y)


def of_experts(path: Any) -> bool:
    """Whether a parameter of a mixture of experts belongs to these."""
    return path[-2].key in ("gate", "up", "gate_up", "down")


def cut_by_expert(params: Any, mesh: Mesh) -> Any:
    """Returns parameters, those of experts cut over the axis, [L, E, ...]."""
    over = NamedSharding(mesh, P(None, EXPERTS))
    return jax.tree_util.tree_map_with_path(
        lambda path, x: lax.with_sharding_constraint(x, over) if of_experts(path) else x, params
    )


def check_parts(config: ModelConfig, num_parts: int) -> None:
    """Raises if the experts of a model have no such number of equal parts."""
    if config.experts is None:
        raise ValueError(f"{config.model_type!r} has no experts: leave --experts out.")
    if config.experts.count % num_parts:
        raise ValueError(f"{config.experts.count} experts have no {num_parts} equal parts: change --experts.")


def own_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Returns rows cut over the axis, if there is one."""
    if mesh is None:
        return x
    count = mesh.shape[EXPERTS]
    if len(x) % count:
        raise ValueError(
            f"{len(x)} rows of the devices along --experts have no {count} equal parts: a micro-batch must have a "
            "multiple of as many rows as there are devices. Change --batch, --accumulate-steps or --experts."
        )
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(EXPERTS)))


def _of_all(x: jax.Array) -> jax.Array:  # [N, ...] -> [G, ...]
    return lax.all_gather(x, EXPERTS, tiled=True)


def _on_each(mesh: Mesh, fn: Any, *inputs: Any) -> Any:
    """Applies a function on each device along the axis to its parts of the inputs."""
    over = P(EXPERTS)
    return jax.shard_map(fn, mesh=mesh, axis_names={EXPERTS}, in_specs=over, out_specs=over, check_vma=False)(*inputs)
