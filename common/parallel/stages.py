"""The stages of a pipeline, and which layers each one has."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import UsageError

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


def layer_bounds(num_layers: int, num_stages: int) -> list[int]:
    """Cuts a chain of layers into stages of about equal length; the last stage, which has the head, gets no extra one.

    Returns:
        num_stages + 1 indices: stage s holds layers bounds[s] to bounds[s + 1] - 1.
    """
    return [-(-stage * num_layers // num_stages) for stage in range(num_stages + 1)]


def check_pipeline(model: Any, num_stages: int) -> None:
    """Raises UsageError unless `model` is a transformers model with a pipeline plan and a layer for each stage."""
    base: Any = getattr(model, "base_model", None)
    if not getattr(getattr(model, "config", None), "base_model_pp_plan", None) or not hasattr(base, "layers"):
        raise UsageError(
            f"{type(model).__name__} cannot be cut into stages",
            "remove --pipeline_stages, or use a transformers model with a pipeline plan and a list of layers, as "
            "recipes/transformer.py does",
        )
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None):  # it hardly changes small logits
        raise UsageError(
            f"{type(model).__name__} caps its logits outside its layers, which a pipeline cannot divide",
            "use --config_file accelerate_configs/fsdp2.yaml, and remove --pipeline_stages",
        )
    if len(base.layers) < num_stages:
        raise UsageError(
            f"{len(base.layers)} layers are fewer than --pipeline_stages {num_stages}",
            f"use --pipeline_stages {len(base.layers)} or less",
        )


def keep_stage(model: "PreTrainedModel", index: int, num_stages: int) -> set[str]:
    """Removes the modules of the other stages from a transformers model with a pipeline plan.

    Args:
        model: changed in place.
        index: of the stage, from 0.
        num_stages: of the pipeline.

    Returns:
        Names of the parameters and buffers that all stages keep.
    """
    base, head = model.base_model, model.get_output_embeddings()
    names = list(model.config.base_model_pp_plan)  # of the modules in base, in the order of the forward pass
    at = names.index("layers")
    first = [(base, name) for name in names[:at]]
    layers = [(base.layers, str(number)) for number in range(len(base.layers))]
    last = [(base, name) for name in names[at + 1 :]]
    last += [(model, name) for name, module in model.named_children() if module is head]
    state, modules = model.state_dict(keep_vars=True), [getattr(*each) for each in (*first, *layers, *last)]
    divided = {tensor for module in modules for tensor in module.state_dict(keep_vars=True).values()}
    bounds = layer_bounds(len(layers), num_stages)
    others = layers[: bounds[index]] + layers[bounds[index + 1] :]
    others += first * (index > 0) + last * (index < num_stages - 1)
    for parent, name in others:
        setattr(parent, name, Absent())
    return {name for name, tensor in state.items() if tensor not in divided}
