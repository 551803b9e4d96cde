"""How tensor parallelism divides the layers of a model: its `tp_plan`, and what does not fit it."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import UsageError
from ..layout import Layout

# The styles of transformers' `tp_plan` for a linear layer: colwise shards the outputs, rowwise the inputs. {style: what
# a process does with what the layer is given, and with what it returns}, functions of TensorGroup.
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
PACKED = ("packed_colwise_2", "packed_colwise_3")  # of a derived plan: colwise, of each of so many equal parts
NUMBER = "number"  # of a derived plan: an attribute of a module, such as a number of heads, that each process divides
# Other styles of transformers. A plan with one of them is not used: it also names the other half of a pair.
OTHER_STYLES = (
    *("packed_colwise", "packed_rowwise", "moe_identity_expert", "local_params", "all_reduce", "embedding_colwise"),
    "sequence_parallel",
)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a Linear, an Embedding or GPT-2's Conv1D, with the pass of its class, and a weight that
    nothing computes."""
    usual = isinstance(module, nn.Linear | nn.Embedding) or is_conv1d(module)
    dims = {name: weight.ndim for name, weight in module.named_parameters()}
    return usual and "forward" not in vars(module) and dims in ({"weight": 2}, {"weight": 2, "bias": 1})


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is GPT-2's linear layer, whose weight has the shape (inputs, outputs)."""
    return type(module).__module__ == "transformers.pytorch_utils" and type(module).__name__ == "Conv1D"


def dims_of(module: nn.Module) -> tuple[int, int]:
    """The dimensions of a linear layer's weight that are its outputs and its inputs."""
    return (1, 0) if isinstance(module, nn.Embedding) or is_conv1d(module) else (0, 1)


def own_plan(model: nn.Module) -> dict[str, str]:
    """A model's `tp_plan` without what stays whole, and without the weights of experts, whose style is that of the
    module around them."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    inside: dict[str, dict[str, str]] = {pattern: {} for pattern, style in plan.items() if style == EXPERTS}
    for pattern, style in plan.items():
        module, _, name = pattern.rpartition(".")
        inside.get(module, {})[name] = style
    whole = {pattern for pattern, styles in inside.items() if styles != DIVIDED_EXPERTS}
    return {
        pattern: style
        for pattern, style in plan.items()
        if style != "replicate" and pattern not in whole and pattern.rpartition(".")[0] not in inside
    }


def has_plan(model: nn.Module) -> bool:
    """Whether a model says how its layers are divided, in styles that are known, or in words that are no style."""
    plan = own_plan(model)
    return bool(plan) and not {*plan.values()} & {*OTHER_STYLES}


def why_no_plan(model: nn.Module) -> str:
    """Why `has_plan` is false."""
    if not (plan := own_plan(model)):
        return f"{type(model).__name__} has no tp_plan"
    style = next(style for style in plan.values() if style in OTHER_STYLES)
    return f"the tp_plan of {type(model).__name__} has the style {style}, which is not supported"


def kind_of(name: str) -> str:
    """The name of a layer without its numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def what_is_divided(model: nn.Module, size: int, plan: Mapping[str, str], whole: Mapping[str, str] | None) -> str:
    """The line that a run prints.

    Args:
        model: whole.
        size: number of processes that share a layer.
        plan: {name: style}
        whole: {linear layer that stays whole: why}, of a derived plan; None: the plan is the model's.
    """
    linear = {name: module.weight.numel() for name, module in model.named_modules() if is_linear(module)}
    divided = (model.get_submodule(name) for name, style in plan.items() if style in (*ENDS, EXPERTS, *PACKED))
    numbers = [sum(weight.numel() for weight in module.parameters()) for module in (*divided, model)]
    share = sum(numbers[:-1]) / numbers[-1]
    which = f"the tp_plan of {type(model).__name__}" if whole is None else f"{why_no_plan(model)}: a derived one"
    line = f"{which} divides {share:.0%} of the weights among {size} processes"
    kinds: dict[tuple[str, str], list[str]] = {}
    for name in linear:
        if name not in plan:
            kinds.setdefault((kind_of(name), whole[name] if whole else "not in the plan"), []).append(name)
    by_size = sorted(kinds.items(), key=lambda item: -sum(linear[name] for name in item[1]))
    largest = [f"{kind if len(names) > 1 else names[0]} ({why})" for (kind, why), names in by_size[:3]]
    return f"{line}; whole are {', '.join([*largest, *['others'] * (len(kinds) > 3)])}" if kinds else line


def can_pack(layout: Layout) -> bool:
    """Whether a process may hold several ranges of a weight, as of experts: FSDP2 and a pipeline know one range."""
    return layout.num_processes == layout.tp


def divide_numbers(modules: Mapping[str, nn.Module], plan: Mapping[str, str], size: int) -> dict[str, str]:
    """Divides the numbers in a derived plan that belong to these modules, and returns the rest."""
    for name in (name for name, style in plan.items() if style == NUMBER):
        module, _, key = name.rpartition(".")
        if module in modules:
            setattr(modules[module], key, getattr(modules[module], key) // size)
    return {name: style for name, style in plan.items() if style != NUMBER}


def check_plan(model: nn.Module, size: int, packs: bool = True) -> dict[str, str]:
    """{module name: style} for all modules that the model's plan shards.

    Args:
        model: with a `tp_plan`.
        size: number of processes that share a layer.
        packs: from `can_pack`.

    Raises:
        UsageError: no plan, a plan that does not fit the model, or sizes that are not divisible.
    """
    plan = own_plan(model)
    if not plan:
        raise UsageError(
            f"{type(model).__name__} has no tp_plan, which tensor parallelism needs",
            "use --config_file accelerate_configs/fsdp2.yaml, or give the model one as in docs/parallelism.md",
        )
    _check_heads(model, size)
    prefix, modules = _prefix(model), dict(model.named_modules())
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in modules.items():
        for weight in module.parameters(recurse=False):
            owners.setdefault(weight, []).append(name)
    resolved: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in (*ENDS, NORM_OF_HEADS, SHARED_KEYS, EXPERTS):
            raise UsageError(f"tp_plan: {pattern}: {style}", f"expected one of {', '.join(ENDS)}")
        matches = _named(prefix + pattern, modules, model)
        if style not in ENDS:
            resolved |= _of_modules(style, {name: modules[name] for name in matches}, model, size, packs)
            continue
        for name in [part for match in matches for part in _divided_parts(match, modules[match], style)]:
            shared = {owner for weight in modules[name].parameters(recurse=False) for owner in owners[weight]} - {name}
            if shared and _is_transformers(model):
                continue  # transformers plans also name weights that may be tied; tied ones stay whole
            if shared:
                raise UsageError(
                    f"tp_plan: {name} shares its weight with {min(shared)}", "leave both out, or untie them"
                )
            _check_width(name, modules[name], style, size)
            resolved[name] = style
    return resolved


def _named(pattern: str, modules: Mapping[str, nn.Module], model: nn.Module) -> list[str]:
    """The names that a pattern stands for. Raises UsageError if there are none, unless transformers ships it for all
    models of a class: a mixture of experts, for example, may have layers without experts."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    matches = [name for name in modules if expression.fullmatch(name)]
    shipped = getattr(_text_config(model), "base_model_tp_plan", None) or ()
    if not matches and not any(pattern.endswith(each) for each in shipped):
        near = difflib.get_close_matches(pattern, modules, n=1, cutoff=0)
        raise UsageError(f"tp_plan: {pattern} names no module of {type(model).__name__}", f"did you mean {near[0]}?")
    return matches


def _of_modules(
    style: str, modules: Mapping[str, nn.Module], model: nn.Module, size: int, packs: bool
) -> dict[str, str]:
    """{name: style} for modules that are no linear layers, or stay whole."""
    if style == SHARED_KEYS:
        style = f"{style}_{_text_config(model).qk_rope_head_dim}"
    elif style == EXPERTS:
        modules = {name: module for name, module in modules.items() if packs and _are_divisible(module, size)}
    return dict.fromkeys(modules, style)


def _prefix(model: nn.Module) -> str:
    """What stands before the names of a plan: a wrapper such as PEFT's passes on that of a model inside it."""
    has_plan = (name for name, module in model.named_modules() if "tp_plan" in {*vars(module), *dir(type(module))})
    name = next(has_plan, "")
    return f"{name}." if name else ""


def _divided_parts(name: str, module: nn.Module, style: str) -> list[str]:
    """The names of the layers that take the style of a module in the plan: its own, or those of PEFT's layers in it.

    LoRA adds B(A(x)) to the output of a layer. A colwise layer divides its outputs, so it divides those of B, and A
    stays whole. A rowwise layer divides its inputs, so it divides those of A, and B stays whole: the parts of A are
    summed before it.

    Raises:
        UsageError: the module has other adapters than LoRA's.
    """
    if not hasattr(module, "base_layer"):
        return [name]
    others = {key.partition(".")[0] for key, _ in module.named_parameters()} - {"base_layer", "lora_A", "lora_B"}
    if others:
        raise UsageError(
            f"tensor parallelism does not divide {min(others)} of {name}",
            "use plain LoRA, of linear layers, or use --config_file accelerate_configs/fsdp2.yaml",
        )
    adapter = "lora_A" if style.startswith("rowwise") else "lora_B"
    return [f"{name}.base_layer", *(f"{name}.{adapter}.{key}" for key in getattr(module, adapter))]


def _is_transformers(model: nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(model, "base_model_prefix")


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if _is_transformers(model) else config


def _are_divisible(experts: nn.Module, size: int) -> bool:
    """Whether experts have the weights of transformers 5, (experts, outputs, inputs), of a width that divides."""
    shapes = {name: weight.shape for name, weight in experts.named_parameters()}
    if shapes.keys() != DIVIDED_EXPERTS.keys():
        return False
    return shapes["down_proj"][2] % size == 0 and shapes["gate_up_proj"][1] % (2 * size) == 0


def _check_heads(model: nn.Module, size: int) -> None:
    config = _text_config(model)
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if heads and heads % size:
            raise UsageError(
                f"{what} is {heads}, which is not divisible by tp_size {size}",
                f"use a multiple of {size}, or another tp_size in the config file",
            )


def _check_width(name: str, module: nn.Module, style: str, size: int) -> None:
    if not isinstance(module, nn.Linear | nn.Embedding) and not is_conv1d(module):
        raise UsageError(
            f"tp_plan: {name} is {type(module).__name__}: expected Linear or Embedding",
            "leave it out of tp_plan, or use --config_file accelerate_configs/fsdp2.yaml",
        )
    if computed := sorted({key for key, _ in module.named_parameters()} - {"weight", "bias"}):
        raise UsageError(
            f"tp_plan: {name} computes its weight from {computed[0]}, as weight_norm does, and cannot be sharded",
            f"leave {name} out of tp_plan",
        )
    width = getattr(module, "weight").shape[dims_of(module)["rowwise" in style]]  # noqa: B009  # mypy knows no Conv1D
    if width % size:
        raise UsageError(
            f"tp_plan: {name} is {width} wide, which is not divisible by tp_size {size}",
            f"choose a multiple of {size}, or another tp_size in the config file",
        )
