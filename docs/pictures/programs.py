"""Pictures of a step, from the program that each device evaluates: its order, and what it sends."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero
from pictures.svg import WIDTH, Canvas, bars

LANES = {"gather": "params", "compute": "work", "reduce": "grads"}
SAME = {"optimization_barrier", "zero_wait", "zero_named", "zero_unreduced"}
"""Equations that return their inputs."""


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


def placed(
    loss_fn: Callable[..., Any], params: Any, batch: Any, stage: int
) -> tuple[Any, jzero.ZeroPlan]:
    """Returns the program of one device for a step of Adam, and the plan."""
    plain = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    state = jzero.shard_train_state(plain, config=config)
    traced = jzero.make_train_step(loss_fn).trace(state, batch)
    return _body(traced.jaxpr.jaxpr), jzero.plan_of(state)


def is_backward(eqn: Any) -> bool:
    """Whether an equation is part of the backward pass."""
    return "transpose(" in str(eqn.source_info.name_stack)


def pairs(eqn: Any) -> Iterator[tuple[Any, Any]]:
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
            if not is_backward(eqn):
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
            makers |= {new: makers[old] for new, old in pairs(eqn) if old in makers}
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


def layers(
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
    loss_fn, params = layers(3, 64)
    body, _ = placed(loss_fn, params, jnp.ones((64, 64)), stage=3)
    return _lanes(
        body,
        "One step at stage 3: gathers before each layer, again in the backward pass, and reductions behind it",
    )


def _two_layers() -> tuple[Callable[..., Any], dict[str, jax.Array], jax.Array]:
    """Returns the loss of "Life of a step", its parameters and a batch."""

    def loss_fn(params: Any, batch: Any) -> Any:
        hidden = jnp.sin(batch @ params["up"])
        return jnp.square(hidden @ params["dn"]).mean()

    params = {"up": jnp.full((64, 512), 0.1), "dn": jnp.full((512, 64), 0.1)}
    return loss_fn, params, jnp.ones((16, 64))


def draw_life() -> str:
    """Returns the order of the step of "Life of a step"."""
    body, _ = placed(*_two_layers(), stage=3)
    return _lanes(
        body,
        "The placed program: `up` gathered once, `down` twice, and two reductions",
    )


# --- What a step sends --------------------------------------------------------------------------------------------


def draw_sent() -> str:
    """Returns the elements that one device sends for a model of four layers."""
    return _sent(*layers(4, 256), jnp.ones((64, 256)))


def draw_counted() -> str:
    """Returns the elements that one device sends in the step of "Life of a step"."""
    return _sent(*_two_layers())


def _sent(loss_fn: Callable[..., Any], params: Any, batch: jax.Array) -> str:
    """Returns the elements that one device sends at each stage, by collective, as compiled here: parts of Ψ."""
    psi = sum(x.size for x in params.values())
    kinds = {"all-gather": "params", "reduce-scatter": "grads", "all-reduce": "opt"}
    rows = []
    for stage in range(4):
        plain = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
        config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
        state = jzero.shard_train_state(plain, config=config)
        report = jzero.analyze(jzero.make_train_step(loss_fn), state, batch)
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
