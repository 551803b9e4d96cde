"""Groups of layers that FSDP2 gathers together, how long it keeps them, and where shards are."""

from collections.abc import Container, Sequence
from contextlib import suppress

from torch import nn

from ..layout import Layout
from .stages import is_absent

BY_CLASSES = (
    "FSDP gathers layers by class: the classes in fsdp_transformer_layer_cls_to_wrap, or else in the model's "
    "_no_split_modules"
)


def without_effect(policy: object, min_num_params: object) -> list[str]:
    """The keys of fsdp_config that choose layers differently, from the values of its fsdp_auto_wrap_policy and
    fsdp_min_num_params: None if it has none, but Accelerate's launcher sets the latter to 100,000,000."""
    is_set = str(min_num_params) not in ("None", "", "100000000")
    return ["fsdp_auto_wrap_policy"] * (policy in ("NO_WRAP", "SIZE_BASED_WRAP")) + ["fsdp_min_num_params"] * is_set


def offloads(layout: Layout) -> bool:
    """Whether shards are in CPU memory, as the config file says."""
    return layout.environment.is_true("fsdp_offload_params")


def sharded_layers(model: nn.Module, layout: Layout) -> list[nn.Module]:
    """The layers that FSDP gathers one at a time: the config file names their classes, or else
    `_no_split_modules`. A class is left out if one of its layers shares a weight with a module outside: its weights
    stay with the rest of the model. A layer comes after the layers inside it, as torch's `fully_shard` needs."""
    classes = named_classes(model, layout)
    while apart := {
        type(layer).__name__
        for places in places_of(model, classes).values()
        if len({layer for _, layer in places}) > 1
        for _, layer in places
        if layer is not model
    }:
        classes -= apart
    layers = [each for each in model.modules() if type(each).__name__ in classes and [*each.parameters()]]
    # A layer of another stage of a pipeline has no weights; one around it would be left in the middle of a pass.
    return [layer for layer in layers if not any(map(is_absent, layer.modules()))][::-1]


def classes_in_the_file(layout: Layout) -> list[str]:
    named = layout.environment.settings.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    return named.split(",") if named else []


def named_classes(model: nn.Module, layout: Layout) -> set[str]:
    """The classes of layers that the config file names, or else the classes in `_no_split_modules`."""
    return set(classes_in_the_file(layout) or getattr(model, "_no_split_modules", None) or [])


def places_of(model: nn.Module, classes: Container[str]) -> dict[nn.Parameter, set[tuple[nn.Module, nn.Module]]]:
    """{weight: (module that has it, innermost layer of these classes around that, or the model)}"""
    waiting, seen = [(model, model)], set[tuple[nn.Module, nn.Module]]()
    places: dict[nn.Parameter, set[tuple[nn.Module, nn.Module]]] = {}
    while waiting:
        module, layer = waiting.pop()
        layer = module if type(module).__name__ in classes else layer
        if (module, layer) not in seen:
            seen.add((module, layer))
            waiting += [(child, layer) for child in module.children()]
            for weight in module.parameters(recurse=False):
                places.setdefault(weight, set()).add((module, layer))
    return places


def ends_of(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """(the input embedding, the last norm and the head) of a transformers model, outside of layers. FSDP gathers
    them separately, so that it holds none for the whole step; none if they share a weight, like tied embeddings."""
    inside = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in inside]
    weights = [weight for module in outside for weight in module.parameters(recurse=False)]
    embeddings: dict[str, nn.Module | None] = dict.fromkeys(("input", "output"))
    for end in embeddings:
        with suppress(AttributeError, NotImplementedError):  # not a model of transformers, or it has none
            embeddings[end] = getattr(model, f"get_{end}_embeddings")()
    if len({*weights}) < len(weights) or not any(embeddings.values()):
        return [], []
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    norms = [module for module in base.children() if "Norm" in type(module).__name__]
    ends = [embeddings["input"]], [*norms[-1:], embeddings["output"]]
    first, last = ([each for each in end if each in outside and [*each.parameters()]] for end in ends)
    return first, last
