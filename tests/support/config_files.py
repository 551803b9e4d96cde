"""The bad config files of `accelerate-recipes doctor`, the machines to look at them on, and what the loop refuses."""

import re
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from accelerate_recipes.catalog import mapping_in
from accelerate_recipes.doctor import asked, rules
from accelerate_recipes.doctor.config_file import Config
from accelerate_recipes.doctor.finding import Rule
from accelerate_recipes.doctor.machine import GPU, Machine
from support.runs import ROOT

FILES = ROOT / "tests" / "support" / "doctor"
SERVER = Machine(
    memory=512 * 2**30,
    free_memory=500 * 2**30,
    shared_memory=256 * 2**30,
    gpus=(GPU("NVIDIA A100", 80 * 2**30),) * 8,
    open_files=1024,
    mpirun="/usr/bin/mpirun",
    versions={"torch": "2.13.0", "transformers": "5.23.0", "deepspeed": "0.19.8"},
)
LAPTOP = replace(SERVER, gpus=(), shared_memory=64 * 2**20, free_memory=4 * 2**30)
RULES: dict[str, tuple[Rule, ...]] = {
    "machine": (*rules.MACHINE, *rules.MACHINE_WITHOUT_CONFIG),
    "config": rules.CONFIG,
    "recipe": rules.RECIPE,
}
BAD = sorted(path for kind in RULES for path in FILES.glob(f"{kind}/*.yaml"))
TYPICAL = sorted(FILES.glob("typical/*.yaml"))
REFUSED = sorted(FILES.glob("refused/*.yaml"))


def read(path: Path, machine: Machine) -> Config:
    return Config(path, mapping_in(path), machine)


def name_of(path: Path) -> str:
    return str(path.relative_to(FILES).with_suffix("")) if path.is_relative_to(FILES) else path.stem


def expected(path: Path) -> list[str]:
    """The findings in the first lines of a file."""
    return re.findall(r"^# finding: (.*)$", path.read_text(), re.MULTILINE)


def machine_with(changes: dict[str, Any]) -> Machine:
    changes = dict(changes)
    if "gpus" in changes:
        changes["gpus"] = tuple(GPU(**gpu) for gpu in changes["gpus"])
    return replace(SERVER, **changes)


def facts_of(path: Path) -> tuple[Any, ...]:
    """What the rules of a bad file's kind take."""
    documents = [document or {} for document in yaml.safe_load_all(path.read_text())]
    if path.parent.name == "machine":
        return (machine_with(documents[0]),)
    changes = documents[1] if len(documents) > 1 else {}
    config = Config(path, documents[0], machine_with(changes.get("machine", {})))
    if path.parent.name == "config":
        return (config,)
    return config, changes["recipe"]


def config_of(path: Path) -> Config:
    """A file on the machine that it names, else on a server."""
    return facts_of(path)[0] if path.parent.name == "config" else read(path, SERVER)


def ask_here(config: Config, *_: Any) -> asked.Answer:
    """What a run and the launcher would refuse, on a machine without a GPU. Takes the place of `asked.ask`."""
    with chdir(FILES):  # DeepSpeed files have relative paths
        return asked.ask(replace(config, machine=LAPTOP), None, [])


def lines_of(answer: asked.Answer) -> list[str]:
    """The lines with which a run would end."""
    return [str(error) for error in answer["refusals"]]
