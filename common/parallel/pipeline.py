"""Pipeline parallelism: each process has one or two stages, which are ranges of the layers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..config import RunConfig
from ..data.sets import Batch, as_numbered_step, copied_batch
from ..errors import Edit, UsageError
from ..layout import Layout
from ..plan import Plan
from ..seeds import restore_generators
from ..step.batch_loss import Values
from ..step.engine import Engine, LossesAndMetrics, StepResult
from ..step.guards import not_used
from ..step.setup import Setup, compile_if_asked
from ..weights.shards import checkpoint_tensors, local, norm_over_processes, whole
from .absent import FALLBACK, Absent, refuse_absent
from .chain import cut_of
from .schedules import SCHEDULES, Shape, cost, make_steps
from .stages import Cut, Stage, copied, entry_of, forward_hooks, in_one_stage, leave_before_layers, num_hooks
from .strategy import Division, Strategy


def check_stages(layout: Layout, config: RunConfig) -> None:
    """Refuses stages that do not divide the number of processes, or settings that do not work with stages."""
    if layout.num_processes % (least := layout.pp * layout.dp_replicate * layout.sp * layout.tp):
        raise UsageError(
            f"--pipeline_stages {layout.pp} does not divide {layout.num_processes} processes",
            f"use --num_processes {least} after accelerate launch",
        )
    if layout.environment.uses("fsdp") and layout.dp_shard == 1:
        raise UsageError(
            f"--pipeline_stages {layout.pp} of {layout.num_processes} processes leave FSDP2 nothing to divide",
            f"use --num_processes {2 * layout.pp} after accelerate launch, or --config_file accelerate_configs/"
            "pipeline_parallel.yaml",
        )
    for key in ("fsdp_offload_params", "fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing"):
        if layout.environment.is_true(key):
            raise UsageError(f"--pipeline_stages does not work with {key}", "use false there in the config file")


def check_schedule(layout: Layout, config: RunConfig) -> None:
    """Refuses a schedule without stages, or one that does not work with another setting."""
    name = config.pipeline_schedule
    if SCHEDULES[name].is_zero_bubble and layout.dp_shard > 1 and layout.environment.gathers_again:
        # Torch looks for the gradients of the weights that it finds in the module; the graph then has different ones.
        what = (
            f"--pipeline_schedule {name} loses gradients where FSDP2 frees a layer's weights before the backward pass"
        )
        instead = "use --fsdp_reshard_after_forward false after accelerate launch"
        edits = [Edit("fsdp_reshard_after_forward", False, "fsdp_config")]
        if layout.tp > 1:  # then Accelerate passes nothing of FSDP on
            instead, edits = "put FSDP_RESHARD_AFTER_FORWARD=false before accelerate launch", []
        raise UsageError(what, instead, edits, "or --pipeline_schedule interleaved")
    if SCHEDULES[name].is_zero_bubble and config.compile:
        raise UsageError(
            f"--pipeline_schedule {name} does not work with --compile", "use --pipeline_schedule interleaved"
        )


def check_micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuses a number of micro-batches that an interleaved schedule cannot divide into equal rounds."""
    number, stages = plan.accumulation, plan.layout.pp
    if plan.config.pipeline_schedule == "interleaved" and number % (number // stages):
        raise UsageError(
            f"--pipeline_schedule interleaved with {number} micro-batches: not a multiple of {number // stages}",
            f"use --pipeline_schedule 1f1b, or a multiple of {stages} micro-batches",
        )


class PipelineParallel(Strategy):
    name = "pipeline"
    axis = "pp"
    takes_fp16 = False
    fallback = FALLBACK
    cause_at_once = (
        "something outside the layers {draws}changes hidden states, logits or losses in a way that a single stage does "
        "not see: use {fallback}"
    )
    launch_checks = (check_stages, check_schedule)
    model_checks = (check_micro_batches,)

    def title(self, layout: Layout) -> str:
        replicas = layout.data_parallel_size if layout.dp_shard == 1 else 1
        return f"DDP {replicas} × " * (replicas > 1) + f"pipeline of {layout.pp} stages"

    def plan(self, setup: Setup) -> Cut:
        name, layout = setup.plan.config.pipeline_schedule, setup.plan.layout
        cut: Cut = setup.plans.get(self.name) or cut_of(setup)
        process_of = SCHEDULES[name].places(layout.pp)
        held = dict.fromkeys(range(layout.pp), 0)
        for weight_name, weight in setup.model.named_parameters():
            processes = [process_of[stage] for stage in cut.stages_of[weight_name]]
            if layout.dp_shard > 1 and len(processes) > len({*processes}):
                raise UsageError(
                    f"--pipeline_schedule {name}: two stages of one process need {weight_name}, and FSDP2 would "
                    "make two weights of it",
                    "use --pipeline_schedule 1f1b",
                )
            held |= {process: held[process] + weight.numel() for process in processes}
        total = sum(weight.numel() for weight in setup.model.parameters())
        shares = ", ".join(f"{number / total:.0%}" for number in held.values())
        setup.accelerator.print(
            f"the processes of a pipeline hold {shares} of the weights; schedule {name} of {setup.plan.accumulation} "
            f"micro-batches: {cost(name, layout.pp, setup.plan.accumulation)}"
        )
        return cut

    def wrap(self, setup: Setup, division: Division) -> "PipelineEngine":
        return PipelineEngine(setup, division)


class PipelineEngine(Engine):
    """Steps through a pipeline, of a setup with a whole model and its cut. The last stage's process has the losses."""

    def __init__(self, setup: Setup, division: Division):
        plan, layout, mesh = setup.plan, setup.plan.layout, division.grid.mesh
        self.device = setup.accelerator.device
        self.group, self.process = mesh.get_group("pp"), mesh.get_local_rank("pp")
        schedule = SCHEDULES[plan.config.pipeline_schedule]
        self._process_of, self._cut = schedule.places(layout.pp), setup.plans[PipelineParallel.name]
        self.stages = self._divide(setup, division)
        self._is_last = len(self._process_of) - 1 in self.stages
        super().__init__(setup, nn.ModuleList(self.stages.values()))
        # The place of each process of the run in its pipeline.
        self._places = [rank // (layout.sp * layout.tp) % layout.pp for rank in range(layout.num_processes)]
        peers = [rank for rank, place in enumerate(self._places) if place == self.process]
        self.forward_step = in_one_stage(self.forward_step, peers)
        is_sharded = layout.dp_shard > 1
        dist.all_reduce(torch.zeros((), device=self.device), group=self.group)  # NCCL begins a group with all of it
        axes = [axis for axis in ("dp_replicate", "sp") if axis in division.grid.sizes and not is_sharded]
        self._replicas = [mesh.get_group(axis) for axis in axes]
        # A schedule that sees FSDP2 gathers a stage once for all micro-batches, and holds its whole gradients. If it is
        # hidden in another module, FSDP2 gathers a layer at a time, and sums the gradients of each micro-batch.
        hides = is_sharded and layout.environment.gathers_again
        roots = {index: nn.Sequential(stage) if hides else stage for index, stage in self.stages.items()}
        self._take_passes = make_steps(schedule, layout.pp, roots, self.device, self.group)
        self._unchecked_step = as_numbered_step(setup.forward_step)
        self._used: dict[str, bool] | None = None  # whether the weights here that other stages share got a gradient
        self._never_used = set[str]()
        self._with_gradients: list[bool] = []  # for each weight here, whether it gets a gradient
        self._metric_names: list[str] | None = None  # from the first step on
        copies = *(stage.model for stage in self.stages.values()), self._entry  # a pass may be called with these
        self._hooks = forward_hooks(copies)
        self._num_hooks = sum(map(len, self._hooks)), num_hooks(self._hooks)
        named = chain.from_iterable(stage.model.named_parameters() for stage in self.stages.values())
        every: dict[Tensor, str] = {weight: name for name, weight in named if not isinstance(weight, Absent)}
        owns = {index: {*stage.parameters()} for index, stage in self.stages.items()}
        self._others = {at: {key: name for key, name in every.items() if key not in own} for at, own in owns.items()}

    def _divide(self, setup: Setup, division: Division) -> dict[int, Stage]:
        """The stages of this process. The optimizer gets their weights."""
        model, whole_model = setup.model, [*setup.model.named_parameters()]
        own = [stage for stage, process in self._process_of.items() if process == self.process]
        gathered = torch.bfloat16 if setup.plan.layout.dp_shard > 1 and setup.plan.layout.precision == "bf16" else None
        self._entry = entry_of(model, self._cut.chain, self.device, gathered)
        models = [model, *(copied(model, map(model.get_submodule, self._cut.chain)) for _ in own[1:])]
        stages = {index: Stage(part, self._cut, index, self.device) for index, part in zip(own, models)}
        kept = {weight for stage in stages.values() for weight in stage.parameters()}
        for name, weight in whole_model:  # the recipe may hold it
            if weight in kept:
                continue
            setup.optimizer.state.pop(weight, None)  # of steps before fit
            if weight.is_meta:
                continue
            try:
                torch.utils.swap_tensors(weight, Absent.weight(weight, name, self.device))
            except RuntimeError:  # C++ code refers to it, as a graph does
                weight.data = Absent(weight, "").numbers.to(weight)
        for group in setup.optimizer.param_groups:
            group["params"] = [weight for weight in group["params"] if weight in kept]
        for stage in stages.values():
            compile_if_asked(stage, setup.plan, stage.layers)
            division.apply(stage.model, stage)
        division.apply(self._entry, weights=False)
        for part in (*(stage.model for stage in stages.values()), self._entry):  # adds only mixed precision
            setup.accelerator.prepare_model(part, device_placement=False, evaluation_mode=True)
        here = dict(chain.from_iterable(stage.model.named_parameters() for stage in stages.values()))
        for stage in stages.values():
            stage.name_all(here)
        return stages

    @property
    def module(self) -> nn.Module:
        return next(iter(self.stages.values())).model

    def _refuse_new_hooks(self) -> None:
        num_all, num_of_recipe = self._num_hooks
        if sum(map(len, self._hooks)) != num_all and num_hooks(self._hooks) != num_of_recipe:  # the first test is cheap
            raise UsageError(
                "a hook was registered on a module of the model, or removed, after fit began: a pipeline runs copies "
                "of the model, and not all of them got it",
                f"register hooks before fit, or use {FALLBACK}",
            )

    def saved_tensors(self) -> dict[str, Tensor]:
        return {
            name: each
            for at, stage in self.stages.items()
            for name, each in checkpoint_tensors(stage.model).items()
            if at in self._cut.stages_of.get(name, {at}) and not isinstance(each, Absent)
        }

    def running_modules(self) -> Iterable[tuple[str, nn.Module]]:
        return chain.from_iterable(stage.model.named_modules() for stage in self.stages.values())

    def step(self, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        for index, stage in self.stages.items():
            stage.others = self._others[index] if wants_norm else {}
        result = super().step(number, micro_batches, wants_norm)
        return result if self._is_last else replace(result, weight=0.0)

    def _backward(self, number: int, micro_batches: Sequence[Batch], scale: Tensor) -> LossesAndMetrics:
        with restore_generators(self.device):
            shapes = [self._shape_of(batch, number, index) for index, batch in enumerate(micro_batches)]
        losses = [torch.zeros((), device=self.device) for _ in micro_batches]
        metrics: list[Values] = [{} for _ in micro_batches]

        def run(place: int, index: int, model: nn.Module) -> Tensor:
            batch = micro_batches[index]
            loss, metrics[index] = self._loss(number, index, batch, self._take_step(place, model, batch, number))
            losses[index] = loss.detach()
            return loss * scale.to(loss)

        def before(place: int, index: int, is_forward: bool) -> None:  # passes of several micro-batches alternate
            stage = self.stages[place]
            if is_forward:
                self._seed(number, index)
                stage.shape, stage.run = shapes[index], partial(run, place, index)
            # Replicas of shards sum their gradients after the last micro-batch.
            elif sum_over_replicas := getattr(stage, "set_requires_all_reduce", None):  # of FSDP2
                sum_over_replicas(index == len(micro_batches) - 1)

        self._take_passes(shapes, before)
        Stage.running = None
        self._refuse_new_hooks()
        refuse_absent([weight.grad for weight in self._updated_tensors()], "a gradient")
        self._sum_over_replicas()
        self._sum_over_stages()
        if self._metric_names is None:
            self._metric_names = [*self.share_values(metrics[0])]
        if not self._is_last:  # all processes sum up the same metrics
            metrics[0] = {name: torch.zeros((), device=self.device) for name in self._metric_names}
        return losses, metrics

    @torch.no_grad()
    def evaluate(self, batch: Batch, number: int) -> Values:
        """Several batches are in flight at a time, because the first stages wait only for the next one."""
        hidden, result = torch.empty(0), Values()
        with restore_generators(self.device):
            shape = self._shape_of(batch, number)
        for index, process in self._process_of.items():
            if stage := self.stages.get(index):
                stage.shape, stage.run = shape, partial(self._take_step, index, batch=batch, number=number)
                # Each stage draws the same numbers.
                with restore_generators(self.device):
                    hidden = result = stage(hidden)
            if (receiver := self._process_of.get(index + 1, process)) != process:
                if self.process == process:
                    dist.send(hidden, group_dst=receiver, group=self.group)
                elif self.process == receiver:
                    hidden = torch.empty(shape[0], dtype=shape[1], device=self.device)
                    dist.recv(hidden, group_src=process, group=self.group)
        Stage.running = None
        self._refuse_new_hooks()
        return result if self._is_last else {}

    @torch.no_grad()
    def _shape_of(self, batch: Batch, number: int, index: int | None = None) -> Shape:
        """Shape and type of the hidden states of a batch, from a pass up to the first layer: a recipe may cut a batch
        by its content, the step or at random. With the index of a micro-batch, it draws what the pass will draw."""
        if index is not None:
            self._seed(number, index)
        self._entry.train(self.model.training)
        own = copied_batch(batch)
        hidden = leave_before_layers(lambda model: self._unchecked_step(model, own, number), self._entry, is_entry=True)
        return hidden.shape, hidden.dtype

    def _take_step(self, place: int, model: nn.Module, batch: Batch, number: int) -> Values:
        """`forward_step` of a stage. It may change the batch, and another stage of this process takes it afterwards."""
        before = None if place == max(self.stages) else copied_batch(batch)
        try:
            return self.forward_step(model, batch, number)
        finally:
            if before is not None:
                batch.clear()
                batch |= before

    def _holders_of(self, name: str) -> list[int]:
        return sorted({self._process_of[stage] for stage in self._cut.stages_of.get(name, self._process_of)})

    @cached_property
    def _shared(self) -> list[tuple[str, Tensor, list[int]]]:
        """(first name, weight, processes that hold it) of the trained weights here that others also hold, such as tied
        embeddings; in the order of their names, the same in all processes."""
        first = self._cut.first_names
        found = {weight: name for name, weight in self.saved_tensors().items() if weight.requires_grad}  # each once
        holders = ((first[name], weight, self._holders_of(name)) for weight, name in found.items())
        return sorted((each for each in holders if len(each[2]) > 1), key=lambda each: each[0])

    @cached_property
    def _rare(self) -> dict[str, Tensor]:
        """{first name: weight} of the trained weights that only some passes may use; all processes hold them."""
        held = self.saved_tensors()
        names = {self._cut.first_names[name]: name for name in sorted(self._cut.untouched)}
        return {first: held[name] for first, name in names.items() if name in held and held[name].requires_grad}

    def _sum_over_replicas(self) -> None:
        """Sums gradients over the replicas. Raises UsageError if these do not have gradients of the same weights in
        each step: they would add gradients of different weights."""
        weights = self._updated_tensors()
        own = [weight.grad is not None for weight in weights]
        if self._replicas and not self._with_gradients:  # in the first step
            self._with_gradients = self._in_any(own, self._replicas)
        for weight, here, everywhere in zip(weights, own, self._with_gradients):
            if here != everywhere:
                names = {held: name for name, held in self.saved_tensors().items()}
                raise not_used(f"not all passes use {names[weight]}")
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        for group in self._replicas:  # not DDP: its buckets do not support a separate backward pass of each micro-batch
            for request in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
                request.wait()

    def _in_any(self, own: list[bool], groups: Sequence[Any]) -> list[bool]:
        """For each of these, whether it is true in any process of the groups."""
        if not own:
            return own
        found = torch.tensor(own, dtype=torch.uint8, device=self.device)
        for group in groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return found.bool().tolist()

    def _sum_over_stages(self) -> None:
        """Sums the gradients of weights that stages share, in the order of the processes: the copies stay equal."""
        used = [weight.grad is not None for weight in self._rare.values()]
        idle = {name for name, is_used in zip(self._rare, self._in_any(used, [self.group])) if not is_used}
        now = {name: weight.grad is not None for name, weight, _ in self._shared if name not in self._rare}
        if self._used is None:  # in the first step
            self._used = now
            found: list[Any] = [None] * self.plan.layout.pp
            dist.all_gather_object(found, now, self.group)
            self._never_used = {name for each in found for name in each if not any(one.get(name) for one in found)}
        for name in (name for name, is_used in now.items() if is_used != self._used[name]):
            raise not_used(f"not all passes use {name}, which several stages have")
        for name, weight, holders in self._shared:
            if name in idle or name in self._never_used:  # an optimizer leaves it alone
                continue
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            gradients = {holder: torch.empty_like(local(weight.grad)) for holder in holders}
            own = gradients[self.process] = local(weight.grad).contiguous()
            exchange = [
                dist.P2POp(operation, tensor, group=self.group, group_peer=other)
                for other in holders
                if other != self.process
                for operation, tensor in ((dist.isend, own), (dist.irecv, gradients[other]))
            ]
            for request in dist.batch_isend_irecv(exchange):
                request.wait()
            local(weight.grad).copy_(sum(gradients.values()))  # type: ignore[arg-type]

    def _norm(self) -> Tensor:
        twice = {weight for _, weight, holders in self._shared if holders[0] != self.process}
        once = [weight.grad for weight in self._updated_tensors() if weight not in twice]
        gradients = [gradient for gradient in once if gradient is not None]
        own = norm_over_processes(gradients) if gradients else torch.zeros((), device=self.device)
        norms = [torch.empty_like(own) for _ in range(self.plan.layout.pp)]
        dist.all_gather(norms, own, group=self.group)  # not a sum: its order might differ between pipelines
        return torch.linalg.vector_norm(torch.stack(norms))

    def holders(self, name: str) -> Sequence[int]:
        processes = self._holders_of(name)
        return tuple(rank for rank in super().holders(name) if self._places[rank] in processes)

    def _of_all_stages(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        found: list[Any] = [None] * self.plan.layout.pp
        dist.all_gather_object(found, {name: (each.shape, each.dtype) for name, each in tensors.items()}, self.group)
        facts = {name: (process, *fact) for process, of in enumerate(found) for name, fact in of.items()}
        for name, (process, size, dtype) in facts.items():
            is_own = process == self.process
            tensor = whole(tensors[name]).detach() if is_own else torch.empty(size, dtype=dtype, device=self.device)
            dist.broadcast(tensor := tensor.contiguous(), group_src=process, group=self.group)
            yield name, tensor
