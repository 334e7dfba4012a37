"""DeepSpeed's optimizers, as transformations of optax with the same numbers."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jzero.core.base.types import PyTree
from jzero.deepspeed.key import Parsed, Ruling, Type, row, section, where
from jzero.deepspeed.kinds import ANY, BOOL, NUMBER, PAIR, RATE
from jzero.deepspeed.schedules import CYCLED_B2, not_built, scheduled, sets_betas, sets_rate

TORCH_ADAMW_DECAY = 0.01
"""The default weight decay of `torch.optim.AdamW`; that of DeepSpeed's own is 0."""


def optimizer_of(c: Parsed) -> optax.GradientTransformation | None:
    """Returns the optimizer of a configuration; `None` if there is none, or values are not known."""
    kind, schedule = c.types["optimizer"], scheduled(c)
    unknown = {*c.open_params("optimizer")} - ({"lr"} if schedule.lr is not None else set())
    if kind is None or not schedule.is_complete or unknown:
        return None
    params, scale = c.params("optimizer"), optax.scale_by_learning_rate
    params.weight_decay = TORCH_ADAMW_DECAY if _decays_as_torch(c) else params.weight_decay
    lr = params.lr if schedule.lr is None else schedule.lr
    if schedule.momentum is None:
        return optax.chain(*kind.make(params, *getattr(params, "betas", (0.0, 0.0))), scale(lr))

    def make(learning_rate: optax.ScalarOrSchedule, b1: ArrayLike) -> optax.GradientTransformation:
        return optax.chain(*kind.make(params, b1, CYCLED_B2), scale(learning_rate))

    return optax.inject_hyperparams(make)(learning_rate=lr, b1=schedule.momentum)


def optimizer_type(c: Parsed, path: str) -> Ruling | None:
    """The rule for the type of an optimizer."""
    kind, name = c.types["optimizer"], c[path]
    if kind is None:
        note = "no equivalent is known: pass an optax transformation to the train state"
        return None if name is None else Ruling("refused", REFUSED.get(name.lower(), note))
    return Ruling("honoured", kind.note if optimizer_of(c) is not None else kind.note + not_built(c, "optimizer"))


def _decays_as_torch(c: Parsed) -> bool:
    name = c["optimizer.type"].lower()
    if name not in ("adam", "adamw") or c.sets("optimizer.params.weight_decay"):
        return False
    return c["optimizer.params.torch_adam"] and (name == "adamw" or c["optimizer.params.adam_w_mode"])


def _torchs_decay(c: Parsed, path: str) -> Ruling | None:
    note = f"torch's default for AdamW, {TORCH_ADAMW_DECAY}"
    return Ruling("honoured", note) if _decays_as_torch(c) else None


Steps: TypeAlias = list[optax.GradientTransformation]


def _decay(p: Any) -> Steps:
    return [optax.add_decayed_weights(p.weight_decay)] if p.weight_decay else []


def _adam(p: Any, b1: ArrayLike, b2: ArrayLike, *, decoupled: bool = False) -> Steps:
    scale = optax.scale_by_adam if p.bias_correction else scale_by_uncorrected_adam
    steps = [scale(b1, b2, p.eps), *_decay(p)]
    return steps if decoupled or p.adam_w_mode else steps[::-1]


def _lamb(p: Any, b1: ArrayLike, b2: ArrayLike) -> Steps:
    """LAMB as DeepSpeed's `FusedLamb` computes it.

    It differs from `optax.lamb` in two respects: the ratio of norms is clipped, and moments are never corrected, not
    even in those norms. Instead, the bias correction scales the learning rate.
    """
    outside, inside = (0.0, p.eps) if p.eps_inside_sqrt else (p.eps, 0.0)
    steps = [
        scale_by_uncorrected_adam(b1, b2, outside, eps_root=inside),
        optax.add_decayed_weights(p.weight_decay),
        scale_by_bounded_trust_ratio(p.min_coeff, p.max_coeff),
    ]
    if p.bias_correction:
        steps.append(optax.scale_by_schedule(lambda count: jnp.sqrt(1 - b2 ** (count + 1)) / (1 - b1 ** (count + 1))))
    return steps


def _adagrad(p: Any, b1: ArrayLike, b2: ArrayLike) -> Steps:
    # optax adds eps inside the root. With its square, the denominators differ by less than eps.
    return [*_decay(p), optax.scale_by_rss(p.initial_accumulator_value, p.eps**2)]


def _sgd(p: Any, b1: ArrayLike, b2: ArrayLike) -> Steps:
    return [*_decay(p), *([optax.trace(p.momentum, nesterov=p.nesterov)] if p.momentum else [])]


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


_overridden = where(lambda c: c["optimizer.type"].lower() == "adamw", "the type AdamW overrides it")
_BUILT = "`report.optimizer`"

# fmt: off
OPTIMIZER_PARAMS = section("optimizer.params",
    row("lr", RATE, 0.001, "honoured", _BUILT, sets_rate),
    row("betas", PAIR, (0.9, 0.999), "honoured", _BUILT, sets_betas),
    row("eps", NUMBER, 1e-08, "honoured", _BUILT),
    row("weight_decay", NUMBER, 0.0, "honoured", _BUILT, implied=_torchs_decay),
    row("bias_correction", BOOL, True, "honoured", _BUILT),
    row("momentum initial_accumulator_value", NUMBER, 0.0, "honoured", _BUILT),
    row("nesterov eps_inside_sqrt", BOOL, False, "honoured", _BUILT),
    row("max_coeff", NUMBER, 10.0, "honoured", _BUILT),
    row("min_coeff", NUMBER, 0.01, "honoured", _BUILT),
    row("adam_w_mode", BOOL, True, "honoured", "decoupled weight decay unless false", _overridden),
    row("torch_adam", BOOL, False, "ignored", "the same numbers as DeepSpeed's own"),
    row("fp32_optimizer_states", BOOL, True, "ignored", "moments have the dtype of the masters"),
    row("set_grad_none foreach fused capturable differentiable", ANY, None, "ignored", "about the kernels of torch"),
    row("amsgrad", BOOL, False, "refused", "DeepSpeed's kernels have none either: see `optax.amsgrad`"),
    row("maximize", BOOL, False, "refused", "negate the loss"),
    row("max_grad_norm", NUMBER, 0.0, "refused", "DeepSpeed raises an error as well: set `gradient_clipping`"),
    row("lr_decay", NUMBER, 0.0, "refused", "give `optax.adagrad` a schedule"),
    row("dampening", NUMBER, 0.0, "refused", "scale the learning rate instead"),
)
# fmt: on
_KERNELS = "set_grad_none foreach fused capturable differentiable"
_ADAM = (
    "lr betas eps bias_correction amsgrad maximize fp32_optimizer_states max_grad_norm "
    f"{_KERNELS} weight_decay adam_w_mode torch_adam"
)
OPTIMIZERS = {
    "adam": Type(_ADAM, _adam, "`report.optimizer`: to DeepSpeed Adam is AdamW, unless `adam_w_mode` is false"),
    "adamw": Type(_ADAM, functools.partial(_adam, decoupled=True), "`report.optimizer`, as `optax.adamw`"),
    "lamb": Type(
        "lr betas eps bias_correction amsgrad max_grad_norm weight_decay eps_inside_sqrt max_coeff min_coeff",
        _lamb,
        "`report.optimizer`: norms are over whole leaves, so that scanned layers, stacked in one leaf, share one ratio",
    ),
    "lion": Type(
        f"lr betas weight_decay fp32_optimizer_states max_grad_norm {_KERNELS}",
        lambda p, b1, b2: [optax.scale_by_lion(b1, b2), *_decay(p)],
        "`report.optimizer`, as `optax.lion`: where momentum and gradient are both 0, DeepSpeed moves by the rate",
    ),
    "adagrad": Type(
        "lr eps weight_decay amsgrad maximize fp32_optimizer_states max_grad_norm "
        f"{_KERNELS} initial_accumulator_value lr_decay",
        _adagrad,
        "`report.optimizer`, of `optax.scale_by_rss`: near `eps`, gradients count a little more",
        defaults={"lr": 1e-2, "eps": 1e-10},
    ),
    "sgd": Type(
        f"lr weight_decay maximize max_grad_norm {_KERNELS} momentum nesterov dampening",
        _sgd,
        "`report.optimizer`, as `optax.sgd`",
    ),
}
_COMPRESSED = "it compresses what it sends, which jzero does not: take Adam or Lamb"
_MUP = "it scales rates by each layer's width: use `optax.multi_transform`"
REFUSED = {
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), _COMPRESSED),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), _MUP),
    "muon": "see `optax.contrib.muon`, whose iteration and choice of parameters differ",
}
