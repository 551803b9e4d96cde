"""The layout: how the processes of a run share the model and the samples."""

from dataclasses import dataclass, field

from .environment import Environment


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A grid of processes. Its axes are dp_replicate, dp_shard, tp, sp, pp and ep.

    `layout_of` in parallel/strategies.py makes it, once a run.

    Attributes:
        environment: what the launcher and the config file say.
        strategies: names of the strategies that it combines, such as ("TP", "FSDP2").
        title: for the terminal, such as "HSDP 2 × 2".
        num_processes: on all machines.
        rank: of this process.
        precision: of the forward and backward pass: "float32", "bf16" or "fp16".
        device: "cpu", "cuda" (also AMD's GPUs), "xpu" or "npu".
        dp_replicate: under FSDP2, how many times the processes hold the model.
        dp_shard: processes among which FSDP2 divides each weight.
        tp: processes that share each layer.
        sp: processes that share the tokens of each sample.
        pp: stages of a pipeline.
        ep: processes that share the experts of each layer; each has samples of its own.
        takes_means: whether what wraps the model takes the mean of the processes' gradients, where others take the sum.
    """

    environment: Environment = field(default_factory=Environment)
    strategies: tuple[str, ...] = ("DDP",)
    title: str = "no parallelism"
    num_processes: int = 1
    rank: int = 0
    precision: str = "float32"
    device: str = "cpu"
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    sp: int = 1
    pp: int = 1
    ep: int = 1
    takes_means: bool = False

    def __str__(self) -> str:
        return self.title

    @property
    def model_parallel_size(self) -> int:
        """The number of processes that share the same samples. They have consecutive ranks."""
        return self.tp * self.sp * self.pp

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel ranks, each with different samples."""
        return self.num_processes // self.model_parallel_size

    @property
    def num_averaged(self) -> int:
        """The number of processes of whose gradients a mean is taken: the loss is multiplied by it. 1: it is a sum."""
        return self.num_processes if self.takes_means else 1

    @property
    def data_parallel_rank(self) -> int:
        """This process's data-parallel rank."""
        return self.rank // self.model_parallel_size
