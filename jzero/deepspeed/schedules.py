"""DeepSpeed's learning rate schedules in optax's form: functions of the number of steps so far.

[Note: Which step has which rate]
DeepSpeed advances its scheduler after each step of the optimizer, and the scheduler counts from -1. So step 0 has
the initial rate, and step k that of count k - 1. Warm-ups begin at count 0 with a fraction of 0: steps 0 and 1 both
have the smallest rate. A step that is skipped for an overflow does not advance the scheduler; nor does it here, where
the count is in the optimizer's state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jzero.deepspeed.key import REQUIRED, Key
from jzero.deepspeed.params import Params

Schedule: TypeAlias = Callable[[ArrayLike], jax.Array]


@dataclasses.dataclass(frozen=True)
class ScheduleKind:
    """A type of scheduler: its keys, and a function from their values and the optimizer's rate to a schedule."""

    keys: tuple[Key, ...]
    make: Callable[[Params, float | None], Schedule | None]


def _steps(name: str, default: object = 1000, least: float = 1) -> Key:
    return Key(name, "int", default, "honoured", "`report.schedule`", least=least)


_WARMUP_STEPS = _steps("warmup_num_steps", least=0)
"""DeepSpeed makes 2 of 0 and 1; 0 is what trainers fill in by default."""


def _rate(name: str, default: object) -> Key:
    return Key(name, "rate", default, "honoured", "`report.schedule`")


def _number(name: str, default: object) -> Key:
    return Key(name, "number", default, "honoured", "`report.schedule`", least=-math.inf)


_LAST = Key("last_batch_iteration", "int", -1, "refused", "the count is in the optimizer's state", least=-1)
_WARMUP_TYPE = Key("warmup_type", "string", "log", "honoured", '`report.schedule`; all but "linear" is "log"')


def _warmup_lr(params: Params, lr: float | None) -> Schedule | None:
    """WarmupLR; its upper rate defaults to the optimizer's."""
    high = lr if params["warmup_max_lr"] is None else params["warmup_max_lr"]
    return (
        None if high is None else _between(params["warmup_min_lr"], high, lambda last: _warmup_share(params, last, 1.0))
    )


def _warmup_decay_lr(params: Params, lr: float | None) -> Schedule:
    """WarmupDecayLR: linear decay to zero."""
    end, warm = params["total_num_steps"], max(2, params["warmup_num_steps"])

    def share(last: jax.Array) -> jax.Array:
        return _warmup_share(params, last, jnp.maximum(0, end - last) / max(1, end - warm))

    return _between(params["warmup_min_lr"], params["warmup_max_lr"], share)


def _warmup_cosine_lr(params: Params, lr: float | None) -> Schedule | None:
    """WarmupCosineLR: fractions of the optimizer's rate; zero in step 0."""
    end, warm = params["total_num_steps"], max(2, params["warmup_num_steps"])
    first, floor = params["warmup_min_ratio"], params["cos_min_ratio"]
    if lr is None:
        return None

    def schedule(step: ArrayLike) -> jax.Array:
        last = _last(step)
        # (1 + cos(π (1 - x))) / 2 = sin(π x / 2)², which avoids cancellation for small x (the fraction remaining).
        remaining = jnp.clip((end - last - 1) / max(1, end - warm), 0, 1)
        decayed = floor + (1 - floor) * jnp.sin(jnp.pi / 2 * remaining) ** 2
        warming = first + (1 - first) * _warmup_share(params, last, 1.0)
        return jnp.where(jnp.asarray(step) == 0, 0.0, lr * jnp.where(last < warm, warming, decayed))

    return schedule


def _lr_range_test(params: Params, lr: float | None) -> Schedule:
    """LRRangeTest: rises without end, linearly or in stairs."""
    size = params["lr_range_test_step_size"]

    def schedule(step: ArrayLike) -> jax.Array:
        step = jnp.asarray(step)
        interval = step // size if params["lr_range_test_staircase"] else step / size
        return params["lr_range_test_min_lr"] * (1 + params["lr_range_test_step_rate"] * interval)

    return schedule


def _one_cycle(params: Params, lr: float | None) -> Schedule:
    """The rate of OneCycle: rises, falls, then may decay."""
    low, high, rate = params["cycle_min_lr"], params["cycle_max_lr"], params["decay_lr_rate"]

    def schedule(step: ArrayLike) -> jax.Array:
        share, decay = _cycle(params, step, rate)
        return jnp.where(decay == 0, low + (high - low) * share, low / (1 + decay))

    return schedule


def cycled_momentum(params: Params) -> Schedule:
    """The momentum of OneCycle: falls, rises, then may grow. Step 0 has the lowest."""
    low, high, rate = params["cycle_min_mom"], params["cycle_max_mom"], params["decay_mom_rate"]

    def schedule(step: ArrayLike) -> jax.Array:
        share, decay = _cycle(params, step, rate)
        cycled = jnp.where(jnp.asarray(step) == 0, low, high - (high - low) * share)
        return jnp.where(decay == 0, cycled, high * (1 + decay))

    return schedule


def _cycle(params: Params, step: ArrayLike, rate: float) -> tuple[jax.Array, jax.Array]:
    """Returns how far up the cycle a step is, from 0 to 1, and `rate` times the decay intervals that came after it."""
    first, second = _halves(params)
    up_stairs = params["cycle_first_stair_count"]
    down_stairs = up_stairs if params["cycle_second_stair_count"] is None else params["cycle_second_stair_count"]
    step = jnp.asarray(step)
    at = jnp.where(step < first + second, step, 0)
    share = jnp.where(at <= first, _stairs(at, first, up_stairs), _stairs(first + second - at, second, down_stairs))
    size = params["decay_step_size"]
    if math.isclose(size, 0) or math.isclose(rate, 0):
        return share, jnp.zeros(())
    return share, rate * jnp.maximum(0, step - first - second) / size


def _halves(params: Params) -> tuple[int, int]:
    first, second = params["cycle_first_step_size"], params["cycle_second_step_size"]
    return first, first if second is None else second


def _stairs(at: jax.Array, size: int, count: int) -> jax.Array:
    """Returns `at / size`, rounded down to one of `count` stairs if there are any; in integers, so as to miss none."""
    size = max(size, 1)
    return at * count // size / count if count else at / size


def _last(step: ArrayLike) -> jax.Array:
    """The scheduler's count in a step, but for its -1, see [Note: Which step has which rate]."""
    return jnp.maximum(jnp.asarray(step) - 1, 0)


def _between(low: float, high: float, share: Callable[[jax.Array], jax.Array]) -> Schedule:
    return lambda step: low + (high - low) * share(_last(step))


def _warmup_share(params: Params, last: jax.Array, after: ArrayLike) -> jax.Array:
    """Returns the share of the warm-up that is done, and `after` once it all is."""
    warm = max(2, params["warmup_num_steps"])
    share = last / warm if params["warmup_type"] == "linear" else jnp.log(last + 1.0) / math.log(warm)
    return jnp.where(last < warm, share, after)


SCHEDULES = {
    "WarmupLR": ScheduleKind(
        (_rate("warmup_min_lr", 0.0), _rate("warmup_max_lr", None), _WARMUP_STEPS, _WARMUP_TYPE, _LAST),
        _warmup_lr,
    ),
    "WarmupDecayLR": ScheduleKind(
        (
            _steps("total_num_steps", REQUIRED),
            _rate("warmup_min_lr", 0.0),
            _rate("warmup_max_lr", 0.001),
            _WARMUP_STEPS,
            _WARMUP_TYPE,
            _LAST,
        ),
        _warmup_decay_lr,
    ),
    "WarmupCosineLR": ScheduleKind(
        (
            _steps("total_num_steps", REQUIRED),
            _number("warmup_min_ratio", 0.0),
            _WARMUP_STEPS,
            _number("cos_min_ratio", 0.0001),
            _WARMUP_TYPE,
            _LAST,
        ),
        _warmup_cosine_lr,
    ),
    "LRRangeTest": ScheduleKind(
        (
            _rate("lr_range_test_min_lr", 1e-3),
            _steps("lr_range_test_step_size", 2000),
            _number("lr_range_test_step_rate", 1.0),
            Key("lr_range_test_staircase", "bool", False, "honoured", "`report.schedule`"),
            _LAST,
        ),
        _lr_range_test,
    ),
    "OneCycle": ScheduleKind(
        (
            _rate("cycle_min_lr", REQUIRED),
            _rate("cycle_max_lr", REQUIRED),
            _number("decay_lr_rate", 0.0),
            _steps("cycle_first_step_size", 2000),
            _steps("cycle_second_step_size", None, least=0),
            _steps("cycle_first_stair_count", 0, least=0),
            _steps("cycle_second_stair_count", None, least=0),
            _number("decay_step_size", 0),
            Key("cycle_momentum", "bool", True, "honoured", "`report.optimizer`: b1 cycles, and b2 is 0.99"),
            _rate("cycle_min_mom", 0.8),
            _rate("cycle_max_mom", 0.9),
            _number("decay_mom_rate", 0.0),
            _LAST,
        ),
        _one_cycle,
    ),
}
