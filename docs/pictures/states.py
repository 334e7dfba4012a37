"""Pictures of states: what each device holds, as plans and arrays have it.

`python -m pictures.states`, in `docs/`, writes `bytes.svg`, which the README shows.
"""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from pictures.svg import STATES, WIDTH, Canvas, bars

DEVICES = 4
PSI = 1024 * 1024
SHADES = ("params", "opt", "grads", "work")  # of four devices


def _plan(stage: int, devices: int) -> jzero.ZeroPlan:
    """Returns the plan of a model of one matrix."""

    def make() -> jzero.TrainState:
        return jzero.TrainState.create(
            params={"w": jnp.zeros((1024, 1024))}, tx=optax.adam(1e-3)
        )

    mesh = jax.sharding.AbstractMesh((devices,), ("data",))
    return jzero.plan_train_state(jax.eval_shape(make), stage=stage, mesh=mesh)


def draw_bytes() -> str:
    """Returns the bytes that one of eight devices holds per parameter, by stage: fp32 with Adam."""
    rows = []
    for stage in range(4):
        sizes = _plan(stage, 8).bytes_per_device
        parts = {
            "params": sizes.params / PSI,
            "grads": sizes.grads / PSI,
            "opt": math.floor(sizes.opt_state / PSI * 100) / 100,
        }
        rows.append((f"stage {stage}", parts, f"{sum(parts.values()):g}"))
    told = ", ".join(f"{end} at {name}" for name, _, end in rows)
    return bars(
        f"Bytes per parameter on each of eight devices: {told}", rows, STATES
    )


def _spans(array: jax.Array) -> list[tuple[float, float]]:
    """Returns for each device the part that it holds: from and to, as shares of the dimension that is cut."""
    parts = []
    for shard in sorted(
        array.addressable_shards, key=lambda shard: shard.device.id
    ):
        edges = [
            (s.indices(n)[0] / n, s.indices(n)[1] / n)
            for s, n in zip(shard.index, array.shape, strict=True)
        ]
        parts.append(min(edges, key=lambda edge: edge[1] - edge[0]))
    return parts


def _held(stage: int) -> dict[str, list[tuple[float, float]]]:
    """Returns the parts that devices hold of a matrix, its gradient and its first moment."""
    mesh = jzero.make_mesh(devices=jax.devices()[:DEVICES])
    plain = jzero.TrainState.create(
        params={"w": jnp.zeros((64, 8))}, tx=optax.adam(1e-3)
    )
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    state = jzero.shard_train_state(plain, config=config, mesh=mesh)
    sizes = jzero.plan_of(state).bytes_per_device
    is_whole = sizes.grads == plain.params["w"].nbytes  # at its maximum
    moments = _spans(state.opt_state[0].mu["w"])
    return {
        "params": _spans(state.params["w"]),
        "grads": [(0, 1)] * DEVICES if is_whole else moments,
        "opt": moments,
    }


def draw_stages() -> str:
    """Returns what each of four devices holds, by stage: bars of parameters, gradients and optimizer state."""
    widths = {"params": 18, "grads": 18, "opt": 36}  # as bytes of fp32 with Adam
    canvas = Canvas(
        "What four devices hold of parameters, gradients and optimizer state at stages 0 to 3"
    )
    canvas.legend(STATES, left=62)
    for device in range(DEVICES):
        canvas.text(62 + 96 * device, 46, f"device {device}", "small")
    for stage in range(4):
        top = 56 + 68 * stage
        canvas.text(0, top + 34, f"stage {stage}")
        held = _held(stage)
        for device in range(DEVICES):
            x = 62.0 + 96 * device
            for kind, width in widths.items():
                start, stop = held[kind][device]
                canvas.rect(x, top, width, 56, "empty")
                canvas.rect(x, top + 56 * start, width, 56 * (stop - start), kind)
                x += width + 4
    return canvas.svg(56 + 68 * 4)


def draw_matrices() -> str:
    """Returns which part of the two matrices of "Life of a step" each of eight devices holds."""
    params = {"up": jnp.zeros((64, 512)), "down": jnp.zeros((512, 64))}
    plain = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    state = jzero.shard_train_state(plain, config=config)
    canvas = Canvas(
        "Each of eight devices holds 64 columns of `up` and 64 rows of `down`"
    )
    canvas.text(0, 16, "up [64, 512], cut on dim 1")
    canvas.text(286, 16, "down [512, 64],")
    canvas.text(286, 36, "cut on dim 0")
    shades = [SHADES[device % 4] for device in range(8)]
    for device, (start, stop) in enumerate(_spans(state.params["up"])):
        width = 248 * (stop - start)
        canvas.rect(248 * start, 30, width - 2, 31, shades[device])
        canvas.text(
            248 * start + width / 2 - 1, 51, device, "inside", anchor="middle"
        )
    for device, (start, stop) in enumerate(_spans(state.params["down"])):
        height = 248 * (stop - start)
        canvas.rect(286, 48 + 248 * start, 31, height - 2, shades[device])
        canvas.text(301.5, 48 + 248 * start + 20, device, "inside", anchor="middle")
    canvas.text(0, 96, "The number is the device that")
    canvas.text(0, 118, "holds the part: of the parameter,")
    canvas.text(0, 140, "its gradient and both moments.")
    return canvas.svg(300)


def draw_padding() -> str:
    """Returns fifteen rows over four devices: sixteen are stored, the last is padding."""
    mesh = jzero.make_mesh(devices=jax.devices()[:DEVICES])
    plain = jzero.TrainState.create(
        params={"w": jnp.ones((15, 15))}, tx=optax.sgd(1.0)
    )
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    state = jzero.shard_train_state(plain, config=config, mesh=mesh)
    natural, (stored,) = state.params["w"].shape[0], jax.tree.leaves(state.params)
    dim = stored.sharding.spec.index("data")
    canvas = Canvas(
        "Fifteen rows stored as sixteen over four devices, the last of them padding"
    )
    canvas.text(0, 16, f"a leaf of {natural} rows, as the model sees it")
    for row in range(natural):
        canvas.rect(27 * row, 26, 25, 22, "params")
    each = stored.shape[dim] // DEVICES
    canvas.text(0, 78, f"as it is stored, {each} rows on each of {DEVICES} devices")
    is_padding = np.asarray(stored).sum(1 - dim) == 0
    for row in range(stored.shape[dim]):
        kind = "empty" if is_padding[row] else "params"
        canvas.rect(27 * row + row // each * 2, 88, 25, 22, kind)
    for device in range(DEVICES):
        canvas.text(110 * device, 130, f"device {device}", "small")
    return canvas.svg(136)


def draw_loading() -> str:
    """Returns how the kernels of three layers, transposed in their files, become one stack over four devices."""
    canvas = Canvas(
        "Each device reads its columns of every layer's tensor, and holds them transposed and stacked"
    )
    canvas.text(0, 16, "in the folder: out x in, one tensor per layer")
    for layer in range(3):
        x = 146 * layer
        canvas.text(x, 42, f"layers.{layer}.…q_proj", "small")
        for device in range(DEVICES):
            canvas.rect(x + 26 * device, 52, 24, 56, SHADES[device])
    canvas.text(0, 142, "on the devices: layers x in x out, cut on in")
    for device in range(DEVICES):
        canvas.text(110 * device, 168, f"device {device}", "small")
        for layer in range(3):
            canvas.rect(
                110 * device + 6 * layer, 178 + 18 * layer, 72, 16, SHADES[device]
            )
    return canvas.svg(238)


def draw_which_stage() -> str:
    """Returns the questions that choose a stage."""
    canvas = Canvas(
        "Stage 0 if all states fit on each device. Else stage 1 or 2 if your code reads whole parameters between steps "
        "or there are many micro-batches, and they fit; else stage 3, which without resharding sends as little"
    )
    questions = (
        (
            ("Do states and activations", "fit on each device whole?"),
            ("stage 0", "holds 16Ψ bytes"),
        ),
        (
            (
                "Does your code read whole",
                "parameters between steps,",
                "or sum micro-batches?",
            ),
            ("stage 1 or 2", "8Ψ or 4Ψ, the rest /N"),
        ),
        (
            ("Do whole parameters fit", "during a step?"),
            ("stage 3, not resharded", "16Ψ/N, sends 2Ψ"),
        ),
    )
    left, answers = 206, 246

    def arrow(x: float, y: float) -> list[tuple[float, float]]:
        return [(x - 6, y - 4), (x, y), (x - 6, y + 4)]

    top = 2.0
    for question, answer in questions:
        height = 20 * len(question) + 14
        middle = top + height / 2
        canvas.rect(1, top, left, height, "box")
        for number, line in enumerate(question):
            canvas.text(8, top + 20 + 20 * number, line, "text")
        canvas.line([(left + 1, middle), (answers, middle)], "axis")
        canvas.line(arrow(answers, middle), "axis")
        canvas.text(left + 7, middle - 6, "yes", "small")
        canvas.rect(answers, middle - 24, WIDTH - answers, 48, "params")
        for number, line in enumerate(answer):
            canvas.text(answers + 8, middle - 5 + 20 * number, line, "inside")
        top += height
        canvas.line([(100, top), (100, top + 28)], "axis")
        canvas.line([(96, top + 22), (100, top + 28), (104, top + 22)], "axis")
        canvas.text(110, top + 19, "no", "small")
        top += 28
    canvas.rect(1, top, left, 48, "params")
    canvas.text(8, top + 19, "stage 3", "inside")
    canvas.text(8, top + 39, "16Ψ/N, sends 3Ψ", "inside")
    canvas.line([(left + 1, top + 24), (answers, top + 24)], "axis")
    canvas.line(arrow(answers, top + 24), "axis")
    canvas.rect(answers, top, WIDTH - answers - 1, 48, "box")
    canvas.text(answers + 8, top + 19, "too much? recompute,", "text")
    canvas.text(answers + 8, top + 39, "micro-batches, offload", "text")
    return canvas.svg(top + 50)


if __name__ == "__main__":
    (pathlib.Path(__file__).parent / "bytes.svg").write_text(draw_bytes())
