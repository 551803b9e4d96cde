"""Promise: a resumed run goes on as if nothing had happened, also with its best weights, its evaluations and what its
model keeps; what it cannot continue is refused or named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.launching import fork
from support.recipes import LATEST
from support.runs import Run, refused

SCRIPT = "tests/users/resumed.py"
BEST = "--metric_for_best_model error --save_every 1 --keep_checkpoints 9"


def run_of(folder: Path, flags: str, config: str = "single", succeeds: bool = True) -> Run:
    return fork(folder, config, SCRIPT, flags, succeeds=succeeds)


def best_of(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.output_dir / "best" / "model.safetensors")


def step_of_best(run: Run) -> int:
    return json.loads((run.output_dir / "best" / "evaluation.json").read_text())["step"]


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("config", ["single", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_best_weights_are_never_those_of_steps_that_were_cut(tmp_path: Path, config: str) -> None:
    run = run_of(tmp_path / "run", f"{BEST} --best 5", config)
    cut = best_of(run)
    assert step_of_best(run) == 5
    # Step 4 is the best one of this run; earlier runs had replaced the weights of step 2 by those of step 5.
    back = f"--resume_from_checkpoint {run.output_dir}/checkpoints/step_00000002 --learning_rate 0.01 --best 4"
    four = run_of(tmp_path / "four", f"{back} --max_steps 4", config)
    again = run_of(run.output_dir, f"{BEST} {back}", config)
    assert "best/ has no weights of step 2: the next evaluation counts as the best so far" in again.stdout
    assert step_of_best(again) == 4 and not same(best_of(again), cut)
    assert same(best_of(again), four.weights)


def test_killed_run_repeats_the_steps_up_to_its_best_weights(tmp_path: Path) -> None:
    flags = f"{BEST} --best 5 --early_stopping_patience 2"
    whole = run_of(tmp_path / "whole", f"{flags} --max_steps 9")
    run = run_of(tmp_path / "run", f"{flags} --max_steps 5")
    for step in (4, 5):  # as if the run had been killed before it saved them
        (run.output_dir / "checkpoints" / f"step_{step:08d}" / "manifest.json").unlink()
    (run.output_dir / "run.json").unlink()
    again = run_of(run.output_dir, f"{flags} --max_steps 9 {LATEST}")
    assert again.lasting_records == whole.lasting_records and len(again.column("eval/error")) == 7
    assert same(best_of(again), best_of(whole)) and step_of_best(again) == 5


def test_best_weights_come_along_into_another_folder(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", f"{BEST} --max_steps 4")
    other = run_of(tmp_path / "other", f"{BEST} --max_steps 4 --seed 5")
    back = f"--resume_from_checkpoint {run.output_dir}/checkpoints/step_00000004 --overwrite_output_dir"
    again = run_of(other.output_dir, f"{BEST} {back}")
    assert step_of_best(again) == 3 and same(best_of(again), best_of(run))


def test_patience_that_ends_a_resumed_run_at_once_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", f"{BEST} --best 2 --max_steps 5")
    back = f"--resume_from_checkpoint {run.output_dir}/checkpoints/step_00000005"
    again = run_of(tmp_path / "again", f"{BEST} --best 2 --max_steps 9 --early_stopping_patience 3 {back}")
    line = "--early_stopping_patience 3 ends this run at once: 3 evaluations in a row were not better"
    assert line in again.stdout and same(again.weights, run.weights)


def test_evaluation_set_that_grew_is_named_and_starts_a_new_best(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", f"{BEST} --best 2 --max_steps 3")
    again = run_of(run.output_dir, f"{BEST} --best 2 --max_steps 5 --number 12 {LATEST}")
    assert "the evaluation data differ from the checkpoint's: do not compare their metrics" in again.stdout
    assert step_of_best(again) == 4


def test_evaluation_after_early_stopping_gets_the_steps_that_were_taken(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", f"{BEST} --best 2 --max_steps 9 --early_stopping_patience 1")
    assert run.column("eval/step")[-1] == 3
    only = run_of(run.output_dir, f"{BEST} --best 2 --max_steps 9 --early_stopping_patience 1 --evaluate_only")
    assert "eval/step 3" in only.stdout


def test_looking_for_the_metric_leaves_the_buffers_alone(tmp_path: Path) -> None:
    flags = "--what evaluations --max_steps 2"
    plain = run_of(tmp_path / "plain", flags)
    assert run_of(tmp_path / "best", f"{flags} {BEST}").column("eval/loss") == plain.column("eval/loss")


def test_hooks_that_convert_what_a_user_saves_change_no_checkpoint(tmp_path: Path) -> None:
    whole = run_of(tmp_path / "whole", "--what hooks")
    run_of(tmp_path / "run", "--what hooks --max_steps 3 --save_every 3")
    run = run_of(tmp_path / "run", f"--what hooks --save_every 3 {LATEST}")
    assert run.lasting_records == whole.lasting_records and same(run.weights, whole.weights)
    only = run_of(tmp_path / "run", "--what hooks --evaluate_only")
    assert f"eval/loss {whole.column('eval/loss')[-1]:.6g}" in only.stdout


def test_evaluations_of_averages_are_compared_after_a_resume(tmp_path: Path) -> None:
    flags = "--ema_decay 0.5 --eval_every 6"
    run = run_of(tmp_path / "run", f"{flags} --max_steps 3 --save_every 3", "ddp")
    back = f"{flags} --resume_from_checkpoint {run.output_dir}/checkpoints/step_00000003"
    run_of(tmp_path / "same", back, "ddp")
    other = run_of(tmp_path / "other", f"{back} --what rank", "ddp", succeeds=False)
    assert 'the evaluation after step 6 gives "loss" as' in refused(other)


def test_what_a_later_step_needs_and_no_checkpoint_stores_is_named(tmp_path: Path) -> None:
    line = "a step uses {}, which the step before changed, and no checkpoint stores: a resumed run has another"
    # Of the model, of a hook of the optimizer's step, tensors of such a hook, and a buffer that is not persistent.
    for what, name in {"bank": "bank", "calls": "calls", "slow": "slow", "unsaved": "kept"}.items():
        run = run_of(tmp_path / what, f"--what {what} --max_steps 2", "ddp")
        assert line.format(name) in run.stdout
    for what in ("cache", "history"):
        run = run_of(tmp_path / what, f"--what {what} --max_steps 2", "ddp")
        assert "no checkpoint stores" not in run.stdout


def test_buffer_that_grows_is_refused_at_the_first_save(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "--what grows --check_steps 0 --save_every 2", succeeds=False)
    assert "the buffer kept has changed its shape or type, and no checkpoint can restore that" in refused(run)
    assert not run.checkpoints
    run_of(tmp_path / "unsaved", "--what grows --check_steps 0")
