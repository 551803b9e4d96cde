"""Promise: the config decides where and how a recipe runs; the result is the same."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from accelerate_recipes.common.schedule import learning_rate_factor
from support.launching import CONFIGS, fork
from support.recipes import (
    BF16_CONFIGS,
    FLAGS,
    FLOAT32_CONFIGS,
    LINEAR,
    MISFIT,
    MNIST,
    MULTI_NODE_CONFIGS,
    RECIPES,
    STEPS,
    TEXT,
    TRANSFORMER,
    cell,
)
from support.runs import ROOT, TOLERANCE, Run, assert_same_result, largest_difference, weight_distance

# bf16 keeps 8 bits: the relative error of one rounding is up to 2^-9. The configs round different numbers: DDP inside
# autocast, FSDP2 and DeepSpeed the weights themselves. The difference grows during the run. Within these 20 steps, one
# process in bf16 differs from one in float32 by up to 0.10 %, and the configs differ from one process in bf16 by up to
# 0.12 %. Their first losses, means over a batch, differ by up to 7e-5. Their first gradient norms differ by less than
# one rounding.
BF16_RECIPES = {
    "mnist cnn": (MNIST, STEPS + "--optimizer sgd --learning_rate 0.1"),
    "linear regression": (LINEAR, STEPS),
    "transformer": (TRANSFORMER, STEPS + TEXT),
}
BF16_ROUNDING = 2**-8
BF16_TOLERANCE = 0.005


def test_every_config_and_recipe_is_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*FLOAT32_CONFIGS, *BF16_CONFIGS, *MULTI_NODE_CONFIGS}
    assert {f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.py")} == {s for s, _ in RECIPES.values()}


# {recipe: the configs of `make test`}. The others divide its model like that of a recipe before it, or test_products.py
# runs them. `make test-full` runs all.
OFTEN = {
    "mnist cnn": ("ddp", "fsdp2"),
    "linear regression": ("ddp", "fsdp2", "deepspeed_zero1"),
    "text classification": ("ddp", "tensor_parallel"),
    "token classification": ("ddp", "pipeline_parallel"),
    "masked lm": ("ddp", "deepspeed_zero3"),
    "embeddings": ("ddp",),
    "question answering": ("ddp",),
    "translation": ("tensor_parallel",),
    "experts": ("fsdp2_expert_parallel", "deepspeed_zero2"),
    "mnist mlp": ("ddp", "fsdp2_tensor_parallel", "deepspeed_zero2"),
    "finetune": ("ddp",),
    "diffusion": ("ddp",),
    "distillation": ("ddp",),
    "preferences": ("ddp",),
    "image classification": ("ddp",),
    "segmentation": ("ddp",),
    "detection": ("ddp",),
    "speech": ("ddp",),
    "vision language": ("ddp",),
}
# Their models are larger; their certificates are of 20 steps, too.
SLOW = ("text classification", "finetune", "distillation", "preferences", "image classification", "segmentation")
SLOW += ("detection", "speech", "vision language")
# Of four and eight processes: test_products.py compares a model of transformers under these, in float64.
PRODUCTS = ("hsdp", "fsdp2_tensor_parallel", "hsdp_tensor_parallel", "fsdp2_sequence_parallel", "fsdp2_pipeline")
PRODUCTS += ("fsdp2_tensor_pipeline",)


# What uses most of torch that changes between versions: the quick tests run with the lowest and the newest.
QUICK = ("fsdp2", "tensor_parallel", "sequence_parallel", "pipeline_parallel")
# Under ddp in `make quick` alone: in `make test`, tests of these recipes compare other configs with one process.
COMPARED_ELSEWHERE = ("text classification", "translation", "distillation", "speech", "finetune")
COMPARED_ELSEWHERE += ("image classification", "vision language")


def pair(config: str, recipe: str) -> Any:
    """A parameter of a test, with its marks."""
    is_rare = config not in OFTEN.get(recipe, [name for name in FLOAT32_CONFIGS if name not in PRODUCTS])
    is_quick = config == "ddp" or (recipe == "transformer" and config in QUICK)
    is_full = recipe in COMPARED_ELSEWHERE if is_quick else is_rare
    return pytest.param(config, recipe, marks=[pytest.mark.quick] * is_quick + [pytest.mark.full] * is_full)


PAIRS = [
    pair(config, recipe) for config in FLOAT32_CONFIGS for recipe in RECIPES if cell(recipe, config).result == "same"
]


@pytest.mark.parametrize(("config", "recipe"), PAIRS)
def test_config_gives_the_result_of_one_process(
    tmp_path: Path, reference: Callable[..., Run], config: str, recipe: str
) -> None:
    script, arguments = RECIPES[recipe]
    arguments += " --max_steps 10" * (recipe in SLOW)
    run = fork(tmp_path / "run", config, script, arguments + FLAGS.get(config, ""))
    assert_same_result(run, reference(script, arguments))
    assert run.card["precision"] == "float32"
    assert run.card["checked_steps"] == (0 if config == "single" else 2)  # without a word
    assert run.card["num_processes"] == load_config_from_file(str(CONFIGS / f"{config}.yaml")).num_processes


DIVISIONS = [
    ("ddp", 1, 4),
    ("ddp", 4, 4),
    ("deepspeed_zero2", 2, 4),
    ("deepspeed_zero2", 4, 1),
]


@pytest.mark.parametrize(
    ("config", "num_processes", "accumulation"),
    [
        division if division in DIVISIONS else pytest.param(*division, marks=pytest.mark.full)
        for division in product(("ddp", "deepspeed_zero2"), (1, 2, 4), (1, 4))
    ],
)
def test_processes_and_accumulation_only_divide_the_batch(
    tmp_path: Path, reference: Callable[..., Run], config: str, num_processes: int, accumulation: int
) -> None:
    script, arguments = RECIPES["mnist cnn"]
    micro_batch_size = 64 // num_processes // accumulation
    run = fork(tmp_path / "run", config, script, f"{arguments} --micro-batch-size {micro_batch_size}", num_processes)
    assert run.card["gradient_accumulation_steps"] == accumulation
    assert_same_result(run, reference(script, arguments))


@pytest.mark.parametrize("config", ["fsdp2", pytest.param("deepspeed_zero3", marks=pytest.mark.full)])
def test_one_process_is_a_shard_that_is_whole(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    """As on a machine with one GPU, whose config asks for shards."""
    script, arguments = RECIPES["mnist mlp"]
    run = fork(tmp_path / "run", config, script, arguments, num_processes=1)
    assert run.card["parallelism"] != "no parallelism"
    assert_same_result(run, reference(script, arguments))


@pytest.mark.parametrize(
    "config",
    [
        "deepspeed_zero3",
        *(
            pytest.param(config, marks=pytest.mark.full)
            for config in ("fsdp2", "hsdp", "fsdp2_tensor_parallel", "deepspeed_zero1", "deepspeed_zero3_offload")
        ),
    ],
)
def test_accumulation_when_sharded(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    script, arguments = RECIPES["mnist cnn" if cell("mnist cnn", config).result == "same" else "mnist mlp"]
    run = fork(tmp_path / "run", config, script, f"{arguments} --micro_batch_size 8", num_processes=4)
    assert_same_result(run, reference(script, arguments))


ONE_MACHINE = "--num_machines 1 --machine_rank 0 --rdzv_backend static"


@pytest.mark.parametrize(
    ("config", "recipe", "options", "flags"),
    [
        *(
            pytest.param(config, recipe, "", "", marks=[] if recipe == "transformer" else pytest.mark.full)
            for config in BF16_CONFIGS
            for recipe in BF16_RECIPES
        ),
        pytest.param("hsdp", "transformer", "", "--micro_batch_size 2", marks=pytest.mark.full),
        pytest.param("tensor_parallel", "transformer", "", "--micro_batch_size 8", marks=pytest.mark.full),
        pytest.param("fsdp2_tensor_parallel", "transformer", "", "--micro_batch_size 4", marks=pytest.mark.full),
        pytest.param("fsdp2_sequence_parallel", "transformer", "", "--micro_batch_size 4", marks=pytest.mark.full),
        ("pipeline_parallel", "transformer", "", "--pipeline_stages 2"),
        pytest.param("multi_node_ddp", "transformer", ONE_MACHINE, "", marks=pytest.mark.full),
        pytest.param("multi_node_hsdp", "transformer", ONE_MACHINE, "", marks=pytest.mark.full),
        pytest.param("multi_node_deepspeed_zero3", "transformer", ONE_MACHINE, "", marks=pytest.mark.full),
    ],
)
def test_bf16_is_close_to_bf16_on_one_process(
    tmp_path: Path, reference: Callable[..., Run], config: str, recipe: str, options: str, flags: str
) -> None:
    script, arguments = BF16_RECIPES[recipe]
    in_bf16 = "--mixed_precision bf16"
    expected = reference(script, arguments, in_bf16)
    run = fork(tmp_path / "run", config, script, f"{arguments} {flags}", options=f"{in_bf16} {options}")
    assert run.card["precision"] == expected.card["precision"] == "bf16"
    assert run.column("learning_rate") == expected.column("learning_rate")
    assert run.column("train/loss")[0] == pytest.approx(expected.column("train/loss")[0], rel=BF16_ROUNDING / 16)
    assert run.column("grad_norm")[0] == pytest.approx(expected.column("grad_norm")[0], rel=BF16_ROUNDING)
    for name in ("train/loss", "eval/loss"):
        assert largest_difference(run.column(name), expected.column(name)) <= BF16_TOLERANCE
    # The run did compute in bf16: its gradient norms differ from float32.
    in_float32 = reference(script, arguments)
    assert largest_difference(run.column("grad_norm"), in_float32.column("grad_norm")) > 50 * TOLERANCE


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("deepspeed_zero2_bf16", ""),
        pytest.param("deepspeed_zero3", "--mixed_precision bf16", marks=pytest.mark.full),
    ],
)
def test_training_in_bf16_begins_with_all_digits_of_the_weights(
    tmp_path: Path, reference: Callable[..., Run], config: str, options: str
) -> None:
    arguments = f"{TEXT} --max_steps 1 --learning_rate 1e-9"
    run = fork(tmp_path / "run", config, TRANSFORMER, arguments, options=options)
    assert run.card["precision"] == "bf16"
    assert weight_distance(run, reference(TRANSFORMER, arguments)) <= 1e-6, "rounded weights differ by 2e-3"


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        ("ddp", "linear regression"),
        *(pytest.param("ddp", recipe, marks=pytest.mark.full) for recipe in ("mnist mlp", "transformer")),
        *(
            pytest.param(config, "transformer", marks=pytest.mark.full)
            for config in ("fsdp2", "tensor_parallel", "fsdp2_tensor_parallel", "deepspeed_zero2", "deepspeed_zero3")
        ),
    ],
)
def test_compiled_model_gives_the_same_result(
    tmp_path: Path, reference: Callable[..., Run], config: str, recipe: str
) -> None:
    script, arguments = RECIPES[recipe]
    cache = tmp_path / "cache"
    run = fork(tmp_path / "run", config, script, f"{arguments} --compile", env={"TORCHINDUCTOR_CACHE_DIR": str(cache)})
    assert_same_result(run, reference(script, arguments))
    assert any(cache.rglob("*.cpp"))  # it did compile


@pytest.mark.parametrize("config", ["ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_frozen_weights_are_exported(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    script, arguments = MISFIT, "--case frozen --max_steps 3 --log_every 1"
    expected = reference(script, arguments)
    run = fork(tmp_path / "run", config, script, arguments)
    assert largest_difference(run.column("train/loss"), expected.column("train/loss")) <= TOLERANCE
    assert weight_distance(run, expected) <= TOLERANCE


@pytest.mark.parametrize("stage", [pytest.param("deepspeed_zero2", marks=pytest.mark.full), "deepspeed_zero3"])
def test_frozen_weights_are_exported_with_all_digits(tmp_path: Path, reference: Callable[..., Run], stage: str) -> None:
    arguments = "--case frozen --max_steps 1 --learning_rate 1e-9"
    run = fork(tmp_path / "run", stage, MISFIT, arguments, options="--mixed_precision bf16")
    assert run.card["precision"] == "bf16" and weight_distance(run, reference(MISFIT, arguments)) <= 1e-6


def test_learning_rate_follows_the_schedule(reference: Callable[..., Run]) -> None:
    rates = reference(*RECIPES["mnist cnn"]).column("learning_rate")
    assert rates == [1e-2 * learning_rate_factor("cosine", step, 20, 3) for step in range(20)]


def test_clipping_is_by_the_norm_of_the_whole_model(tmp_path: Path, reference: Callable[..., Run]) -> None:
    """Each process may hold only a shard of the gradient. DeepSpeed clips at 1.0 by default."""
    script, arguments = RECIPES["mnist cnn"][0], STEPS + "--model mlp --max_grad_norm 0.01"
    expected = reference(script, arguments)
    assert min(expected.column("grad_norm")) > 0.01  # it does clip
    for config in ("fsdp2_tensor_parallel", "deepspeed_zero3"):
        assert_same_result(fork(tmp_path / config, config, script, arguments), expected)
    unclipped = fork(tmp_path / "unclipped", "deepspeed_zero2", script, STEPS + "--max_grad_norm 0")
    assert_same_result(unclipped, reference(script, STEPS + "--max_grad_norm 0"))


def test_exported_model_loads_into_the_recipe_s_module(reference: Callable[..., Run]) -> None:
    import runpy

    from accelerate_recipes.common.tasks.vision.images import load_images

    recipe = runpy.run_path(str(ROOT / MNIST))
    run = reference(*RECIPES["mnist cnn"])
    _, eval_set = load_images("digits")
    model = recipe["ConvNet"](eval_set.image_shape, eval_set.num_classes)
    model.load_state_dict(load_file(run.output_dir / "model" / "model.safetensors"))
    with torch.no_grad():
        values = recipe["forward_step"](model, eval_set.__getitems__(list(range(len(eval_set)))))
    assert values["loss"].mean().item() == pytest.approx(run.column("eval/loss")[-1], rel=1e-6)
    assert values["accuracy"].mean().item() == pytest.approx(run.column("eval/accuracy")[-1], rel=1e-6)
