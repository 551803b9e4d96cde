"""LoRA adapters (Hu et al. 2021) through PEFT: small trained matrices beside frozen weights."""

import hashlib
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoProcessor, PreTrainedModel

from ..errors import UsageError, first_line
from ..weights.on_disk import origin_of, with_random_weights

FILE = "adapter_model.safetensors"


class Adapter:
    """What a checkpoint and an export need to know about a model with adapters: they hold the adapters alone.

    Args:
        settings: PEFT's config of the adapters.
        base_digest: of the frozen weights, so that a checkpoint is not loaded beside others.
    """

    def __init__(self, settings: Any, base_digest: str):
        self.settings, self.base_digest = settings, base_digest

    def write(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Writes PEFT's file of weights; `settings.save_pretrained` writes the other one."""
        facts = {"base": self.base_digest}  # one entry: safetensors writes several in a random order
        save_file({_without_name(name): weight for name, weight in weights.items()}, folder / FILE, facts)

    def read(self, folder: Path, names: list[str]) -> dict[str, Tensor]:
        """{name in the model: weight} of what `write` wrote; `names` are those in the model.

        Raises:
            OSError: no such file.
            UsageError: the adapters belong to another base.
        """
        with safe_open(folder / FILE, "pt") as file:
            base = (file.metadata() or {}).get("base")
        if base != self.base_digest:
            raise UsageError(f"{folder} was made with base {base}, this run has {self.base_digest}")
        own = {_without_name(name): name for name in names}
        return {own.get(name, name): weight for name, weight in load_file(folder / FILE).items()}


def _without_name(weight: str) -> str:
    """A weight's name in PEFT's files, which leave out the adapter's name."""
    return re.sub(r"\.default(?=\.|$)", "", weight)


def check_flags(model_name_or_path: str | None, rank: int, merge: bool = False) -> None:
    """Raises UsageError for `--lora_rank` without a pretrained model, or `--merge` without adapters."""
    if rank and model_name_or_path is None:
        raise UsageError("--lora_rank adapts a pretrained model: use --model_name_or_path, too")
    if merge and not rank:
        raise UsageError("--merge adds adapters to the weights: use --lora_rank, too")


def add_lora(model: PreTrainedModel, rank: int, targets: str, base: str) -> nn.Module:
    """Freezes a model and adds adapters to layers: those that PEFT adapts, such as linear ones and GPT-2's Conv1D.

    Args:
        model: from `with_losses`.
        rank: of the adapters.
        targets: "all-linear" for all layers but the head; or names of layers, separated by commas, such as
            q_proj,v_proj.
        base: folder or Hub id of the model.

    Returns:
        The model with an attribute `peft_adapter`.

    Raises:
        UsageError: PEFT is not installed, no layer has such a name, or PEFT does not adapt it.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UsageError("--lora_rank needs PEFT: run pip install peft") from None
    digest = digest_of_weights(model)
    names = targets if targets == "all-linear" else _layers(model, targets)
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    with with_random_weights(model), warnings.catch_warnings():  # PEFT makes adapters on the device of the weights
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # PEFT sets it for GPT-2's layers
        try:
            adapted: Any = get_peft_model(model, settings)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UsageError(f"--lora_targets {targets}: {first_line(error)}; {_advice(model)}") from None
    settings = adapted.peft_config["default"]
    settings.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    settings.target_modules = sorted(settings.target_modules)  # PEFT writes a set in a random order
    settings.task_type = "CAUSAL_LM"  # not before: get_peft_model would give forward other arguments
    adapted.peft_adapter = Adapter(settings, digest)
    return adapted


def _layers(model: PreTrainedModel, targets: str) -> list[str]:
    """The names of layers in `--lora_targets`. Raises UsageError for a name that no layer has, or the head, which may
    share its weights with an embedding."""
    head = model.get_output_embeddings()
    paths = [name for name, module in model.named_modules() if module is not head]
    names = [name.strip() for name in targets.split(",") if name.strip()]
    unknown = [name for name in names if not any(path == name or path.endswith(f".{name}") for path in paths)]
    if unknown or not names:
        missing = f"no layer {', '.join(unknown)} (the head does not count)"
        raise UsageError(f"--lora_targets {targets}: {missing}; {_advice(model)}")
    return names


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


def write_merged(adapters: Path, folder: Path, kind: Any = AutoModelForCausalLM) -> None:
    """Adds adapters that this run has exported to the weights of their base, a model of this kind, and writes an
    ordinary model of transformers. If the base brings code, this run has run it."""
    from peft import PeftConfig, PeftModel

    trust = {"trust_remote_code": True}
    path = PeftConfig.from_pretrained(str(adapters)).base_model_name_or_path
    base = kind.from_pretrained(path, dtype=torch.float32, **trust)
    PeftModel.from_pretrained(base, str(adapters)).merge_and_unload().save_pretrained(folder)
    AutoProcessor.from_pretrained(adapters, **trust).save_pretrained(folder)  # or its tokenizer, if it sees no images
