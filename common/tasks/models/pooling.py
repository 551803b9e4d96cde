"""Pooling: how a text's tokens become its vector, and sentence-transformers' files for it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import cached_file

from ...environment import print_once
from ...errors import UsageError

# {sentence-transformers' name: mask of the tokens -> how much each counts}, both of shape (batch, length)
POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda mask: mask,
    "cls": lambda mask: mask * (mask.cumsum(1) == 1),
    "lasttoken": lambda mask: mask * (mask.cumsum(1) == mask.sum(1, keepdim=True)),
}
KEYS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}
PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}  # and their names beside a model


@dataclass(frozen=True)
class Pooling:
    """How a model makes vectors."""

    mode: str  # a key of `POOLINGS`
    prompts: dict[str, str]  # {"query": text before each query, "document": text before each document}
    normalizes: bool  # whether the files tell sentence-transformers to give vectors the length 1
    settings: dict[str, Any]  # the other settings in its file

    def files(self, width: int, max_length: int) -> dict[str, Any]:
        """{path: content} of sentence-transformers' files, for `width` elements and up to `max_length` tokens."""
        paths = {"Transformer": "", "Pooling": "1_Pooling"} | ({"Normalize": "2_Normalize"} if self.normalizes else {})
        modules = [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (kind, path) in enumerate(paths.items())
        ]
        prompts = (self.settings.get("prompts") or {}) | self.prompts
        modes = {key: mode == self.mode for mode, key in KEYS.items()}
        return {
            "modules.json": modules,
            "1_Pooling/config.json": {"word_embedding_dimension": width} | modes,
            "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
            "config_sentence_transformers.json": self.settings | {"prompts": prompts, "similarity_fn_name": "cosine"},
        }


def read_pooling(path: str | None, mode: str, prompts: dict[str, str | None], are_alike: bool) -> Pooling:
    """How a model makes vectors, by its files and the flags; prints a line. Raises UsageError if the model makes its
    vectors in a way that is not supported, or its files are damaged.

    Args:
        path: folder or Hub id; None for a new model.
        mode: a key of `POOLINGS`; or "auto": as modules.json says, or the mean without it.
        prompts: {"query", "document": the flag's prompt, or None for the model's own}
        are_alike: whether both texts of a pair begin with the model's default prompt.
    """
    why = "--pooling"
    try:
        modules, settings = _read(path, "modules.json", []), _read(path, "config_sentence_transformers.json", {})
        parts = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
        if mode == "auto":
            why = "modules.json" if parts else "no modules.json: --pooling chooses another"
            mode = _mode_of(path, parts) if parts else "mean"
        names = dict.fromkeys(PROMPTS, (settings.get("default_prompt_name"),)) if are_alike else PROMPTS
        own = settings.get("prompts") or {}
        found = {side: next((own[name] for name in names[side] if own.get(name)), "") for side in PROMPTS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--model_name_or_path {path}: modules.json or a file with it is damaged ({error})") from None
    found |= {side: text for side, text in prompts.items() if text is not None}
    if path is not None:
        facts = [f"; a {side} begins with {text!r}" for side, text in found.items() if text]
        facts += ["; cosines are compared, not dot products"] * (settings.get("similarity_fn_name") == "dot")
        print_once(f"pooling: {mode} ({why}){''.join(facts)}")
    return Pooling(mode, found, not parts or "Normalize" in parts, settings)


def _mode_of(path: str | None, parts: dict[str, str]) -> str:
    """The pooling of a model with these modules. Raises UsageError if it is not of `POOLINGS`, or has more parts."""
    settings = _read(path, f"{parts['Pooling']}/config.json", {}) if "Pooling" in parts else {}
    flags = [key.removeprefix("pooling_mode_") for key, is_on in settings.items() if "mode_" in key and is_on is True]
    modes = settings.get("pooling_mode") or [flag.removesuffix("s").removesuffix("_token") for flag in flags]
    modes = [modes] if isinstance(modes, str) else modes
    others = [part for part in parts if part not in ("Transformer", "Pooling", "Normalize")]
    others += ["pooling without the prompt"] * (settings.get("include_prompt") is False)
    others += ["lower case"] * bool(_read(path, "sentence_bert_config.json", {}).get("do_lower_case"))
    if others or len(modes) != 1 or modes[0] not in POOLINGS:
        what = f"{path} makes vectors with {' and '.join([*modes, *others])}: this recipe has {', '.join(POOLINGS)}"
        advice = "use --pooling with one of them to train it that way, or sentence-transformers"
        raise UsageError(f"--model_name_or_path {what}; {advice}")
    return str(modes[0])


def _read(path: str | None, name: str, default: Any) -> Any:
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "gated_repo", "connection_errors")}
    file = path and cached_file(path, name, **quiet)
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else default
