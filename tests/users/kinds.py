"""Kinds of modules that a plain loop of torch trains: lazy, sparse, scripted, with computed weights, in other types."""

from collections.abc import Callable
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from nets import Block, Net
from safetensors.torch import save_file
from samples import VOCABULARY, WIDTH
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from accelerate_recipes.common.weights.on_disk import WeightFiles, leave_on_disk


def ids_of(x: Tensor) -> Tensor:
    """(batch, 3) ids of tokens."""
    return (x[:, :3].abs() * 10).long().clamp(max=VOCABULARY - 1)


class Tables(nn.Module):
    """Products of two tables of vectors: all gradients are sparse."""

    def __init__(self, kind: Callable[..., nn.Module] = nn.Embedding) -> None:
        super().__init__()
        self.one, self.other = (kind(VOCABULARY, WIDTH, sparse=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, *others = ids_of(x).unsqueeze(2).unbind(1)
        vectors = [(table(ids).flatten(1)) for table, ids in ((self.one, first), (self.other, others[0]))]
        return (vectors[0] * vectors[1]).sum(1)


class WithTable(Net):
    """One table with sparse gradients among dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + self.table(ids_of(x)).mean(1)


class Listed(nn.Module):
    """Weights in lists and dicts, one of them in both."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(2))
        self.named = nn.ParameterDict({"scale": torch.ones(WIDTH), "again": self.weights[0]})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) * self.named["scale"]
        return (x @ self.named["again"]).mean(1)


class StrangeAttributes(Net):
    """Attributes with names that libraries give a meaning, and slots."""

    __slots__ = ("factor",)
    _no_split_modules: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.config, self.module, self.device = 2.0, {"layers": 2}, "net", "cpu"
        self.save_pretrained: Any = None
        self.tp_plan: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Descent(Block):
    """Goes down the gradient of an energy, in its forward pass."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.enable_grad():
            given = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
            energy = super().forward(given).square().sum()
            return hidden - 0.1 * torch.autograd.grad(energy, given, create_graph=True)[0]


class Energy(Net):
    """Its blocks differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Descent() for _ in range(2))


class Forces(Net):
    """Differentiates all of itself, as models of energies and forces do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            energy = super().forward(place)
            (force,) = torch.autograd.grad(energy.sum(), place, create_graph=self.training)
        return energy + force.square().sum(1)


class Images(nn.Module):
    """Takes a vector as an image of 4 × 4 pixels, stored channels last."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, 4, WIDTH // 4).to(memory_format=torch.channels_last)
        return self.layers(image).flatten(1).mean(1)


class Cast(Net):
    """Weights of another type; casts what it gets."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.stem.weight.dtype)).to(x.dtype)


def changed(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Net()
        change(model.stem)
        return model

    return build


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1), nn.Flatten(0))


def on_disk(model: nn.Module) -> nn.Module:
    """With its weights left on disk, as those of a pretrained model are."""
    with NamedTemporaryFile(suffix=".safetensors") as file:
        save_file(model.state_dict(), file.name)
        folder = WeightFiles([file.name])
    for name, weight in model.to("meta").named_parameters():
        leave_on_disk(weight, folder, name)
    return model


def lazy() -> nn.Module:
    model = Net()
    model.stem, model.blocks[1].up = nn.LazyLinear(WIDTH), nn.LazyLinear(2 * WIDTH)
    return model


STRATEGIES: dict[str, Callable[[], nn.Module]] = {
    "lazy": lazy,
    "lazy_convolution": lambda: Images(nn.LazyConv2d(8, 3), nn.GELU(), nn.LazyConv2d(2, 1)),
    "sparse_table": WithTable,
    "sparse_tables": Tables,
    "sparse_bags": lambda: Tables(nn.EmbeddingBag),
    "scripted_whole": lambda: torch.jit.script(layers()),
    "traced": lambda: torch.jit.trace(layers(), torch.randn(2, WIDTH)),
    "old_weight_norm": changed(nn.utils.weight_norm),
    "weight_norm_of_two": changed(lambda layer: parametrizations.weight_norm(layer, dim=None)),
    "orthogonal": changed(parametrizations.orthogonal),
    "pruned": changed(lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3)),
    "double": lambda: Cast(torch.float64),
    "half": lambda: Cast(torch.float16),
    "channels_last": lambda: Images(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Conv2d(8, 2, 1)).to(
        memory_format=torch.channels_last
    ),
    "energy": Energy,
    "energy_on_disk": lambda: on_disk(Energy()),
    "forces": Forces,
    "listed": Listed,
    "strange_attributes": StrangeAttributes,
}
