"""Draws the diagrams of the documentation: `python docs/diagrams/draw.py` writes the SVG files beside this script.

Pages include them as they are, so that `docs/stylesheets/extra.css` colors them for both palettes of the site. On their
own, as in the README, they follow the reader's color scheme by a style of their own, over colors that do for both.
Narrow, with large letters, they can be read on a phone.
"""

import pathlib

DEVICES = 4
WIDTH = 440
ATTRIBUTES = {  # what a class looks like where no style sheet says otherwise
    "label": 'fill="#76767f" font-size="16"',
    "small": 'fill="#76767f" font-size="14"',
    "inside": 'fill="#fff" font-size="14" text-anchor="middle"',
    "params": 'fill="#3f6fb5"',
    "grads": 'fill="#c2590c"',
    "opt": 'fill="#2f7d4f"',
    "work": 'fill="#6b6b76"',
    "empty": 'fill="none" stroke="#76767f" stroke-dasharray="3 2"',
}
STYLE = (
    "<style>.label{fill:#1f2328}.small{fill:#59636e}"
    "@media(prefers-color-scheme:dark){.label{fill:#e6edf3}.small{fill:#9ea7b3}}</style>"
)


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}" {ATTRIBUTES[kind]}/>'


def _text(x: float, y: float, text: str, kind: str = "label") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" class="{kind}" {ATTRIBUTES[kind]}>{text}</text>'
    )


def _svg(height: float, label: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" width="{WIDTH}" viewBox="0 0 {WIDTH} {height:g}" '
        f'font-family="sans-serif" role="img" aria-label="{label}">'
    )
    return "\n".join([head, STYLE, *parts, "</svg>", ""])


def draw_bytes() -> str:
    """Returns the bytes that one of eight devices holds per parameter, by stage: fp32 with Adam."""
    whole, scale, left = {"params": 4, "grads": 4, "opt": 8}, 20, 66
    names = {"params": "parameters", "grads": "gradients", "opt": "optimizer"}
    parts = []
    for x, (kind, name) in zip(
        (left, left + 116, left + 216), names.items(), strict=True
    ):
        parts += [_rect(x, 6, 12, 12, kind), _text(x + 18, 17, name)]
    for stage in range(4):
        top, x = 32 + 34 * stage, float(left)
        parts.append(_text(0, top + 17, f"stage {stage}"))
        held = [
            size / 8 if stage >= 3 - position else size
            for position, size in enumerate(whole.values())
        ]
        for kind, size in zip(whole, held, strict=True):
            parts.append(_rect(x, top, scale * size, 24, kind))
            x += scale * size
        parts.append(_text(x + 8, top + 17, f"{sum(held):g}"))
    return _svg(
        32 + 34 * 4,
        "Bytes per parameter on each of eight devices: 16 at stage 0, 9 at stage 1, 5.5 at stage 2, 2 at stage 3",
        parts,
    )


def draw_stages() -> str:
    """Returns what each of four devices holds, by stage: bars of parameters, gradients and optimizer state."""
    # Widths are as the bytes of fp32 with Adam: 4, 4 and 8.
    widths = {"params": 18, "grads": 18, "opt": 36}
    parts = []
    names = {"params": "parameters", "grads": "gradients", "opt": "optimizer"}
    for x, (kind, name) in zip((62, 178, 278), names.items(), strict=True):
        parts += [_rect(x, 6, 12, 12, kind), _text(x + 18, 17, name)]
    for device in range(DEVICES):
        parts.append(_text(62 + 96 * device, 42, f"device {device}", "small"))
    for stage in range(4):
        top = 52 + 68 * stage
        parts.append(_text(0, top + 34, f"stage {stage}"))
        for device in range(DEVICES):
            x = 62 + 96 * device
            for position, (kind, width) in enumerate(widths.items()):
                is_cut = stage >= 3 - position
                parts.append(_rect(x, top, width, 56, "empty" if is_cut else kind))
                if is_cut:
                    parts.append(_rect(x, top + 14 * device, width, 14, kind))
                x += width + 4
    return _svg(
        52 + 68 * 4,
        "What four devices hold of parameters, gradients and optimizer state at stages 0 to 3",
        parts,
    )


def draw_step() -> str:
    """Returns the order of one step at stage 3 for a model of three layers."""
    slot, left, layers = 41, 68, (1, 2, 3)
    parts = [
        _text(left + slot, 16, "forward", "small"),
        _text(left + 4 * slot, 16, "backward", "small"),
    ]
    lanes = {"gather": 26, "compute": 66, "reduce": 106}
    parts += [_text(0, top + 20, name) for name, top in lanes.items()]

    def box(lane: str, position: int, name: object, kind: str) -> None:
        x, top = left + slot * position, lanes[lane]
        parts.append(_rect(x, top, slot - 4, 30, kind))
        parts.append(_text(x + slot / 2 - 2, top + 20, f"{name}", "inside"))

    for position, layer in enumerate((*layers, *reversed(layers))):
        box("gather", position, layer, "params")
        box("compute", position + 1, layer, "work")
    for position, layer in enumerate(reversed(layers)):
        box("reduce", position + 5, layer, "grads")
    box("compute", 8, "tx", "opt")
    return _svg(
        140,
        "One step at stage 3: gathers before each layer, again in the backward pass, then reductions",
        parts,
    )


def draw_padding() -> str:
    """Returns fifteen rows over four devices: sixteen are stored, the last is padding."""
    parts = [_text(0, 16, "a leaf of 15 rows, as the model sees it")]
    parts += [_rect(27 * row, 26, 25, 22, "params") for row in range(15)]
    parts.append(_text(0, 78, "as it is stored, 4 rows on each of 4 devices"))
    for row in range(16):
        x, kind = 27 * row + row // 4 * 2, "params" if row < 15 else "empty"
        parts.append(_rect(x, 88, 25, 22, kind))
    parts += [
        _text(110 * device, 130, f"device {device}", "small")
        for device in range(DEVICES)
    ]
    return _svg(
        136,
        "Fifteen rows stored as sixteen over four devices, the last of them padding",
        parts,
    )


def draw_fine_tuning() -> str:
    """Returns the states of a Llama of 7B on one of eight devices, by how it is fine-tuned, in GiB."""
    names = {"params": "parameters", "grads": "gradients", "opt": "optimizer"}
    ways = {  # bytes per parameter of each term, and the part of the parameters that has gradients
        "all": (4, 2, 8),
        "LoRA": (2, 0, 0),
        "int8 LoRA": (1, 0, 0),
    }
    parts, left, scale, per_byte = [], 92, 25, 6_738_415_616 / 8 / 2**30
    for x, (kind, name) in zip(
        (left, left + 116, left + 216), names.items(), strict=True
    ):
        parts += [_rect(x, 6, 12, 12, kind), _text(x + 18, 17, name)]
    for row, (way, sizes) in enumerate(ways.items()):
        top, x = 32 + 34 * row, float(left)
        parts.append(_text(0, top + 17, way))
        for kind, size in zip(names, sizes, strict=True):
            width = scale * size * per_byte
            parts += [_rect(x, top, width, 24, kind)] if size else []
            x += width
        parts.append(_text(x + 6, top + 17, f"{sum(sizes) * per_byte:.1f}"))
    label = "GiB of states on each of eight devices, 7B: all trained 11.0, LoRA 1.6, over an int8 base 0.8"
    return _svg(32 + 34 * len(ways), label, parts)


def draw_loading() -> str:
    """Returns how the kernels of three layers, transposed in their files, become one stack over four devices."""
    parts = [_text(0, 16, "in the folder: out x in, one tensor per layer")]
    for layer in range(3):
        x = 146 * layer
        parts.append(_text(x, 42, f"layers.{layer}.…q_proj", "small"))
        for device in range(DEVICES):
            parts.append(
                _rect(
                    x + 26 * device,
                    52,
                    24,
                    56,
                    ("params", "opt", "grads", "work")[device],
                )
            )
    parts.append(_text(0, 142, "on the devices: layers x in x out, cut on in"))
    for device in range(DEVICES):
        x = 110 * device
        parts.append(_text(x, 168, f"device {device}", "small"))
        for layer in range(3):
            parts.append(
                _rect(
                    x + 6 * layer,
                    178 + 18 * layer,
                    72,
                    16,
                    ("params", "opt", "grads", "work")[device],
                )
            )
    label = "Each device reads its columns of every layer's tensor, and holds them transposed and stacked"
    return _svg(238, label, parts)


def drawings() -> dict[str, str]:
    """Returns the text of each file by its name."""
    return {
        "bytes.svg": draw_bytes(),
        "stages.svg": draw_stages(),
        "step.svg": draw_step(),
        "padding.svg": draw_padding(),
        "fine_tuning.svg": draw_fine_tuning(),
        "loading.svg": draw_loading(),
    }


if __name__ == "__main__":
    for name, text in drawings().items():
        (pathlib.Path(__file__).parent / name).write_text(text)
