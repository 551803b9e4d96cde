"""The model card of an exported model: `README.md` in `model/`, as the Hugging Face Hub shows it."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from accelerate_recipes.report.summary import NOT_COMPARED, best, last


def write_model_card(output_dir: Path, card: dict[str, Any], name: str) -> None:
    """Writes `model/README.md` from the records of a run that is done.

    Args:
        output_dir: of the run. Its `certificate.md`, if there is one, becomes a part of the model card.
        card: the run card.
        name: of the repository on the Hub.

    Raises:
        OSError: the file cannot be written.
    """
    model = output_dir / "model"
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_bytes().splitlines()]
    config, certificate = card["config"], output_dir / "certificate.md"
    metrics = sorted({key.removeprefix("eval/") for record in records for key in record if key.startswith("eval/")})
    parts = [
        f"---\n{_front_matter(model, config, metrics).to_yaml()}\n---",
        f"# {name.rpartition('/')[2]}",
        f"Trained on `{config['data'] or 'the data of the recipe'}` with Hugging Face Accelerate.",
        _results(records, metrics, config),
        "## Use",
        _usage(model, name),
        "## Command",
        f"```bash\n{card.get('launch_command', card['command'])}\n```",
        "All flags of the run:",
        f"```yaml\n{_flags(config)}```",
        "## How it ran",
        _how_it_ran(card),
        certificate.read_text(encoding="utf-8") if certificate.exists() else "",
    ]
    (model / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _front_matter(model: Path, config: dict[str, Any], metrics: list[str]) -> ModelCardData:
    architectures = _architectures(model)
    writes = any(architecture.endswith("ForCausalLM") for architecture in architectures)
    is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", config["data"]) and not Path(config["data"]).exists()
    return ModelCardData(
        library_name="peft" if _is_adapter(model) else "transformers" if architectures else "pytorch",
        pipeline_tag="text-generation" if writes else None,
        tags=["accelerate", "safetensors"],
        datasets=[config["data"]] if is_on_hub else None,
        metrics=metrics,
    )


def _is_adapter(model: Path) -> bool:
    return (model / "adapter_config.json").exists()


def _architectures(model: Path) -> list[str]:
    """The classes of transformers that load the model; none for other models."""
    try:
        return json.loads((model / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except FileNotFoundError:
        return []


def _results(records: list[dict[str, Any]], metrics: list[str], config: dict[str, Any]) -> str:
    lines = ["| metric | last | best |", "| --- | --- | --- |"]
    for metric in metrics:
        curve = [(one["step"], one.get(f"eval/{metric}")) for one in records]
        points = [point for point in (last(curve), best(f"eval/{metric}", curve)) if point is not None]
        if points:
            lines.append(" | ".join([f"| {metric}", *(f"{value:.6g} (step {step})" for step, value in points)]) + " |")
    average = ", a moving average of the steps before" if config["ema_decay"] else ""
    return "\n".join([*lines, "", f"On the evaluation data. The weights are those of the last step{average}."])


def _usage(model: Path, name: str) -> str:
    kinds = _architectures(model)
    if _is_adapter(model):
        code = (
            "from peft import AutoPeftModelForCausalLM\n\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")  # loads the base, too'
        )
    elif any(kind.endswith("ForCausalLM") for kind in kinds):
        code = f'from transformers import pipeline\n\ngenerator = pipeline("text-generation", model="{name}")'
    elif kinds:
        code = f'from transformers import {kinds[0]}\n\nmodel = {kinds[0]}.from_pretrained("{name}")'
    else:
        code = (
            "from huggingface_hub import hf_hub_download\nfrom safetensors.torch import load_file\n\n"
            f'weights = load_file(hf_hub_download("{name}", "model.safetensors"))  # for the model of the recipe'
        )
    return f"```python\n{code}\n```"


def _flags(config: dict[str, Any]) -> str:
    given = {name: value for name, value in config.items() if name not in NOT_COMPARED and value is not None}
    return yaml.safe_dump(given, sort_keys=False, allow_unicode=True)


def _how_it_ran(card: dict[str, Any]) -> str:
    hardware, accumulation = card["hardware"], card["gradient_accumulation_steps"]
    gpus = ", ".join(hardware["gpus"]) or "no GPU"
    batch = f"{card['config']['batch_size']} samples, {card['micro_batch_size']} at a time in each process"
    rows = {
        "parallelism": card["parallelism"],
        "processes": card["num_processes"],
        "precision": card["precision"],
        "batch": batch + f", {accumulation} times before a step" * (accumulation > 1),
        "steps": card["num_steps"],
        "seconds": card["wall_seconds"],
        "hardware": f"{hardware['cpu']}, {hardware['cores']} cores, {gpus}",
        "versions": ", ".join(f"{package} {number}" for package, number in card["versions"].items()),
        "git commit": card["git_commit"] or "unknown",
    }
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])
