"""Writes docs/verified.md from the certificates in docs/certificates/: make verified

`accelerate-recipes verify recipes/mnist.py` writes certificate.json; copy it there as <name>.json.
"""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from accelerate_recipes.matrix import CONFIGS, MATRIX, RECIPES  # noqa: E402

CERTIFICATES, PAGE = ROOT / "docs" / "certificates", ROOT / "docs" / "verified.md"
NOT_SUPPORTED = "not supported"
WHAT = ("loss", "weights")
INTRODUCTION = """<!-- Written by docs/tools/catalogue.py: make verified -->
# What was verified where, and when

The first table shows which recipes give the result of one process under each config. To make a certificate:

```text
accelerate-recipes verify recipes/mnist.py
```

The command runs the recipe on one process and under each config, and compares losses, gradient norms and learning rates
of each step, evaluations and exported weights ([verify.md](verify.md)).
"""
RESULTS = """
"Not supported": before it changes anything, the run says why and what to type. A certificate from before 2026-11-30 may
say that `deepspeed_zero2_bf16` differs: since that day, ZeRO begins bf16 training with exact weights. Then the losses
of all recipes differ from one process in bf16 by less than 1 %.
"""
NO_GPU = """
**No certificate is from a GPU yet.** CPU processes that communicate through gloo stand in for GPUs; fp16 runs in
float32 there. Every recipe has a certificate.
"""
DIFFERENCES = """
## How far from one process

The largest relative difference of a run's losses and weights (‖w − w₀‖ / ‖w₀‖ of a tensor), and its recipe, without
those that differ. [docs/certificates/](certificates/) has each run of each recipe.

| run | recipes | losses | weights | same only to rounding errors |
| --- | ---: | --- | --- | --- |
"""


def catalogue(certificates: dict[str, dict[str, Any]]) -> str:
    """The page. `certificates`: {name: content of certificate.json}."""
    on_gpu = any(_hardware(one)[1] for one in certificates.values())
    lines = [INTRODUCTION if on_gpu else INTRODUCTION + NO_GPU, "## Each recipe under each config", "", *_results()]
    lines += [RESULTS, "## Certificates", ""]
    for versions in dict.fromkeys(map(_versions, certificates.values())):
        names = [f"`{name}`" for name, one in certificates.items() if _versions(one) == versions]
        lines += [f"{'All' if len(names) == len(certificates) else ', '.join(names)} with {versions}.", ""]
    lines += [
        "| certificate | command | made | SHA-256 of the script |",
        "| --- | --- | --- | --- |",
        *(_row(name, one) for name, one in certificates.items()),
        DIFFERENCES.rstrip("\n"),
        *_differences(certificates),
    ]
    return "\n".join([*lines, "", *_messages(certificates)]) + "\n"


def _results() -> list[str]:
    """The rows of the table of recipes and configs; configs with the same results share one."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for config in CONFIGS:
        found = tuple(_recipes(config, result) for result in ("differs", NOT_SUPPORTED))
        groups.setdefault(found, []).append(f"`{config}`")
    rows = sorted(groups.items(), key=lambda group: -len(group[1]))
    head = ["| config | recipes that differ | recipes that are not supported |", "| --- | --- | --- |"]
    return head + [f"| {', '.join(configs)} | {' | '.join(found)} |" for found, configs in rows]


def _recipes(config: str, result: str) -> str:
    named = [recipe for recipe in RECIPES if MATRIX[recipe, config].result == result]
    others = [recipe for recipe in RECIPES if recipe not in named]
    shown = ", ".join(f"`{recipe}`" for recipe in min(named, others, key=len))
    return f"all but {shown}" if len(others) < len(named) else shown or "none"


def _row(name: str, one: dict[str, Any]) -> str:
    script = ROOT / one["script"]
    is_today = script.is_file() and hashlib.sha256(script.read_bytes()).hexdigest() == one["sha256"]
    digest = f"{one['sha256'][:16]}…: {'that of today' if is_today else 'changed since'}"
    command = " ".join([one["script"], *one["flags"]])
    return f"| {name} | `{command}` | {one['made'][:10]} | {digest} |"


def _differences(certificates: dict[str, dict[str, Any]]) -> list[str]:
    """The row of each run, over all recipes."""
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for name, one in certificates.items():
        for row in one["rows"][1:]:  # the first is the reference
            if row["difference"] and not row["verdict"].startswith("DIFFERS"):
                runs.setdefault(re.sub(r"killed at step \d+", "killed", row["name"]), {})[name] = row
    rows = []
    for run, found in runs.items():
        cells = [_largest({name: row["difference"].get(what) for name, row in found.items()}) for what in WHAT]
        rounding = [f"`{name}`" for name, row in found.items() if row["verdict"] == "same, to rounding errors"]
        rows.append(f"| {run} | {len(found)} | {' | '.join(cells)} | {', '.join(rounding)} |")
    return rows


def _largest(values: dict[str, float | None]) -> str:
    """The largest value, and the recipe that it is from unless it is 0."""
    value, name = max((value, name) for name, value in values.items() if value is not None)
    return f"{value:.1e}, `{name}`" if value else "0"


def _messages(certificates: dict[str, dict[str, Any]]) -> list[str]:
    """The lines with which runs ended that differ or are not supported; "..." stands for the class of a model."""
    ended: dict[str, list[str]] = {}
    for name, one in certificates.items():
        for row in one["rows"]:
            verdict, _, line = row["verdict"].partition(": ")
            if verdict == NOT_SUPPORTED:
                ended.setdefault(f"... {line.partition(' ')[2]}", []).append(f"`{row['name']}`")
            elif verdict == "DIFFERS":
                ended.setdefault(line, []).append(f"`{name}` under `{row['name']}`")
    lines = ["## Messages of the others", "", "| runs | message |", "| --- | --- |"]
    return lines + [f"| {', '.join(sorted({*runs}))} | {line.replace('|', '/')} |" for line, runs in ended.items()]


def _versions(one: dict[str, Any]) -> str:
    packages = ", ".join(f"{package} {number}" for package, number in one["versions"].items())
    return f"{packages}; {_hardware(one)[0]}; {one['steps']} steps"


def _hardware(one: dict[str, Any]) -> tuple[str, bool]:
    """(the machine, whether it has a GPU). Earlier certificates do not name it, but torch's build does."""
    hardware = (one.get("reference") or {}).get("hardware") or {}
    if gpus := hardware.get("gpus"):
        return ", ".join(gpus), True
    if hardware:
        return f"CPU, {hardware['cores']} cores", False
    return "CPU" if one["versions"]["torch"].endswith("+cpu") else "not recorded", False


def read() -> dict[str, dict[str, Any]]:
    """{name: certificate}, sorted by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(CERTIFICATES.glob("*.json"))}


if __name__ == "__main__":
    if unfit := [name for name, one in read().items() if not {"rows", "made", "versions"} <= one.keys()]:
        sys.exit(f"no certificates: {', '.join(unfit)}")
    PAGE.write_text(catalogue(read()))
