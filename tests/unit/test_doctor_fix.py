"""Promise: whoever follows the advice of `accelerate-recipes doctor` gets to the end of it, and to no new error."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

from accelerate_recipes.common.errors import Edit, UsageError
from accelerate_recipes.doctor import check
from accelerate_recipes.doctor.asked import of_config
from accelerate_recipes.doctor.config_file import Config
from accelerate_recipes.doctor.finding import Finding
from accelerate_recipes.doctor.fix import fixed
from support.config_files import BAD, FILES, REFUSED, SERVER, TYPICAL, ask_here, config_of, name_of

CONFIGS = [*(path for path in BAD if path.parent.name == "config"), *TYPICAL, *REFUSED]


def look(config: Config) -> Iterator[Finding]:
    return of_config(config, ask=ask_here)


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_advice_ends_without_a_new_error(path: Path) -> None:
    config = config_of(path)
    before = {finding.what for finding in look(config)}
    _, made, left = fixed(config, look)
    assert bool(made) == any(finding.edits for finding in look(config))
    assert not [finding.type for finding in left if finding.edits]  # they contradict each other
    assert {finding.what for finding in left} <= before


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_advice_for_a_mixture_of_bad_files_ends(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(50):
        values: dict[str, Any] = {}
        for path in generator.sample(CONFIGS, 3):
            given = config_of(path).values
            values |= {key: given[key] for key in generator.sample([*given], generator.randint(1, len(given)))}
        _, _, left = fixed(Config(Path("c.yaml"), values, SERVER), look)
        assert not [finding.type for finding in left if finding.edits], values


@pytest.mark.parametrize("name", ["fsdp1", "fsdp1_named"])
def test_fsdp1_becomes_what_accelerate_makes_of_it(name: str) -> None:
    config = config_of(FILES / "typical" / f"{name}.yaml")
    assert fixed(config, look)[0].values == convert_config_to_fsdp2(config.values)


def test_words_of_deepspeed_are_translated() -> None:
    """Without them, the run would be in float32, without offload."""
    config, _, left = fixed(config_of(FILES / "config" / "unknown_section_keys.deepspeed.yaml"), look)
    assert (config.kind, config.precision, left) == ("DEEPSPEED", "bf16", [])
    section = {"zero_stage": 3, "offload_optimizer_device": "cpu", "main_process_port": 29533}
    assert config.section("deepspeed_config") == section


@pytest.mark.parametrize(
    ("error", "typed"),
    [
        (UsageError("fused=True hides the steps that the loss scaling of fp16 skips", "remove it"), "remove it"),
        (
            UsageError("a flag makes it 2", "remove it there", [Edit("zero_stage", section="deepspeed_config")]),
            "remove zero_stage below deepspeed_config",
        ),
        # DeepSpeed's own file has the key, and this one has not
        (
            UsageError("clipped", "remove it", [Edit("clip", section="deepspeed_config")], "or 1"),
            "remove it, or 1",
        ),
        (
            UsageError("zero_stage: 0", "type none", [Edit("zero_stage", "none", "deepspeed_config")], "or 1"),
            "zero_stage: none below deepspeed_config, or 1",
        ),
        (UsageError("zero_stage: 0", "use 1, 2 or 3"), "1, 2 or 3"),
        (UsageError("a model's own: divide by 2"), "what the line says"),
    ],
)
def test_refusals_of_the_loop_are_findings(error: UsageError, typed: str) -> None:
    config = Config(Path("c.yaml"), {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0}}, SERVER)
    *_, found = of_config(config, ask=lambda *_: {"refusals": [error], "of_the_launcher": [], "facts": {}})
    assert (found.what, found.type) == (error.what, typed)


def test_copy(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, copy = tmp_path / "c.yaml", tmp_path / "c.fixed.yaml"
    text = "distributed_type: MULTI_GPU  # a comment\nnum_process: 2\nmixed_precision: 'no'\ngpu_ids: '0'\n"
    path.write_text(text)
    assert check(path, None, as_json=False, fix=True) == 1
    _, _, output = capsys.readouterr().out.partition("\n\n")
    assert output == (
        f"wrote {copy}, without comments\n\n"
        "num_process is not a key of a config file of Accelerate\n"
        "  why   accelerate launch refuses the file: it had unknown keys\n"
        "  done  num_processes: 2; remove num_process\n\n"
        "left to you:\n\n"
        "gpu_ids is 0, but this machine has 2 processes\n"
        "  why   each process needs its own GPU\n"
        "  type  gpu_ids: all, or num_processes: 1 with distributed_type: 'NO'\n\n"
        "1 finding\n"
    )
    assert path.read_text() == text
    assert yaml.safe_load(copy.read_text()) == {
        "distributed_type": "MULTI_GPU",
        "mixed_precision": "no",
        "gpu_ids": "0",
        "num_processes": 2,
    }
    with pytest.raises(UsageError, match="exists"):
        check(path, None, as_json=False, fix=True)
    assert check(copy, None, as_json=True, fix=True) == 1
    assert json.loads(capsys.readouterr().out)["file"] is None
    with pytest.raises(UsageError, match="config file"):
        check(None, None, as_json=False, fix=True)
