"""The first steps of each recipe in one process, against those that docs/records/ holds: make upgrades

`python docs/tools/upgrades.py record newest` writes docs/records/newest/ with the installed versions; with `compare
newest` it prints a line for each of them, and ends with exit code 1 if one differs.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "records"
STEPS = "8"
RECIPES = {path.stem: [] for path in sorted((ROOT / "recipes").glob("*.py"))}
RECIPES["transformer_experts"] = ["--num_experts", "4"]
# Data that no version of Python changes, and nothing that takes time after the steps.
TEXT = ["--data", "LICENSE", "--context", "32", "--sample_tokens", "0"]
MORE = {
    "transformer": TEXT,
    "transformer_experts": TEXT,
    "text_classification": ["--data", "docs/records/texts.csv"],
    "token_classification": ["--data", "tests/data/tags.conll"],
    "masked_lm": ["--data", "LICENSE"],
    "embeddings": ["--data", "docs/records/pairs.csv"],
    "question_answering": ["--data", "tests/data/questions.jsonl"],
    "translation": ["--data", "docs/records/pairs.csv", "--source_column", "query", "--target_column", "document"],
    "finetune": ["--num_answers", "0"],
    "distillation": ["--num_answers", "0"],
    "preferences": ["--num_answers", "0"],
    "vision_language": ["--num_answers", "0"],
    "diffusion": ["--num_pictures", "0"],
}


def verify(name: str, *options: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs `accelerate-recipes verify` for a recipe."""
    script = RECORDS.parents[1] / "recipes" / f"{name.removesuffix('_experts')}.py"
    command = [sys.executable, "-m", "accelerate_recipes", "verify", str(script.relative_to(ROOT)), *options]
    return subprocess.run([*command, *(["--", *flags] if flags else [])], cwd=ROOT, capture_output=True, text=True)


def record(kind: str, names: list[str]) -> int:
    """Writes the records of one kind, such as those of the newest versions: all, or some. Returns the exit code."""
    folder = RECORDS / kind
    folder.mkdir(exist_ok=True, parents=True)
    for name, flags in [each for each in RECIPES.items() if not names or each[0] in names]:
        run = verify(
            name, "--record", str(folder / f"{name}.json"), "--steps", STEPS, flags=(*flags, *MORE.get(name, []))
        )
        print(run.stdout.strip() or run.stderr.strip(), flush=True)
        if run.returncode:
            return run.returncode
    return 0


def compare(kind: str) -> int:
    """Prints a row of Markdown for each record. Returns 1 if a recipe differs, or does not run."""
    is_bad = False
    print("| record | loss | gradient | weights | result | other versions |\n| --- | ---: | ---: | ---: | --- | --- |")
    for path in sorted((RECORDS / kind).glob("*.json")):
        place = path.relative_to(RECORDS).with_suffix("")
        run = verify(path.stem, "--against", str(path), "--json")
        is_bad |= run.returncode != 0
        try:
            found: dict[str, Any] = json.loads(run.stdout)
        except ValueError:
            print(f"| {place} | | | | {run.stderr.strip().splitlines()[-1]} | |", flush=True)
            continue
        columns = [
            max((row["difference"] for row in found["rows"] if row["name"] == name), default=0.0)
            for name in ("train/loss", "grad_norm")
        ]
        weights = [max(found["weights"].values())] if found["weights"] else []  # an older record has none to compare
        numbers = [*(f"{value:.1e}" for value in (*columns, *weights)), "–"][:3]
        others = ", ".join(f"{name} {old} → {new}" for name, (old, new) in found["versions"].items())
        print(f"| {place} | {' | '.join(numbers)} | {found['verdict']} | {others} |", flush=True)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(record(sys.argv[2], sys.argv[3:]) if sys.argv[1] == "record" else compare(sys.argv[2]))
