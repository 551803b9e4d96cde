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
INTRODUCTION = """<!-- Written by docs/tools/catalogue.py: make verified -->
# What was verified where, and when

The first table is the summary. Below it are the certificates. To make one:

```text
accelerate-recipes verify recipes/mnist.py
```

The command runs the recipe in one process, then under each config, and compares the loss, gradient norm and learning
rate of each step, the evaluations, and the exported weights. [verify.md](verify.md) says what "same" means. A number is
the largest relative difference from one process; for weights the largest ‖w − w₀‖ / ‖w₀‖ of all tensors. The files are
in [docs/certificates/](certificates/).
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
    lines = [introduction, "## Each recipe under each config", ""]
    lines.append(f"| config | {' | '.join(f'`{recipe}`' for recipe in RECIPES)} |")
    lines.append("| --- |" + " --- |" * len(RECIPES))
    lines += [f"| {one} | {' | '.join(MATRIX[recipe, one].result for recipe in RECIPES)} |" for one in CONFIGS]
    lines += [RESULTS, "## Certificates", "", "| recipe | date | hardware | runs | differ | not supported |"]
    lines.append("| --- | --- | --- | ---: | ---: | ---: |")
    for name, one in certificates.items():
        verdicts = [row["verdict"] for row in one["rows"]]
        counts = [sum(each.startswith(word) for each in verdicts) for word in ("", "DIFFERS", "not supported")]
        numbers = " | ".join(map(str, counts))
        lines.append(f"| [{name}](#{name}) | {one['made'][:10]} | {_hardware(one)[0]} | {numbers} |")
    for name, one in certificates.items():
        lines += ["", f"## {name}", "", *_part(one)]
    return "\n".join(lines) + "\n"


def _part(one: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{package} {number}" for package, number in one["versions"].items())
    script = ROOT / one["script"]
    is_today = script.is_file() and hashlib.sha256(script.read_bytes()).hexdigest() == one["sha256"]
    flags = f" with `{' '.join(one['flags'])}`" if one["flags"] else ""
    lines = [
        f"`{one['script']}`{flags}, {one['steps']} steps, on {_hardware(one)[0]}, {one['made']}. "
        f"{versions}. SHA-256 of the script {one['sha256'][:16]}…: {'that of today' if is_today else 'changed since'}.",
        "",
        "| config | processes | loss | gradient | weights | evaluation | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in one["rows"]:
        found = row["difference"] or {}
        numbers = [_number(found.get(name)) for name in ("loss", "gradient", "weights", "evaluation")]
        verdict = row["verdict"].replace("|", "\\|")
        lines.append(f"| {row['name']} | {row['processes'] or '–'} | {' | '.join(numbers)} | {verdict} |")
    return lines


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
