"""An HTML page of what a model gets, which loads nothing."""

from html import escape
from pathlib import Path
from string import Template
from typing import Any

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.data.show import facts

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,"><title>$title</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 1em auto; padding: 0 1em; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: 16px; }
.wide { grid-column: 1 / -1; } .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
section { border: 1px solid #8886; border-radius: 6px; padding: 8px 12px; overflow-wrap: anywhere; }
h3 { margin: 0; font-size: 1em; } h4 { margin: 0.5em 0 0; font-size: 0.85em; opacity: 0.7; }
pre { white-space: pre-wrap; margin: 0; font-size: 13px; } img { image-rendering: pixelated; display: block; }
mark { background: #2da44e44; color: inherit; border-radius: 3px; } hr { border: 0; border-top: 2px dashed #8888; }
td { padding-right: 12px; font-variant-numeric: tabular-nums; } .bar { background: #4078c0; height: 0.8em; }
</style></head><body><h1>$title</h1><ul>$facts</ul>$lengths<h2>The first samples of the first step</h2>$legend
<div class="samples">$samples</div></body></html>
""")


def check(path: Path) -> None:
    """Raises UsageError unless a page can be written there."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: expected the path of a file in a folder that is there, such as data.html")


def write(path: Path, title: str, found: dict[str, Any]) -> None:
    """Writes the facts and samples of `look`. Raises UsageError if it cannot."""
    has_marks = any(run[1] for sample in found["samples"] for part in sample["parts"] for run in part.get("tokens", ()))
    text = PAGE.substitute(
        title=escape(title),
        facts="".join(f"<li>{escape(line)}</li>" for line in facts(found)),
        lengths="".join(_histogram(name, bars, found["looked_at"]) for name, bars in found["lengths"].items()),
        legend="<p>The model learns to write what is <mark>marked</mark>.</p>" if has_marks else "",
        samples="".join(map(_sample, found["samples"])),
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}") from None


def _histogram(name: str, bars: list[Any], looked_at: int) -> str:
    most = max(number for _, _, number in bars)
    rows = "".join(
        f"<tr><td>{first:,} to {last:,}</td><td>{number:,}</td>"
        f'<td><div class="bar" style="width: {300 * number // most}px"></div></td></tr>'
        for first, last, number in bars
    )
    return f"<h2>Lengths of {escape(name)} ({looked_at:,} samples)</h2><table>{rows}</table>"


def _sample(sample: dict[str, Any]) -> str:
    parts = [_part(part) for part in sample["parts"]]
    columns = [part for part in sample["parts"] if "tokens" in part]
    kind = "pair" if len(columns) == 2 else ""  # side by side
    wide = " wide" if columns else ""
    return (
        f'<section class="{wide}"><h3>sample {sample["id"]:,}</h3><div class="{kind}">{"".join(parts)}</div></section>'
    )


def _part(part: dict[str, Any]) -> str:
    head = f"<h4>{escape(part['name'])}</h4>"
    if "tokens" not in part:
        images = "".join(f'<img alt="" src="data:image/png;base64,{one}">' for one in part.get("pictures", ()))
        return f"<div>{head}{images}<pre>{escape(part['text'])}</pre></div>"
    text = ""
    for words, is_trained, begins in part["tokens"]:
        text += "<hr>" * begins + (f"<mark>{escape(words)}</mark>" if is_trained else escape(words))
    return f"<div>{head}<pre>{text}</pre></div>"
