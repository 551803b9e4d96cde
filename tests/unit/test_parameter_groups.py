"""Promise: weight decay applies only to weights that multiply activations."""

import torch

from accelerate_recipes.common.parameter_groups import parameter_groups


def test_weight_decay_is_of_weights_that_multiply() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Conv1d(4, 4, 1), torch.nn.LayerNorm(4))
    head = torch.nn.Linear(4, 7)
    head.weight = model[0].weight  # tied
    model.append(head)
    decaying, others = parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [p.shape for p in decaying["params"]] == [(4, 4, 1)]
    assert len(others["params"]) == 5  # embedding once, biases, gains
