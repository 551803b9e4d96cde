"""Promise: what `prepare` chooses gives the same result, and batches are what the dataset returns."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.data.batches import batches
from accelerate_recipes.common.data.sets import Batch
from accelerate_recipes.common.parallel.ddp import _let_ddp_send_state_alone
from accelerate_recipes.common.step.optimizer import choose_fused_kernels
from accelerate_recipes.common.tasks.vision.images import ImageDataset

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}


def optimizer_of(kind: type, weights: list[nn.Parameter], **settings: object) -> torch.optim.Optimizer:
    optimizer = kind(weights, 0.1, **settings)
    choose_fused_kernels(Accelerator(cpu=True), optimizer)
    return optimizer


def test_fused_kernels_where_they_give_the_same_result() -> None:
    weights = [nn.Parameter(torch.ones(3, 4))]
    fused = [(torch.optim.AdamW, {}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.SGD, {})]
    left = [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"foreach": True}), (torch.optim.RMSprop, {})]
    left.append((torch.optim.AdamW, {"capturable": True}))
    assert all(optimizer_of(kind, weights, **settings).defaults.get("fused") for kind, settings in fused)
    assert not any(optimizer_of(kind, weights, **settings).defaults.get("fused") for kind, settings in left)


def test_weights_with_gaps_and_late_gradients_are_updated_as_without_fused_kernels() -> None:
    for kind, settings in ((torch.optim.AdamW, {}), (torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9})):
        results = []
        for make in (optimizer_of, lambda kind, weights, **settings: kind(weights, 0.1, **settings)):
            weights = [nn.Parameter(torch.ones(4, 6)[:, :3]), nn.Parameter(torch.ones(2))]
            optimizer = make(kind, weights, **settings)
            for step in range(3):  # the second weight gets its first gradient in the last step
                weights[0].grad = torch.arange(12.0).view(4, 3)
                weights[1].grad = torch.ones(2) if step == 2 else None
                optimizer.step()
            results.append([weight.detach().clone() for weight in weights])
        for ours, plain in zip(*results):
            torch.testing.assert_close(ours, plain)


def test_ddp_sends_buffers_that_are_state_and_no_others() -> None:
    norm, llama = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), LlamaForCausalLM(LlamaConfig(**SIZES))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for model, expected in ((norm, [name for name, _ in norm.named_buffers()]), (llama, [])):
            _let_ddp_send_state_alone(model)
            assert dict(model.named_buffers()) and [*DistributedDataParallel(model).named_module_buffers] == expected
    finally:
        torch.distributed.destroy_process_group()


def test_subclass_that_overrides_indexing_is_asked_for_its_samples() -> None:
    class Inverted(ImageDataset):
        def __getitems__(self, ids: list[int]) -> Batch:
            batch = super().__getitems__(ids)
            return batch | {"image": 1 - batch["image"]}

    dataset = Inverted(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.long), num_classes=2)
    (batch,) = batches(dataset, [(0, torch.tensor([0, 2]))], torch.device("cpu"), RunConfig())
    assert (batch["image"] == 1).all()
