"""What an optimizer is given: parameters, grouped by whether they decay."""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters of a model in up to two groups, for the first argument of an optimizer.

    Weight decay keeps small what multiplies activations: matrices and convolution kernels. Biases
    and the gains of norms, of one dimension, do not decay, and neither do embeddings, of which a
    step touches few rows; a head that shares its weights with an embedding counts as one
    (as in nanoGPT, but for the embeddings).
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    decaying = [weight for weight in model.parameters() if weight.ndim >= 2 and weight not in embeddings]
    others = [weight for weight in model.parameters() if weight.ndim < 2 or weight in embeddings]
    groups = {"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}
    return [group for group in groups if group["params"]]
