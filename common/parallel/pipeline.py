"""Pipeline parallelism: each process holds a stage, a part of the chain of layers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch import distributed as dist

from common.data.batches import Batch, ForwardStep
from common.errors import UsageError
from common.parallel.trainer import StepResult, Trainer, weighted_sum
from common.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Absent(nn.Module):
    """In the place of a layer that another stage holds, so that the names of the others stay."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class Stage(nn.Module):
    """A causal model of transformers of which this process runs some layers.

    Takes tokens, int64 of shape (batch, context), in the first stage and hidden states, (batch,
    context, hidden), in the others; returns logits, (batch, context, vocabulary), from the last one
    and hidden states from the others.
    """

    def __init__(self, model: "PreTrainedModel", is_first: bool, is_last: bool):
        super().__init__()
        self.model, self.is_first, self.is_last = model, is_first, is_last

    def forward(self, given: Tensor) -> Tensor:
        argument = "input_ids" if self.is_first else "inputs_embeds"
        hidden = self.model.base_model(**{argument: given}, use_cache=False).last_hidden_state
        return self.model.get_output_embeddings()(hidden) if self.is_last else hidden


def layer_bounds(sizes: Sequence[int], before: int, after: int, num_stages: int) -> list[int]:
    """Where to cut a chain of layers, so that the largest stage is as small as can be.

    Args:
        sizes: of the layers, such as their numbers of weights, or all 1 to count layers.
        before: size of what comes before them, in the first stage.
        after: size of what comes after them, in the last stage.
        num_stages: at most the number of layers.

    Returns:
        num_stages + 1 indices: stage s holds layers bounds[s] to bounds[s + 1] - 1.
    """
    num_layers = len(sizes)
    # best[s][i]: the smallest possible largest stage, if s stages hold the first i layers; cut[s][i]: where the last
    # of them begins.
    best = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0
    for stage in range(1, num_stages + 1):
        extra = before * (stage == 1) + after * (stage == num_stages)
        for end in range(stage, num_layers + 1):
            for start in range(stage - 1, end):
                largest = max(best[stage - 1][start], sum(sizes[start:end]) + extra)
                if largest < best[stage][end]:
                    best[stage][end], cut[stage][end] = largest, start
    bounds = [num_layers]
    for stage in range(num_stages, 0, -1):
        bounds.append(cut[stage][bounds[-1]])
    return bounds[::-1]


def check_pipeline(model: nn.Module, num_stages: int) -> None:
    """Raises UsageError unless it is a model of transformers with a plan for pipelines and a layer for each stage."""
    base: Any = getattr(model, "base_model", None)
    if not getattr(getattr(model, "config", None), "base_model_pp_plan", None) or not hasattr(base, "layers"):
        raise UsageError(
            f"{type(model).__name__} cannot be cut into stages: remove --pipeline_stages, or take a model of "
            "transformers with a plan for pipelines and a list of layers, as recipes/transformer.py does"
        )
    if len(base.layers) < num_stages:
        raise UsageError(
            f"{len(base.layers)} layers are fewer than --pipeline_stages {num_stages}: type --pipeline_stages "
            f"{len(base.layers)} or less"
        )


def keep_stage(model: "PreTrainedModel", index: int, num_stages: int, by: str) -> None:
    """Removes from a model of transformers the layers of the other stages; `by` "layers" or "parameters"
    are the stages of one size."""
    base = model.base_model
    num_layers = len(base.layers)
    sizes, before, after = [1] * num_layers, 0, 0
    if by == "parameters":
        sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in base.layers]
        before, after = base.embed_tokens.weight.numel(), model.get_output_embeddings().weight.numel()
    bounds = layer_bounds(sizes, before, after, num_stages)
    for layer in range(num_layers):
        if not bounds[index] <= layer < bounds[index + 1]:
            base.layers[layer] = Absent()
    if index > 0:
        base.embed_tokens = Absent()
    if index < num_stages - 1:
        base.norm = Absent()
        model.lm_head = Absent()


def _model_arguments(forward_step: ForwardStep, batch: Batch) -> tuple[Any, ...]:
    """The arguments with which `forward_step` calls the model. A stand-in notes them and returns zeros as losses."""
    noted: list[tuple[Any, ...]] = []

    def stand_in(*args: Any) -> Tensor:
        noted.append(args)
        return torch.zeros(len(args[0]), device=args[0].device)

    with torch.no_grad():
        forward_step(stand_in, batch)
    assert noted, "forward_step did not call the model"
    return noted[0]


class Pipeline(nn.Module):
    """The stage of this process, and the way through all of them.

    Called like the model, it gives in all processes of the pipeline what the model would, forward
    only. Training goes through `backward` and `clip`.

    Args:
        accelerator: from `start(config)`.
        model: of transformers, as `with_losses` makes it, whole; what other stages hold is removed from it.
        optimizer: over its parameters; those of other stages are removed.
        plan: of the run.

    Raises:
        UsageError: the model cannot be cut into so many stages.
    """

    def __init__(
        self, accelerator: Accelerator, model: "PreTrainedModel", optimizer: torch.optim.Optimizer, plan: Plan
    ):
        super().__init__()
        # Here, because the imports take a second.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        config, self.device = plan.config, accelerator.device
        self.num_stages = config.pipeline_stages
        mesh = init_device_mesh(
            self.device.type, (plan.data_parallel_size, self.num_stages), mesh_dim_names=("data", "pipe")
        )
        self.group, self.index = mesh.get_group("pipe"), mesh.get_local_rank("pipe")
        self.is_first, self.is_last = self.index == 0, self.index == self.num_stages - 1
        check_pipeline(model, self.num_stages)
        embedding = model.get_input_embeddings().weight
        is_tied = model.get_output_embeddings().weight is embedding
        self.tied = embedding if is_tied and (self.is_first or self.is_last) else None
        keep_stage(model, self.index, self.num_stages, config.pipeline_split)
        self.model, self.autocast = model.to(self.device), accelerator.autocast
        kept = set(model.parameters())
        for group in optimizer.param_groups:
            group["params"] = [weight for weight in group["params"] if weight in kept]
        self.stage = Stage(model, self.is_first, self.is_last)
        self.data_group = mesh.get_group("data") if plan.data_parallel_size > 1 else None
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[config.pipeline_schedule]
        stage = PipelineStage(self.stage, self.index, self.num_stages, self.device, group=self.group)
        self.schedule = schedule(stage, plan.accumulation, loss_fn=self._loss, scale_grads=False)

    def forward(self, *args: Tensor) -> Tensor:
        """What the model gives for these arguments, without a graph."""
        with torch.no_grad(), self.autocast():
            given = args[0]
            if not self.is_first:
                given = torch.empty(*given.shape, self.model.config.hidden_size, device=self.device)
                dist.recv(given, group_src=self.index - 1, group=self.group)
            output = self.stage(given)
            if not self.is_last:
                dist.send(output.float().contiguous(), group_dst=self.index + 1, group=self.group)
            result = self.model.losses(output, *args) if self.is_last else torch.empty(len(args[0]), device=self.device)
        dist.broadcast(result, group_src=self.num_stages - 1, group=self.group)
        return result

    def backward(self, forward_step: ForwardStep, micro_batches: Sequence[Batch], scale: Tensor) -> list[Tensor]:
        """Accumulates the gradient of scale × the summed losses.

        Returns:
            The sum of the losses of each micro-batch, 0-dim, in the last stage; zeros in the others.
        """
        self._forward_step, self._micro_batches, self._scale = forward_step, micro_batches, scale
        self._sums = [torch.zeros((), device=self.device) for _ in micro_batches]
        inputs, target = [], None
        if self.is_first:
            inputs = [torch.cat([_model_arguments(forward_step, batch)[0] for batch in micro_batches])]
        if self.is_last:
            target = torch.arange(len(micro_batches))  # each micro-batch's number, as _loss takes it
        with self.autocast():
            self.schedule.step(*inputs, target=target, losses=[], return_outputs=False)
        if self.tied is not None:
            self._add_gradient_of_the_other_end(self.tied.grad)
        if self.data_group is not None:
            self._average_over_pipelines()
        return self._sums

    def clip(self, max_norm: float) -> Tensor:
        """Clips to the norm of the gradient of the whole model, and returns that norm."""
        weights = [weight for weight in self.model.parameters() if weight.grad is not None]
        counted = [weight.grad for weight in weights if not (self.is_last and weight is self.tied)]
        square = nn.utils.get_total_norm(counted).square()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
        return norm

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of all stages, on the CPU, in the first one."""
        parts: list[Any] | None = [None] * self.num_stages if self.is_first else None
        here = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        dist.gather_object(here, parts, group_dst=0, group=self.group)
        return {name: tensor for part in parts or [] for name, tensor in part.items()}

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        number = int(target)
        batch = self._micro_batches[number]
        losses = self._forward_step(lambda *args: self.model.losses(output, *args), batch)["loss"]
        total = weighted_sum(losses, batch)
        self._sums[number] = total.detach()
        return total * self._scale

    def _add_gradient_of_the_other_end(self, gradient: Tensor) -> None:
        """First and last stage hold a copy each of a tied embedding, whose gradient is the sum of both."""
        other, peer = torch.empty_like(gradient), self.num_stages - 1 if self.is_first else 0
        exchange = [
            dist.P2POp(dist.isend, gradient, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
        ]
        for request in dist.batch_isend_irecv(exchange):
            request.wait()
        gradient += other

    def _average_over_pipelines(self) -> None:
        # Not DDP: its buckets do not bear that each micro-batch has a backward pass of its own.
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        for request in [dist.all_reduce(gradient, group=self.data_group, async_op=True) for gradient in gradients]:
            request.wait()
        torch._foreach_div_(gradients, dist.get_world_size(self.data_group))


class PipelineTrainer(Trainer):
    """Steps through a pipeline, whose last stage knows the losses."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline, of which this process is a stage."""
        assert isinstance(self.model, Pipeline)
        return self.model

    @property
    def module(self) -> nn.Module:
        return self.pipeline.model

    def _step(self, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        max_norm = self.plan.config.max_grad_norm
        scale, weight = self._loss_scale(micro_batches)
        losses = self.pipeline.backward(self.forward_step, micro_batches, scale)
        grad_norm = self.pipeline.clip(max_norm or torch.inf) if max_norm or wants_norm else None
        self.optimizer.optimizer.step()
        self.optimizer.optimizer.zero_grad()
        return StepResult(losses, weight if self.pipeline.is_last else 0.0, grad_norm)

    def _tensors_to_export(self) -> dict[str, Tensor]:
        return self.pipeline.gather(self.saved_tensors())
