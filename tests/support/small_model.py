"""A small causal model and a tokenizer of whole words, in the format of transformers."""

from pathlib import Path
from typing import Any


def write_model(folder: Path, num_positions: int, vocab_size: int = 5, num_layers: int = 1) -> None:
    """Writes a small Llama and a tokenizer of five words without a pad token."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["?", "one", "two", "three", "four"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        num_hidden_layers=num_layers,
        max_position_embeddings=num_positions,
        bos_token_id=None,
        eos_token_id=None,
        **shape,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_encoder(folder: Path) -> None:
    """Writes a small BERT without a head for classes, and a tokenizer of words."""
    import torch
    from transformers import BertConfig, BertModel

    from accelerate_recipes.common.tasks.models.encoder import word_tokenizer

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=16, **shape)).save_pretrained(folder)
    word_tokenizer(["good bad fair good bad fair"], 16).save_pretrained(folder)


def write_bert(folder: Path, kind: str, texts: list[str], **options: Any) -> tuple[Any, Any]:
    """Writes a small BERT with the head of a class of transformers, without dropout, and its tokenizer of the words in
    these texts; returns them. `options`: of the config, with `vocab_size`."""
    import torch
    import transformers as hf

    from accelerate_recipes.common.tasks.models.encoder import word_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = getattr(hf, kind)(hf.BertConfig(**sizes, **no_dropout, **options))
    tokenizer = word_tokenizer(texts, options["vocab_size"])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def write_encoder_decoder(folder: Path, kind: str) -> tuple[Any, Any]:
    """Writes a small encoder-decoder without dropout, and its tokenizer with an end token; returns them."""
    import torch
    import transformers as hf
    from tokenizers.processors import TemplateProcessing

    from accelerate_recipes.common.tasks.models.encoder import word_tokenizer

    tokenizer = word_tokenizer(["turn around : red blue green small large round flat old"] * 2, 32)
    tokenizer.add_special_tokens({"eos_token": "</s>", "bos_token": "<s>"})
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": end, "decoder_start_token_id": 0}
    if kind == "t5":
        shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        model = hf.T5ForConditionalGeneration(hf.T5Config(**shape, **ids, dropout_rate=0.0))
    elif kind == "m2m_100":
        shape = {f"{part}_{what}": value for part in ("encoder", "decoder") for what, value in
                 {"layers": 2, "attention_heads": 4, "ffn_dim": 64, "layerdrop": 0.0}.items()}  # fmt: skip
        config = hf.M2M100Config(**shape, **ids, d_model=32, dropout=0.0, attention_dropout=0.0, init_std=0.2,
                                 max_position_embeddings=64, bos_token_id=tokenizer.bos_token_id)  # fmt: skip
        model = hf.M2M100ForConditionalGeneration(config)
    else:
        shape = {f"{part}_{what}": value for part in ("encoder", "decoder") for what, value in
                 {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()}  # fmt: skip
        config = hf.BartConfig(**shape, **ids, d_model=32, dropout=0.0, max_position_embeddings=64, init_std=0.2,
                               bos_token_id=tokenizer.bos_token_id, forced_eos_token_id=None)  # fmt: skip
        model = hf.BartForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def write_gpt2(folder: Path) -> None:
    """Writes a small GPT-2, which has dropout, and a tokenizer of bytes whose padding is its end token."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer

    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    ends = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256}
    shape = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=257, n_positions=128, **ends)
    GPT2LMHeadModel(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_embedder(folder: Path, words: list[str], pooling: dict, kinds: str = "Pooling", causal: bool = False) -> None:
    """Writes a small BERT or Llama that knows these words, with sentence-transformers' files: `pooling` is the content
    of that of the pooling, `kinds` are the modules after the encoder."""
    import json

    import torch
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    from accelerate_recipes.common.tasks.models.encoder import word_tokenizer

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"vocab_size": 128, "max_position_embeddings": 32, "pad_token_id": 0, "initializer_range": 0.2}
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (LlamaModel(LlamaConfig(**shape)) if causal else BertModel(BertConfig(**shape, **without_dropout))).save_pretrained(
        folder
    )
    word_tokenizer(words * 2, 128).save_pretrained(folder)
    modules = ["Transformer", *kinds.split()]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(modules[1:], start=1))]
    files = {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(zip(paths, modules))
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": 32} | pooling,
        "config_sentence_transformers.json": {"prompts": {"query": "where is ", "passage": "over "}, "kept": 1},
    }
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
