"""The arithmetic of a run: the samples of each step, and when to log, evaluate and save."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from .config import RunConfig
from .errors import UsageError
from .layout import Layout
from .schedule import ScheduleFn, learning_rate_factor
from .seeds import CPU, SCHEDULE, seed_forward
from .state import TrainState

# (epoch, generator seeded for this epoch) -> the order of sample ids; an id may be there several times or not at all.
Sampler = Callable[[int, torch.Generator], torch.Tensor | Sequence[int]]
Samples = tuple[int, torch.Tensor]  # the epoch, and sample ids of shape (micro_batch,), int64


def split_batch(config: RunConfig, layout: Layout) -> tuple[int, int]:
    """Divides the samples of an optimizer step into micro-batches for each process. Without `--micro_batch_size`, each
    takes all samples of a process, or in a pipeline the most that keep all stages busy. Returns (samples per forward
    pass per process, forward passes per optimizer step). Raises UsageError if the sizes do not divide, or give fewer
    micro-batches than stages; the message names sizes that work."""
    batch_size, micro_batch_size = config.batch_size, config.micro_batch_size
    data_parallel_size, num_stages = layout.data_parallel_size, layout.pp
    if batch_size % data_parallel_size:
        below = batch_size // data_parallel_size * data_parallel_size
        raise UsageError(
            f"--batch_size {batch_size} is not divisible by {data_parallel_size} data-parallel ranks",
            f"use --batch_size {f'{below} or ' * bool(below)}{below + data_parallel_size}",
            beside="or change the number of processes",
        )
    own_samples = batch_size // data_parallel_size
    if micro_batch_size is None:
        micro_batch_size = next_smaller_divisor(own_samples, max(1, own_samples // num_stages) + 1)
        assert micro_batch_size is not None  # 1 divides all
    if own_samples % micro_batch_size:
        smaller = next_smaller_divisor(own_samples, micro_batch_size)
        larger = min((size for size in _divisors(own_samples) if size > micro_batch_size), default=None)
        choices = " or ".join(str(size) for size in (smaller, larger) if size is not None)
        raise UsageError(
            f"--micro_batch_size {micro_batch_size} does not divide the {own_samples} samples per process of "
            f"--batch_size {batch_size} ({data_parallel_size} data-parallel ranks)",
            f"use --micro_batch_size {choices}",
        )
    if (accumulation := own_samples // micro_batch_size) < num_stages:
        raise UsageError(
            f"{accumulation} micro-batches per step are too few to keep --pipeline_stages {num_stages} busy",
            f"use --micro_batch_size {max(1, own_samples // num_stages)} or a larger --batch_size",
        )
    return micro_batch_size, accumulation


def next_smaller_divisor(number: int, than: int) -> int | None:
    """The largest divisor of `number` that is less than `than`; None if there is none."""
    return max((value for value in _divisors(number) if value < than), default=None)


def _divisors(number: int) -> list[int]:
    """All divisors of a number, in time proportional to its square root: it may be mistyped, with too many zeros."""
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return [*small, *(number // value for value in small)]


@dataclass(frozen=True)
class Plan:
    """Which samples each step uses, and when the run logs, evaluates and saves.

    It depends only on the config and the number of samples; the number of processes only divides the samples.
    """

    config: RunConfig
    layout: Layout  # how the processes share the samples
    num_samples: int  # size of the training set
    micro_batch_size: int  # samples per forward pass per process
    accumulation: int  # forward passes per optimizer step
    steps_per_epoch: int  # the remaining samples are dropped: different ones each epoch, because the order changes
    num_steps: int  # optimizer steps of the whole run
    schedule: ScheduleFn | None = None  # the recipe's own schedule; None for `--lr_schedule`
    sampler: Sampler | None = None  # the recipe's own order of samples; None for a random permutation in each epoch

    @classmethod
    def of(
        cls,
        config: RunConfig,
        layout: Layout,
        num_samples: int,
        schedule: ScheduleFn | None = None,
        sampler: Sampler | None = None,
    ) -> "Plan":
        """Raises UsageError if sizes do not divide, there is less than a batch, or the sampler returns no ids."""
        length = num_samples if sampler is None else _length(sampler, config.seed, num_samples)
        sizes = split_batch(config, layout)
        if (steps_per_epoch := length // config.batch_size) == 0:
            smaller = length // layout.data_parallel_size * layout.data_parallel_size
            advice = f"use --batch_size {smaller} or less" if smaller else "use more data or fewer processes"
            raise UsageError(f"{length} training samples are fewer than --batch_size {config.batch_size}", advice)
        num_steps = config.max_steps or config.epochs * steps_per_epoch
        return cls(config, layout, num_samples, *sizes, steps_per_epoch, num_steps, schedule, sampler)

    def under(self, config: RunConfig, layout: Layout) -> "Plan":
        """The plan of the same data with other flags and in another layout. Raises UsageError like `of`."""
        return Plan.of(config, layout, self.num_samples, self.schedule, self.sampler)

    def epoch_order(self, epoch: int) -> torch.Tensor:
        """The order of sample ids in an epoch, int64; of shape (num_samples,) unless there is a sampler."""
        if self.sampler is None:
            return torch.randperm(self.num_samples, generator=_generator(self.config.seed, epoch))
        order = _order(self.sampler, self.config.seed, epoch, self.num_samples)
        if len(order) // self.config.batch_size != self.steps_per_epoch:
            raise UsageError(
                f"the sampler returns {len(order)} ids in epoch {epoch}, which are not {self.steps_per_epoch} steps "
                "of --batch_size as in epoch 0",
                "return the same number in each epoch",
            )
        return order

    def micro_batches(self, first_step: int = 0, check: Callable[..., None] | None = None) -> Iterator[Samples]:
        """This process's samples from optimizer step `first_step` to the end of the run.

        The samples of step k depend only on the seed and k: `batch_size` ids of that epoch's order, from
        position `k % steps_per_epoch * batch_size`. In rows of `micro_batch_size` ids, micro-batch m of
        data-parallel rank p is row m * data_parallel_size + p. `check` gets each epoch and the order of a sampler.

        Yields:
            `accumulation` micro-batches per optimizer step, each of `micro_batch_size` samples.
        """
        epoch, rows = -1, torch.empty(0)
        for step in range(first_step, self.num_steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = self.epoch_order(epoch)[: self.steps_per_epoch * self.config.batch_size]
                if check is not None and self.sampler is not None:
                    check(epoch, order)
                shape = (self.steps_per_epoch, self.accumulation, self.layout.data_parallel_size, self.micro_batch_size)
                rows = order.view(shape)[:, :, self.layout.data_parallel_rank]
            for ids in rows[step % self.steps_per_epoch]:
                yield epoch, ids

    def own_samples(self, step: int) -> list[torch.Tensor]:
        """The ids of this process's micro-batches in optimizer step `step`, counted from 0."""
        return [ids for _, ids in islice(self.micro_batches(step), self.accumulation)]

    def global_micro_batches(self, step: int) -> Iterator[Samples]:
        """The micro-batches of all data-parallel ranks in an optimizer step, in the order of their rows."""
        epoch, position = divmod(step, self.steps_per_epoch)
        ids = self.epoch_order(epoch)[position * self.config.batch_size :][: self.config.batch_size]
        return ((epoch, row) for row in ids.view(-1, self.micro_batch_size))

    def row(self, index: int) -> int:
        """The number of this process's micro-batch `index`, counted over all processes in a step."""
        return index * self.layout.data_parallel_size + self.layout.data_parallel_rank

    def factor_at(self, position: int) -> float:
        """The share of the peak learning rate after `position` steps that were not skipped."""
        if self.schedule is not None:
            seed_forward(self.config.seed, position, SCHEDULE, CPU)
            return float(self.schedule(position, self.num_steps, self.config.warmup_steps))
        return learning_rate_factor(self.config.lr_schedule, position, self.num_steps, self.config.warmup_steps)

    def logs(self, step: int) -> bool:
        """Whether a training record follows optimizer step `step`, counted from 1."""
        return step % self.config.log_every == 0 or step == self.num_steps

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows optimizer step `step`, counted from 1."""
        return step % (self.config.eval_every or self.steps_per_epoch) == 0 or step == self.num_steps

    def saves(self, state: TrainState) -> bool:
        """Whether to save a checkpoint now. With `--save_every`, the end of a run saves too, even an early stop."""
        every = self.config.save_every
        return every > 0 and (state.step % every == 0 or self.is_over(state))

    def reads(self, step: int) -> bool:
        """Whether the result of optimizer step `step`, counted from 1, is recorded, evaluated or saved."""
        every = self.config.save_every
        return self.logs(step) or self.evaluates(step) or (every > 0 and step % every == 0)

    def is_over(self, state: TrainState) -> bool:
        """Whether all steps are taken, or early stopping ends the run."""
        patience = self.config.early_stopping_patience
        return state.step >= self.num_steps or (patience is not None and state.num_not_better >= patience)


def _generator(seed: int, epoch: int) -> torch.Generator:
    # With seed + epoch, seed 1 in epoch 0 would repeat the order of seed 0 in epoch 1.
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)


def _length(sampler: Sampler, seed: int, num_samples: int) -> int:
    """The number of ids in an epoch. Raises UsageError for a sampler with random numbers that are not seeded."""
    order, again = (_order(sampler, seed, 0, num_samples) for _ in range(2))
    if not torch.equal(order, again):
        raise UsageError(
            "the sampler returns a different order when it is called again for the same epoch",
            "use the generator that it gets, so that all processes and a resumed run take the same samples",
        )
    return len(order)


def _order(sampler: Sampler, seed: int, epoch: int, num_samples: int) -> torch.Tensor:
    """The ids from a sampler, which may also draw from the global generators. Raises UsageError if they are not ids."""
    seed_forward(seed, ~epoch, 0, CPU)  # ~: different numbers than in a step
    order = torch.as_tensor(sampler(epoch, _generator(seed, epoch)))
    if order.ndim != 1 or order.is_floating_point() or order.dtype == torch.bool:
        kind = f"shape {tuple(order.shape)} of {order.dtype}"
        raise UsageError(f"the sampler returns {kind}", "expected a list of sample ids")
    if len(order) and not 0 <= int(order.min()) <= int(order.max()) < num_samples:
        raise UsageError(
            f"the sampler returns ids from {int(order.min())} to {int(order.max())}", f"expected 0 to {num_samples - 1}"
        )
    return order.long()
