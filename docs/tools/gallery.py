"""Runs each recipe as its docstring says, and writes docs/recipes/<name>.md and <name>.svg from what the run left.

    python docs/tools/gallery.py            # make gallery
    python docs/tools/gallery.py mnist
    python docs/tools/gallery.py --data     # what the recipe says and the model gets alone, without runs

A run that is done is in outputs/gallery/<name>, and is not made again: remove the folder to make it again.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from accelerate_recipes.catalog import find_recipe, read_recipe  # noqa: E402
from docs.tools.curves import curves  # noqa: E402

RUNS, PAGES = ROOT / "outputs" / "gallery", ROOT / "docs" / "recipes"
PRINTED, LOAD = "printed.txt", "load.txt"
CURVES, DATA, PRINTS = "## Curves\n", "## What the model gets\n", "## What it prints\n"
LONGEST, WIDEST = 40, 118  # lines and characters of what a run prints
IMAGES = {"pictures.png": "What the exported model makes: a column for each class",
            "confusion.png": "A row for each class, a column for each predicted one"}  # fmt: skip


def run(recipe: dict[str, str]) -> Path:
    """Runs the command of a recipe to its end, unless that was done. Returns the output folder."""
    folder = RUNS / recipe["name"]
    if read_card(folder).get("status") == "done":
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    words = [*shlex.split(recipe["command"]), "--output_dir", str(folder.relative_to(ROOT))]
    print(shlex.join(words), flush=True)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *words[2:]]
    done = subprocess.run(launch, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    (folder / PRINTED).write_text(done.stdout)
    (folder / LOAD).write_text(f"{os.getloadavg()[2]:.0f}")
    return folder


def read_card(folder: Path) -> dict[str, Any]:
    """The run card; empty if there is none."""
    path = folder / "run.json"
    return json.loads(path.read_text()) if path.exists() else {}


def printed(folder: Path) -> str:
    """What a run prints, without most of its steps, as a block of Markdown."""
    lines = (folder / PRINTED).read_text().replace("outputs/gallery/", "outputs/").strip().splitlines()
    steps = [number for number, line in enumerate(lines) if line.startswith("step ")]
    if len(steps) > 5:
        lines[steps[2] : steps[-2]] = ["…"]
    if len(lines) > LONGEST:
        lines[LONGEST // 2 : -LONGEST // 2] = ["…"]
    rows = [row for line in lines for row in wrap(line, WIDEST, subsequent_indent="    ") or [""]]
    return "\n".join(["```", *rows, "```"])


def seen(recipe: dict[str, str]) -> str:
    """What `accelerate-recipes data` says of a recipe, as a section of Markdown."""
    command = f"accelerate-recipes data recipes/{recipe['name']}.py --samples 2"
    words = [sys.executable, "-m", *shlex.split(command.replace("-", "_", 1))]
    lines = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    rows = [row for line in lines for row in wrap(line, WIDEST, subsequent_indent="    ", max_lines=4) or [""]]
    return f"{DATA}\n```\n$ {command}\n" + "\n".join(rows) + "\n```\n\n[How data are read](../data.md)\n\n"


def with_data(text: str, recipe: dict[str, str]) -> str:
    """A page with what the model gets, before what the run prints."""
    end = text.index(PRINTS)
    start = text.index(DATA) if DATA in text else end
    return text[:start] + seen(recipe) + text[end:]


def head(recipe: dict[str, str]) -> str:
    """What the recipe's docstring says: a page before its curves."""
    parts = [
        f"<!-- Written by docs/tools/gallery.py from a run: make gallery -->\n# {recipe['name']}",
        recipe["what"],
        f"```bash\n{recipe['command']}\n```",
        f"**Data:** {recipe['data']}\n\n**Expect:** {recipe['expect']}\n\n**Time:** {recipe['time']}",
        f"[The recipe](../../recipes/{recipe['name']}.py) · [more data and flags](../recipes.md) · "
        "[under which configs it gives one result](../verified.md)",
    ]
    return "\n\n".join(parts) + "\n\n"


def page(recipe: dict[str, str], folder: Path) -> str:
    """The page of a recipe."""
    card = read_card(folder)
    date = datetime.fromtimestamp((folder / "run.json").stat().st_mtime, UTC).date()
    hardware = card["hardware"]
    machine = ", ".join(hardware["gpus"]) or f"CPU, {hardware['cores']} cores"
    versions = ", ".join(f"{name} {number}" for name, number in card["versions"].items())
    metrics = {name: value for name, value in card["last_metrics"].items() if name.startswith("eval/")}
    rows = {
        "date": f"{date}, commit {(card['git_commit'] or 'unknown').replace('-dirty', ' and changes')}",
        "machine": machine,
        "processes": f"{card['num_processes']}, {card['parallelism']}, {card['precision']}",
        "steps, time": f"{card['num_steps']:,} steps in {card['wall_seconds']:.0f} s, "
        f"at a load of {(folder / LOAD).read_text()} processes",
        "versions": versions,
        "first steps": f"{card['checked_steps']} compared with one process: the same",
        "last evaluation": ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in metrics.items()),
    }
    parts = [f"{head(recipe)}{CURVES}\n![Loss and evaluation of this run]({recipe['name']}.svg)"]
    for name, caption in IMAGES.items():
        if (folder / name).exists():
            shutil.copy(folder / name, PAGES / f"{recipe['name']}.png")
            parts.append(f"![{caption}]({recipe['name']}.png)\n\n{caption}.")
    parts += [f"{PRINTS}\n{printed(folder)}", "## The run\n\n| | |\n| --- | --- |\n"]
    parts[-1] += "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return with_data("\n\n".join(parts) + "\n", recipe)


def main(names: list[str]) -> None:
    """Runs the recipes of these names, by default all, and writes their pages."""
    PAGES.mkdir(exist_ok=True)
    is_data, names = "--data" in names, [name for name in names if name != "--data"]
    paths = [find_recipe(name) for name in names] or sorted(ROOT.glob("recipes/*.py"))
    for path in paths:
        recipe = read_recipe(path)
        if is_data:
            file = PAGES / f"{recipe['name']}.md"
            text = file.read_text()
            file.write_text(with_data(head(recipe) + text[text.index(CURVES) :], recipe))
            continue
        folder = run(recipe)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        (PAGES / f"{recipe['name']}.svg").write_text(curves(records))
        (PAGES / f"{recipe['name']}.md").write_text(page(recipe, folder))


if __name__ == "__main__":
    main(sys.argv[1:])
