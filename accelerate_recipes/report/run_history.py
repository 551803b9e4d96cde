"""Reads runs: their records, their run cards, and what happened to them."""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.records.run_card import read_card

RECORDS = "metrics.jsonl"
AXES = {"steps": "optimizer steps", "samples": "samples", "seconds": "seconds of training"}
_NOT_PLOTTED = ("step", "epoch")
_LARGEST_STEP = 2**53  # larger whole numbers lose digits as floating-point numbers
_LARGEST_VALUE = 1e300  # beyond it, the arithmetic of an axis overflows

Curve = list[tuple[int, float | None]]  # (step, value); None: the record has no finite value


@dataclass(frozen=True)
class Event:
    """A start or end of an attempt, except the normal start and end of a run."""

    kind: str  # resumed, restarted (from step 0), stopped or failed
    attempt: int  # its number, counted from 1
    step: int | None  # where it happened; None if the run card does not say
    text: str  # what happened


@dataclass(frozen=True)
class Run:
    name: str  # unique among the runs of a report
    folder: Path  # the output folder, as the user typed it
    card: dict[str, Any]  # the run card; empty if there is none
    config: dict[str, Any]  # the flags of the run
    records: list[dict[str, Any]]  # sorted by step; all values except "step" are finite numbers or None
    num_damaged: int  # lines that are not records
    changed: float  # when the records last changed, in seconds since 1970
    status: str  # how the run ended, from the run card
    attempt: int  # the number of the last attempt, counted from 1
    batch_size: int | None  # samples per optimizer step
    last_step: int  # of the last record; 0 without records
    planned_steps: int | None  # the optimizer steps of the whole run
    wall_seconds: float | None  # the time that the last attempt took; None until it ends

    @cached_property
    def metrics(self) -> list[str]:
        """The names of all values in the records, in the order in which they appear."""
        return [*dict.fromkeys(name for record in self.records for name in record if name not in _NOT_PLOTTED)]

    def curve(self, metric: str) -> Curve:
        """A metric over the steps of the run."""
        return [(record["step"], record[metric]) for record in self.records if metric in record]

    @cached_property
    def clock(self) -> list[tuple[int, float]]:
        """(step, seconds of training up to this step) of each training record.

        A record's `samples_per_second` gives the seconds since the record before it. They exclude evaluation, saving,
        and steps that were lost and taken again. Empty without a batch size or throughput.
        """
        if not (rates := self.curve("samples_per_second")) or self.batch_size is None:
            return []
        # The file may begin later than the run: after a resume from another folder, or after lost records.
        every = _count(self.config.get("log_every")) or rates[0][0] or 1
        before, seconds = max(0, (rates[0][0] - 1) // every * every), 0.0
        clock = [(before, seconds)]
        for step, rate in rates:
            if rate is None or rate <= 0:  # too slow for the file's one decimal
                break
            seconds += (step - before) * self.batch_size / rate
            before = step
            clock.append((step, seconds))
        return clock

    def position(self, axis: str, step: float) -> float | None:
        """Where a step lies on an axis of AXES; None if the records do not say."""
        if axis == "steps":
            return float(step)
        if axis == "samples":
            return None if self.batch_size is None else float(step * self.batch_size)
        index = bisect_left(self.clock, (step,))
        if index == len(self.clock) or (index == 0 and self.clock[0][0] != step):
            return None
        (step_before, before), (step_after, after) = self.clock[max(0, index - 1)], self.clock[index]
        share = (step - step_before) / (step_after - step_before) if step_after > step_before else 1.0
        return before + share * (after - before)

    def has(self, axis: str) -> bool:
        """Whether the records of the run can be placed on an axis of AXES."""
        return not self.records or any(self.position(axis, record["step"]) is not None for record in self.records)

    @cached_property
    def events(self) -> list[Event]:
        """Resumes, restarts, stops and failures, in chronological order."""
        kept = self.card.get("earlier_attempts")
        attempts = [one for one in kept if isinstance(one, dict)] if isinstance(kept, list) else []
        attempts.append(self.card)
        events: list[Event] = []
        for number, attempt in enumerate(attempts, max(1, self.attempt - len(attempts) + 1)):
            is_last = attempt is self.card
            events += [*self._start(number, attempt), *_end(number, attempt, self.last_step if is_last else None)]
        return events

    def _start(self, number: int, attempt: dict[str, Any]) -> list[Event]:
        step = _count(attempt.get("first_step"))
        if step is None and attempt is self.card:
            step = _step_in(r"step_(\d+)/?$", str(self.config.get("resume_from_checkpoint")))
        if step:
            return [Event("resumed", number, step, f"resumed after step {step}")]
        if number == 1:
            return []
        if step == 0:
            return [Event("restarted", number, 0, "started again from the beginning")]
        return [Event("resumed", number, None, "started again; the run card does not say after which step")]


def _end(number: int, attempt: dict[str, Any], last_step: int | None) -> list[Event]:
    status, error = attempt.get("status"), str(attempt.get("error") or "")
    if status == "running" and last_step is None:
        return [Event("failed", number, None, "ended without a record: killed, or the machine went down")]
    if status not in ("stopped", "failed"):
        return []
    says_step = {"3": r"step (\d+)", "75": r"step_(\d+) is saved"}.get(str(attempt.get("exit_code")))
    step = _step_in(says_step, error) if says_step else None
    text = f"{error or status} (exit code {attempt.get('exit_code')})"
    return [Event(status, number, last_step if step is None else step, text)]


def _step_in(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found and len(found[1]) < 16 else None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads the runs in these output folders. Raises UsageError if a folder has no run, or is given twice."""
    for folder, number in Counter(folder.resolve() for folder in folders).items():
        if number > 1:
            raise UsageError(f"{folder} is given {number} times: use each run once")
    names = [folder.resolve().name for folder in folders]
    return [_read(folder, name if names.count(name) == 1 else str(folder)) for folder, name in zip(folders, names)]


def _check(folder: Path) -> None:
    if (folder / RECORDS).is_file():
        return
    if not folder.is_dir():
        if (folder.parent / RECORDS).is_file():
            raise UsageError(f"{folder} is not a folder: use {folder.parent}")
        raise UsageError(f"{folder}: no such folder; use the --output_dir of a run, such as outputs/mnist")
    if error := read_card(folder).get("error"):
        raise UsageError(f"{folder} has no {RECORDS}, its run failed before the first step ({error}): use another run")
    inside = sorted(path.parent for path in folder.glob(f"*/{RECORDS}"))
    advice = " ".join(map(str, inside[:5])) if inside else "the --output_dir of a run, such as outputs/mnist"
    raise UsageError(f"{folder} has no {RECORDS}: use {advice}")


def _read(folder: Path, name: str) -> Run:
    try:
        _check(folder)
        content, changed = (folder / RECORDS).read_bytes(), (folder / RECORDS).stat().st_mtime
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({error.strerror}): use another run") from None
    records = [_record(line) for line in content.splitlines()]
    if records and records[-1] is None and not content.endswith(b"\n"):
        records.pop()  # the run is writing this line
    valid = sorted((record for record in records if record is not None), key=lambda record: record["step"])
    card = read_card(folder)
    status, seconds = str(card.get("status", "unknown: no run.json")), card.get("wall_seconds")
    config = given if isinstance(given := card.get("config"), dict) else {}
    return Run(
        name=name,
        folder=folder,
        card=card,
        config=config,
        records=valid,
        num_damaged=len(records) - len(valid),
        changed=changed,
        status=status,
        attempt=max(1, _count(card.get("attempt")) or 1),
        batch_size=_count(config.get("batch_size")) or None,
        last_step=valid[-1]["step"] if valid else 0,
        planned_steps=_count(card.get("num_steps")),
        wall_seconds=_finite(seconds) if status != "running" and _is_number(seconds) else None,
    )


def _record(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        content = json.loads(line)
        if isinstance(content, dict) and (step := _count(content.get("step"))) is not None:
            numbers = {name: _finite(value) for name, value in content.items() if _is_number(value) or value is None}
            return numbers | {"step": step}
    return None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_STEP else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and abs(value) < _LARGEST_VALUE else None  # also for NaN
