"""What two processes keep by themselves whose devices do not have the same memory left."""

import contextlib
import pathlib
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax

import jzero
from jzero.core.step import choice
from jzero.core.step.train_step import TrainStep
from jzero.machines import limits
from jzero.machines.machine import machine
from tests.multiprocess_disagreements import BATCH, small_loss, small_state

PLENTY, LITTLE = 2**30, 1000  # bytes


def see_other_figures(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what steps keep in the end, and their losses, or what they say; the second process is the odd one."""
    second = jax.process_index() == 1
    allocated = choice._allocated_bytes
    compiled_to_more = mock.patch.object(choice, "_allocated_bytes", lambda x: allocated(x) + PLENTY * second)
    evaluated = jzero.make_eval_step(small_loss)(small_state(), BATCH)
    with (
        mock.patch.object(limits, "this_machine", return_value=machine("h200:4")),
        mock.patch.object(limits, "ROUNDED", 1),
    ):
        return {
            "alike": kept(lambda: PLENTY),
            "little": kept(lambda: LITTLE if second else PLENTY),
            "unreadable": kept(lambda: 1 // 0 if second else PLENTY),
            "asks alone": kept(lambda: PLENTY, asks=not second),
            "compiled": kept(lambda: PLENTY, compiled_to_more),
            "not compared": kept(lambda: PLENTY, check_processes=False),
            "inside": kept(lambda: PLENTY, inside=True),
            "both run out": kept(lambda: PLENTY, running_out()),
            "one has begun": kept(lambda: PLENTY, running_out(consumes=second)),
            "evaluated": float(evaluated),
        }


def kept(
    limit: Callable[[], int],
    patch: Any = None,
    *,
    asks: bool = False,
    inside: bool = False,
    **options: Any,
) -> tuple[str, float] | str:
    """Returns what a step keeps that has run, and its loss; or what it says.

    Args:
      limit: What a device's allocator says that it may take.
      patch: A further stand-in.
      asks: Whether this process asks for the plan first, as a program does that prints it once.
      inside: Whether the step runs in another program.
      options: Of the step.
    """
    step, state = jzero.make_train_step(small_loss, **options), small_state()
    figures = mock.patch.object(limits, "memory_figures", side_effect=lambda device: {"bytes_limit": limit()})
    with figures, patch or contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if asks:
            assert step.plan(state, BATCH).kept is not None
        try:
            _, metrics = (jax.jit(step) if inside else step)(state, BATCH)
        except jax.errors.JaxRuntimeError as error:
            return "\n".join([str(error), *error.__notes__])
    chosen = {str(x.step.remat) for x in map(step._choices.made.get, step._choices.limits.items()) if x is not None}
    return ", ".join(chosen), float(metrics["loss"])


def running_out(*, consumes: bool = False) -> Any:
    """Has the first program that is to run end as it does where memory is missing."""
    run, left = TrainStep._run, [None]

    def fail(step: Any, jitted: Any, state: Any, *args: Any) -> Any:
        if not left:
            return run(step, jitted, state, *args)
        left.pop()
        if consumes:
            jax.tree.leaves(state)[-1].delete()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")

    return mock.patch.object(TrainStep, "_run", fail)
