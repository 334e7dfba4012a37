"""Reads the `scheduler` block, which depends on the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.typing import ArrayLike

from jzero.deepspeed.params import Params, read_params
from jzero.deepspeed.schedules import SCHEDULES, Schedule, cycled_momentum
from jzero.deepspeed.settings import Settings

PATH = "scheduler.params"
CYCLED_B2 = 0.99
LATEST_STAIR = 2**31


class Scheduled(NamedTuple):
    """The schedules of a scheduler block.

    Attributes:
      lr: The learning rate of a step.
      momentum: The optimizer's `betas[0]` of a step, if it cycles. `betas[1]` is then `CYCLED_B2`.
      is_complete: Whether there is no block, or all its values are known.
    """

    lr: Schedule | None
    momentum: Schedule | None
    is_complete: bool


def make_schedule(settings: Settings, lr: float | None, *, has_betas: bool) -> Callable[[], Scheduled]:
    """Reads the scheduler block, and returns a function that makes the schedule once there are no problems.

    Args:
      settings: Holds the block, and receives the verdicts.
      lr: The optimizer's rate, if known.
      has_betas: Whether there is an optimizer with momentum to cycle.
    """
    name = settings["scheduler.type"]
    if name not in SCHEDULES:
        complete = name is None and "scheduler.type" not in settings.autos
        if name is not None:
            settings.judge("scheduler.type", "refused", "not one of DeepSpeed's own: see `optax.schedules`")
        for param, value in settings.params.get(PATH, {}).items():
            settings.skip(f"{PATH}.{param}", value, "no schedule reads it")
        return lambda: Scheduled(None, None, complete)
    kind = SCHEDULES[name]
    params = read_params(settings, PATH, kind.keys)
    cycles = name == "OneCycle" and params["cycle_momentum"]
    if name == "OneCycle":
        _check_stairs(settings, params)
        _judge_momentum(settings, has_betas=has_betas, cycles=cycles)

    def make() -> Scheduled:
        schedule = kind.make(params, lr) if params.is_complete() else None
        if schedule is None and params.is_complete() and "optimizer.params.lr" not in settings.autos:
            settings.judge("scheduler.type", "refused", "it scales the rate of an optimizer, and there is none")
        if not params.is_complete():
            settings.judge_unmade("scheduler.type", PATH, params.open)
        momentum = cycled_momentum(params) if cycles and has_betas and schedule is not None else None
        if schedule is not None and not _scales_lr(name, params):
            settings.judge("optimizer.params.lr", "ignored", f"{name} has rates of its own")
        if momentum is not None:
            settings.judge("optimizer.params.betas", "ignored", f"{name} cycles b1, and b2 is {CYCLED_B2}")
        return Scheduled(_promoting(schedule), _promoting(momentum), schedule is not None)

    return make


def _promoting(schedule: Schedule | None) -> Schedule | None:
    """Returns a schedule that mixes steps and rates under any dtype promotion that the user has set."""

    def promoting(step: ArrayLike) -> jax.Array:
        assert schedule is not None
        with jax.numpy_dtype_promotion("standard"):
            return schedule(step)

    return None if schedule is None else promoting


def _scales_lr(name: str, params: Params) -> bool:
    """Whether a schedule is in units of the optimizer's own rate."""
    return name == "WarmupCosineLR" or (name == "WarmupLR" and params["warmup_max_lr"] is None)


def _judge_momentum(settings: Settings, *, has_betas: bool, cycles: bool) -> None:
    path = f"{PATH}.cycle_momentum"
    if cycles and has_betas:
        settings.imply(path, "honoured", "DeepSpeed's default, true: the optimizer's b1 cycles, and its b2 is 0.99")
    elif cycles and settings["optimizer.type"] is None:
        note = "true, but there is no optimizer block whose betas could cycle: set it to false"
        settings.imply(path, "refused", note)
        settings.judge(path, "refused", note)
    else:
        for name in ("cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"):
            settings.judge(f"{PATH}.{name}", "ignored", "no momentum cycles")


def _check_stairs(settings: Settings, params: Params) -> None:
    first, up = params["cycle_first_step_size"], params["cycle_first_stair_count"]
    second, down = params["cycle_second_step_size"], params["cycle_second_stair_count"]
    for size, count in ((first, up), (first if second is None else second, up if down is None else down)):
        if size * count >= LATEST_STAIR:
            settings.problems.append(
                f"`{PATH}`: the steps of a half cycle times its stairs must be below 2^31: got {size} × {count}."
            )
