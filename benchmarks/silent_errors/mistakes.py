"""Errors in a recipe, a model, a data set or an optimizer: most of TrainCheck's.

Planted from the descriptions in OrderLab/TrainCheck-Evaluation-Workloads, silent-issue-detection/bug-reprod-scripts.
"""

import random
from typing import Any

import numpy
import torch
from faults import OURS, TRAINCHECK, Parts, described, fault, rank
from torch import Tensor, nn

from accelerate_recipes.common.data.sets import Batch
from accelerate_recipes.common.weights.shards import local

LATE = 5  # steps before a late error, more than the check takes
DECODER = "model.layers.1.mlp.down_proj"


def wrap_step(parts: Parts, before: Any) -> None:
    """Calls `before(model, batch, step)` ahead of each forward pass for gradients."""
    own: Any = parts.forward_step

    def forward_step(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            before(model, batch, step)
        return own(model, batch, step)

    parts.forward_step = forward_step


@fault(TRAINCHECK, "pytorch 104336", "ddp", cause="not all gradients pass through the model")
def weights_moved_after_wrapping(parts: Parts) -> None:
    """The model moves to another device and back after DDP has wrapped it, so DDP's hooks are on dead tensors."""

    def move(model: nn.Module, batch: Batch, step: int) -> None:
        if step == 0 and model is not parts.model:
            moved = {weight: nn.Parameter(weight.detach().clone()) for weight in parts.model.parameters()}
            for module in parts.model.modules():
                for name, weight in module.named_parameters(recurse=False):
                    setattr(module, name, moved[weight])
            for group in parts.optimizer.param_groups:
                group["params"] = [moved.get(weight, weight) for weight in group["params"]]

    wrap_step(parts, move)


@fault(TRAINCHECK, "x.com/jxmnop 1778520637193240892", "ddp", cause="does not call the model")
def wrapper_left_out(parts: Parts) -> None:
    """The trainer calls the module inside DDP in its first steps, so each process trains alone."""
    module: Any = parts.model
    parts.forward_step = lambda model, batch, step: {"loss": module(batch["tokens"], batch["labels"])}


@fault(TRAINCHECK, "x.com/jxmnop 1778520637193240892", "ddp", cause="does not call the model")
def wrapper_left_out_late(parts: Parts) -> None:
    """The same from step 6 on."""
    module, own = parts.model, parts.forward_step

    def forward_step(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        return own(model if step < LATE or not torch.is_grad_enabled() else module, batch, step)  # type: ignore

    parts.forward_step = forward_step


@fault(TRAINCHECK, "lightning-thunder 725", "ddp_bf16", cause="no layer computes in 16 bits")
def autocast_not_applied(parts: Parts) -> None:
    """The config asks for bf16, but autocast does not reach the model's layers."""
    forward = parts.model.forward

    def in_float32(*args: Any, **named: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return forward(*args, **named)

    parts.model.forward = in_float32  # type: ignore[method-assign]


@fault(TRAINCHECK, "mmpretrain 702", "ddp", cause="set requires_grad before fit")
def freezes_in_train(parts: Parts) -> None:
    """The model's train() freezes its first layer, and the trainer calls it late."""
    kind, model = type(parts.model), parts.model

    class Freezing(kind):  # type: ignore[valid-type, misc]
        def train(self, mode: bool = True) -> Any:
            self.model.layers[0].requires_grad_(False)
            return super().train(mode)

    model.__class__ = Freezing


@fault(TRAINCHECK, "pytorch 51800", "ddp", names="down_proj", cause="the forward pass changes")
def evaluated_before_its_weights(parts: Parts) -> None:
    """An evaluation runs before torch's old spectral norm creates its weight, in the first training pass."""
    torch.nn.utils.spectral_norm(parts.model.get_submodule(DECODER))  # type: ignore[arg-type]
    parts.optimizer = torch.optim.AdamW(parts.model.parameters(), 1e-3)


@fault(TRAINCHECK, "pytorch 115607", "ddp", cause="no weight")
def stale_compiled_step(parts: Parts) -> None:
    """A compiled optimizer skips all weights after a step without gradients."""

    class Stale(torch.optim.AdamW):
        count = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.state.setdefault("count", {"number": 0})["number"] += 1
            return super().step(closure) if self.state["count"]["number"] <= LATE else None

    parts.optimizer = Stale(parts.model.parameters(), 1e-3)


@fault(TRAINCHECK, "pytorch forum 84911", "ddp", cause="the optimizer was given .* not in")
def optimizer_of_another_model(parts: Parts) -> None:
    """The model is created again after the optimizer."""
    other = type(parts.model)(parts.model.config)  # type: ignore[call-arg]
    parts.optimizer = torch.optim.AdamW(other.parameters(), 1e-3)


@fault(TRAINCHECK, "pytorch forum 84911", "ddp", names="lm_head", cause="the optimizer was given .* not in")
def head_replaced_after_the_optimizer(parts: Parts) -> None:
    """The head is replaced after the optimizer was created, so it never trains."""
    model: Any = parts.model
    model.lm_head = nn.Linear(parts.config.hidden, parts.config.vocabulary, bias=False)


@fault(TRAINCHECK, "pytorch forum 84911", "ddp", names="proj mlp", cause="frozen")
def nearly_all_frozen(parts: Parts) -> None:
    """A loop over names freezes every layer except the norms."""
    for name, weight in parts.model.named_parameters():
        weight.requires_grad_("norm" in name)


@fault(TRAINCHECK, "stackoverflow 60335387", "ddp", why="the loop removes the gradients itself after each step")
def gradients_never_zeroed(parts: Parts) -> None:
    """Gradients add up over the steps, because zero_grad is missing."""
    parts.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


class Drawing:
    """Tokens of which some are replaced at random, with a generator of numpy or random."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.inner[index]
        sample["tokens"][numpy.random.randint(4)] = random.randrange(8)
        return sample


@fault(
    TRAINCHECK,
    "stackoverflow 67180955",
    "ddp",
    "--num_workers 2",
    why="what a sample draws is a function of (seed, epoch, sample)",
    without="--fault workers_with_equal_seeds",
)
def workers_with_equal_seeds(parts: Parts) -> None:
    """DataLoader workers start with the same random state, so they repeat augmentations."""
    parts.train_set = Drawing(parts.train_set)


@fault(TRAINCHECK, "transformers 17877", "ddp", names="proj", cause="do not seed by rank")
def initialised_again_in_one_process(parts: Parts) -> None:
    """One process initialises its weights again, and nothing broadcasts them."""
    if rank() == 1:
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            for layer in parts.model.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, 0, 0.02)


@fault(TRAINCHECK, "transformers 33844", "ddp", cause="evaluation")
def dropout_in_evaluation(parts: Parts) -> None:
    """Attention uses dropout in evaluation, too."""
    layer = parts.model.get_submodule(DECODER)
    layer.register_forward_hook(lambda layer, args, output: nn.functional.dropout(output, 0.1, training=True))


@fault(TRAINCHECK, "transformers 34204", "ddp", cause="a row for each sample")
def samples_merged_by_the_collator(parts: Parts) -> None:
    """The processor joins the tokens of all samples of a batch into one row."""

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return batch | {"tokens": batch["tokens"][:1]}

    parts.options["collate_fn"] = collate


described(
    "too_many_new_tokens",
    TRAINCHECK,
    "transformers 23723",
    "Generation counts the prompt before it is cut, and makes more tokens than asked for.",
    "no training loop generates; a recipe's sample after training is for the eye",
)


@fault(
    TRAINCHECK,
    "elanapearl.github.io (TrainCheck's blog)",
    "ddp",
    names="down_proj",
    cause="no step up to",
)
def weights_with_gaps_not_updated(parts: Parts) -> None:
    """The optimizer's kernels write to a copy of a non-contiguous weight (MPS before torch 2.4)."""
    module = parts.model.get_submodule(DECODER)
    module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())

    class Gaps(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            groups, kept = self.param_groups, [group["params"] for group in self.param_groups]
            for group in groups:
                group["params"] = [weight for weight in group["params"] if weight.is_contiguous()]
            super().step(closure)
            for group, weights in zip(groups, kept):
                group["params"] = weights

    parts.optimizer = Gaps(parts.model.parameters(), 1e-3)


@fault(OURS, "reported by users", "ddp", names="model.norm", cause="bad memory")
def late_element(parts: Parts) -> None:
    """One element of a weight changes in one process after the checked steps, as with bad memory."""
    weight: Any = parts.model.get_parameter("model.norm.weight")

    def change(model: nn.Module, batch: Batch, step: int) -> None:
        if step == LATE and rank() == 1:
            with torch.no_grad():
                local(weight).view(-1)[0] += 0.1

    wrap_step(parts, change)


@fault(OURS, "reported by users", "ddp", cause="the recipe asks for")
def loss_times_processes(parts: Parts) -> None:
    """The loss is multiplied by the number of processes."""
    own: Any = parts.forward_step

    def forward_step(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        return {"loss": own(model, batch, step)["loss"] * parts.accelerator.num_processes}

    parts.forward_step = forward_step


@fault(OURS, "reported by users", "ddp", cause="the recipe asks for the number of processes")
def rate_times_processes(parts: Parts) -> None:
    """The learning rate is multiplied by the number of processes."""
    for group in parts.optimizer.param_groups:
        group["lr"] *= parts.accelerator.num_processes


@fault(OURS, "gradient accumulation", "ddp", cause="depends on the other samples")
def mean_over_the_micro_batch(parts: Parts) -> None:
    """The loss per token is divided by the tokens of the micro-batch."""

    def forward_step(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        losses = model(batch["tokens"], batch["labels"]) * batch["weight"] / batch["weight"].mean()
        return {"loss": losses}

    parts.forward_step = forward_step
