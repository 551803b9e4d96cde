"""Promise: a vision-language model gives the result of one process under every config, and answers about images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from accelerate_recipes.common.tasks.chat.vision_chats import shapes
from support.launching import fork
from support.recipes import FLAGS, LATEST, RECIPES, VISION_LANGUAGE
from support.runs import TOLERANCE, Run, assert_same_result, largest_difference, refused
from support.vision_models import made, write, write_chats

WITHOUT_VIDEOS = "tests/scripts/without_videos.py"
SHORT = (
    "--max_length 512 --batch_size 8 --max_steps 6 --log_every 1 --eval_every 6 --learning_rate 1e-3 --num_answers 2"
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 41)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """models(family) -> a folder with a model and its processor."""
    root = tmp_path_factory.mktemp("models")
    return lambda family: root / family if (root / family).exists() else write(family, root / family)


FAMILIES = [
    *(("qwen2_vl", "fsdp2"), ("smolvlm", "ddp"), ("gemma3", "tensor_parallel"), ("llava", "deepspeed_zero3")),
    *((family, config) for family in ("qwen2_vl", "qwen2_5_vl", "smolvlm", "llava") for config in
      ("hsdp", "deepspeed_zero2", "fsdp2_tensor_parallel")),
    *((family, config) for family in ("qwen3_vl", "gemma3", "idefics2") for config in
      ("fsdp2", "deepspeed_zero3", "fsdp2_tensor_parallel")),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_families_give_the_result_of_one_process(
    tmp_path: Path, reference: Callable[..., Run], models: Callable[[str], Path], chats: Path, family: str, config: str
) -> None:
    flags = f"{SHORT} --data {chats} --model_name_or_path {models(family)}"
    run = fork(tmp_path / "run", config, WITHOUT_VIDEOS, f"{flags} --micro_batch_size 2")
    expected = reference(WITHOUT_VIDEOS, flags)
    for name in ("train/loss", "grad_norm", "eval/loss"):
        assert largest_difference(run.column(name), expected.column(name)) <= TOLERANCE
    for name, weight in expected.weights.items():  # a bias that starts at zero moves by little more than rounding
        torch.testing.assert_close(run.weights[name], weight, rtol=1e-4, atol=1e-6)
    assert "of 2 held-out answers are right" in run.stdout
    exported = AutoModelForImageTextToText.from_pretrained(run.output_dir / "model")
    assert type(exported) is type(made(family)[0])


@pytest.mark.full
@pytest.mark.parametrize(("family", "config"), [("qwen2_vl", "fsdp2"), ("llava", "deepspeed_zero3")])
def test_adapters(
    tmp_path: Path, reference: Callable[..., Run], models: Callable[[str], Path], chats: Path, family: str, config: str
) -> None:
    flags = f"{SHORT} --data {chats} --model_name_or_path {models(family)} --lora_rank 4 --learning_rate 1e-2 --merge"
    flags += " --activation_checkpointing"
    run, expected = fork(tmp_path / "run", config, WITHOUT_VIDEOS, flags), reference(WITHOUT_VIDEOS, flags)
    for name in ("train/loss", "eval/loss"):
        assert largest_difference(run.column(name), expected.column(name)) <= TOLERANCE
    model, processor = made(family)
    merged = AutoModelForImageTextToText.from_pretrained(run.output_dir / "merged")
    adapted = AutoModelForImageTextToText.from_pretrained(run.output_dir / "model")
    messages, images = shapes(3)[1]
    text = processor.apply_chat_template(messages, tokenize=False)
    given = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        logits = [one.eval()(**given).logits for one in (merged, adapted, model)]
    assert torch.allclose(logits[0], logits[1], atol=1e-4) and not torch.allclose(logits[0], logits[2], atol=1e-3)


def test_a_share_without_images_does_not_hang(tmp_path: Path, reference: Callable[..., Run], chats: Path) -> None:
    """One micro-batch has images, that of the other process has none: both compute the layers that see."""
    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    blind = {"messages": [{"role": "user", "content": "no?"}, {"role": "assistant", "content": "no"}], "images": []}
    file = chats.with_name("blind.jsonl")
    file.write_text("\n".join(json.dumps(one) for row in rows for one in (row, blind)))
    flags = f"{RECIPES['vision language'][1]} --batch_size 4 --max_steps 4 --data {file}"
    run = fork(tmp_path / "run", "fsdp2", VISION_LANGUAGE, f"{flags} --micro_batch_size 1")
    assert_same_result(run, reference(VISION_LANGUAGE, flags))


@pytest.mark.full
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "deepspeed_zero3"])
def test_resumed_run_is_the_same(tmp_path: Path, config: str) -> None:
    flags = f"{RECIPES['vision language'][1]} --max_steps 6 --save_every 3 --eval_every 6{FLAGS.get(config, '')}"
    whole = fork(tmp_path / "whole", config, VISION_LANGUAGE, flags)
    fork(tmp_path / "run", config, VISION_LANGUAGE, f"{flags} --max_steps 3")
    run = fork(tmp_path / "run", config, VISION_LANGUAGE, f"{flags} {LATEST}")
    assert run.column("train/loss")[-3:] == whole.column("train/loss")[-3:]


@pytest.mark.full
def test_result_of_the_docstring(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", VISION_LANGUAGE)
    right = int(run.stdout.split(" of 50 held-out answers")[0].split()[-1])
    assert right >= 44


def test_broken_images_of_a_column_of_images_are_named(tmp_path: Path) -> None:
    import datasets

    rows = {"messages": [row("Why?")["messages"]] * 40, "image": [{"bytes": b"nonsense", "path": None}] * 40}
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    table.to_parquet(tmp_path / "chats.parquet")
    flags = f"{RECIPES['vision language'][1]} --data {tmp_path / 'chats.parquet'}"
    for more, line in (
        ("", "has no column images: use --images_column image"),
        (" --images_column image", "conversation 1: an image cannot be read (not an image that Pillow knows"),
    ):
        run = fork(tmp_path / "run", "single", VISION_LANGUAGE, flags + more, succeeds=False)
        assert line in refused(run) and run.exit_code == 2


def row(content: Any, images: Any = ()) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}], "images": images}


@pytest.mark.parametrize(
    ("rows", "flags", "line"),
    [
        ([row("Why?", ["lost.png"])] * 12, "", "lost.png cannot be read (No such file or directory)"),
        ([{"messages": [{"role": "user", "content": "Why?"}]}] * 12, "", "no message has the role assistant"),
        ([row("Why?", ["one.png"])] * 12, "--max_length 8", "use --max_length"),
        ([row("Why?", ["one.png"])] * 12, "--messages_column chat", "has no column chat: use --messages_column"),
        ([row("Why?", ["one.png"])], "", "has one conversation: expected 2 or more"),
        (None, "--lora_rank 4", "use --model_name_or_path, too"),
    ],
)
def test_bad_input(tmp_path: Path, rows: list | None, flags: str, line: str) -> None:
    Image.new("RGB", (20, 30), "red").save(tmp_path / "one.png")
    if rows is not None:
        (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
        flags += f" --data {tmp_path / 'chats.jsonl'}"
    run = fork(tmp_path / "run", "single", VISION_LANGUAGE, f"{RECIPES['vision language'][1]} {flags}", succeeds=False)
    assert line in refused(run) and run.exit_code == 2
