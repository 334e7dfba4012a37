"""The loss of a mixture of experts: next tokens, and the router's load balancing as `transformers` computes it.

Balancing is `E · sum_e f_e P_e`, over the tokens of a batch and all layers: `f_e` is the share of tokens that go to
expert e, `P_e` the mean of its probability. A product of two means over a batch is not the mean of what its parts say.
But `f_e` is a count, without a gradient. Once it is known for the whole batch, the rest is a mean over tokens, as jzero
asks of a loss. The counts of a step's devices are added by `psum`; those of its micro-batches, of which each would have
to know the later ones, by a forward pass before the step (`make_balance`).

Shapes: B rows, S tokens, L layers, E experts.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jzero
from experts import route
from jzero.attention import own_part
from jzero.hf import Experts
from training import Batch, next_token_loss, next_token_losses

AXIS = "data"  # over which ZeRO divides the batch


def balanced_loss(model: Any) -> Callable[[Any, Batch], jzero.Weighted]:
    """Returns the mean loss of the learned tokens plus the router's, as a function of parameters and a batch.

    A batch is as for `training.next_token_loss`. With several micro-batches, it must have what `make_balance` adds.
    """
    coef = model.config.experts.aux_coef

    def loss_fn(params: Any, batch: Batch) -> jzero.Weighted:
        losses, weights, router = next_token_losses(model, params, batch)
        real = own_part(_real(batch), model.context)
        if "balance" in batch:
            factors = batch["balance"]  # [B, E]
        else:
            axes = AXIS if model.context is None else (AXIS, model.context)
            sums = jax.lax.psum(_sums(router, real, weights, model.config.experts), axes)
            factors = jnp.broadcast_to(_factors(sums, model.config.experts)[None], (len(real), router.shape[-1]))
        balance = jnp.einsum("lbse,bs,be->", jax.nn.softmax(router, axis=-1), real, factors)
        return jzero.Weighted((losses * weights).sum() + coef * balance, weights.sum())

    return loss_fn


def make_balance(model: Any) -> Callable[[Any, Batch], Batch]:
    """Returns a function from a state and a batch to that batch with `balance`, [B, E], of equal rows."""

    def sums(params: Any, batch: Batch) -> jzero.Summed:
        _, weights, router = next_token_losses(model, params, batch)
        real = own_part(_real(batch), model.context)
        return jzero.Summed(_sums(router, real, weights, model.config.experts))

    count = jzero.make_eval_step(sums)

    def add(state: Any, batch: Batch) -> Batch:
        factors, tokens = _factors(count(state, batch), model.config.experts), batch["tokens"]
        rows = jnp.broadcast_to(factors[None], (len(tokens), len(factors)))
        return {**batch, "balance": jax.device_put(rows, tokens.sharding) if isinstance(tokens, jax.Array) else rows}

    return add


def make_step(model: Any, args: argparse.Namespace) -> Callable[[Any, Batch], Any]:
    """Returns the step of a run, from a state and a batch to a state and metrics."""
    remat = "offload" if args.offload_activations else None
    how: dict[str, Any] = {"clip_norm": 1.0, "accumulate_steps": args.accumulate_steps, "remat": remat}
    if model.config.experts is None:
        return jzero.make_train_step(next_token_loss(model), **how)
    step = jzero.make_train_step(balanced_loss(model), **how)
    if args.accumulate_steps == 1:
        return step
    add_balance = make_balance(model)
    return lambda state, batch: step(state, add_balance(state, batch))


def _real(batch: Batch) -> jax.Array:
    """Returns 1 for tokens, and 0 for padding and rows that only fill a batch, [B, S]."""
    tokens = batch["tokens"][:, :-1]
    places = batch["segments"][:, :-1] >= 0 if "segments" in batch else jnp.ones(tokens.shape, bool)
    return places * (batch["weights"] > 0)[:, None].astype(jnp.float32)


def _sums(router: jax.Array, real: jax.Array, weights: jax.Array, config: Experts) -> Mapping[str, jax.Array]:
    """Returns the sums over tokens that `_factors` needs."""
    num_layers, *_, count = router.shape
    chosen, _ = route(router, config)
    counts = jnp.zeros(count).at[chosen].add(real[None, :, :, None])
    sums = {"counts": counts, "tokens": num_layers * real.sum(), "weight": weights.sum()}
    return jax.lax.stop_gradient(sums)


def _factors(sums: Mapping[str, jax.Array], config: Experts) -> jax.Array:
    """Returns by what to multiply each expert's probabilities, [E]; `Weighted` divides by the weight of all tokens."""
    return config.count * sums["counts"] * sums["weight"] / jnp.maximum(sums["tokens"], 1) ** 2
