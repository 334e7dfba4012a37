"""The timeline of a compiled program: busy times of computation and communication, by a model of the machine.

[Note: The model of the machine]
The instructions of the compiled schedule run in order on one compute stream. A product takes its operations divided by
the peak rate of its dtype, anything else its bytes divided by the bandwidth of device memory; a fusion takes the longer
of the two. Collectives run on a second stream, one after another, from their start until something waits for their
result: rings over all links of a device, (N-1)/N of the whole array each way, twice for an all-reduce; between nodes at
the joint rate of a node's network ports, if that is lower. Asynchronous copies and fusions run on a third stream. Loops
repeat their body. A conditional runs its longest branch, each time: only a step's numbers tell which one it takes.
All rates are the vendor's peaks, from `jzero.machines.machine`, which names their sources.

The model leaves out: latency, of kernels and of each hop of a collective, which dominates for small arrays; the
distance of real kernels from the peaks; streams that share memory bandwidth or multiprocessors; tiling; the arithmetic
of kernels that neither HLO nor the trace shows, which count by their bytes; traffic to the host; and the
missing links of a small slice of a torus. So the shares say what could overlap, not what a profile will show.

[Note: A usual step]
`Timeline.least` is the time if each conditional of the loss runs its shortest branch. `fit` compares layouts by it:
what a loss may leave out is mostly for rare numbers, such as further blocks of an expert that got far more tokens than
others. Conditionals of the update run their longest branch there, too: with owned matrices each device has a branch of
its own, and all wait for the longest; of an update that may be left out, the usual step is the one that is made. Memory
is always that of all branches.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, NamedTuple

from jzero.analysis.collectives import CompiledCollective, collective_of, continues_collective
from jzero.analysis.costs import Kernels, collective_seconds, compute_seconds, is_kernel, kernel_of
from jzero.analysis.hlo import Computation, HloProgram, Instruction
from jzero.estimate.step_time import hlo_name
from jzero.machines.machine import Machine, rate_of

MAX_SPANS = 2000
"""The number of spans that a timeline stores; the totals include all."""
SAME = 0.01
"""Up to this share of the step, branches of conditionals count as equally long."""


WORK = frozenset({"while", "fusion", "dot", "convolution", "custom-call", "call", "conditional"})
"""Instructions that can hide a call of the host."""


class HostCalls(NamedTuple):
    """The number of calls of the host's CPU, and of those that overlap with other work in the schedule."""

    total: int
    covered: int


def host_calls(program: HloProgram) -> HostCalls:
    """Returns the calls of the host's CPU; one in a loop counts once."""
    total = covered = 0
    for computation in program.computations.values():
        names = [x.name for x in computation.instructions]
        for i, start in enumerate(computation.instructions):
            if not start.opcode.endswith("-start") or 'thread="host"' not in start.attributes:
                continue
            done = next((x for x in computation.instructions[i:] if start.name in x.operands), None)
            end = i + 1 if done is None else names.index(done.name)
            total += 1
            covered += any(x.opcode in WORK for x in computation.instructions[i + 1 : end])
    return HostCalls(total, covered)


class Span(NamedTuple):
    """A time during which a stream is busy.

    Attributes:
      stream: The stream.
      start: Seconds from the start of the step.
      end: Likewise.
      name: "compute", or the kind of the collective.
      part: "forward", "backward" or "update", as far as the program says.
      collective: The collective, one run of it.
      level: For a collective "between" nodes, if it crosses them, else "within".
    """

    stream: Literal["compute", "communication"]
    start: float
    end: float
    name: str
    part: str = ""
    collective: CompiledCollective | None = None
    level: str = ""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The result of `simulate`.

    Attributes:
      seconds: The whole step.
      compute: Seconds that the compute stream is busy.
      communication: Seconds that the communication stream is busy.
      exposed: Seconds that the compute stream waits for collectives.
      least: The whole step if each conditional of the loss runs its shortest branch, see [Note: A usual step].
      spans: Busy times of the streams, at most `MAX_SPANS`; neighboring computation of one part of the step is one.
    """

    seconds: float
    compute: float
    communication: float
    exposed: float
    least: float
    spans: tuple[Span, ...] = dataclasses.field(repr=False)

    @property
    def exposed_share(self) -> float:
        """Share of collective time that no computation covers; 0 if there are no collectives."""
        return self.exposed / self.communication if self.communication else 0.0

    def totals(self) -> dict[str, float]:
        """The seconds by name, without the spans."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "spans"}


def simulate(program: HloProgram, machine: Machine, kernels: Kernels | None = None) -> tuple[Timeline, list[str]]:
    """Returns the timeline of one step by [Note: The model of the machine], and remarks on unknowns.

    Args:
      program: The compiled program.
      machine: The machine.
      kernels: The arithmetic of the kernels of its trace, if it has any.
    """
    run = _Run(program, machine, kernels or {}).all()
    shortest = _Run(program, machine, kernels or {}, longest=False).all() if run.chooses else run
    notes = [f"{name}: counted by its bytes, as its arithmetic is not in the program." for name in sorted(run.unknown)]
    if shortest.end < (1 - SAME) * run.end:
        notes.append(
            f"A usual step, whose loss takes the shortest branch of each conditional, takes {1e3 * shortest.end:.3g} "
            f"ms. Figures of time and collectives are those of the longest, {1e3 * run.end:.3g} ms."
        )
    return Timeline(run.end, run.compute, run.communication, run.exposed, shortest.end, tuple(run.spans)), notes


class _Run:
    """The state of the simulation."""

    def __init__(self, program: HloProgram, machine: Machine, kernels: Kernels, *, longest: bool = True) -> None:
        self.program = program
        self.machine = machine
        self.kernels = kernels
        self.longest = longest
        self.chooses = False
        self.now = 0.0
        self.free = {"communication": 0.0, "copies": 0.0}
        self.pending: dict[str, tuple[str, float]] = {}
        self.compute = self.communication = self.exposed = 0.0
        self.spans: list[Span] = []
        self.unknown: set[str] = set()

    def all(self) -> _Run:
        if self.program.entry:
            self.computation(self.program.computations[self.program.entry])
        return self

    @property
    def end(self) -> float:
        """When all streams have ended."""
        return max(self.now, *self.free.values())

    def computation(self, computation: Computation) -> None:
        for instruction in computation.instructions:
            self.instruction(computation, instruction)

    def seconds_alone(self, computation: Computation) -> float:
        """Returns how long a computation takes on idle streams."""
        run = _Run(self.program, self.machine, self.kernels, longest=self.longest)
        run.computation(computation)
        self.unknown |= run.unknown
        return run.end

    def instruction(self, computation: Computation, x: Instruction) -> None:
        collective = collective_of(self.program, x)
        if collective is not None:
            asynchronous = x.opcode.endswith("-start") or x.opcode == "recv"
            asynchronous |= x.name.startswith("async-collective-start")
            self.communicate(x.name, collective)
            if not asynchronous:
                self.wait(x.name)
        elif x.opcode == "while":
            self.loop(x)
        elif x.opcode == "conditional":
            self.chooses = True
            longest = self.longest or _part(x.op_name) == "update"
            branches = sorted(self.program.called_computations(x), key=self.seconds_alone, reverse=longest)
            for branch in branches[:1]:
                self.computation(branch)
        elif x.opcode == "call":
            for called in self.program.called_computations(x):
                self.computation(called)
        elif x.opcode.endswith("-start"):
            self.start(x.name, "copies", compute_seconds(self.program, computation, x, self.machine))
        elif x.opcode.endswith("-done"):
            self.wait(x.operands[0])
        else:
            self.busy(computation, x)

    def busy(self, computation: Computation, x: Instruction) -> None:
        kernel = kernel_of(x, self.kernels) if is_kernel(x) else None
        if kernel is None and is_kernel(x):
            self.unknown.add(x.target)
        if continues_collective(self.program, x) and x.name.startswith("async-collective-done"):
            started = self._origin(computation, x)
            if started is not None:
                self.wait(started)
            return
        seconds = compute_seconds(self.program, computation, x, self.machine)
        if kernel is not None:
            seconds = max(seconds, kernel.flops / rate_of(self.machine, hlo_name(kernel.dtype), kernel.highest))
        if seconds:
            self.span(Span("compute", self.now, self.now + seconds, "compute", _part(x.op_name)))
            self.now += seconds
            self.compute += seconds

    def communicate(self, name: str, collective: CompiledCollective) -> None:
        seconds = collective_seconds(collective, self.machine)
        begin = self.start(name, "communication", seconds)
        self.communication += seconds
        crosses = collective.nic_bytes(self.machine.devices_per_node) > 0
        part, level = _part(collective.op_name), "between" if crosses else "within"
        self.span(Span("communication", begin, begin + seconds, collective.kind, part, collective, level))

    def start(self, name: str, stream: str, seconds: float) -> float:
        """Starts an asynchronous operation on a stream; returns when it begins."""
        begin = max(self.now, self.free[stream])
        self.free[stream] = begin + seconds
        self.pending[name] = (stream, begin + seconds)
        return begin

    def wait(self, name: str) -> None:
        stream, end = self.pending.pop(name, ("", 0.0))
        if end > self.now:
            if stream == "communication":
                self.exposed += end - self.now
            self.now = end

    def loop(self, x: Instruction) -> None:
        """Runs the body for each trip; once the spans are full, multiplies the rest."""
        trips = self.program.trip_count(x)
        bodies = [self.program.computations[name] for name in x.called if name in self.program.computations]
        before = (self.now, self.compute, self.communication, self.exposed)
        for trip in range(1 if trips is None else trips):
            if trip > 2 and len(self.spans) >= MAX_SPANS:
                self.skip((trips or 0) - trip, before)
                return
            before = (self.now, self.compute, self.communication, self.exposed)
            for body in bodies:
                self.computation(body)

    def skip(self, trips: int, before: tuple[float, float, float, float]) -> None:
        """Continues as if the last trip, which began at `before`, ran `trips` more times."""
        after = (self.now, self.compute, self.communication, self.exposed)
        now, compute, communication, exposed = (b + (b - a) * trips for a, b in zip(before, after, strict=True))
        for stream in self.free:
            self.free[stream] += now - self.now
        self.now, self.compute, self.communication, self.exposed = now, compute, communication, exposed

    def span(self, new: Span) -> None:
        last = next((i for i in range(len(self.spans) - 1, -1, -1) if self.spans[i].stream == new.stream), None)
        if new.collective is None and last is not None and _continues(self.spans[last], new):
            self.spans[last] = self.spans[last]._replace(end=new.end)
        elif len(self.spans) < MAX_SPANS:
            self.spans.append(new)

    def _origin(self, computation: Computation, done: Instruction) -> str | None:
        """Returns the start of the chain of fusions that `done` ends; they pass on the same array."""
        pending, visited = [done], set[str]()
        while pending:
            x = pending.pop()
            for name in x.operands:
                source = computation.source(name)
                if source is None or source.name in visited:
                    continue
                visited.add(source.name)
                if source.name in self.pending:
                    return source.name
                if continues_collective(self.program, source):
                    pending.append(source)
        return None


def _continues(last: Span, new: Span) -> bool:
    return last.part == new.part and new.start - last.end < 1e-12


def _part(op_name: str) -> str:
    """Returns the part of a step that an instruction belongs to, by the name of its operation."""
    if "zero_update" in op_name:
        return "update"
    return "" if "zero_compute" not in op_name else "backward" if "transpose(" in op_name else "forward"


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
