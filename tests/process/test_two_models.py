"""Promise: recipes/several_models/ have one result under every layout. docs/several-models.md shows lines of them."""

import re
import shlex
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.launching import accelerate_forked, execute, fork
from support.runs import ROOT, Run, largest_difference, weight_distance

PATTERNS = ("student", "domain_adaptation", "gan")
PAGE = (ROOT / "docs" / "several-models.md").read_text()
STEPS = "--max_steps 6 --log_every 1 --eval_every 3 --batch_size 16"
LAYOUTS = {"single": "--micro_batch_size 4", "ddp": "", "fsdp2": "", "deepspeed_zero2": "", "deepspeed_zero3": ""}
# The telling ones: calls of a part that FSDP2 and ZeRO-3 gather three times, and a teacher beside sharded weights.
QUICK = [
    ("student", "fsdp2"),
    ("domain_adaptation", "deepspeed_zero2"),
    ("gan", "fsdp2"),
    ("gan", "deepspeed_zero3"),
]


def script(pattern: str) -> str:
    return f"recipes/several_models/{pattern}.py"


def code(pattern: str) -> dict[str, Any]:
    """What the recipe of a pattern defines."""
    names: dict[str, Any] = {"__name__": pattern}
    exec(compile((ROOT / script(pattern)).read_text(), pattern, "exec"), names)
    return names


def cases() -> list[Any]:
    every = product(PATTERNS, LAYOUTS)
    return [case if case in QUICK else pytest.param(*case, marks=pytest.mark.full) for case in every]


@pytest.mark.parametrize(("pattern", "config"), cases())
def test_pattern_has_one_result(tmp_path: Path, reference: Callable[..., Run], pattern: str, config: str) -> None:
    arguments = STEPS
    if pattern == "student":
        arguments += f" --teacher {reference(script(pattern), f'{STEPS} --width 64').output_dir}"
    expected = reference(script(pattern), arguments)
    run = fork(tmp_path / "run", config, script(pattern), f"{arguments} {LAYOUTS[config]}")
    for name in {name for record in expected.records for name in record if name.startswith(("train/", "eval/"))}:
        assert run.column(name) == pytest.approx(expected.column(name), rel=1e-6, abs=1e-9), name
    assert weight_distance(run, expected) <= 1e-6
    assert largest_difference(expected.column("train/loss")[:1], expected.column("train/loss")[-1:]) > 1e-2


def test_each_part_of_the_gan_gets_the_gradient_of_its_own_loss() -> None:
    names = code("gan")
    torch.manual_seed(0)
    model, batch = names["GAN"](), {"image": torch.rand(8, 64), "noise": torch.randn(8, names["NOISE"])}
    names["forward_step"](model, batch)["loss"].mean().backward()
    fake = model.generator(batch["noise"])
    discriminator = F.softplus(-model.discriminator(batch["image"])) + F.softplus(model.discriminator(fake.detach()))
    generator = F.softplus(-model.discriminator(fake))
    for part, loss in ((model.discriminator, discriminator), (model.generator, generator)):
        weights = list(part.parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(loss.mean(), weights, retain_graph=True)):
            torch.testing.assert_close(weight.grad, gradient, rtol=1e-5, atol=1e-7)


def test_reversal_turns_round_the_gradient_of_the_domain_alone() -> None:
    names = code("domain_adaptation")
    torch.manual_seed(0)
    batch = {"image": torch.rand(8, 64), "label": torch.arange(8), "domain": torch.arange(8) % 2}
    gradients = {}
    for strength in (-1.0, 0.0, 0.3):  # with -1, a plain sum of both losses
        torch.manual_seed(1)
        model = names["Net"](strength)
        names["forward_step"](model, batch)["loss"].mean().backward()
        gradients[strength] = {name: weight.grad for name, weight in model.named_parameters()}
    for name, gradient in gradients[0.3].items():
        alone, both = gradients[0.0][name], gradients[-1.0][name]
        torch.testing.assert_close(gradient, alone - 0.3 * (both - alone), rtol=1e-4, atol=1e-7)
    assert not torch.allclose(gradients[0.3]["body.0.weight"], gradients[0.0]["body.0.weight"])


def test_the_page_shows_lines_of_the_recipes() -> None:
    lines = {line.strip() for pattern in PATTERNS for line in (ROOT / script(pattern)).read_text().splitlines()}
    shown = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    assert len(shown) > 10 and not [line for line in shown if line.strip() not in lines]


@pytest.mark.full
def test_commands_of_the_page(tmp_path: Path) -> None:
    for folder in ("accelerate_configs", "recipes"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for command in "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).splitlines():
        program, *arguments = shlex.split(command)
        start = accelerate_forked if program == "accelerate" else execute
        run = start(arguments if program == "accelerate" else [program, *arguments], tmp_path, tmp_path)
        assert run.exit_code == 0, run.stderr
    student = Run(0, "", "", tmp_path / "outputs" / "student")
    assert student.column("eval/accuracy")[-1] > 0.9 and student.column("eval/agreement")[-1] > 0.9
