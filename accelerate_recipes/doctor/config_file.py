"""A config file of Accelerate for the rules, with its values as `accelerate launch` reads them."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from accelerate_recipes.catalog import MOST_PROCESSES
from accelerate_recipes.common.errors import Edit
from accelerate_recipes.doctor.machine import Machine

# Accelerate starts a single process for these types, and uses torchrun for all others.
ONE_PROCESS = ("NO", "MULTI_CPU")
# {section: prefix that Accelerate adds to keys that lack it}
PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}


@dataclass(frozen=True)
class Config:
    path: Path  # of the file
    values: dict[str, Any]  # its content
    machine: Machine  # to run it on

    @property
    def is_local(self) -> bool:
        """Whether the file is for machines that the user starts, not for Amazon SageMaker."""
        return self.values.get("compute_environment", "LOCAL_MACHINE") == "LOCAL_MACHINE"

    @property
    def kind(self) -> str:
        """The distributed_type; empty if the file has none."""
        kind = self.values.get("distributed_type")
        return "NO" if kind is False else str(kind or "")  # an unquoted NO is false in YAML

    @property
    def precision(self) -> str:
        """The mixed_precision: "no", "fp16", "bf16" or another word; old files have the key fp16."""
        return str(self.values.get("mixed_precision") or ("fp16" if self.values.get("fp16") is True else "no"))

    @property
    def num_machines(self) -> int:
        return self._count("num_machines") or 1

    @property
    def num_processes(self) -> int | None:
        """The number of processes on all machines; None if the file leaves it to the command line."""
        return self._count("num_processes") or (1 if self.kind == "NO" else None)

    @property
    def likely_flags(self) -> list[str]:
        """Flags of `accelerate launch` for numbers that a file may omit."""
        sizes = [size for key, size in self.section("parallelism_config").items() if key.endswith("_size")]
        product = prod(filter(is_count, sizes))
        num_processes = self.num_processes or (product if product > 1 else 2 * self.num_machines)
        numbers = {"num_processes": num_processes, "num_machines": self.num_machines, "machine_rank": 0}
        return [word for name, number in numbers.items() for word in (f"--{name}", str(number))]

    @property
    def num_local_processes(self) -> int | None:
        """The number of processes on each machine."""
        return None if self.num_processes is None else max(1, self.num_processes // self.num_machines)

    @property
    def starts_several(self) -> bool:
        """Whether Accelerate starts the processes through torchrun."""
        return self.kind not in (*ONE_PROCESS, "XLA", "")

    @property
    def is_for_the_loop(self) -> bool:
        """Whether `launched` knows the variables that this kind of launch sets: not with MPI, on TPUs or elsewhere."""
        return self.is_local and self.kind not in ("XLA", "MEGATRON_LM", "") and not self.section("mpirun_config")

    def section(self, name: str, kind: str | None = None) -> dict[str, Any]:
        """A section ("": the top) with Accelerate's prefixes; empty if it is missing, or for another kind of run."""
        given = None if kind not in (None, self.kind) else self.values.get(name) if name else self.values
        return {_full(name, key): given[key] for key in given} if isinstance(given, dict) else {}

    def edited(self, edits: Iterable[Edit]) -> dict[str, Any]:
        """The values after edits. A section that becomes empty is removed."""
        values = deepcopy(self.values)
        for edit in edits:
            if edit.section and not isinstance(values.get(edit.section), dict):
                values[edit.section] = {}
            inside = values[edit.section] if edit.section else values
            keys = [key for key in inside if _full(edit.section, key) == edit.key] or [edit.key]
            if edit.value is not None:
                inside[keys.pop(0)] = edit.value
            for key in keys:
                inside.pop(key, None)
            if not inside:
                values.pop(edit.section, None)
        return values

    def _count(self, name: str) -> int | None:
        value = self.values.get(name)
        return value if is_count(value) else None


def _full(section: str, key: Any) -> str:
    """A key with the prefix that Accelerate adds to it."""
    prefix = PREFIXES.get(section, "")
    return str(key) if str(key).startswith(prefix[:-1]) else f"{prefix}{key}"


def is_count(value: Any) -> bool:
    """Whether this is a whole number above 0, and not more than any machines have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_PROCESSES


def is_true(value: Any) -> bool:
    """Whether Accelerate takes this as true."""
    return str(value).lower() in ("true", "1", "yes", "y", "t", "on")
