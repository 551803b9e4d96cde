"""The model card of an exported model: `README.md` in `model/`, as the Hugging Face Hub shows it."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from accelerate_recipes.report.summary import NOT_COMPARED, best, last
from accelerate_recipes.templates import render


def write_model_card(output_dir: Path, card: dict[str, Any], name: str) -> None:
    """Writes `model/README.md` from the records of a run that is done, and its `certificate.md`, if there is one.
    `card`: of the run; `name`: of the repository on the Hub. Raises OSError if the file cannot be written."""
    model, config, certificate = output_dir / "model", card["config"], output_dir / "certificate.md"
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_bytes().splitlines()]
    metrics = sorted({key.removeprefix("eval/") for record in records for key in record if key.startswith("eval/")})
    is_adapter, file = (model / "adapter_config.json").exists(), model / "config.json"
    architectures = (json.loads(file.read_text(encoding="utf-8")).get("architectures") if file.exists() else None) or []
    writes = any(architecture.endswith("ForCausalLM") for architecture in architectures)
    is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", config["data"]) and not Path(config["data"]).exists()
    front_matter = ModelCardData(
        library_name="peft" if is_adapter else "transformers" if architectures else "pytorch",
        pipeline_tag="text-generation" if writes else None,
        tags=["accelerate", "safetensors"],
        datasets=[config["data"]] if is_on_hub else None,
        metrics=metrics,
    )
    given = {name: value for name, value in config.items() if name not in NOT_COMPARED and value is not None}
    text = render(
        "model_card.md",
        front_matter=front_matter.to_yaml(),
        title=name.rpartition("/")[2],
        name=name,
        card=card,
        config=config,
        results=[(metric, points) for metric in metrics if (points := _results(records, f"eval/{metric}"))],
        is_adapter=is_adapter,
        writes=writes,
        architectures=architectures,
        flags=yaml.safe_dump(given, sort_keys=False, allow_unicode=True),
        certificate=certificate.read_text(encoding="utf-8") if certificate.exists() else "",
    )
    (model / "README.md").write_text(text, encoding="utf-8")


def _results(records: list[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    """The last and the best (step, value) of a metric."""
    curve = [(record["step"], record.get(metric)) for record in records]
    return [point for point in (last(curve), best(metric, curve)) if point is not None]
