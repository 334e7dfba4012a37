"""The picture of a step's memory: each array of a device's program lives from its making to its last use."""

from typing import Any

import jax.numpy as jnp

import jzero
from pictures.programs import SAME, is_backward, layers, pairs, placed
from pictures.svg import WIDTH, Canvas, Plot

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


def _kinds(body: Any, base: dict[Any, Any]) -> dict[Any, str]:
    """Returns the purpose of each array that takes memory."""
    kinds: dict[Any, str] = {}
    for eqn in body.eqns:
        name = eqn.primitive.name
        for old in (base.get(v, v) for v in eqn.invars if not hasattr(v, "val")):
            if old in kinds and name in {"zero_reduce", "zero_unreduced", "psum"}:
                kinds[old] = "grads"
            elif kinds.get(old) == "work" and is_backward(eqn):
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
                kinds[v] = "later" if is_backward(eqn) else "work"
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
            base |= {new: whose(old) for new, old in pairs(eqn) if old in read}
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
    width, devices = 512, 8
    loss_fn, params = layers(8, width)
    canvas = Canvas("")
    top = canvas.legend(KINDS) + 20
    peaks = {}
    for stage in (0, 3):
        batch = jnp.ones((devices * width // 4, width))
        moments = _memory(*placed(loss_fn, params, batch, stage))
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
