"""Promise: a damaged file, of data or of a model, gives one line, and no lines of other libraries before it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launching import execute, fork
from support.recipes import FINETUNE, LINEAR, MNIST, RECIPES, TRANSFORMER
from support.runs import ROOT, Run
from support.small_model import write_encoder, write_model

CLASSIFICATION = RECIPES["text classification"][0]
ROWS = '{"text": "a", "label": 1}\n'


def error_of(run: Run) -> str:
    assert run.exit_code == 2
    line, *more = [line for line in run.stderr.splitlines() if line]
    assert line.startswith("error: ") and not more, run.stderr
    return line


@pytest.fixture
def parquet(tmp_path: Path) -> bytes:
    """A data set of images; the image in row 3 is cut off."""
    import io

    from datasets import Dataset
    from PIL import Image

    image = io.BytesIO()
    Image.new("L", (12, 12)).save(image, "PNG")
    images = [{"bytes": image.getvalue()[: 40 if row == 3 else None], "path": None} for row in range(10)]
    Dataset.from_dict({"image": images, "label": [0, 1] * 5}).to_parquet(str(tmp_path / "a"))
    return (tmp_path / "a").read_bytes()


@pytest.mark.parametrize(
    ("script", "name", "content", "flags", "expected"),
    [
        (
            TRANSFORMER,
            "a.jsonl",
            ROWS + '{"text": "b", \n',
            "",
            "line 2: Expecting property name enclosed in double quotes",
        ),
        (TRANSFORMER, "a.jsonl", ROWS + '{"text": "b", \n', "--max_samples 2", "line 2: Expecting property name"),
        (TRANSFORMER, "a.jsonl", "", "", "a.jsonl has no rows: expected a name for each column, and rows"),
        (FINETUNE, "a.jsonl", b"\x89PNG\xff\xfe\x00", "", "a.jsonl is not text in UTF-8 (invalid start byte at byte 0"),
        (FINETUNE, "a.parquet", "no parquet", "", "the files cannot be read (Parquet magic bytes not found"),
        (CLASSIFICATION, "a.csv", "text,label\na,b\nc,d,e,f\n", "", "row 2 has 4 values, the header has 2 names"),
        (
            CLASSIFICATION,
            "a.csv",
            b"\x89PNG\xff\xfe\x00",
            "",
            "a.csv is not text in UTF-8 (invalid start byte at byte 0",
        ),
        (CLASSIFICATION, "a.jsonl", ROWS + "no json", "", "line 2: Expecting value"),
        (
            LINEAR,
            "a.csv",
            b"\x89PNG\xff\xfe\x00",
            "--target label",
            "a.csv is not text in UTF-8 (invalid start byte at byte 0",
        ),
    ],
)
def test_tables(tmp_path: Path, script: str, name: str, content: str | bytes, flags: str, expected: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = f"--data {tmp_path / name} {flags}"
    run = fork(tmp_path / "run", "single", script, arguments, env={"HF_HOME": str(tmp_path)}, succeeds=False)
    assert expected in error_of(run)


@pytest.mark.parametrize("flags", ["", "--max_samples 5"])
@pytest.mark.parametrize("size", [None, -200])
def test_images(tmp_path: Path, parquet: bytes, size: int | None, flags: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-0.parquet").write_bytes(parquet[:size])
    arguments = f"--data {tmp_path / 'data'} {flags}"
    run = fork(tmp_path / "run", "single", MNIST, arguments, env={"HF_HOME": str(tmp_path)}, succeeds=False)
    cut, image = "the files cannot be read (Parquet magic", "the image in row 3 cannot be read ("
    assert (cut if size else image) in error_of(run)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def change(**entries: object) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return write


@pytest.mark.parametrize(
    ("script", "name", "damage", "expected"),
    [
        (TRANSFORMER, "model.safetensors", cut_off, "no causal model there (Error while deserializing header"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (FINETUNE, "config.json", lambda path: path.write_text("{"), "is not a valid JSON file"),
                (
                    TRANSFORMER,
                    "config.json",
                    change(model_type="nothing"),
                    "no causal model there (The checkpoint you are try",
                ),
                (FINETUNE, "config.json", change(hidden_size=96), "weights do not fit config.json, such as model."),
                (CLASSIFICATION, "model.safetensors", cut_off, "no encoder there (Error while deserializing header"),
                (
                    CLASSIFICATION,
                    "config.json",
                    change(hidden_size=96),
                    "weights do not fit config.json, such as bert.",
                ),
            )
        ),
    ],
)
def test_models(tmp_path: Path, script: str, name: str, damage: Callable[[Path], None], expected: str) -> None:
    """In a process of its own: what transformers prints depends on how it was imported."""
    if script == CLASSIFICATION:
        write_encoder(tmp_path / "model")
    else:
        write_model(tmp_path / "model", num_positions=96)
    damage(tmp_path / "model" / name)
    arguments = f"--model_name_or_path {tmp_path / 'model'} --output_dir {tmp_path / 'run'}".split()
    run = execute([sys.executable, str(ROOT / script), *arguments], tmp_path, tmp_path / "run")
    assert expected in error_of(run)
