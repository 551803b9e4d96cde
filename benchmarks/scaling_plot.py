"""The plot of benchmarks/scaling.py, as SVG."""

from collections.abc import Iterator, Mapping
from statistics import median

Speedups = Mapping[int, list[float]]  # {number of processes: times one process, in each round}

# A colour that can be read on white and on black, and a mark.
LOOKS = {
    "ddp": ("#3b82f6", "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0"),
    "fsdp2": ("#f97316", "m-4 -4h8v8h-8z"),
    "deepspeed_zero2": ("#10b981", "m0 -5l5 5l-5 5l-5 -5z"),
    "tensor_parallel": ("#d946ef", "m0 -5l5 9h-10z"),
}
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #333 }
path { fill: none; stroke-width: 1.5 }
.grid { stroke: #8886 }
.ideal { stroke: #888; stroke-dasharray: 4 4 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }
</style>"""
WIDTH, HEIGHT, LEFT, TOP = 150, 140, 60, 76  # of a panel, and of the margins


def plot(panels: Mapping[tuple[str, str], Mapping[str, Speedups]], ideal: Mapping[int, int]) -> str:
    """An SVG file: a column of panels for each task, a row for each mode.

    Args:
        panels: {(title of the task, mode): {config: speedups}}.
        ideal: {number of processes: times one process without any loss}.
    """
    titles, modes = (list(dict.fromkeys(key[index] for key in panels)) for index in range(2))
    fastest = [times for lines in panels.values() for speedups in lines.values() for times in speedups.values()]
    top = round(max(*(max(times) for times in fastest), *ideal.values()) + 0.4)
    step_x, step_y = WIDTH + 50, HEIGHT + 60
    parts = [STYLE]
    for column, title in enumerate(titles):
        x = LEFT + column * step_x
        for line, words in enumerate(title.split(", ")):
            parts.append(f'<text x="{x + WIDTH / 2}" y="{18 + 16 * line}" text-anchor="middle">{words}</text>')
        for row, mode in enumerate(modes):
            inside = "".join(_panel(panels[title, mode], ideal, top))
            parts.append(f'<g transform="translate({x} {TOP + row * step_y})">{inside}</g>')
    for row, mode in enumerate(modes):
        middle = TOP + row * step_y + HEIGHT / 2
        for words, x in ((f"{mode} scaling", 14), ("times one process", 30)):
            parts.append(f'<text transform="translate({x} {middle}) rotate(-90)" text-anchor="middle">{words}</text>')
    parts += _legend({config for lines in panels.values() for config in lines}, TOP + len(modes) * step_y)
    size = f"0 0 {LEFT + len(titles) * step_x} {TOP + len(modes) * step_y + 20}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}">\n' + "\n".join(parts) + "\n</svg>\n"


def _panel(lines: Mapping[str, Speedups], ideal: Mapping[int, int], top: int) -> Iterator[str]:
    sizes = list(ideal)

    def at(size: int, times: float) -> str:
        return f"{WIDTH * sizes.index(size) / (len(sizes) - 1):.1f} {HEIGHT * (1 - times / top):.1f}"

    for value in range(top + 1):
        height = HEIGHT * (1 - value / top)
        yield f'<path class="grid" d="M0 {height:.1f}H{WIDTH}"/>'
        yield f'<text x="-8" y="{height + 4:.1f}" text-anchor="end">{value}</text>'
    for size in sizes:
        words = size if size != sizes[-1] else f"{size} processes"
        yield f'<text x="{at(size, 0).split()[0]}" y="{HEIGHT + 18}" text-anchor="middle">{words}</text>'
    yield f'<path class="ideal" d="M{"L".join(at(*point) for point in ideal.items())}"/>'
    for config, speedups in lines.items():
        colour, mark = LOOKS[config]
        middle = [at(size, median(times)) for size, times in speedups.items()]
        spreads = [f"M{at(size, min(times))}L{at(size, max(times))}" for size, times in speedups.items()]
        yield f'<path stroke="{colour}" d="M{"L".join(middle)}{"".join(spreads)}"/>'
        yield f'<path style="fill:{colour}" d="{"".join(f"M{point}{mark}" for point in middle)}"/>'


def _legend(configs: set[str], y: int) -> Iterator[str]:
    looks = {config: look for config, look in LOOKS.items() if config in configs}
    entries = [(config, f'style="fill:{colour}"', mark) for config, (colour, mark) in looks.items()]
    x = LEFT
    for words, look, mark in [*entries, ("all cores, no loss", 'class="ideal"', "m-12 0h20")]:
        yield f'<path {look} d="M{x} {y}{mark}"/><text x="{x + 12}" y="{y + 4}">{words}</text>'
        x += 36 + 7 * len(words)
