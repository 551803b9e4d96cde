"""A script on plain Accelerate, with what its data, its evaluation or its command line may do. The flag chooses one.

plain_data.py --case draws
"""

import argparse

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

CASES = (
    *("none", "draws", "collate_draws", "own_generator", "small_set", "grows"),
    *("cut_tensors", "cut_texts", "not_cut", "crash", "crash_alone"),
)
OWN = numpy.random.default_rng()


class Samples(Dataset):
    """Four numbers and a class each; noise on the numbers, as augmentation, from the generator that is asked for."""

    def __init__(self, size: int, noise: str = ""):
        self.size, self.noise = size, noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        numbers = torch.randn(4, generator=torch.Generator().manual_seed(index))
        if self.noise == "draws":
            numbers = numbers + torch.randn(4)
        if self.noise == "own_generator":
            numbers = numbers + torch.tensor(OWN.normal(size=4), dtype=torch.float32)
        return numbers, index % 2


def noisy(samples: list[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """Masks numbers at random, as a collator for masked tokens does."""
    numbers, labels = torch.utils.data.default_collate(samples)
    return [numbers * (torch.rand(numbers.shape) > 0.3), labels]


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader, case: str) -> None:
    seen = 0
    for x, _ in loader:
        predicted = accelerator.gather(model(x).argmax(-1))
        if case == "cut_tensors":
            predicted = predicted[: 13 - seen]
        if case == "cut_texts":
            texts = [f"class {number}" for number in predicted.numpy()]
            texts = texts[: len(loader.dataset) - seen]
        seen += len(predicted)
    if case == "crash" or (case == "crash_alone" and accelerator.num_processes > 1):
        raise ValueError("the evaluation fails")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, default="none")
    case = parser.parse_args().case
    set_seed(0)
    accelerator = Accelerator()
    size = 8 if case == "grows" else 8 // accelerator.num_processes
    order = None if case == "grows" else torch.Generator().manual_seed(0)
    data = Samples(5 if case == "small_set" else 64, case)
    collate = noisy if case == "collate_draws" else None
    shuffle = case != "small_set"
    train = DataLoader(data, size, shuffle=shuffle, generator=order if shuffle else None, collate_fn=collate)
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    test = DataLoader(Samples(13 if case.startswith(("cut", "not_cut")) else 16), 4)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for _ in range(9 if case == "small_set" else 2):
        for x, y in train:
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        evaluate(accelerator, model, test, case)


if __name__ == "__main__":
    main()
