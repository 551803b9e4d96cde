"""Turns plots into a PNG image, in the light colours."""

import io
import math
from collections.abc import Iterator, Sequence

from PIL import Image, ImageDraw, ImageFont

from accelerate_recipes.report.plot import FONT_SIZE, HEIGHT, LIGHT, WIDTH, Dot, Line, Point, Shape, Text

_SCALE = 2  # pixels per unit of a plot
_SMOOTH = 2  # pillow draws jagged lines: draw larger, then shrink
_COLUMNS, _GAP, _TITLE, _ROW = 3, 24.0, 22.0, 18.0
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def image(plots: Sequence[tuple[str, Sequence[Shape]]], legend: Sequence[Sequence[Shape]]) -> bytes:
    """A PNG image of plots in rows of three, below a legend.

    Args:
        plots: (title, shapes) of each plot.
        legend: shapes of each line of the legend.
    """
    columns = min(_COLUMNS, len(plots)) or 1
    width = columns * (WIDTH + _GAP) + _GAP
    top = _GAP + (len(legend) + 1) * _ROW if legend else _GAP
    height = top + math.ceil(len(plots) / columns) * (_TITLE + HEIGHT + _GAP)
    canvas = _Canvas(width, height)
    for number, shapes in enumerate(legend):
        canvas.draw(shapes, (_GAP, _GAP + number * _ROW))
    for number, (title, shapes) in enumerate(plots):
        row, column = divmod(number, columns)
        x, y = _GAP + column * (WIDTH + _GAP), top + row * (_TITLE + HEIGHT + _GAP) + _TITLE
        canvas.draw([Text((0.0, -6.0), title, "text")], (x, y))
        canvas.draw(shapes, (x, y))
    return canvas.png()


class _Canvas:
    def __init__(self, width: float, height: float):
        self._factor = _SCALE * _SMOOTH
        size = (round(width * self._factor), round(height * self._factor))
        self._image = Image.new("RGB", size, LIGHT["page"])
        self._pen = ImageDraw.Draw(self._image)
        self._font = ImageFont.load_default(FONT_SIZE * self._factor)

    def draw(self, shapes: Sequence[Shape], origin: Point) -> None:
        for shape in shapes:
            if isinstance(shape, Text):
                # pillow's own font has ASCII alone.
                text = shape.text.encode("ascii", "replace").decode()
                anchor = _ANCHORS[shape.anchor]
                self._pen.text(
                    self._place(shape.position, origin), text, LIGHT[shape.colour], self._font, anchor=anchor
                )
            elif isinstance(shape, Dot):
                self._pen.circle(self._place(shape.centre, origin), shape.radius * self._factor, LIGHT[shape.colour])
            else:
                for points in _dashed(shape):
                    placed = [self._place(point, origin) for point in points]
                    self._pen.line(placed, LIGHT[shape.colour], round(shape.width * self._factor), joint="curve")

    def png(self) -> bytes:
        content, size = io.BytesIO(), (self._image.width // _SMOOTH, self._image.height // _SMOOTH)
        self._image.resize(size, Image.Resampling.BOX).save(content, "PNG")
        return content.getvalue()

    def _place(self, point: Point, origin: Point) -> Point:
        return (point[0] + origin[0]) * self._factor, (point[1] + origin[1]) * self._factor


def _dashed(line: Line) -> Iterator[list[Point]]:
    """The visible parts of a line."""
    if not line.dashes:
        yield line.points
        return
    number, left, part = 0, line.dashes[0], [line.points[0]]
    for (x0, y0), (x1, y1) in zip(line.points, line.points[1:]):
        length, done = math.hypot(x1 - x0, y1 - y0), 0.0
        while length - done > left:
            done += left
            part.append((x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length))
            if number % 2 == 0:
                yield part
            number += 1
            left, part = line.dashes[number % len(line.dashes)], part[-1:]
        left -= length - done
        part.append((x1, y1))
    if number % 2 == 0:
        yield part
