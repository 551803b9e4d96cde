"""A script on transformers' Trainer."""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=arguments.dropout))
    tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row.clone()} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=arguments.batch,
            max_steps=8,
            report_to=[],
            save_strategy="no",
            learning_rate=1e-3,
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        Trainer(model, settings, train_dataset=data).train()


if __name__ == "__main__":
    main()
