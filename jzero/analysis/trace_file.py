"""The modelled timeline in Chrome's trace format, which Perfetto opens."""

from __future__ import annotations

import re
from typing import Any

from jzero.analysis.collectives import CompiledCollective
from jzero.analysis.schedule import MAX_SPANS, Span, Timeline

TRACKS = {"compute": "computation", "within": "links within a node", "between": "network between nodes"}
DEVICE = 1
"""The number of the one process of the trace: all devices do the same."""
_WRAPPED = re.compile(r"(?:(?:jvp|transpose|vmap|remat|checkpoint)\()*([^()]*)\)*")
_NOISE = re.compile(
    r".*zero_.*|.*\(.*|while|body|cond|closed_call|eval_jaxpr|checkpoint|rematted_computation|shard_map|"
)
"""The parts of operation names that do not name parts of the model."""


def trace_of(timeline: Timeline, title: str) -> dict[str, Any]:
    """Returns a timeline as the content of a trace file; its times are in microseconds.

    Args:
      timeline: The timeline. If it stores too few spans, the track of computation says so.
      title: The name of the trace's process.
    """
    tracks = {key: number for number, key in enumerate(TRACKS, 1)}
    events = [_meta("process_name", title, 0)]
    events += [_meta("thread_name", TRACKS[key], number) for key, number in tracks.items()]
    events += [_event(span, tracks[span.level or span.stream]) for span in timeline.spans]
    events += _waits(timeline, tracks["compute"])
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"seconds": timeline.totals()}}


def _meta(kind: str, name: str, track: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": DEVICE, "tid": track, "args": {"name": name}}


def _complete(name: str, category: str, track: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "name": name, "cat": category, "pid": DEVICE, "tid": track, **times, "args": args}


def _event(span: Span, track: int) -> dict[str, Any]:
    x = span.collective
    if x is None:
        return _complete(span.part or span.name, span.name, track, span.start, span.end, {})
    args: dict[str, Any] = {"part": span.part, "dtype": x.dtype, "shapes": [list(shape) for shape in x.shapes]}
    args |= {"devices": x.num_devices, "sent_bytes": x.sent_bytes, "op_name": x.op_name, "instruction": x.name}
    return _complete(f"{x.kind} {_place(x)}".strip(), x.kind, track, span.start, span.end, args)


def _place(x: CompiledCollective) -> str:
    """Returns the part of the model that a collective is for, as the name of its operation says."""
    *parts, _ = x.op_name.split("/") if x.op_name else [""]
    names = [match.group(1) if (match := _WRAPPED.fullmatch(part)) else part for part in parts]
    return "/".join(name for name in names if not _NOISE.fullmatch(name))


def _waits(timeline: Timeline, track: int) -> list[dict[str, Any]]:
    """Returns the waits of the computation; the last one is marked if the timeline leaves out spans."""
    computation = [span for span in timeline.spans if span.stream == "compute"]
    starts, ends = [span.start for span in computation], [span.end for span in computation]
    gaps = zip([0.0, *ends], [*starts, timeline.seconds], strict=True)
    waits = [_complete("wait", "wait", track, *gap, {}) for gap in gaps if gap[1] - gap[0] > 1e-12]
    if waits and len(timeline.spans) >= MAX_SPANS:
        waits[-1] |= {"name": "not shown: further iterations of loops", "cat": "not shown"}
    return waits
