"""Promise: the reference's log-probabilities are the same under every config and kept, and preferences are learnt."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launching import fork
from support.recipes import FLAGS, LATEST, PREFERENCES, RECIPES
from support.runs import TOLERANCE, Run, assert_equal_to_the_last_bit, largest_difference, refused
from support.small_model import write_gpt2

SHORT = "--max_length 96 --batch_size 8 --max_steps 6 --log_every 1 --eval_every 6 --num_answers 0"


@pytest.fixture(scope="module")
def base(reference: Callable[..., Run]) -> Path:
    """A small chat model with its tokenizer."""
    return reference(PREFERENCES, SHORT).output_dir / "model"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """61 pairs, of which three are held out."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"prompt": f"Is {n} even?", "chosen": "no" if n % 2 else "yes", "rejected": "perhaps"} for n in range(61)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_reference_is_kept(tmp_path: Path, base: Path, pairs: Path) -> None:
    """A second run reads what the first one has computed. Other weights or another precision have their own."""
    env = {"HF_HOME": str(tmp_path / "cache")}
    flags = f"{SHORT} --data {pairs} --model_name_or_path {base}"
    first = fork(tmp_path / "first", "ddp", PREFERENCES, flags, env=env)
    second = fork(tmp_path / "second", "ddp", PREFERENCES, f"{flags} --lora_rank 0", env=env)
    line = "computing the reference's log-probabilities of "
    assert line in first.stdout and line not in second.stdout
    # 3 are held out, 48 are of the steps, and a checkpoint knows the data by a few others.
    assert 51 <= int(first.stdout.split(line)[1].split()[0]) < 61
    assert_equal_to_the_last_bit(second, first)
    adapted = fork(tmp_path / "adapted", "single", PREFERENCES, f"{flags} --lora_rank 4", env=env)
    assert line not in adapted.stdout
    assert largest_difference(adapted.column("train/loss")[:1], first.column("train/loss")[:1]) <= TOLERANCE
    flags_onward = f"{flags} --model_name_or_path {adapted.output_dir}/model --merge"
    onward = fork(tmp_path / "onward", "single", PREFERENCES, flags_onward, env=env)
    assert (tmp_path / "onward" / "merged" / "model.safetensors").is_file()
    assert line in onward.stdout and onward.column("train/loss")[0] == pytest.approx(0.6931472, abs=1e-6)
    assert adapted.column("train/loss")[-1] < 0.68 and onward.column("train/reward_margin")[0] == 0
    in_bf16 = fork(tmp_path / "bf16", "single", PREFERENCES, flags, options="--mixed_precision bf16", env=env)
    assert line in in_bf16.stdout
    # Before the first step, the policy is the reference: without a difference, the loss is log 2.
    assert first.column("train/loss")[0] == pytest.approx(0.6931472, abs=1e-6)
    assert first.column("train/reward_accuracy")[0] == first.column("train/reward_margin")[0] == 0


@pytest.mark.full
@pytest.mark.parametrize("config", ["ddp", pytest.param("deepspeed_zero3", marks=pytest.mark.full)])
def test_the_policy_begins_as_its_reference(tmp_path: Path, pairs: Path, config: str) -> None:
    """With a model that has dropout, GPT-2, and whose padding is its end token; also after a resume."""
    write_gpt2(tmp_path / "gpt2")
    flags = f"{SHORT} --data {pairs} --model_name_or_path {tmp_path}/gpt2 --learning_rate 1e-3 --save_every 3"
    flags += " --keep_checkpoints 9"
    env = {"HF_HOME": str(tmp_path / "cache")}
    run = fork(tmp_path / "run", config, PREFERENCES, f"{flags} --micro_batch_size 2", env=env)
    assert run.column("train/loss")[0] == pytest.approx(0.6931472, abs=1e-6)
    assert run.column("train/reward_accuracy")[0] == 0
    other = fork(tmp_path / "other", "single", PREFERENCES, flags, env=env)  # dropout's masks would differ
    assert largest_difference(run.column("train/loss"), other.column("train/loss")) <= TOLERANCE
    path = tmp_path / "run" / "checkpoints" / "step_00000003"
    again = fork(tmp_path / "again", "single", PREFERENCES, f"{flags} --resume_from_checkpoint {path}", env=env)
    assert largest_difference(again.column("train/loss"), other.column("train/loss")[3:]) <= TOLERANCE
    assert json.loads((run.output_dir / "model" / "config.json").read_text())["resid_pdrop"] == 0.1


@pytest.mark.full
@pytest.mark.parametrize("config", ["fsdp2", "deepspeed_zero3", "tensor_parallel"])
@pytest.mark.parametrize("kind", ["dpo_norm", "ipo"])
def test_adapters_and_losses(tmp_path: Path, reference: Callable[..., Run], base: Path, config: str, kind: str) -> None:
    flags = f"{SHORT} --loss {kind} --model_name_or_path {base} --lora_rank 4 --learning_rate 1e-2"
    expected = reference(PREFERENCES, flags)
    run = fork(tmp_path / "run", config, PREFERENCES, f"{flags} --micro_batch_size 2 --loss_chunk 100")
    for name in ("train/loss", "eval/loss"):
        assert largest_difference(run.column(name), expected.column(name)) <= TOLERANCE


@pytest.mark.full
def test_a_longer_run_goes_on_with_the_same_reference(tmp_path: Path, pairs: Path) -> None:
    """Bit for bit, though each computes the reference of its own steps."""
    flags = f"{SHORT} --data {pairs} --lr_schedule constant --save_every 3 --keep_checkpoints 9"
    whole = fork(tmp_path / "whole", "ddp", PREFERENCES, flags)
    fork(tmp_path / "run", "ddp", PREFERENCES, f"{flags} --max_steps 3")
    run = fork(tmp_path / "run", "ddp", PREFERENCES, f"{flags} {LATEST}")
    assert run.column("train/loss")[3:] == whole.column("train/loss")[3:]
    assert run.column("eval/logp_chosen")[-1:] == whole.column("eval/logp_chosen")


@pytest.mark.full
@pytest.mark.parametrize("config", ["fsdp2", "pipeline_parallel"])
def test_resumed_run_is_the_same(tmp_path: Path, config: str) -> None:
    flags = f"{SHORT} --save_every 3 --keep_checkpoints 9{FLAGS.get(config, '')}"
    whole = fork(tmp_path / "run", config, PREFERENCES, flags)
    last = tmp_path / "run" / "checkpoints" / "step_00000006"
    shutil.rmtree(last), shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "again" / "checkpoints")
    run = fork(tmp_path / "again", config, PREFERENCES, f"{flags} {LATEST}")
    assert run.column("train/loss") == whole.column("train/loss")[3:]
    assert run.column("eval/loss") == whole.column("eval/loss")
    assert all(weight.equal(run.weights[name]) for name, weight in whole.weights.items())


def test_preferences_are_learnt(tmp_path: Path, base: Path, pairs: Path) -> None:
    flags = f"{SHORT} --max_steps 30 --learning_rate 3e-3 --data {pairs} --model_name_or_path {base} --num_answers 2"
    run = fork(tmp_path / "run", "ddp", PREFERENCES, flags, env={"HF_HOME": str(tmp_path / "cache")})
    assert run.column("eval/reward_accuracy")[-1] == 1 and "of 2 held-out answers are right" in run.stdout


@pytest.mark.full
def test_result_of_the_docstring(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", PREFERENCES)
    assert run.column("eval/reward_accuracy")[-1] > 0.9


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--lora_rank 4", "use --model_name_or_path, too"),
        ("--max_samples 3", "--max_samples reads rows of a file or of the Hub, and --data rules has none"),
        ("--data nowhere.jsonl", "--data nowhere.jsonl: no such file"),
        ("--loss ppo", "--loss ppo: expected one of dpo, dpo_norm, "),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: str, line: str) -> None:
    run = fork(tmp_path / "run", "single", PREFERENCES, f"{RECIPES['preferences'][1]} {flags}", succeeds=False)
    assert line in refused(run) and run.exit_code == 2
