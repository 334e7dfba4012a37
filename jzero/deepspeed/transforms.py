"""DeepSpeed transformations missing from optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jzero._types import PyTree


def scale_by_uncorrected_adam(
    b1: ArrayLike, b2: ArrayLike, eps: float, *, eps_root: float = 0.0
) -> optax.GradientTransformation:
    """Returns `optax.scale_by_adam` without bias correction."""
    adam = optax.scale_by_adam(b1, b2, eps)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        _, state = adam.update(updates, state, params)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + eps_root) + eps), state.mu, state.nu)
        return scaled, state

    return optax.GradientTransformation(adam.init, update)


def lamb(  # noqa: PLR0913  # the optimizer's own
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike,
    b2: ArrayLike,
    *,
    eps: float,
    eps_inside_sqrt: bool,
    weight_decay: float,
    max_coeff: float,
    min_coeff: float,
    bias_correction: bool,
) -> optax.GradientTransformation:
    """Returns LAMB as DeepSpeed's `FusedLamb` computes it.

    It differs from `optax.lamb` in two respects: the ratio of norms is clipped, and moments are never corrected, not
    even in those norms. Instead, the bias correction scales the learning rate.
    """
    outside, inside = (0.0, eps) if eps_inside_sqrt else (eps, 0.0)
    steps = [
        scale_by_uncorrected_adam(b1, b2, outside, eps_root=inside),
        optax.add_decayed_weights(weight_decay),
        scale_by_bounded_trust_ratio(min_coeff, max_coeff),
    ]
    if bias_correction:
        steps.append(optax.scale_by_schedule(lambda count: jnp.sqrt(1 - b2 ** (count + 1)) / (1 - b1 ** (count + 1))))
    return optax.chain(*steps, optax.scale_by_learning_rate(learning_rate))


def scale_by_bounded_trust_ratio(least: float, most: float) -> optax.GradientTransformation:
    """Returns `optax.scale_by_trust_ratio` with bounds on the ratio; it is 1 where either norm is 0."""

    def scale(update: jax.Array, param: jax.Array) -> jax.Array:
        param_norm, update_norm = optax.tree.norm(param), optax.tree.norm(update)
        is_zero = (param_norm == 0) | (update_norm == 0)
        ratio = jnp.clip(param_norm / jnp.where(is_zero, 1, update_norm), least, most)
        return update * jnp.where(is_zero, 1, ratio).astype(update.dtype)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError("A trust ratio needs the parameters: call `tx.update(grads, opt_state, params)`.")
        return jax.tree.map(scale, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
