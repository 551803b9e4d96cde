"""Promise: tensor parallelism has the result of one process, also with a plan that is derived; what is derived wrongly
is not trained."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate_recipes.verify.differences import distances
from support.launching import fork
from support.recipes import USERS
from support.runs import Run, largest_difference, refused

WRONG_PLAN = "tests/scripts/wrong_plan.py"
OFTEN = ("gpt2", "deepseek_v2")
# {model: the share of its weights that is divided, in %}
SHIPPED = {"experts": 99, "deepseek_v2": 90, "phi3": 99}
DERIVED = {"gpt2": 27, "encoder": 34, "encoder_decoder": 94, "vit": 55, "swin": 50, "convnext": 54, "dinov2": 64}
DERIVED |= {"clip": 64, "bart": 90, "bert_masked": 32, "whisper": 80, "wav2vec2": 71, "opt": 84, "falcon": 66}


@pytest.mark.parametrize(
    "model", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in SHIPPED | DERIVED]
)
def test_result_is_that_of_one_process(tmp_path: Path, reference: Callable[..., Run], model: str) -> None:
    arguments = f"--model {model} --optimizer sgd"
    run, one = fork(tmp_path / "run", "tensor_parallel", USERS, arguments), reference(USERS, arguments)
    plan, share = ("a derived one", DERIVED[model]) if model in DERIVED else ("the tp_plan of", SHIPPED[model])
    assert re.search(rf"{plan}.* divides {share}% of the weights among 2 processes", run.stdout)
    for name in ("train/loss", "grad_norm", "eval/loss"):
        assert largest_difference(run.column(name), one.column(name)) <= 1e-5
    # The gradient of a bias of keys alone is zero but for rounding errors.
    found = distances(run.trace.weights, one.trace.weights)
    assert max(size for name, size in found.items() if not re.search(r"(k_proj|key)\.bias$", name)) <= 1e-5


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            "resnet",
            "ResNetForImageClassification has no tp_plan, and none can be derived: that needs two linear layers",
        ),
        pytest.param("mamba", "MambaForCausalLM has no tp_plan, and none can be derived", marks=pytest.mark.full),
    ],
)
def test_model_without_pairs_is_refused(tmp_path: Path, model: str, expected: str) -> None:
    assert expected in refused(fork(tmp_path / "run", "tensor_parallel", USERS, f"--model {model}", succeeds=False))


@pytest.mark.parametrize(
    ("model", "mistake"),
    [
        ("gpt2", "number"),
        ("gpt2", "packs"),
        ("qwen3", "norm"),
        *(
            pytest.param(model, mistake, marks=pytest.mark.full)
            for model, mistakes in {"gpt2": "other_packs row residual gathered more_heads", "qwen3": "column"}.items()
            for mistake in mistakes.split()
        ),
    ],
)
def test_wrong_plan_is_not_trained(tmp_path: Path, model: str, mistake: str) -> None:
    arguments = f"--model {model} --optimizer sgd --mistake {mistake}"
    run = fork(tmp_path / "run", "tensor_parallel", WRONG_PLAN, arguments, succeeds=False)
    assert "a derived one divides" in run.stdout and refused(run)
    assert not (run.output_dir / "model").exists() and not run.checkpoints


def test_nothing_is_wrong_with_the_plan_itself(tmp_path: Path) -> None:
    for model in ("gpt2", "qwen3"):
        fork(tmp_path / model, "tensor_parallel", WRONG_PLAN, f"--model {model} --optimizer sgd --mistake none")
