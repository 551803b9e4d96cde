"""The facts of a recipe: its model, optimizer, data and flags, as it hands them to `fit`."""

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_recipes.at_fit import at_fit

# As in common/parallel/guards.py.


@dataclass(frozen=True)
class Layer:
    """A module that the tp_plan names.

    Attributes:
        kind: its class.
        shape: (outputs, inputs) of its weight; empty without a two-dimensional weight.
        style: how the plan divides it.
        shares_with: another module with the same weight; empty if there is none.
    """

    name: str
    kind: str
    shape: Sequence[int]
    style: str
    shares_with: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a recipe hands to `fit`.

    Attributes:
        model: class of the model.
        classes: of all its modules.
        has_plan: whether it has a tp_plan.
        layers: the modules that the plan names.
        strange_patterns: {pattern of the plan that names no module: the nearest name}.
        heads: {"num_attention_heads" and "num_key_value_heads" of its config: how many}.
        num_layers: that a pipeline can divide; None if it cannot cut the model.
        weights: {name: [number of elements, type, number of dimensions]} of weights that sharding may not support.
        sample_bytes: of the tensors of a training sample.
        num_samples: of the training set.
    """

    model: str
    classes: list[str]
    has_plan: bool = False
    layers: Sequence[Layer] = ()
    strange_patterns: dict[str, str]
    heads: dict[str, int]
    num_layers: int | None = None
    weights: dict[str, tuple[int, str, int]]
    sample_bytes: int
    num_samples: int
    batch_size: int
    micro_batch_size: int | None
    pipeline_stages: int
    max_grad_norm: float
    ema_decay: float
    num_workers: int


def look(script: Path, flags: Sequence[str]) -> Recipe:
    """The facts of a recipe with these flags. Raises UsageError if it does not get to its call of `fit`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--pipeline_stages", "--pipeline-stages", type=int)
    asked, others = parser.parse_known_args(flags)
    # A single process cannot be a pipeline.
    found = at_fit(script, [*others, "--pipeline_stages", "1"], f"{__name__}:facts")
    if asked.pipeline_stages is not None:
        found["pipeline_stages"] = asked.pipeline_stages
    return Recipe(**found | {"layers": [Layer(**layer) for layer in found["layers"]]})


def facts(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    forward_step: Any,
    train_set: Any,
    eval_set: Any,
    config: Any,
    *others: Any,
    **keywords: Any,
) -> dict[str, Any]:
    """The fields of `Recipe`, from the arguments of `fit`. Runs in the recipe's process."""
    names = ("batch_size", "micro_batch_size", "max_grad_norm", "ema_decay", "num_workers")
    plan = dict(getattr(model, "tp_plan", None) or {})
    layers, strange = _planned(model, plan)
    return {name: getattr(config, name) for name in names} | {
        "model": type(model).__name__,
        "classes": sorted({type(module).__name__ for module in model.modules()}),
        "has_plan": bool(plan),
        "layers": layers,
        "strange_patterns": strange,
        "heads": _heads(model),
        "num_layers": _num_layers(model),
        "weights": dict(_special_weights(model)),
        "sample_bytes": _num_bytes(train_set[0]),
        "num_samples": len(train_set),
        "pipeline_stages": type(config).__dataclass_fields__["pipeline_stages"].default,
    }


def _planned(model: Any, plan: dict[str, str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The modules that a tp_plan names, and its patterns that name none, each with the nearest name."""
    modules = dict(model.named_modules())
    prefix = "base_model.model." if getattr(model, "peft_adapter", None) else ""  # PEFT wraps the model twice
    owners: dict[Any, list[str]] = {}
    for name, module in modules.items():
        for weight in module.parameters(recurse=False):
            owners.setdefault(weight, []).append(name)
    layers: list[dict[str, Any]] = []
    strange: dict[str, str] = {}
    for pattern, style in plan.items():
        expression = re.compile(re.escape(prefix + pattern).replace(r"\*", r"\d+"))
        matches = [name for name in modules if expression.fullmatch(name)]
        if not matches:
            strange[pattern] = difflib.get_close_matches(pattern, modules, n=1, cutoff=0)[0]
        for name in [part for match in matches for part in _divided_parts(match, modules[match], style)]:
            others = {owner for weight in modules[name].parameters(recurse=False) for owner in owners[weight]} - {name}
            if others and hasattr(model, "config") and hasattr(model, "base_model_prefix"):
                continue  # plans of transformers also name weights that may be tied; tied ones stay whole
            kind = next(base.__name__ for base in type(modules[name]).__mro__ if base.__module__.startswith("torch."))
            shape = list(getattr(modules[name], "weight", _Nothing).shape)
            layer = {"name": name, "kind": kind, "shape": shape, "style": style, "shares_with": min(others, default="")}
            layers.append(layer)
    return layers, strange


def _divided_parts(name: str, module: Any, style: str) -> list[str]:
    """The layers that take the style of a module: its own, or those of LoRA in it, as in common/parallel."""
    if not hasattr(module, "lora_A"):
        return [name]
    adapter = "lora_A" if style.startswith("rowwise") else "lora_B"
    return [f"{name}.base_layer", *(f"{name}.{adapter}.{key}" for key in getattr(module, adapter))]


class _Nothing:
    shape = ()


def _heads(model: Any) -> dict[str, int]:
    config = getattr(model, "config", None)
    found = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return {name: heads for name, heads in found.items() if heads}


def _num_layers(model: Any) -> int | None:
    base: Any = getattr(model, "base_model", None)
    has_plan = bool(getattr(getattr(model, "config", None), "base_model_pp_plan", None))
    return len(base.layers) if has_plan and hasattr(base, "layers") else None


def _special_weights(model: Any) -> Iterator[tuple[str, tuple[int, str, int]]]:
    for name, weight in model.named_parameters():
        kind = str(weight.dtype).removeprefix("torch.")
        if weight.ndim == 0 or weight.numel() == 0 or kind in ("float64", "complex64", "complex128"):
            yield name, (weight.numel(), kind, weight.ndim)


def _num_bytes(sample: Any) -> int:
    values = sample.values() if isinstance(sample, dict) else ()
    return sum(value.nbytes for value in values if hasattr(value, "nbytes"))
