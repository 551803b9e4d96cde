"""Models of transformers from a folder or the Hub."""

from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from ..environment import print_once
from ..errors import UsageError, first_line


def load(kind: Any, name_or_path: str, expected: str, **options: Any) -> tuple[Any, Any, list[str]]:
    """Loads a model in float32 and its tokenizer. transformers prints nothing.

    Args:
        kind: a class with `from_pretrained`, such as `AutoModelForCausalLM`.
        name_or_path: folder or Hub id.
        expected: what should be there, for the message.
        options: for `from_pretrained`.

    Returns:
        (model, tokenizer, names of the weights that are new: the files lack them, or have heads of another shape)

    Raises:
        UsageError: no such model or tokenizer there, or damaged files.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        dtype = AutoConfig.from_pretrained(name_or_path).dtype
        model, info = kind.from_pretrained(
            name_or_path, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except Exception as error:  # the library and its network stack raise dozens of types
        raise UsageError(f"--model_name_or_path {name_or_path}: no {expected} there ({first_line(error)})") from None
    finally:
        logging.set_verbosity(verbosity)
    misfits = sorted(name for name, *_ in info["mismatched_keys"])
    if body := [name for name in misfits if name.startswith(f"{model.base_model_prefix}.")]:
        raise UsageError(
            f"--model_name_or_path {name_or_path}: {len(body)} weights do not fit config.json, such as {body[0]}: type "
            f"the path of another {expected}"
        )
    if dtype in (torch.bfloat16, torch.float16):
        model.config.dtype = dtype  # that of the exported weights
        name = str(dtype).removeprefix("torch.")
        print_once(f"{name_or_path} is in {name}: trained in float32, exported in {name} again (--export_dtype)")
    return model, tokenizer, sorted(info["missing_keys"]) + misfits
