"""Promise: a model of transformers computes what transformers computes with its folder, or is refused in one line."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Dinov2Config,
    Dinov2ForImageClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    MBart50Tokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from accelerate_recipes.common.accidents import advice
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.models.causal_lm import load_pretrained
from accelerate_recipes.common.tasks.models.encoder import always_mask, load_encoder, pad_texts, word_tokenizer
from accelerate_recipes.common.tasks.models.pretrained import freeze_unused, load
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from accelerate_recipes.common.tasks.nlp.translations import Translations
from accelerate_recipes.common.tasks.vision.cropped_images import Preprocessing, resize
from accelerate_recipes.common.weights.on_disk import materialize, on_disk
from support.small_model import write_encoder, write_encoder_decoder, write_model
from support.vision_models import write

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def quantize(folder: Path, settings: dict[str, Any] | None) -> None:
    """Divides the matrices of a model into numbers of 8 bits and a scale of 0.01."""
    write_model(folder, num_positions=32)
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        weights[name] = (weight * 100).to(torch.float8_e4m3fn) if "proj" in name else weight
        if "proj" in name:
            weights[f"{name}_scale_inv"] = torch.full((1, 1), 0.01)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    set_in(folder / "config.json", **({} if settings is None else {"quantization_config": settings}))


def set_in(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_scales_of_a_quantized_model_are_applied(tmp_path: Path) -> None:
    quantize(tmp_path, FP8)
    model, _ = load_pretrained(str(tmp_path), 16, "sdpa")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found, stored = model.state_dict(), load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in found.values()} == {torch.float32} and not on_disk(model)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.state_dict().items())
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.allclose(found[name], stored[name].float() / 100, rtol=1e-2)
    assert "quantization_config" not in model.config.to_dict()


@pytest.mark.parametrize(
    "method", ["bitsandbytes", "gptq", "awq", "hqq", "torchao", "bitnet", "quanto", "exl2", "modelopt"]
)
def test_other_quantized_models_are_refused(tmp_path: Path, method: str) -> None:
    more = {"bits": 4, "group_size": 128, "load_in_4bit": True} if method in ("bitsandbytes", "gptq", "awq") else {}
    quantize(tmp_path, {"quant_method": method} | more)
    with pytest.raises(UsageError, match=f"its weights are quantized .{method}.: use the path of the original model"):
        load_pretrained(str(tmp_path), 16, "sdpa")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def test_a_file_is_no_model(tmp_path: Path) -> None:
    write_model(tmp_path, num_positions=32)
    with pytest.raises(UsageError, match=r"model.safetensors: it is a file: use the path of its folder"):
        load_pretrained(str(tmp_path / "model.safetensors"), 16, "sdpa")


def test_a_folder_without_a_processor(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    for path in write("llava", tmp_path).glob("*processor*"):
        path.unlink()
    with pytest.raises(UsageError, match=r"no processor there \(Can't load image processor.*; copy its files, such as"):
        load_pretrained(str(tmp_path), 16, "sdpa", kind=AutoModelForImageTextToText)


def test_a_model_with_too_few_positions_is_named(tmp_path: Path) -> None:
    """A run of distillation.py reads two models."""
    write_model(tmp_path, num_positions=32)
    with pytest.raises(UsageError, match=f"--model_name_or_path {tmp_path}: --context 64 exceeds the model's 32 pos"):
        load_pretrained(str(tmp_path), 64, "sdpa")


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path, num_positions=32)
    for path in tmp_path.glob("*token*"):
        path.unlink()
    with pytest.raises(UsageError, match=r"no tokenizer there \(.*; copy its files, such as tokenizer.json, f"):
        load_pretrained(str(tmp_path), 16, "sdpa")


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_a_tokenizer_of_special_tokens_alone(tmp_path: Path, kind: str) -> None:
    """transformers makes it where the files are missing; each text would be unknown words."""
    if kind == "bert":
        write_encoder(tmp_path)
    else:
        write_encoder_decoder(tmp_path, "t5")
    for path in tmp_path.glob("*token*"):
        path.unlink()
    with pytest.raises(UsageError, match=r"its tokenizer knows no words: copy its files, such as tokenizer"):
        load_encoder(AutoModel if kind == "bert" else AutoModelForSeq2SeqLM, str(tmp_path), 8)


def test_a_tokenizer_whose_words_were_all_added(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    for path in (*tmp_path.glob("*token*"), *tmp_path.glob("vocab*")):
        path.unlink()
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, "[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
    tokenizer.add_tokens(["one", "two"])
    tokenizer.save_pretrained(tmp_path)
    assert load_encoder(AutoModel, str(tmp_path), 8)[1]("two")["input_ids"] == [3]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("generation_config.json", "null", "generation_config.json has no names and values: download it again"),
        ("generation_config.json", "[]", "generation_config.json has no names and values: download it again"),
        ("generation_config.json", POINTER, "generation_config.json is a Git LFS pointer"),
        ("chat_template.jinja", POINTER, "chat_template.jinja is a Git LFS pointer"),
        ("generation_config.json", "{bad", "no causal model there (Expecting property name"),
    ],
)
def test_settings_that_say_nothing_are_named(tmp_path: Path, name: str, text: str, line: str) -> None:
    write_model(tmp_path, num_positions=32)
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=re.escape(line)):
        load_pretrained(str(tmp_path), 16, "sdpa")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytorch_model.bin", b"hello rubbish"),
        ("pytorch_model.bin", b""),
        ("pytorch_model.bin", b"\x80\x04]\x94."),  # a list
        *[("model.safetensors.index.json", content) for content in (b"", b"[]", b"{}", b'{"weight_map": {}}')],
    ],
)
def test_weights_that_are_none_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_model(tmp_path, num_positions=32)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match="its weights or their index are damaged: copy or download"):
        load_pretrained(str(tmp_path), 16, "sdpa")


@pytest.mark.parametrize(
    "settings", [{}, {"do_normalize": False}, {"do_rescale": False}, {"rescale_factor": 1 / 127.5}], ids=str
)
def test_the_numbers_of_an_image_are_those_of_its_processor(tmp_path: Path, settings: dict[str, Any]) -> None:
    processor = ViTImageProcessor(size={"height": 8, "width": 8}, **settings)
    processor.save_pretrained(tmp_path)
    image = Image.linear_gradient("L").convert("RGB").resize((8, 8))
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(resize(image, Preprocessing.of(str(tmp_path)), (0, 0, 8, 8)), expected)


@pytest.mark.parametrize("settings", [{"image_mean": [0.5], "image_std": [0.5]}, {"image_std": [0.5, 0, 0.5]}])
def test_images_without_three_colours_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    ViTImageProcessor(**settings).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="expected three colours"):
        Preprocessing.of(str(tmp_path))


def test_a_model_of_three_classes_gets_a_new_head_for_questions(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    set_in(tmp_path / "config.json", id2label={"0": "a", "1": "b", "2": "c"}, label2id={"a": 0, "b": 1, "c": 2})
    assert load_encoder(AutoModelForQuestionAnswering, str(tmp_path), 16)[0].qa_outputs.out_features == 2


def test_models_without_sdpa_are_told_of_eager(tmp_path: Path) -> None:
    MambaForCausalLM(MambaConfig(vocab_size=256, hidden_size=8, num_hidden_layers=1)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"scaled_dot_product_attention.*; use --attention eager\)$"):
        load_pretrained(str(tmp_path), 16, "sdpa")
    load_pretrained(str(tmp_path), 16, "eager")


def test_layers_that_the_config_leaves_out_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers' own warning is hidden; the loss is that of fewer layers."""
    write_model(tmp_path, num_positions=32, num_layers=2)
    set_in(tmp_path / "config.json", num_hidden_layers=1)
    load_pretrained(str(tmp_path), 16, "sdpa")
    line = "config.json has fewer layers than the files, which also hold model.layers.1."
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "target", "most", "line"),
    [
        ("en", "de_DE", 8, "--source_lang en is unknown to the tokenizer: use one of af_ZA, ar_AR, "),
        ("en_XX", "german", 8, "--target_lang german is unknown to the tokenizer: use one of af_ZA, ar_AR, "),
        ("en_XX", "de_DE", 9, "--max_target_length 9 exceeds the model's 8 positions: use --max_target_length 8"),
        ("en_XX", "de_DE", 8, None),
    ],
)
def test_languages_and_lengths_of_a_translator(source: str, target: str, most: int, line: str | None) -> None:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "▁red", "▁rot"]
    tokenizer = MBart50Tokenizer(vocab=[(token, -1.0) for token in tokens])
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=8, decoder_start_token_id=2))
    model.get_input_embeddings = lambda: torch.nn.Embedding(60, 1)
    if line is None:
        assert len(Translations([("red", "rot")] * 2, tokenizer, model, "", 8, most)) == 2
        return
    with pytest.raises(UsageError, match=re.escape(line)):
        Translations([("red", "rot")] * 2, tokenizer, model, "", 8, most)


@pytest.mark.parametrize("first", [None, -1, 999])
def test_a_first_token_that_an_encoder_decoder_does_not_know(first: int | None) -> None:
    tokenizer, shape = byte_tokenizer(), {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=300, **shape, decoder_start_token_id=first))
    with pytest.raises(UsageError, match=f"config.json has decoder_start_token_id {first}: expected a token that"):
        Translations([("red", "rot")] * 2, tokenizer, model, "", 8, 8)


def test_a_language_for_a_tokenizer_that_has_none() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.src_lang = "en"  # as --source_lang does
    line = "--source_lang en: the tokenizer has no languages: remove it"
    with pytest.raises(UsageError, match=line):
        Translations([("red", "rot")] * 2, tokenizer, SimpleNamespace(config=None), "", 8, 8)

    def get_lang_token(code: str) -> str:  # as M2M100's
        return {"en": "__en__"}[code]

    with pytest.raises(KeyError) as caught:
        get_lang_token("xx")
    assert advice(caught.value) == "the tokenizer has no language 'xx': use a language code, such as --source_lang en"


def test_numbers_that_need_a_scale_are_refused(tmp_path: Path) -> None:
    quantize(tmp_path, None)
    with pytest.raises(UsageError, match=r"its weights are quantized .F8_E4M3."):
        load_pretrained(str(tmp_path), 16, "sdpa")


def test_a_missing_scale_is_refused(tmp_path: Path) -> None:
    quantize(tmp_path, FP8)
    stored, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    stored.pop(f"{name}_scale_inv")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=f"its files have {name} in F8_E4M3 and no scales for it"):
        load_pretrained(str(tmp_path), 16, "sdpa")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_read_as_transformers_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    write_model(tmp_path, num_positions=32)
    weights = {name: weight.to(dtype) for name, weight in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model, _ = load_pretrained(str(tmp_path), 16, "sdpa")
    assert on_disk(model)
    materialize(model)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


def read_causal(folder: Path) -> None:
    load_pretrained(str(folder), 16, "sdpa")


def read_classifier(folder: Path) -> None:
    load_encoder(AutoModelForSequenceClassification, str(folder), 16)


def read_embedder(folder: Path) -> None:
    load_encoder(AutoModel, str(folder), 16)


@pytest.mark.parametrize("read", [read_causal, read_classifier, read_embedder])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "other."])
def test_weights_of_other_names_are_no_model(tmp_path: Path, read: Any, prefix: str) -> None:
    """A new head alone stays possible."""
    write_model(tmp_path, num_positions=32) if read is read_causal else write_encoder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {prefix + name: weight for name, weight in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    line = rf"lacks \d+ of the weights of \w+, such as .*, but has {prefix}.*: use a complete [\w ]+"
    with pytest.raises(UsageError, match=line + ("; save the model that DDP" if "m" in prefix else "")):
        read(tmp_path)


@pytest.mark.parametrize("read", [read_causal, read_classifier, read_embedder])
@pytest.mark.parametrize("how", ["more", "hole"])
def test_token_without_a_row_is_found_at_once(tmp_path: Path, read: Any, how: str) -> None:
    write_model(tmp_path, num_positions=32) if read is read_causal else write_encoder(tmp_path)
    read(tmp_path)  # as it is, it has rows for all
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    if how == "hole":
        vocabulary[max(vocabulary, key=vocabulary.get)] = 999
    vocabulary |= {f"new{number}": 900 + number for number in range(20)} if how == "more" else {}
    file.write_text(json.dumps(content))
    token, number = ("new19", 919) if how == "more" else (".*", 999)
    with pytest.raises(UsageError, match=f"the token '{token}' with the id {number}, but the model has [0-9]+ rows"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["extra_special_tokens", "pad_token"])
def test_special_token_without_a_row_is_text_if_it_has_no_task(tmp_path: Path, name: str) -> None:
    """As in Gemma 3 1B, whose tokenizer has a token for images; but padding has a row."""
    write_model(tmp_path, num_positions=32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({name: "<image>" if name == "pad_token" else ["<image>"]})
    number = tokenizer.convert_tokens_to_ids("<image>")
    config = json.loads((tmp_path / "config.json").read_text())
    assert number == len(tokenizer) - 1 >= config["vocab_size"] and tokenizer("<image>")["input_ids"][-1] == number
    tokenizer.save_pretrained(tmp_path)
    if name == "pad_token":
        with pytest.raises(UsageError, match="the token '<image>' with the id"):
            read_causal(tmp_path)
        return
    for folder in (tmp_path, tmp_path / "exported"):  # which has the same tokens
        _, tokenizer = load_pretrained(str(folder), 16, "sdpa")
        ids = tokenizer("one<image>two")["input_ids"]  # the five words of this tokenizer, and ?
        assert ids[0] == 1 and ids[-1] == 2 and max(ids) < config["vocab_size"]
        if folder == tmp_path:
            AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path / "exported")
            tokenizer.save_pretrained(tmp_path / "exported")


TEXTS = [[5, 6, 7, 8, 9, 4, 3], [6, 4, 3], [9, 8, 4, 3]]


def losses(model: Any, collate: Any, size: int) -> torch.Tensor:
    """The loss of each of `TEXTS`, in batches of so many."""
    samples = [{"input_ids": torch.tensor(text)} for text in TEXTS]
    batches = [collate(samples[start : start + size]) for start in range(0, len(samples), size)]
    logits = torch.cat([model(**batch).logits for batch in batches])
    return F.cross_entropy(logits, torch.tensor([0, 1, 2]), reduction="none").detach()


def xlnet() -> Any:
    shape = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 32, "summary_last_dropout": 0.0}
    return XLNetForSequenceClassification(XLNetConfig(vocab_size=32, num_labels=3, **shape, initializer_range=0.3))


def gpt2(pad: int) -> Any:
    """A decoder that looks for the last token which is none of padding, by an id."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "initializer_range": 0.3}
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=32, num_labels=3, pad_token_id=pad, **shape))


@pytest.mark.parametrize(("make", "side"), [(xlnet, "left"), (lambda: gpt2(0), "right"), (lambda: gpt2(1), "right")])
def test_padding_changes_no_loss(make: Any, side: str) -> None:
    torch.manual_seed(0)
    model, tokenizer = make().eval(), word_tokenizer(["a b c a b c"], 16)
    collate = pad_texts(model, tokenizer)
    assert collate.side == tokenizer.padding_side == side
    alone = losses(model, collate, 1)
    assert all(torch.allclose(losses(model, collate, size), alone, atol=1e-5) for size in (2, 3))


def test_padding_that_is_seen_on_both_sides_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = xlnet().eval(), word_tokenizer(["a b c a b c"], 16)
    forward = model.forward
    model.forward = lambda input_ids, attention_mask: [forward(input_ids).logits * input_ids.shape[1]]
    assert pad_texts(model, tokenizer).side == "right"
    line = f"padding changes the output of {type(model).__name__}: the result depends on --micro_batch_size"
    assert line in capsys.readouterr().out


def test_load_reads_no_tokenizer_where_there_is_none(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert load(AutoModel, str(tmp_path), "encoder", reads=None)[1] is None


def test_what_the_forward_pass_does_not_use_is_frozen() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    model = Dinov2ForImageClassification(Dinov2Config(**shape, num_labels=3))
    freeze_unused(model, pixel_values=torch.zeros(1, 3, 16, 16))
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert frozen == ["dinov2.embeddings.mask_token"]


def test_a_model_that_takes_no_image_of_its_size() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    model = ViTForImageClassification(ViTConfig(**shape))
    model.name_or_path = "a/vit"
    line = "--model_name_or_path a/vit cannot take the smallest input (Input image size"
    with pytest.raises(UsageError, match=re.escape(line)):
        freeze_unused(model, pixel_values=torch.zeros(1, 3, 24, 24))


def test_attention_gets_a_mask_with_and_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the operations would depend on the batch, which a plan for tensor parallelism does not allow."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = LlamaForSequenceClassification(LlamaConfig(**shape, vocab_size=32, pad_token_id=0)).eval()
    always_mask(model)
    attention, masks = F.scaled_dot_product_attention, list[bool]()

    def noted(*args: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        masks.append(attn_mask is not None)
        return attention(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    tokens = torch.tensor([[3, 4, 5, 6]])
    for mask in ([[1, 1, 1, 1]], [[1, 1, 1, 0]]):
        model(input_ids=tokens, attention_mask=torch.tensor(mask))
    assert masks == [True, True]
