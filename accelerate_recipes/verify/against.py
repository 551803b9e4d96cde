"""`verify --record FILE`: the first steps of one process; `verify --against FILE`: the same steps now, loss by loss."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate_recipes.catalog import find_config
from accelerate_recipes.common.check.tolerances import RECORD, TOLERANCE
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import print_json
from accelerate_recipes.paths import check_file, check_new_file, text_of, write_file
from accelerate_recipes.verify.certificate import versions
from accelerate_recipes.verify.differences import Compared, Difference, Trace, compared, noise_floor, of_all_steps
from accelerate_recipes.verify.plain import watch
from accelerate_recipes.verify.runs import Launch, recording


def record(script: Path, flags: list[str], steps: int, file: Path, accelerate: bool, as_json: bool) -> int:
    """Writes the first steps of one process into a file, as JSON, and how far rounding moves them. Returns the exit
    code. Raises UsageError if the script does not run, or the file cannot be written."""
    check_new_file(file, "--record", '{"script": ')
    with TemporaryDirectory(prefix="verify_") as scratch:
        moved = None
        if accelerate:
            taken = watch(script, flags, steps, "single", Path(scratch) / "single")
            moved = watch(script, flags, steps, "single", Path(scratch) / "moved", "moved")
        else:
            flags = [*flags, *recording(steps)]
            taken = _recipe(script, flags, Path(scratch) / "single")
            if (size := taken.facts.get("micro_batch_size") or 1) > 1:
                other = next(other for other in range(size // 2, 0, -1) if size % other == 0)
                moved = _recipe(script, flags, Path(scratch) / "moved", "--micro_batch_size", str(other))
        floor = {} if moved is None else of_all_steps(noise_floor(moved, taken))
        kept = taken.to_record(with_weights=True) | {"floor": floor}
    made = datetime.now(UTC).isoformat(timespec="seconds")
    reference = {"flags": flags, "steps": steps, "accelerate": accelerate, **kept}
    content = {"script": str(script), "made": made, "versions": versions(), "reference": reference}
    write_file(file, json.dumps(content) + "\n", "--record")
    if as_json:
        print_json(content)
    else:
        facts = f"{len(kept['records'])} records, {len(kept['weights'])} weights"
        print(f"{file} has {facts}; after an upgrade run accelerate-recipes verify {script} --against {file}")
    return 0


def run(script: Path, certificate: Path, as_json: bool) -> int:
    """Runs a script in one process with the flags of a record, or of certificate.json of an earlier `verify`. Prints
    each step next to the recorded one. Raises UsageError if the record is missing or has no losses, or if the script
    does not run. Returns the exit code: 0 if all values agree to 1e-5, or ten times what rounding changes, else 1."""
    content, then = _read(certificate)
    flags = then.facts["flags"]
    with TemporaryDirectory(prefix="verify_") as scratch:
        if then.facts.get("accelerate"):
            now = watch(script, flags, then.facts["steps"], "single", Path(scratch) / "single")
        else:
            now = _recipe(script, flags, Path(scratch) / "single")
        now = Trace.of_record(now.to_record(with_weights=bool(then.weights)))
    if then.facts.get("weights") and not then.weights:
        print(f"{certificate} has sums of weights that verify cannot compare: record it again", file=sys.stderr)
    floor = {"weights": 0.0} | then.facts.get("floor", {})
    floor["weights"] = max(floor["weights"], TOLERANCE)  # 16 sums measure the distance of a weight only roughly
    found = compared(now, then, floor, RECORD)
    difference = Difference.of(found)
    digests = now.facts["model_digest"], then.facts.get("model_digest")
    has_equal_weights = digests[0] == digests[1] if digests[1] is not None else difference.is_exact
    verdict = "same, to rounding errors" if difference.is_noise else "same"
    if difference.is_exact and has_equal_weights:
        verdict = "bit for bit"
    if not difference.is_same:
        verdict = f"DIFFERS {'; '.join(_places(found, now, then))}"
    before, after = content.get("versions", {}), versions()
    names = [name for name in before | after if before.get(name) != after.get(name)]
    changed = {name: [before.get(name), after.get(name)] for name in names}
    rows = [one for one in found if one.step is not None]
    if as_json:
        weights = {one.name: one.size for one in found if one.step is None}
        facts = {"weights_equal": has_equal_weights, "versions": changed, "weights": weights}
        keys = {"step": "step", "name": "name", "then": "expected", "now": "value", "difference": "size"}
        values = [{key: getattr(one, field) for key, field in keys.items()} for one in rows]
        print_json({"against": str(certificate), "verdict": verdict, **facts, "rows": values})
        return int(not difference.is_same)
    print(f"{'step':>6}  {'':14}  {'then':>14}  {'now':>14}  difference")
    for one in rows:
        columns = (f"{value:14.8g}" if value is not None else f"{'–':>14}" for value in (one.expected, one.value))
        print(f"{one.step:6}  {one.name:14}  {'  '.join(columns)}  {one.size:.1e}")
    for name, (old, new) in changed.items():
        print(f"{name} {old or 'none'} then, {new or 'none'} now")
    print(f"\nweights after the last step: {'equal' if has_equal_weights else 'not equal bit for bit'}")
    print(verdict, file=sys.stdout if difference.is_same else sys.stderr)
    return int(not difference.is_same)


def _places(found: list[Compared], now: Trace, then: Trace) -> list[str]:
    """Where the first different value and the first different weight are."""
    wrong = [one for one in found if not one.is_same]
    places = [f"from step {one.step}, in {one.name}" for one in wrong if one.step is not None][:1]
    for one in [one for one in wrong if one.step is None][:1]:
        is_there = one.name in now.weights and one.name in then.weights
        how = f", by {one.size:.1e}" if is_there else ", which only one of the two has"
        places.append(f"after the last step in {one.name}{how}")
    return places


def _recipe(script: Path, flags: list[str], folder: Path, *more: str) -> Trace:
    check_file(script, "", "use the path of a recipe")
    if not (run := Launch(script, find_config("single"), flags).run(folder, *more)).is_done:
        raise UsageError(f"{script} fails on one process: {run.refusal or run.failure}")
    return run.trace


def _read(certificate: Path) -> tuple[dict[str, Any], Trace]:
    try:
        content = json.loads(text_of(certificate, "--against", "use the path of a record, or of a certificate.json"))
        then = content["reference"]
        then["flags"], then["records"][0]["step"]
        return content, Trace.of_record(then)
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UsageError(f"--against {certificate} has no losses: run accelerate-recipes verify --record") from None
