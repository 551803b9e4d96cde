"""`verify --against certificate.json`: one process now, loss by loss against that of an earlier certificate."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate_recipes.catalog import find_config
from accelerate_recipes.console import print_json
from accelerate_recipes.errors import UsageError
from accelerate_recipes.verify.compare import TOLERANCE, relative
from accelerate_recipes.verify.runs import Finished, Launch

_NAMES = ("train/loss", "grad_norm", "learning_rate")


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


def run(script: Path, certificate: Path, as_json: bool) -> int:
    """Runs a script in one process with the flags of a certificate, and prints each step beside that of then.

    Args:
        script: the recipe, as it is now.
        certificate: certificate.json of an earlier `verify`.
        as_json: print JSON instead of the table.

    Returns:
        the exit code: 0 if all values agree to 1e-5, otherwise 1.

    Raises:
        UsageError: no such certificate, or one without the losses; or the script does not run.
    """
    if not script.is_file():
        raise UsageError(f"{script}: no such file; type the path of a recipe")
    then = _read(certificate)
    with TemporaryDirectory(prefix="verify_") as scratch:
        now = Launch(script, find_config("single"), then["flags"]).run(Path(scratch) / "single")
        if not now.is_done:
            raise UsageError(f"{script} does not run as it did then: {now.refusal or now.failure}")
        found = kept(now, then["flags"])
    rows = _rows(then["records"], found["records"])
    largest = max((row["difference"] for row in rows), default=0.0)
    has_equal_weights = found["model_digest"] == then.get("model_digest")
    first = next((row for row in rows if not row["difference"] <= TOLERANCE), None)
    verdict = f"DIFFERS from step {first['step']}, in {first['name']}" if first else "same"
    verdict = "bit for bit" if largest == 0 and has_equal_weights else verdict
    if as_json:
        print_json({"against": str(certificate), "verdict": verdict, "weights_equal": has_equal_weights, "rows": rows})
        return int(first is not None)
    print(f"{'step':>6}  {'':14}  {'then':>14}  {'now':>14}  difference")
    for row in rows:
        values = (f"{row[key]:14.8g}" if row[key] is not None else f"{'–':>14}" for key in ("then", "now"))
        print(f"{row['step']:6}  {row['name']:14}  {'  '.join(values)}  {row['difference']:.1e}")
    print(f"\nweights after the last step: {'equal' if has_equal_weights else 'not equal bit for bit'}")
    print(verdict, file=sys.stdout if first is None else sys.stderr)
    return int(first is not None)


def _read(certificate: Path) -> dict[str, Any]:
    try:
        then = json.loads(certificate.read_text(encoding="utf-8"))["reference"]
        then["flags"], then["records"][0]["step"]
    except OSError:
        raise UsageError(f"--against {certificate}: no such file; type the path of a certificate.json") from None
    except (ValueError, LookupError, TypeError):
        raise UsageError(
            f"--against {certificate} holds no losses: make it again with accelerate-recipes verify"
        ) from None
    return then


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
