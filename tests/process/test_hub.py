"""Promise: `--push_to_hub` uploads the model with a card that says how it was made; a failed upload loses nothing."""

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from common.errors import UsageError
from common.launch.checks import check_hub
from support.fake_hub import TOKEN, FakeHub
from support.launching import execute, fork
from support.recipes import LINEAR, TRANSFORMER
from support.runs import ROOT, Run, refused

UPLOADING = "tests/scripts/uploading.py"
SHORT = "--max_steps 20 --log_every 5 --eval_every 10"


def upload(output_dir: Path, hub: FakeHub, arguments: str, recipe: str = LINEAR, **variables: str) -> Run:
    env = hub.variables() | {"RECIPE": str(ROOT / recipe)} | variables
    return fork(output_dir, "ddp", UPLOADING, arguments, env=env, succeeds=False)


def test_model_arrives_with_its_card(tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    output_dir.mkdir()
    (output_dir / "certificate.md").write_text("# Certificate\n\nThe same under every config.\n")
    config = ROOT / "accelerate_configs" / "ddp.yaml"
    command = f"accelerate launch --config_file {config} --main_process_port 0 {ROOT / LINEAR} "
    command += f"--output_dir {output_dir} {SHORT} --push_to_hub me/line"
    with FakeHub() as hub:
        run = execute(command.split(), tmp_path, output_dir, hub.variables())
    assert run.exit_code == 0, run.stdout + run.stderr
    assert set(hub.files) == {"README.md", "loss.png", "model.safetensors"}
    assert hub.created == [{"name": "line", "organization": "me", "visibility": "private"}]
    for name, content in hub.files.items():
        assert digest(content) == digest((output_dir / "model" / name).read_bytes())
    assert hub.files["loss.png"].startswith(b"\x89PNG")
    card = ModelCard(hub.files["README.md"].decode())
    assert (card.data.library_name, card.data.metrics) == ("pytorch", ["loss", "r2"])
    assert card.data.tags == ["accelerate", "safetensors"] and card.data.datasets is None
    assert f"\n{command}\n" in card.text
    for expected in ("Trained on `diabetes`", "The same under every config.", "| parallelism | DDP |", "\nseed: 0\n"):
        assert expected in card.text
    for name in ("loss", "r2"):
        values = [(record[f"eval/{name}"], record["step"]) for record in run.records if f"eval/{name}" in record]
        (last, step), (best, best_step) = values[-1], (min if name == "loss" else max)(values)
        assert f"| {name} | {last:.6g} (step {step}) | {best:.6g} (step {best_step}) |" in card.text
    assert run.stdout.splitlines()[-1] == f"uploaded: {hub.url}/me/line"
    assert run.card["upload"] == {"name": "me/line", "url": f"{hub.url}/me/line", "error": None}
    assert (run.card["status"], run.card["exit_code"]) == ("done", 0)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_model_of_transformers_arrives_with_its_tokenizer(tmp_path: Path) -> None:
    sizes = "--context 16 --batch_size 8 --num_layers 1 --hidden_size 32 --num_heads 2 --sample_tokens 0"
    with FakeHub() as hub:
        arguments = f"--data {ROOT / 'LICENSE'} {sizes} --max_steps 4 --push_to_hub writer"
        run = upload(tmp_path / "run", hub, arguments, TRANSFORMER)
    assert run.exit_code == 0, run.stdout + run.stderr
    assert set(hub.files) == {path.name for path in (run.output_dir / "model").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(hub.files)
    card = ModelCard(hub.files["README.md"].decode())
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert 'pipeline("text-generation", model="somebody/writer")' in card.text
    assert hub.created[0]["name"] == "writer" and run.card["upload"]["url"] == f"{hub.url}/somebody/writer"


FAILURES = [
    pytest.param({}, {"HF_TOKEN": "wrong"}, "401: Invalid username or password.", id="wrong token"),
    pytest.param({"status": 500, "fails_at": "/create"}, {}, "500: as the test asked for", id="500"),
    pytest.param({"status": "silence", "fails_at": "/create"}, {"TIMEOUT_S": "3"}, "ReadTimeout", id="silence"),
    pytest.param(
        {"status": "silence", "fails_at": "/xet/"},
        {"HF_HUB_DISABLE_XET": "0", "LONGEST_S": "4"},
        "TimeoutError: no end after 4 s",
        id="silence of the storage",
    ),
    pytest.param({"status": 403, "fails_at": "/commit/main"}, {}, "403", id="no rights", marks=pytest.mark.full),
    pytest.param({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "ConnectError", id="no Hub", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("behaviour", "variables", "reason"), FAILURES)
def test_failed_upload_loses_nothing(
    tmp_path: Path, behaviour: dict[str, Any], variables: dict[str, str], reason: str
) -> None:
    started = time.monotonic()
    with FakeHub(**behaviour) as hub:
        run = upload(tmp_path / "run", hub, f"{SHORT} --push_to_hub me/line", **variables)
        assert not hub.files
        if "fails_at" in behaviour:
            assert any(behaviour["fails_at"] in request for request in hub.requests)
    assert time.monotonic() - started < 60
    (line,) = (line for line in run.stderr.splitlines() if line.startswith("not uploaded: "))
    assert f"the run is done, but its model did not get to me/line on the Hub ({reason}" in line
    assert line.endswith(f"type hf upload me/line {run.output_dir / 'model'} --private")
    assert "Traceback" not in run.stderr and TOKEN not in run.stdout + run.stderr
    assert run.exit_code == 4 and (run.card["status"], run.card["exit_code"]) == ("done", 4)
    assert run.card["upload"]["error"] == line.removeprefix("not uploaded: ")
    assert run.weights.keys() == {"weight", "bias"} and len(run.column("train/loss")) == 4
    if reason == "ReadTimeout":  # the other process has ended without waiting for the upload
        ended, given_up = ((tmp_path / name).stat().st_mtime for name in ("ended_1", "run/run.json"))
        assert given_up - ended > 1
        again = f"{SHORT} --push_to_hub me/line --resume_from_checkpoint latest"
        with FakeHub() as hub:
            run = upload(tmp_path / "run", hub, again)
        assert run.exit_code == 0 and "nothing to do" in run.stdout and "model.safetensors" in hub.files
        assert run.card["exit_code"] == 0 and run.card["upload"]["error"] is None


@pytest.mark.parametrize(
    ("name", "offline", "token", "expected"),
    [
        ("a/b/c", False, "x", "--push_to_hub a/b/c: no name of a repository: type your_name/model"),
        ("me/-model", False, "x", "--push_to_hub me/-model: no name of a repository"),
        ("", False, "x", "--push_to_hub : no name of a repository"),
        (
            "me/model",
            True,
            "x",
            "HF_HUB_OFFLINE forbids it: unset the variable, or leave out --push_to_hub and type hf",
        ),
        ("me/model", False, "", "needs a login on this machine: type hf auth login, or set HF_TOKEN"),
    ],
)
def test_upload_that_cannot_work_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, offline: bool, token: str, expected: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError) as caught:
        check_hub(name)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_refused_upload_writes_nothing(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", LINEAR, f"{SHORT} --push_to_hub me/line", succeeds=False)  # tests are offline
    assert "HF_HUB_OFFLINE forbids it" in refused(run) and not run.output_dir.exists()


def test_script_that_would_not_upload_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "own_end.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'recipes')!r})\n"
        "from linear_regression import Config, main\n"
        "from common.command_line import parse\n"
        "main(parse(Config))\n"
    )
    with FakeHub() as hub:
        env = {"RECIPE": str(script)}
        run = upload(tmp_path / "run", hub, f"{SHORT} --push_to_hub me/line", **env)
    assert "--push_to_hub works in a script that ends with run(main, Config)" in run.stderr and not hub.requests
    assert not (run.output_dir / "model").exists()
