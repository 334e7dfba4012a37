"""What helps a decoder whose steps do not fit: devices that share rows, and a loss in parts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

from jzero.analysis.candidates import SURE_SHARE
from jzero.analysis.estimates import estimate_step_memory
from jzero.analysis.fit_report import Fit
from jzero.cli.request import PlanRequest
from jzero.cli.source import load_source
from jzero.core.plan.table import format_bytes
from jzero.estimate.step_memory import StepMemory
from jzero.training import make_train_step

TOKENS = 1024
"""Tokens whose logits exist at a time, at least."""


def with_parts(choice: Fit, request: PlanRequest) -> Fit:
    """Returns a result in which nothing fits, with notes on what would: up to the fewest devices to a row that do.

    None, if parameters and optimizer state alone do not fit, which parts of rows do not change.
    """
    if min(x.memory.arguments for x in choice.tried) > choice.limit:
        return choice
    notes = []
    for asked in _in_parts(request):
        options = f"--context {asked.context} --loss-chunks {asked.loss_chunks}"
        logging.getLogger("jzero").info("Tracing %s.", options)
        steps, memory = _estimated(asked)
        verdict = "fits" if memory.peak <= choice.limit else "does not fit"
        how = f"stage {asked.config.stage}" + f" in {steps} micro-batches" * (steps > 1)
        notes.append(f"`{options}` {verdict}: {how}, it takes {format_bytes(memory.peak)} per device (estimated).")
        if memory.peak <= SURE_SHARE * choice.limit:
            break
    return dataclasses.replace(choice, notes=(*notes, *choice.notes))


def _in_parts(request: PlanRequest) -> Iterator[PlanRequest]:
    """Yields the request with ever more devices to a row, and the loss in as many parts as are worth it."""
    (_, seq), context = request.sequences(), request.context
    while request.num_devices % (context * request.experts) == 0 and (context == 1 or seq % (2 * context) == 0):
        chunks = request.loss_chunks
        while seq % (2 * chunks * context) == 0 and seq >= 2 * chunks * context * TOKENS:
            chunks *= 2
        if (context, chunks) != (request.context, request.loss_chunks):
            yield dataclasses.replace(request, context=context, loss_chunks=chunks)
        context *= 2


def _estimated(request: PlanRequest) -> tuple[int, StepMemory]:
    """Returns the micro-batches of one row per device, or group of devices, and the memory of a step."""
    model, (batch, _) = load_source(request).model, request.sequences()
    steps = batch * request.context // request.num_devices
    step = make_train_step(model.loss_fn, accumulate_steps=steps, remat="as_written")
    how = {"topology": request.topology, "mesh": request.mesh, "config": request.config, "trainable": model.trainable}
    return steps, estimate_step_memory(step, model.state, model.batch, **how)
