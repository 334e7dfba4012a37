"""Every optimizer of optax and optax.contrib, and what its update needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib as contrib

from tests.optimizers import OPTIMIZERS

__all__ = ["CLASSES", "SHAPES", "SURVEY"]

SHAPES = {"b": (24,), "v": (8, 9), "w": (6, 8)}
"""Parameters with which the survey is made: a vector, and matrices of both orientations."""


def _by_name(module: Any, names: str) -> dict[str, Callable[[], Any]]:
    return {name: lambda name=name: getattr(module, name)(1e-3) for name in names.split()}


def _vectors(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim < 2, params)


def _chained(first: Any, then: Any = None) -> Any:
    return optax.chain(first, optax.adam(1e-3) if then is None else then)


SGD = optax.sgd(0.1)

SURVEY: dict[str, Callable[[], Any]] = {
    **OPTIMIZERS,
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    **_by_name(
        optax,
        "adabelief adadelta adagrad adamax adamaxw adan amsgrad fromage lars nadam nadamw noisy_sgd novograd "
        "optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi",
    ),
    "adafactor_unfactored": lambda: optax.adafactor(1e-2, factored=False),
    "adam_bf16": lambda: optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "adaptive_grad_clip": lambda: _chained(optax.adaptive_grad_clip(0.1), SGD),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adamw(1e-3), 3),
    "centralize": lambda: _chained(optax.centralize()),
    "clip": lambda: _chained(optax.clip(1.0)),
    "clip_by_block_rms": lambda: _chained(optax.clip_by_block_rms(1.0), SGD),
    "keep_nonnegative": lambda: optax.chain(optax.adam(1e-3), optax.keep_params_nonnegative()),
    "lbfgs": lambda: optax.lbfgs(1e-3, linesearch=None),
    "lbfgs_line_search": optax.lbfgs,
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "normalize_by_update_norm": lambda: _chained(optax.normalize_by_update_norm(), SGD),
    "polyak_sgd": optax.polyak_sgd,
    "rmsprop_momentum": lambda: optax.rmsprop(1e-3, momentum=0.9, centered=True),
    "scale_by_schedule": lambda: optax.chain(optax.trace(0.9), optax.scale_by_schedule(optax.linear_schedule(1, 0, 9))),
    "set_to_zero": lambda: optax.chain(optax.adam(1e-3), optax.masked(optax.set_to_zero(), _vectors)),
    "skip_not_finite": lambda: optax.MultiSteps(SGD, 2, should_skip_update_fn=optax.skip_not_finite),
    "zero_nans": lambda: _chained(optax.zero_nans()),
    **_by_name(
        contrib,
        "acprop ademamix adopt dadapt_adamw galore madgrad momo momo_adam prodigy schedule_free_adamw "
        "schedule_free_sgd simplified_ademamix sophia",
    ),
    "cocob": contrib.cocob,
    "dog": lambda: contrib.dog(1.0),
    "dowg": lambda: contrib.dowg(1.0),
    "mechanize": lambda: contrib.mechanize(optax.adam(1e-3)),
    "muon_adaptive": lambda: contrib.muon(1e-3, nesterov=False, adaptive=True),
    "normalize": lambda: _chained(contrib.normalize(), SGD),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(1e-3), contrib.reduce_on_plateau()),
    "sam": lambda: contrib.sam(SGD, _chained(contrib.normalize(), SGD), sync_period=2, opaque_mode=False),
    "schedule_free_lion": lambda: contrib.schedule_free(optax.lion(1e-3), 1e-3),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(1e-3)),
}

CLASSES = {
    "kernels": "acprop adabelief adadelta adagrad adam adam_bf16 adamax adamaxw adamw adan ademamix adopt amsgrad clip "
    "cocob ema inject_hyperparams keep_nonnegative lion madgrad masked multi_steps multi_transform nadam nadamw "
    "nesterov optimistic_adam_v2 optimistic_gradient_descent radam reduce_on_plateau rmsprop rmsprop_momentum rprop "
    "scale_by_schedule schedule schedule_free_adamw schedule_free_lion schedule_free_sgd set_to_zero sgd sgd_momentum "
    "sign_sgd signum simplified_ademamix split_real_and_imaginary yogi",
    "sums": "apply_if_finite clip_adamw clip_by_block_rms fromage lars normalize normalize_by_update_norm novograd "
    "polyak_sgd sam skip_not_finite zero_nans",
    "sums of state": "adafactor_unfactored dadapt_adamw dog dowg lamb mechanize momo momo_adam prodigy",
    "rows or noise": "adafactor adaptive_grad_clip centralize noisy_sgd sm3",
    "products": "galore muon muon_adaptive",
    "mixed by scale_by_lbfgs": "lbfgs",
    "needs the loss function": "lbfgs_line_search sophia",
}
"""What each update needs beyond elements: sums over gradients and parameters, or over state, too; whole arrays."""
