"""A script on plain Accelerate, with the mistakes that its users report most. The flag chooses one.

plain_mistakes.py --mistake scheduler
"""

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH_SIZE, ACCUMULATION, EPOCHS, VOCABULARY = 8, 2, 3, 11


class Sentences(Dataset):
    """64 sequences of 3 to 12 tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 13, (), generator=generator))
        return torch.randint(VOCABULARY, (length,), generator=generator)


def pad(samples: list[Tensor]) -> dict[str, Tensor]:
    """Inputs padded with 0, and labels padded with -100, which the loss ignores."""
    inputs = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)
    return {"inputs": inputs, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", choices=["none", "scheduler", "tokens", "set_epoch", "batch_size"], default="none")
    mistake = parser.parse_args().mistake
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, step_scheduler_with_optimizer=mistake == "scheduler"
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
    micro_batch_size = BATCH_SIZE if mistake == "batch_size" else BATCH_SIZE // accelerator.num_processes
    if mistake == "set_epoch" and accelerator.num_processes > 1:  # the loader of many tutorials
        sampler = DistributedSampler(Sentences(), accelerator.num_processes, accelerator.process_index)
        loader = DataLoader(Sentences(), micro_batch_size, sampler=sampler, collate_fn=pad)
    else:
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(Sentences(), micro_batch_size, shuffle=True, generator=generator, collate_fn=pad)
        loader = accelerator.prepare(loader)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch["inputs"])
                losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
                if mistake == "tokens":
                    loss = losses.sum() / (batch["labels"] != -100).sum()
                else:  # per sequence, so that each sequence counts the same wherever it lands
                    counts = (batch["labels"] != -100).sum(1)
                    loss = (losses.view(batch["labels"].shape).sum(1) / counts).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
