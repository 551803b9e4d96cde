"""What a finished run is, as far as runs are compared; read from its folder, or from a record of it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from accelerate_recipes.common.check.sketch import Sketch
from accelerate_recipes.common.records.run_card import read_card

# What a record keeps of each weight: 16 sums, so that the file stays small. Sums of other signs have another name.
SKETCH, SUMS = "count sketch, 16 sums", 16


@dataclass(frozen=True)
class Trace:
    """A finished run."""

    # {(step, name): value} of training loss, norm of the gradient, learning rate and evaluation metrics; of a script on
    # plain Accelerate also "samples", the ids of a step, and in step 0 "gathered", the rows of all evaluations
    values: Mapping[tuple[int, str], Any]
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # after the last step; of a record, sums of a `Sketch`
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else is known, such as the run card

    @classmethod
    def of_run(cls, folder: Path) -> "Trace":
        """Reads metrics.jsonl, run.json and model/ of an output folder."""
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return cls(_values(map(json.loads, lines)), Tensors(folder / "model"), read_card(folder))

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Trace":
        """Reads what `to_record` returned, without weights that another sketch summed."""
        sums = record.get("weights", {}) if record.get("sketch") == SKETCH else {}
        weights = {name: torch.tensor(each, dtype=torch.float64) for name, each in sums.items()}
        return cls(_values(record["records"]), weights, record)

    def to_record(self, with_weights: bool = False) -> dict[str, Any]:
        """What is kept of the run, for JSON; sample ids and gathered rows are not."""
        records: dict[int, dict[str, Any]] = {}
        for (step, name), value in self.values.items():
            if _is_kept(name):
                records.setdefault(step, {"step": step})[name] = value
        kept = {name: self.facts.get(name) for name in ("hardware", "model_digest")} | {"records": [*records.values()]}
        if not with_weights:
            return kept
        sums = {name: Sketch.of(tensor, SUMS).sums for name, tensor in self.weights.items()}
        real = {name: torch.view_as_real(each) if each.is_complex() else each for name, each in sums.items()}
        return kept | {"sketch": SKETCH, "weights": {name: each.tolist() for name, each in real.items()}}


class Tensors(Mapping[str, Tensor]):
    """{name: tensor} of the safetensors in a folder. Each is read when it is asked for."""

    def __init__(self, folder: Path):
        self._paths: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self._paths |= dict.fromkeys(file.offset_keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._paths[name], "pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _values(records: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], Any]:
    return {(record["step"], name): value for record in records for name, value in record.items() if _is_kept(name)}


def _is_kept(name: str) -> bool:
    return name in ("train/loss", "grad_norm", "learning_rate") or name.startswith("eval/")
