"""How the processes of a run share the model and the samples: one value that all rooms ask."""

import json
import os
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from .config import RunConfig
from .environment import device_type, is_true, world_size
from .errors import UsageError

_PRECISIONS = {"no": "float32"}


class Kind(StrEnum):
    """What wraps or divides the model."""

    ONE_PROCESS = "no parallelism"
    DDP = "DDP"
    FSDP2 = "FSDP2"
    TENSOR = "TP"
    DEEPSPEED = "DeepSpeed"
    PIPELINE = "pipeline"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the processes share the model and the samples.

    Attributes:
        kind: what wraps or divides the model. Under tensor parallelism FSDP2 may divide it, too.
        num_processes: on all machines.
        rank: of this process.
        precision: of the forward and backward pass: "float32", "bf16" or "fp16".
        device: "cpu", "cuda" (also AMD's GPUs), "xpu" or "npu".
        replicas: under FSDP2 and tensor parallelism, how many times the processes hold the model.
        shards: processes among which FSDP2 divides each weight.
        tensor: processes that share each layer.
        sequence: processes that share the tokens of each sample.
        stages: of a pipeline.
        zero_stage: of DeepSpeed; 0 under other kinds.
        offloads: whether DeepSpeed keeps weights or optimizer state in CPU memory.
    """

    kind: Kind = Kind.ONE_PROCESS
    num_processes: int = 1
    rank: int = 0
    precision: str = "float32"
    device: str = "cpu"
    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    sequence: int = 1
    stages: int = 1
    zero_stage: int = 0
    offloads: bool = False

    @classmethod
    def asked(cls, config: RunConfig) -> "Layout":
        """What the launcher's environment variables and `--pipeline_stages` ask for. Starts no process."""
        stages = config.pipeline_stages
        kind, num_processes, zero = _kind(stages), world_size(), deepspeed_section()
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision == "no":  # DeepSpeed's own file may name it
            precision = next((name for name in ("bf16", "fp16") if _is_on(zero.get(name))), precision)
        optimization = zero.get("zero_optimization") or {}
        stage, replicas = optimization.get("stage", 0), mesh_size("dp_replicate")
        offloaded = ["offload_optimizer", *["offload_param"] * (stage == 3)]  # other stages divide no weights
        return cls(
            kind=kind,
            num_processes=num_processes,
            rank=int(os.environ.get("RANK", 0)),
            precision=_PRECISIONS.get(precision, precision),
            device=device_type(),
            replicas=replicas,
            shards=num_processes // replicas if kind == Kind.FSDP2 else mesh_size("dp_shard"),
            tensor=mesh_size("tp"),
            sequence=mesh_size("sp"),
            stages=stages,
            zero_stage=stage,
            offloads=any(optimization.get(name, {}).get("device") == "cpu" for name in offloaded),
        )

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel ranks, each with different samples."""
        return self.num_processes // self._num_sharing

    @property
    def data_parallel_rank(self) -> int:
        """This process's data-parallel rank. Processes that share each layer, the chain of layers, or the tokens, have
        the same one, and consecutive ranks."""
        return self.rank // self._num_sharing

    @property
    def _num_sharing(self) -> int:
        """The number of processes that share the same samples."""
        return self.tensor * self.sequence * self.stages

    @property
    def divides_layers(self) -> bool:
        """Whether a process computes a part of a forward pass."""
        return self._num_sharing > 1

    @property
    def fsdp_shards(self) -> bool:
        """Whether FSDP2 divides the weights."""
        return self.kind == Kind.FSDP2 or self.shards > 1

    def __str__(self) -> str:
        """The kind and its sizes, for example "HSDP 2 × 2"."""
        if self.sequence > 1:
            replicas = f"DDP {self.data_parallel_size} × " if self.data_parallel_size > 1 else ""
            shards = f"{replace(self, sequence=1)} × " if self.fsdp_shards else replicas
            return f"{shards}SP {self.sequence}"
        if self.kind == Kind.PIPELINE:
            pipelines = f"DDP {self.data_parallel_size} × " if self.data_parallel_size > 1 else ""
            return f"{pipelines}pipeline of {self.stages} stages"
        if self.kind == Kind.DEEPSPEED:
            return f"DeepSpeed ZeRO-{self.zero_stage}{' with CPU offload' * self.offloads}"
        if self.kind == Kind.TENSOR:
            replicas = f"{self.replicas} × " if self.replicas > 1 else ""
            shards = f"FSDP2 {self.shards} × " if self.shards > 1 else ""
            return f"{replicas}{shards}TP {self.tensor}"
        if self.kind == Kind.FSDP2 and self.replicas > 1:
            return f"HSDP {self.replicas} × {self.shards}"
        return self.kind.value


def mesh_size(name: str) -> int:
    """A size of the config file's parallelism_config: "dp_replicate", "dp_shard", "tp", "cp" or "sp". Raises UsageError
    unless it is a whole number above 0."""
    if not is_true("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return 1
    text = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"parallelism_config_{name}_size is {text}: type a whole number above 0 in the config file")
    return int(text)


def deepspeed_section() -> dict[str, Any]:
    """What DeepSpeed's own file says, or the config file's section in the words of such a file; empty without
    DeepSpeed. Raises UsageError for a file that is no JSON object."""
    if not is_true("ACCELERATE_USE_DEEPSPEED"):
        return {}
    if name := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "").replace("none", ""):
        try:
            content = json.loads(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"deepspeed_config_file: {name}: {error.strerror}: type the path of a JSON file") from None
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise UsageError(f"deepspeed_config_file: {name} is no JSON object: type the path of such a file")
        return content
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    offload = {
        f"offload_{what}": {"device": os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE", "none")}
        for what in ("optimizer", "param")
    }
    clipping = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    return {
        "zero_optimization": {"stage": int(stage) if stage.isdecimal() else stage} | offload,
        "gradient_clipping": clipping if clipping == "auto" else float(clipping),
    }


def _kind(stages: int) -> Kind:
    asked = [
        (stages > 1, Kind.PIPELINE),
        (is_true("ACCELERATE_USE_DEEPSPEED"), Kind.DEEPSPEED),
        (mesh_size("tp") > 1, Kind.TENSOR),
        (is_true("ACCELERATE_USE_FSDP"), Kind.FSDP2),
        (world_size() > 1, Kind.DDP),
    ]
    return next((kind for is_asked, kind in asked if is_asked), Kind.ONE_PROCESS)


def _is_on(section: Any) -> bool:
    return isinstance(section, dict) and section.get("enabled") is True
