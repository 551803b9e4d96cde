"""What a plan consists of. Bytes and operations are those of one process."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Group(NamedTuple):
    """The processes of a collective: the first rank, the number of ranks, the distance between two."""

    first: int
    size: int
    distance: int


class Collective(NamedTuple):
    """What processes do together, such as "all_reduce".

    Attributes:
        num_bytes: of the whole tensor.
        beside: whether the program goes on while it runs.
    """

    kind: str
    num_bytes: float
    group: Group
    beside: bool


Event = float | Collective  # seconds of computation, or a collective


@dataclass(frozen=True)
class Question:
    """A dry run to make.

    Attributes:
        config: path of a file.
        stages: of a pipeline.
        flags: {flag of the recipe: value} instead of those on the command line.
        kind: the first one of its kind that fits is enough; None: an answer is needed.
        last: whether to take the place of the last process, and not of the first.
    """

    config: str
    stages: int
    flags: dict[str, int]
    kind: int | None = None
    last: bool = False


@dataclass(frozen=True)
class RunFacts:
    """The arithmetic of a run.

    Attributes:
        layout: its title.
        num_processes: on all machines.
        precision: "float32", "bf16" or "fp16".
        data_parallel: ranks with different samples.
        batch_size, micro_batch_size: samples of a step, and of a forward pass of a process.
        accumulation: forward passes of a process in a step.
        stages: of a pipeline.
        idle: share of the time of a step in which a stage waits, by the schedule of a pipeline.
        live: micro-batches whose activations a process of a pipeline holds at most; of that which holds most.
        num_samples: of the training set.
        save_every: steps; 0: no checkpoints.
        learning_rates: {step, from 0: rate}, for steps that show the schedule; JSON has no other keys than text.
        tf32: whether float32 products use TF32.
        flops_per_sample, tokens_per_sample: what the recipe gave to `fit`.
        check_steps: first steps to compare with one process; 0: none.
        longest_check: seconds; a longer comparison is not made.
        why_not_checked: another reason for none.
    """

    layout: str
    num_processes: int
    num_machines: int
    precision: str
    data_parallel: int
    batch_size: int
    micro_batch_size: int
    accumulation: int
    stages: int
    idle: float
    live: float
    num_steps: int
    steps_per_epoch: int
    num_samples: int
    save_every: int
    keep_checkpoints: int
    learning_rates: dict[str, float]
    tf32: bool
    flops_per_sample: float | None
    tokens_per_sample: float | None
    check_steps: int
    longest_check: float
    why_not_checked: str | None

    @property
    def per_machine(self) -> int:
        """Processes on each machine."""
        return self.num_processes // self.num_machines


@dataclass(frozen=True)
class Zero:
    """What DeepSpeed divides: its stage, whether the optimizer works on the CPU, the number of trained values."""

    zero_stage: int
    offloads: bool
    trained: int


@dataclass(frozen=True)
class StepFacts:
    """What a process holds, in bytes, and does in a step.

    Attributes:
        zero: under DeepSpeed alone.
        slots_per_weight: bytes of the optimizer's state for a byte of the weights that it trains.
        forward: what a forward pass adds; 0 in a pipeline.
        peak: the most that it holds.
        first, more: the events with some micro-batches, and with more.
        flops: floating-point operations.
        passes: how often a step does what `more` adds to `first`.
        saved: bytes of a checkpoint.
    """

    zero: Zero | None
    weights: float
    gradients: float
    optimizer: float
    slots_per_weight: float
    forward: float
    peak: float
    first: list[Event]
    more: list[Event]
    flops: float
    passes: int
    saved: int

    def whole(self, first: float, more: float) -> float:
        """A number of the whole step, from those of `first` and `more`."""
        return first + self.passes * (more - first)


@dataclass(frozen=True)
class Facts:
    """What a dry run finds."""

    run: RunFacts
    step: StepFacts


@dataclass(frozen=True)
class NoPlan:
    """A config without a plan.

    Attributes:
        refused: the lines with which the run would end.
        failed: why there was no dry run.
        config, settings: as in Estimate.
    """

    refused: list[str] | None = None
    failed: str | None = None
    config: str = ""
    settings: dict[str, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """What is known."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Speed:
    """How long a run takes on so many processes.

    Attributes:
        seconds, waits: of a step, and of these those in which a process waits for others.
        mfu: the share of the GPU's peak rate.
        hours, gpu_hours: of the run.
        efficiency: of a step, against the first row of a scaling curve.
    """

    num_processes: int
    seconds: float
    waits: float
    samples_per_second: float
    tokens_per_second_per_gpu: float | None
    mfu: float
    hours: float
    gpu_hours: float
    efficiency: float = 1.0


@dataclass(frozen=True)
class Sent:
    """Bytes that a process sends, inside a machine and between machines."""

    link: float
    network: float


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
        step: in a pipeline of the stage that holds most, with the events of the slowest.
        sent: in a step.
        fits: whether the peak fits into the GPU's memory.
        check_seconds: that one process takes for the first steps.
        config: its name.
        settings: {key of the config: size}, changed by the number of processes.
    """

    run: RunFacts
    step: StepFacts
    speed: Speed
    sent: Sent
    fits: bool
    check_seconds: float
    config: str
    settings: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """All numbers in one mapping, without events."""
        told = asdict(self)
        run, step, speed = (told.pop(name) for name in ("run", "step", "speed"))
        told = run | (step.pop("zero") or {}) | step | speed | told
        return {name: value for name, value in told.items() if name not in ("first", "more", "efficiency")}
