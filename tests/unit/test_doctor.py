"""Promise: `accelerate-recipes doctor` finds what makes a run fail or another run, and says what to type.

tests/support/doctor/ has a bad file for each rule, and typical config files as `accelerate config` writes them. Their
first lines are the findings.
"""

import itertools
import json
import os
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DistributedType
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from torch import nn
from torch.utils.file_baton import FileBaton

from accelerate_recipes.doctor import check, machine, rules
from accelerate_recipes.doctor.config import Config, read
from accelerate_recipes.doctor.finding import Rule, findings
from accelerate_recipes.doctor.machine import GPU, Lock, Machine, look
from accelerate_recipes.doctor.recipe import Layer, Recipe, facts
from accelerate_recipes.doctor.rules import keys, launching, pair
from accelerate_recipes.errors import UsageError
from common.config import RunConfig
from common.errors import UsageError as Refusal
from common.launch.checks import check_launch
from common.parallel.stages import check_pipeline
from common.parallel.tensor_parallel import STYLES, check_plan
from common.plan import Plan, split_batch
from common.tasks.lora import add_lora
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
    python_header=Path("/usr/include/python3.11/Python.h"),
    versions={"torch": "2.13.0", "transformers": "5.23.0", "deepspeed": "0.19.8"},
)
LAPTOP = replace(SERVER, num_cores=2, gpus=(), shared_memory=64 * 2**20, free_memory=4 * 2**30)
LLAMA = Recipe(
    model="LlamaForCausalLM",
    classes=["Embedding", "Linear", "LlamaDecoderLayer", "LlamaForCausalLM"],
    has_plan=True,
    layers=[Layer("up", "Linear", [384, 128], "colwise", ""), Layer("down", "Linear", [128, 384], "rowwise", "")],
    strange_patterns={},
    heads={"num_attention_heads": 4, "num_key_value_heads": 4},
    num_layers=4,
    weights={},
    sample_bytes=1024,
    num_samples=10_000,
    batch_size=48,
    micro_batch_size=None,
    pipeline_stages=1,
    max_grad_norm=1.0,
    ema_decay=0.0,
    num_workers=0,
)
RULES: dict[str, tuple[Rule, ...]] = {
    "machine": (*rules.MACHINE, *rules.MACHINE_WITHOUT_CONFIG),
    "config": rules.CONFIG,
    "pair": rules.PAIR,
}
BAD = sorted(path for kind in RULES for path in FILES.glob(f"{kind}/*.yaml"))
TYPICAL = sorted(FILES.glob("typical/*.yaml"))


@pytest.fixture(autouse=True)
def no_gpu_and_empty_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this machine one whose only findings are those of the test."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("HF_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, str(tmp_path_factory.mktemp(name)))


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
    recipe = dict(changes["recipe"])
    if "layers" in recipe:
        recipe["layers"] = [Layer(**layer) for layer in recipe["layers"]]
    return config, replace(LLAMA, **recipe)


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
def test_typical_config(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILES)
    ClusterConfig.from_yaml_file(path)  # what `accelerate config` writes, Accelerate reads
    found = findings(rules.CONFIG, read(path, SERVER))
    assert [finding.what for finding in found] == expected(path)


@pytest.mark.parametrize("where", [SERVER, LAPTOP], ids=["server", "laptop"])
@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_shipped_configs_are_clean(path: Path, where: Machine) -> None:
    assert not findings((*rules.MACHINE, *rules.MACHINE_WITHOUT_CONFIG), where)
    config = read(path, where)
    flags = {"pipeline_stages": 2} if path.stem == "pipeline_parallel" else {}
    assert not findings(rules.CONFIG, config)
    assert not findings(rules.PAIR, config, replace(LLAMA, **flags))


def test_shipped_configs_are_clean_here(capsys: pytest.CaptureFixture) -> None:
    for path in CONFIGS:
        assert check(path, None, as_json=True) == 0, path
        assert json.loads(capsys.readouterr().out) == []


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


def launched(path: Path) -> dict[str, str]:
    """The environment that `accelerate launch` gives the first process. Raises what the launcher raises."""
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(path), "recipe.py"])
    arguments, defaults, _ = launch._validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    arguments.main_process_port = 0
    if arguments.use_deepspeed:
        _, variables = prepare_deepspeed_cmd_env(arguments)
    elif arguments.multi_gpu or arguments.use_fsdp or arguments.use_megatron_lm:
        variables = prepare_multi_gpu_env(arguments)
    else:
        _, variables = prepare_simple_launcher_cmd_env(arguments)
        return variables
    return variables | {"LOCAL_RANK": "0", "WORLD_SIZE": str(arguments.num_processes)}


# Without those that need another machine, which have two documents, and without mpirun, which sets further variables.
LAUNCHABLE = [*CONFIGS, *TYPICAL, *(path for path in FILES.glob("config/*.yaml") if "---" not in path.read_text())]
LAUNCHABLE.remove(FILES / "typical" / "multi_cpu_mpi.yaml")
REFUSED = (Refusal, ValueError, AttributeError, KeyError, TypeError, RuntimeError, AssertionError, ImportError)


@pytest.mark.parametrize("path", LAUNCHABLE, ids=name_of)
def test_what_the_launch_refuses_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILES)
    found = [finding.what for finding in findings(rules.CONFIG, read(path, LAPTOP))]
    for name in [name for name in os.environ if re.match("ACCELERATE_|FSDP_|WORLD_SIZE|LOCAL_RANK|MASTER_", name)]:
        monkeypatch.delenv(name)
    try:
        for name, value in launched(path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        check_launch()
    except REFUSED as error:
        assert found, error


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


def tensor_parallel(size: int) -> Config:
    return ddp(size, parallelism_config={"parallelism_config_tp_size": size})


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_batch_sizes_are_refused_as_in_the_loop(ranks: int, stages: int) -> None:
    for batch_size, micro in itertools.product((1, 6, 8, 12, 64), (None, 1, 2, 3, 5, 8, 64)):
        config = ddp(ranks * stages)
        recipe = replace(LLAMA, batch_size=batch_size, micro_batch_size=micro, pipeline_stages=stages)
        found = findings(rules.PAIR, config, recipe)
        try:
            sizes = split_batch(batch_size, micro, ranks, stages)
        except Refusal as error:
            assert len(found) == 1
            assert found[0].type.split(",")[0] in str(error)
        else:
            assert not found and pair.split(config, recipe) == sizes


def test_small_training_sets_are_refused_as_in_the_loop() -> None:
    config = ddp(2)
    for size in (1, 5, 47, 48):
        found = findings(rules.PAIR, config, replace(LLAMA, num_samples=size))
        try:
            Plan.of(RunConfig(batch_size=48), size, 2, 0)
        except Refusal as error:
            assert [finding.type.split(",")[0] in str(error) for finding in found] == [True]
        else:
            assert not found


class Network(nn.Module):
    def __init__(self, plan: dict[str, str] | None, width: int = 8, tied: bool = False):
        super().__init__()
        if plan is not None:
            self.tp_plan = plan
        self.up, self.act, self.down = nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        if tied:
            self.layers[0].weight = self.layers[1].weight


def facts_about(model: nn.Module, **changes: Any) -> Recipe:
    optimizer = torch.optim.AdamW(model.parameters())
    train_set = [{"x": torch.zeros(4)}] * 100
    found = facts(None, model, optimizer, None, train_set, train_set, RunConfig(), **changes)
    found = json.loads(json.dumps(found))
    return Recipe(**found | {"layers": [Layer(**layer) for layer in found["layers"]]})


PLANS: list[tuple[dict[str, str] | None, int, bool]] = [
    (None, 8, False),
    ({"up": "colwise", "down": "rowwise"}, 8, False),
    ({"up": "colwise", "down": "rowwise"}, 6, False),
    ({"up": "columns"}, 8, False),
    ({"act": "colwise"}, 8, False),
    ({"ups": "colwise"}, 8, False),
    ({"layers.*": "colwise"}, 8, False),
    ({"layers.*": "colwise"}, 8, True),
]


@pytest.mark.parametrize(("plan", "width", "tied"), PLANS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_plans_are_refused_as_in_the_loop(plan: dict[str, str] | None, width: int, tied: bool, size: int) -> None:
    model = Network(plan, width, tied)
    found = [finding.what for finding in findings(rules.PAIR, tensor_parallel(size), facts_about(model))]
    try:
        check_plan(model, size)
    except Refusal as error:
        # A style, or a name, is in both lines.
        assert found and set(re.findall(r"\w+", found[0])) & set(re.findall(r"\w+", str(error))) - {"tp_plan"}
    else:
        assert not found


def test_facts_of_a_causal_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(shape)
    recipe = facts_about(model)
    assert recipe.heads == {"num_attention_heads": 6, "num_key_value_heads": 3} and recipe.num_layers == 3
    assert "LlamaDecoderLayer" in recipe.classes and recipe.sample_bytes == 16 and recipe.num_samples == 100
    with pytest.raises(Refusal, match="num_key_value_heads is 3"):
        check_plan(model, 2)
    (found,) = findings(rules.PAIR, tensor_parallel(2), recipe)
    assert "num_key_value_heads is 3" in found.what
    assert not findings(rules.PAIR, ddp(3), replace(recipe, pipeline_stages=3, batch_size=48))
    with pytest.raises(Refusal, match="3 layers are fewer"):
        check_pipeline(model, 4)
    (found,) = findings(rules.PAIR, ddp(4), replace(recipe, pipeline_stages=4, batch_size=48))
    assert "3 layers are fewer" in found.what


def test_adapters_are_divided_as_in_the_loop() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def adapted(width: int) -> nn.Module:
        shape = {"hidden_size": 24, "intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": 4}
        return add_lora(LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape)), 3, "q_proj,down_proj", "base")

    model = adapted(48)
    recipe = facts_about(model)
    assert {layer.name: layer.style for layer in recipe.layers} == check_plan(model, 2)
    assert not findings(rules.PAIR, tensor_parallel(2), recipe)
    model = adapted(45)
    with pytest.raises(Refusal, match="is 45 wide"):
        check_plan(model, 2)
    assert any("is 45 wide" in finding.what for finding in findings(rules.PAIR, tensor_parallel(2), facts_about(model)))


def test_styles_are_those_of_the_loop() -> None:
    assert pair.STYLES == STYLES


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
