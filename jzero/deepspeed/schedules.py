"""DeepSpeed's learning rate schedules in optax's form: functions of the number of steps so far.

[Note: Which step has which rate]
DeepSpeed advances its scheduler after each step of the optimizer, and the scheduler counts from -1. So step 0 has
the initial rate, and step k that of count k - 1. Warm-ups begin at count 0 with a fraction of 0: steps 0 and 1 both
have the smallest rate. A step that is skipped for an overflow does not advance the scheduler; nor does it here, where
the count is in the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jzero.deepspeed.key import REQUIRED, Parsed, Ruling, Type, parameter_names, row, section
from jzero.deepspeed.kinds import ANY_NUMBER, BOOL, FROM_1, RATE, STEPS_END, STRING, WHOLE, step_count, whole

RateSchedule: TypeAlias = Callable[[ArrayLike], jax.Array]
LR, CYCLE = "optimizer.params.lr", "scheduler.params.cycle_momentum"
CYCLED_B2 = 0.99
NO_BETAS = Ruling("refused", "true, but there is no optimizer block whose betas could cycle: set it to false")


class Scheduled(NamedTuple):
    """The schedules of a configuration.

    Attributes:
      lr: The learning rate of a step; `None` if there is no schedule, or values of its block are not known.
      momentum: The optimizer's `betas[0]` of a step, if it cycles. `betas[1]` is then `CYCLED_B2`.
      is_complete: Whether there is no block, or all its values are known.
    """

    lr: RateSchedule | None
    momentum: RateSchedule | None
    is_complete: bool


def scheduled(c: Parsed) -> Scheduled:
    """Returns the schedules of a configuration."""
    kind = c.types["scheduler"]
    if kind is None:
        return Scheduled(None, None, c["scheduler.type"] is None and not c.is_auto("scheduler.type"))
    params, lr = c.params("scheduler"), c[LR] if LR in c.keys and not c.is_auto(LR) else None
    if c.open_params("scheduler") or (lr is None and kind.scales(params)):
        return Scheduled(None, None, False)
    momentum = _of_step(_momentum, params, lr) if _cycles(c) and _has_betas(c) else None
    return Scheduled(_of_step(kind.make, params, lr), momentum, True)


def _of_step(rate: Callable[..., jax.Array], params: Any, lr: float | None) -> RateSchedule:
    """Returns a schedule that mixes steps and rates under any dtype promotion that the user has set."""

    def schedule(step: ArrayLike) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return rate(params, lr, jnp.asarray(step))

    return schedule


def problems(c: Parsed) -> list[str]:
    """Returns a sentence if a cycle is too long for integers."""
    if CYCLE not in c.keys:
        return []
    (first, second), (up, down) = _halves(c.params("scheduler"))
    most = max(first + second, first * up, second * down)
    says = "a cycle's steps, and those of a half cycle times its stairs, must be below 2^31"
    return [] if most < STEPS_END else [f"`scheduler.params`: {says}: got {most}."]


def _warmup_lr(p: Any, lr: float | None, step: jax.Array) -> jax.Array:
    """WarmupLR; its upper rate defaults to the optimizer's."""
    high = lr if p.warmup_max_lr is None else p.warmup_max_lr
    return p.warmup_min_lr + (high - p.warmup_min_lr) * _warmth(p, _last(step), 1.0)


def _warmup_decay_lr(p: Any, lr: float | None, step: jax.Array) -> jax.Array:
    """WarmupDecayLR: linear decay to zero."""
    last, end = _last(step), p.total_num_steps
    share = _warmth(p, last, jnp.maximum(0, end - last) / max(1, end - _warm(p)))
    return p.warmup_min_lr + (p.warmup_max_lr - p.warmup_min_lr) * share


def _warmup_cosine_lr(p: Any, lr: float, step: jax.Array) -> jax.Array:
    """WarmupCosineLR: fractions of the optimizer's rate; zero in step 0."""
    last, end, first, floor = _last(step), p.total_num_steps, p.warmup_min_ratio, p.cos_min_ratio
    # (1 + cos(π (1 - x))) / 2 = sin(π x / 2)², which avoids cancellation for small x (the fraction remaining).
    remaining = jnp.clip((end - last - 1) / max(1, end - _warm(p)), 0, 1)
    decayed = floor + (1 - floor) * jnp.sin(jnp.pi / 2 * remaining) ** 2
    warming = first + (1 - first) * _warmth(p, last, 1.0)
    return jnp.where(step == 0, 0.0, lr * jnp.where(last < _warm(p), warming, decayed))


def _lr_range_test(p: Any, lr: float | None, step: jax.Array) -> jax.Array:
    """LRRangeTest: rises without end, linearly or in stairs."""
    size = p.lr_range_test_step_size
    interval = step // size if p.lr_range_test_staircase else step / size
    return p.lr_range_test_min_lr * (1 + p.lr_range_test_step_rate * interval)


def _one_cycle(p: Any, lr: float | None, step: jax.Array) -> jax.Array:
    """The rate of OneCycle: rises, falls, then may decay."""
    low, high = p.cycle_min_lr, p.cycle_max_lr
    share, decay = _cycle(p, step, p.decay_lr_rate)
    return jnp.where(decay == 0, low + (high - low) * share, low / (1 + decay))


def _momentum(p: Any, lr: float | None, step: jax.Array) -> jax.Array:
    """The momentum of OneCycle: falls, rises, then may grow. Step 0 has the lowest."""
    low, high = p.cycle_min_mom, p.cycle_max_mom
    share, decay = _cycle(p, step, p.decay_mom_rate)
    return jnp.where(decay == 0, jnp.where(step == 0, low, high - (high - low) * share), high * (1 + decay))


def _cycle(p: Any, step: jax.Array, rate: float) -> tuple[jax.Array, jax.Array]:
    """Returns how far up the cycle a step is, from 0 to 1, and `rate` times the decay intervals that came after it."""
    (first, second), (up, down) = _halves(p)
    at = jnp.where(step < first + second, step, 0)
    share = jnp.where(at <= first, _stairs(at, first, up), _stairs(first + second - at, second, down))
    if math.isclose(p.decay_step_size, 0) or math.isclose(rate, 0):
        return share, jnp.zeros(())
    return share, rate * jnp.maximum(0, step - first - second) / p.decay_step_size


def _halves(p: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the steps of both half cycles, and their stairs."""
    steps, stairs = p.cycle_second_step_size, p.cycle_second_stair_count
    first, up = p.cycle_first_step_size, p.cycle_first_stair_count
    return (first, first if steps is None else steps), (up, up if stairs is None else stairs)


def _stairs(at: jax.Array, size: int, count: int) -> jax.Array:
    """Returns `at / size`, rounded down to one of `count` stairs if there are any; in integers, so as to miss none."""
    size = max(size, 1)
    return at * count // size / count if count else at / size


def _last(step: jax.Array) -> jax.Array:
    """The scheduler's count in a step, but for its -1, see [Note: Which step has which rate]."""
    return jnp.maximum(step - 1, 0)


def _warm(p: Any) -> int:
    """The steps of a warm-up: DeepSpeed makes 2 of 0 and 1; 0 is what trainers fill in by default."""
    return max(2, p.warmup_num_steps)


def _warmth(p: Any, last: jax.Array, after: ArrayLike) -> jax.Array:
    """Returns the share of the warm-up that is done, and `after` once it all is."""
    share = last / _warm(p) if p.warmup_type == "linear" else jnp.log(last + 1.0) / math.log(_warm(p))
    return jnp.where(last < _warm(p), share, after)


def _cycles(c: Parsed) -> bool:
    return CYCLE in c.keys and c[CYCLE]


def _has_betas(c: Parsed) -> bool:
    """Whether there is an optimizer with momentum to cycle."""
    return "betas" in parameter_names(c.types["optimizer"])


def _without_cycle(c: Parsed, path: str) -> Ruling | None:
    if not _cycles(c) or not (_has_betas(c) or c["optimizer.type"] is None):
        return Ruling("ignored", "no momentum cycles")
    return NO_BETAS if path == CYCLE and not _has_betas(c) else None


def _cycles_by_default(c: Parsed, path: str) -> Ruling | None:
    note = "DeepSpeed's default, true: the optimizer's b1 cycles, and its b2 is 0.99"
    return Ruling("honoured", note) if _has_betas(c) else NO_BETAS if c["optimizer.type"] is None else None


def sets_rate(c: Parsed, path: str) -> Ruling | None:
    """A rule for the optimizer's rate: schedules have their own."""
    kind = c.types["scheduler"]
    if kind is None or scheduled(c).lr is None or kind.scales(c.params("scheduler")):
        return None
    return Ruling("ignored", f"{c['scheduler.type']} has rates of its own")


def sets_betas(c: Parsed, path: str) -> Ruling | None:
    """A rule for the optimizer's betas: they may cycle."""
    note = f"{c['scheduler.type']} cycles b1, and b2 is {CYCLED_B2}"
    return None if scheduled(c).momentum is None else Ruling("ignored", note)


def schedule_type(c: Parsed, path: str) -> Ruling | None:
    """The rule for the type of a schedule."""
    if c.types["scheduler"] is None:
        return None if c[path] is None else Ruling("refused", "not one of DeepSpeed's own: see `optax.schedules`")
    if c.open_params("scheduler"):
        return Ruling("honoured", c.keys[path].note + not_built(c, "scheduler"))
    if scheduled(c).lr is None and not c.is_auto(LR):
        return Ruling("refused", "it scales the rate of an optimizer, and there is none")
    return None


def not_built(c: Parsed, block: str) -> str:
    """Says why no optimizer or schedule is made."""
    names = ", ".join(f"`{block}.params.{name}`" for name in c.open_params(block))
    return f"; not built without {names or 'its schedule'}"


_BUILT = "`report.schedule`"

# fmt: off
SCHEDULE_PARAMS = section("scheduler.params",
    row("total_num_steps", step_count(1), REQUIRED, "honoured", _BUILT),
    row("warmup_min_lr", RATE, 0.0, "honoured", _BUILT),
    row("warmup_max_lr", RATE, None, "honoured", _BUILT),
    row("warmup_min_ratio", ANY_NUMBER, 0.0, "honoured", _BUILT),
    row("warmup_num_steps", step_count(0), 1000, "honoured", _BUILT),
    row("cos_min_ratio", ANY_NUMBER, 0.0001, "honoured", _BUILT),
    row("warmup_type", STRING, "log", "honoured", _BUILT + '; all but "linear" is "log"'),
    row("lr_range_test_min_lr", RATE, 0.001, "honoured", _BUILT),
    row("lr_range_test_step_size", step_count(1), 2000, "honoured", _BUILT),
    row("lr_range_test_step_rate", ANY_NUMBER, 1.0, "honoured", _BUILT),
    row("lr_range_test_staircase", BOOL, False, "honoured", _BUILT),
    row("cycle_min_lr cycle_max_lr", RATE, REQUIRED, "honoured", _BUILT),
    row("decay_lr_rate", ANY_NUMBER, 0.0, "honoured", _BUILT),
    row("cycle_first_step_size", FROM_1, 2000, "honoured", _BUILT),
    row("cycle_second_step_size", WHOLE, None, "honoured", _BUILT),
    row("cycle_first_stair_count", WHOLE, 0, "honoured", _BUILT),
    row("cycle_second_stair_count", WHOLE, None, "honoured", _BUILT),
    row("decay_step_size", ANY_NUMBER, 0, "honoured", _BUILT),
    row("cycle_momentum", BOOL, True, "honoured",
        "`report.optimizer`: b1 cycles, and b2 is 0.99", _without_cycle, implied=_cycles_by_default),
    row("cycle_min_mom", RATE, 0.8, "honoured", _BUILT, _without_cycle),
    row("cycle_max_mom", RATE, 0.9, "honoured", _BUILT, _without_cycle),
    row("decay_mom_rate", ANY_NUMBER, 0.0, "honoured", _BUILT, _without_cycle),
    row("last_batch_iteration", whole(-1), -1, "refused", "the count is in the optimizer's state"),
)
# fmt: on
_END = "warmup_num_steps warmup_type last_batch_iteration"
_CYCLES = (
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
    "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate"
)
_RANGE = "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase"
_RATIOS = "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration"
SCHEDULES = {
    "WarmupLR": Type(f"warmup_min_lr warmup_max_lr {_END}", _warmup_lr, scales=lambda p: p.warmup_max_lr is None),
    "WarmupDecayLR": Type(
        f"total_num_steps warmup_min_lr warmup_max_lr {_END}", _warmup_decay_lr, defaults={"warmup_max_lr": 0.001}
    ),
    "WarmupCosineLR": Type(_RATIOS, _warmup_cosine_lr, scales=lambda p: True),
    "LRRangeTest": Type(f"{_RANGE} last_batch_iteration", _lr_range_test),
    "OneCycle": Type(f"{_CYCLES} last_batch_iteration", _one_cycle),
}
