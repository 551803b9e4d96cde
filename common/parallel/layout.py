"""How the processes share the model, and which of them take the same samples."""

from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..config import RunConfig


def parallelism(accelerator: Accelerator, config: RunConfig) -> str:
    """The kind of parallelism and its sizes, for example "HSDP 2 × 2"."""
    kind, sizes = accelerator.distributed_type, accelerator.parallelism_config
    if config.pipeline_stages > 1:
        num_pipelines = accelerator.num_processes // config.pipeline_stages
        return (f"DDP {num_pipelines} × " if num_pipelines > 1 else "") + f"pipeline of {config.pipeline_stages} stages"
    if kind == DistributedType.DEEPSPEED:
        plugin = accelerator.deepspeed_plugin
        offload = " with CPU offload" if plugin.hf_ds_config.is_offload() else ""
        return f"DeepSpeed ZeRO-{plugin.zero_stage}{offload}"
    if sizes is not None and sizes.tp_size > 1:
        replicas = f"{sizes.dp_replicate_size} × " if sizes.dp_replicate_size > 1 else ""
        shards = f"FSDP2 {sizes.dp_shard_size} × " if sizes.dp_shard_size > 1 else ""
        return f"{replicas}{shards}TP {sizes.tp_size}"
    if kind == DistributedType.FSDP:
        replicates = sizes is not None and sizes.dp_replicate_size > 1
        return f"HSDP {sizes.dp_replicate_size} × {sizes.dp_shard_size}" if replicates else "FSDP2"
    return "no parallelism" if kind == DistributedType.NO else "DDP"


def data_parallel_size_and_rank(accelerator: Accelerator, config: RunConfig) -> tuple[int, int]:
    """(number of data-parallel ranks, this process's data-parallel rank). Processes that share each layer (tensor
    parallelism) or the chain of layers (pipeline) have the same rank and take the same samples."""
    sizes = accelerator.parallelism_config
    group_size = config.pipeline_stages * (sizes.non_data_parallel_size if sizes is not None else 1)
    # The processes of such a group have consecutive ranks.
    return accelerator.num_processes // group_size, accelerator.process_index // group_size


def precision(accelerator: Accelerator) -> str:
    """The precision of the forward and backward pass."""
    return {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
