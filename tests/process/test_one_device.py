"""Promise: processes that share one device, whose collectives go through the CPU, give the result of one process; and
the script for a GPU that is lent for ten minutes runs, and writes each result at once. Without a GPU, a rehearsal."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from support.launching import execute
from support.runs import ROOT

LEASE = str(ROOT / "tests/gpu/lease.py")
# One of each kind of collectives: {config: what the mode must have taken}.
KINDS = {
    "ddp": "allreduce_",
    "fsdp2": "_reduce_scatter_base_",
    "tensor_parallel": "all_reduce",
    "sequence_parallel": "all_to_all_single",
    "fsdp2_expert_parallel": "reduce_scatter_tensor",
    "pipeline_parallel": "send",
}


def rehearsed(monkeypatch: pytest.MonkeyPatch, file: Path, *arguments: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", [LEASE, "--output", str(file), *arguments])
    runpy.run_path(LEASE, run_name="__main__")
    return [json.loads(line) for line in file.read_text().splitlines()]


GATHERS = """
import torch
from torch import distributed as dist
from support.one_device import ThroughTheCpu

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with ThroughTheCpu(copies_all=True):
    sent, received, share = torch.arange(24.0).view(1, 3, 8), torch.empty(24), torch.empty(4, 6)
    dist.all_gather_into_tensor(received, sent)
    dist.reduce_scatter_tensor(share, sent)
assert received.tolist() == share.flatten().tolist() == sent.flatten().tolist()
"""


def test_shapes_that_nccl_takes_and_gloo_does_not(tmp_path: Path) -> None:
    """Accelerate gathers into a flat tensor on GPUs, and into a list on the CPU."""
    run = execute([sys.executable, "-c", GATHERS], tmp_path, tmp_path, {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    assert run.exit_code == 0, run.stderr


@pytest.mark.full
def test_strategies_that_share_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = ["--parts", "facts", "strategies", "--strategies", *KINDS]
    machine, *found, end = rehearsed(monkeypatch, tmp_path / "lease.jsonl", *chosen)
    assert machine["outcome"] == "rehearsal" and machine["versions"]["torch"] and end["part"] == "end"
    runs = {one["name"]: one for one in found if one["part"] == "strategy"}
    assert runs.keys() == KINDS.keys()
    for name, one in runs.items():
        assert one["outcome"] in ("same", "bit for bit") and one["checked"] >= 2, one
        assert f" {KINDS[name]} " in one["collectives"][0], one


def test_no_time_left_is_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = rehearsed(monkeypatch, tmp_path / "lease.jsonl", "--seconds", "1")
    assert next(one["why"] for one in found if one.get("outcome") == "failed") == "TimeoutError: no time left"
    assert len({one["part"] for one in found}) == 7


@pytest.mark.full  # starts GPT-2, pytest and `plan` as commands, and 42 processes: 120 CPU seconds
def test_the_whole_lease_in_rehearsal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = rehearsed(monkeypatch, tmp_path / "lease.jsonl")
    assert not [
        one
        for one in found
        if one.get("outcome") not in (None, "rehearsal", "measured", "done", "same", "bit for bit", "passed")
    ]
    assert sum(one.get("part") == "strategy" for one in found) == 12
    assert [one for one in found if "test" in one], "the tests write into the same file"
    assert found[-1]["seconds"] < 480
