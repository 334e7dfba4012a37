"""Pictures of a step, from the program that each device evaluates: its order, its memory, and what it sends."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero
from pictures.svg import WIDTH, Canvas, Plot, bars

LANES = {"gather": "params", "compute": "work", "reduce": "grads"}
SAME = {"optimization_barrier", "zero_wait", "zero_named", "zero_unreduced"}
"""Equations that return their inputs."""
MOVES = {"dot_general", "zero_gather", "zero_reduce", "psum"}
"""Equations that take time, and need new memory for their results."""
KINDS = {
    "opt": "optimizer",
    "params": "parameters",
    "gathered": "gathered",
    "activations": "activations",
    "grads": "gradients",
    "work": "in use",
}
MIB = 2**20


def _body(jaxpr: Any) -> Any:
    """Returns the program inside the first `shard_map`: what each device evaluates."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            return eqn.params["jaxpr"]
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and (body := _body(inner)) is not None:
                return body
    return None


def _placed(
    loss_fn: Callable[..., Any], params: Any, batch: Any, stage: int
) -> tuple[Any, jzero.ZeroPlan]:
    """Returns the program of one device for a step of Adam, and the plan."""
    plain = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    state = jzero.shard_train_state(plain, config=config)
    traced = jzero.make_train_step(loss_fn).trace(state, batch)
    return _body(traced.jaxpr.jaxpr), jzero.plan_of(state)


def _is_backward(eqn: Any) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def _pairs(eqn: Any) -> Iterator[tuple[Any, Any]]:
    """Yields for an equation that returns its inputs, which output is which input."""
    return zip(eqn.outvars, eqn.invars, strict=False)


# --- The order of a step ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Box:
    """A product, a gather or a reduction: its lane, its column, and what stands on it."""

    lane: str
    column: int
    name: str


def _boxes(body: Any) -> list[Box]:
    """Returns the products of a program, a column each, and gathers and reductions beside those that they belong to."""
    boxes: list[Box] = []
    gathers: dict[Any, str] = {}  # those that nothing has read yet
    makers: dict[
        Any, Box
    ] = {}  # of each value, the last product that it comes from
    weights: list[str] = []  # in the order of use
    columns = 0
    for eqn in body.eqns:
        name = eqn.primitive.name
        inputs = [v for v in eqn.invars if not hasattr(v, "val")]
        if name == "zero_gather":
            gathers[eqn.outvars[0]] = eqn.params["path"]
        elif name == "zero_reduce":
            made = makers[inputs[0]]
            made.name = "∇" + made.name[1:]
            boxes.append(Box("reduce", made.column + 1, made.name[1:]))
        elif name == "dot_general":
            columns += 1
            read = next((v for v in inputs if v in gathers), None)
            if read is not None:
                boxes.append(Box("gather", columns - 1, gathers[read]))
            if not _is_backward(eqn):
                weights.append(gathers[read])
                box = Box("compute", columns, gathers[read])
            elif read is not None:
                box = Box("compute", columns, f"←{gathers[read]}")
                weights.remove(gathers[read])
            else:  # the gradient of the last layer's weights that has none yet
                box = Box("compute", columns, f"←{weights[-1]}")
            boxes.append(box)
            makers |= dict.fromkeys(eqn.outvars, box)
            continue
        elif name in SAME:
            makers |= {
                new: makers[old] for new, old in _pairs(eqn) if old in makers
            }
            continue
        sources = [makers[v] for v in inputs if v in makers]
        if sources:
            last = max(sources, key=lambda box: box.column)
            makers |= dict.fromkeys(eqn.outvars, last)
    return boxes


def _lanes(body: Any, label: str) -> str:
    boxes = _boxes(body)
    columns = max(box.column for box in boxes) + 2
    left, height = 66, 34
    slot = (WIDTH - left) / columns
    canvas = Canvas(label)
    first_backward = min(box.column for box in boxes if box.name[0] in "∇←")
    canvas.text(left + slot, 16, "forward", "small")
    canvas.text(left + slot * first_backward, 16, "backward", "small")
    tops = {lane: 26 + (height + 8) * row for row, lane in enumerate(LANES)}
    for lane, top in tops.items():
        canvas.text(0, top + 22, lane)
    boxes.append(Box("compute", columns - 1, "tx"))
    for box in boxes:
        kind = "opt" if box.name == "tx" else LANES[box.lane]
        x, top = left + slot * box.column, tops[box.lane]
        canvas.rect(x, top, slot - 3, height, kind)
        canvas.text(x + (slot - 3) / 2, top + 22, box.name, "inside", "middle")
    return canvas.svg(26 + 3 * (height + 8))


def _layers(
    number: int, width: int
) -> tuple[Callable[..., Any], dict[str, jax.Array]]:
    """Returns the loss of a model of layers, and its parameters."""
    names = [str(i + 1) for i in range(number)]

    def loss_fn(params: Any, batch: Any) -> Any:
        for name in names:
            batch = jnp.tanh(batch @ params[name])
        return jnp.square(batch).mean()

    return loss_fn, {name: jnp.ones((width, width)) for name in names}


def draw_step() -> str:
    """Returns the order of one step at stage 3 for a model of three layers."""
    loss_fn, params = _layers(3, 64)
    body, _ = _placed(loss_fn, params, jnp.ones((64, 64)), stage=3)
    return _lanes(
        body,
        "One step at stage 3: gathers before each layer, again in the backward pass, and reductions behind it",
    )


def draw_life() -> str:
    """Returns the order of the step of "Life of a step"."""

    def loss_fn(params: Any, batch: Any) -> Any:
        hidden = jnp.sin(batch @ params["up"])
        return jnp.square(hidden @ params["dn"]).mean()

    params = {"up": jnp.full((64, 512), 0.1), "dn": jnp.full((512, 64), 0.1)}
    body, _ = _placed(loss_fn, params, jnp.ones((16, 64)), stage=3)
    return _lanes(
        body,
        "The placed program: `up` gathered once, `down` twice, and two reductions",
    )


# --- The memory of a step -----------------------------------------------------------------------------------------


def _kinds(body: Any, base: dict[Any, Any]) -> dict[Any, str]:
    """Returns the purpose of each array that takes memory."""
    kinds: dict[Any, str] = {}
    for eqn in body.eqns:
        name = eqn.primitive.name
        for old in (base.get(v, v) for v in eqn.invars if not hasattr(v, "val")):
            if old in kinds and name in {"zero_reduce", "zero_unreduced", "psum"}:
                kinds[old] = "grads"
            elif kinds.get(old) == "work" and _is_backward(eqn):
                kinds[old] = "activations"
        for v in eqn.outvars:
            if v in base:
                if name == "zero_unreduced":
                    kinds[base[v]] = "grads"
            elif name == "zero_gather":
                kinds[v] = "gathered"
            elif name in {"zero_reduce", "psum"}:
                kinds[v] = "grads"
            else:
                kinds[v] = "later" if _is_backward(eqn) else "work"
    return {v: "work" if kind == "later" else kind for v, kind in kinds.items()}


def _memory(body: Any, plan: jzero.ZeroPlan) -> list[dict[str, float]]:
    """Returns the bytes on one device by purpose at each equation: an array lives until its last use."""
    base: dict[
        Any, Any
    ] = {}  # of each array that takes no memory of its own, the one whose memory it has

    def whose(v: Any) -> Any:
        return base.get(v, v)

    inputs = [[v for v in eqn.invars if not hasattr(v, "val")] for eqn in body.eqns]
    for eqn, read in zip(body.eqns, inputs, strict=True):
        if eqn.primitive.name in SAME:
            base |= {new: whose(old) for new, old in _pairs(eqn) if old in read}
    last = {whose(v): t for t, read in enumerate(inputs) for v in read}
    last |= {whose(v): len(inputs) for v in body.outvars if not hasattr(v, "val")}
    for t, eqn in enumerate(
        body.eqns
    ):  # an elementwise operation takes over the memory of what it reads last
        (made,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
        for old in map(whose, inputs[t]):
            is_same = made is not None and old.aval.shape == made.aval.shape
            if (
                is_same
                and last[old] == t
                and eqn.primitive.name not in MOVES
                and old not in body.invars
            ):
                base |= {v: old for v in base if base[v] is made} | {made: old}
                last[old] = last.pop(made, t)
                break
    kinds, sizes = _kinds(body, base), plan.bytes_per_device
    states = {"opt": sizes.opt_state, "params": sizes.params}
    live: set[Any] = set()
    moments = []
    for t, eqn in enumerate(body.eqns):
        live |= {v for v in eqn.outvars if v not in base and v in last}
        held = dict.fromkeys(KINDS, 0.0) | states
        for v in live - set(body.invars):
            held[kinds[v]] += v.aval.size * v.aval.dtype.itemsize
        if eqn.primitive.name in MOVES and eqn.outvars[0].aval.ndim > 1:
            moments.append(held)
        live -= {v for v in live if last[v] <= t}
    return moments


def draw_memory() -> str:
    """Returns the memory of a device through one step of eight layers, at stages 0 and 3."""
    layers, width, devices = 8, 512, 8
    loss_fn, params = _layers(layers, width)
    canvas = Canvas("")
    top = canvas.legend(KINDS) + 20
    peaks = {}
    for stage in (0, 3):
        batch = jnp.ones((devices * width // 4, width))
        moments = _memory(*_placed(loss_fn, params, batch, stage))
        totals = [sum(held.values()) / MIB for held in moments]
        peaks[stage] = max(totals)
        plot = Plot(canvas, (0, len(moments)), (0, 40), top, 150)
        plot.axes(
            {}, {y: f"{y}" for y in (0, 10, 20, 30, 40)}, "", f"stage {stage}, MiB"
        )
        below = [0.0] * len(moments)
        for kind in KINDS:
            above = [
                low + held[kind] / MIB
                for low, held in zip(below, moments, strict=True)
            ]
            upper = [
                plot.at(t + side, y) for t, y in enumerate(above) for side in (0, 1)
            ]
            lower = [
                plot.at(t + side, y) for t, y in enumerate(below) for side in (0, 1)
            ]
            canvas.area([*upper, *reversed(lower)], kind)
            below = above
        peak = totals.index(peaks[stage])
        x, y = plot.at(peak + 0.5, peaks[stage])
        canvas.line([(x, y - 12), (x, y - 2)], "axis")
        anchor = "end" if peak > len(moments) / 2 else "start"
        canvas.text(x, y - 16, f"peak {peaks[stage]:.1f}", "small", anchor)
        top += 206
    canvas.text(46, top - 32, "forward", "small")
    canvas.text(240, top - 32, "backward", "small", "middle")
    canvas.text(WIDTH - 8, top - 32, "update", "small", "end")
    canvas.label = (
        f"Memory of one device through a step of eight layers on eight devices: peak {peaks[0]:.1f} MiB at stage 0, "
        f"{peaks[3]:.1f} MiB at stage 3"
    )
    return canvas.svg(top - 22)


# --- What a step sends --------------------------------------------------------------------------------------------


def draw_sent() -> str:
    """Returns the elements that one device sends at each stage, by collective, as compiled here: parts of Ψ."""
    loss_fn, params = _layers(4, 256)
    psi = sum(x.size for x in params.values())
    kinds = {"all-gather": "params", "reduce-scatter": "grads", "all-reduce": "opt"}
    rows = []
    for stage in range(4):
        plain = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
        config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
        state = jzero.shard_train_state(plain, config=config)
        report = jzero.analyze(
            jzero.make_train_step(loss_fn), state, jnp.ones((64, 256))
        )
        sizes = dict.fromkeys(kinds.values(), 0.0)
        for row in report.collectives:
            sizes[kinds[row.kind]] += row.elements / psi
        rows.append((f"stage {stage}", sizes, f"{sum(sizes.values()):.2g}Ψ"))
    told = ", ".join(f"{end} at {name}" for name, _, end in rows)
    return bars(
        f"Elements that one device sends in a step: {told}",
        rows,
        {kind: name for name, kind in kinds.items()},
    )
