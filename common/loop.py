"""`fit`: a whole training run in one function."""

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Unpack

import torch
from torch import nn

from .check.parity import ParityCheck
from .checkpoint.exported import try_export
from .checkpoint.identity import identity
from .checkpoint.resume import find_checkpoint
from .checkpoint.save import Saver
from .config import RunConfig
from .cpu_group import CpuGroup
from .data.batches import batches
from .data.sets import ForwardStep, MapDataset, Metrics
from .evaluation import Evaluation, evaluate_exported
from .launch.start import ObservedAccelerator
from .parallel.strategies import check_trainable
from .records.output_dir import OutputDir
from .records.recorder import Recorder
from .step.guards import check_same_order, check_same_start, freeze_what_is_not_trained
from .step.lazy import with_sizes
from .step.options import FitOptions
from .step.refusals import check_given
from .step.setup import Setup
from .stopping.watch import Watch


def fit(
    accelerator: ObservedAccelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward_step: ForwardStep,
    train_set: MapDataset,
    eval_set: MapDataset | Mapping[str, MapDataset],
    config: RunConfig,
    **options: Unpack[FitOptions],
) -> Metrics:
    """Trains, evaluates, records, and exports the model to `<output_dir>/model/`.

    Args:
        accelerator: from `start(config)`.
        model: any module, on the CPU, the same in every process.
        optimizer: over the model's parameters; its learning rates are the peaks of the schedule.
        forward_step: (model, batch) -> metrics, each of shape (batch,), one value per example;
            "loss" is the training loss. If a batch has a "weight" of shape (batch,), such as a
            number of tokens, all means are weighted by it. With a third argument, `step`, it also gets the number of
            the optimizer step, from 0, the same under every config; in an evaluation the number of steps taken.
        train_set: map-style dataset of dicts of tensors, or a `Mixture` of several.
        eval_set: the same kind; each sample counts exactly once. Or {name: set}: then the metrics
            of each set begin with its name.
        config: the flags.
        options: keywords that may be left out; `FitOptions` in step/options.py documents each.

    Returns:
        The metrics of the last evaluation; empty if a resumed run was already done.

    Raises:
        UsageError: flags, data, a model or an output_dir that the run cannot use.
        NonFiniteError: a loss or gradient norm is not finite; `model/` is not written.
        DriftError: processes that hold the same weights no longer agree; `model/` is not written.
    """
    check_given(model, optimizer, locals())
    setup = with_sizes(Setup.of(accelerator, model, optimizer, forward_step, train_set, eval_set, config, **options))
    plan, group = setup.plan, CpuGroup(config.hang_timeout)
    if config.evaluate_only:
        return evaluate_exported(setup, group)
    with OutputDir(plan, group) as output_dir, Watch(accelerator, plan, group) as watch:
        this_run = identity(setup, group)
        state = (checkpoint := find_checkpoint(setup, this_run, group)).state
        if output_dir.is_done(state):
            return {}
        try_export(setup, group)
        checkpoint.load_weights(model)
        check_same_start(model, setup.train_set, setup.eval_sets, group)
        setup = check_trainable(setup)
        facts = freeze_what_is_not_trained(accelerator, model, optimizer)
        check = ParityCheck(setup, checkpoint, group, facts)
        engine, after_saves = check.engine, check.after_saves
        samples = plan.micro_batches(state.step, partial(check_same_order, group))
        stream = batches(setup.train_set, samples, accelerator.device, config)
        recorder = Recorder(engine, output_dir, state, facts)
        checkpoint.load_rest(engine, recorder.unrecorded)
        evaluation = Evaluation(engine, state, watch, check)
        with recorder, closing(after_saves), Saver(engine, this_run, group, watch, after_saves.start) as saver:
            if state.evaluation_due:  # a stop request ended this evaluation in the earlier run
                evaluation.run(recorder)
                if watch.stop_requested:
                    watch.raise_stopped(checkpoint.path)
            while not plan.is_over(state):
                learning_rate = engine.set_learning_rate(plan.factor_at(state.step - state.num_skipped))
                micro_batches = [next(stream) for _ in range(plan.accumulation)]
                watch.progress()
                result = check.take_step(state.step, micro_batches, plan.reads(state.step + 1) or watch.stop_requested)
                state.step += 1
                recorder.add(learning_rate, result)
                watch.after_step(state.step, result)
                if plan.logs(state.step):
                    recorder.training()
                if plan.evaluates(state.step):
                    evaluation.run(recorder)
                # Never stop on a step whose gradient was not checked; the next step checks it.
                if (stops := watch.stop_requested and result.grad_norm is not None) or plan.saves(state):
                    with recorder.pause():
                        recorder.flush()
                        saver.save(state, recorder.unrecorded)
                if stops:
                    watch.raise_stopped(saver.finish())
            recorder.facts["model_digest"] = saver.export(state, recorder.unrecorded)
    return evaluation.metrics
