"""Turns shapes into SVG. The colours are classes, so that the page decides on light or dark."""

from collections.abc import Sequence
from html import escape

from accelerate_recipes.report.plot import Dot, Line, Shape, Text


def picture(shapes: Sequence[Shape], width: float, height: float, title: str = "", description: str = "") -> str:
    """An SVG element as wide as its container. Without a title, screen readers pass over it."""
    box = f'<svg viewBox="0 0 {width:g} {height:g}"'
    inner = "".join(map(_element, shapes))
    if not title:
        return f'{box} width="{width:g}" height="{height:g}" aria-hidden="true">{inner}</svg>'
    texts = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    return f'{box} role="img">{texts}{inner}</svg>'


def _element(shape: Shape) -> str:
    if isinstance(shape, Text):
        (x, y), text = shape.position, escape(shape.text)
        return f'<text x="{x:.1f}" y="{y:.1f}" class="{shape.colour} {shape.anchor}">{text}</text>'
    if isinstance(shape, Dot):
        (x, y), radius = shape.centre, shape.radius
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{shape.colour}"/>'
    return _line(shape)


def _line(line: Line) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in line.points)
    dashes = f' stroke-dasharray="{" ".join(f"{length:g}" for length in line.dashes)}"' if line.dashes else ""
    return f'<polyline points="{points}" class="{line.colour}" stroke-width="{line.width:g}"{dashes}/>'
