"""Promise: a large model is exported in several files, in the type of its files, in the memory of one file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_files import MAX_FILE_BYTES
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from accelerate_recipes import load_exported
from accelerate_recipes.common.errors import UsageError
from support.launching import fork
from support.small_model import write_model

SMALL_FILES = "tests/scripts/small_files.py"
FLAGS = "--max_steps 2 --batch_size 4 --learning_rate 1e-60 --context 16 --check_steps 0 --sample_tokens 0"
CONFIGS = ["fsdp2", "pipeline_parallel", "deepspeed_zero3", "fsdp2_tensor_parallel"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model of 30 M weights in bfloat16, with tied embeddings."""
    folder = tmp_path_factory.mktemp("base")
    write_model(folder, num_positions=16)  # its tokenizer
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "num_hidden_layers": 7}
    config = LlamaConfig(vocab_size=128, max_position_embeddings=16, tie_word_embeddings=True, **shape)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("config", [CONFIGS[0], *(pytest.param(one, marks=pytest.mark.full) for one in CONFIGS[1:])])
def test_files_of_a_large_model(tmp_path: Path, base: Path, config: str) -> None:
    (tmp_path / "text.txt").write_text("one two three four " * 200)
    stages = " --pipeline_stages 2" if config == "pipeline_parallel" else ""
    flags = f"{FLAGS} --data {tmp_path / 'text.txt'} --model_name_or_path {base}{stages}"
    run = fork(tmp_path / "run", config, SMALL_FILES, flags)
    assert f"{base} is in bfloat16: trained in float32, exported in bfloat16 again" in run.stdout
    model = run.output_dir / "model"
    files = sorted(model.glob("*.safetensors"))
    assert len(files) > 3 and all(path.stat().st_size < MAX_FILE_BYTES + 10_000 for path in files)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: path.name for path in files for name in load_file(path)}
    found, expected = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, base))
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected[name]) for name in expected)
    largest = max(4 * weight.numel() for weight in expected.values())  # it is trained in float32
    assert int((run.output_dir / "export_bytes.txt").read_text()) < MAX_FILE_BYTES + 2 * largest

    weights = load_exported(run.output_dir)
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    with pytest.raises(UsageError, match="were altered after its run"):
        load_exported(run.output_dir)
    files[1].unlink()
    with pytest.raises(UsageError, match=r"no exported model in .*No such file"):
        load_exported(run.output_dir)
