"""The mean of each metric over the evaluation set; a run records it and exports the best weights."""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import Subset

from .checkpoint.exported import export_model, load_exported
from .cpu_group import CpuGroup
from .data.batches import batches, resident
from .data.facts import say
from .data.mixed import of_sources, without_sources
from .data.sets import Collated, Examples, MapDataset, Metrics
from .errors import RunError, StoppedError, UsageError
from .files import for_json
from .parallel.strategies import check_trainable, divides_weights, prepare
from .records.recorder import Recorder
from .records.run_card import read_card
from .seeds import CPU, EVALUATION, SUMMARY, seed_forward
from .state import TrainState
from .step.batch_loss import SAMPLE_WEIGHT, BatchLoss, gather, put, widened
from .step.engine import Engine, buffers_kept, evaluating
from .step.guards import check_same_start, freeze_what_is_not_trained
from .step.setup import Setup
from .step.values import is_metric
from .stopping.watch import Watch
from .weights.on_disk import materialize


class RunCheck(Protocol):
    """What evaluations ask of the check of their run: two methods of `ParityCheck`."""

    def translating(self) -> AbstractContextManager[None]: ...
    def compare_evaluation(self, number: int, metrics: Metrics) -> None: ...


class Evaluation:
    """The evaluations of a run. Raises UsageError if evaluating a sample gives no `--metric_for_best_model`.

    Args:
        engine: holds the model to evaluate, and the setup of the run. Each sample of an evaluation set counts once. The
            name of a set, unless it is "", begins the names of its metrics.
        state: the run's state.
        watch: the run's watch; a stop request ends an evaluation early.
        check: the run's `ParityCheck`, if it has one.
    """

    def __init__(self, engine: Engine, state: TrainState, watch: Watch, check: "RunCheck | None" = None):
        eval_sets = engine.setup.eval_sets
        parts = [f"{len(part):,} for evaluation{f' ({name})' if name else ''}" for name, part in eval_sets.items()]
        say(f"{engine.plan.num_samples:,} training samples, {', '.join(parts)}")
        self.engine, self.state, self.watch, self._check = engine, state, watch, check
        device = CPU if engine.plan.config.num_workers else engine.device  # a worker reads on the CPU
        # Moves the sets once, not in each evaluation.
        self.eval_sets = {name: resident(eval_set, device) for name, eval_set in eval_sets.items()}
        self.metrics: Metrics = {}  # of the last evaluation; empty before the first
        self._has_said = False
        if (name := engine.plan.config.metric_for_best_model) is not None:
            firsts = {key: _first(eval_set) for key, eval_set in eval_sets.items()}
            with buffers_kept(engine.model):
                metrics = self.measure(firsts, poll=lambda: False)
            assert metrics is not None
            if name not in metrics:
                raise UsageError(
                    f"--metric_for_best_model {name}: no such metric; use one of {', '.join(sorted(metrics))}"
                )

    def run(self, recorder: Recorder) -> None:
        """Evaluates, records the metrics, and exports the weights if they are the best so far.

        A stop request ends the evaluation early: nothing is recorded, and a resumed run evaluates first.
        """
        engine, state, config = self.engine, self.state, self.engine.plan.config
        state.evaluation_due = True
        with recorder.pause(), engine.ema_weights():
            metrics = self.measure(self.eval_sets, self.watch.poll)
            self.watch.settle()
            if metrics is None:
                return
            if self._check is not None:
                self._check.compare_evaluation(state.step, metrics)
            state.evaluation_due = False
            if (name := config.metric_for_best_model) is not None and state.records_best(name, metrics[name]):
                try:
                    export_model(engine, config.output_dir / "best", {"step": state.step, "metrics": for_json(metrics)})
                except RunError as error:
                    engine.accelerator.print(f"{error}; the run continues")
        recorder.evaluation(metrics)
        self.metrics = metrics

    def measure(self, eval_sets: Mapping[str, MapDataset], poll: Callable[[], bool]) -> Metrics | None:
        """The metrics of these sets with the model's weights; None if `poll` ended the evaluation."""
        translating = nullcontext if self._check is None else self._check.translating
        metrics = measure(self.engine, eval_sets, poll, self.state.step, translating)
        return None if metrics is None else self._of_main_process(metrics)

    def _of_main_process(self, metrics: Metrics) -> Metrics:
        """The metrics of the main process. If another one has others, prints a line, once."""
        first, *others = self.watch.group.all_gather(metrics)
        differ = [
            (name, rank, other[name])
            for rank, other in enumerate(others, start=1)
            for name in first.keys() & other.keys()
            if not math.isclose(first[name], other[name], rel_tol=1e-6) and math.isfinite(other[name])
        ]
        for name, rank, other in sorted(differ)[: not self._has_said]:
            self._has_said = True
            self.engine.accelerator.print(
                f'summarize or examples gives "{name}" as {first[name]:.4g} in process 0 and {other:.4g} in process '
                f"{rank}; the run uses the first: compute it from the values of all samples, as examples gets them"
            )
        return first


def measure(
    engine: Engine,
    eval_sets: Mapping[str, MapDataset],
    poll: Callable[[], bool],
    number: int,
    translating: Callable[[], Any] = nullcontext,
) -> Metrics | None:
    """The metrics of these sets in this process, after `number` steps; None if `poll` ended the evaluation."""
    config, options = engine.plan.config, engine.setup.options
    summarize, examples = options.get("summarize", dict), options.get("examples")
    keeps, metrics = examples is not None or config.save_predictions, Metrics()
    for key, eval_set in eval_sets.items():
        if (results := evaluate_set(engine, eval_set, poll, keeps, number)) is None:
            return None
        means, values = results
        seed_forward(config.seed, EVALUATION, SUMMARY, engine.device)
        with translating() if divides_weights(engine.plan.layout) else nullcontext():
            reported = summarize(means) | ({} if examples is None else examples(values))
        prefix = f"{key}/" if key else ""
        metrics |= {f"{prefix}{name}": _number(name, value) for name, value in reported.items()}
        if config.save_predictions and engine.accelerator.is_main_process:
            write_predictions(config.output_dir / f"predictions{'_' * bool(key)}{key}.jsonl", values)
    return metrics


def _first(dataset: MapDataset) -> MapDataset:
    """The first sample of a dataset, as a dataset."""
    first: Any = Subset(dataset.samples if isinstance(dataset, Collated) else dataset, [0])  # type: ignore[arg-type]
    return Collated(first, dataset.collate_fn) if isinstance(dataset, Collated) else first


def _number(name: str, value: Any) -> float:
    """Converts a value from `summarize` to float. Raises UsageError if the value is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f'summarize returned "{name}" as {type(value).__name__}: expected a number') from None


def evaluate_exported(setup: Setup, group: CpuGroup) -> Metrics:
    """Evaluates the exported model of an earlier run, for `--evaluate_only`.

    Prints the metrics and writes them to `<output_dir>/evaluation.json`. It does not change the other files of the run.
    Raises UsageError if there is no exported model in `<output_dir>/model/`, or it does not fit the recipe's model;
    StoppedError if a signal ended the evaluation.
    """
    accelerator, model, plan, config = setup.accelerator, setup.model, setup.plan, setup.plan.config
    materialize(model)
    load_exported(config.output_dir, model)
    check_same_start(model, setup.train_set, setup.eval_sets, group)
    with Watch(accelerator, plan, group) as watch:
        setup = check_trainable(setup)
        freeze_what_is_not_trained(accelerator, model, setup.optimizer)
        last, step = read_card(config.output_dir).get("last_metrics"), plan.num_steps
        if isinstance(last, dict):
            step = last.get("step", step)  # early stopping may have ended the run before
        evaluation = Evaluation(prepare(setup), TrainState(step=step), watch)
        metrics = evaluation.measure(evaluation.eval_sets, watch.poll)
        watch.settle()
    if metrics is None:
        raise StoppedError("during the evaluation: the same command starts again")
    if accelerator.is_main_process:
        print("  ".join(f"eval/{name} {value:.6g}" for name, value in metrics.items()), flush=True)
        text = json.dumps({"metrics": for_json(metrics), "config": asdict(config)}, indent=2, default=str)
        (config.output_dir / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    return metrics


@torch.no_grad()
def evaluate_set(
    engine: Engine, eval_set: MapDataset, poll: Callable[[], bool], keeps: bool, number: int = 0
) -> tuple[Metrics, Examples] | None:
    """(means over an evaluation set, the values of each sample if it `keeps` them); None if `poll` ended it.

    Every process runs the same number of forward passes, because the processes of a sharded model wait for each other.
    The last passes are padded with samples that are not counted. `poll` is called before each pass, and must return the
    same in all processes. The means come from the values of all samples in their order, so that no layout changes them.
    If the values are kept, integers, such as class ids, have no mean. A `batch_loss` has its own metrics."""
    plan, batch_loss, device = engine.plan, engine.batch_loss, engine.device
    size, num_samples = plan.micro_batch_size, len(eval_set)
    num_passes = -(-num_samples // (size * plan.layout.data_parallel_size))
    # Ids past the end are padding.
    starts = [plan.row(index) * size for index in range(num_passes)]
    samples = ((EVALUATION, torch.arange(start, start + size).clamp_(max=num_samples - 1)) for start in starts)
    rows: Examples = {}  # of this process, with the padding, of shape (passes, micro_batch, ...)
    with evaluating(engine.model):
        for index, batch in enumerate(batches(eval_set, samples, device, plan.config)):
            if poll():
                return None
            seed_forward(plan.config.seed, EVALUATION, plan.row(index), device)
            values = engine.evaluate(batch, number)
            if not keeps and batch_loss is None:  # predictions of many dimensions would fill the memory needlessly
                values = {name: value for name, value in values.items() if value.ndim == 1}
            weight = batch.get("weight", torch.ones(size, device=device))
            put(rows, index, num_passes, values | ({SAMPLE_WEIGHT: weight} if values else {}))  # in the last stage
    rows = engine.share_values(rows)
    types = gather_object([{name: each.dtype for name, each in rows.items()}])
    for rank, other in enumerate(types):
        for name in (name for name in types[0] if other.get(name) != types[0][name]):
            what = f'"{name}" has the type {other.get(name)} in process {rank}, {types[0][name]} in process 0'
            raise UsageError(f"{what}: return one type for each batch, such as .float()")
    for name in (name for name, each in rows.items() if each.ndim > 2):  # predictions, longer in other processes
        sizes = torch.tensor(rows[name].shape[2:], device=device)
        rows[name] = widened(rows[name], engine.accelerator.gather(sizes[None]).amax(0).tolist())
    examples = {name: gather(engine.accelerator, plan.layout, each)[:num_samples] for name, each in rows.items()}
    weight = examples.pop(SAMPLE_WEIGHT).double()
    with evaluating(engine.model):  # for a batch_loss that asks model.training
        metrics = examples if batch_loss is None else _in_batches(batch_loss, examples, plan.config.batch_size)
    ids_count = not keeps and batch_loss is None  # integers that are kept or given to `batch_loss` are not averaged
    averaged = {name: value for name, value in metrics.items() if is_metric(value) or (ids_count and value.ndim == 1)}
    sums = [(value.double() * weight).sum() for value in averaged.values()]
    *totals, total = torch.stack([*sums, weight.sum()]).tolist()
    means = of_sources({name: value / (total or math.nan) for name, value in zip(averaged, totals)})
    if not total:
        say("the evaluation has no means: the weights of all its samples are 0")
    kept = examples | metrics if keeps or batch_loss is not None else {}
    for name, whole in kept.items():
        if whole.ndim == 1:  # for sums over samples
            kept[name] = whole.to(torch.float64 if whole.is_floating_point() else torch.int64)
    return means, {name: whole.cpu() for name, whole in without_sources(kept).items()}


def _in_batches(batch_loss: BatchLoss, values: Examples, size: int) -> Examples:
    """The metrics of each `size` consecutive samples, and of the rest: without padding, the same in every layout."""
    starts = range(0, len(next(iter(values.values()))), size)
    rows = [{name: whole[start : start + size] for name, whole in values.items()} for start in starts]
    parts = [batch_loss(each, EVALUATION) for each in rows]
    return {name: torch.cat([metrics[name] for metrics in parts]) for name in parts[0]}


def write_predictions(path: Path, examples: dict[str, Tensor]) -> None:
    """Writes one JSON object per sample, in the order of the set; null stands for a number that is not finite.
    Replaces the file of an earlier evaluation. `examples`: {name: values of each sample, of shape (samples, ...)}."""
    columns = {name: values.tolist() for name, values in examples.items()}
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for sample, row in enumerate(zip(*columns.values())):
            file.write(json.dumps({"sample": sample, **dict(zip(columns, for_json(list(row))))}) + "\n")
    part.rename(path)
