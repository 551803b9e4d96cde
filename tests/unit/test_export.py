"""Promise: a model/ that is damaged or of another model is refused in one line, also without its run card."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from accelerate_recipes import load_exported
from accelerate_recipes.common.checkpoint.exported import export_dtype, write_weights
from accelerate_recipes.common.errors import UsageError

WEIGHTS = {"weight": torch.ones(3, 4), "bias": torch.zeros(3)}


def write(output_dir: Path, weights: dict[str, Tensor]) -> Path:
    (output_dir / "model").mkdir()
    save_file(weights, output_dir / "model" / "model.safetensors")
    return output_dir / "model" / "model.safetensors"


@pytest.mark.parametrize("card", [None, "", "[]", "{", '{"model_digest": null}'])
def test_model_without_a_digest_is_read(tmp_path: Path, card: str | None) -> None:
    write(tmp_path, WEIGHTS)
    if card is not None:
        (tmp_path / "run.json").write_text(card)
    model = nn.Linear(4, 3)
    assert load_exported(tmp_path, model).keys() == WEIGHTS.keys() and torch.equal(model.weight, WEIGHTS["weight"])


@pytest.mark.parametrize("digest", ["3", '"text"', "[]", "1.5", "true"])
def test_other_digest_is_refused(tmp_path: Path, digest: str) -> None:
    write(tmp_path, WEIGHTS)
    (tmp_path / "run.json").write_text(f'{{"model_digest": {digest}}}')
    with pytest.raises(UsageError, match="were altered after its run: train again"):
        load_exported(tmp_path)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"weight": torch.ones(3, 4)}, "only one of the two has bias"),
        (WEIGHTS | {"other": torch.ones(1)}, "only one of the two has other"),
        ({"w": torch.ones(3, 4), "bias": torch.zeros(3)}, "only one of the two has w"),
        (WEIGHTS | {"bias": torch.zeros(4)}, r"bias is \[4\] there, \[3\] here"),
        (WEIGHTS | {"bias": torch.tensor(0.0)}, r"bias is \[\] there, \[3\] here"),
        ({}, "only one of the two has bias"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, weights: dict[str, Tensor], expected: str) -> None:
    write(tmp_path, weights)
    with pytest.raises(UsageError, match=expected):
        load_exported(tmp_path, nn.Linear(4, 3))


@pytest.mark.parametrize("size", [0, 1, 8, 60, -1])
def test_truncated_weights_are_refused(tmp_path: Path, size: int) -> None:
    path = write(tmp_path, WEIGHTS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UsageError, match=r"no exported model in .*train first"):
        load_exported(tmp_path)


@pytest.mark.parametrize("place", ["", "model", "model/model.safetensors"])
def test_folder_or_nothing_in_place_of_the_model_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(exist_ok=True, parents=True)
    with pytest.raises(UsageError, match=r"no exported model in .*train first"):
        load_exported(tmp_path)


def test_types(tmp_path: Path) -> None:
    weights = {"weight": torch.randn(3, 4), "half": torch.randn(2).half(), "count": torch.tensor(7)}
    expected = {"weight": torch.bfloat16, "half": torch.bfloat16, "count": torch.int64}
    for dtype, types in ((torch.bfloat16, expected), (None, {name: one.dtype for name, one in weights.items()})):
        digest = write_weights(weights.items(), tmp_path, dtype)
        assert digest == write_weights(reversed(weights.items()), tmp_path, dtype)
        written = load_file(tmp_path / "model.safetensors")
        assert {name: weight.dtype for name, weight in written.items()} == types
        assert all(torch.equal(written[name], weights[name].to(types[name])) for name in weights)


def test_which_type() -> None:
    llama = nn.Linear(1, 1)
    llama.config = LlamaConfig(dtype="bfloat16")  # type: ignore[assignment]
    plain = nn.Linear(1, 1)
    plain.config = SimpleNamespace(dtype="float16")  # type: ignore[assignment]  # no config of transformers
    for module, dtype in ((llama, torch.bfloat16), (plain, None), (nn.Linear(1, 1), None)):
        assert export_dtype("auto", module) == dtype and export_dtype("float32", module) == torch.float32
    llama.peft_adapter = object()  # type: ignore[assignment]  # the type is that of its base
    assert export_dtype("auto", llama) is None
