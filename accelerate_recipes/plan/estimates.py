"""The parts of a plan. Bytes and operations are per process."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Group(NamedTuple):
    """The processes of a collective: the first rank, the number of ranks, the distance between two."""

    first: int
    size: int
    distance: int


class Collective(NamedTuple):
    """A collective operation of processes, such as "all_reduce"."""

    kind: str
    num_bytes: float  # of the whole tensor
    group: Group
    beside: bool  # whether it runs beside the computation


Event = float | Collective  # seconds of computation, or a collective


@dataclass(frozen=True)
class RunFacts:
    layout: str  # its title
    num_processes: int  # on all machines
    num_machines: int
    precision: str  # "float32", "bf16" or "fp16"
    data_parallel: int  # ranks with different samples
    batch_size: int  # samples of a step
    micro_batch_size: int  # of a forward pass of a process
    accumulation: int  # forward passes of a process in a step
    stages: int  # of a pipeline
    idle: float  # share of the time of a step in which a stage waits, by the schedule of a pipeline
    live: float  # the most micro-batches whose activations a process of a pipeline holds at once
    num_steps: int
    steps_per_epoch: int
    num_samples: int  # of the training set
    save_every: int  # steps; 0: no checkpoints
    keep_checkpoints: int
    learning_rates: dict[str, float]  # {step, from 0: rate}, for steps that show the schedule; JSON keys are strings
    tf32: bool  # whether float32 products use TF32
    flops_per_sample: float | None  # as the recipe passes it to `fit`
    tokens_per_sample: float | None  # as the recipe passes it to `fit`
    check_steps: int  # first steps to compare with one process; 0: none
    longest_check: float  # seconds; the run skips a longer check
    why_not_checked: str | None  # another reason to skip it

    @property
    def per_machine(self) -> int:
        """Processes on each machine."""
        return self.num_processes // self.num_machines


@dataclass(frozen=True)
class Zero:
    """DeepSpeed's division: its stage, whether the optimizer works on the CPU, the number of trained values."""

    zero_stage: int
    offloads: bool
    trained: int


@dataclass(frozen=True)
class StepFacts:
    """The memory of a process, in bytes, and its work in a step."""

    zero: Zero | None  # only under DeepSpeed
    weights: float
    gradients: float
    optimizer: float
    slots_per_weight: float  # bytes of the optimizer's state for a byte of the weights that it trains
    forward: float  # what a forward pass adds; 0 in a pipeline
    peak: float  # the most that it holds
    first: list[Event]  # the events of a step with a few micro-batches
    more: list[Event]  # and of a step with more
    flops: float  # floating-point operations
    passes: int  # how often a step does what `more` adds to `first`
    saved: int  # bytes of a checkpoint

    def whole(self, first: float, more: float) -> float:
        """A number of the whole step, from its values for `first` and `more`."""
        return first + self.passes * (more - first)


Facts = tuple[RunFacts, StepFacts]  # what a dry run finds


@dataclass(frozen=True)
class NoPlan:
    refused: list[str] | None = None  # the lines with which the run would end
    failed: str | None = None  # why there was no dry run
    config: str = ""  # as in Estimate
    settings: dict[str, int] | None = None  # as in Estimate

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Speed:
    """How long a run takes on this many processes."""

    num_processes: int
    seconds: float  # of a step
    waits: float  # the part in which a process waits for others
    samples_per_second: float
    tokens_per_second_per_gpu: float | None
    mfu: float  # the share of the GPU's peak rate
    hours: float  # of the run
    gpu_hours: float
    efficiency: float = 1.0  # of a step, against the first row of a scaling curve


@dataclass(frozen=True)
class Sent:
    """Bytes that a process sends, inside a machine and between machines."""

    link: float
    network: float


@dataclass(frozen=True)
class Estimate:
    run: RunFacts
    step: StepFacts  # in a pipeline of the stage that holds most, with the events of the slowest
    speed: Speed
    sent: Sent  # in a step
    fits: bool  # whether the peak fits into the GPU's memory
    check_seconds: float  # the time of one process for the first steps
    config: str  # its name
    settings: dict[str, int]  # {key of the config: size}, changed by the number of processes

    def as_json(self) -> dict[str, Any]:
        """All numbers in one mapping, without events."""
        told = asdict(self)
        run, step, speed = (told.pop(name) for name in ("run", "step", "speed"))
        told = run | (step.pop("zero") or {}) | step | speed | told
        return {name: value for name, value in told.items() if name not in ("first", "more", "efficiency")}
