"""Promise: `accelerate-recipes doctor` finds what makes a run fail or another run, and says what to type.

tests/support/doctor/ has a bad file for each rule, and typical config files as `accelerate config` writes them. Their
first lines are the findings.
"""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig

from accelerate_recipes import catalog
from accelerate_recipes.common import environment
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.doctor import check, rules
from accelerate_recipes.doctor.asked import of_config, refusal_of
from accelerate_recipes.doctor.config_file import Config
from accelerate_recipes.doctor.finding import findings
from accelerate_recipes.doctor.machine import Machine, look
from accelerate_recipes.doctor.rules import keys, launching
from support.config_files import (
    BAD,
    FILES,
    LAPTOP,
    REFUSED,
    RULES,
    SERVER,
    TYPICAL,
    ask_here,
    expected,
    facts_of,
    lines_of,
    name_of,
    read,
)
from support.runs import ROOT

CONFIGS = sorted(ROOT.glob("accelerate_configs/*.yaml"))


@pytest.fixture(autouse=True)
def no_gpu_and_empty_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this machine one whose only findings are those of the test."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.mark.parametrize("kind", RULES)
def test_each_rule_has_a_docstring_and_a_bad_file(kind: str) -> None:
    shown = {path.name.partition(".")[0] for path in BAD if path.parent.name == kind}
    assert shown == {rule.__name__ for rule in RULES[kind]}
    assert all(rule.__doc__ for rule in RULES[kind])


@pytest.mark.parametrize("path", BAD, ids=name_of)
def test_bad_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILES)  # DeepSpeed files have relative paths
    kind, known = path.parent.name, facts_of(path)
    found = findings(RULES[kind], *known)
    assert [finding.what for finding in found] == expected(path) != []
    assert all(finding.why and finding.type for finding in found)
    rule = next(rule for rule in RULES[kind] if rule.__name__ == path.name.partition(".")[0])
    assert findings([rule], *known)


@pytest.mark.parametrize("path", TYPICAL, ids=name_of)
def test_typical_config(path: Path) -> None:
    ClusterConfig.from_yaml_file(path)  # what `accelerate config` writes, Accelerate reads
    found = findings(rules.CONFIG, read(path, SERVER))
    refused = lines_of(ask_here(read(path, SERVER))) if read(path, SERVER).is_for_the_loop else []
    assert [*(finding.what for finding in found), *refused] == expected(path)


@pytest.mark.parametrize("where", [SERVER, LAPTOP], ids=["server", "laptop"])
@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_shipped_configs_are_clean(path: Path, where: Machine) -> None:
    assert not findings((*rules.MACHINE, *rules.MACHINE_WITHOUT_CONFIG), where)
    assert not findings(rules.CONFIG, read(path, where))


def test_keys_of_another_accelerate() -> None:
    """What the rules say of a key holds for the groups of flags and the defaults of this version."""
    parser = launch.launch_command_parser()
    groups = {group.title: {action.dest for action in group._group_actions} for group in parser._action_groups}
    titles = {"deepspeed": "DeepSpeed", "fsdp": "FSDP", "parallelism": "ParallelismConfig", "fp8": "FP8"}
    titles |= {"megatron_lm": "Megatron-LM", "mpirun": "MPI"}
    of_flags = {f"{name}_config": groups[f"{title} Arguments"] for name, title in titles.items()}
    of_flags["fsdp_config"].add("fsdp_ignored_modules")  # it has no flag
    sections = dict(keys.known().sections)
    assert "dynamo_mode" in sections.pop("dynamo_config")
    assert sections == of_flags
    assert set(ClusterConfig.__dataclass_fields__) <= keys.known().top
    # Accelerate takes a value from the file only if the flag's default is None.
    never_read = {name: default for name, default in keys.known().flags.items() if default is not None}
    assert never_read == {"rdzv_backend": "static", "same_network": False, "enable_cpu_affinity": False}
    assert {"use_cpu", "mixed_precision", "num_processes"} < keys.known().flags.keys()
    assert not {"downcast_bf16", "commands", "distributed_type", "fsdp_config"} & keys.known().flags.keys()


@pytest.mark.parametrize("path", REFUSED, ids=name_of)
def test_what_the_loop_refuses_is_found(path: Path) -> None:
    assert lines_of(ask_here(read(path, LAPTOP))) == expected(path) != []


def test_a_value_that_nothing_can_read_is_found(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {gradient_clipping: much}\n")
    (found,) = of_config(read(path, SERVER))
    assert found.what.endswith("ValueError: could not convert string to float: 'much'")


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_nothing_refuses_a_shipped_config(path: Path) -> None:
    answer = ask_here(read(path, LAPTOP))
    assert not answer["refusals"] and not answer["of_the_launcher"]


# Without those that need another machine, which have two documents, and without mpirun, which sets further variables.
LAUNCHABLE = [*TYPICAL, *(path for path in FILES.glob("config/*.yaml") if "---" not in path.read_text())]
for name in ("multi_cpu_mpi", "fsdp1_no_processes"):  # the launcher's own line names the key that the latter lacks
    LAUNCHABLE.remove(FILES / "typical" / f"{name}.yaml")


@pytest.mark.parametrize("path", LAUNCHABLE, ids=name_of)
def test_what_the_launcher_refuses_is_found(path: Path) -> None:
    """A rule says more than the launcher's error."""
    if ask_here(read(path, LAPTOP))["of_the_launcher"]:
        assert findings(rules.CONFIG, read(path, LAPTOP))


ADDRESSES: dict[bool, list[str | None]] = {
    True: [
        *(None, "", "<ip>", "xxx", "xxx.xxx.xxx.xxx", "192.168.x.x", "your_ip", "MASTER_ADDR", "$HEAD_NODE", "10.0.0"),
        *("${MASTER_ADDR}", "300.1.1.1", "main_process_ip", "IP-address", "TODO", "localhost", "127.0.0.1", "hostname"),
    ],
    False: ["10.0.0.1", "n1", "node-0.cluster.local", "fe80::1", "gpu01", "head", "train-0.train", "x1.example.com"],
}


@pytest.mark.parametrize(("is_found", "address"), [(found, one) for found in ADDRESSES for one in ADDRESSES[found]])
def test_address(is_found: bool, address: str | None) -> None:
    assert bool(findings([launching.address], ddp(4, num_machines=2, main_process_ip=address))) == is_found


def ddp(num_processes: int, **changes: Any) -> Config:
    values = {"distributed_type": "MULTI_GPU", "num_processes": num_processes, **changes}
    return Config(Path("config.yaml"), values, SERVER)


@pytest.mark.parametrize(("value", "number"), [("2", "2"), ("two", "a number"), (10**21, "a number")])
def test_a_number_of_processes_that_no_machine_has_is_not_what_to_type(value: Any, number: str) -> None:
    assert [found.type for found in findings([launching.counts], ddp(value))] == [f"num_processes: {number}"]


def test_a_gpu_that_torch_cannot_use_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.accelerator.is_available():
        pytest.skip("torch can use the accelerator of this machine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(environment, "NVIDIA_DRIVER", tmp_path)  # as if the device were there
    monkeypatch.setattr(catalog, "DRIVERS", [tmp_path])
    (found,) = findings(rules.MACHINE, look())
    assert found.what.startswith(f"torch {version('torch')} cannot use this machine's GPU: ")


def test_default_config_is_found_unless_a_config_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("distributed_type: FSDP\nnum_processes: 4\n")
    assert check(None, None, as_json=False) == 1
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last == "1 finding"
    assert check(Path("ddp"), None, as_json=False) == 0  # a name
    assert capsys.readouterr().out.endswith("no findings\n")


def test_output(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_process: 2\n")
    assert check(path, None, as_json=True) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert found == {
        "what": "num_process is not a key of a config file of Accelerate",
        "why": "accelerate launch refuses the file: it had unknown keys",
        "type": "num_processes: 2; remove num_process",
    }
    assert check(path, None, as_json=False) == 1
    output = capsys.readouterr().out
    assert output.startswith("this machine\n") and output.endswith(
        "  type  num_processes: 2; remove num_process\n\n1 finding\n"
    )


@pytest.mark.parametrize("text", [None, "", "- a\n- b\n", "a: [1\nb: 2\n", "plain words"])
def test_what_is_no_config_is_a_mistake(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        check(path, None, as_json=False)
    with pytest.raises(UsageError, match="does not call fit"):
        check(CONFIGS[0], ROOT / "recipes/plain/ddp.py", as_json=False)


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("You need to manually pass in `--num_processes` using this config yaml.", "num_processes: with its value"),
        ("Please ensure at least two are specified for `--gpu_ids`, or", "gpu_ids: all; or distributed_type: 'NO'"),
        (
            "invalid literal for int() with base 10: '${RANK}'",
            "--machine_rank ${RANK} after accelerate launch: the shell",
        ),
    ],
)
def test_cure_of_what_the_launcher_refuses(line: str, typed: str) -> None:
    assert refusal_of(line).type.startswith(typed)


@pytest.mark.parametrize(
    ("section", "values", "typed"),
    [
        # of other versions of Accelerate
        ("", {"ipex_config": {"ipex": True}, "use_ipex": False}, ["remove ipex_config", "remove use_ipex"]),
        ("mpirun_config", {"mpirun_ccl": 1}, ["remove mpirun_ccl below mpirun_config"]),
        ("", {"num_process": 2}, ["num_processes: 2; remove num_process"]),
        # of DeepSpeed's file: without a word, the run would be in float32, without offload
        (
            "deepspeed_config",
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            [
                "mixed_precision: bf16; remove bf16 below deepspeed_config",
                "zero_stage: 3 below deepspeed_config; offload_param_device: cpu below deepspeed_config; "
                "remove zero_optimization below deepspeed_config",
            ],
        ),
        ("", {"bf16": True, "mixed_precision": "no"}, ["remove bf16, or mixed_precision: bf16, in place of 'no'"]),
        # Accelerate takes keys of this section for its flags, whatever they are
        ("deepspeed_config", {"main_process_port": 29501}, []),
    ],
)
def test_unknown_keys(section: str, values: dict[str, Any], typed: list[str]) -> None:
    config = Config(Path("config.yaml"), {section: values} if section else values, SERVER)
    found = findings([keys.unknown_keys, keys.unknown_section_keys], config)
    assert [finding.type for finding in found] == typed
