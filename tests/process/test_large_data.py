"""Promise: data that does not fit into memory stays in files, and trains with the result of data in memory."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_recipes.common.tasks.nlp.text import MAX_BYTES_IN_MEMORY
from support.launching import environment, fork
from support.recipes import TRANSFORMER
from support.runs import ROOT, assert_equal_to_the_last_bit, assert_same_result, refused

LITTLE_MEMORY = "tests/scripts/little_memory.py"
TINY = "--context 16 --batch_size 8 --num_layers 1 --hidden_size 16 --num_heads 1 --sample_tokens 8 --max_steps 6 "
TINY += "--log_every 1 --eval_every 6 --learning_rate 1e-3"


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of parquet files in the Hub's layout, with more text than is held in memory; few evaluation tokens."""
    from datasets import Dataset

    folder = tmp_path_factory.mktemp("sentences") / "data"
    folder.mkdir()
    draw = random.Random(0)
    words = [f"{draw.choice(['red', 'green', 'blue'])} {number} " * 50 for number in range(1000)]
    rows = [draw.choice(words) for _ in range(MAX_BYTES_IN_MEMORY // 400)]
    assert sum(map(len, rows)) > MAX_BYTES_IN_MEMORY
    Dataset.from_dict({"text": rows}).to_parquet(str(folder / "train-00000-of-00001.parquet"))
    Dataset.from_dict({"text": rows[:2]}).to_parquet(str(folder / "test-00000-of-00001.parquet"))
    return folder


def test_text_in_files_is_tokenised_once_for_all_runs(tmp_path: Path, sentences: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "cache")}
    arguments = f"--data {sentences} {TINY}"
    two = fork(tmp_path / "two", "ddp", TRANSFORMER, arguments, env=env)
    assert two.stdout.count("tokenising") == 2  # the train and the test split, by one process
    one = fork(tmp_path / "one", "single", TRANSFORMER, arguments, env=env)
    assert "tokenising" not in one.stdout
    assert_same_result(two, one)
    workers = fork(tmp_path / "workers", "single", TRANSFORMER, f"{arguments} --num_workers 1", env=env)
    assert_equal_to_the_last_bit(workers, one)


def test_the_first_process_goes_first(tmp_path: Path) -> None:
    fork(tmp_path / "run", "ddp", "tests/scripts/first_process.py", "--batch_size 3", 3)
    for turn in range(3):
        first, *others = (tmp_path / f"turn_{turn}").read_text().split()
        assert first == "0" and sorted(others) == ["1", "2"]


def test_max_samples(tmp_path: Path, sentences: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "cache")}
    arguments = f"--data {sentences} {TINY} --max_samples 40"
    two = fork(tmp_path / "two", "ddp", TRANSFORMER, arguments, env=env)
    assert two.stdout.count("converting a stream to files") == 2  # the train and the test split, by one process
    one = fork(tmp_path / "one", "single", TRANSFORMER, arguments, env=env)
    assert "converting" not in one.stdout
    assert_same_result(two, one)


def test_no_hub(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "single", TRANSFORMER, "--data some/set --max_samples 5", succeeds=False)
    assert "--data some/set: no such folder; loading from the Hub failed" in refused(run)


def test_images_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature
    from PIL import Image

    features = Features({"image": ImageFeature(), "label": ClassLabel(num_classes=2)})
    rows = {"image": [Image.new("L", (10, 8))] * 16, "label": [0, 1] * 8}
    (tmp_path / "data").mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "data" / "train-0.parquet"))
    env = {"HF_HOME": str(tmp_path / "cache")}
    run = fork(tmp_path / "run", "single", LITTLE_MEMORY, f"--data {tmp_path / 'data'}", env=env, succeeds=False)
    assert "its 16 images would fill the memory" in refused(run)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_anonymous_memory_stays_flat_while_the_text_grows_tenfold(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "large_text.py"
    table = {}
    command = [sys.executable, str(script), "--tokenizers", "bytes", "--folder", str(tmp_path), "--json"]
    done = subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, check=True)
    for row in map(json.loads, done.stdout.splitlines()):
        table[row["megabytes"], row["way"]] = row
    for way in ("file, first start", "file, second start"):
        small, large = (table[size, way] for size in (20, 200))
        assert large["tokens"] > 9 * small["tokens"] > 100_000_000
        assert large["anonymous_mb"] - small["anonymous_mb"] < 15, table
    assert table[20, "in memory"]["anonymous_mb"] > 15  # what the measurement shows of tokens in memory


CONVERSION = """
import sys
from pathlib import Path
import datasets
from accelerate_recipes.common.tasks.streams import convert_stream
def anonymous_mb():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1000
most = 0
def stream(size):
    global most
    for number in range(size):
        most = max(most, anonymous_mb()) if number % 1000 == 0 else most
        yield {"number": number, "text": f"{number} " * 500}
folder = Path(sys.argv[2])
convert_stream(stream(100), folder / "first")  # what Arrow and `datasets` need at the first use
before, most = anonymous_mb(), 0
converted = convert_stream(stream(int(sys.argv[1])), folder / "files")
assert converted[int(sys.argv[1]) - 1]["number"] == int(sys.argv[1]) - 1
print(sum(path.stat().st_size for path in folder.glob("files/*/*.arrow")) / 1e6, max(most, anonymous_mb()) - before)
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_anonymous_memory_of_a_conversion_stays_flat(tmp_path: Path) -> None:
    found = []
    for size in (10_000, 100_000):
        command = [sys.executable, "-c", CONVERSION, str(size), str(tmp_path / str(size))]
        run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
        found.append([float(number) for number in run.stdout.split()[-2:]])
    (small, memory_of_small), (large, memory_of_large) = found
    assert large > 9 * small > 200 and memory_of_large - memory_of_small < 15, found
