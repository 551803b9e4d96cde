"""Optimizer steps of a single process, DDP, FSDP2 and tensor parallelism."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.data.batches import Batch
from common.parallel.guards import check_all_used
from common.parallel.trainer import StepResult, Trainer, weighted_sum


class AccelerateTrainer(Trainer):
    """Steps with the model and optimizer that Accelerate prepared."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._waits_for_all_weights = (
            isinstance(self.model, DistributedDataParallel) or self.accelerator.distributed_type == DistributedType.FSDP
        )

    @property
    def module(self) -> nn.Module:
        # Not accelerator.unwrap_model: it imports deepspeed if installed, which takes seconds.
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def _step(self, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        accelerator, optimizer, max_norm = self.accelerator, self.optimizer, self.plan.config.max_grad_norm
        scale, weight = self._loss_scale(micro_batches)
        losses = []
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with nullcontext() if is_last else accelerator.no_sync(self.model):
                loss = self._loss_sum(batch)
                accelerator.backward(loss, gradient=scale.to(loss))  # backward(loss * scale) takes one operation more
            losses.append(loss.detach())
        grad_norm = self._clip(max_norm or torch.inf) if max_norm or wants_norm else None
        # Without a loss scaler, Accelerate's wrapper only adds time to a step.
        inner = optimizer if accelerator.scaler is not None else optimizer.optimizer
        inner.step()
        inner.zero_grad()
        skipped = accelerator.scaler is not None and optimizer.step_was_skipped
        return StepResult(losses, weight, grad_norm, skipped)

    def _loss_sum(self, batch: Batch) -> Tensor:
        loss = self.forward_step(self.model, batch)["loss"]
        if self._waits_for_all_weights:
            check_all_used(self.module, loss, self.accelerator.process_index)
        return weighted_sum(loss, batch)

    def _clip(self, max_norm: float) -> Tensor:
        """Clips the gradient of the whole model to `max_norm`; returns the norm before clipping."""
        self.accelerator.unscale_gradients(self.optimizer)
        parameters = [weight for weight in self.model.parameters() if weight.grad is not None]
        if not any(hasattr(weight, "device_mesh") for weight in parameters):
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        # One norm per device mesh, then the norm of those norms.
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        groups: dict[object, list[Tensor]] = {}
        for gradient in gradients:
            groups.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
        norms = [nn.utils.get_total_norm(group) for group in groups.values()]
        norm = nn.utils.get_total_norm([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms])
        local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # as clip_grad_norm_ does
        return norm
