"""Promise: variables that another launch has left end a run in one line, or do not count."""

import json
import os
import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.environment import Environment, drop_leftovers
from accelerate_recipes.common.errors import RunError, UsageError
from accelerate_recipes.common.launch import machines
from accelerate_recipes.common.launch.checks import check_device, check_launcher
from accelerate_recipes.common.launch.machines import agreement, saying_who_waits
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.run import _after_restart


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_empty_variables_are_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, " " * name.startswith("L"))
    drop_leftovers()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION"} & {*os.environ}
    assert Environment.read().local_rank is None


@pytest.mark.parametrize("value", ["two", "-1", "1.5", "0x1"])
def test_variables_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RANK", value)
    with pytest.raises(
        UsageError, match=f"RANK is {value}, which is not a number: unset RANK, or use accelerate launch"
    ):
        drop_leftovers()
    assert Environment.read().rank == 0  # so that the process can print the line


ADDRESS = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"RANK": "3"},
            "RANK is 3 of 1 processes, left over from another launch: unset RANK, or start with accelerate launch",
        ),
        (ADDRESS | {"RANK": "5", "WORLD_SIZE": "2"}, "RANK is 5 of 2 processes"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0, left over from another launch: unset WORLD_SIZE, or start"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is 0 without MASTER_ADDR or MASTER_PORT"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED is true without a launcher"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "ACCELERATE_USE_MEGATRON_LM is true without a launcher"),
        ({"ACCELERATE_USE_FSDP": "1"}, "unset ACCELERATE_USE_FSDP, or start with accelerate launch"),
    ],
)
def test_variables_of_another_launch(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], line: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = Environment.read()
    layout = Layout(environment=environment, rank=environment.rank, num_processes=environment.world_size)
    with pytest.raises(UsageError, match=re.escape(line)):
        check_launcher(layout, RunConfig())


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_of_another_machine(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
    layout = Layout(environment=Environment.read())
    with pytest.raises(UsageError, match=f"ACCELERATE_TORCH_DEVICE is {device}: .*: unset it"):
        check_device(layout, RunConfig())


def test_what_torchrun_counts_needs_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (tmp_path / "run.json").write_text(json.dumps({"launcher": os.getppid()}))  # the shell of both runs
    assert _after_restart(RunConfig(output_dir=tmp_path)).resume_from_checkpoint is None
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _after_restart(RunConfig(output_dir=tmp_path)).resume_from_checkpoint == "latest"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    line = "environment variable RANK expected, but not set: unset GROUP_WORLD_SIZE, or start with accelerate launch"
    with pytest.raises(UsageError, match=line), agreement(Environment.read(), RunConfig()):
        pass


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = Environment(world_size=2, local_rank=0, main_address="127.0.0.1", main_port=str(port))
        with pytest.raises(UsageError, match=f"the port of 127.0.0.1:{port} is in use"), saying_who_waits(environment):
            TCPStore("127.0.0.1", port, 2, is_master=True, timeout=timedelta(seconds=5))


def test_what_is_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machines, "PATIENCE_S", 0.1)
    environment = Environment(rank=1, world_size=2, local_rank=1, main_address="127.0.0.1", main_port="1")
    with pytest.raises(RunError, match="the processes did not meet"), saying_who_waits(environment):
        TCPStore("127.0.0.1", 1, 2, is_master=False, timeout=timedelta(seconds=1))
    line = "process 1 is waiting for all 2 processes at 127.0.0.1:1 (MASTER_ADDR, MASTER_PORT); Ctrl-C ends it."
    assert line in capsys.readouterr().out
