"""Promise: `accelerate-recipes doctor` finds what makes a run fail or another run, and says what to type.

tests/support/doctor/ has a bad file for each rule, and typical config files as `accelerate config` writes them. Their
first lines are the findings.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DistributedType
from torch.utils.file_baton import FileBaton

from accelerate_recipes.doctor import asked, check, machine, rules
from accelerate_recipes.doctor.config import Config, read
from accelerate_recipes.doctor.finding import Rule, findings
from accelerate_recipes.doctor.launched import INHERITED
from accelerate_recipes.doctor.machine import GPU, Lock, Machine, look
from accelerate_recipes.doctor.rules import keys, launching
from accelerate_recipes.errors import UsageError
from support.runs import ROOT

FILES = ROOT / "tests" / "support" / "doctor"
CONFIGS = sorted(ROOT.glob("accelerate_configs/*.yaml"))
SERVER = Machine(
    system="Linux",
    num_cores=64,
    memory=512 * 2**30,
    free_memory=500 * 2**30,
    shared_memory=256 * 2**30,
    gpus=(GPU("NVIDIA A100", 80 * 2**30),) * 8,
    open_files=1024,
    locked_memory=8 * 2**20,
    compiler="/usr/bin/c++",
    ninja="/usr/bin/ninja",
    mpirun="/usr/bin/mpirun",
    versions={"torch": "2.13.0", "transformers": "5.23.0", "deepspeed": "0.19.8"},
)
LAPTOP = replace(SERVER, num_cores=2, gpus=(), shared_memory=64 * 2**20, free_memory=4 * 2**30)
RULES: dict[str, tuple[Rule, ...]] = {
    "machine": (*rules.MACHINE, *rules.MACHINE_WITHOUT_CONFIG),
    "config": rules.CONFIG,
    "recipe": rules.RECIPE,
}
BAD = sorted(path for kind in RULES for path in FILES.glob(f"{kind}/*.yaml"))
TYPICAL = sorted(FILES.glob("typical/*.yaml"))
REFUSED = sorted(FILES.glob("refused/*.yaml"))


@pytest.fixture(autouse=True)
def no_gpu_and_empty_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this machine one whose only findings are those of the test."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("HF_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, str(tmp_path_factory.mktemp(name)))


Asked = Callable[[Path], dict[str, list[str]]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """ask(config) -> what a run and the launcher would refuse, on a machine without a GPU."""
    for name in filter(INHERITED.match, os.environ):
        monkeypatch.delenv(name)
    monkeypatch.chdir(FILES)  # DeepSpeed files have relative paths

    def get(path: Path) -> dict[str, list[str]]:
        with patch.dict(os.environ, {asked.QUESTION: json.dumps([str(path), False, 1])}):
            return asked.refusals()

    return get


def name_of(path: Path) -> str:
    return str(path.relative_to(FILES).with_suffix("")) if path.is_relative_to(FILES) else path.stem


def expected(path: Path) -> list[str]:
    """The findings in the first lines of a file."""
    return re.findall(r"^# finding: (.*)$", path.read_text(), re.MULTILINE)


def machine_with(changes: dict[str, Any]) -> Machine:
    changes = dict(changes)
    if "gpus" in changes:
        changes["gpus"] = tuple(GPU(**gpu) for gpu in changes["gpus"])
    if "locks" in changes:
        changes["locks"] = tuple(Lock(**lock | {"path": Path(lock["path"])}) for lock in changes["locks"])
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
def test_typical_config(path: Path, ask: Asked) -> None:
    ClusterConfig.from_yaml_file(path)  # what `accelerate config` writes, Accelerate reads
    found = findings(rules.CONFIG, read(path, SERVER))
    refused = ask(path)["lines"] if read(path, SERVER).is_for_the_loop else []
    assert [*(finding.what for finding in found), *refused] == expected(path)


@pytest.mark.parametrize("where", [SERVER, LAPTOP], ids=["server", "laptop"])
@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_shipped_configs_are_clean(path: Path, where: Machine) -> None:
    assert not findings((*rules.MACHINE, *rules.MACHINE_WITHOUT_CONFIG), where)
    assert not findings(rules.CONFIG, read(path, where))


def test_keys_are_those_of_accelerate() -> None:
    parser = launch.launch_command_parser()
    flags = {action.dest: action.default for action in parser._actions}
    groups = {group.title: {action.dest for action in group._group_actions} for group in parser._action_groups}
    sections = {
        "deepspeed_config": groups["DeepSpeed Arguments"],
        "fsdp_config": groups["FSDP Arguments"] | {"fsdp_ignored_modules"},  # it has no flag
        "parallelism_config": groups["ParallelismConfig Arguments"],
        "megatron_lm_config": groups["Megatron-LM Arguments"],
        "dynamo_config": {name for name in flags if name.startswith("dynamo_")},
        "fp8_config": groups["FP8 Arguments"],
        "mpirun_config": groups["MPI Arguments"],
    }
    assert sections == keys.SECTIONS
    assert set(ClusterConfig.__dataclass_fields__) | {"fp16", "dynamo_backend"} == keys.TOP
    assert set(launching.KINDS) == set(DistributedType.__members__)
    # Accelerate takes a value from the file only if the flag's default is None. TPUs alone have the other keys; the
    # rendezvous is the same with and without same_network.
    never_read = {name for name in ClusterConfig.__dataclass_fields__ if flags.get(name) is not None}
    assert never_read - keys.OF_TPUS - {"same_network"} == set(keys.OF_THE_COMMAND_LINE)
    assert {name: flags[name] for name in keys.OF_THE_COMMAND_LINE} == keys.OF_THE_COMMAND_LINE


@pytest.mark.parametrize("path", REFUSED, ids=name_of)
def test_what_the_loop_refuses_is_found(path: Path, ask: Asked) -> None:
    assert ask(path)["lines"] == expected(path) != []


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_nothing_refuses_a_shipped_config(path: Path, ask: Asked) -> None:
    answer = ask(path)
    assert not answer["lines"] and not answer["of_the_launcher"]


# Without those that need another machine, which have two documents, and without mpirun, which sets further variables.
LAUNCHABLE = [*TYPICAL, *(path for path in FILES.glob("config/*.yaml") if "---" not in path.read_text())]
LAUNCHABLE.remove(FILES / "typical" / "multi_cpu_mpi.yaml")


@pytest.mark.parametrize("path", LAUNCHABLE, ids=name_of)
def test_what_the_launcher_refuses_is_found(path: Path, ask: Asked) -> None:
    """A rule says more than the launcher's error."""
    if ask(path)["of_the_launcher"]:
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


def test_a_lock_is_stale_when_its_build_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("cpu_adam", "accelerate_recipes_1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    path = tmp_path / "cpu_adam" / "lock"
    path.unlink()
    build = FileBaton(str(path))
    assert build.try_acquire() and build.fd is not None
    os.utime(path, (0, 0))
    assert look().locks[0].is_held and not findings(rules.MACHINE, look())
    os.close(build.fd)  # as the system does when it kills the process
    (found,) = findings(rules.MACHINE, look())
    assert found.type == f"rm {path}"
    os.utime(path)
    assert not findings(rules.MACHINE, look())


def test_a_gpu_that_torch_cannot_use_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.accelerator.is_available():
        pytest.skip("torch can use the accelerator of this machine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(machine, "NVIDIA", tmp_path)  # as if the device were there
    monkeypatch.setattr(machine, "ACCELERATORS", (tmp_path,))
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
    assert check(ROOT / "accelerate_configs/ddp.yaml", None, as_json=False) == 0


def test_output(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_process: 2\n")
    assert check(path, None, as_json=True) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert found == {
        "what": "num_process is not a key of a config file of Accelerate",
        "why": "accelerate launch refuses the file: it had unknown keys",
        "type": "num_processes",
    }
    assert check(path, None, as_json=False) == 1
    output = capsys.readouterr().out
    assert output.startswith("this machine\n") and output.endswith("  type  num_processes\n\n1 finding\n")
    assert check(Path("ddp"), None, as_json=False) == 0  # a name
    assert capsys.readouterr().out.endswith("no findings\n")


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
    ("line", "cure"),
    [
        ("You need to manually pass in `--num_processes` using this config yaml.", "num_processes: with its value"),
        ("invalid literal for int() with base 10: '${RANK}'", "a number: Accelerate fills in no variables; the shell"),
    ],
)
def test_cure_of_what_the_launcher_refuses(line: str, cure: str) -> None:
    assert asked._cure(line).startswith(cure)


def test_keys_of_other_versions_are_removed() -> None:
    for key in ("ipex_config", "use_ipex", "mpirun_ccl"):
        assert keys._right_key(key, keys.TOP) == f"remove {key}"
    assert keys._right_key("num_process", keys.TOP) == "num_processes"
