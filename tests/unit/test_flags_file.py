"""Promise: `--flags run.yaml` is the command line in a file, and the command line wins."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from common.command_line import parse
from common.config import RunConfig
from common.errors import UsageError


def parsed(tmp_path: Path, text: str, *arguments: str) -> RunConfig:
    (tmp_path / "run.yaml").write_text(text)
    return parse(RunConfig, ["--flags", str(tmp_path / "run.yaml"), *arguments])


def test_every_kind_of_value(tmp_path: Path) -> None:
    config = parsed(
        tmp_path,
        "# a comment\n"
        "batch-size: 128\n"
        "max_steps: 20\n"
        "learning_rate: 1e-3\n"  # text for PyYAML, because it has no point
        "lr_schedule: cosine\n"
        "data: 007\n"  # the number 7 for PyYAML
        "output_dir: some where\n"
        "compile: true\n"
        "tf32: yes\n"
        "profile: false\n"
        "micro_batch_size: null\n"
        "eval_every:\n"
        "export_dtype: 'float32'\n",
    )
    assert (config.batch_size, config.max_steps, config.learning_rate, config.lr_schedule) == (128, 20, 1e-3, "cosine")
    assert (config.data, config.output_dir) == ("007", Path("some where"))
    assert (config.compile, config.tf32, config.profile) == (True, True, False)
    assert (config.micro_batch_size, config.eval_every, config.export_dtype) == (None, None, "float32")


def test_command_line_wins(tmp_path: Path) -> None:
    config = parsed(tmp_path, "epochs: 3\nbatch_size: 8\ncompile: true", "--batch_size=16", "--no_compile")
    assert (config.epochs, config.batch_size, config.compile, config.max_steps) == (3, 16, False, None)


def test_run_card_of_such_a_run_needs_no_file(tmp_path: Path) -> None:
    first = parsed(tmp_path, "batch_size: 8\ncompile: true\noutput_dir: first\ndata: größe_😀\n", "--seed=3")
    assert first.flags == str(tmp_path / "run.yaml") and first.output_dir == Path("first")
    (tmp_path / "run.json").write_text(json.dumps({"config": asdict(first)}, default=str))
    (tmp_path / "run.yaml").unlink()
    again = parse(RunConfig, [f"--flags={tmp_path / 'run.json'}"])
    assert (again.batch_size, again.compile, again.seed, again.data) == (8, True, 3, "größe_😀")
    assert again.output_dir != first.output_dir


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch_sise: 8", "--batch_sise: no such flag; did you mean --batch_size?"),
        ("--batch_size: 8", "--__batch_size: no such flag; did you mean --batch_size?"),
        ("batch_size: 8\nbatch-size: 9", "batch_size is in the file twice: remove one"),
        ("batch_size: eight", "--batch_size: expected a whole number, got 'eight'"),
        ("batch_size: 1.5", "--batch_size: expected a whole number, got '1.5'"),
        ("batch_size: true", "--batch_size: expected a whole number, got 'true'"),
        ("batch_size: 0", "--batch_size 0: expected 1 or more"),
        ("batch_size: [8]", "--batch_size: expected one value, got a list or a mapping"),
        ("batch_size: {a: 8}", "--batch_size: expected one value, got a list or a mapping"),
        ("learning_rate: .nan", "--learning_rate: expected a number, got '.nan'"),
        ("learning_rate: nan", "--learning_rate nan: expected a finite number"),
        ("lr_schedule: banana", "--lr_schedule: invalid choice: 'banana'"),
        ("compile: 1", "--compile: expected true or false, got '1'"),
        ("compile: 'true'", "--compile: expected true or false, got 'true'"),
        ("no_compile: true", "--no_compile: no such flag; did you mean --compile?"),
        ("help: true", "--help belongs on the command line"),
        ("num_processes: 4", "--num_processes belongs before the script: accelerate launch --num_processes"),
        ('{"config": 3}', "--config: no such flag"),
        ('{"config": {"batch_sise": 8}}', "--batch_sise: no such flag; did you mean --batch_size?"),
        ("flags: other.yaml", "--flags belongs on the command line"),
        ("<<: {batch_size: 8}", "--<<: no such flag"),
        ("", "expected one flag a line, such as batch_size: 128"),
        ("batch_size", "expected one flag a line, such as batch_size: 128"),
        ("- batch_size: 8", "expected one flag a line, such as batch_size: 128"),
        ("? [a]\n: 3", "expected one flag a line, such as batch_size: 128"),
        ("seed: 1\nbatch_size: [8", "no YAML in line 2: expected one flag a line"),
        ("a: 1\n---\nb: 2", "no YAML in line 2: expected one flag a line"),
        ("data: \x00", "no YAML: expected one flag a line"),
        ("a: " + "[" * 800, "no YAML: expected one flag a line"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--flags {tmp_path / 'run.yaml'}: {expected}")) as caught:
        parsed(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.yaml"
    with pytest.raises(UsageError, match=re.escape(f"--flags {missing}: cannot be read (No such file or directory)")):
        parse(RunConfig, ["--flags", str(missing)])
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory\): type the path of a YAML file"):
        parse(RunConfig, ["--flags", str(tmp_path)])
    (tmp_path / "latin.yaml").write_bytes(b"data: \xe9t\xe9")
    with pytest.raises(UsageError, match=r"latin\.yaml: no YAML: expected one flag a line"):
        parse(RunConfig, ["--flags", str(tmp_path / "latin.yaml")])
