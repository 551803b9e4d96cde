"""A script on plain Accelerate, with the mistakes that its users report most. The flag chooses one.

plain_mistakes.py --mistake scheduler
"""

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

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


class Model(nn.Module):
    """The shift has no gradient but rounding errors, of which Adam makes steps, as of the key bias of attention."""

    def __init__(self, dropout: float):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Dropout(dropout), nn.Linear(16, VOCABULARY))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs) + self.shift


MISTAKES = (
    *("none", "scheduler", "tokens", "set_epoch", "batch_size", "no_seed", "dropout", "short_batch", "divided_twice"),
    *("local_steps", "hook", "gather"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", choices=MISTAKES, default="none")
    mistake = parser.parse_args().mistake
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, step_scheduler_with_optimizer=mistake == "scheduler"
    )
    if mistake != "no_seed":
        torch.manual_seed(0)
    model: nn.Module = Model(0.1 if mistake == "dropout" else 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
    micro_batch_size = BATCH_SIZE if mistake == "batch_size" else BATCH_SIZE // accelerator.num_processes
    data = Subset(Sentences(), range(60)) if mistake == "short_batch" else Sentences()
    evaluation = accelerator.prepare(DataLoader(Subset(Sentences(), range(9)), 4, collate_fn=pad))
    generator = torch.Generator().manual_seed(0)
    if mistake in ("set_epoch", "divided_twice") and accelerator.num_processes > 1:  # the loader of many tutorials
        sampler = DistributedSampler(data, accelerator.num_processes, accelerator.process_index)
        loader = DataLoader(data, micro_batch_size, sampler=sampler, collate_fn=pad)
    else:
        loader = DataLoader(data, micro_batch_size, shuffle=True, generator=generator, collate_fn=pad)
    if mistake != "set_epoch" or accelerator.num_processes == 1:
        loader = accelerator.prepare(loader)
    if mistake == "hook":
        model.layers[2].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    bare = model
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                logits = (bare if mistake == "local_steps" else model)(batch["inputs"])
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
        gather = accelerator.gather if mistake == "gather" else accelerator.gather_for_metrics
        for batch in evaluation:
            gather(model(batch["inputs"]).argmax(-1)[:, 0])
        accelerator.save_state("checkpoints")
        accelerator.save({}, f="never.bin")
    accelerator.end_training()


if __name__ == "__main__":
    main()
