"""Promise: the commands in the README and in docs/ work."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from accelerate_recipes.common.records.run_card import read_card
from support.audio import write_recordings, write_wav2vec2, write_whisper
from support.boxes import write_boxes, write_detector
from support.launching import ACCELERATE_LAUNCH, accelerate, accelerate_forked, execute, fork
from support.masks import write_masks, write_segformer
from support.recipes import LINEAR, MNIST
from support.runs import ROOT
from support.small_mnist import write_mnist
from support.small_model import write_encoder, write_encoder_decoder, write_model
from support.vision_models import write, write_chats

# Commands for set-up, and commands that run these tests.
NOT_RUN = ("make ", "pip install", "git clone", "cd ", "python -m venv", "source ")

pytestmark = pytest.mark.xdist_group("test_docs")


def commands_of(text: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith(("#", *NOT_RUN))]


def cases(commands: list[str], others: list[str]) -> list[Any]:
    """Returns `(command, whether it is launched)`.

    `make test` launches the README's first command of `accelerate launch` and forks its others, because test_forking.py
    launches each config. `make test-full` launches all.
    """
    found: list[Any] = []
    for command in dict.fromkeys([*commands, *others]):
        recipe = re.match(r"accelerate launch .*(recipes/\w+\.py)", command)
        is_new, is_first = recipe is None or not found, command in commands
        if is_first or recipe is None:
            found.append((command, is_new and (is_first or recipe is None)))
        if not found or found[-1] != (command, True):
            found.append(pytest.param(command, True, marks=pytest.mark.full))
    return found


README = (ROOT / "README.md").read_text()
PAGES = {path.name: commands_of(path.read_text()) for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
FIRST, OF_RECIPES = PAGES.pop("README.md"), PAGES.pop("recipes.md")
for page in ("your-model.md", "several-models.md"):  # test_your_model.py and test_two_models.py follow them
    PAGES.pop(page)
COMMANDS = cases(FIRST, OF_RECIPES)
# Only in `make test-full`, because test_one_result.py runs their configs, too.
COMMANDS += [pytest.param(command, True, marks=pytest.mark.full) for page in PAGES.values() for command in page]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 20


def write_what_it_reads(command: str, tmp_path: Path) -> None:
    """Writes the files that commands name: path/to/..., and what earlier runs left."""
    if " train.py" in command:  # the script that the README shows
        (tmp_path / "train.py").write_text(re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0])
    write_mnist(tmp_path / "path" / "to" / "mnist")
    rows = [f"{x},{x * x % 7},{x + 1}" for x in range(100)]
    (tmp_path / "path" / "to" / "table.csv").write_text("\n".join(["rooms,age,price", *rows]))
    texts = [f"{word} {word},{word}" for word in ("good", "bad", "fair")] * 30
    (tmp_path / "path" / "to" / "texts.csv").write_text("\n".join(["review,stars", *texts]))
    pairs = [
        "question,answer,score",
        *(f"where is {word},{word} is here,{len(word)}" for word in ("one", "three") * 30),
    ]
    (tmp_path / "path" / "to" / "pairs.csv").write_text("\n".join(pairs))
    tags = [*("ada B-PER\nwrites O\n", "a O\nprogram B-THING\n") * 20]
    for place in ("tags.conll", "conll/train.conll", "conll/dev.conll"):
        (tmp_path / "path" / "to" / place).parent.mkdir(exist_ok=True)
        (tmp_path / "path" / "to" / place).write_text("\n".join(tags))
    (tmp_path / "path" / "to" / "tags.jsonl").write_text('{"words": ["good", "day"], "tags": ["B-DAY", "O"]}\n' * 90)
    asked = [{"id": "1", "question": "who", "answers": [{"text": "ann", "answer_start": 0}]}]
    paragraphs = [{"context": f"ann has seen {number} bees", "qas": asked} for number in range(40)]
    squad = {"version": "1.1", "data": [{"title": "", "paragraphs": paragraphs}]}
    (tmp_path / "path" / "to" / "squad.json").write_text(json.dumps(squad))
    chat = {"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]}
    (tmp_path / "path" / "to" / "chats.jsonl").write_text("\n".join([json.dumps(chat)] * 40))
    pair = {"prompt": "one two ", "chosen": "three", "rejected": "four"}
    (tmp_path / "path" / "to" / "pairs.jsonl").write_text("\n".join([json.dumps(pair)] * 40))
    for name in ("file.txt", "tinyshakespeare.txt"):
        (tmp_path / "path" / "to" / name).write_text("one two three four " * 500)
    if "--predict" in command or "--evaluate_only" in command:
        image = Image.new("L", (60, 80), "white")
        image.paste(0, (25, 10, 35, 70))
        image.save(tmp_path / "path" / "to" / "digit.png")
        fork(tmp_path / "outputs" / "mnist", "single", MNIST, "--max_steps 1")
    if "--checkpoint" in command:
        words = ["recipes/mnist.py", "--model", "mlp", "--max_steps", "50", "--save_every", "10"]
        config = str(ROOT / "accelerate_configs" / "ddp.yaml")
        execute([*ACCELERATE_LAUNCH, "--config_file", config, "--main_process_port", "0", *words], tmp_path, tmp_path)
    if "--against mnist.json" in command:
        execute(["accelerate-recipes", "verify", "recipes/mnist.py", "--record", "mnist.json"], tmp_path, tmp_path)
    if "mine/train.py" in command:
        execute(["accelerate-recipes", "new", "token_classification", "mine", "--config", "ddp"], tmp_path, tmp_path)
    write_models(command, tmp_path / "path" / "to")


def write_models(command: str, folder: Path) -> None:
    """Writes the model that a command continues from, and data that only such models read."""
    if "path/to/encoder" in command:
        write_encoder(folder / "encoder")
    elif "path/to/wav2vec2" in command or "path/to/whisper" in command:
        write_recordings(folder / "recordings")
        write_wav2vec2(folder / "wav2vec2")
        write_whisper(folder / "whisper")
    elif "path/to/detr" in command or "path/to/segformer" in command:
        write_boxes(folder / "boxes")
        write_detector(folder / "detr", "detr")
        write_masks(folder / "masks")
        write_segformer(folder / "segformer")
    elif "path/to/seq2seq" in command:
        write_encoder_decoder(folder / "seq2seq", "t5")
    elif "path/to/vision_model" in command:
        write("idefics3", folder / "vision_model")
        write_chats(folder / "seen.jsonl", 41)
    elif "--model_name_or_path" in command:
        write_model(folder / "model", num_positions=64)


@pytest.mark.every_case
@pytest.mark.parametrize(("command", "is_launched"), COMMANDS)
def test_command_works(tmp_path: Path, command: str, is_launched: bool) -> None:
    for folder in ("recipes", "accelerate_configs", "benchmarks", "launchers"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    write_what_it_reads(command, tmp_path)
    if not is_launched:  # the first command of the recipe trains to its end
        command += " --max_steps 20" * ("--max_steps" not in command)
    if "recipes/transformer.py" in command:  # 2,000 steps and evaluations would take minutes
        command += " --max_steps 4" + " --data path/to/file.txt" * ("--data" not in command)
    words = shlex.split(command)
    env = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    if words[:2] == ["accelerate-recipes", "report"]:  # it needs runs
        for name in ("mnist", "mnist_sgd"):
            fork(tmp_path / "outputs" / name, "single", LINEAR, "--max_steps 4")
    if words[0] == "accelerate":
        run = (accelerate if is_launched else accelerate_forked)(words[1:], tmp_path, tmp_path / "outputs", env)
    else:  # one thread, because several commands run at a time
        run = execute(words, tmp_path, tmp_path / "outputs", {"OMP_NUM_THREADS": "1", **env})
    if "ylecun/mnist" in command:  # tests run without a network
        assert "--data digits for the embedded set" in run.stderr
        return
    assert run.exit_code == 0, run.stdout + run.stderr
    expected = {"python": (1, "no parallelism"), "torchrun": (2, "DDP")}  # without accelerate launch
    if "recipes/mnist.py" in words and words[0] in expected and not {"--help", "--predict"} & set(words):
        card = read_card(tmp_path / "outputs" / "mnist")
        assert (card["num_processes"], card["parallelism"]) == expected[words[0]]
