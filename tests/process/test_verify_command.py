"""Promise: what `accelerate-recipes verify` says of a recipe, or of a script on Accelerate, is true."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.launching import environment
from support.recipes import MNIST
from support.runs import ROOT, Run
from support.tool import tool

MUTANT = ROOT / "tests" / "scripts" / "mutant.py"
UNET = ROOT / "tests" / "scripts" / "unet.py"
SINGLE_FILE = ROOT / "recipes" / "single_file" / "mnist.py"
PLAIN_MISTAKES = ROOT / "tests" / "scripts" / "plain_mistakes.py"
CAUSES = {
    "batch_norm": "the forward pass changes 1.running_mean, as BatchNorm does, and sees 8 of 16 samples at a time",
    "learning_rate": "the learning rate depends on the number of processes",
    "own_noise": "forward_step or the model has its own random generator",
    "mean_of_means": "replace a mean inside forward_step by one value per sample",
}
PLAIN_CAUSES = {
    "scheduler": "a prepared scheduler advances 2 times per step",
    "tokens": "micro-batches have different numbers of tokens",
    "set_epoch": "each epoch has the same order: call set_epoch",
    "batch_size": "a step takes 32 samples under DDP and 16 in one process",
    "no_seed": "one process gives different losses when it runs again: call set_seed before you build the model",
    "dropout": "the forward pass draws random numbers (dropout, noise)",
    "short_batch": "step 4 takes 16 samples under DDP and 12 in one process: prepare fills up the last batch",
    "divided_twice": "the loader has a DistributedSampler, and prepare divides its samples again",
    "local_steps": "the processes have different weights after step 1",
    "hook": "a hook changes gradients in each process",
    "gather": "the evaluation gathers 48 rows under DDP and 27 in one process",
}
PLAIN_DATA = ROOT / "tests" / "scripts" / "plain_data.py"
DATA_CAUSES = {
    "draws": "draws random numbers (from the generators that set_seed seeds)",
    "own_generator": "the dataset or its collate_fn has its own random generator",
    "small_set": "step 1 takes 8 samples under DDP and 5 in one process: prepare fills up the last batch",
    "grows": "a step takes 16 samples under DDP and 8 in one process: divide the loader's batch size",
    "collate_draws": "the dataset or its collate_fn draws random numbers",
    "padded": "each process pads its samples to a different length",
    "stops": "only one run ends an epoch after step 1",
    "repeats": "the evaluation gathers 48 rows under DDP and 32 in one process: each process evaluates all samples",
    "not_cut": "the evaluation gathers 16 rows under DDP and 13 in one process",
}
Verify = Callable[..., Run]


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Verify:
    """verify(script, flags) -> the end of `accelerate-recipes verify`, which ran in this process and in tmp_path."""
    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)

    def run(script: Path, *flags: str) -> Run:
        code = tool(monkeypatch, "verify", str(script), *flags)
        output = capfd.readouterr()
        return Run(code, output.out, output.err, tmp_path)

    return run


def verified(verify: Verify, script: Path, *flags: str) -> tuple[Run, dict[str, Any]]:
    """Returns the run and the certificate."""
    run = verify(script, "--output", "c", *flags)
    return run, json.loads((run.output_dir / "c" / "certificate.json").read_text())


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[] if name == "mean_of_means" else pytest.mark.full) for name in CAUSES]
)
def test_a_wrong_recipe_fails_with_the_cause(verify: Verify, mistake: str) -> None:
    run, certificate = verified(verify, MUTANT, "--config", "ddp", "--steps", "4", "--", "--mistake", mistake)
    assert run.exit_code == 1 and not certificate["is_same"]
    assert CAUSES[mistake] in certificate["cause"] and CAUSES[mistake] in run.stdout
    rows = {row["name"]: row["verdict"] for row in certificate["rows"]}
    if mistake == "own_noise":  # the run finds it by itself
        assert "does not give the result of one process: in step 1" in rows["ddp"]
    else:
        assert rows["ddp"].startswith("DIFFERS from step 1")


def test_a_recipe_that_does_not_run_in_one_process_is_refused_with_its_line(verify: Verify) -> None:
    run = verify(MUTANT, "--", "--mistke", "none")
    assert run.exit_code == 2 and "--mistke: no such flag; did you mean --mistake" in run.stderr


@pytest.mark.full
@pytest.mark.parametrize("mistake", ["dropout", "noise"])
def test_random_numbers_are_compared_at_one_micro_batch_size(verify: Verify, mistake: str) -> None:
    run, certificate = verified(verify, MUTANT, "--config", "ddp", "--", "--mistake", mistake)
    assert run.exit_code == 0 and certificate["is_same"] and "One result." not in run.stdout
    assert "random numbers depend on --micro_batch_size, except in a dataset: all runs had" in certificate["gap"]


@pytest.mark.full
def test_a_network_that_amplifies_rounding_errors_is_the_same(verify: Verify) -> None:
    run, certificate = verified(verify, UNET, "--config", "ddp", "--config", "fsdp2")
    assert run.exit_code == 0, run.stdout
    verdicts = {row["name"]: row["verdict"] for row in certificate["rows"]}
    assert verdicts["single, 2 accumulated"] == verdicts["ddp"] == "same, to rounding errors"
    assert all(row["checked_steps"] == 2 for row in certificate["rows"] if row["name"].startswith(("ddp", "fsdp2")))


@pytest.mark.full
def test_flags_of_half_the_batch_leave_other_micro_batches_to_compare(tmp_path: Path, verify: Verify) -> None:
    flags = ["--model", "mlp", "--batch_size", "12", "--micro_batch_size", "6"]
    run, certificate = verified(verify, ROOT / MNIST, "--config", "ddp", "--steps", "6", "--", *flags)
    assert run.exit_code == 0, run.stdout
    names = [row["name"] for row in certificate["rows"]]
    assert names[:3] == ["single", "single, 3 accumulated", "single, 6 accumulated"]
    assert "--config ddp" in (tmp_path / "c" / "certificate.md").read_text()


@pytest.mark.full
def test_a_right_recipe_is_the_same_and_refusals_are_shown(tmp_path: Path, verify: Verify) -> None:
    configs = [f"--config={name}" for name in ("single", "ddp", "ddp", "tensor_parallel", "ddp_bf16")]
    run, certificate = verified(verify, ROOT / MNIST, *configs)
    assert run.exit_code == 0 and certificate["is_same"] and certificate["cause"] is None
    verdicts = [row["verdict"] for row in certificate["rows"]]
    assert verdicts[:5] == ["the reference", "same", "same", "same", "same"]
    assert "ConvNet has no tp_plan" in verdicts[5] and verdicts[6:] == ["same", "bit for bit"]
    assert "| ddp | 2 |" in (tmp_path / "c" / "certificate.md").read_text()
    # Against this certificate with one loss changed, all other values are equal.
    next(record for record in certificate["reference"]["records"] if record["step"] == 5)["train/loss"] *= 1.001
    (tmp_path / "then.json").write_text(json.dumps(certificate))
    code, found = against(verify, ROOT / MNIST)
    assert code == 1 and found["verdict"] == "DIFFERS from step 5, in train/loss" and found["weights_equal"]
    assert sum(row["difference"] > 0 for row in found["rows"]) == 1 and len(found["rows"]) == 3 * 20 + 2 * 2


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[] if name == "scheduler" else pytest.mark.full) for name in PLAIN_CAUSES]
)
def test_a_mistake_on_plain_accelerate_is_found(verify: Verify, mistake: str) -> None:
    run, certificate = verified(verify, PLAIN_MISTAKES, "--accelerate", "--", "--mistake", mistake)
    assert run.exit_code == 1 and PLAIN_CAUSES[mistake] in certificate["cause"]


@pytest.mark.full
@pytest.mark.parametrize("script", [PLAIN_MISTAKES, SINGLE_FILE])
def test_a_right_script_on_plain_accelerate_is_the_same(verify: Verify, script: Path) -> None:
    run, certificate = verified(verify, script, "--accelerate")
    assert run.exit_code == 0 and certificate["is_same"], run.stdout
    assert "MULTI_CPU" in certificate["rows"][-1]["name"]


def record(verify: Verify, script: Path, *flags: str) -> dict[str, Any]:
    """Records the first steps of a script; returns the record."""
    run = verify(script, "--record", "then.json", "--steps", "4", *flags)
    assert run.exit_code == 0, run.stderr
    return json.loads((run.output_dir / "then.json").read_text())


def against(verify: Verify, script: Path) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and what is said of the script beside its record."""
    run = verify(script, "--against", "then.json", "--json")
    return run.exit_code, json.loads(run.stdout)


def test_a_record_names_the_step_the_weight_and_the_versions_that_differ(tmp_path: Path, verify: Verify) -> None:
    content = record(verify, ROOT / MNIST, "--", "--model", "mlp")
    reference = content["reference"]
    assert 0 < reference["floor"]["weights"] < 1e-5 and reference["weights"].keys() == {
        f"{layer}.{name}" for layer in "135" for name in ("weight", "bias")
    }
    changed = [one for one in reference["records"] if "train/loss" in one][2]
    changed["train/loss"] *= 1.001
    reference["weights"]["3.weight"][0] += 0.1
    content["versions"]["torch"] = "1.0"
    (tmp_path / "then.json").write_text(json.dumps(content))
    code, found = against(verify, ROOT / MNIST)
    assert code == 1 and found["versions"]["torch"][0] == "1.0"
    assert found["verdict"].startswith(
        f"DIFFERS from step {changed['step']}, in train/loss; after the last step in 3.weight, by "
    )


@pytest.mark.full
@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/records/newest/*.json")), ids=lambda path: path.stem)
def test_the_records_are_those_of_the_recipes_as_they_are(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """So that a difference after an upgrade is one of the packages."""
    monkeypatch.chdir(ROOT)  # of the data that they name
    script = f"recipes/{path.stem.removesuffix('_experts')}.py"
    assert tool(monkeypatch, "verify", script, "--against", str(path)) == 0


@pytest.mark.full
def test_a_record_of_a_script_on_accelerate(verify: Verify) -> None:
    assert len(record(verify, SINGLE_FILE, "--accelerate")["reference"]["records"]) == 4
    assert against(verify, SINGLE_FILE)[1]["verdict"] == "bit for bit"


@pytest.mark.full
def test_a_trainer_of_transformers_gives_one_result_or_the_cause(verify: Verify) -> None:
    script = ROOT / "tests" / "scripts" / "trainer.py"
    run, certificate = verified(verify, script, "--accelerate", "--steps", "4")
    assert run.exit_code == 0, run.stdout
    rows = {row["name"]: row["verdict"] for row in certificate["rows"]}
    assert rows["single, 2 accumulated"] == rows["ddp (MULTI_CPU)"] == "same"


@pytest.mark.full
def test_a_batch_that_two_processes_of_a_trainer_cannot_share_is_refused(verify: Verify) -> None:
    script = ROOT / "tests" / "scripts" / "trainer.py"
    run = verify(script, "--accelerate", "--", "--batch", "3")
    assert run.exit_code == 2 and "per_device_train_batch_size 3 does not divide into 2" in run.stderr


@pytest.mark.full
def test_dropout_in_a_trainer_is_named(verify: Verify) -> None:
    script = ROOT / "tests" / "scripts" / "trainer.py"
    run, certificate = verified(verify, script, "--accelerate", "--steps", "4", "--", "--dropout", "0.5")
    assert run.exit_code == 1 and "draws random numbers (dropout, noise)" in certificate["cause"], run.stdout


@pytest.mark.parametrize(
    "case",
    [
        *(c for c in DATA_CAUSES if c in ("draws", "own_generator")),
        *(pytest.param(c, marks=pytest.mark.full) for c in DATA_CAUSES if c not in ("draws", "own_generator")),
    ],
)
def test_what_the_data_of_a_script_do(verify: Verify, case: str) -> None:
    run, certificate = verified(verify, PLAIN_DATA, "--accelerate", "--steps", "4", "--", "--case", case)
    assert run.exit_code == 1 and DATA_CAUSES[case] in certificate["cause"]


@pytest.mark.parametrize("case", ["cut_texts", pytest.param("cut_tensors", marks=pytest.mark.full)])
def test_a_script_may_cut_off_what_fills_up_the_last_batch(verify: Verify, case: str) -> None:
    run, certificate = verified(verify, PLAIN_DATA, "--accelerate", "--steps", "4", "--", "--case", case)
    assert run.exit_code == 0 and certificate["cause"] is None


def test_split_batches_clear_a_batch_that_grows(verify: Verify) -> None:
    run, _ = verified(verify, PLAIN_DATA, "--accelerate", "--split_batches", "--steps", "4", "--", "--case", "grows")
    assert run.exit_code == 0, run.stdout


@pytest.mark.full
def test_a_script_may_ask_for_its_batches_one_by_one(verify: Verify) -> None:
    run, _ = verified(verify, PLAIN_DATA, "--accelerate", "--steps", "4", "--", "--case", "asks_next")
    assert run.exit_code == 0, run.stdout + run.stderr


def test_a_script_that_fails_after_the_compared_steps_under_ddp(verify: Verify) -> None:
    run, certificate = verified(verify, PLAIN_DATA, "--accelerate", "--steps", "4", "--", "--case", "crash_alone")
    assert run.exit_code == 1 and "ValueError: the evaluation fails" in run.stdout
    assert certificate["cause"] is None


@pytest.mark.parametrize(
    ("case", "expected"),
    [("crash", "after the compared steps: ValueError: the evaluation fails"), ("nothing", "error: argument --case")],
)
def test_a_script_that_fails_in_one_process(verify: Verify, case: str, expected: str) -> None:
    run = verify(PLAIN_DATA, "--accelerate", "--steps", "4", "--", "--case", case)
    assert run.exit_code == 2 and expected in run.stderr
