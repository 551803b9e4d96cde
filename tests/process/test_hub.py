"""Promise: `push` uploads the model with a card that says how it was made; a failed upload loses nothing."""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.push import check_name
from support.fake_hub import TOKEN, FakeHub
from support.launching import execute, fork
from support.recipes import LINEAR, TRANSFORMER
from support.runs import ROOT, Run

PUSH = [sys.executable, "-m", "accelerate_recipes", "push"]
SHORT = "--max_steps 20 --log_every 5 --eval_every 10"


def push(run: Run, hub: FakeHub, name: str = "me/line", **variables: str) -> Run:
    command = [*PUSH, str(run.output_dir), name]
    return execute(command, run.output_dir.parent, run.output_dir, hub.variables() | variables)


def test_model_arrives_with_its_card(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", LINEAR, SHORT)
    assert f"accelerate-recipes push {run.output_dir} NAME uploads it" in run.stdout
    (run.output_dir / "certificate.md").write_text("# Certificate\n\nThe same under every config.\n")
    with FakeHub() as hub:
        pushed = push(run, hub)
    assert pushed.exit_code == 0, pushed.stderr
    assert set(hub.files) == {"README.md", "model.safetensors"}
    assert hub.created == [{"name": "line", "organization": "me", "visibility": "private"}]
    for name, content in hub.files.items():
        assert digest(content) == digest((run.output_dir / "model" / name).read_bytes())
    card = ModelCard(hub.files["README.md"].decode())
    assert (card.data.library_name, card.data.metrics) == ("pytorch", ["loss", "r2"])
    assert card.data.tags == ["accelerate", "safetensors"] and card.data.datasets is None
    assert f"{LINEAR} --output_dir {run.output_dir} {SHORT}\n" in card.text
    for expected in ("Trained on `diabetes`", "The same under every config.", "| parallelism | DDP |", "\nseed: 0\n"):
        assert expected in card.text
    for name in ("loss", "r2"):
        values = [(record[f"eval/{name}"], record["step"]) for record in run.records if f"eval/{name}" in record]
        (last, step), (best, best_step) = values[-1], (min if name == "loss" else max)(values)
        assert f"| {name} | {last:.6g} (step {step}) | {best:.6g} (step {best_step}) |" in card.text
    assert pushed.stdout.splitlines()[-1] == f"uploaded: {hub.url}/me/line"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_model_of_transformers_arrives_with_its_tokenizer(tmp_path: Path) -> None:
    sizes = "--context 16 --batch_size 8 --num_layers 1 --hidden_size 32 --num_heads 2 --sample_tokens 0"
    run = fork(tmp_path / "run", "single", TRANSFORMER, f"--data {ROOT / 'LICENSE'} {sizes} --max_steps 4")
    with FakeHub() as hub:
        pushed = push(run, hub, "writer")
    assert pushed.exit_code == 0, pushed.stderr
    assert set(hub.files) == {path.name for path in (run.output_dir / "model").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(hub.files)
    card = ModelCard(hub.files["README.md"].decode())
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert 'pipeline("text-generation", model="somebody/writer")' in card.text
    assert hub.created[0]["name"] == "writer" and f"{hub.url}/somebody/writer" in pushed.stdout


FAILURES = [
    pytest.param({}, {"HF_TOKEN": "wrong"}, "401: Invalid username or password.", id="wrong token"),
    pytest.param(
        {"status": 500, "fails_at": "/create"}, {}, "500: as the test asked for", id="500", marks=pytest.mark.full
    ),
    pytest.param(
        {"status": "silence", "fails_at": "/create"},
        {"ACCELERATE_RECIPES_HUB_TIMEOUT": "3"},
        "ReadTimeout",
        id="silence",
        marks=pytest.mark.full,
    ),
    pytest.param(
        {"status": "silence", "fails_at": "/xet/"},
        {"HF_HUB_DISABLE_XET": "0", "ACCELERATE_RECIPES_HUB_TIMEOUT": "0.4"},
        "TimeoutError: not done after 4 s",
        id="silence of the storage",
        marks=pytest.mark.full,
    ),
    pytest.param({"status": 403, "fails_at": "/commit/main"}, {}, "403", id="no rights", marks=pytest.mark.full),
    pytest.param({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "ConnectError", id="no Hub", marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fork(tmp_path_factory.mktemp("trained") / "run", "single", LINEAR, SHORT)


@pytest.mark.parametrize(("behaviour", "variables", "reason"), FAILURES)
def test_failed_upload_loses_nothing(
    trained: Run, behaviour: dict[str, Any], variables: dict[str, str], reason: str
) -> None:
    started, before = time.monotonic(), (trained.output_dir / "run.json").read_bytes()
    with FakeHub(**behaviour) as hub:
        run = push(trained, hub, **variables)
        assert not hub.files
        if "fails_at" in behaviour:
            assert any(behaviour["fails_at"] in request for request in hub.requests)
    assert time.monotonic() - started < 60
    (line,) = (line for line in run.stderr.splitlines() if line.startswith("not uploaded: "))
    assert f"model to me/line failed ({reason}" in line and line.endswith("run the same command again")
    assert run.exit_code == 1 and "Traceback" not in run.stderr and TOKEN not in run.stdout + run.stderr
    assert (trained.output_dir / "run.json").read_bytes() == before
    with FakeHub() as hub:
        assert push(trained, hub).exit_code == 0 and "model.safetensors" in hub.files


def test_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    run = execute([*PUSH, str(tmp_path), "me/line"], tmp_path, tmp_path)
    assert run.exit_code == 2 and run.stderr == f"{tmp_path} has no run: use the --output_dir of a finished run\n"
    (tmp_path / "run.json").write_text('{"status": "failed"}')
    run = execute([*PUSH, str(tmp_path), "me/line"], tmp_path, tmp_path)
    assert run.exit_code == 2 and "is not done: use its command with --resume_from_checkpoint latest" in run.stderr


@pytest.mark.parametrize(
    ("name", "offline", "token", "expected"),
    [
        ("a/b/c", False, "x", "a/b/c is not a repository name: use your_name/model"),
        ("me/-model", False, "x", "me/-model is not a repository name"),
        ("", False, "x", " is not a repository name"),
        ("me/model", True, "x", "HF_HUB_OFFLINE forbids an upload: unset the variable"),
        ("me/model", False, "", "needs a login on this machine: run hf auth login, or set HF_TOKEN"),
    ],
)
def test_upload_that_cannot_work_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, offline: bool, token: str, expected: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError) as caught:
        check_name(name)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
