"""A plot of the losses as a PNG file, drawn without a plotting library."""

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 800, 450
LEFT, RIGHT, TOP, BOTTOM = 80, 780, 40, 400  # of the axes
SCALE = 2  # drawn this much larger and then reduced, which smooths the lines
COLOURS = {"train/loss": "#1f77b4", "eval/loss": "#d95f02"}
NUM_TICKS = 5

Points = list[tuple[float, float]]  # (step, loss)


def plot_losses(records: list[dict[str, Any]], path: Path) -> bool:
    """Draws training and evaluation loss over the steps.

    Args:
        records: lines of metrics.jsonl.
        path: the file to write.

    Returns:
        Whether there was a loss to draw.

    Raises:
        OSError: the file cannot be written.
    """
    series = {name: [(one["step"], one[name]) for one in records if one.get(name) is not None] for name in COLOURS}
    points = [point for line in series.values() for point in line]
    if not points:
        return False
    steps, losses = zip(*points)
    lowest, highest = min(losses), max(losses)
    if lowest == highest:
        lowest, highest = lowest - 1, highest + 1
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), "white")
    canvas = _Canvas(image, max(steps), lowest, highest)
    canvas.axes()
    for place, (name, line) in enumerate((name, line) for name, line in series.items() if line):
        canvas.line(line, COLOURS[name])
        canvas.text(LEFT + place * 120, TOP / 2, name, "lm", COLOURS[name])
    image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(path)
    return True


class _Canvas:
    """Axes from step 0 to the last step, and from the lowest to the highest loss."""

    def __init__(self, image: Image.Image, last_step: float, lowest: float, highest: float):
        self.draw, self.font = ImageDraw.Draw(image), ImageFont.load_default(13 * SCALE)
        self.last_step, self.lowest, self.highest = last_step, lowest, highest

    def axes(self) -> None:
        """Draws the grid, the numbers at it and the name of the horizontal axis."""
        for tick in range(NUM_TICKS + 1):
            step = self.last_step * tick / NUM_TICKS
            loss = self.lowest + (self.highest - self.lowest) * tick / NUM_TICKS
            x, y = self._place(step, loss)
            self._segment([(LEFT, y), (RIGHT, y)], "#dddddd", 1)
            self.text(LEFT - 8, y, f"{loss:.4g}", "rm")
            self.text(x, BOTTOM + 14, f"{step:,.0f}", "mm")
        self.text((LEFT + RIGHT) / 2, BOTTOM + 36, "optimizer step", "mm")

    def line(self, points: Points, colour: str) -> None:
        """Draws a line through the points, and a dot at each if they are few."""
        places = [self._place(*point) for point in points]
        self._segment(places, colour, 2)
        for x, y in places if len(places) <= 30 else ():
            self.draw.circle((x * SCALE, y * SCALE), 3 * SCALE, fill=colour)

    def text(self, x: float, y: float, text: str, anchor: str, colour: str = "#333333") -> None:
        """Writes at a place; `anchor` as in Pillow, "lm" for left, vertically in the middle."""
        self.draw.text((x * SCALE, y * SCALE), text, colour, self.font, anchor)

    def _place(self, step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * step / self.last_step
        return x, BOTTOM - (BOTTOM - TOP) * (loss - self.lowest) / (self.highest - self.lowest)

    def _segment(self, places: Points, colour: str, width: int) -> None:
        self.draw.line([(x * SCALE, y * SCALE) for x, y in places], colour, width * SCALE, joint="curve")
