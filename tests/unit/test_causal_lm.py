"""Promise: a model of transformers that returns losses is the same model."""

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from accelerate_recipes.common.data import pad_to_longest
from accelerate_recipes.common.tasks.models import causal_lm
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED, with_losses
from accelerate_recipes.common.tasks.models.routers import router_loss
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from accelerate_recipes.common.weights.on_disk import materialize, on_disk

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=None, eos_token_id=None)
MODELS = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)), "causal_sdpa"),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2), "causal_sdpa"),
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)), "causal_sdpa"),
    "sliding window": (
        lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)),
        "sdpa",
    ),
    "own use of the mask": (lambda: DogeForCausalLM(DogeConfig(**SIZES, num_key_value_heads=2)), "sdpa"),
    "eager": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager")), "eager"),
}


def losses_by_hand(model: PreTrainedModel, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    build, attention = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    tokens, labels = torch.randint(0, 64, (2, 2, 16)).unbind()
    expected = losses_by_hand(model, tokens, labels)
    kind, names = type(model), list(model.state_dict())
    model = with_losses(model)
    assert model.config._attn_implementation == attention
    torch.testing.assert_close(model(tokens, labels), expected, rtol=1e-5, atol=0)
    assert type(model) is kind and list(model.state_dict()) == names
    model.config.save_pretrained(tmp_path)
    assert "causal_sdpa" not in (tmp_path / "config.json").read_text()


class DeviceReads(TorchDispatchMode):
    """Counts the operations that would make the CPU wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return operation(*args, **(kwargs or {}))


def test_forward_pass_reads_nothing_from_the_device() -> None:
    tokens, labels = torch.randint(0, 64, (2, 2, 16)).unbind()
    for name, expected in (("llama", 0), ("sliding window", 1)):  # the second shows that it counts
        model = with_losses(MODELS[name][0]())
        with DeviceReads() as reads:
            model(tokens, labels)
        assert min(reads.count, 1) == expected, name


@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding window"])
@pytest.mark.parametrize("chunk", [0, 8])
def test_losses_at_the_trained_places_alone(name: str, chunk: int) -> None:
    torch.manual_seed(0)
    model = with_losses(MODELS[name][0]().eval(), chunk=chunk, longest=40)
    tokens, labels = torch.randint(0, 64, (2, 3, 40)).unbind()
    labels[0, :30] = labels[1, 1::2] = labels[2] = causal_lm.IGNORED  # ten, twenty and no trained tokens
    results, widths = [], []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: widths.append(len(output)))
    places = pad_to_longest({"places": -1}, None)([{"places": causal_lm.find_trained_places(row)} for row in labels])
    for given in ({}, places):
        model.zero_grad()
        losses = model(tokens, labels, **given)
        losses.sum().backward()
        gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        results.append((losses, gradients))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=0)
    assert (results[0][1] - results[1][1]).norm() <= 1e-6 * results[0][1].norm()
    assert results[1][0][2] == 0 and places["places"].shape == (3, 32)
    if chunk:  # as many calls of the head, each with fewer places; the backward pass calls it again
        assert len(widths) == 2 * 2 * 15 and sum(widths[30:]) == 2 * 3 * 32
    else:
        assert widths == [3, 3 * 32]


@pytest.mark.parametrize("measures", [False, True])
def test_two_tensors_as_large_as_the_logits_are_in_memory_at_once(measures: bool) -> None:
    alive, most = set[int](), list[int]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.untyped_storage().nbytes() == 4 * 16 * 1000:
                key = found.untyped_storage()._cdata
                if key not in alive:
                    alive.add(key)
                    weakref.finalize(found.untyped_storage(), alive.discard, key)
                most.append(len(alive))
            return found

    model = with_losses(LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 1000})), longest=16, measures=measures)
    tokens = torch.arange(16).unsqueeze(0)
    with Watch():
        output = model(tokens, tokens, places=tokens)
        (output["loss"] if measures else output).sum().backward()
    assert max(most) == 2


def test_copy_calls_its_own_layers() -> None:
    model = with_losses(MODELS["llama"][0]().eval())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    tokens, labels = torch.randint(0, 64, (2, 2, 16)).unbind()
    assert not torch.equal(other(tokens, labels), model(tokens, labels))


def test_trained_model_is_on_the_device_and_in_the_precision_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MODELS["llama"][0]().save_pretrained(tmp_path)
    for precision, dtype in (("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        state = SimpleNamespace(mixed_precision=precision, device=torch.device("meta"))
        monkeypatch.setattr(causal_lm, "AcceleratorState", lambda state=state: state)
        model = causal_lm.load_trained(tmp_path)
        assert (model.dtype, model.device, model.training) == (dtype, torch.device("meta"), False)


@torch.no_grad()
def test_weights_on_disk_are_read_when_they_are_used(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 256})).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    whole = LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(8).unsqueeze(0)
    uses: list[Callable[[Any], Any]] = [
        lambda model: model(tokens).logits,
        lambda model: copy.deepcopy(model).state_dict(),
        lambda model: model.to("cpu").state_dict(),
        lambda model: model.to(torch.bfloat16).state_dict(),
        lambda model: model.lm_head.weight.data.zero_(),
        lambda model: model.lm_head.weight.data[0],
        lambda model: nn.init.ones_(model.lm_head.weight),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: sum(weight.sum() for weight in model.parameters()),
        lambda model: model.resize_token_embeddings(260, mean_resizing=False).weight[:256],
        lambda model: torch.ones(1, device=model.lm_head.weight.device),
    ]
    for use in uses:
        model, _ = causal_lm.load_pretrained(str(tmp_path), 8, "sdpa")
        assert len(on_disk(model)) == len(model.state_dict())
        torch.testing.assert_close(use(model), use(copy.deepcopy(whole)), rtol=0, atol=0)
        materialize(model)
        expected = copy.deepcopy(whole)
        use(expected)
        if len(model.state_dict()["lm_head.weight"]) == 256:  # resized ones are random
            torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
        assert {type(weight) for weight in model.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("kind", ["Mixtral", "Olmoe"])
def test_the_router_loss_is_that_of_transformers(kind: str) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    experts = {"num_experts_per_tok": 2, "num_local_experts" if kind == "Mixtral" else "num_experts": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes, **experts, num_attention_heads=2, num_key_value_heads=2)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens, labels = torch.randint(64, (2, 3, 9))
    labels[1, 5:] = labels[2, 2:] = IGNORED
    logits = model(tokens, output_router_logits=True, use_cache=False).router_logits
    expected = load_balancing_loss_func(logits, 4, 2, attention_mask=(labels != IGNORED).float())
    found = router_loss(0.5, with_losses(model, routes=True)(tokens, labels))
    assert float((found["router_loss"] - expected).abs().max()) < 1e-6
    assert torch.equal(found["loss"], found["cross_entropy"] + 0.5 * found["router_loss"])
    expected.backward()
    gradient = model.model.layers[0].mlp.gate.weight.grad.clone()
    model.zero_grad()
    router_loss(1.0, with_losses(model, routes=True)(tokens, labels))["router_loss"][0].backward()
    torch.testing.assert_close(model.model.layers[0].mlp.gate.weight.grad, gradient, rtol=1e-4, atol=1e-7)
