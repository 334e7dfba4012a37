"""DeepSpeed's optimizers, as transformations of optax with the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import optax
from jax.typing import ArrayLike

from jzero.deepspeed.key import Key
from jzero.deepspeed.params import Params, read_params
from jzero.deepspeed.scheduler_block import CYCLED_B2, Scheduled
from jzero.deepspeed.settings import Settings
from jzero.deepspeed.transforms import lamb, scale_by_uncorrected_adam

PATH = "optimizer.params"
TX = "`report.optimizer`"


class Rates(NamedTuple):
    """The parameters of an optimizer that schedules may set; `b1` and `b2` are 0 if it has no betas."""

    lr: optax.ScalarOrSchedule
    b1: ArrayLike
    b2: ArrayLike


@dataclasses.dataclass(frozen=True)
class OptimizerKind:
    """A type of optimizer.

    Attributes:
      keys: Its parameters.
      make: A function from their values and the rates to the optimizer.
      note: Its optax equivalent.
    """

    keys: tuple[Key, ...]
    make: Callable[[Params, Rates], optax.GradientTransformation]
    note: str

    @property
    def has_betas(self) -> bool:
        """Whether a schedule can cycle its momentum."""
        return any(key.path == "betas" for key in self.keys)


class OptimizerBlock(NamedTuple):
    """An optimizer block: its learning rate, if known, and a function that builds the optimizer."""

    lr: float | None
    has_betas: bool
    make: Callable[[Scheduled], optax.GradientTransformation | None]


def _lr(default: float) -> Key:
    return Key("lr", "rate", default, "honoured", TX)


def _decay(default: float = 0.0) -> Key:
    return Key("weight_decay", "number", default, "honoured", TX)


def _eps(default: float) -> Key:
    return Key("eps", "number", default, "honoured", TX)


_BETAS = Key("betas", "pair", (0.9, 0.999), "honoured", TX)
_CORRECTION = Key("bias_correction", "bool", True, "honoured", TX)
_AMSGRAD = Key("amsgrad", "bool", False, "refused", "DeepSpeed's kernels have none either: see `optax.amsgrad`")
_MAXIMIZE = Key("maximize", "bool", False, "refused", "negate the loss")
_STATES = Key("fp32_optimizer_states", "bool", True, "ignored", "moments have the dtype of the masters")
_MAX_NORM = Key("max_grad_norm", "number", 0.0, "refused", "DeepSpeed raises an error as well: set `gradient_clipping`")
_KERNELS = tuple(
    Key(name, "any", None, "ignored", "about the kernels of torch")
    for name in ("set_grad_none", "foreach", "fused", "capturable", "differentiable")
)


def _adam(params: Params, rates: Rates, *, decoupled: bool) -> optax.GradientTransformation:
    make = optax.scale_by_adam if params["bias_correction"] else scale_by_uncorrected_adam
    steps = [make(rates.b1, rates.b2, params["eps"]), *_weight_decay(params)]
    steps = steps if decoupled else steps[::-1]
    return optax.chain(*steps, optax.scale_by_learning_rate(rates.lr))


def _adam_by_mode(params: Params, rates: Rates) -> optax.GradientTransformation:
    return _adam(params, rates, decoupled=params["adam_w_mode"])


def _adamw(params: Params, rates: Rates) -> optax.GradientTransformation:
    return _adam(params, rates, decoupled=True)


def _lamb(params: Params, rates: Rates) -> optax.GradientTransformation:
    names = ("eps", "eps_inside_sqrt", "weight_decay", "max_coeff", "min_coeff", "bias_correction")
    return lamb(*rates, **{name: params[name] for name in names})


def _lion(params: Params, rates: Rates) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_lion(rates.b1, rates.b2), *_weight_decay(params), optax.scale_by_learning_rate(rates.lr)
    )


def _adagrad(params: Params, rates: Rates) -> optax.GradientTransformation:
    # optax adds eps inside the root. With its square, the denominators differ by less than eps.
    scaled = optax.scale_by_rss(params["initial_accumulator_value"], params["eps"] ** 2)
    return optax.chain(*_weight_decay(params), scaled, optax.scale_by_learning_rate(rates.lr))


def _sgd(params: Params, rates: Rates) -> optax.GradientTransformation:
    momentum = [optax.trace(params["momentum"], nesterov=params["nesterov"])] if params["momentum"] else []
    return optax.chain(*_weight_decay(params), *momentum, optax.scale_by_learning_rate(rates.lr))


def _weight_decay(params: Params) -> list[optax.GradientTransformation]:
    return [optax.add_decayed_weights(params["weight_decay"])] if params["weight_decay"] else []


_TORCH_ADAM = Key("torch_adam", "bool", False, "ignored", "the same numbers as DeepSpeed's own")
_ADAM_KEYS = (_lr(1e-3), _BETAS, _eps(1e-8), _CORRECTION, _AMSGRAD, _MAXIMIZE, _STATES, _MAX_NORM, *_KERNELS)
_ADAM_W_MODE = Key("adam_w_mode", "bool", True, "honoured", "decoupled weight decay unless false")
_FORCED = Key("adam_w_mode", "bool", True, "ignored", "the type AdamW overrides it")

OPTIMIZERS = {
    "adam": OptimizerKind(
        (*_ADAM_KEYS, _decay(), _ADAM_W_MODE, _TORCH_ADAM),
        _adam_by_mode,
        "`report.optimizer`: to DeepSpeed Adam is AdamW, unless `adam_w_mode` is false",
    ),
    "adamw": OptimizerKind(
        (*_ADAM_KEYS, _decay(), _FORCED, _TORCH_ADAM), _adamw, "`report.optimizer`, as `optax.adamw`"
    ),
    "lamb": OptimizerKind(
        (
            *(_lr(1e-3), _BETAS, _eps(1e-8), _CORRECTION, _AMSGRAD, _MAX_NORM, _decay()),
            Key("eps_inside_sqrt", "bool", False, "honoured", TX),
            Key("max_coeff", "number", 10.0, "honoured", TX),
            Key("min_coeff", "number", 0.01, "honoured", TX),
        ),
        _lamb,
        "`report.optimizer`: norms are over whole leaves, so that scanned layers, stacked in one leaf, share one ratio",
    ),
    "lion": OptimizerKind(
        (_lr(1e-3), _BETAS, _decay(), _STATES, _MAX_NORM, *_KERNELS),
        _lion,
        "`report.optimizer`, as `optax.lion`: where momentum and gradient are both 0, DeepSpeed moves by the rate",
    ),
    "adagrad": OptimizerKind(
        (
            *(_lr(1e-2), _eps(1e-10), _decay(), _AMSGRAD, _MAXIMIZE, _STATES, _MAX_NORM, *_KERNELS),
            Key("initial_accumulator_value", "number", 0.0, "honoured", TX),
            Key("lr_decay", "number", 0.0, "refused", "give `optax.adagrad` a schedule"),
        ),
        _adagrad,
        "`report.optimizer`, of `optax.scale_by_rss`: near `eps`, gradients count a little more",
    ),
    "sgd": OptimizerKind(
        (
            *(_lr(1e-3), _decay(), _MAXIMIZE, _MAX_NORM, *_KERNELS),
            Key("momentum", "number", 0.0, "honoured", TX),
            Key("nesterov", "bool", False, "honoured", TX),
            Key("dampening", "number", 0.0, "refused", "scale the learning rate instead"),
        ),
        _sgd,
        "`report.optimizer`, as `optax.sgd`",
    ),
}

TORCH_ADAMW_DECAY = 0.01
"""The default weight decay of `torch.optim.AdamW`; that of DeepSpeed's own is 0."""

_COMPRESSED = "it compresses what it sends, which jzero does not: take Adam or Lamb"
_MUP = "it scales rates by each layer's width: use `optax.multi_transform`"
REFUSED = {
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), _COMPRESSED),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), _MUP),
    "muon": "see `optax.contrib.muon`, whose iteration and choice of parameters differ",
}


def read_optimizer(settings: Settings) -> OptimizerBlock:
    """Reads the optimizer block: adds verdicts and problems, and returns how to build the optimizer."""
    name = settings["optimizer.type"]
    kind = None if name is None else OPTIMIZERS.get(name.lower())
    if kind is None:
        if name is not None:
            note = "no equivalent is known: pass an optax transformation to the train state"
            settings.judge("optimizer.type", "refused", REFUSED.get(name.lower(), note))
        for param, value in settings.params.get(PATH, {}).items():
            settings.skip(f"{PATH}.{param}", value, "no optimizer reads it")
        return OptimizerBlock(None, False, lambda schedule: None)
    params = _with_torch_default(settings, kind, name.lower())
    settings.judge("optimizer.type", "honoured", kind.note)
    lr = None if f"{PATH}.lr" in settings.autos else params["lr"]

    def make(schedule: Scheduled) -> optax.GradientTransformation | None:
        optimizer = _make(kind, params, schedule)
        if optimizer is None:
            settings.judge_unmade("optimizer.type", PATH, params.open)
        return optimizer

    return OptimizerBlock(lr, kind.has_betas, make)


def _with_torch_default(settings: Settings, kind: OptimizerKind, name: str) -> Params:
    params = read_params(settings, PATH, kind.keys)
    if name not in ("adam", "adamw") or not params["torch_adam"] or "weight_decay" in params.explicit:
        return params
    if name == "adam" and not params["adam_w_mode"]:
        return params
    settings.imply(f"{PATH}.weight_decay", "honoured", f"torch's default for AdamW, {TORCH_ADAMW_DECAY}")
    return params.with_value("weight_decay", TORCH_ADAMW_DECAY)


def _make(kind: OptimizerKind, params: Params, schedule: Scheduled) -> optax.GradientTransformation | None:
    """Builds the optimizer, unless a value is open or refused."""
    scheduled = "lr" if schedule.lr is not None else None
    if not schedule.is_complete or not params.is_complete(but_for=scheduled):
        return None
    lr = params["lr"] if schedule.lr is None else schedule.lr
    if schedule.momentum is None:
        return kind.make(params, Rates(lr, *(params["betas"] if kind.has_betas else (0.0, 0.0))))

    def make(learning_rate: optax.ScalarOrSchedule, b1: ArrayLike) -> optax.GradientTransformation:
        return kind.make(params, Rates(learning_rate, b1, CYCLED_B2))

    return optax.inject_hyperparams(make)(learning_rate=lr, b1=schedule.momentum)
