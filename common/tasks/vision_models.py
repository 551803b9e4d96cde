"""Which weights of a vision-language model are trained."""

from torch import nn
from transformers import PreTrainedModel

from ..errors import UsageError
from .encoder import freeze_key_biases


def freeze_idle(model: PreTrainedModel) -> None:
    """Freezes weights of the part that sees images which get no gradient but rounding: the key biases, and the last
    weights, if the model takes an earlier layer, as LLaVA does."""
    tower = model.get_encoder(modality="image")
    freeze_key_biases(tower)
    chosen = getattr(model.config, "vision_feature_layer", None)
    if chosen is None:
        return
    num_layers = model.config.vision_config.num_hidden_layers
    last = max(layer % (num_layers + 1) for layer in ([chosen] if isinstance(chosen, int) else chosen))
    layers = [(f"{name}.{last - 1}.", part) for name, part in tower.named_modules() if isinstance(part, nn.ModuleList)]
    start = next((start for start, part in layers if len(part) == num_layers), "")
    weights = list(tower.named_parameters())
    used = max((at for at, (name, _) in enumerate(weights) if name.startswith(start)), default=len(weights))
    for _, weight in weights[used + 1 :]:
        weight.requires_grad_(False)


def freeze_named(model: nn.Module, words: str) -> None:
    """Freezes the weights that have one of these words, separated by commas, in their name. Raises UsageError for a
    word that is in none, or if nothing is left to train."""
    weights = {name.removeprefix("base_model.model."): weight for name, weight in model.named_parameters()}  # PEFT's
    for word in filter(None, map(str.strip, words.split(","))):
        found = [name for name in weights if word in name]
        if not found:
            parts = dict.fromkeys(".".join(name.split(".")[:2]) for name in weights)
            raise UsageError(f"--freeze {words}: no weight has {word} in its name; use a part of {', '.join(parts)}")
        for name in found:
            weights[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        raise UsageError(f"--freeze {words} leaves nothing to train: use fewer words")
