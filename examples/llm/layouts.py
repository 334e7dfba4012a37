"""Where weights are while a model generates: whole on each device, or divided between some.

A mesh `data` x `model` says both: prompts are divided over `data`, weights over `model`.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from decoder import Decoder

MEMORY_SHARE = 0.9  # of a device for weights and cache; the rest is for activations
GIB = 2**30
DIVIDED = {  # by their last dimension or the one before, so that devices exchange activations behind `o` and `down`
    r"embed/embedding": -2,
    r"head/kernel": -1,
    r"layers/(q|k|v|gate|up|gate_up)/(kernel|bias)": -1,
    r"layers/(o|down)/kernel": -2,
}


def choose_mesh(model: Decoder, *, num_rows: int, num_places: int, dtype: Any, divide_by: int | None) -> Mesh:
    """Returns a mesh `data` x `model`, whose second axis divides the weights by as little as fits; prints it."""
    config, num_devices, itemsize = model.config, jax.device_count(), jnp.dtype(dtype).itemsize
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    leaves = {"/".join(key.key for key in path): x for path, x in jax.tree_util.tree_leaves_with_path(shapes)}
    weights = itemsize * sum(x.size for x in leaves.values())
    cache_row = itemsize * 2 * config.num_layers * num_places * config.num_kv_heads * config.head_dim
    shards = 0 if num_devices == 1 else weights / num_devices  # which they are read into, and then laid out from
    limit = memory_limit()
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    if divide_by is not None and divide_by not in sizes:
        raise SystemExit(f"--divide-by must divide the {num_devices} devices: got {divide_by}.")
    for size in sizes if divide_by is None else [divide_by]:
        cache = -(-num_rows * size // num_devices) * cache_row
        held = itemsize * sum(x.size // (size if divided(name, x, size) else 1) for name, x in leaves.items())
        needed = held + max(cache / size, shards)
        if divide_by is not None or limit is None or needed <= MEMORY_SHARE * limit:
            break
    else:
        raise SystemExit(
            f"{weights / GIB:.2f} GiB of weights and {cache / GIB:.2f} of cache do not fit {num_devices} devices of "
            f"{limit / GIB:.2f} GiB: take more devices, fewer prompts at once, or fewer tokens."
        )
    how = "whole on each of" if size == 1 else f"tensor, divided by {size}, on"
    known = "their memory is unknown" if limit is None else f"of {limit / GIB:.2f} GiB"
    whole = [name for name, x in leaves.items() if size > 1 and find_dim(name) and not divided(name, x, size)]
    each = f"{held / GIB:.2f} GiB on each, {needed / GIB:.2f} with what else there is at a time"
    print(f"weights: {how} {num_devices} devices: {each}; {known}")
    if whole:
        print(f"whole on each, since {size} does not divide them: {', '.join(whole)}")
    types = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((num_devices // size, size), ("data", "model"), axis_types=types)


def memory_limit() -> int | None:
    """Returns the bytes of a device that programs can use; `None` if it does not say, as CPUs do not."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def find_dim(name: str) -> int | None:
    """Returns the dimension by which a parameter is divided if its size allows it, counted from the end."""
    return next((dim for pattern, dim in DIVIDED.items() if re.fullmatch(pattern, name)), None)


def divided(name: str, x: Any, size: int) -> bool:
    """Whether a parameter is divided between so many devices: it has a dimension for that, which divides evenly."""
    dim = find_dim(name)
    return dim is not None and x.shape[dim] % size == 0


def shardings(shapes: Any, mesh: Mesh) -> Any:
    """Returns the layout of each parameter; one that the devices cannot divide evenly is whole on each."""

    def sharding(path: Any, x: Any) -> NamedSharding:
        name = "/".join(key.key for key in path)
        if not divided(name, x, mesh.shape["model"]):
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(*[None] * (x.ndim + find_dim(name)), "model"))

    return jax.tree_util.tree_map_with_path(sharding, shapes)
