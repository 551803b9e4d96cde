"""How the processes of a run share the model and the samples: one value that all rooms ask."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A grid of processes. Its axes are replicas, shards, tensor, sequence, stages and experts.

    `layout_of` in parallel/kinds.py makes it from what a launch asks for.

    Attributes:
        kinds: names of the kinds of parallelism that it combines, such as ("TP", "FSDP2").
        title: for the terminal, such as "HSDP 2 × 2".
        num_processes: on all machines.
        rank: of this process.
        precision: of the forward and backward pass: "float32", "bf16" or "fp16".
        device: "cpu", "cuda" (also AMD's GPUs), "xpu" or "npu".
        replicas: under FSDP2, how many times the processes hold the model.
        shards: processes among which FSDP2 divides each weight.
        tensor: processes that share each layer.
        sequence: processes that share the tokens of each sample.
        stages: of a pipeline.
        experts: processes that share the experts of each layer; each has samples of its own.
        needs_all_weights: whether each forward pass must use all weights.
    """

    kinds: tuple[str, ...] = ("DDP",)
    title: str = "no parallelism"
    num_processes: int = 1
    rank: int = 0
    precision: str = "float32"
    device: str = "cpu"
    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    sequence: int = 1
    stages: int = 1
    experts: int = 1
    needs_all_weights: bool = False

    def __str__(self) -> str:
        return self.title

    @property
    def num_sharing(self) -> int:
        """The number of processes that share the same samples. They have consecutive ranks."""
        return self.tensor * self.sequence * self.stages

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel ranks, each with different samples."""
        return self.num_processes // self.num_sharing

    @property
    def data_parallel_rank(self) -> int:
        """This process's data-parallel rank."""
        return self.rank // self.num_sharing
