"""Promise: ordinary habits of training code have the result of one process, or one line refuses them."""

import runpy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_recipes.common.records.run_card import read_card
from support.launching import fork
from support.recipes import FLAGS, USERS
from support.runs import ROOT, TOLERANCE, Run, largest_difference, refused, weight_distance

LATE = "tests/users/late.py"
BROUGHT = runpy.run_path(str(ROOT / USERS))
CONFIGS = ("ddp", "fsdp2", "tensor_parallel", "deepspeed_zero2", "deepspeed_zero3")
# In `make test`. None: the result of one process; else a part of the lines that refuse the run.
DRAWN: dict[tuple[str, str], str | None] = {
    ("step closes_over_the_model", "ddp"): "forward_step does not call the model that it is given in step 1, so",
    ("step calls_module", "deepspeed_zero3"): "forward_step does not call the model that it is given in step 1",
    ("step calls_layers", "ddp"): "forward_step does not call the model that it is given in step 1, so",
    ("step calls_functionally", "fsdp2"): "FSDP2 cannot train this: RuntimeError: aten.addmm.default got mixed",
    ("step noise_of_numpy", "ddp"): None,
    ("step noise_of_its_own", "fsdp2"): "forward_step or the model has its own random generator, OWN",
    ("step mixup", "deepspeed_zero2"): None,
    ("step names_by_data", "ddp"): "return the same names for each batch",
    ("step types_by_data", "ddp"): "return one shape and type for each batch",
    ("step types_by_process", "ddp"): '"score" has the type torch.int64 in process 1, torch.float32 in process 0',
    ("step order_by_data", "fsdp2"): None,
    ("step metric_of_evaluation --metric_for_best_model near", "deepspeed_zero3"): None,
    ("step metric_without_gradients", "ddp"): None,
    ("step gradient_penalty", "tensor_parallel"): None,
    ("step gradient_penalty", "deepspeed_zero2"): None,
    ("model forces", "deepspeed_zero2"): None,
    # A segmentation fault: FSDP2 had freed weights that the derivative of a derivative needs.
    ("step gradient_penalty", "fsdp2"): None,
    ("model forces", "fsdp2"): None,
    ("step divides_by_processes", "ddp"): "the process, on the number of processes, or on what it did before",
    ("step divides_by_ranks", "fsdp2"): "the recipe asks for torch.distributed.is_initialized (steps.py:",
    ("step gathers", "ddp"): None,
    ("step gathers", "pipeline_parallel"): "a collective of all processes, and other stages' processes do not call it",
    ("step returns_what_it_gathers", "ddp"): '"error" of sample',
    ("step unfreezes_late", "fsdp2"): "the weights with requires_grad differ from those at the start in step",
    ("step counts_with_an_iterator", "ddp"): "forward_step changes COUNT, which the parity check cannot",
    ("step counts_until_late", "ddp"): None,
    ("step calls_backward", "fsdp2"): "forward_step calls backward(): return the loss of each sample",
    ("step differentiates_by_a_weight", "fsdp2"): "differentiates by head.weight, which FSDP2 frees in a backward",
    ("step exits_early", "ddp"): "the recipe called sys.exit() during the run",
    ("step follows_the_step", "deepspeed_zero2"): None,
    ("step not_a_number_for_some", "ddp"): None,
    ("step mapped", "ddp"): None,
    ("step casts_by_itself", "ddp"): None,
    ("model scripted", "ddp"): None,
    ("model with_gradients", "fsdp2"): None,
    ("model old_spectral_norm", "ddp"): "the forward pass changes stem.weight_u",
    ("model clamp", "ddp"): "the forward pass changes stem.weight, but each process sees different samples",
    ("model weights_that_share_memory", "ddp"): None,
    ("model weights_that_share_memory", "fsdp2"): "share their data, but are two tensors",
    ("optimizer clips_gradients", "fsdp2"): None,
    ("optimizer clips_gradients", "deepspeed_zero2"): "the update of stem.weight differs",
    ("optimizer clips_weights", "deepspeed_zero3"): "the update of stem.weight differs",
    ("optimizer rates_by_weights", "deepspeed_zero2"): None,
    ("optimizer rates_by_attribute", "fsdp2"): "the update of stem.weight differs",
    ("model counter", "ddp"): "the forward pass changes mean, but each process sees different samples",
    ("model mean_of_calls", "ddp"): "forward_step, a layer or a hook changes calls; each process calls it less",
    ("model max_norm", "fsdp2"): "the forward pass changes extra.weight",
    ("model unused_layer", "ddp"): "does not use extra.weight",
    ("model unused_layer", "deepspeed_zero2"): "does not use extra.weight",
    ("model unused_layer", "fsdp2_tensor_parallel"): "freeze weights that no pass uses",
    ("model routed", "fsdp2"): "freeze weights that no pass uses",
    ("model routed", "deepspeed_zero2"): "does not use experts.",
    # ZeRO would add the gradients of different experts: losses differed by 10 %.
    ("model routed_plus_nothing", "ddp"): None,
    ("model routed_plus_nothing", "deepspeed_zero2"): "takes a different path through the",
    ("model scalar_weight", "ddp"): None,
    ("model scalar_weight", "fsdp2"): None,
    ("model scalar_weight", "fsdp2_tensor_parallel"): None,
    (
        "model scalar_weight",
        "deepspeed_zero2",
    ): "extra.weight has no dimension, and DeepSpeed cannot send it to the other processes",
    ("model adaptive_depth", "ddp"): None,
    (
        "model adaptive_depth",
        "fsdp2",
    ): "after it calls extra, and not every process does",
    ("model adaptive_depth", "fsdp2_pipeline"): "after it calls 0.model.extra, and not every process does",
    ("model empty_weight", "fsdp2"): "FSDP2 cannot train this: RuntimeError: _chunk_cat expects",
    ("model empty_weight", "deepspeed_zero2"): None,
    ("model complex_weight", "fsdp2"): None,
    ("model complex_weight", "fsdp2_bf16"): "extra.weight is complex, and FSDP2 would cast it to 16 bits",
    ("model complex_weight", "deepspeed_zero3"): "extra.weight is complex64, and DeepSpeed would cast it",
    ("model mixed_types", "fsdp2"): None,
    ("model mixed_types", "fsdp2_bf16"): "FSDP2 cannot train this: RuntimeError: mat1 and mat2",
    ("model double", "fsdp2_bf16"): "FSDP2 does not give the result of one process: in step 1",
    ("model double", "deepspeed_zero2"): "weight is float64, and DeepSpeed would cast it",
    ("model mixed_types", "deepspeed_zero1"): "head.weight is float64, and DeepSpeed would cast it",
    # The last stage also held the weights of the first, and FSDP2 waited for their gradients.
    ("model skips", "fsdp2_pipeline"): None,
    ("model shared_weight", "fsdp2"): None,
    ("model shared_layer", "fsdp2_tensor_parallel"): None,
    ("model shared_between_blocks", "hsdp"): None,
    ("model shared_weight", "deepspeed_zero3"): None,
    ("model padded_encoder --optimizer sgd", "ddp"): None,
    ("model padded_encoder --optimizer sgd", "tensor_parallel"): None,
    ("model padded_encoder --optimizer sgd", "deepspeed_zero3"): None,
    **{("model renames_what_it_saves", config): None for config in ("fsdp2", "pipeline_parallel")},
    (
        "model softmax_between",
        "tensor_parallel",
    ): "in step 1 a pass computes blocks.0.down of _softmax[-1](blocks.0.up), and",
    ("model noise_between", "tensor_parallel"): "something between two layers of the tp_plan draws random numbers",
    ("model no_noise_yet_between", "tensor_parallel"): "of the tp_plan draws random numbers (randn_like), and each",
    ("model gradients_clamped_by_hooks", "fsdp2"): None,
    ("model gradients_clamped_by_hooks", "ddp"): None,
    ("model transposed_weight", "fsdp2"): "FSDP does not support non-contiguous parameters",
    ("set draws_for_batches", "ddp"): None,
    ("set weights_of_two_types", "ddp"): None,
    ("set with_names", "ddp"): None,
    ("set keeps_what_it_draws", "ddp"): "a sample of the training set draws random numbers when it is first read, and",
    ("collate_fn masks", "deepspeed_zero3"): None,
    ("set with_its_own_generator", "ddp"): '"x" of sample',
    ("sampler weighted", "ddp"): None,
    ("sampler least_read_first", "ddp"): "the sampler returns another order in process 1 than in process 0, in epoch 1",
    ("sampler with_its_own_generator", "ddp"): "the sampler returns a different order when it is called again",
    (
        "optimizer norm_of_all_gradients",
        "fsdp2",
    ): "reads a number, with float() or .item(), from a tensor that is divided",
    ("optimizer noise_in_the_step", "ddp"): None,
    ("optimizer subclass_of_adafactor", "deepspeed_zero2"): "MyAdafactor or a schedule does not get each weight whole",
    ("optimizer Muon", "deepspeed_zero3"): "Param gradient must be a 2D matrix",
    ("optimizer Rprop", "fsdp2"): "FSDP2 cannot train this: RuntimeError",
    ("optimizer NAdam", "deepspeed_zero2"): None,
    ("optimizer lion", "fsdp2"): None,
    ("optimizer state_from_the_constructor", "fsdp2"): None,
    ("optimizer Adagrad", "tensor_parallel"): None,
    ("optimizer LBFGS", "ddp"): "LBFGS calls the model several times",
    ("optimizer lookahead", "deepspeed_zero3"): None,
    # FSDP2 trained on with the averages after an evaluation.
    ("optimizer schedule_free --step switches_weights", "fsdp2"): None,
    (
        "optimizer schedule_free --step switches_weights",
        "deepspeed_zero2",
    ): "something writes weights for the evaluation, as a schedule-free optimizer does, and DeepSpeed ZeRO-2 computes",
    ("optimizer of_earlier_steps", "deepspeed_zero2"): "the optimizer has taken steps before fit, and DeepSpeed begins",
    ("optimizer initial_sums", "deepspeed_zero2"): None,
    ("optimizer of_earlier_steps --model tied", "pipeline_parallel"): None,
    ("optimizer two", "ddp"): "the optimizer is of the type list: expected one whole torch.optim",
    ("optimizer sam", "deepspeed_zero3"): "Sam calls the model several times per step",
    ("model lazy --optimizer plain_sgd", "fsdp2"): None,
    ("model sparse_table --optimizer plain_sgd", "ddp"): None,
    # The other stage has no sparse gradients.
    ("model sparse_table --optimizer plain_sgd", "pipeline_parallel"): None,
    # A stage has no weights to average.
    ("model all_but_head_frozen --ema_decay 0.9", "pipeline_parallel"): None,
    ("model sparse_tables --optimizer sparse_adam", "deepspeed_zero2"): "DeepSpeed ZeRO-2 cannot train this: Not",
    (
        "model sparse_table --optimizer plain_sgd",
        "fsdp2",
    ): "FSDP2 cannot train this: NotImplementedError: ",
    ("model scripted_whole --optimizer plain_sgd", "fsdp2"): "FSDP2 cannot train this: RuntimeError",
    ("model old_weight_norm --optimizer plain_sgd", "deepspeed_zero3"): None,
    ("optimizer closure_or_nothing", "ddp"): "NeedsClosure calls the model several times per step",
    ("model causal_adapters", "tensor_parallel"): None,
    ("model bf16_weights", "deepspeed_zero3"): "stem.weight is bfloat16, and DeepSpeed would cast it",
    ("model tied --step causal_metric_of_evaluation", "pipeline_parallel"): None,
    ("model tied --step causal_margin", "pipeline_parallel"): "calls a layer 2 times in a pass of forward_step",
    ("model causal_scaled_embeddings", "pipeline_parallel"): "a copy of the model calls refers to the original model",
    ("model causal_hook_on_hidden_states", "pipeline_parallel"): None,
    ("model extra_state", "pipeline_parallel"): None,
}


def cells() -> list[Any]:
    every = [*product(BROUGHT["HABITS"], CONFIGS)]
    every += [(habit, "pipeline_parallel") for habit in BROUGHT["HABITS"] if "causal" in habit]
    return [*DRAWN, *(pytest.param(*cell, marks=pytest.mark.full) for cell in every if cell not in DRAWN)]


@pytest.mark.parametrize(("habit", "config"), cells())
def test_habit_has_one_result_or_is_refused(
    tmp_path: Path, reference: Callable[..., Run], habit: str, config: str
) -> None:
    arguments = f"--{habit} --hang_timeout 60"
    run = fork(tmp_path / "run", config, USERS, arguments + FLAGS.get(config, ""), succeeds=False)
    expected = DRAWN.get((habit, config), ...)
    if run.exit_code == 0:
        assert expected in (None, ...), "not refused"
        if "the result depends on" not in run.stdout:  # a line says what one process does not have
            assert_close(run, reference(USERS, arguments))
    else:
        assert refused(run) and run.exit_code == 2 and not (run.output_dir / "model").exists(), run.stderr
        assert expected is not None and (expected is ... or expected in run.stderr), run.stderr


@pytest.mark.parametrize(
    "recipe",
    [
        f"{USERS} --step neighbours_in_training",
        f"{USERS} --step weighs_by_classes",
        f"{LATE} --what neighbours",
        f"{USERS} --collate_fn with_partners",
    ],
)
def test_value_that_depends_on_other_samples_is_said(tmp_path: Path, recipe: str) -> None:
    """The first begins in step 1 in training alone, the second is in few micro-batches, the last begins in step 4."""
    script, _, arguments = recipe.partition(" ")
    run = fork(tmp_path / "run", "ddp", script, arguments)
    assert run.stdout.count('"loss" of a sample depends on the other samples of its micro-batch, here 2 of 8') == 1


@pytest.mark.parametrize(
    ("habit", "name"),
    [
        ("bank_of_training", "earlier"),
        ("bank_of_samples", "by_sample"),
        ("mean_through_data", "plain"),
        ("mean_of_evaluations", "calls"),
        pytest.param("range_of_training", "calls", marks=pytest.mark.full),
    ],
)
def test_state_of_layers_is_said(tmp_path: Path, habit: str, name: str) -> None:
    """The second evaluation differed by 1 % under DDP, without a line."""
    run = fork(tmp_path / "run", "ddp", USERS, f"--model {habit} --hang_timeout 60")
    line = f"each call of forward_step or of a layer changes {name}: if it is used, the result dep"
    assert run.stdout.count(line) == 1


def test_traced_model_is_checked_in_16_bits(tmp_path: Path) -> None:
    """A traced model keeps what is assigned to its `forward` in an inner module: the check could not restore it."""
    run = fork(tmp_path / "run", "ddp_bf16", USERS, "--model traced --max_steps 2")
    assert read_card(run.output_dir)["checked_steps"] == 2


DEPENDS = "the result depends on the n"


@pytest.mark.parametrize(
    ("habit", "config", "line"),
    [
        (
            "step draws_in_evaluation",
            "ddp",
            f"each call of forward_step or of a layer changes OWN: if it is used, {DEPENDS}",
        ),
        ("step counts_in_a_logger", "ddp", f"two evaluations of one batch differ: {DEPENDS}"),
        ("model buffer_of_evaluations", "fsdp2", "the forward pass changes mean, as BatchNorm does, and sees 2 of 8"),
        (
            "step counts_right_answers --summary of_own_samples",
            "ddp",
            'summarize or examples gives "right" as ',
        ),
        ("model last_mean", "ddp", "the forward pass changes table, as BatchNorm does, and sees 2 of 8"),
        ("model growing_table", "ddp", ""),
        ("collate_fn sorts", "ddp", ""),
    ],
)
def test_what_evaluations_depend_on_is_said(tmp_path: Path, habit: str, config: str, line: str) -> None:
    """They were other ones on several processes, without a line; the last two are the same, and a line said they were
    not."""
    run = fork(tmp_path / "run", config, USERS, f"--{habit} --hang_timeout 60")
    assert run.stdout.count(line) == 1 if line else "depends on" not in run.stdout


def assert_close(run: Run, expected: Run) -> None:
    for name in {"train/loss"} | {name for record in expected.records for name in record if name.startswith("eval/")}:
        assert largest_difference(run.column(name), expected.column(name)) <= TOLERANCE
    # The rounding noise in the gradient of a bias is up to 2e-5 of its weight after Adam; habits change 3e-3 or more.
    assert weight_distance(run, expected) <= 10 * TOLERANCE


FAMILIES_DRAWN = {
    ("whisper", "fsdp2"),
    ("clip_with_temperature", "fsdp2"),
    ("bert_masked", "fsdp2"),
    ("clip", "ddp"),
    ("wav2vec2", "ddp"),
    ("mamba", "fsdp2"),
    ("resnet", "fsdp2"),
    ("gpt2", "deepspeed_zero3"),
}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        cell if cell in FAMILIES_DRAWN else pytest.param(*cell, marks=pytest.mark.full)
        for cell in product(BROUGHT["families"].FAMILIES, ("ddp", "fsdp2", "deepspeed_zero3"))
    ],
)
def test_family_of_transformers_has_one_result_or_is_refused(
    tmp_path: Path, reference: Callable[..., Run], family: str, config: str
) -> None:
    # SGD: Adam makes steps of the rounding noise in a key bias.
    arguments = f"--model {family} --optimizer sgd --max_steps 4 --hang_timeout 60"
    run = fork(tmp_path / "run", config, USERS, arguments, succeeds=(family, config) in FAMILIES_DRAWN)
    if run.exit_code != 0:
        assert refused(run) and run.exit_code == 2 and not (run.output_dir / "model").exists(), run.stderr
        return
    expected = reference(USERS, arguments)
    assert largest_difference(run.column("train/loss"), expected.column("train/loss")) <= TOLERANCE
    if "the result depends on" not in run.stdout:
        # With an absolute tolerance: a key bias starts at zero, and its gradient is zero except for rounding.
        for name, weight in expected.weights.items():
            torch.testing.assert_close(run.weights[name], weight, rtol=1e-4, atol=1e-6)


NOT_STORED = {
    "optimizer lookahead": "Lookahead changes its attribute count, which a checkpoint does not store",
    "optimizer state_of_all": "changes its state['all'], which a checkpoint does not store",
}


@pytest.mark.parametrize(
    "habit",
    [
        *("optimizer counter_in_the_group", "optimizer number_in_the_state", "optimizer numbers_in_the_group"),
        *("optimizer number_or_tensor", "collate_fn masks", *NOT_STORED),
    ],
)
@pytest.mark.parametrize("config", ["single", pytest.param("ddp", marks=pytest.mark.full), "fsdp2"])
def test_resume_goes_on_with_the_numbers_of_the_optimizer(
    tmp_path: Path, reference: Callable[..., Run], config: str, habit: str
) -> None:
    arguments = f"--{habit} --hang_timeout 60"
    first = fork(tmp_path / "run", config, USERS, f"{arguments} --save_every 2 --max_steps 2", succeeds=False)
    if habit in NOT_STORED:
        assert NOT_STORED[habit] in refused(first)
        return
    assert first.exit_code == 0, first.stderr
    run = fork(tmp_path / "run", config, USERS, f"{arguments} --resume_from_checkpoint latest")
    assert run.checkpoints == [2]
    expected = reference(USERS, arguments)
    assert largest_difference(run.column("train/loss"), expected.column("train/loss")) <= TOLERANCE
    assert weight_distance(run, expected) <= 10 * TOLERANCE


def test_one_process_of_deepspeed_is_compared_with_one_without(tmp_path: Path) -> None:
    arguments, config = "--max_steps 2 --hang_timeout 60", "deepspeed_zero2"
    assert fork(tmp_path / "equal", config, USERS, arguments, num_processes=1).card["checked_steps"] == 2
    run = fork(
        tmp_path / "run", config, USERS, arguments + " --optimizer clips_weights", num_processes=1, succeeds=False
    )
    assert "DeepSpeed ZeRO-2 does not give the result of one process: in step 1, the update of" in refused(run)


def test_check_that_is_off_lets_a_wrong_run_through(tmp_path: Path, reference: Callable[..., Run]) -> None:
    arguments = "--optimizer rates_by_attribute --hang_timeout 60"
    run = fork(tmp_path / "run", "fsdp2", USERS, f"{arguments} --check_steps 0")
    assert weight_distance(run, reference(USERS, arguments)) > 0.01


DRAWS = "tests/scripts/draws.py"
DRAWS_REFUSED = {
    "evaluation": "sample 0 of the evaluation set changes when it is read again: draw from",
    "readings": "sample 19 of the evaluation set changes when it is read again: draw from",
    "shuffled_evaluation": "of the evaluation set than process 0: build the same model and data in each process",
    "weight": "the forward pass creates the weight gain, which neither the optimizer nor another process has: make "
    "it in",
}


@pytest.mark.parametrize(
    ("where", "config"),
    [
        ("summarize", "ddp"),
        ("schedule", "ddp"),
        ("evaluation", "ddp"),
        ("readings", "ddp"),
        ("shuffled_evaluation", "ddp"),
        ("weight", "fsdp2"),
        *(pytest.param(where, "deepspeed_zero3", marks=pytest.mark.full) for where in ("summarize", "schedule")),
    ],
)
def test_what_draws_where_few_expect_it_has_one_result_or_is_refused(
    tmp_path: Path, reference: Callable[..., Run], where: str, config: str
) -> None:
    arguments = f"--where {where}"
    run = fork(tmp_path / "run", config, DRAWS, arguments, succeeds=where not in DRAWS_REFUSED)
    if where in DRAWS_REFUSED:
        assert DRAWS_REFUSED[where] in refused(run)
        return
    expected = reference(DRAWS, arguments)
    assert_close(run, expected)
    assert run.column("learning_rate") == expected.column("learning_rate")
    assert [record.get("eval/drawn") for record in run.records] == [r.get("eval/drawn") for r in expected.records]
