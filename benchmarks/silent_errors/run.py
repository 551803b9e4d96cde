"""Plants each error of the literature on silent errors in a small recipe, and writes down what finds it.

    python benchmarks/silent_errors/run.py                    # docs/planted-errors.md: all errors, and runs without any
    python benchmarks/silent_errors/run.py --only late_element --only wrapper_left_out
    python benchmarks/silent_errors/run.py --clean            # the runs without errors alone
    python benchmarks/silent_errors/run.py --large --only wrapper_left_out    # 134 million weights

Each run is a real one: the launcher's processes, forked as the tests fork them. `--output FILE` writes the tables into
FILE, between the two lines BEGIN and END; without it they are printed.
"""

import argparse
import json
import re
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests"), str(Path(__file__).parent)]

import framework  # noqa: E402, F401  # fills FAULTS
import mistakes  # noqa: E402, F401
from faults import FAULTS, OURS, TRAINCHECK, TTRACE, Fault  # noqa: E402

from accelerate_recipes.verify.differences import compare  # noqa: E402
from support.launching import fork  # noqa: E402
from support.recipes import BF16_CONFIGS, FLAGS, FLOAT32_CONFIGS, RECIPES, cell  # noqa: E402
from support.runs import Run  # noqa: E402

RECIPE = "benchmarks/silent_errors/recipe.py"
LARGE = " --hidden 768 --layers 12 --vocabulary 32000 --context 32 --max_steps 8 --hang_timeout 600"
BEGIN, END = "<!-- Written by benchmarks/silent_errors/run.py -->\n", "<!-- End of the tables -->\n"
NEVER, HARMLESS, CANNOT, VERIFY = "**never**", "harmless", "cannot occur", "by verify, of as many steps"
# Lines of each run: they tell of no error.
USUAL = re.compile(r"step \d+/|done in|\d[\d,]* (training samples|process)|checked \d+ steps|$|\[rank|NOTE|W\d{4}")
# Lines of a run that goes on, which a run without an error must not print.
ALARMS = re.compile(
    "no (weight|step.*) has changed|is zero in each record|no layer computes in 16 bits|another result|"
    "random numbers in evaluation, too"
)
# What the columns "planted under" and "found" say already.
PREFIX = re.compile(r"error: (.* does not give the result of one process: in step \d+, )?")
TITLES = {
    TRAINCHECK: "Errors of TrainCheck",
    TTRACE: "Errors of TTrace's kinds",
    OURS: "Others of the same kinds",
}
HEADER = (
    "| error | source | planted under | found | line | place | cause | s |\n"
    "| --- | --- | --- | --- | --- | --- | --- | ---: |"
)

SUMS = (
    "| | reports | of them cannot occur, or harmless | found, of the others | planted | by verify alone | never "
    "| place named | cause true, not true, none |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


@dataclass(frozen=True)
class Outcome:
    """What a run with an error showed.

    Attributes:
        found: when: "before training", "in step 1", "after step 6", "a line at the start", ...; or one of those above;
            after "unchecked, " if the first steps were not compared with one process.
        text: of the lines that tell of it.
        place: whether they name a module or weight in which the error is; "–" if it is in no single one.
        cause: whether they give the true cause; "–" if they give none.
        seconds: from the start of the processes to their end.
    """

    found: str
    text: str = ""
    place: str = "–"
    cause: str = "–"
    seconds: float = 0.0

    @property
    def is_found(self) -> bool:
        return self.found.removeprefix("unchecked, ") not in (NEVER, HARMLESS, CANNOT, VERIFY)


def launched(config: str, flags: str, folder: Path) -> Run:
    return fork(folder, config, RECIPE, flags + FLAGS.get(config, ""), succeeds=False)


@cache
def clean_lines(config: str, flags: str) -> frozenset[str]:
    """What a run without an error prints."""
    with tempfile.TemporaryDirectory() as folder:
        run = launched(config, flags, Path(folder) / "run")
        assert run.exit_code == 0, run.stdout + run.stderr
        return frozenset(lines_of(run.stdout))


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if not USUAL.match(line)]


def outcome_of(fault: Fault, more_flags: str = "") -> Outcome:
    """Runs the recipe with an error."""
    if fault.plant is None:
        return Outcome(CANNOT, fault.why)
    flags = f"{fault.flags}{more_flags}"
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        run = launched(fault.config, f"--fault {fault.name} {flags}", Path(folder) / "run")
        seconds = time.monotonic() - started
        lines = lines_of(run.stdout)
        unchecked = "unchecked, " * any("are not checked against one process" in line for line in lines)
        if run.exit_code == 0:
            told = [line for line in lines if line not in clean_lines(fault.config, flags)]
            text = "\n".join(line for line in told if re.search(fault.cause or "$^", line))
            late = any(re.search("since step|after step|step up to", line) for line in text.splitlines())
            found = "a line during the run" if late else "a line at the start"
            found = found if text else compared(fault, run, Path(folder) / "other")
        else:
            found, text = ending(run)
    found = unchecked + found
    if not text:
        return Outcome(found, fault.why, seconds=seconds)
    place = "–" if not fault.names else "named" if any(name in text for name in fault.names) else "not named"
    return Outcome(found, text, place, judged(fault, text), seconds)


def ending(run: Run) -> tuple[str, str]:
    """(when a run ended, the lines with which it did)"""
    lines = f"{run.stdout}\n{run.stderr}".splitlines()
    starts = [number for number, line in enumerate(lines) if re.match("error: |stopped: (?!another)", line)]
    if not starts:
        return "a crash", next((line for line in lines if "Error" in line or "what()" in line), lines[-1])
    text = lines[starts[0]]
    for line in lines[starts[0] + 1 :]:
        if not line.startswith("  ") or "--check_steps 0" in line:
            break
        text += "\n" + line
    step = re.search(r"(in|at|after) step \d+", text.splitlines()[0])
    return step[0] if step else "before training", text


def judged(fault: Fault, text: str) -> str:
    """Whether the lines give the true cause."""
    before, _, cause = text.rpartition("likely cause:")
    if fault.cause and re.search(fault.cause, cause):
        return "true"
    return "not true" if before else "–"


def compared(fault: Fault, run: Run, folder: Path) -> str:
    """What a run that ended well is worth: HARMLESS, if it has the result of a run in which the error is not."""
    if fault.why:
        other = launched("single", fault.without, folder)
        return HARMLESS if compare(run.trace, other.trace).is_same else NEVER
    other = launched("single", f"--fault {fault.name} {fault.flags}", folder)
    return NEVER if compare(run.trace, other.trace).is_same else VERIFY


def row(fault: Fault, outcome: Outcome) -> str:
    line = textwrap.shorten(PREFIX.sub("", outcome.text).replace("|", "\\|"), 100, placeholder=" …")
    columns = [
        f"{fault.what} `{fault.name}`",
        fault.source,
        f"`{fault.config}`" if fault.config else "–",
        outcome.found,
        line,
        outcome.place,
        outcome.cause,
        f"{outcome.seconds:.1f}" if outcome.seconds else "",
    ]
    return f"| {' | '.join(columns)} |"


def tables(names: list[str], more_flags: str) -> Iterator[str]:
    """The lines of the tables of errors, and of what they add up to."""
    counts = []
    clean_lines("ddp", more_flags)  # the server imports torch, which is no part of a run's time
    for list_name, title in TITLES.items():
        faults = [fault for name, fault in FAULTS.items() if fault.list == list_name and name in names]
        if not faults:
            continue
        yield from ("", f"### {title}", "", HEADER)
        outcomes: dict[str, list[Outcome]] = {}
        for fault in faults:
            outcomes.setdefault(fault.source, []).append(outcome := outcome_of(fault, more_flags))
            yield row(fault, outcome)
        counts.append(f"| {title} | {' | '.join(sums(outcomes))} |")
    yield from ("", SUMS, *counts)


def sums(outcomes: dict[str, list[Outcome]]) -> list[str]:
    """The columns of SUMS after the first, from {report: what its variants showed}."""
    each = [outcome for variants in outcomes.values() for outcome in variants]
    found = [outcome for outcome in each if outcome.is_found]
    reports = [any(outcome.is_found for outcome in variants) for variants in outcomes.values()]
    none = [all(outcome.found in (HARMLESS, CANNOT) for outcome in variants) for variants in outcomes.values()]
    placed = [outcome.place for outcome in found if outcome.place != "–"]
    causes = Counter(outcome.cause for outcome in found)
    return [
        f"{len(reports)}",
        f"{sum(none)}",
        f"{sum(reports)} of {len(reports) - sum(none)}",
        f"{len(each)}",
        f"{sum(outcome.found == VERIFY for outcome in each)}",
        f"{sum(outcome.found == NEVER for outcome in each)}",
        f"{placed.count('named')} of {len(placed)}",
        f"{causes['true']}, {causes['not true']}, {causes['–']}",
    ]


def clean(configs: list[str]) -> Iterator[str]:
    """The lines of the table of runs without an error: all recipes under these configs, a few steps longer than the
    check."""
    yield from ("", "### Runs without an error", "", "| config | recipes | alarms | seconds of the check |")
    yield "| --- | ---: | ---: | ---: |"
    alarms, number, said = [], 0, Counter[str]()
    for config in configs:
        seconds, num_alarms, runs = [], 0, 0
        for name, (recipe, flags) in RECIPES.items():
            if cell(name, config).result != "same":
                continue
            with tempfile.TemporaryDirectory() as folder:
                flags = f"{flags}{FLAGS.get(config, '')} --max_steps 5 --log_every 1"
                run = fork(Path(folder) / "run", config, recipe, flags, succeeds=False)
                runs += 1
                said.update({re.sub(r"[\d.]+", "N", line) for line in lines_of(run.stdout)})
                told = [line for line in lines_of(run.stdout) if ALARMS.search(line)]
                told += [ending(run)[1].splitlines()[0]] if run.exit_code else []
                num_alarms += bool(told)
                alarms += [f"{name} under {config}: {line}" for line in told]
                if run.exit_code == 0:
                    card = json.loads((Path(folder) / "run" / "run.json").read_text())
                    seconds.append(card.get("check_seconds", 0.0))
        number += runs
        yield f"| `{config}` | {runs} | {num_alarms} | {min(seconds):.2f} to {max(seconds):.2f} |"
    yield from ("", f"**{len(alarms)} false alarms in {number} runs.**", *(f"- {alarm}" for alarm in alarms))
    print("\n".join(f"{count:5} {line}" for line, count in said.most_common()), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*FAULTS], help="an error; may be given several times")
    parser.add_argument("--clean", action="store_true", help="the runs without an error alone")
    parser.add_argument("--config", action="append", help="of the runs without an error; may be given several times")
    parser.add_argument("--large", action="store_true", help="134 million weights: for a few errors")
    parser.add_argument("--output", type=Path, help="a page to write the tables into")
    options = parser.parse_args()
    lines = []
    if not options.clean:
        for line in tables(options.only or [*FAULTS], LARGE if options.large else ""):
            lines.append(line)
            print(line, flush=True)
    if options.clean or not (options.only or options.large):
        for line in clean(options.config or [*FLOAT32_CONFIGS[1:], *BF16_CONFIGS]):
            lines.append(line)
            print(line, flush=True)
    if options.output:
        before, _, rest = options.output.read_text().partition(BEGIN)
        text = "\n".join(lines) + "\n\n"
        options.output.write_text(before + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
