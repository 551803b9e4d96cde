"""The stages of a pipeline: which layers each one has, and whether they are the model when they run in a row."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from common.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Absent(nn.Module):
    """Placeholder for a layer of another stage. It keeps the names of the other layers unchanged."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class Stage(nn.Module):
    """The layers of a transformers causal model that this process runs.

    The first stage takes tokens, int64 of shape (batch, context); the others take hidden states, (batch,
    context, hidden). The last stage returns logits, (batch, context, vocabulary); the others return hidden states.
    """

    def __init__(self, model: "PreTrainedModel", is_first: bool, is_last: bool):
        super().__init__()
        self.model, self.is_first, self.is_last = model, is_first, is_last

    def forward(self, given: Tensor) -> Tensor:
        argument = "input_ids" if self.is_first else "inputs_embeds"
        hidden = self.model.base_model(**{argument: given}, use_cache=False).last_hidden_state
        return self.model.get_output_embeddings()(hidden) if self.is_last else hidden


def layer_bounds(sizes: Sequence[int], before: int, after: int, num_stages: int) -> list[int]:
    """Cuts a chain of layers into stages so that the largest stage is as small as possible.

    Args:
        sizes: of the layers, for example their numbers of weights, or all 1 to count layers.
        before: size of the modules before the layers, in the first stage.
        after: size of the modules after the layers, in the last stage.
        num_stages: at most the number of layers.

    Returns:
        num_stages + 1 indices: stage s holds layers bounds[s] to bounds[s + 1] - 1.
    """
    num_layers = len(sizes)
    # For the best cut of the first i layers into s stages, best[s][i] is the size of its largest stage and cut[s][i]
    # the first layer of its last stage.
    best = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0
    for stage in range(1, num_stages + 1):
        extra = before * (stage == 1) + after * (stage == num_stages)
        for end in range(stage, num_layers + 1):
            for start in range(stage - 1, end):
                largest = max(best[stage - 1][start], sum(sizes[start:end]) + extra)
                if largest < best[stage][end]:
                    best[stage][end], cut[stage][end] = largest, start
    bounds = [num_layers]
    for stage in range(num_stages, 0, -1):
        bounds.append(cut[stage][bounds[-1]])
    return bounds[::-1]


def check_pipeline(model: nn.Module, num_stages: int) -> None:
    """Raises UsageError unless `model` is a transformers model with a pipeline plan and a layer for each stage."""
    base: Any = getattr(model, "base_model", None)
    if not getattr(getattr(model, "config", None), "base_model_pp_plan", None) or not hasattr(base, "layers"):
        raise UsageError(
            f"{type(model).__name__} cannot be cut into stages: remove --pipeline_stages, or use a transformers model "
            "with a pipeline plan and a list of layers, as recipes/transformer.py does"
        )
    if len(base.layers) < num_stages:
        raise UsageError(
            f"{len(base.layers)} layers are fewer than --pipeline_stages {num_stages}: type --pipeline_stages "
            f"{len(base.layers)} or less"
        )


def keep_stage(
    model: "PreTrainedModel", index: int, num_stages: int, by: str
) -> dict[tuple[nn.Module, str], nn.Module]:
    """Removes the modules of the other stages from a transformers model.

    Args:
        model: with a pipeline plan.
        index: of the stage, from 0.
        num_stages: of the pipeline.
        by: the stages have about equal numbers of "layers" or "parameters".

    Returns:
        {(parent, name): module} of what was removed.
    """
    base, head = model.base_model, model.get_output_embeddings()
    names = list(model.config.base_model_pp_plan)  # of the modules in base, in the order of the forward pass
    at = names.index("layers")
    first = [(base, name) for name in names[:at]]
    layers = [(base.layers, str(number)) for number in range(len(base.layers))]
    last = [(base, name) for name in names[at + 1 :]]
    last += [(model, name) for name, module in model.named_children() if module is head]
    sizes = [1] * len(layers)
    before = after = 0
    if by == "parameters":
        sizes = [_num_weights([layer]) for layer in layers]
        before, after = _num_weights(first), _num_weights(last)
    bounds = layer_bounds(sizes, before, after, num_stages)
    others = layers[: bounds[index]] + layers[bounds[index + 1] :]
    others += first * (index > 0) + last * (index < num_stages - 1)
    removed = {(parent, name): getattr(parent, name) for parent, name in others}
    for parent, name in removed:
        setattr(parent, name, Absent())
    return removed


def _num_weights(places: list[tuple[nn.Module, str]]) -> int:
    return sum(weight.numel() for parent, name in places for weight in getattr(parent, name).parameters())


@torch.no_grad()
def check_stages(model: "PreTrainedModel", num_stages: int) -> None:
    """Raises UsageError if the stages in a row give other logits than the model. A stage runs the code around the
    layers, and there some models scale hidden states or logits."""
    tokens = torch.arange(8).remainder(model.get_input_embeddings().num_embeddings).unsqueeze(0)
    training, passed = model.training, tokens
    # Not the model's own forward, which returns losses.
    expected = type(model).forward(model.eval(), input_ids=tokens, use_cache=False).logits
    for index in range(num_stages):
        removed = keep_stage(model, index, num_stages, "layers")
        passed = Stage(model, index == 0, index == num_stages - 1)(passed)
        for (parent, name), module in removed.items():
            setattr(parent, name, module)
    model.train(training)
    # A cap hardly changes the small logits of an untrained model.
    is_capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if is_capped or expected.shape != passed.shape or not torch.allclose(passed, expected, rtol=1e-3, atol=1e-5):
        raise UsageError(
            f"{type(model).__name__} changes hidden states or logits outside its layers, which a pipeline cannot "
            "divide: type --config_file accelerate_configs/fsdp2.yaml, and remove --pipeline_stages"
        )
