"""Pipeline parallelism: each process holds a stage, a range of the layers, or two."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..config import RunConfig
from ..data.sets import Batch, as_numbered_step
from ..errors import Edit, UsageError
from ..layout import Layout
from ..plan import Plan, next_smaller_divisor
from ..seeds import restore_generators
from ..step.batch_loss import Values
from ..step.engine import Engine, StepResult
from ..step.setup import Setup, compile_if_asked
from ..weights.shards import local, norm_over_processes, whole
from .chain import Chain, layer_bounds
from .grid import Division, Part
from .schedules import SCHEDULES, Shape, Steps, cost
from .sharding import gathers_again
from .stages import Entry, Stage, chain_of, copied, take_away
from .strategy import Strategy


def check_stages(layout: Layout, config: RunConfig) -> None:
    """A config whose processes the stages do not divide, or that does not work with them."""
    others = layout.dp_replicate * layout.sp * layout.tp
    if layout.num_processes % (layout.pp * others):
        raise UsageError(
            f"--pipeline_stages {layout.pp} does not divide {layout.num_processes} processes",
            f"use --num_processes {layout.pp * others} after accelerate launch",
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
    if layout.precision == "fp16":
        raise UsageError(
            "fp16 does not work with a pipeline",
            "use --mixed_precision bf16 after accelerate launch",
            [Edit("mixed_precision", "bf16")],
        )


def check_schedule(layout: Layout, config: RunConfig) -> None:
    """A schedule without stages, or one that goes wrong beside another choice."""
    name = config.pipeline_schedule
    if SCHEDULES[name].splits and layout.dp_shard > 1 and gathers_again(layout):
        # Torch looks for the gradients of the weights that it finds in the module: then not those of the graph.
        raise UsageError(
            f"--pipeline_schedule {name} loses gradients where FSDP2 frees a layer's weights before the backward pass",
            "use --fsdp_reshard_after_forward false after accelerate launch",
            [Edit("fsdp_reshard_after_forward", False, "fsdp_config")],
            "or --pipeline_schedule interleaved",
        )
    if SCHEDULES[name].splits and config.compile:
        raise UsageError(
            f"--pipeline_schedule {name} does not work with --compile", "use --pipeline_schedule interleaved"
        )


def check_micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """A number of micro-batches that the schedule does not take."""
    name, layout = plan.config.pipeline_schedule, plan.layout
    own = plan.config.batch_size // layout.data_parallel_size

    def reason(size: int) -> str | None:
        try:
            cost(name, layout.pp, own // size)
        except ValueError as error:
            return str(error)
        return None

    size: int | None = plan.micro_batch_size
    if why := reason(plan.micro_batch_size):
        while size is not None and reason(size):
            size = next_smaller_divisor(own, size)
        advice = f"use --micro_batch_size {size}" if size else "use --pipeline_schedule 1f1b"
        raise UsageError(
            f"--pipeline_schedule {name} with {plan.accumulation} micro-batches: {why.rstrip('.')}", advice
        )


class PipelineParallel(Strategy):
    name = "pipeline"
    axis = "pp"
    fallback = "--config_file accelerate_configs/fsdp2.yaml, and remove --pipeline_stages"
    cause_at_once = (
        "something beside the layers {draws}changes hidden states, logits or losses in a way that one stage alone does "
        "not see: use {fallback}"
    )
    launch_checks = (check_stages, check_schedule)
    model_checks = (check_micro_batches,)

    def title(self, layout: Layout) -> str:
        replicas = layout.data_parallel_size if layout.dp_shard == 1 else 1
        return f"DDP {replicas} × " * (replicas > 1) + f"pipeline of {layout.pp} stages"

    def plan(self, setup: Setup) -> Chain:
        name, layout = setup.plan.config.pipeline_schedule, setup.plan.layout
        num_stages = layout.pp * SCHEDULES[name].per_process
        chain = chain_of(setup, num_stages)
        process_of, bounds = SCHEDULES[name].places(layout.pp), layer_bounds(len(chain.layers), num_stages)
        held = dict.fromkeys(range(layout.pp), 0)
        for weight_name, weight in setup.model.named_parameters():
            processes = [process_of[stage] for stage in chain.stages_of(weight_name, bounds)]
            if layout.dp_shard > 1 and len(processes) > len({*processes}):
                raise UsageError(
                    f"--pipeline_schedule {name}: two stages of one process need {weight_name}, of which FSDP2 would "
                    "make two weights",
                    "use --pipeline_schedule 1f1b",
                )
            held |= {process: held[process] + weight.numel() for process in processes}
        total = sum(weight.numel() for weight in setup.model.parameters())
        shares = ", ".join(f"{number / total:.0%}" for number in held.values())
        setup.accelerator.print(
            f"the processes of a pipeline hold {shares} of the weights; schedule {name} of {setup.plan.accumulation} "
            f"micro-batches: {cost(name, layout.pp, setup.plan.accumulation)}"
        )
        return chain

    def wrap(self, setup: Setup, division: Division) -> "PipelineEngine":
        return PipelineEngine(setup, division)


class PipelineEngine(Engine):
    """Steps through a pipeline. Only the process of its last stage has the losses.

    Args:
        setup: of the run, with a whole model and its chain.
        division: of the model.
    """

    def __init__(self, setup: Setup, division: Division):
        plan, layout, mesh = setup.plan, setup.plan.layout, division.grid.mesh
        chain: Chain = setup.plans[PipelineParallel.name]
        self.device = setup.accelerator.device
        self.group, self.process = mesh.get_group("pp"), mesh.get_local_rank("pp")
        schedule = SCHEDULES[plan.config.pipeline_schedule]
        self._process_of, self._num_stages = schedule.places(layout.pp), schedule.per_process * layout.pp
        self._chain, self._bounds = chain, layer_bounds(len(chain.layers), self._num_stages)
        self._module, self.stages = setup.model, self._cut(setup, division)
        self._is_last = self._num_stages - 1 in self.stages
        super().__init__(setup, nn.ModuleList(self.stages.values()))
        is_sharded = layout.dp_shard > 1
        axes = [axis for axis in ("dp_replicate", "sp") if axis in division.grid.sizes and not is_sharded]
        self._replicas = [mesh.get_group(axis) for axis in axes]
        # A schedule that sees FSDP2 gathers a stage once for all micro-batches, and holds its whole gradients. Hidden
        # in another module, FSDP2 gathers a layer at a time, and sums the gradients of each micro-batch.
        hides = is_sharded and gathers_again(layout)
        roots = {index: nn.Sequential(stage) if hides else stage for index, stage in self.stages.items()}
        self._steps = Steps(schedule, roots, plan.accumulation, self.device, self.group, self)
        self._unchecked_step = as_numbered_step(setup.forward_step)
        self._shapes: dict[Any, Shape] = {}  # {shapes of a batch: that of its hidden states}
        self._facts: dict[Any, Any] = {}  # {(in training, shapes of a batch): names, shapes and types of its values}
        self._names: list[str] | None = None  # of the metrics in training

    def _cut(self, setup: Setup, division: Division) -> dict[int, Stage]:
        """The stages of this process. The optimizer gets their weights."""
        model, own = setup.model, [stage for stage, process in self._process_of.items() if process == self.process]
        entry, models = copied(model), [model if len(own) == 1 else copied(model) for _ in own]
        stages = {index: Stage(part, self._chain, self._bounds, index, self.device) for index, part in zip(own, models)}
        kept = {weight for stage in stages.values() for weight in stage.parameters()}
        for group in setup.optimizer.param_groups:
            group["params"] = [weight for weight in group["params"] if weight in kept]
        for stage in stages.values():
            compile_if_asked(stage, setup.plan, stage.layers)
            division.apply(Part(stage.model, stage))
            setup.accelerator.prepare_model(stage.model, evaluation_mode=True)  # which adds mixed precision alone
        gathered = torch.bfloat16 if setup.plan.layout.dp_shard > 1 and setup.plan.layout.precision == "bf16" else None
        self._entry = Entry(entry, self._chain, self.device, gathered)
        division.apply(Part(entry, self._entry), weights=False)
        setup.accelerator.prepare_model(entry, evaluation_mode=True)
        if len(own) > 1:
            _hold_weights_of(model, stages.values(), self._chain, self.device)
        return stages

    @property
    def module(self) -> nn.Module:
        return self._module

    def step(self, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        result = super().step(number, micro_batches, wants_norm)
        return result if self._is_last else replace(result, weight=0.0)

    def _backward(
        self, number: int, micro_batches: Sequence[Batch], scale: Tensor
    ) -> tuple[list[Tensor], list[Values]]:
        self._now, self._shapes_now = (number, micro_batches, scale), [self._shape_of(batch) for batch in micro_batches]
        self._losses = [torch.zeros((), device=self.device) for _ in micro_batches]
        self._metrics: list[Values] = [{} for _ in micro_batches]
        self._steps.take()
        gradients = [weight.grad for weight in self._updated_tensors() if weight.grad is not None]
        for group in self._replicas:  # not DDP: its buckets do not support a separate backward pass of each micro-batch
            for request in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
                request.wait()
        self._sum_over_stages()
        if self._names is None:
            self._names = self._from_last([*self._metrics[0]])
        if not self._is_last:  # all processes sum up the same metrics
            self._metrics[0] = {name: torch.zeros((), device=self.device) for name in self._names}
        return self._losses, self._metrics

    def before_forward(self, stage: int, index: int) -> None:
        """As in `Passes`. The passes of several micro-batches alternate."""
        number, micro_batches, _ = self._now
        self._seed(number, index)
        self.stages[stage].shape = self.shape(index)
        self.stages[stage].run = partial(self._scaled_loss, number, index, micro_batches[index])

    def before_backward(self, stage: int, index: int) -> None:
        """As in `Passes`. Replicas of shards sum their gradients after the last micro-batch."""
        if sum_over_replicas := getattr(self.stages[stage], "set_requires_all_reduce", None):  # of FSDP2
            sum_over_replicas(index == self.plan.accumulation - 1)

    def shape(self, index: int) -> Shape:
        """As in `Passes`."""
        return self._shapes_now[index]

    def _scaled_loss(self, number: int, index: int, batch: Batch, model: nn.Module) -> Tensor:
        loss, self._metrics[index] = self._loss(number, index, batch, self.forward_step(model, batch, number))
        self._losses[index] = loss.detach()
        return loss * self._now[2].to(loss)

    @torch.no_grad()
    def evaluate(self, batch: Batch, number: int) -> Values:
        shape, hidden, values = self._shape_of(batch), torch.empty(0, device=self.device), Values()
        for index in range(self._num_stages):
            before, here, after = (self._process_of.get(index + step) for step in (-1, 0, 1))
            if here != self.process:
                continue
            if before is not None and before != here:
                hidden = torch.empty(shape[0], dtype=shape[1], device=self.device)
                dist.recv(hidden, group_src=before, group=self.group)
            stage = self.stages[index]
            stage.shape, stage.run = shape, lambda model: self.forward_step(model, batch, number)
            hidden = stage(hidden)
            if after is None:
                values = hidden
            elif after != here:
                dist.send(hidden, group_dst=after, group=self.group)
        key = self.model.training, _shapes_in(batch)
        if key not in self._facts:
            self._facts[key] = self._from_last([(name, each.shape, each.dtype) for name, each in values.items()])
        for name, size, dtype in self._facts[key]:
            own = values[name].contiguous() if self._is_last else torch.empty(size, dtype=dtype, device=self.device)
            dist.broadcast(own, group_src=self._process_of[self._num_stages - 1], group=self.group)
            values[name] = own
        return values

    def _shape_of(self, batch: Batch) -> Shape:
        """Shape and type of the hidden states of a micro-batch, from a pass up to the first layer."""
        if (key := _shapes_in(batch)) not in self._shapes:
            with torch.no_grad(), restore_generators(self.device):
                hidden = self._entry(lambda model: self._unchecked_step(model, batch, 0))
            self._shapes[key] = hidden.shape, hidden.dtype
        return self._shapes[key]

    def _from_last(self, value: Any) -> Any:
        """The value of the process of the last stage."""
        values = [value]
        dist.broadcast_object_list(
            values, group_src=self._process_of[self._num_stages - 1], group=self.group, device=self.device
        )
        return values[0]

    def _holders_of(self, name: str) -> list[int]:
        """The processes of the pipeline that hold a saved tensor."""
        return sorted({self._process_of[stage] for stage in self._chain.stages_of(name, self._bounds)})

    @cached_property
    def _shared(self) -> list[tuple[nn.Parameter, list[int]]]:
        """(weight, processes that hold it) of the weights here that others hold, too, such as tied embeddings."""
        found = [(weight, self._holders_of(name)) for name, weight in self.module.named_parameters()]
        return [(weight, holders) for weight, holders in found if weight.requires_grad and len(holders) > 1]

    def _sum_over_stages(self) -> None:
        """Sums the gradients of a weight that several stages hold, in the order of the processes: so that the copies
        stay equal to the last bit."""
        for weight, holders in self._shared:
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
        twice = {weight for weight, holders in self._shared if holders[0] != self.process}
        once = [weight.grad for weight in self._updated_tensors() if weight not in twice]
        gradients = [gradient for gradient in once if gradient is not None]
        own = norm_over_processes(gradients) if gradients else torch.zeros((), device=self.device)
        norms = [torch.empty_like(own) for _ in range(self.plan.layout.pp)]
        dist.all_gather(norms, own, group=self.group)  # not a sum: its order might differ between pipelines
        return torch.linalg.vector_norm(torch.stack(norms))

    def holders(self, name: str) -> Sequence[int]:
        layout, processes = self.plan.layout, self._holders_of(name)
        consecutive = layout.sp * layout.tp  # processes of the same stage
        return tuple(rank for rank in super().holders(name) if rank // consecutive % layout.pp in processes)

    def _of_all_stages(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of all stages, one at a time, in the first process; nothing in the others."""
        facts: list[Any] = [None] * self.plan.layout.pp
        dist.all_gather_object(facts, {name: (each.shape, each.dtype) for name, each in tensors.items()}, self.group)
        holder_of = {name: holder for holder, own in enumerate(facts) for name in own}
        for name, holder in holder_of.items():
            if self.process == holder == 0:
                yield name, tensors[name]
            elif self.process == holder:
                dist.send(whole(tensors[name]).detach().contiguous(), group_dst=0, group=self.group)
            elif self.process == 0:
                shape, dtype = facts[holder][name]
                received = torch.empty(shape, dtype=dtype, device=self.device)
                dist.recv(received, group_src=holder, group=self.group)
                yield name, received


def _shapes_in(batch: Batch) -> tuple[Any, ...]:
    return tuple((name, each.shape, each.dtype) for name, each in batch.items() if isinstance(each, Tensor))


def _hold_weights_of(model: nn.Module, stages: Iterable[Stage], chain: Chain, device: torch.device) -> None:
    """Gives a model, which does not run, the weights of these stages, which run copies of it."""
    owners = dict(model.named_modules(remove_duplicate=False))
    held = {name: weight for stage in stages for name, weight in stage.model.state_dict(keep_vars=True).items()}
    for name in chain.uses:
        owner, _, key = name.rpartition(".")
        if key in owners[owner]._parameters and name in held:
            owners[owner]._parameters[key] = held[name]
        elif name not in held:
            take_away(owners[owner], key, device)


PIPELINE = PipelineParallel()
