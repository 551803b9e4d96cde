"""What `accelerate-recipes plan` says of a run, against what processes of that run hold and send."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from accelerate_recipes.plan.clock import bytes_to_send
from accelerate_recipes.plan.estimates import Collective, Estimate
from support.runs import ROOT
from support.tool import tool

sys.path.insert(0, str(ROOT / "benchmarks"))
import memory


def of_gloo(plan: Estimate) -> float:
    """Bytes that a process sends in a step through gloo, which sums whole tensors where NCCL scatters the sums, and in
    which the first process sends its part of a broadcast or gather to each other one."""
    total = 0.0
    for event in plan.step.first:
        if isinstance(event, Collective):
            kind = "all_reduce" if event.kind == "reduce_scatter" else event.kind
            total += bytes_to_send(kind, event.num_bytes, event.group.size)
    return total


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "num_processes", "options"), [pytest.param(*run, id=f"{run[0]}-{run[1]}") for run in memory.RUNS]
)
def test_a_plan_says_what_processes_hold_and_send(config: str, num_processes: int, options: list[str]) -> None:
    run = config, num_processes, options
    measured = memory.launched(run, "10m", memory.SHORT)
    (plan,) = memory.planned([run], "10m", memory.SHORT)
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(plan.step, name) == pytest.approx(measured[name], rel=0.1), name
    # Under FSDP2, gloo's threads hold buffers for as long as they take: the peak differs from run to run.
    assert 0.8 * measured["peak"] < plan.step.peak < 1.02 * measured["peak"]
    if "zero" not in config:  # without GPUs, DeepSpeed sums in shared memory
        assert of_gloo(plan) == pytest.approx(measured["sent"], rel=0.03)


def test_each_kind_of_config_has_a_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [word for config in ("ddp", "fsdp2_tensor_pipeline", "deepspeed_zero3") for word in ("--config", config)]
    small = ["--", "--num_layers", "2", "--hidden_size", "32", "--context", "16"]
    experts = ["--config", "fsdp2_expert_parallel", "--json", *small, "--num_experts", "4", "--expert_parallel", "2"]
    layouts = []
    for asked in ([*flags, "--json", *small], experts):
        assert tool(monkeypatch, "plan", "transformer", *asked) == 0
        layouts += [plan.get("layout", plan) for plan in json.loads(capsys.readouterr().out)["plans"]]
    assert layouts == ["DDP", "FSDP2 2 × TP 2 × pipeline of 2 stages", "DeepSpeed ZeRO-3", "FSDP2 × EP 2"]


def test_a_thousand_processes_and_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--config", "fsdp2", "--num_processes", "1024", "--num_machines", "128", "--scaling", "--json"]
    flags += ["--", "--size", "10m", "--context", "16", "--batch_size", "2048"]
    assert tool(monkeypatch, "plan", str(ROOT / "benchmarks" / "llama.py"), *flags) == 0
    told = json.loads(capsys.readouterr().out)
    (plan,) = told["plans"]
    assert (plan["num_processes"], plan["micro_batch_size"], plan["layout"]) == (1024, 2, "FSDP2")
    assert (plan["check_steps"], plan["why_not_checked"]) == (2, None)
    weights = plan["saved"] / 3  # and two averages of Adam
    # Process 0 has a row of each matrix, also of those with fewer rows than there are processes.
    assert weights / 1024 < plan["weights"] < 2 * weights / 1024
    assert plan["sent"]["link"] == 0 and plan["sent"]["network"] > 2 * weights  # shards without a row are padded
    rows = told["scaling"]["fsdp2"]
    assert [row["num_processes"] for row in rows] == [1024, 4096]
    assert rows[1]["seconds"] > rows[0]["seconds"] and rows[1]["efficiency"] < 1


@pytest.mark.full
@pytest.mark.parametrize(("memory", "expected"), [("80", "2 checked"), ("2.6", "not checked")])
def test_a_plan_says_whether_the_first_steps_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], memory: str, expected: str
) -> None:
    """The weights, gradients and two averages of 9.6 million weights take 0.15 GB, and 2.5 GB of a GPU are reserved."""
    flags = ["--config", "fsdp2", "--memory", memory, "--", "--size", "10m", "--context", "16", "--max_steps", "3"]
    tool(monkeypatch, "plan", str(ROOT / "benchmarks" / "llama.py"), *flags)
    assert f"\nfirst steps   {expected} against one process" in capsys.readouterr().out


@pytest.mark.full
def test_hours_and_network_follow_from_machines_and_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = ["--config", "multi_node_deepspeed_zero3", "--config", "pipeline_parallel"]
    assert tool(monkeypatch, "plan", "transformer", *configs, "--json", "--", "--batch_size", "16") == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans[0]["num_machines"] == 2 and plans[0]["sent"]["link"] == 0 < plans[0]["sent"]["network"]
    for plan in plans:
        assert plan["hours"] * 3600 == pytest.approx(plan["num_steps"] * plan["seconds"])


@pytest.mark.full
def test_a_plan_that_does_not_fit_names_what_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--config", "ddp", "--memory", "2.65", "--", "--context", "512", "--batch_size", "16"]
    assert tool(monkeypatch, "plan", str(ROOT / "recipes" / "transformer.py"), *flags) == 1
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert lines["peak"].endswith("DOES NOT FIT")
    assert "--micro_batch_size 4 (" in lines["fits with"] and "--activation_checkpointing (" in lines["fits with"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            "recipes/mnist.py --config ddp --num_processes 7",
            "--batch_size 64 is not divisible by 7 data-parallel ranks",
        ),
        pytest.param("recipes/mnist.py --config tensor_parallel", "ConvNet has no tp_plan", marks=pytest.mark.full),
        (
            "recipes/mnist.py --config ddp --num_processes 3 --num_machines 2",
            "3 processes do not divide into 2 machines",
        ),
        ("recipes/mnist.py --gpu h1000", "--gpu h1000: use one of b200, h200, h100"),
        ("recipes/mnist.py --config pyproject.toml", "pyproject.toml, line 2 is not YAML"),
        ("recipes/mnist.py --memory 1", "--memory 1: use a number above 2.5, the GB of a GPU that tensors cannot use"),
        ("recipes/mnist.py --hardware none.json", "none.json: "),
        ("recipes/mnist.py --config ddp --set bf16", "--set bf16: use KEY=VALUE"),
        ("recipes/nothing.py", "recipes/nothing.py: no such recipe"),
        pytest.param("recipes/mnist.py --config ddp -- --epoch 3", "--epoch", marks=pytest.mark.full),
    ],
)
def test_mistakes_get_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert tool(monkeypatch, "plan", *arguments.split()) == 2
    printed = capsys.readouterr()
    assert line in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.full
def test_a_recipe_of_ones_own_that_looks_at_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "recipes" / "linear_regression.py").read_text()
    assert text.count("    fit(") == 1
    script = tmp_path / "own.py"
    script.write_text(
        text.replace("    fit(", "    assert model.weight.sum().item() == model.weight.sum().item()\n    fit(")
    )
    assert tool(monkeypatch, "plan", str(script), "--config", "ddp", "--scaling") == 0
    assert "ddp" in capsys.readouterr().out
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=0))
    assert tool(monkeypatch, "plan", str(script), "--config", "ddp") == 2
    assert "do not fit here" in capsys.readouterr().err


@pytest.mark.full
def test_a_plan_divides_experts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags, plans = ["--num_experts", "8", "--micro_batch_size", "3"], []
    for config, more in (("fsdp2", []), ("fsdp2_expert_parallel", ["--expert_parallel", "2"])):
        assert tool(monkeypatch, "plan", "transformer", "--config", config, "--json", "--", *flags, *more) == 0
        plans += json.loads(capsys.readouterr().out)["plans"]
    whole, divided = plans
    assert divided["layout"] == "FSDP2 × EP 2"
    for name in ("weights", "gradients", "optimizer"):  # experts are divided by one of the two, and not gathered
        assert divided[name] == pytest.approx(whole[name], rel=0.01)
    assert divided["flops"] == pytest.approx(whole["flops"], rel=0.05)
    assert sum(divided["sent"].values()) < sum(whole["sent"].values())


# A plan takes a few micro-batches, and this recipe all of them.
ALL = """from accelerate_recipes.plan import steps
steps._numbers = lambda setup: (setup.plan.accumulation,) * 2
"""


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_more_micro_batches_do_not_raise_the_peak_of_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    recipe, walking = ROOT / "recipes" / "transformer.py", tmp_path / "walking.py"
    walking.write_text(ALL + recipe.read_text())
    flags = ["--num_layers", "4", "--context", "512", "--batch_size", "8", "--micro_batch_size", "1"]
    flags += ["--pipeline_stages", "2", "--pipeline_schedule", schedule]
    peaks = []
    for script in (recipe, walking):
        assert tool(monkeypatch, "plan", str(script), "--config", "pipeline_parallel", "--json", "--", *flags) == 0
        peaks.append(json.loads(capsys.readouterr().out)["plans"][0]["peak"])
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)
