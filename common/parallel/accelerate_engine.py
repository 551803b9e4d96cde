"""Optimizer steps of a single process, DDP, FSDP2 and tensor parallelism."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.batches import Batch
from ..norms import clip
from .engine import Engine, StepResult
from .parts import local, norm_over_processes


class AccelerateEngine(Engine):
    """Steps with the model and optimizer that Accelerate prepared."""

    @property
    def module(self) -> nn.Module:
        # Not accelerator.unwrap_model: it imports deepspeed if installed, which takes seconds.
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def _step(self, number: int, micro_batches: Sequence[Batch], wants_norm: bool) -> StepResult:
        accelerator, optimizer, max_norm = self.accelerator, self.optimizer, self.plan.config.max_grad_norm
        scale, weight = self._loss_scale(micro_batches)
        losses, metrics = [], []
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with nullcontext() if is_last else self._no_sync():
                loss, others = self._forward(number, index, batch)
                gradient = scale.to(loss)  # backward(loss * scale) takes one operation more
                if accelerator.scaler is None:
                    loss.backward(gradient=gradient)  # accelerator.backward adds a division by 1
                else:
                    accelerator.backward(loss, gradient=gradient)
            losses.append(loss.detach())
            metrics.append(others)
        grad_norm = self._clip(max_norm) if max_norm or wants_norm else None
        # Without a loss scaler, Accelerate's wrapper only adds time to a step.
        inner = optimizer if accelerator.scaler is not None else optimizer.optimizer
        self._seed_update(number)
        inner.step()
        for parameter in self._updated_tensors():  # as zero_grad, in a fifth of the time
            parameter.grad = None
        skipped = accelerator.scaler is not None and optimizer.step_was_skipped
        return StepResult(losses, weight, grad_norm, skipped, metrics)

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Accumulates gradients in each process, without a sum over the replicas of the model.

        FSDP2 nevertheless sums those of each micro-batch over its shards: otherwise every process would hold the
        gradients of the whole model."""
        sum_over_replicas = getattr(self.model, "set_requires_all_reduce", None)  # of FSDP2
        if sum_over_replicas is None:
            with self.accelerator.no_sync(self.model):
                yield
        else:
            sum_over_replicas(False)
            yield
            sum_over_replicas(True)

    def _clip(self, max_norm: float) -> Tensor:
        """Clips the gradient of the whole model to `max_norm`, unless that is 0; returns the norm before clipping.

        Like torch's `clip_grad_norm_`, but accurate for large weights, and for several device meshes.
        """
        self.accelerator.unscale_gradients(self.optimizer)
        gradients = [weight.grad for weight in self._updated_tensors() if weight.grad is not None]
        norm = norm_over_processes(gradients)
        if max_norm:
            clip([local(gradient) for gradient in gradients], norm, max_norm)
        return norm
