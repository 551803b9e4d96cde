"""DeepSpeed ZeRO 1 to 3: divides optimizer state, gradients and weights among processes."""

import contextlib
import io
import json
import os
import shutil
import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor, nn

from ..config import RunConfig
from ..environment import Environment, check_compiler
from ..errors import Edit, UsageError
from ..layout import Layout
from ..norms import LOW_PRECISION
from ..plan import Plan
from ..step.setup import Setup, compile_if_asked, float32_outputs, say_what_is_cast
from ..weights.on_disk import materialize
from ..weights.shards import checkpoint_tensors
from .deepspeed_engine import DeepSpeedEngine
from .extensions import load_extension
from .strategy import Division, Strategy


def _own_file(environment: Environment) -> str:
    """The path of DeepSpeed's own file; "" if the config file names none."""
    return environment.settings.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "").replace("none", "")


def section_of_config(environment: Environment) -> dict[str, Any]:
    """The content of DeepSpeed's own file, or the config file's section with the keys of such a file; empty without
    DeepSpeed. Raises UsageError for a file that is not a JSON object."""
    settings = environment.settings
    if not environment.uses("deepspeed"):
        return {}
    if name := _own_file(environment):
        try:
            return dict(json.loads(Path(name).read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            why = getattr(error, "strerror", None) or f"not a JSON object ({error})"
            raise UsageError(f"deepspeed_config_file: {name}: {why}", "use the path of a JSON file") from None
    stage = settings.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    offload = {
        f"offload_{what}": {"device": settings.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE", "none")}
        for what in ("optimizer", "param")
    }
    clipping = settings.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    return {
        "zero_optimization": {"stage": int(stage) if stage.isdecimal() else stage} | offload,
        "gradient_clipping": clipping if clipping == "auto" else float(clipping),
    }


def _zero(environment: Environment) -> dict[str, Any]:
    """The part of the config on what to divide, and where to keep it."""
    return section_of_config(environment).get("zero_optimization") or {}


def zero_stage(environment: Environment) -> Any:
    """The stage of the config; 0 if it has none."""
    return _zero(environment).get("stage", 0)


def offloads(environment: Environment) -> bool:
    """Whether the config keeps weights or optimizer state in CPU memory."""
    kept = ("offload_optimizer", "offload_param")[: 1 + (zero_stage(environment) == 3)]  # only stage 3 divides weights
    return any(_zero(environment).get(name, {}).get("device") == "cpu" for name in kept)


def precision_of(environment: Environment) -> str:
    """The precision that DeepSpeed's own file names."""
    parts = {name: section_of_config(environment).get(name) for name in ("bf16", "fp16")}
    on = (name for name, part in parts.items() if isinstance(part, dict) and part.get("enabled") is True)
    return next(on, "float32")


def check_config(layout: Layout, config: RunConfig) -> None:
    """Refuses a stage or another strategy that these recipes do not support under DeepSpeed."""
    section, stage = section_of_config(layout.environment), zero_stage(layout.environment)
    for other in [name for name in layout.strategies if name != DeepSpeed.name]:
        raise UsageError(
            f"{other} does not combine with DeepSpeed",
            "use a config of FSDP2, such as --config_file accelerate_configs/fsdp2_pipeline.yaml or "
            "fsdp2_sequence_parallel.yaml",
        )
    if stage not in (1, 2, 3):
        raise UsageError(
            f"zero_stage: {stage} in the config file, or in DeepSpeed's own",
            "use 1, 2 or 3; for stage 0, use accelerate_configs/ddp.yaml",
        )
    for what, part in _zero(layout.environment).items():
        if isinstance(part, dict) and part.get("device") == "nvme":
            raise UsageError(
                f"{what}_device: nvme, in the config file or in DeepSpeed's own",
                "use cpu",
                [] if _own_file(layout.environment) else [Edit(f"{what}_device", "cpu", "deepspeed_config")],
                "these recipes do not move weights to a disk",
            )
    for name, owner in (("optimizer", "the recipe's optimizer"), ("scheduler", "--lr_schedule")):
        if name in section:  # DeepSpeed's own scheduler would override our learning rates
            raise UsageError(f"the DeepSpeed config has a section {name}, which {owner} replaces", "remove it there")


def check_packages(layout: Layout, config: RunConfig) -> None:
    """Refuses a missing package or compiler that DeepSpeed needs."""
    for package in ("deepspeed", "transformers"):  # Accelerate's DeepSpeed code reads transformers' version
        if find_spec(package) is None:
            raise UsageError(f"this config needs {package}", "run pip install deepspeed ninja")
    if layout.device != "cpu" and not offloads(layout.environment):
        return
    if shutil.which("ninja") is None:
        raise UsageError("DeepSpeed compiles a part of itself on first use and needs ninja", "run pip install ninja")
    check_compiler("DeepSpeed", "CXX", "c++")


def check_weights(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuses weights that DeepSpeed would silently cast, to float32 or fewer bits in bf16, or that it cannot send."""
    kept = (torch.float32, *(LOW_PRECISION if plan.layout.precision != "float32" else ()))
    states = [each for each in optimizer.state.values() if isinstance(each, dict)]  # Adagrad's begins with sums
    if any("momentum_buffer" in each or float(each.get("step", 0)) > 0 for each in states):
        raise UsageError(
            "the optimizer has taken steps before fit, and DeepSpeed begins with an empty state",
            "use --config_file accelerate_configs/fsdp2.yaml, or make a new optimizer after these steps",
        )
    for name, weight in model.named_parameters():
        if not weight.ndim:
            raise UsageError(
                f"{name} has no dimension, and DeepSpeed cannot send it to the other processes",
                "use --config_file accelerate_configs/fsdp2.yaml, or make it of shape (1,)",
            )
        if weight.dtype not in kept and (weight.is_floating_point() or weight.is_complex()):
            raise UsageError(
                f"{name} is {str(weight.dtype).removeprefix('torch.')}, and DeepSpeed would cast it",
                "use --config_file accelerate_configs/ddp.yaml, or make it float32",
            )


def check_section(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuses a DeepSpeed section or file that contradicts the command line."""
    section = section_of_config(plan.layout.environment)
    for key, (value, flag) in _settings_of_flags(plan).items():
        if (given := section.get(key, "auto")) not in ("auto", value):
            what = f"deepspeed_config sets {key}: {given}, but {flag} sets {value}"
            raise UsageError(what, "remove it there", [Edit(key, section="deepspeed_config")])


class DeepSpeed(Strategy):
    name = "DeepSpeed"
    distributed_type = DistributedType.DEEPSPEED
    needs_all_weights = True  # it applies weight decay to a weight that no pass used
    takes_means = True
    takes_fp16 = False
    launch_checks = (check_config, check_packages)
    model_checks = (check_weights, check_section)

    def is_requested(self, layout: Layout) -> bool:
        return layout.environment.uses("deepspeed")

    def title(self, layout: Layout) -> str:
        return f"DeepSpeed ZeRO-{zero_stage(layout.environment)}{' with CPU offload' * offloads(layout.environment)}"

    def rehearse(self, layout: Layout, timeout: timedelta) -> None:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        with contextlib.redirect_stdout(io.StringIO()):  # hides "... built successfully" of every process
            load_extension()
            PartialState(backend="gloo", timeout=timeout)

    def after_start(self) -> None:
        load_models_whole()

    def wrap(self, setup: Setup, division: Division) -> DeepSpeedEngine:
        accelerator, model, plan = setup.accelerator, setup.model, setup.plan
        materialize(model)
        configure(accelerator, model, plan)
        say_what_is_cast(accelerator, model, self.name)
        whole: dict[str, Tensor] = {}
        if plan.layout.precision != "float32":
            whole = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}
            model.register_forward_pre_hook(_bf16_inputs, with_kwargs=True)
            model.register_forward_hook(float32_outputs)
        compile_if_asked(model, plan)
        # For `generate`: all take as many passes as the longest answer needs. transformers reads this only for FSDP.
        model._is_fsdp_managed_module = zero_stage(plan.layout.environment) == 3
        model, optimizer = accelerator.prepare(model, setup.optimizer)
        load_models_whole()
        return DeepSpeedEngine(setup, model, optimizer, whole)


def _bf16_inputs(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """DeepSpeed casts no inputs in bf16."""
    is_floating = lambda value: isinstance(value, torch.Tensor) and value.is_floating_point()  # noqa: E731
    return recursively_apply(torch.Tensor.bfloat16, (args, kwargs), test_type=is_floating)


def _settings_of_flags(plan: Plan) -> dict[str, tuple[float, str]]:
    """{key of DeepSpeed's section: (its value, the flags that decide it)}"""
    return {
        "train_micro_batch_size_per_gpu": (plan.micro_batch_size, "--micro_batch_size"),
        "gradient_accumulation_steps": (plan.accumulation, "--batch_size and --micro_batch_size"),
        "train_batch_size": (plan.config.batch_size, "--batch_size"),
        "gradient_clipping": (plan.config.max_grad_norm, "--max_grad_norm"),
    }


def configure(accelerator: Accelerator, model: nn.Module, plan: Plan) -> None:
    """Writes batch sizes, accumulation and clipping from the command line into DeepSpeed's config. By default,
    Accelerate would clip at 1.0 and take the accumulation from the config file."""
    section = accelerator.deepspeed_plugin.deepspeed_config
    section.update({key: value for key, (value, _) in _settings_of_flags(plan).items()})
    if plan.layout.precision == "bf16":  # sum gradients in float32
        section.setdefault("communication_data_type", "fp32")
        section.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    # DeepSpeed's default of 500 million values takes 2 GB per bucket, even for a small model. Most models are smaller:
    # with one bucket, communication starts when the backward pass has ended.
    num_weights = sum(weight.numel() for weight in model.parameters())
    bucket_size = min(num_weights + num_weights % 2, 50_000_000)  # DeepSpeed needs an even size
    zero = section.setdefault("zero_optimization", {})
    # Accelerate has values for three `auto` keys, from the hidden size of a transformers model.
    sized = any(hasattr(getattr(model, "config", None), name) for name in ("hidden_size", "hidden_sizes"))
    filled = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold") * sized
    for key in [key for key, value in zero.items() if value == "auto" and key not in filled]:
        del zero[key]
    for bucket in ("reduce_bucket_size", "allgather_bucket_size"):
        zero.setdefault(bucket, bucket_size)
    accelerator.gradient_accumulation_steps = plan.accumulation
    # Otherwise Accelerate replaces Adam under offload with DeepSpeed's: as fast as torch's fused kernel, less accurate.
    section.setdefault("zero_force_ds_cpu_optimizer", False)


def load_models_whole() -> None:
    """Stops transformers from sharding each model that it loads under ZeRO-3. Otherwise a process that loads a model
    alone, for example the exported one, would wait for the others."""
    if "transformers" in sys.modules:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
