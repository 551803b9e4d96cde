"""LoRA adapters (Hu et al. 2021) through PEFT: small trained matrices next to frozen weights."""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ...config import RunConfig, flag
from ...errors import UsageError, first_line
from ...files import check_is_pulled
from ...weights.on_disk import WeightFiles, origin_of, with_random_weights
from .pretrained import files_of

FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
MERGE = "merge it with PEFT, and use that model"


@dataclass(kw_only=True)
class LoraFlags(RunConfig):
    """The flags of recipes that train adapters of a pretrained model."""

    model_name_or_path: str | None = None
    lora_rank: int = flag(0, "rank of LoRA adapters, which alone are trained; 0: train all weights", minimum=0)
    lora_alpha: float | None = flag(None, "scale the adapters by lora_alpha / lora_rank (default: 2)", above=0)
    lora_dropout: float = flag(0.0, "dropout on the input of the adapters", minimum=0, below=1)
    lora_targets: str = flag(
        "all-linear", "layers to adapt, such as q_proj,v_proj, or a regular expression of a whole name"
    )


class Adapter:
    """Facts about a model with adapters, for checkpoints and exports: they hold only the adapters. The digest
    identifies the frozen weights, so that a checkpoint is not loaded with different ones."""

    def __init__(self, settings: Any, base_digest: str):
        self.settings, self.base_digest = settings, base_digest
        self.start_digest = base_digest  # of the weights at the start of training: new adapters change nothing

    def write_settings(self, model: Any, folder: Path) -> None:
        """Writes PEFT's settings, and generation settings. transformers reads the latter from the base, unless the
        folder is a separate model: if the base does not know how an answer ends, an index names its weights."""
        self.settings.save_pretrained(str(folder))
        if getattr(model, "generation_config", None) is None:
            return
        model.generation_config.to_json_file(folder / "generation_config.json")
        base = Path(self.settings.base_model_name_or_path)
        if getattr(model, "ends_otherwise", False) and base.is_dir() and not getattr(model.config, "auto_map", None):
            files = {name: path for path in files_of(str(base)) for name in WeightFiles([path]).tensors}
            index = json.dumps({"metadata": {}, "weight_map": files}, indent=2)
            if files:
                (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(index, encoding="utf-8")
                shutil.copy(base / "config.json", folder)

    def write(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Writes PEFT's file of weights; `write_settings` writes the others."""
        facts = {"base": self.base_digest}  # one entry: safetensors writes several in a random order
        save_file({_without_name(name): weight for name, weight in weights.items()}, folder / FILE, facts)

    def read(self, folder: Path, names: list[str], is_of_peft: bool = False) -> dict[str, Tensor]:
        """{name in the model: weight} of what `write` wrote, or PEFT, which records no base; `names`: the names in the
        model. Raises OSError for a missing file, and UsageError if the adapters belong to a different base."""
        with safe_open(folder / FILE, "pt") as file:
            base = (file.metadata() or {}).get("base")
        if base != self.base_digest and not (is_of_peft and base is None):
            raise UsageError(f"{folder} belongs to base {base}, but this run has {self.base_digest}")
        own = {_without_name(name): name for name in names}
        return {own.get(name, name): weight for name, weight in load_file(folder / FILE).items()}


def _without_name(weight: str) -> str:
    """A weight's name in PEFT's files, which leave out the adapter's name."""
    return re.sub(r"\.default(?=\.|$)", "", weight)


def base_of(config: LoraFlags, merge: bool = False) -> str | None:
    """`--model_name_or_path`, or if that is a folder of adapters, their base model. Raises UsageError for
    flags of adapters without a pretrained model, or with adapters to continue; and for `--merge` without adapters."""
    path, own = config.model_name_or_path, (LoraFlags(), config)
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
    given = [f"--{name}" for name in names if getattr(own[0], name) != getattr(own[1], name)]
    goes_on = path is not None and Path(path, SETTINGS).is_file()
    if given and path is None:
        raise UsageError(f"{given[0]} adapts a pretrained model: use --model_name_or_path, too")
    if given and goes_on:
        raise UsageError(f"{given[0]}: the run continues the adapters in {path}: remove it, or --merge them first")
    if (given or merge) and not config.lora_rank and not goes_on:
        raise UsageError(f"{'--merge' if merge else given[0]} is for adapters: use --lora_rank, too")
    if path is None or not goes_on:
        return path
    try:
        return str(json.loads(Path(path, SETTINGS).read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} names no model in {SETTINGS}: add its base_model_name_or_path") from None


@contextmanager
def naming_base(config: LoraFlags, base: str) -> Iterator[None]:
    """Adds to an error about the base of adapters the file that names it."""
    try:
        yield
    except UsageError as error:
        if base == config.model_name_or_path:
            raise
        file = Path(str(config.model_name_or_path), SETTINGS)
        raise UsageError(f"{error}; base_model_name_or_path in {file} names it: correct it there") from None


def with_adapters(model: PreTrainedModel, config: LoraFlags) -> nn.Module:
    """A model of `with_losses`, loaded from the path of `base_of`: unchanged; with `--lora_rank`, frozen and with new
    adapters; or with the adapters in `--model_name_or_path`. With adapters it has an attribute `peft_adapter`.

    PEFT adapts layers such as linear ones and GPT-2's Conv1D. `--lora_targets` are all of them but the head
    (all-linear); names, separated by commas; or a regular expression, which must match a layer's whole name. Raises
    UsageError if PEFT is not installed, no layer has such a name, or PEFT does not adapt it; or if the folder has
    something other than plain LoRA for this model."""
    path, targets, alpha = config.model_name_or_path, config.lora_targets, config.lora_alpha
    if path is None:
        return model
    if not config.lora_rank:
        return _continue(model, path) if Path(path, SETTINGS).is_file() else model
    settings = _peft().LoraConfig(
        r=config.lora_rank,
        lora_alpha=2 * config.lora_rank if alpha is None else alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets if targets == "all-linear" else _layers(model, targets),
    )
    return _adapt(model, settings, path, f"--lora_targets {targets}")


def _continue(model: PreTrainedModel, folder: str) -> nn.Module:
    """Freezes a model and adds the adapters in a folder. Raises UsageError if they are not plain LoRA of this model."""
    given, peft = f"--model_name_or_path {folder}", _peft()
    try:
        check_is_pulled(Path(folder, FILE))
        settings = peft.PeftConfig.from_pretrained(folder)
        if settings.is_prompt_learning:
            raise UsageError(f"{given} has trained prompts, which are not supported: use LoRA adapters, or a model")
        if not isinstance(settings, peft.LoraConfig) or settings.modules_to_save or settings.bias != "none":
            raise UsageError(f"{given} has more than the matrices of LoRA: {MERGE}")
        if settings.use_dora:
            raise UsageError(f"{given} is DoRA, not plain LoRA: {MERGE}")
        settings.inference_mode = False
        adapted = _adapt(model, settings, settings.base_model_name_or_path, given)
        names = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
        weights = adapted.peft_adapter.read(Path(folder), names, is_of_peft=True)
        if more := sorted(weights.keys() - {*names}):
            raise UsageError(f"{given} has more weights than the matrices of LoRA, such as {more[0]}: {MERGE}")
        if weights.keys() != {*names}:
            raise UsageError(f"{given}: its weights do not match {SETTINGS}")
        adapted.load_state_dict(weights, strict=False)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"{given}: no adapters of {type(model).__name__} there ({first_line(error)})") from None
    adapted.peft_adapter.start_digest = digest_of_weights(adapted)
    return adapted


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UsageError("adapters need PEFT: run pip install peft") from None
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # PEFT reads it; transformers renamed it
    return peft


def _adapt(model: PreTrainedModel, settings: Any, base: str, given: str) -> Any:
    """A frozen model with adapters of these settings. Raises UsageError."""
    digest = digest_of_weights(model)
    settings.task_type = settings.base_model_name_or_path = None  # a type would give forward different arguments
    with with_random_weights(model), warnings.catch_warnings():  # PEFT makes adapters on the device of the weights
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # PEFT sets it for GPT-2's layers
        try:
            adapted: Any = _peft().get_peft_model(model, settings)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UsageError(f"{given}: {first_line(error)}; {_advice(model)}") from None
    settings = adapted.peft_config["default"]
    base = str(Path(base).resolve()) if Path(base).is_dir() else base  # the export is elsewhere
    settings.base_model_name_or_path, settings.task_type = base, "CAUSAL_LM"
    if not isinstance(settings.target_modules, str):
        settings.target_modules = sorted(settings.target_modules)  # PEFT writes a set in a random order
    adapted.peft_adapter = Adapter(settings, digest)
    return adapted


def _layers(model: PreTrainedModel, targets: str) -> str | list[str]:
    """The names of layers in `--lora_targets`; or the expression itself, if it has characters that names do not have.
    Raises UsageError for names that no layer has, or for the head, which may share its weights with an embedding."""
    is_expression = re.search(r"[^\w.,\s-]", targets) is not None
    names = [targets] if is_expression else [name.strip() for name in targets.split(",") if name.strip()]
    head, unknown = model.get_output_embeddings(), []
    for name in names:
        try:
            expression = re.compile(name if is_expression else rf"(.*\.)?{re.escape(name)}")
        except re.error as error:
            raise UsageError(f"--lora_targets {targets}: no regular expression ({error}); {_advice(model)}") from None
        found = [module for path, module in model.named_modules() if expression.fullmatch(path)]
        unknown += [] if found and head not in found else [name]
    if unknown or not names:
        missing = f"no layer {', '.join(unknown)} (the head does not count)"
        raise UsageError(f"--lora_targets {targets}: {missing}; {_advice(model)}")
    return targets if is_expression else names


def _advice(model: PreTrainedModel) -> str:
    head = model.get_output_embeddings()
    last = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if module is not head and not [*module.children()] and any(weight.ndim > 1 for weight in module.parameters())
    }
    return f"use all-linear, or some of {','.join(sorted(last))}"


def digest_of_weights(model: nn.Module) -> str:
    """A digest of up to 64 elements of each weight."""
    found = hashlib.sha256()
    for name, weight in model.state_dict(keep_vars=True).items():
        origin = origin_of(weight)
        whole = weight.detach() if origin is None else origin[0].tensor(origin[1])  # a map of its file
        values = whole.flatten()[:: max(1, whole.numel() // 64)].to(weight.dtype)
        found.update(f"{name} {tuple(weight.shape)} {values.tolist()}".encode())
    return found.hexdigest()[:16]
