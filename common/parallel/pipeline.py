"""Pipeline parallelism: each process holds a stage, a range of the layers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..config import RunConfig
from ..data.sets import Batch, NumberedStep
from ..environment import Environment
from ..errors import Edit, UsageError
from ..layout import Layout
from ..norms import clip
from ..plan import Plan
from ..seeds import UPDATE, seed_forward
from ..step.engine import Engine, StepResult, step_if_finite, weighted_sum
from ..step.setup import Setup, choose_fused_kernels, compile_if_asked
from ..weights.shards import local, norm_over_processes, whole
from .grid import Division, Part
from .sharding import gathers_again, sharded_layers
from .stages import Stage, check_pipeline, keep_stage
from .strategy import Strategy, Symptoms


def check_stages(layout: Layout, config: RunConfig) -> None:
    """A config whose processes the stages do not divide, or one of DeepSpeed."""
    others = layout.dp_replicate * layout.sp * layout.tp
    if layout.num_processes % (layout.pp * others):
        raise UsageError(
            f"--pipeline_stages {layout.pp} does not divide {layout.num_processes} processes",
            f"use --num_processes {layout.pp * others} after accelerate launch",
        )
    if layout.environment.uses("deepspeed"):
        raise UsageError(
            "--pipeline_stages does not combine with DeepSpeed",
            "use --config_file accelerate_configs/fsdp2_pipeline.yaml",
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


def check_layers(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """A model that cannot be cut into stages."""
    check_pipeline(model, plan.layout.pp)


class PipelineParallel(Strategy):
    name = "pipeline"
    fallback = "--config_file accelerate_configs/fsdp2.yaml, and remove --pipeline_stages"
    launch_checks = (check_stages,)
    model_checks = (check_layers,)

    def is_requested(self, environment: Environment, config: RunConfig) -> bool:
        return config.pipeline_stages > 1

    def sizes(self, environment: Environment, config: RunConfig) -> dict[str, Any]:
        return {"pp": config.pipeline_stages}

    def title(self, layout: Layout) -> str:
        replicas = layout.data_parallel_size if layout.dp_shard == 1 else 1
        return f"DDP {replicas} × " * (replicas > 1) + f"pipeline of {layout.pp} stages"

    def variables(self, layout: Layout) -> dict[str, str]:
        return super().variables(layout) | {"ACCELERATE_USE_FSDP": "false"}

    def refuse_batch_loss(self) -> None:
        raise UsageError("batch_loss needs two passes per step, which a pipeline does not have", f"use {self.fallback}")

    def wrap(self, setup: Setup, division: Division) -> "PipelineEngine":
        pipeline = Pipeline(setup, division)
        optimizer = setup.accelerator.prepare_optimizer(setup.optimizer)
        choose_fused_kernels(setup.accelerator, setup.optimizer)
        return PipelineEngine(setup, pipeline, optimizer)

    def likely_cause(self, seen: Symptoms) -> str | None:
        if not seen.at_once:
            return None
        return (
            f"something beside the layers {'draws random numbers, or ' * seen.draws}changes hidden states, logits or "
            f"losses, which a pipeline cannot divide: use {self.fallback}"
        )


def _check_named(named: dict[str, Any]) -> None:
    if named:
        raise UsageError(
            f"a pipeline cannot pass on {', '.join(named)}",
            f"leave out the flag that adds it (--packing), or use {PipelineParallel.fallback}",
        )


class StandIn:
    """What `forward_step` calls in place of the model while a pipeline trains."""

    training = True

    def __init__(self, call: Callable[..., Any]):
        self.call = call

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.call(*args, **named)


def _as_returned(values: Tensor, names: Sequence[str]) -> Tensor | dict[str, Tensor]:
    """What a model from `with_losses` returns of these values, of shape (names, batch)."""
    return dict(zip(names, values)) if len(names) > 1 else values[0]


def _model_arguments(forward_step: NumberedStep, batch: Batch, number: int, names: Sequence[str]) -> tuple[Any, ...]:
    """The arguments with which `forward_step` calls the model. A stand-in records them and returns zero losses. Raises
    UsageError for arguments that the stages cannot pass on."""
    noted: list[tuple[Any, ...]] = []

    def stand_in(*args: Any, **named: Any) -> Any:
        _check_named(named)
        noted.append(args)
        return _as_returned(torch.zeros(len(names), len(args[0]), device=args[0].device), names)

    with torch.no_grad():
        forward_step(StandIn(stand_in), batch, number)
    if len(noted) != 1:
        raise UsageError(
            f"forward_step calls the model {len(noted)} times, but a pipeline has one pass",
            f"call it once, or use {PipelineParallel.fallback}",
        )
    return noted[0]


class Pipeline(nn.Module):
    """The stage of this process, and the passes through all stages.

    A call takes the arguments of the model, runs a forward pass without gradients and returns the losses in all
    processes of the pipeline. Training uses `backward` and `clip`.

    Args:
        setup: of the run, with a whole transformers model from `with_losses`. The layers of other stages are removed
            from it, and their weights from the optimizer.
        division: of the model.
    """

    def __init__(self, setup: Setup, division: Division):
        super().__init__()
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # the import takes a second

        plan, layout, mesh = setup.plan, setup.plan.layout, division.grid.mesh
        self.device, self.num_stages, self.autocast = division.grid.device, layout.pp, setup.accelerator.autocast
        self.group, self.index = mesh.get_group("pp"), mesh.get_local_rank("pp")
        self.is_first, self.is_last = self.index == 0, self.index == self.num_stages - 1
        model: Any = setup.model
        self.model, self.is_tied = model, model.get_output_embeddings().weight is model.get_input_embeddings().weight
        self.in_all_stages = keep_stage(model, self.index, self.num_stages)
        kept = set(model.parameters())
        for group in setup.optimizer.param_groups:
            group["params"] = [weight for weight in group["params"] if weight in kept]
        self.stage = Stage(model, self.is_first, self.is_last)
        is_sharded = layout.dp_shard > 1
        compile_if_asked(self.stage, plan, sharded_layers(model, layout) if is_sharded else ())
        division.apply(Part(model, self.stage))
        self.data_group = None if is_sharded or layout.data_parallel_size == 1 else mesh.get_group("dp_replicate")
        # A schedule that sees FSDP2 gathers a stage once for all micro-batches, and holds its whole gradients. Hidden
        # in another module, FSDP2 gathers a layer at a time, and sums the gradients of each micro-batch.
        runs = nn.Sequential(self.stage) if is_sharded and gathers_again(layout) else self.stage
        stage: Any = PipelineStage(runs, self.index, self.num_stages, self.device, group=self.group)
        stage.forward_one_chunk = partial(self._forward_one, stage.forward_one_chunk)
        stage.backward_one_chunk = partial(self._backward_one, stage.backward_one_chunk)
        self.schedule = Schedule1F1B(stage, plan.accumulation, loss_fn=self._loss, scale_grads=False)

    @property
    def tied(self) -> nn.Parameter | None:
        """This process's copy of an embedding that is tied to the head, in the first and in the last stage."""
        if not self.is_tied or not (self.is_first or self.is_last):
            return None
        return (self.model.get_input_embeddings() if self.is_first else self.model.get_output_embeddings()).weight

    def forward(self, *args: Tensor, **named: Any) -> Tensor | dict[str, Tensor]:
        """What the model returns for these arguments, without a graph."""
        _check_named(named)
        with torch.no_grad(), self.autocast():
            given = args[0]
            if not self.is_first:
                given = torch.empty(*given.shape, self.model.config.hidden_size, device=self.device)
                dist.recv(given, group_src=self.index - 1, group=self.group)
            output = self.stage(given)
            if not self.is_last:
                dist.send(output.float().contiguous(), group_dst=self.index + 1, group=self.group)
            shape = len(self.model.loss_names), len(args[0])
            result = self.model.losses(output, *args) if self.is_last else torch.empty(shape, device=self.device)
        dist.broadcast(result, group_src=self.num_stages - 1, group=self.group)
        return _as_returned(result, self.model.loss_names)

    def backward(
        self,
        forward_step: NumberedStep,
        number: int,
        micro_batches: Sequence[Batch],
        scale: Tensor,
        seed: Callable[[int], None],
    ) -> list[Tensor]:
        """Accumulates the gradient of scale × the sum of the losses.

        Args:
            forward_step: of the engine.
            number: of the optimizer step.
            micro_batches: of this step.
            scale: 0-dim.
            seed: called before the forward pass of each micro-batch, with its index.

        Returns:
            The sum of the losses of each micro-batch, 0-dim, in the last stage; zeros in the others.
        """
        self._forward_step, self._number, self._seed = forward_step, number, seed
        self._micro_batches, self._scale = micro_batches, scale
        self._sums = [torch.zeros((), device=self.device) for _ in micro_batches]
        inputs, target, names = [], None, self.model.loss_names
        if self.is_first:
            tokens = [_model_arguments(forward_step, batch, number, names)[0] for batch in micro_batches]
            if len({rows.shape for rows in tokens}) > 1:
                raise UsageError("a pipeline needs samples of one length", "let the collate_fn pad all to the same")
            inputs = [torch.cat(tokens)]
        if self.is_last:
            target = torch.arange(len(micro_batches))  # `_loss` takes the number of a micro-batch
        with self.autocast():
            self.schedule.step(*inputs, target=target, losses=[], return_outputs=False)
        if self.data_group is not None:
            self._sum_over_pipelines()
        if (copy := self.tied) is not None and copy.grad is not None:
            # Last: a + b and b + a are equal to the last bit, so the two copies stay equal.
            self._add_gradient_of_the_other_end(local(copy.grad))
        return self._sums

    def clip(self, max_norm: float) -> Tensor:
        """Clips the gradient of the whole model to `max_norm`; returns the norm before clipping."""
        weights, copy = [each for each in self.model.parameters() if each.grad is not None], self.tied
        counted = [weight.grad for weight in weights if not (self.is_last and weight is copy)]
        own = norm_over_processes(counted) if counted else torch.zeros((), device=self.device)
        norms = [torch.empty_like(own) for _ in range(self.num_stages)]
        dist.all_gather(norms, own, group=self.group)  # not a sum: its order might differ between pipelines
        norm = torch.linalg.vector_norm(torch.stack(norms))
        clip([local(weight.grad) for weight in weights], norm, max_norm)
        return norm

    def gathered(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of all stages, one at a time, in the first stage; nothing in the others."""
        shapes: list[Any] = [None] * self.num_stages
        own_shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        dist.all_gather_object(shapes, own_shapes, self.group)
        stage_of = {name: stage for stage, own in enumerate(shapes) for name in own}
        for name, stage in stage_of.items():
            if self.index == stage == 0:
                yield name, tensors[name]
            elif self.index == stage:
                dist.send(whole(tensors[name]).detach().contiguous(), group_dst=0, group=self.group)
            elif self.is_first:
                shape, dtype = shapes[stage][name]
                received = torch.empty(shape, dtype=dtype, device=self.device)
                dist.recv(received, group_src=stage, group=self.group)
                yield name, received

    def _forward_one(self, forward: Callable[..., Any], index: int, *args: Any, **options: Any) -> Any:
        """The stage's forward pass for micro-batch `index`. The passes of several micro-batches alternate."""
        self._seed(index)
        try:
            return forward(index, *args, **options)
        except RuntimeError as error:
            if isinstance(error.__cause__, UsageError):  # torch wraps it
                raise error.__cause__ from None
            raise

    def _backward_one(self, backward: Callable[..., Any], index: int, *args: Any, **options: Any) -> Any:
        """The stage's backward pass for micro-batch `index`. Replicas of shards sum their gradients after the last."""
        if sum_over_replicas := getattr(self.stage, "set_requires_all_reduce", None):  # of FSDP2
            sum_over_replicas(index == len(self._micro_batches) - 1)
        return backward(index, *args, **options)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        number = int(target)
        batch = self._micro_batches[number]
        model = StandIn(lambda *args: _as_returned(self.model.losses(output, *args), self.model.loss_names))
        losses = self._forward_step(model, batch, self._number)["loss"]
        total = weighted_sum(losses, batch)
        self._sums[number] = total.detach()
        return total * self._scale

    def _add_gradient_of_the_other_end(self, gradient: Tensor) -> None:
        """Sums the gradients of the two copies of a tied embedding, in the first and in the last stage."""
        other, peer = torch.empty_like(gradient), self.num_stages - 1 if self.is_first else 0
        exchange = [
            dist.P2POp(dist.isend, gradient, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
        ]
        for request in dist.batch_isend_irecv(exchange):
            request.wait()
        gradient += other

    def _sum_over_pipelines(self) -> None:
        # Not DDP: its buckets do not support a separate backward pass for each micro-batch.
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        for request in [dist.all_reduce(gradient, group=self.data_group, async_op=True) for gradient in gradients]:
            request.wait()


class PipelineEngine(Engine):
    """Steps through a pipeline. Only its last stage has the losses."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that holds this process's stage."""
        assert isinstance(self.model, Pipeline)
        return self.model

    @property
    def module(self) -> nn.Module:
        return self.pipeline.model

    def step(self, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        max_norm = self.plan.config.max_grad_norm
        scale, weight = self._loss_scale(micro_batches)
        losses = self.pipeline.backward(self.forward_step, number, micro_batches, scale, partial(self._seed, number))
        grad_norm = self.pipeline.clip(max_norm or torch.inf) if max_norm or wants_norm else None
        if wants_norm and self.reached is not None:
            self.reached.look(number)
        seed_forward(self.plan.config.seed, number, UPDATE, self.accelerator.device)  # for an optimizer that draws
        step_if_finite(self._own_optimizer, grad_norm)
        for updated in self._updated_tensors():
            updated.grad = None
        if self.ema is not None:
            self.ema.update()
        return StepResult(losses, weight if self.pipeline.is_last else 0.0, grad_norm)

    def holders(self, name: str) -> Sequence[int]:
        everybody, layout = super().holders(name), self.plan.layout
        if name in self.pipeline.in_all_stages:
            return everybody
        consecutive = layout.sp * layout.tp  # processes of the same stage
        return tuple(rank for rank in everybody if rank // consecutive % layout.pp == self.pipeline.index)

    def _of_all_stages(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return self.pipeline.gathered(tensors)


PIPELINE = PipelineParallel()
