"""Models of transformers from a folder or the Hub."""

import copy
import json
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from accelerate import Accelerator, init_empty_weights
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.quantizers import AutoQuantizationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging

from ...environment import print_once
from ...errors import UsageError, first_line
from ...files import check_is_pulled
from ...step.guards import graph_of, leaves_of
from ...weights.on_disk import WeightFiles, leave_on_disk, materialize, on_disk, with_random_weights
from .tokenization import tokenizer_of

TYPES = ("F64", "F32", "F16", "BF16")  # of safetensors, whose numbers are the weights themselves
SCALED = ("F8_E4M3", "F8_E5M2")  # each comes with its scales
READERS = {"load_state_dict", "get_checkpoint_shard_files"}  # of transformers
LARGE = 700_000_000  # weights
COPY = "copy its files, such as tokenizer.json, from the base model"
PLAIN = "use the path of the original model, with weights in float32, bfloat16 or float16"


@contextmanager
def silent() -> Iterator[None]:
    """Keeps transformers from printing, such as a line about torchvision, in the `with` block or the function."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _reason(error: Exception, expected: str, has_flag: bool) -> str:
    """Why a model or its tokenizer cannot be loaded, and what to do."""
    if "trust_remote_code" in (text := str(error)):  # otherwise transformers would ask, in each process
        advice = "read it, and use --trust_remote_code to run it" if has_flag else "this recipe does not run it"
        return f" comes with its own Python code: {advice}"
    needs = f"; {COPY}" if expected in ("tokenizer", "processor") else ""
    if "video processor" in text and find_spec("torchvision") is None:
        needs = "; run pip install torchvision"
    if "scaled_dot_product_attention" in text:
        needs = "; use --attention eager"
    at = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if at & READERS and not isinstance(error, OSError | SafetensorError):
        return ": its weights or their index are damaged: copy or download them again"
    return f": no {expected} there ({first_line(error)}{needs})"


@silent()
def load(
    kind: Any, name_or_path: str, expected: str, reads: Any = AutoTokenizer, **options: Any
) -> tuple[Any, Any, list[str]]:
    """Loads a model in float32 and its tokenizer.

    If safetensors files hold exactly the weights of the model, the weights stay on disk until `fit` fills each process.
    Raises UsageError if there is no such model or tokenizer, or files are damaged.

    Args:
        kind: a class with `from_pretrained`, such as `AutoModelForCausalLM`.
        name_or_path: folder or Hub id.
        expected: what should be there, for the message.
        reads: `AutoTokenizer`, or `AutoProcessor` if the model sees images; None for no tokenizer.
        options: for `from_pretrained`; and `tokenizer_path`, if the tokenizer is elsewhere. Code of the model
            runs if `trust_remote_code` is given and true.

    Returns:
        (model, tokenizer, names of the weights that are new: the files lack them, or have heads of a different shape)
    """
    has_flag, trust = "trust_remote_code" in options, {"trust_remote_code": options.pop("trust_remote_code", False)}
    tokenizer_path = options.pop("tokenizer_path", name_or_path)
    options |= {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True, **trust}
    config = tokenizer = cast(Any, None)
    try:
        _check_settings(Path(name_or_path))
        config = AutoConfig.from_pretrained(name_or_path, **trust)
        tokenizer = reads.from_pretrained(tokenizer_path, **trust) if reads else None
        if kind is AutoModel and config.is_encoder_decoder and type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
            kind = MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)]  # of T5 only the encoder
        options |= (dequantized := _undo_quantization(config))
        model, info = kind.from_pretrained(name_or_path, device_map={"": "meta"}, **options)
        folder = WeightFiles(files_of(name_or_path))  # they are here now
        if dequantized or not _left_on_disk(model, folder):
            model, info = kind.from_pretrained(name_or_path, **options)
        _check_types(model, folder, bool(dequantized))
        _check_rows(model, tokenizer)
    except UsageError as error:
        raise UsageError(f"--model_name_or_path {name_or_path}: {error}") from None
    except Exception as error:  # the library and its network stack raise dozens of types
        for path in Path(name_or_path).glob("*"):
            check_is_pulled(path)
        lack = expected if tokenizer or not (reads and config) else {AutoTokenizer: "tokenizer"}.get(reads, "processor")
        raise UsageError(f"--model_name_or_path {name_or_path}{_reason(error, lack, has_flag)}") from None
    missing, misfits = sorted(info["missing_keys"]), sorted(name for name, *_ in info["mismatched_keys"])
    _check_body(name_or_path, model, missing, misfits, expected, info["unexpected_keys"])
    if config.dtype in (torch.bfloat16, torch.float16):
        model.config.dtype = config.dtype  # the dtype of the exported weights
        name = str(config.dtype).removeprefix("torch.")
        print_once(f"{name_or_path} is in {name}: trained in float32, exported in {name} again (--export_dtype)")
    if type(model)._auto_class is not None:  # its code becomes part of the export, to be loaded from there
        own = f"{type(model).__module__.rpartition('.')[2]}.{type(model).__name__}"
        model.config.auto_map = (model.config.auto_map or {}) | {type(model)._auto_class: own}
    if left := _layers_left_out(model, info["unexpected_keys"]):
        print_once(f"{name_or_path}: config.json has fewer layers than the files, which also hold {left[0]}")
    if new := missing + misfits:
        print_once(f"{len(new):,} new weights: {', '.join(new[:4])}{' ...' * (len(new) > 4)}")
    return model, tokenizer, new


def _check_body(
    path: str, model: PreTrainedModel, missing: list[str], misfits: list[str], expected: str, others: Iterable[str]
) -> None:
    """Raises UsageError if the files lack most weights below the head, or have one of a different shape."""
    prefix = f"{model.base_model_prefix}."
    if body := [name for name in misfits if name.startswith(prefix)]:
        what = f"{len(body)} weights do not fit config.json, such as {body[0]}: use the path of another {expected}"
        raise UsageError(f"--model_name_or_path {path}: {what}")
    names = {name for name, _ in model.named_parameters() if model.base_model is model or name.startswith(prefix)}
    if 2 * len(lost := [name for name in missing if name in names]) > len(names):
        raise lacking(path, model, lost, expected, others)


def lacking(name_or_path: str, model: Any, names: list[str], expected: str, others: Iterable[str] = ()) -> UsageError:
    """The error for a model whose files lack the weights of these names, and perhaps have others."""
    other = min(others, default="")
    advice = "; save the model that DDP or torch.compile wraps" * other.startswith(("module.", "_orig_mod."))
    what = f"{len(names)} of the weights of {type(model).__name__}, such as {names[0]}{other and f', but has {other}'}"
    return UsageError(f"--model_name_or_path {name_or_path} lacks {what}: use a complete {expected}{advice}")


def _layers_left_out(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of these weights in the files that another layer of the model has, too: not of a head for another task."""
    alike = lambda name: re.sub(r"\d+", "N", name.removeprefix(f"{model.base_model_prefix}."))  # noqa: E731
    places = {alike(name) for name, _ in model.named_parameters()}
    return sorted(name for name in names if alike(name) in places)


def _check_settings(folder: Path) -> None:
    """Raises UsageError for a file or adapters, a JSON or Jinja file that is an LFS pointer, or a config of no dict."""
    if folder.is_file():
        raise UsageError("it is a file: use the path of its folder")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UsageError("it holds adapters, not a model: merge them with PEFT, and use the path of that model")
    for path in folder.glob("*.j*"):
        check_is_pulled(path)
        if path.name.endswith("config.json") and not isinstance(json.loads(path.read_bytes()), dict):
            raise UsageError(f"{path} has no names and values: download it again")


def frozen(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """The model without gradients, on the run's device and in its precision."""
    materialize(model)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    return model.to(accelerator.device, precision).eval().requires_grad_(False)


def switch_off_dropout(model: PreTrainedModel) -> None:
    """Sets each probability of dropout in a model to 0, and switches SpecAugment off, which masks audio."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():  # such as attention_dropout, layerdrop
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    config, mask = model.config, getattr(model.base_model, "masked_spec_embed", None)
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment, config.layerdrop = False, 0.0
    if mask is not None:
        mask.requires_grad_(False)


def export_of(model: Any, processor: Any, files: Mapping[str, Any] | None = None) -> Callable[[Path], None]:
    """Makes the function that `fit` calls to write files next to the exported weights: the files of the tokenizer or
    processor, the Python code that came with the model, and {path in the folder: content of a JSON file}."""

    def export(folder: Path) -> None:
        processor.save_pretrained(folder)
        brought = [module for module in model.modules() if getattr(module, "_auto_class", None) is not None]
        if brought and not hasattr(model, "peft_adapter"):  # adapters name their base, which has it
            custom_object_save(brought[0], folder)
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    return export


@silent()
def exported_pipeline(task: str, output_dir: Path) -> Any:
    """transformers' pipeline of a task with the model that a run has exported. Raises UsageError if there is none."""
    from transformers import pipeline  # takes seconds
    from transformers.pipelines import check_task

    warnings.filterwarnings("ignore", "Tokenizer does not support real words")  # each token is one
    cuts = {"truncation": True} if task == "text-classification" else {}  # other pipelines always cut, or cannot
    folder, kinds = exported_folder(output_dir), check_task(task)[1]["pt"]
    return _usable(folder, kinds, lambda: pipeline(task, model=folder, **cuts))


@silent()
def exported_model(kind: Any, output_dir: Path) -> tuple[Any, Any]:
    """(the model that a run has exported, its tokenizer), for `--predict`. Raises UsageError if there is none."""
    folder = exported_folder(output_dir)
    return _usable(folder, [kind], lambda: (kind.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)))


def _usable(folder: str, kinds: Iterable[Any], load: Callable[[], Any]) -> Any:
    """Returns the result of `load`. Raises UsageError for damaged files, and for a model of a different kind."""
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        names = [name for kind in kinds for name in kind._model_mapping._model_mapping.values()]
        known = {each for name in names for each in ([name] if isinstance(name, str) else name)}
        if not known & {*config["architectures"]} and "auto_map" not in config:
            raise ValueError(f"it is {config['architectures'][0]}")
        return load()
    except Exception as error:  # the library and its readers raise dozens of types
        advice = "use the --output_dir of a finished run of this recipe"
        raise UsageError(f"the model in {folder} cannot be used ({first_line(error)}): {advice}") from None


def exported_folder(output_dir: Path, flag: str = "--predict") -> str:
    """The folder of a run's exported model. Raises UsageError if there is none."""
    folder = output_dir / "model"
    if not (folder / "config.json").is_file():
        raise UsageError(f"no model in {folder}: train first (the same command without {flag})")
    return str(folder)


def _undo_quantization(config: Any) -> dict[str, Any]:
    """transformers' option to compute the weights of a quantized model; else empty. Raises UsageError if it cannot."""
    parts = config, config.get_text_config()
    given = next((found for part in parts if (found := getattr(part, "quantization_config", None))), None)
    if given is None:
        return {}
    try:
        settings = AutoQuantizationConfig.from_dict(given)
        settings.dequantize = settings.dequantize or True
    except Exception:  # a method that transformers does not know, or whose package is missing, or that stays quantized
        method = given.get("quant_method", "in an unknown way")
        raise UsageError(f"its weights are quantized ({method}): {PLAIN}") from None
    return {"quantization_config": settings}


def _check_types(model: PreTrainedModel, folder: WeightFiles, dequantized: bool) -> None:
    """Raises UsageError for a scale that is missing or not applied, or a loaded weight that is not float32."""
    names = sorted(folder.types)  # X.weight, X.weight_scale_inv
    for name, following in zip(names, [*names[1:], ""]):
        if dequantized and folder.types[name] in SCALED and not following.startswith(name):
            raise UsageError(f"its files have {name} in {folder.types[name]} and no scales for it: {PLAIN}")
    weights = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    stored = {
        kind
        for name, kind in folder.types.items()
        if kind not in TYPES and (kind.startswith("F") or name.rpartition(".")[2] in weights)
    }
    loaded = {str(weight.dtype) for weight in model.parameters() if weight.is_floating_point()} - {"torch.float32"}
    if (stored and not dequantized) or loaded or getattr(model, "is_quantized", False):
        raise UsageError(f"its weights are quantized ({', '.join(sorted(stored | loaded))}): {PLAIN}")


def _check_rows(model: PreTrainedModel, tokenizer: Any) -> None:
    """Raises UsageError if the tokenizer, or a processor's, has only special tokens, as transformers makes it where its
    files are missing; or a token without a row in the embedding. Special tokens that the model does not use become
    text: the text-only Gemma 3 has one for images."""
    try:
        num_rows, plain = model.get_input_embeddings().num_embeddings, tokenizer_of(tokenizer)
        tokens, added = plain.get_vocab(), getattr(plain, "added_tokens_decoder", {}).values()
    except (AttributeError, NotImplementedError):  # it embeds differently, as CANINE hashes characters; or no tokenizer
        return
    special = {str(each) for each in added if each.special}
    if len(tokens.keys() - special) < 2:  # T5's has one
        raise UsageError(f"its tokenizer knows no words: {COPY}")
    without = sorted((token for token, number in tokens.items() if number >= num_rows), key=tokens.__getitem__)
    if not without:
        return
    named = {str(getattr(plain, name)) for name in plain.SPECIAL_TOKENS_ATTRIBUTES}
    in_template = any(token in str(plain.chat_template) for token in without)
    if not (special - named).issuperset(without) or not plain.is_fast or plain is not tokenizer or in_template:
        what = f"the model has {num_rows} rows for tokens: use the path of a model with its own tokenizer"
        raise UsageError(f"its tokenizer has the token {without[-1]!r} with the id {tokens[without[-1]]}, but {what}")
    content = json.loads(plain.backend_tokenizer.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] not in without]
    plain._tokenizer = Tokenizer.from_str(json.dumps(content))
    print_once(f"the model has no row for {', '.join(without)}: the tokenizer treats that as text")


def files_of(name_or_path: str) -> list[str]:
    """The safetensors files that `from_pretrained` has read; empty if it has read files of other formats."""
    find = partial(cached_file, name_or_path, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    if single := find(SAFE_WEIGHTS_NAME):
        return [single]
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values())) if index else []
    return [str(find(name)) for name in names]


def _left_on_disk(model: PreTrainedModel, folder: WeightFiles) -> bool:
    """Whether the files hold exactly a meta model's weights. If so, each knows its place, and buffers have values."""
    if getattr(model, "_weight_conversions", None):
        return False
    prefix = f"{model.base_model_prefix}."
    for name, weight in model.state_dict(keep_vars=True).items():
        keys = (name, name.removeprefix(prefix), prefix + name)
        key = next((key for key in keys if folder.tensors.get(key) == {"shape": list(weight.shape)}), None)
        if key is not None and isinstance(weight, nn.Parameter):
            leave_on_disk(weight, folder, key)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    if any(name in folder.tensors and other in folder.tensors for name, other in tied.items()):
        return False  # they may differ
    with suppress(Exception):  # such as of a constructor that reads its weights, or for a weight that is not there
        with init_empty_weights():  # for the buffers that the constructor computes
            built = type(model)(copy.deepcopy(model.config))
        for name, module in built.named_modules():
            if module._buffers.keys() & module._non_persistent_buffers_set:
                model.get_submodule(name)._buffers.update(module._buffers)
        on_disk(model)
        return not any(tensor.is_meta for tensor in model.buffers())
    return False


def freeze_unused(model: PreTrainedModel, **inputs: Tensor) -> None:
    """Freezes weights on which the first output for these inputs does not depend: DDP and FSDP2 wait for a gradient of
    each. Does not change large models. Raises UsageError if the model cannot take the inputs."""
    if model.num_parameters() > LARGE:  # the copy reads weights that may be on disk
        return
    copied = copy.deepcopy(model).eval()
    with must_take(model):
        used = leaves_of(graph_of([copied(**inputs)[0]]))
    for name in [name for name, weight in copied.named_parameters() if used and weight not in used]:
        model.get_parameter(name).requires_grad_(False)


@contextmanager
def must_take(model: PreTrainedModel) -> Iterator[None]:
    """Raises UsageError if the `with` block raises an error: it gives the model the smallest input of its task."""
    try:
        yield
    except Exception as error:
        what = f"--model_name_or_path {model.name_or_path} cannot take the smallest input ({first_line(error)})"
        raise UsageError(f"{what}: correct its config.json and preprocessor_config.json, or use another") from None


@contextmanager
def runnable(model: PreTrainedModel) -> Iterator[None]:
    """Lets a model run in evaluation with weights on disk: random weights, and of text few layers, one of each type."""
    with ExitStack() as cut:
        cut.callback(model.train, model.training)
        if on_disk(model):
            config = model.config.get_text_config()
            types = getattr(config, "layer_types", None) or [None]
            num_kept = 1 + max(types.index(kind) for kind in types)
            for layers in [each for each in model.get_decoder().modules() if isinstance(each, nn.ModuleList)]:
                if len(layers) == config.num_hidden_layers:
                    cut.enter_context(patch.object(layers, "_modules", dict([*layers._modules.items()][:num_kept])))
        with with_random_weights(model.eval()):  # of those on disk
            yield
