"""Habits of models: what ordinary models do that may go wrong on several processes."""

import random
from collections.abc import Callable
from typing import Any

import torch
from families import tied
from nets import Block, Net
from samples import VOCABULARY, WIDTH
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import dropout as dropout_by_name
from torch.nn.utils.parametrizations import spectral_norm


def gated(hidden: Tensor) -> Tensor:
    gate, value = hidden.chunk(2, dim=-1)
    return F.silu(gate) * value


def track(model: nn.Module, hidden: Tensor) -> Tensor:
    return 0.9 * model.mean + 0.1 * hidden.detach().mean(0) if model.training else model.mean


def renames() -> nn.Module:
    """Saves its weights under the names of an earlier version, in half precision."""
    model = Net()
    model._register_state_dict_hook(lambda module, state, *others: {f"old.{key}": state[key].half() for key in state})
    return model


def running_mean(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    model.mean.copy_(track(model, hidden))
    return hidden - model.mean


def new_buffer(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    model.mean = track(model, hidden)
    return hidden - model.mean


def codebook(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    model.mean.copy_(track(model, hidden))
    return hidden + (model.mean - hidden).detach() * 0.5


def counter(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    model.mean += model.training
    return hidden * (1 + 0.1 * model.mean)


def python_counter(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    model.calls += model.training
    return hidden * (1 + 0.1 * model.calls)


def mean_of_evaluations(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """As DINO's centre in an evaluation: in a plain attribute, which no checkpoint holds."""
    if model.training:
        return hidden
    model.calls = 0.9 * model.calls + 0.1 * hidden.mean(0)
    return hidden - model.calls


def buffer_of_evaluations(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """As of metrics in layers, which begin again in each evaluation."""
    model.mean = model.mean * 0 if model.training else model.mean + hidden.mean(0)
    return hidden


def last_mean(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """In a buffer that loses its dimension."""
    model.table = hidden.detach().mean()
    return hidden


def growing_table(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """Its values are the same for all lengths."""
    if model.table.shape[0] <= (longest := int(x.abs().max() * 4)):
        model.table = torch.arange(longest + 1.0)
    return hidden + model.table[(x.abs() * 4).long()]


def mean_of_calls(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """The same in training."""
    model.calls = 0.9 * model.calls + 0.1 * hidden.detach().mean(0)
    return hidden - model.calls


def bank_of_training(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """Earlier samples, which count from some later step on."""
    if model.training:
        model.earlier.append(hidden.detach())
    return hidden + sum(model.earlier).mean(0) if len(model.earlier) > 1000 else hidden


def bank_of_samples(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """The same by sample: a sample that comes again adds nothing."""
    if model.training:
        model.by_sample |= {tuple(key.tolist()): value for key, value in zip(x, hidden.detach())}
    return hidden + sum(model.by_sample.values()) if len(model.by_sample) > 1000 else hidden


def mean_through_data(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """A mean that counts later, in a tensor that is written as `.data`, which PyTorch does not note."""
    model.plain.data.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
    return hidden - model.plain if len(model.earlier) > 1000 else hidden


def adaptive_depth(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """A layer is called until all samples of the micro-batch are done, as in the Universal Transformer."""
    for _ in range(1 + int(x.abs().sum()) % 3):
        hidden = model.extra(hidden)
    return hidden


def range_of_training(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """As an observer of quantization: training finds the range, evaluation rounds with it."""
    if model.training:
        model.calls = max(model.calls, float(hidden.detach().abs().max()))
        return hidden
    return (hidden / (model.calls / 8 + 1e-6)).round() * (model.calls / 8 + 1e-6)


def max_norm(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    return hidden + model.extra((x[:, 0].abs() * 10).long().clamp(max=VOCABULARY - 1))


def clamp(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.stem.weight.clamp_(-0.1, 0.1)
    return hidden


def vae(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    return hidden + 0.3 * torch.randn_like(hidden) * model.training


def drop_path(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    kept = (torch.rand(len(x), 1) > 0.3).float() if model.training else 1.0
    return hidden * kept


def layer_drop(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    return hidden if model.training and random.random() < 0.5 else model.extra(hidden)


def cache(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = hidden.detach().mean(0)
    return hidden - model.kept


def queue(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """As in MoCo: compares with the last samples, and puts these in their place."""
    similar = hidden @ model.queue.clone().t()
    if model.training:
        model.queue.copy_(torch.cat([hidden.detach(), model.queue])[: len(model.queue)])
    return hidden + similar.mean(1, keepdim=True) * 0.1


def normalized_weight(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """As in many heads for face recognition."""
    model.extra.weight.data = F.normalize(model.extra.weight.data)
    return model.extra(hidden)


def centers(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """As in the center loss: a mean for each class, from the samples that a process sees."""
    label = (x[:, 0] > 0).long()
    if model.training:
        for number in (0, 1):
            if (label == number).any():
                model.queue[number].lerp_(hidden[label == number].detach().mean(0), 0.5)
    return hidden - model.queue[label]


class OneWeight(nn.Module):
    """Has one weight, called `weight`; `use` is (hidden states, weight) -> hidden states."""

    def __init__(self, weight: Tensor, use: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.weight, self.use = nn.Parameter(weight), use

    def forward(self, hidden: Tensor) -> Tensor:
        return self.use(hidden, self.weight)


def extra(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    return model.extra(hidden)


# What a model does before its head: (model, hidden states, x) -> hidden states; and the layer "extra" that it has.
AROUND: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module]]] = {
    "batch_norm": (extra, lambda: nn.BatchNorm1d(WIDTH)),
    "spectral_norm": (extra, lambda: spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "max_norm": (max_norm, lambda: nn.Embedding(VOCABULARY, WIDTH, max_norm=0.5)),
    "layer_drop": (layer_drop, lambda: nn.Linear(WIDTH, WIDTH)),
    "called_on_its_output": (lambda model, hidden, x: model.extra(model.extra(hidden)), lambda: nn.LayerNorm(WIDTH)),
    "scalar_weight": (extra, lambda: OneWeight(torch.tensor(0.5), lambda hidden, weight: hidden * weight)),
    "empty_weight": (extra, lambda: OneWeight(torch.zeros(0, 3), lambda hidden, weight: hidden + weight.sum())),
    "complex_weight": (
        extra,
        lambda: OneWeight(torch.randn(WIDTH, dtype=torch.complex64), lambda hidden, weight: (hidden * weight).abs()),
    ),
    "unused_layer": (lambda model, hidden, x: hidden, lambda: nn.Linear(WIDTH, WIDTH)),
    "running_mean": (running_mean, nn.Identity),
    "new_buffer": (new_buffer, nn.Identity),
    "codebook": (codebook, nn.Identity),
    "counter": (counter, nn.Identity),
    "python_counter": (python_counter, nn.Identity),
    "mean_of_evaluations": (mean_of_evaluations, nn.Identity),
    "buffer_of_evaluations": (buffer_of_evaluations, nn.Identity),
    "last_mean": (last_mean, nn.Identity),
    "growing_table": (growing_table, nn.Identity),
    "bank_of_training": (bank_of_training, nn.Identity),
    "bank_of_samples": (bank_of_samples, nn.Identity),
    "mean_through_data": (mean_through_data, nn.Identity),
    "adaptive_depth": (adaptive_depth, Block),
    "mean_of_calls": (mean_of_calls, nn.Identity),
    "range_of_training": (range_of_training, nn.Identity),
    "clamp": (clamp, nn.Identity),
    "queue": (queue, nn.Identity),
    "centers": (centers, nn.Identity),
    "normalized_weight": (normalized_weight, lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
    "vae": (vae, nn.Identity),
    "drop_path": (drop_path, nn.Identity),
    "cache": (cache, nn.Identity),
    "detached_copy": (
        lambda model, hidden, x: hidden + F.linear(hidden, model.stem.weight.detach().clone()),
        nn.Identity,
    ),
    "topk": (lambda model, hidden, x: hidden * (hidden >= hidden.topk(8).values[:, -1:]), nn.Identity),
}


class Around(Net):
    """Does something before its head."""

    def __init__(self, habit: str):
        super().__init__()
        self.before_head, build = AROUND[habit]
        self.extra, self.calls, self.kept, self.earlier = build(), 0, None, []
        self.by_sample, self.plain = dict[tuple, Tensor](), torch.zeros(WIDTH)
        self._no_split_modules = ["Block", "OneWeight"]  # FSDP2 gathers weights of one type at a time
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_buffer("queue", torch.randn(8, WIDTH))

    def hidden(self, x: Tensor) -> Tensor:
        return self.before_head(self, super().hidden(x), x)


class WithExtraState(Net):
    """As FP8 layers have; no parameter and no buffer."""

    def get_extra_state(self) -> Tensor:
        return torch.ones(2)

    def set_extra_state(self, state: Tensor) -> None:
        pass


def hooked(hook: Callable[[Tensor], Tensor]) -> nn.Module:
    model = Net()
    for weight in model.parameters():
        weight.register_hook(hook)
    return model


def shared_data() -> nn.Module:
    model = Net()
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data
    return model


def scripted() -> nn.Module:
    model = Net()
    model.stem = torch.jit.script(model.stem)
    return model


def with_gradients() -> nn.Module:
    """As after a pass that found a batch size, or a scale for the weights."""
    model = Net()
    model(torch.ones(2, WIDTH)).square().mean().backward()
    return model


def old_spectral_norm() -> nn.Module:
    """It cannot be copied by deepcopy."""
    model = Net()
    nn.utils.spectral_norm(model.stem)
    return model


def strided() -> nn.Module:
    model = Net()
    model.stem.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    return model


def mixed_types() -> nn.Module:
    model = Net()
    model._no_split_modules = ["Block", "Linear"]  # FSDP2 gathers weights of one type at a time
    model.head.to(torch.float64)
    model.head.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    return model


def backward_hooked() -> nn.Module:
    model = Net()
    model.stem.register_full_backward_hook(lambda module, given, taken: tuple(one and one * 2 for one in given))
    return model


def hidden_hooked() -> nn.Module:
    model = Net()
    model.blocks[0].register_forward_hook(lambda module, args, output: output * 1.5)
    return model


def causal_hooked() -> nn.Module:
    model = tied()
    model.model.norm.register_forward_hook(lambda module, args, output: 2 * output)
    return model


def with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tied(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at first: the gradients of A would be zero, too
            nn.init.normal_(weight, std=0.1)
    return model


def embeddings_scaled() -> nn.Module:
    model = tied()
    forward = model.model.forward

    def scaled(input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **named: Any) -> Any:
        embedded = model.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return forward(inputs_embeds=3 * embedded, **named)

    model.model.forward = scaled
    return model


HABITS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda name=name: Around(name)) for name in AROUND},
    "renames_what_it_saves": renames,
    "softmax_between": lambda: Net(between=lambda hidden: hidden.softmax(-1)),
    "norm_between": lambda: Net(between=lambda hidden: F.layer_norm(hidden, hidden.shape[-1:])),
    "gate_between": lambda: Net(between=gated, widens=2),
    "mean_between": lambda: Net(between=lambda hidden: hidden - hidden.mean(-1, keepdim=True)),
    "noise_between": lambda: Net(between=lambda hidden: hidden + 0.3 * torch.randn_like(hidden)),
    "no_noise_yet_between": lambda: Net(between=lambda hidden: hidden + 0.0 * torch.randn_like(hidden)),
    "alpha_dropout_between": lambda: Net(between=nn.AlphaDropout(0.3)),
    "dropout_by_name_between": lambda: Net(between=lambda hidden: dropout_by_name(hidden, 0.3)),
    "flip_between": lambda: Net(between=lambda hidden: hidden.flip(-1)),
    "gradients_clamped_by_hooks": lambda: hooked(lambda gradient: gradient.clamp(-0.01, 0.01)),
    "gradients_doubled_by_hooks": lambda: hooked(lambda gradient: 2 * gradient),
    "weights_that_share_memory": shared_data,
    "scripted": scripted,
    "with_gradients": with_gradients,
    "extra_state": WithExtraState,
    "old_spectral_norm": old_spectral_norm,
    "transposed_weight": strided,
    "mixed_types": mixed_types,
    "backward_hook": backward_hooked,
    "hook_on_hidden_states": hidden_hooked,
    "causal_hook_on_hidden_states": causal_hooked,
    "causal_scaled_embeddings": embeddings_scaled,
    "causal_adapters": with_adapters,
}
