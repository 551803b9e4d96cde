"""How tensor parallelism divides the layers of a model: by the model's `tp_plan`, if that fits it."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

# The styles of transformers' `tp_plan` for a linear layer: colwise shards the outputs, rowwise the inputs. {style: what
# a process does with the layer's input, and with its output}, functions of TensorGroup.
ENDS = {
    "colwise": ("copy_once", "keep"),
    "rowwise": ("keep", "sum"),
    "colwise_rep": ("copy_once", "gather"),
    "colwise_gather_output": ("copy_once", "gather"),
    "rowwise_rep": ("split", "sum"),
    "rowwise_split_input": ("split", "sum"),
    "embedding_rowwise": ("keep", "sum"),
}
NORM_OF_HEADS = "replicated_with_grad_allreduce"  # of the queries or keys of a head: each process has its own heads
SHARED_KEYS = "mla_kv_a_proj"  # its last outputs, a number of the config, are a part of the keys of all heads
EXPERTS = "moe_tp_experts"  # each process has a share of the width of each expert
DIVIDED_EXPERTS = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}  # other experts stay whole
PACKED = ("packed_colwise_2", "packed_colwise_3")  # in a derived plan: colwise for each of 2 or 3 equal parts
NUMBER = "number"  # of a derived plan: an attribute of a module, such as a number of heads, that each process divides


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain Linear, Embedding or Conv1D: with the pass of its class, and a stored weight."""
    usual = isinstance(module, nn.Linear | nn.Embedding) or is_conv1d(module)
    dims = {name: weight.ndim for name, weight in module.named_parameters()}
    return usual and "forward" not in vars(module) and dims in ({"weight": 2}, {"weight": 2, "bias": 1})


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is GPT-2's linear layer, whose weight has the shape (inputs, outputs)."""
    return type(module).__module__ == "transformers.pytorch_utils" and type(module).__name__ == "Conv1D"


def dims_of(module: nn.Module) -> tuple[int, int]:
    """The dimensions of a linear layer's weight that are its outputs and its inputs."""
    return (1, 0) if isinstance(module, nn.Embedding) or is_conv1d(module) else (0, 1)


def width_of(module: Any, end: int) -> int:
    """How many outputs (0) or inputs (1) a linear layer has."""
    return module.weight.shape[dims_of(module)[end]]


def shared_layers(modules: Mapping[str, nn.Module]) -> set[str]:
    """The names of modules that share a weight with another one."""
    own = {name: [*module.parameters(recurse=False)] for name, module in modules.items()}
    owners = Counter(weight for weights in own.values() for weight in weights)
    return {name for name, weights in own.items() if any(owners[weight] > 1 for weight in weights)}


def kind_of(name: str) -> str:
    """The name of a layer without its numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def what_is_divided(model: nn.Module, size: int, plan: Mapping[str, str], why: str) -> str:
    """The share of the weights that a plan, {name: style}, divides among `size` processes, and the largest layers that
    it leaves whole, for the terminal. `why`: layers that share no weight stay whole."""
    modules, kinds = dict(model.named_modules()), dict[tuple[str, str], list[str]]()
    linear = {name: module.weight.numel() for name, module in modules.items() if is_linear(module)}
    divided = (modules[name] for name, style in plan.items() if style in (*ENDS, EXPERTS, *PACKED))
    numbers = [sum(weight.numel() for weight in module.parameters()) for module in (*divided, model)]
    line, shared = f"divides {sum(numbers[:-1]) / numbers[-1]:.0%} of the weights", shared_layers(modules)
    for name in (name for name in linear if name not in plan):
        kinds.setdefault((kind_of(name), "shared" if name in shared else why), []).append(name)
    by_size = sorted(kinds.items(), key=lambda item: -sum(linear[name] for name in item[1]))
    largest = [f"{kind if len(names) > 1 else names[0]} ({why})" for (kind, why), names in by_size[:3]]
    which = ", ".join([*largest, *["others"] * (len(kinds) > 3)])
    return f"{line} among {size} processes{f'; these stay whole: {which}' * bool(kinds)}"


def shipped_plan(model: nn.Module, size: int, packs: bool = True) -> tuple[dict[str, str], str]:
    """({module: style}, why it is not used): what the model's `tp_plan` divides among `size` processes, or nothing and
    why. `packs`: whether a process may hold several ranges of a weight, as of experts."""
    name, plan = type(model).__name__, getattr(model, "tp_plan", None)
    if not plan:
        return {}, f"{name} has no tp_plan"
    try:
        return _resolve(model, plan, size, packs), ""
    except ValueError as error:
        return {}, f"{name} has no tp_plan that fits ({error})"


def _resolve(model: Any, plan: Mapping[str, str], size: int, packs: bool) -> dict[str, str]:
    """The layers that a plan divides. Raises ValueError if it does not fit the model; the message says why."""
    is_transformers = hasattr(model, "config") and hasattr(model, "base_model_prefix")
    config: Any = model.config.get_text_config() if is_transformers else getattr(model, "config", None)
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, key, None)) and heads % size:
            raise ValueError(f"{key} is {heads}, which is not divisible by tp_size {size}")
    modules, resolved = dict(model.named_modules()), dict[str, str]()
    for pattern, style in plan.items():
        if style == "replicate" or plan.get(pattern.rpartition(".")[0]) == EXPERTS:  # a weight of experts
            continue
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        names = [name for name in modules if expression.fullmatch(name)]
        if not names and not is_transformers:  # its plans are for all models of a class, and it warns of others
            raise ValueError(f"{pattern} is not a module")
        if style == EXPERTS:
            styles = {key: plan.get(f"{pattern}.{key}") for key in DIVIDED_EXPERTS}
            names = [name for name in names if packs and styles == DIVIDED_EXPERTS and _fits(modules[name], size)]
        elif style == SHARED_KEYS:
            style = f"{style}_{config.qk_rope_head_dim}"
        elif style in ENDS:
            names = _linear_layers(names, modules, style, size)
        elif style != NORM_OF_HEADS:
            raise ValueError(f"{pattern}: {style} is not supported")
        resolved |= dict.fromkeys(names, style)
    if not resolved:  # a wrapper passes on the plan of a model whose layers have other names in it
        raise ValueError("it names no layers")
    return resolved


def _linear_layers(names: list[str], modules: Mapping[str, nn.Module], style: str, size: int) -> list[str]:
    """The layers of these names that can take a style of `ENDS`. One outside a pair, such as a head, may be tied: then
    it stays whole. Raises ValueError for other layers that cannot."""
    shared = shared_layers(modules)
    if style not in ("colwise", "rowwise"):
        names = [name for name in names if name not in shared]
    for name in names:
        if not is_linear(modules[name]):
            raise ValueError(f"{name} is not a plain Linear or Embedding")
        if name in shared:
            raise ValueError(f"{name} shares its weight with another layer")
        if (width := width_of(modules[name], "rowwise" in style)) % size:
            raise ValueError(f"{name} is {width} wide, which is not divisible by tp_size {size}")
    return names


def _fits(experts: nn.Module, size: int) -> bool:
    """Whether experts have the weights of transformers 5, (experts, outputs, inputs), of a width that divides."""
    shapes = {name: weight.shape for name, weight in experts.named_parameters()}
    is_usual = shapes.keys() == DIVIDED_EXPERTS.keys()
    return is_usual and shapes["down_proj"][2] % size == 0 and shapes["gate_up_proj"][1] % (2 * size) == 0
