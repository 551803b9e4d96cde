"""The sums of the optimizer steps since the last training record."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import DriftError
from ..step.engine import Engine, StepResult
from .output_dir import checkpoints

TOTAL_WEIGHT = "weight of the samples"  # a key next to the names of metrics


@dataclass
class RunningSums:
    """The steps since the last training record. Checkpoints hold their sums."""

    num_taken: int = 0  # optimizer steps
    seconds: float = 0.0  # their training time
    losses: list[Tensor] = field(default_factory=list)  # as in StepResult, of all these steps
    weights: list[Tensor | float] = field(default_factory=list)  # for each step, the sum for this process's samples
    metrics: list[dict[str, Tensor]] = field(default_factory=list)  # for each micro-batch, times the weights
    earlier: dict[str, float] = field(default_factory=dict)  # the sums of the steps before a resume, over all processes

    def add(self, result: StepResult) -> None:
        """Adds an optimizer step, without its time."""
        self.num_taken += 1
        self.losses += result.losses
        self.weights.append(result.weight)
        self.metrics += result.metrics

    def sums(self, engine: Engine, step: int) -> dict[str, float]:
        """{metric: its sum over the samples of all processes}, with the sum of their weights, after `step` steps of
        this engine. A collective.

        In float64 a sum of float32 numbers is usually exact: it does not depend on how the samples were divided. Raises
        DriftError if processes that hold the same weights no longer agree."""
        accelerator, layout, device = engine.accelerator, engine.plan.layout, engine.device
        own = {TOTAL_WEIGHT: _total(self.weights, device), "loss": _total(self.losses, device)}
        for name in dict.fromkeys(name for values in self.metrics for name in values):
            own[name] = _total([values[name] for values in self.metrics if name in values], device)
        zero = _total([], device)
        names = [*dict.fromkeys([*own, *self.earlier])]
        bits, values = engine.replicas.bits(), torch.stack([own.get(name, zero) for name in names])
        found = engine.replicas.rows(bits).flatten(), engine.trained.has_moved(bits)[None]
        *totals, num_moved = accelerator.reduce(torch.cat([values, *found]), "sum").tolist()
        engine.trained.note_record(num_moved, step)
        if (difference := engine.replicas.drift(totals[len(names) :], step)) is not None:
            agreed = engine.replicas.agreed
            earlier = [path for number, path in checkpoints(engine.plan.config.output_dir) if number <= agreed]
            advice = f"; use --resume_from_checkpoint {earlier[-1]} to continue from there" if earlier else ""
            raise DriftError(f"after step {step} {difference}{advice}")
        # The processes that count a sample: of a pipeline, the last stage.
        copies = layout.model_parallel_size // layout.pp
        return {name: total / copies + self.earlier.get(name, 0.0) for name, total in zip(names, totals)}

    def state_dict(self, engine: Engine, step: int) -> dict[str, Any]:
        """For JSON, the same in all processes. A collective; raises DriftError like `sums`."""
        sums = self.sums(engine, step) if self.num_taken else {}
        return {"num_taken": self.num_taken, "seconds": self.seconds, "sums": sums}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Restores the result of `state_dict`, under any layout."""
        self.num_taken, self.seconds, self.earlier = content["num_taken"], content["seconds"], content["sums"]


def _total(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """The sum in float64, of numbers or of tensors of one shape."""
    if values and isinstance(values[0], Tensor):
        return torch.stack(values).double().sum()  # type: ignore[arg-type]  # all are
    return torch.tensor(sum(values), dtype=torch.float64, device=device)
