"""Promise: a plan for tensor parallelism that does not fit is refused before any training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from common.errors import UsageError
from common.parallel import check_plan
from launching import CONFIGS, Run, launch
from small_model import write_model
from test_guards import refused
from test_one_result import RECIPES, assert_same_result


class Net(nn.Module):
    def __init__(self, tied: bool = False, **plan: str):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8)) for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.tp_plan = {name.replace("_", "."): style for name, style in plan.items()}


def test_plan_names_modules_with_a_star_for_numbers() -> None:
    plan = {"layers_*_1": "colwise", "head": "colwise_rep", "embedding": "embedding_rowwise"}
    assert check_plan(Net(**plan), 4) == {
        "layers.0.1": "colwise",
        "layers.1.1": "colwise",
        "head": "colwise_rep",
        "embedding": "embedding_rowwise",
    }


@pytest.mark.parametrize(
    ("net", "size", "expected"),
    [
        (Net(), 2, "Net has no tp_plan"),
        (Net(layer="colwise"), 2, "tp_plan: layer names no module of Net"),
        (Net(head="diagonal"), 2, "tp_plan: head: diagonal: expected one of colwise, rowwise"),
        (Net(**{"layers_*_0": "colwise"}), 2, r"layers.0.0 is 9 wide, which 2 processes cannot divide"),
        (Net(**{"layers_*_1": "rowwise"}), 2, r"layers.0.1 is 9 wide"),
        (Net(embedding="embedding_rowwise"), 5, "embedding is 12 wide"),
        (Net(**{"layers_0": "colwise"}), 2, r"layers.0 is Sequential: expected Linear or Embedding"),
        (Net(tied=True, head="colwise"), 2, "head shares its weight with embedding"),
    ],
)
def test_plan_that_does_not_fit(net: Net, size: int, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        check_plan(net, size)


def llama(**changes: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 6}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **(shape | changes)))


def test_transformers_models_bring_their_plan() -> None:
    untied = check_plan(llama(), 2)
    assert untied["model.layers.0.self_attn.q_proj"] == "colwise"
    assert untied["lm_head"] == "colwise_gather_output" and untied["model.embed_tokens"] == "embedding_rowwise"
    assert untied.keys() - check_plan(llama(tie_word_embeddings=True), 2).keys() == {"lm_head", "model.embed_tokens"}
    with pytest.raises(UsageError, match="num_attention_heads is 6, which 4 processes cannot divide"):
        check_plan(llama(), 4)
    with pytest.raises(UsageError, match="num_key_value_heads is 3, which 2 processes cannot divide"):
        check_plan(llama(num_key_value_heads=3), 2)


@pytest.mark.parametrize(
    ("config", "script", "arguments", "num_processes", "expected"),
    [
        ("tensor_parallel", "recipes/mnist.py", "", None, "ConvNet has no tp_plan"),
        ("tensor_parallel", "recipes/linear_regression.py", "", None, "Linear has no tp_plan"),
        ("tensor_parallel", "recipes/mnist.py", "--model mlp", 4, "tp_size 2 = 2 processes, there are 4"),
        ("fsdp2_tensor_parallel", "recipes/mnist.py", "--model mlp", 2, "type --num_processes 4"),
        ("hsdp", "recipes/mnist.py", "", 2, "dp_replicate_size 2 × dp_shard_size 2 = 4 processes, there are 2"),
    ],
)
def test_config_that_does_not_fit(
    tmp_path: Path, config: str, script: str, arguments: str, num_processes: int | None, expected: str
) -> None:
    run = launch(tmp_path / "run", config, script, arguments, num_processes, succeeds=False)
    assert expected in refused(run)
    assert not (run.output_dir / "metrics.jsonl").exists() or not run.records


@pytest.mark.parametrize(
    ("config", "before", "after", "expected"),
    [
        ("fsdp2_tensor_parallel", "MULTI_GPU", "FSDP", "has a tp_size: type distributed_type: MULTI_GPU"),
        ("hsdp", "distributed_type: FSDP", "distributed_type: MULTI_GPU", "type distributed_type: FSDP"),
        ("tensor_parallel", "tp_size", "cp_size", "these recipes do not divide sequences"),
    ],
)
def test_sizes_that_would_not_be_applied(tmp_path: Path, config: str, before: str, after: str, expected: str) -> None:
    text = (CONFIGS / f"{config}.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace(before, after) + "fsdp_config:\n  fsdp_version: 2\n")
    run = launch(tmp_path / "run", tmp_path / "config.yaml", "recipes/mnist.py", "--model mlp", succeeds=False)
    assert expected in refused(run)


@pytest.mark.full
def test_hsdp_and_tensor_parallelism_together(tmp_path: Path, reference: Callable[..., Run]) -> None:
    text = (CONFIGS / "fsdp2_tensor_parallel.yaml").read_text().replace("num_processes: 4", "num_processes: 8")
    (tmp_path / "config.yaml").write_text(text + "  parallelism_config_dp_replicate_size: 2\n")
    script, arguments = RECIPES["mnist mlp"]
    run = launch(tmp_path / "run", tmp_path / "config.yaml", script, arguments)
    assert run.card["parallelism"] == "2 × FSDP2 2 × TP 2"
    assert_same_result(run, reference(script, arguments))


def test_untied_transformers_model_is_trained_and_exported_whole(tmp_path: Path) -> None:
    """The recipe ties its embedding; a model that does not divides that and the head, too."""
    from transformers import AutoModelForCausalLM

    write_model(tmp_path / "tiny", num_positions=16, vocab_size=6)
    (tmp_path / "words.txt").write_text("one two three four " * 100)
    arguments = f"--data {tmp_path / 'words.txt'} --model_name_or_path {tmp_path / 'tiny'} --context 16 --batch_size 4"
    arguments += " --max_steps 5 --log_every 1 --sample_tokens 0"
    script = "recipes/transformer.py"
    single, divided = (launch(tmp_path / c, c, script, arguments) for c in ("single", "tensor_parallel"))
    assert divided.column("train/loss") == pytest.approx(single.column("train/loss"), rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(divided.output_dir / "model")
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, single.weights[name], rtol=1e-4, atol=1e-6), name
