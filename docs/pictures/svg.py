"""A canvas for small charts as SVG, and the kinds of charts that several pictures share.

Pages include the SVG as text, so that `docs/stylesheets/extra.css` colors it for both palettes of the site. On its own,
as in the README, it follows the reader's color scheme by a style of its own, over colors that do for both. Narrow, with
large letters, it can be read on a phone.
"""

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence

WIDTH = 440
FILLS = {
    "params": "#3f6fb5",
    "grads": "#c2590c",
    "opt": "#2f7d4f",
    "gathered": "#8250b8",
    "activations": "#a8324a",
    "work": "#6b6b76",
}
ATTRIBUTES = {  # what a class looks like where no style sheet says otherwise
    "label": 'fill="#76767f" font-size="16"',
    "small": 'fill="#76767f" font-size="14"',
    "text": 'fill="#76767f" font-size="14"',
    "inside": 'fill="#fff" font-size="14"',
    "empty": 'fill="none" stroke="#76767f" stroke-dasharray="3 2"',
    "box": 'fill="none" stroke="#76767f"',
    "axis": 'stroke="#76767f" fill="none"',
    "grid": 'stroke="#76767f" stroke-opacity="0.3" fill="none"',
    "limit": 'stroke="#d03b3b" stroke-width="2" stroke-dasharray="6 3" fill="none"',
    **{kind: f'fill="{color}"' for kind, color in FILLS.items()},
    **{
        f"line {kind}-line": f'stroke="{color}" stroke-width="2.5" fill="none"'
        for kind, color in FILLS.items()
    },
}
STYLE = (
    "<style>.label,.text{fill:#1f2328}.small{fill:#59636e}"
    "@media(prefers-color-scheme:dark){.label,.text{fill:#e6edf3}.small{fill:#9ea7b3}}</style>"
)
STATES = {"params": "parameters", "grads": "gradients", "opt": "optimizer"}
LETTER = 8.8  # pixels, of a letter of 16 px on average, in a wide font


def _tag(name: str, kind: str, **where: float | str) -> str:
    numbers = (
        f'{key.replace("_", "-")}="{value:g}"'
        if isinstance(value, (int, float))
        else f'{key.replace("_", "-")}="{value}"'
        for key, value in where.items()
    )
    return f'<{name} class="{kind}" {ATTRIBUTES[kind]} {" ".join(numbers)}'


@dataclasses.dataclass
class Canvas:
    """Shapes in the order in which they are drawn."""

    label: str
    parts: list[str] = dataclasses.field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str
    ) -> None:
        """Draws a rectangle; nothing if it would be empty."""
        if width > 0 and height > 0:
            self.parts.append(
                _tag("rect", kind, x=x, y=y, width=width, height=height) + "/>"
            )

    def text(
        self,
        x: float,
        y: float,
        text: object,
        kind: str = "label",
        anchor: str = "start",
    ) -> None:
        """Writes a line, unless it is empty; `y` is its base line."""
        if text == "":
            return
        tag = _tag("text", kind, x=x, y=y, text_anchor=anchor)
        self.parts.append(f"{tag}>{html.escape(str(text))}</text>")

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """Draws a line through the points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(_tag("polyline", kind, points=path) + "/>")

    def area(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """Fills the polygon of the points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(_tag("polygon", kind, points=path) + "/>")

    def legend(
        self, names: Mapping[str, str], *, top: float = 6, left: float = 0
    ) -> float:
        """Writes which color means what, in as many rows as that takes; returns where they end."""
        x = left
        for kind, name in names.items():
            capitals = sum(letter.isupper() for letter in name)
            width = 30 + LETTER * len(name) + 3 * capitals
            if x > left and x + width > WIDTH:
                x, top = left, top + 24
            self.rect(x, top, 12, 12, kind)
            self.text(x + 18, top + 11, name)
            x += width + 6
        return top + 26

    def svg(self, height: float) -> str:
        """Returns the picture as text, without an empty line, which would end it in Markdown."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" width="{WIDTH}" viewBox="0 0 {WIDTH} {height:g}" '
            f'font-family="sans-serif" role="img" aria-label="{html.escape(self.label)}">'
        )
        return "\n".join([head, STYLE, *self.parts, "</svg>", ""])


Row = tuple[str, Mapping[str, float], str]
"""What one bar is of, the sizes of its parts by kind, and what stands at its end: after a tab, at the right edge."""


def bars(
    label: str,
    rows: Sequence[Row],
    names: Mapping[str, str],
    *,
    left: float = 66,
    limit: tuple[float, str] | None = None,
    room: float = 56,
) -> str:
    """Returns horizontal bars, their parts side by side.

    Args:
      label: What the picture shows, for who cannot see it.
      rows: The bars.
      names: What the kinds are called; none, no legend.
      left: Where the bars begin.
      limit: A line at a size, and its name.
      room: For what stands at the ends of bars.
    """
    canvas = Canvas(label)
    top = canvas.legend(names) + 6 if names else 6
    largest = max(sum(sizes.values()) for _, sizes, _ in rows)
    scale = (WIDTH - left - room) / largest
    if limit is not None:
        canvas.text(left + scale * limit[0], top + 10, limit[1], "small", "middle")
        top += 20
    start = top
    for name, sizes, ends in rows:
        x = left
        canvas.text(0, top + 17, name)
        for kind, size in sizes.items():
            canvas.rect(x, top, scale * size, 24, kind)
            x += scale * size
        end, *last = ends.split("\t")
        canvas.text(x + 6, top + 17, end)
        for text in last:
            canvas.text(WIDTH, top + 17, text, anchor="end")
        top += 34
    if limit is not None:
        x = left + scale * limit[0]
        canvas.line([(x, start - 4), (x, top - 6)], "limit")
    return canvas.svg(top)


@dataclasses.dataclass
class Plot:
    """A canvas with axes: numbers become places on it."""

    canvas: Canvas
    x: tuple[float, float]
    y: tuple[float, float]
    top: float
    height: float
    left: float = 46
    right: float = WIDTH - 20

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Returns the place of a point; what is too high stays at the upper edge."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = min(max((y - self.y[0]) / (self.y[1] - self.y[0]), 0), 1)
        return (
            self.left + across * (self.right - self.left),
            self.top + (1 - up) * self.height,
        )

    def axes(
        self,
        x_ticks: Mapping[float, str],
        y_ticks: Mapping[float, str],
        x_name: str = "",
        y_name: str = "",
    ) -> None:
        """Draws both axes, with lines of the grid at the ticks of the upright one."""
        bottom = self.top + self.height
        for value, name in y_ticks.items():
            place = self.at(self.x[0], value)
            self.canvas.line([place, (self.right, place[1])], "grid")
            self.canvas.text(self.left - 6, place[1] + 5, name, "small", "end")
        for value, name in x_ticks.items():
            self.canvas.text(
                self.at(value, 0)[0], bottom + 18, name, "small", "middle"
            )
        self.canvas.line([(self.left, bottom), (self.right, bottom)], "axis")
        if x_name:
            self.canvas.text(
                (self.left + self.right) / 2, bottom + 38, x_name, "small", "middle"
            )
        if y_name:
            self.canvas.text(0, self.top - 14, y_name, "small")
