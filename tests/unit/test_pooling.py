"""Promise: a model makes its vectors as its files for sentence-transformers say, or the run ends with a line."""

import json
from pathlib import Path

import pytest
import torch

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.models.pooling import Pooling, read_pooling
from accelerate_recipes.common.tasks.models.pretrained import export_of
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from support.small_model import write_embedder

NO_PROMPTS = {"query": None, "document": None}
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_embedder(tmp_path / "model", ["a"], CLS)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        (CLS | {"include_prompt": True}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode": "lasttoken"}, "lasttoken"),  # since version 5.4
        ({"pooling_mode": ["cls"]}, "cls"),
    ],
)
def test_pooling_of_the_model(pooling: dict, mode: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    found = read_pooling(str(folder), "auto", NO_PROMPTS, False)
    assert (found.mode, found.normalizes) == (mode, False)
    assert found.prompts == {"query": "where is ", "document": "over "}
    line = f"pooling: {mode} (modules.json); a query begins with 'where is '; a document begins with 'over '"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pooling", "kinds", "line"),
    [
        ({"pooling_mode_max_tokens": True}, "Pooling", "makes vectors with max: this recipe has mean, cls, lasttoken"),
        (CLS | {"pooling_mode_mean_tokens": True}, "Pooling", "makes vectors with cls and mean: "),
        ({"pooling_mode": ["cls", "weightedmean"]}, "Pooling", "makes vectors with cls and weightedmean: "),
        (CLS, "Pooling Dense Normalize", "makes vectors with cls and Dense: "),
        (CLS | {"include_prompt": False}, "Pooling", "makes vectors with cls and pooling without the prompt: "),
    ],
)
def test_pooling_that_is_not_ours(pooling: dict, kinds: str, line: str, tmp_path: Path) -> None:
    write_embedder(tmp_path / "model", ["a"], pooling, kinds)
    with pytest.raises(UsageError, match=line):
        read_pooling(str(tmp_path / "model"), "auto", NO_PROMPTS, False)
    assert read_pooling(str(tmp_path / "model"), "mean", NO_PROMPTS, False).mode == "mean"


def test_lower_case_and_damaged_files(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8, "do_lower_case": true}')
    with pytest.raises(UsageError, match="makes vectors with cls and lower case"):
        read_pooling(str(folder), "auto", NO_PROMPTS, False)
    for content in ("[", '[{"path": ""}]', "[1]"):
        (folder / "modules.json").write_text(content)
        with pytest.raises(UsageError, match=r"modules\.json or a file with it is damaged"):
            read_pooling(str(folder), "auto", NO_PROMPTS, False)


def test_a_model_without_modules(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "modules.json").unlink()
    assert read_pooling(str(folder), "auto", NO_PROMPTS, False).mode == "mean"
    assert "pooling: mean (no modules.json: --pooling chooses another)" in capsys.readouterr().out
    assert read_pooling(None, "auto", NO_PROMPTS, False) == Pooling("mean", {"query": "", "document": ""}, True, {})
    assert capsys.readouterr().out == ""


def test_prompts_of_the_flags_and_of_texts_that_are_alike(folder: Path, capsys: pytest.CaptureFixture) -> None:
    found = read_pooling(str(folder), "auto", {"query": "", "document": "it: "}, False)
    assert found.prompts == {"query": "", "document": "it: "}
    assert read_pooling(str(folder), "auto", NO_PROMPTS, True).prompts == {"query": "", "document": ""}
    settings = {"prompts": {"query": "q", "both": "b"}, "default_prompt_name": "both", "similarity_fn_name": "dot"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    assert read_pooling(str(folder), "auto", NO_PROMPTS, True).prompts == {"query": "b", "document": "b"}
    assert "begins with 'b'; cosines are compared, not dot products" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("normalizes", [True, False])
def test_files_of_sentence_transformers(
    mode: str, normalizes: bool, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """In the format that all its versions read."""
    settings = {"prompts": {"passage": "p"}, "default_prompt_name": None, "similarity_fn_name": "dot", "kept": 1}
    pooling = Pooling(mode, {"query": "a ", "document": "b "}, normalizes, settings)
    model = torch.nn.Linear(1, 1)
    export_of(model, byte_tokenizer(), pooling.files(32, 17))(tmp_path)
    found = {path.relative_to(tmp_path).as_posix(): json.loads(path.read_text()) for path in tmp_path.rglob("*.json")}
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalizes]
    assert [module["type"] for module in found["modules.json"]] == [f"sentence_transformers.models.{k}" for k in kinds]
    assert [module["path"] for module in found["modules.json"]] == ["", "1_Pooling", "2_Normalize"][: len(kinds)]
    assert found["1_Pooling/config.json"] == {
        "pooling_mode_mean_tokens": mode == "mean",
        "pooling_mode_cls_token": mode == "cls",
        "pooling_mode_lasttoken": mode == "lasttoken",
        "word_embedding_dimension": 32,
    }
    assert found["sentence_bert_config.json"] == {"max_seq_length": 17, "do_lower_case": False}
    assert found["config_sentence_transformers.json"] == settings | {
        "prompts": {"passage": "p", "query": "a ", "document": "b "},
        "similarity_fn_name": "cosine",
    }
    again = read_pooling(str(tmp_path), "auto", NO_PROMPTS, False)
    assert "dot products" not in capsys.readouterr().out
    assert (again.mode, again.normalizes, again.prompts) == (mode, normalizes, {"query": "a ", "document": "b "})
