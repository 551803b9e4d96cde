"""Optimizer steps of a single process, DDP, FSDP2 and tensor parallelism."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
        self._weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
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
            with nullcontext() if is_last else self._no_sync():
                loss = self._loss_sum(batch)
                gradient = scale.to(loss)  # backward(loss * scale) takes one operation more
                if accelerator.scaler is None:
                    loss.backward(gradient=gradient)  # accelerator.backward adds a division by 1
                else:
                    accelerator.backward(loss, gradient=gradient)
            losses.append(loss.detach())
        grad_norm = self._clip(max_norm) if max_norm or wants_norm else None
        # Without a loss scaler, Accelerate's wrapper only adds time to a step.
        inner = optimizer if accelerator.scaler is not None else optimizer.optimizer
        inner.step()
        inner.zero_grad()
        skipped = accelerator.scaler is not None and optimizer.step_was_skipped
        return StepResult(losses, weight, grad_norm, skipped)

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Accumulates gradients in each process, without a sum over processes."""
        # FSDP2 has this method. Accelerate calls it too, but not under tensor parallelism.
        synchronize = getattr(self.model, "set_requires_gradient_sync", None)
        if synchronize is None:
            with self.accelerator.no_sync(self.model):
                yield
        else:
            synchronize(False)
            yield
            synchronize(True)

    def _loss_sum(self, batch: Batch) -> Tensor:
        loss = self.forward_step(self.model, batch)["loss"]
        if self._waits_for_all_weights:
            check_all_used(self.module, loss, self.accelerator.process_index)
        return weighted_sum(loss, batch)

    def _clip(self, max_norm: float) -> Tensor:
        """Clips the gradient of the whole model to `max_norm`, unless that is 0; returns the norm before clipping."""
        self.accelerator.unscale_gradients(self.optimizer)
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        # One norm per device mesh, then the norm of those norms.
        by_mesh: dict[object, list[Tensor]] = {}
        for gradient in gradients:
            by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
        norms = [nn.utils.get_total_norm(group) for group in by_mesh.values()]
        norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        norm = nn.utils.get_total_norm(norms) if len(norms) > 1 else norms[0]
        if max_norm:
            local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
            torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # as clip_grad_norm_ does
        return norm
