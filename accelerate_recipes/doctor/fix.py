"""accelerate-recipes doctor --fix: a copy of a config file with the edits of the findings."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.doctor.config_file import Config
from accelerate_recipes.doctor.finding import Finding
from accelerate_recipes.paths import check_new_file, write_file


def path_of_copy(path: Path) -> Path:
    """The path of a file's copy: c.fixed.yaml for c.yaml. Raises UsageError if it exists, or cannot be made."""
    if (copy := path.with_name(f"{path.stem}.fixed{path.suffix}")).exists():
        raise UsageError(f"{copy} exists: remove it, or run doctor on it")
    check_new_file(copy, "")
    return copy


def write(config: Config) -> None:
    """Writes a config to its path, without comments. Raises UsageError if that is impossible."""
    is_json = config.path.suffix == ".json"
    text = json.dumps(config.values, indent=2) if is_json else yaml.safe_dump(config.values, sort_keys=False)
    write_file(config.path, text)


def fixed(config: Config, look: Callable[[Config], Iterable[Finding]]) -> tuple[Config, list[Finding], list[Finding]]:
    """Makes the edits of the findings in a copy, one after the other, until none is left. `look` yields the findings of
    a config, the fast ones first. Returns (the fixed config, the resolved findings, those left to the user)."""
    made: list[Finding] = []
    seen = [config.values]
    with TemporaryDirectory() as folder:
        config = replace(config, path=Path(folder) / config.path.name)
        while True:
            write(config)
            left: list[Finding] = []
            for finding in look(config):
                left.append(finding)
                values = config.edited(finding.edits)
                if values not in seen:  # two findings that contradict each other are left to the user
                    made.append(finding)
                    seen.append(values)
                    config = replace(config, values=values)
                    break
            else:
                return config, made, left
