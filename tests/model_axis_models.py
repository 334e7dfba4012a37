"""A constraint along a model axis, and a function with a batching rule of its own."""

from __future__ import annotations

import jax.numpy as jnp
from jax import custom_batching, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def constrained(x, mesh, *names):
    return x if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, P(*names)))


@custom_batching.custom_vmap
def batched_on_its_own(x):
    return 2 * jnp.sin(x)


@batched_on_its_own.def_vmap
def _(_size, is_batched, x):
    return 2 * jnp.sin(x), is_batched[0]
