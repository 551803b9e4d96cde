"""`verify --record FILE`: the first steps of one process; `verify --against FILE`: the same steps now, loss by loss."""

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate_recipes.catalog import find_config
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import print_json
from accelerate_recipes.paths import check_file, check_new_file, text_of
from accelerate_recipes.verify.certificate import versions
from accelerate_recipes.verify.compare import TIMES_FLOOR, TOLERANCE, load, relative
from accelerate_recipes.verify.runs import Finished, Launch, recording
from accelerate_recipes.verify.watch import Watched, watch

_NAMES = ("train/loss", "grad_norm", "learning_rate")
_SUMS = 16  # of a weight that a record keeps: its distance follows within some 20 %


@dataclass(frozen=True)
class Steps:
    """The first steps of one process.

    Attributes:
        records: of each step and evaluation.
        weights: {tensor: sums of its elements with random signs}, after the last step.
        facts: the hardware, and a digest of the weights.
        size: of a micro-batch, if it may be another.
    """

    records: list[dict[str, Any]]
    weights: dict[str, list[float]]
    facts: dict[str, Any]
    size: int | None = None


def kept(reference: Finished, flags: list[str]) -> dict[str, Any]:
    """What a certificate keeps of one process, so that later runs can be compared with it.

    Args:
        reference: the run of one process.
        flags: all flags of that run but its folder.
    """
    records = [
        {name: value for name, value in record.items() if name in ("step", *_NAMES) or name.startswith("eval/")}
        for record in reference.records
    ]
    facts = {name: reference.card.get(name) for name in ("hardware", "model_digest")}
    return {"flags": flags, **facts, "records": records}


def record(script: Path, flags: list[str], steps: int, file: Path, accelerate: bool, as_json: bool) -> int:
    """Writes the first steps of one process into a file, with how far rounding moves them.

    Args:
        script: a recipe; with `accelerate`, a script that uses Accelerate.
        flags: its flags.
        steps: optimizer steps.
        file: for the record, JSON.
        accelerate: watch the script from outside.
        as_json: print the record, too.

    Returns:
        the exit code.

    Raises:
        UsageError: the script does not run, or the file cannot be written.
    """
    check_new_file(file, "--record")
    with TemporaryDirectory(prefix="verify_") as scratch:
        if accelerate:
            taken = _watched(script, flags, steps, Path(scratch) / "single")
            moved: Steps | None = _watched(script, flags, steps, Path(scratch) / "moved", "moved")
        else:
            flags = [*flags, *recording(steps)]
            taken, moved = _recipe(script, flags, Path(scratch) / "single"), None
            if taken.size is not None and taken.size > 1:
                other = next(size for size in range(taken.size // 2, 0, -1) if taken.size % size == 0)
                moved = _recipe(script, flags, Path(scratch) / "moved", "--micro_batch_size", str(other))
    floor = {} if moved is None else _floor(taken, moved)
    reference = {"flags": flags, "steps": steps, "accelerate": accelerate, **taken.facts, "records": taken.records}
    reference |= {"weights": taken.weights, "floor": floor}
    made = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"script": str(script), "made": made, "versions": versions(), "reference": reference}
    try:
        file.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--record {file} cannot be written ({error.strerror}): type another path") from None
    if as_json:
        print_json(content)
    else:
        facts = f"{len(taken.records)} records, {len(taken.weights)} weights"
        print(f"{file} has {facts}; after an upgrade type accelerate-recipes verify {script} --against {file}")
    return 0


def run(script: Path, certificate: Path, as_json: bool) -> int:
    """Runs a script in one process with the flags of a record, and prints each step beside that of then.

    Args:
        script: as it is now.
        certificate: what `record` wrote, or certificate.json of an earlier `verify`.
        as_json: print JSON instead of the table.

    Returns:
        the exit code: 0 if all values agree to 1e-5, or to ten times what rounding changes, otherwise 1.

    Raises:
        UsageError: no such record, or one without the losses; or the script does not run.
    """
    content = _read(certificate)
    then = content["reference"]
    with TemporaryDirectory(prefix="verify_") as scratch:
        if then.get("accelerate"):
            now = _watched(script, then["flags"], then["steps"], Path(scratch) / "single")
        else:
            now = _recipe(script, then["flags"], Path(scratch) / "single")
    rows, limits = _rows(then["records"], now.records), then.get("floor", {})
    weights = _distances(then["weights"], now.weights) if "weights" in then else {}
    largest = max([*(row["difference"] for row in rows), *weights.values()], default=0.0)
    digests = now.facts.get("model_digest"), then.get("model_digest")
    has_equal_weights = digests[0] == digests[1] if digests[1] is not None else largest == 0
    first = next((row for row in rows if not row["difference"] <= _limit(limits, row["name"])), None)
    tensor = next((name for name, value in weights.items() if not value <= _limit(limits, "weights", 10)), None)
    verdict = "same" if largest <= TOLERANCE else "same, to rounding errors"
    if largest == 0 and has_equal_weights:
        verdict = "bit for bit"
    if first is not None or tensor is not None:
        places = [f"from step {first['step']}, in {first['name']}"] if first else []
        if tensor is not None:
            is_there = tensor in now.weights and tensor in then["weights"]
            how = f", by {weights[tensor]:.1e}" if is_there else ", which only one of the two has"
            places.append(f"after the last step in {tensor}{how}")
        verdict = f"DIFFERS {'; '.join(places)}"
    before, after = content.get("versions", {}), versions()
    both = {name: [before.get(name), after.get(name)] for name in before | after}
    changed = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    if as_json:
        facts = {"weights_equal": has_equal_weights, "versions": changed, "weights": weights}
        print_json({"against": str(certificate), "verdict": verdict, **facts, "rows": rows})
        return int(verdict.startswith("DIFFERS"))
    print(f"{'step':>6}  {'':14}  {'then':>14}  {'now':>14}  difference")
    for row in rows:
        values = (f"{row[key]:14.8g}" if row[key] is not None else f"{'–':>14}" for key in ("then", "now"))
        print(f"{row['step']:6}  {row['name']:14}  {'  '.join(values)}  {row['difference']:.1e}")
    for name, (old, new) in changed.items():
        print(f"{name} {old or 'none'} then, {new or 'none'} now")
    print(f"\nweights after the last step: {'equal' if has_equal_weights else 'not equal bit for bit'}")
    print(verdict, file=sys.stderr if verdict.startswith("DIFFERS") else sys.stdout)
    return int(verdict.startswith("DIFFERS"))


def _limit(floor: dict[str, float], name: str, times: int = 1) -> float:
    """How far a value may be from that of then: 1e-5, of a sketched weight ten times that, or ten floors."""
    return max(times * TOLERANCE, TIMES_FLOOR * floor.get(name, 0.0))


def _floor(taken: Steps, moved: Steps) -> dict[str, float]:
    """{name: the largest difference} of the same steps with other rounding errors; nothing if they start otherwise."""
    rows = [row for row in _rows(taken.records, moved.records) if row["difference"] < float("inf")]
    first = min((row["step"] for row in rows), default=0)
    if any(row["difference"] > TOLERANCE for row in rows if row["step"] == first and row["name"] == "train/loss"):
        return {}
    found: dict[str, float] = {}
    for row in rows:
        found[row["name"]] = max(found.get(row["name"], 0.0), row["difference"])
    return found | {"weights": max(_distances(taken.weights, moved.weights).values(), default=0.0)}


def _recipe(script: Path, flags: list[str], folder: Path, *more: str) -> Steps:
    check_file(script, "", "type the path of a recipe")
    run = Launch(script, find_config("single"), flags).run(folder, *more)
    if not run.is_done:
        raise UsageError(f"{script} does not run in one process: {run.refusal or run.failure}")
    found = kept(run, flags)
    facts = {name: found[name] for name in ("hardware", "model_digest")}
    return Steps(found["records"], _sketches(folder / "model"), facts, run.card.get("micro_batch_size"))


def _watched(script: Path, flags: list[str], steps: int, folder: Path, how: str = "as it is") -> Steps:
    run: Watched = watch(script, flags, steps, "single", folder, how)
    norms: list[Any] = run.grad_norms or [None] * len(run.losses)
    records = [
        {"step": step, "train/loss": loss, "learning_rate": rate} | ({} if norm is None else {"grad_norm": norm})
        for step, (loss, rate, norm) in enumerate(zip(run.losses, run.learning_rates, norms), start=1)
    ]
    return Steps(records, _sketches(folder), {})


def _sketches(folder: Path) -> dict[str, list[float]]:
    """{tensor: sums of its elements with random signs} of the weights in a folder. The norm of a difference of such
    sums is about that of the difference of the tensors."""
    import torch

    found: dict[str, list[float]] = {}
    signs = torch.randint(2, (1 << 16,), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    for name, tensor in load(folder).items():
        sums = torch.zeros(_SUMS, dtype=torch.float64)
        for number, block in enumerate(tensor.reshape(-1).double().split(len(signs))):
            turned = block * signs.roll(1021 * number)[: len(block)]
            sums += torch.nn.functional.pad(turned, (0, -len(turned) % _SUMS)).view(-1, _SUMS).sum(0)
        found[name] = sums.tolist()
    return found


def _distances(then: dict[str, list[float]], now: dict[str, list[float]]) -> dict[str, float]:
    """{tensor: its relative distance}; infinite for one that only one of the two has."""
    found: dict[str, float] = {}
    for name in then | now:
        if name not in then or name not in now:
            found[name] = float("inf")
            continue
        squares = [sum((a - b) ** 2 for a, b in zip(now[name], then[name])), sum(b * b for b in then[name])]
        found[name] = (squares[0] / max(squares[1], 1e-24)) ** 0.5
    return found


def _read(certificate: Path) -> dict[str, Any]:
    text = text_of(certificate, "--against", "type the path of a record, or of a certificate.json")
    try:
        content = json.loads(text)
        then = content["reference"]
        then["flags"], then["records"][0]["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UsageError(
            f"--against {certificate} holds no losses: make it again with accelerate-recipes verify --record"
        ) from None
    return content


def _rows(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each value of each step: the step, the name, both values, their relative difference."""
    columns = [
        {(one["step"], name): value for one in records for name, value in one.items() if name != "step"}
        for records in (then, now)
    ]
    rows = []
    for step, name in dict.fromkeys([*columns[0], *columns[1]]):
        pair = [column.get((step, name)) for column in columns]
        rows.append({"step": step, "name": name, "then": pair[0], "now": pair[1], "difference": relative(*pair[::-1])})
    return sorted(rows, key=lambda row: row["step"])
