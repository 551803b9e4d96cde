"""The table of recipes and configs: what each pair needs, and what `accelerate-recipes verify` finds. No torch here."""

from dataclasses import dataclass
from typing import Literal

from accelerate_recipes import bundle

# A recipe, or one of its models that configs divide differently, as you type it.
EXPERTS = "transformer --num_experts 4"
RECIPES = (
    *("mnist", "mnist --model mlp", "linear_regression", "transformer", EXPERTS, "text_classification"),
    *("token_classification", "masked_lm", "embeddings", "question_answering", "translation", "finetune"),
    *("distillation", "preferences", "image_classification", "segmentation", "detection", "speech", "diffusion"),
    "vision_language",
)
# The configs that one machine compares with one process, which is single.yaml.
CONFIGS = tuple(path.stem for path in bundle.configs() if not path.stem.startswith(("single", "multi_node")))
# Sizes that all recipes take as flags, because a config file has no setting for them: {config: [flag, size]}.
PIPELINES = ("pipeline_parallel", "fsdp2_pipeline", "fsdp2_tensor_pipeline")
SIZES = {config: ["--pipeline_stages", "2"] for config in PIPELINES}
SIZES |= {"fsdp2_expert_parallel": ["--expert_parallel", "2"]}


@dataclass(frozen=True)
class Cell:
    """A recipe under a config."""

    result: Literal["same", "differs", "not supported"] = "same"  # what `verify` finds, against one process
    flags: tuple[str, ...] = ()  # flags that the config needs besides its file
    line: str = ""  # words in the last line of an unsupported run


_CAUSAL = ("transformer", EXPERTS, "finetune", "preferences")
_NOT_CAUSAL = [recipe for recipe in RECIPES if recipe not in _CAUSAL]
_TENSOR = ("tensor_parallel", "fsdp2_tensor_parallel", "hsdp_tensor_parallel", "fsdp2_tensor_pipeline")
_SEQUENCE = ("sequence_parallel", "fsdp2_sequence_parallel")
# (words of a run's line, configs, recipes that they do not support); of two rows for a pair, the later one counts.
_NOT_SUPPORTED = (
    ("has no tp_plan", _TENSOR, ["mnist", "linear_regression", "segmentation"]),
    ("has no tp_plan, and none can be derived", _TENSOR[1:], ["masked_lm"]),
    ("cannot divide sequences", _SEQUENCE, _NOT_CAUSAL),
    ("has no list of layers", PIPELINES, ["linear_regression"]),
    ("has two chains of layers", PIPELINES, ["translation"]),
    ("calls a layer 2 times", PIPELINES, ["embeddings"]),
    ("has no experts of transformers 5", ["fsdp2_expert_parallel"], [each for each in RECIPES if each != EXPERTS]),
)

MATRIX = {(recipe, config): Cell(flags=tuple(SIZES.get(config, ()))) for recipe in RECIPES for config in CONFIGS} | {
    (recipe, config): Cell("not supported", line=line)
    for line, configs, recipes in _NOT_SUPPORTED
    for config in configs
    for recipe in recipes
}


def flags_for(name: str, config: str) -> list[str] | None:
    """The flags of a recipe under a config, for the first of its models that the config supports; or None."""
    for recipe in RECIPES:
        own, *model = recipe.split()
        if own == name and (cell := MATRIX.get((recipe, config), Cell())).result != "not supported":
            return [*model, *cell.flags]
    return None
