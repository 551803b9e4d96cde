"""The layout: how the processes of a run share the model and the samples."""

from dataclasses import dataclass, field
from functools import cached_property

from .environment import Environment


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A grid of processes. Its axes are dp_replicate, dp_shard, tp, sp, pp and ep.

    `layout_of` in parallel/strategies.py makes it, once a run.
    """

    environment: Environment = field(default_factory=Environment)  # settings of launcher and config file
    strategies: tuple[str, ...] = ("DDP",)  # names of the strategies that it combines, such as ("TP", "FSDP2")
    title: str = "no parallelism"  # for the terminal, such as "HSDP 2 × 2"
    num_processes: int = 1  # on all machines
    rank: int = 0  # of this process
    precision: str = "float32"  # of the forward and backward pass: "float32", "bf16" or "fp16"
    device: str = "cpu"  # "cpu", "cuda" (also AMD's GPUs), "xpu" or "npu"
    dp_replicate: int = 1  # under FSDP2, how many times the processes hold the model
    dp_shard: int = 1  # processes among which FSDP2 divides each weight
    tp: int = 1  # processes that share each layer
    sp: int = 1  # processes that share the tokens of each sample
    pp: int = 1  # stages of a pipeline
    ep: int = 1  # processes that share the experts of each layer; each has its own samples
    takes_means: bool = False  # whether the model's wrapper averages gradients instead of summing them

    def __str__(self) -> str:
        return self.title

    @cached_property
    def model_parallel_size(self) -> int:
        """The number of processes that share the same samples. They have consecutive ranks."""
        return self.tp * self.sp * self.pp

    @cached_property
    def data_parallel_size(self) -> int:
        """The number of data-parallel ranks, each with different samples."""
        return self.num_processes // self.model_parallel_size

    @property
    def num_averaged(self) -> int:
        """The number of processes over which gradients are averaged: the loss is multiplied by it. 1: a sum."""
        return self.num_processes if self.takes_means else 1

    @cached_property
    def data_parallel_rank(self) -> int:
        """This process's data-parallel rank."""
        return self.rank // self.model_parallel_size
