"""Prints the samples that a model gets: coloured on a terminal, with marks in a pipe."""

from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

BAR = 40  # characters of the longest bar
MOST_CHARACTERS = 1200  # of a sample's text
TRAINED = Style(color="green", bold=True)  # of tokens


def show(found: dict[str, Any]) -> None:
    """Prints the facts and samples of `look`."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in facts(found):
        console.print(line)
    for name, bars in found["lengths"].items():
        console.print(f"\nlengths of {name} ({found['looked_at']:,} samples)")
        most = max(number for _, _, number in bars)
        for first, last, number in bars:
            title = f"{first:,}" if first == last else f"{first:,} to {last:,}"
            console.print(f"{title:>16}  {'#' * -(-BAR * number // most):<{BAR}}  {number:,}")
    if has_marks(found):
        how = "green" if console.color_system else "«marked»"
        console.print(Text("\nthe model learns to write what is ").append(how, TRAINED))
    for sample in found["samples"]:
        console.print(f"\nsample {sample['id']:,}", style="bold")
        for part in sample["parts"]:
            if "tokens" in part:
                console.print(Text(f"{part['name']}: ").append(_text(console, part["tokens"])))
            else:
                more = " (--output shows it)" if "pictures" in part else ""
                console.print(f"{part['name']}: {part['text']}{more}")


def has_marks(found: dict[str, Any]) -> bool:
    """Whether a sample has tokens that the model learns to write."""
    return any(run[1] for sample in found["samples"] for part in sample["parts"] for run in part.get("tokens", ()))


def facts(found: dict[str, Any]) -> list[str]:
    """Lines about the data of a run, the sizes of the sets, and the contents of a batch."""
    lines = list(found["lines"])
    for name, sizes in found["sizes"].items():
        each = ", ".join(f"{source} {size:,}" if source else f"{size:,}" for source, size in sizes.items())
        lines.append(f"{name}: {each} samples")
    lines.append("batch: " + ", ".join(f"{name} {shape}" for name, shape in found["batch"].items()))
    for name, values in found["values"].items():
        each = ", ".join(f"{value}: {number:,}" for value, number in values)
        lines.append(f"{name} in {found['looked_at']:,} samples: {each}")
    return lines


def _text(console: Console, runs: list[list[Any]]) -> Text:
    text = Text()
    for words, is_trained, begins in runs:
        if begins:
            text.append("\n--- the next document in the block\n", Style(dim=True))
        marked = f"«{words}»" if is_trained and not console.color_system else words
        text.append(marked, TRAINED if is_trained else Style())
    if len(text) > MOST_CHARACTERS:
        text.truncate(MOST_CHARACTERS)
        text.append(" ... and more (--output shows all)", Style(dim=True))
    return text
