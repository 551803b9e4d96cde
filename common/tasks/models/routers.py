"""The routers of a mixture of experts: how they divide the tokens, and the loss that balances them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import UsageError


def experts_per_token(model: PreTrainedModel) -> int:
    """The number of experts that a router chooses. Raises UsageError unless it chooses only by probability."""
    number: int = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)
    others = [name for name, _ in model.named_buffers() if name.endswith("correction_bias")]  # not only by probability
    if number == 0 or others or "router_logits" not in (model._can_record_outputs or {}):
        raise UsageError(f"--router_loss: no router of {type(model).__name__} chooses by probability alone: remove it")
    return number


def routes_of(logits: Sequence[Tensor], counted: Tensor, num_chosen: int) -> dict[str, Tensor]:
    """How the routers of all layers distribute the tokens of each sample.

    Args:
        logits: of each layer, shape (batch × context, experts).
        counted: whether a token has a label, shape (batch, context).
        num_chosen: experts of each token.

    Returns:
        "chosen", the share of tokens that each expert gets, and "probability", each of shape (batch, experts);
        "tokens", the number of counted tokens, of shape (batch,).
    """
    number = counted.sum(1)
    chosen, probability = (torch.zeros(len(number), logits[0].shape[-1], device=number.device) for _ in range(2))
    for layer in logits:
        shares = layer.float().softmax(-1)
        places = torch.zeros_like(shares).scatter_(1, shares.topk(num_chosen, dim=-1).indices, 1.0)
        for total, values in ((chosen, places), (probability, shares)):
            total += (values.view(*counted.shape, -1) * counted.unsqueeze(-1)).sum(1)
    size = (len(logits) * number.clamp(min=1)).unsqueeze(1)
    return {"chosen": chosen / size, "probability": probability / size, "tokens": number.float()}


def router_loss(weight: float, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """For `batch_loss` of `fit`: the cross-entropy, plus `weight` times the loss that is smallest if all experts get
    equally many tokens of the global batch (Fedus et al. 2021; transformers' `load_balancing_loss_func`)."""
    share = (values["tokens"] / values["tokens"].sum()).unsqueeze(1)
    chosen, probability = (share * values["chosen"]).sum(0), (share * values["probability"]).sum(0)
    balance = len(chosen) * (chosen * probability).sum().expand_as(values["tokens"])
    losses = values["cross_entropy"]
    return {"loss": losses + weight * balance, "cross_entropy": losses, "router_loss": balance}
