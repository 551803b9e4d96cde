"""Writes docs/verified.md from the certificates in docs/certificates/: make verified

`accelerate-recipes verify recipes/mnist.py` writes certificate.json; copy it there as <name>.json.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from accelerate_recipes.matrix import CONFIGS, MATRIX, RECIPES  # noqa: E402

CERTIFICATES, PAGE = ROOT / "docs" / "certificates", ROOT / "docs" / "verified.md"
NOT_SUPPORTED = "not supported"
INTRODUCTION = """<!-- Written by docs/tools/catalogue.py: make verified -->
# What was verified where, and when

The first table sums up which recipes give the result of one process under which config. The certificates below it have
the numbers. To make one:

```text
accelerate-recipes verify recipes/mnist.py
```

The command runs the recipe on one process and under each config, and compares losses, gradient norms and learning rates
of each step, evaluations and exported weights ([verify.md](verify.md)). A number is the largest relative difference
from one process; for weights the largest ‖w − w₀‖ / ‖w₀‖ of all tensors. [docs/certificates/](certificates/) has the
files.
"""
RESULTS = """
"differs": DeepSpeed's bf16 rounds at different points than autocast, 2.3 % for `image_classification.py`. If the
gradient of the second step differs by 2 to 10 %, the parity check stops the run. "not supported": before it changes
anything, the run says why and what to type.
"""
NO_GPU = """
**No certificate is from a GPU yet.** CPU processes that communicate through gloo stand in for GPUs; fp16 runs in
float32 there. Only the tests compare recipes without a certificate (`tests/process/test_one_result.py`).
"""


def catalogue(certificates: dict[str, dict[str, Any]]) -> str:
    """The page. `certificates`: {name: content of certificate.json}."""
    on_gpu = any(_hardware(one)[1] for one in certificates.values())
    introduction = INTRODUCTION if on_gpu else INTRODUCTION + NO_GPU
    lines = [introduction, "## Each recipe under each config", "", *_results(), RESULTS, "## Certificates", ""]
    versions = {_versions(one) for one in certificates.values()}
    lines += [f"All were made with {versions.pop()}.", ""] if len(versions) == 1 else []
    lines += [
        "| recipe | date | hardware | runs | differ | not supported |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for name, one in certificates.items():
        verdicts = [row["verdict"] for row in one["rows"]]
        counts = [sum(each.startswith(word) for each in verdicts) for word in ("", "DIFFERS", NOT_SUPPORTED)]
        numbers = " | ".join(map(str, counts))
        lines.append(f"| [{name}](#{name}) | {one['made'][:10]} | {_hardware(one)[0]} | {numbers} |")
    for name, one in certificates.items():
        lines += ["", f"## {name}", "", *_part(one, with_versions=bool(versions))]
    return "\n".join(lines) + "\n"


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


def _part(one: dict[str, Any], with_versions: bool) -> list[str]:
    script = ROOT / one["script"]
    is_today = script.is_file() and hashlib.sha256(script.read_bytes()).hexdigest() == one["sha256"]
    flags = f" with `{' '.join(one['flags'])}`" if one["flags"] else ""
    lines = [
        f"`{one['script']}`{flags}, {one['steps']} steps, on {_hardware(one)[0]}, {one['made']}."
        f"{f' {_versions(one)}.' if with_versions else ''} SHA-256 of the script {one['sha256'][:16]}…: "
        f"{'that of today' if is_today else 'changed since'}.",
        "",
        "| config | processes | loss | gradient | weights | evaluation | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    refused: dict[str, list[str]] = {}
    for row in one["rows"]:
        if row["verdict"].startswith(NOT_SUPPORTED):
            refused.setdefault(row["verdict"].partition(": ")[2], []).append(f"`{row['name']}`")
            continue
        found = row["difference"] or {}
        numbers = [_number(found.get(name)) for name in ("loss", "gradient", "weights", "evaluation")]
        verdict = row["verdict"].replace("|", "\\|")
        lines.append(f"| {row['name']} | {row['processes'] or '–'} | {' | '.join(numbers)} | {verdict} |")
    rows = [f"- {', '.join(names)}: {line}" for line, names in refused.items()]
    return [*lines, "", "Not supported:", "", *rows] if rows else lines


def _versions(one: dict[str, Any]) -> str:
    return ", ".join(f"{package} {number}" for package, number in one["versions"].items())


def _hardware(one: dict[str, Any]) -> tuple[str, bool]:
    """(the machine, whether it has a GPU). Earlier certificates do not name it, but torch's build does."""
    hardware = (one.get("reference") or {}).get("hardware") or {}
    if gpus := hardware.get("gpus"):
        return ", ".join(gpus), True
    if hardware:
        return f"CPU, {hardware['cores']} cores", False
    return "CPU" if one["versions"]["torch"].endswith("+cpu") else "not recorded", False


def _number(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}"


def read() -> dict[str, dict[str, Any]]:
    """{name: certificate}, sorted by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(CERTIFICATES.glob("*.json"))}


if __name__ == "__main__":
    if unfit := [name for name, one in read().items() if not {"rows", "made", "versions"} <= one.keys()]:
        sys.exit(f"no certificates: {', '.join(unfit)}")
    PAGE.write_text(catalogue(read()))
