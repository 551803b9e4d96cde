"""Which switches of gpt2.py are fastest on this GPU: runs combinations one after the other, each in a fresh process.

    python benchmarks/gpt2_variants.py
    python benchmarks/gpt2_variants.py --variants "attention=cudnn" "batch_size=64 loss_chunk=16384"

A combination names the switches that differ from gpt2.py's defaults. All other flags go to gpt2.py. Each finished
combination is a line on stderr; the table, best first, is on stdout. One that fails, for example because memory
runs out, gets the reason instead of figures. The best runs once more, in more rounds, beside the goals.

Needs a GPU. `--layers 1 --heads 2 --width 64 --context 32 --vocabulary 256 --batch_size 4` shows without one that
the script runs. NOT YET RUN ON A GPU.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Each of the first changes one thing; the last ones take steps together. Autotuning takes minutes, so it is the last.
VARIANTS = (
    "",
    "residual=bf16",
    "attention=cudnn",
    "batch_size=64",
    "batch_size=64 loss_chunk=16384",
    "residual=bf16 attention=cudnn",
    "residual=bf16 attention=cudnn batch_size=64",
    "residual=bf16 attention=cudnn batch_size=128 loss_chunk=16384",
    "residual=bf16 attention=cudnn batch_size=64 inductor=max-autotune-no-cudagraphs",
)
GOAL_MFU, GOAL_RATIO = 0.5, 0.99
HEAD = (
    "| switches of gpt2.py | tokens per second | MFU | peak GiB | ratio to by hand, median (min to max) |\n"
    "| --- | ---: | ---: | ---: | ---: |"
)


def run(variant: str, flags: list[str]) -> dict[str, Any]:
    """The figures of our loop in a process of its own, or {"failed": reason}."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, str(Path(__file__).with_name("gpt2.py")), *flags]
        command += [f"--{switch}" for switch in variant.split()]
        process = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True)
        if process.returncode != 0:
            return {"failed": reason(process.stderr)}
        return json.loads(figures.read_text())["ours"]


def reason(errors: str) -> str:
    """The line of an error's output that names the error: torch.compile prints advice after it."""
    lines = errors.strip().splitlines() or ["no output"]
    named = [line for line in lines if re.match(r"(error:|[\w.]*(Error|Exception)\b)", line)]
    return (named or lines)[-1][:200]


def row(variant: str, figures: dict[str, Any]) -> str:
    """A line of the table."""
    name = variant or "defaults"
    if "failed" in figures:
        return f"| {name} | failed: {figures['failed'].replace('|', '/')} | | | |"
    mfu = "unknown" if figures["mfu"] is None else f"{figures['mfu']:.1%}"
    ratios = figures["ratios"]
    return (
        f"| {name} | {figures['tokens_per_second']:,.0f} | {mfu} | {figures['peak_gib']:.2f} "
        f"| {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
    )


def goals(figures: dict[str, Any]) -> list[str]:
    """The best combination beside the goals."""
    mfu, ratio = figures["mfu"], statistics.median(figures["ratios"])
    met = "not known" if mfu is None else "met" if mfu >= GOAL_MFU else "missed"
    return [
        f"- MFU of the best: {'unknown' if mfu is None else f'{mfu:.1%}'}; goal: {GOAL_MFU:.0%} or more; {met}",
        f"- Its ratio to the loop by hand: {ratio:.3f}; goal: {GOAL_RATIO} or more; "
        + ("met" if ratio >= GOAL_RATIO else "missed"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, metavar="SWITCHES")
    parser.add_argument("--steps", default="40")
    parser.add_argument("--rounds", default="4", help="for the best combination; the others get one")
    arguments, others = parser.parse_known_args()
    flags, results = ["--steps", arguments.steps, *others], {}
    for variant in dict.fromkeys(arguments.variants):
        results[variant] = run(variant, [*flags, "--rounds", "1"])
        print(row(variant, results[variant]), file=sys.stderr, flush=True)
    done = [variant for variant in results if "failed" not in results[variant]]
    done.sort(key=lambda variant: -results[variant]["tokens_per_second"])
    print(f"\n## GPT-2, {date.today()}, torch {version('torch')}, `{' '.join(flags)}`\n")
    print(HEAD)
    for variant in [*done, *(variant for variant in results if variant not in done)]:
        print(row(variant, results[variant]))
    if not done:
        sys.exit("every combination failed")
    best = run(done[0], [*flags, "--rounds", arguments.rounds])
    print(f"\nThe best once more, in {arguments.rounds} rounds:\n\n{HEAD}\n{row(done[0], best)}\n")
    if "failed" not in best:
        print("\n".join(goals(best)))


if __name__ == "__main__":
    main()
