"""The options of `fit`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from ..data.sets import CollateFn, Examples, Metrics
from ..plan import Sampler
from ..schedule import ScheduleFn
from .batch_loss import BatchLossFn


class FitOptions(TypedDict, total=False):
    """The options of `fit`, passed by keyword.

    Attributes:
        summarize: means over an evaluation set -> metrics to report.
        tokens_per_sample: tokens of a sample, if samples are sequences; adds `tokens_per_second` to records.
        flops_per_sample: floating-point operations of a forward and backward pass; adds `mfu`, the
            share of the GPUs' peak rate, to records if the peak is known.
        examples: {name: the values of `forward_step` for each sample of an evaluation set, in its
            order} -> more metrics, such as an F1 score. Then integers, such as class ids, have no mean, and
            values other than the loss may have more dimensions, whose sizes may differ between batches, such as
            generated answers: they are padded to the longest with -100, or False for booleans.
            With `batch_loss`, its metrics are among the values.
        collate_fn: samples -> batch, such as `pad_to_longest()`.
        sampler: (epoch, generator) -> order of sample ids in this epoch; the same length in each.
        schedule: (step, num_steps, warmup_steps) -> share of the peak learning rate, instead of
            `--lr_schedule`.
        export: folder -> None; writes more files next to the exported weights, such as a tokenizer; not from weights.
        batch_loss: for a loss that compares samples, such as a contrastive loss. `forward_step` then returns
            {name: values of shape (batch, ...)}, such as vectors, and no "loss". `batch_loss` gets
            {name: values of all samples of the optimizer step, of shape (batch_size, ...), in their order} and
            returns the metrics, each of shape (batch_size,), with the "loss". Its own weights, such as a
            temperature, must be in the model and among the values, expanded to (batch,). An evaluation calls it for
            each `--batch_size` samples in a row and for the rest.
    """

    summarize: Callable[[Metrics], Metrics]
    tokens_per_sample: int | None
    flops_per_sample: float | None
    examples: Callable[[Examples], Metrics] | None
    collate_fn: CollateFn | None
    sampler: Sampler | None
    schedule: ScheduleFn | None
    export: Callable[[Path], Any] | None
    batch_loss: BatchLossFn | None
