"""Parameter groups for an optimizer, with and without weight decay."""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters of a model in up to two groups, for the first argument of an optimizer.

    Matrices and convolution kernels decay, because they multiply activations. Biases and the gains of
    norms have one dimension and do not decay. Embeddings do not decay, because a step uses few of
    their rows. A head that shares its weights with an embedding counts as an embedding. nanoGPT does the
    same, except that its embeddings decay. Frozen weights are left out.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    decaying = [weight for weight in trained if weight.ndim >= 2 and weight not in embeddings]
    others = [weight for weight in trained if weight.ndim < 2 or weight in embeddings]
    groups = {"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}
    return [group for group in groups if group["params"]]
