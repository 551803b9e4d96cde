"""Checkpoints and the exported model: safetensors and JSON, the same under every config."""

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.errors import UsageError
from common.plan import Plan
from common.step import Trainer


@dataclass
class Checkpoint:
    """A checkpoint found on disk; `step` optimizer steps were taken before it, `num_averaged` of them
    went into the averages of `--ema_decay`."""

    path: Path
    step: int
    num_averaged: int

    def load_weights(self, model: nn.Module) -> None:
        """Loads the weights into the bare module, before `prepare`. Raises UsageError for another model."""
        weights, own = load_file(self.path / "model.safetensors"), model.state_dict()
        if weights.keys() != own.keys():
            name = min(weights.keys() ^ own.keys())
            raise UsageError(f"{self.path} is of another model: only one of the two has {name}")
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape:
                raise UsageError(
                    f"{self.path} is of another model: {name} is {list(tensor.shape)} there, "
                    f"{list(own[name].shape)} here"
                )
        model.load_state_dict(weights)

    def load_optimizer(self, trainer: Trainer) -> None:
        """Loads the optimizer's state and the averages of the weights, after `prepare`."""
        slots = load_file(self.path / "optimizer.safetensors")
        states: dict[str, dict[str, Tensor]] = {}
        for key, tensor in slots.items():
            name, _, slot = key.rpartition(".")
            states.setdefault(name, {})[slot] = tensor
        optimizer = trainer.optimizer.optimizer
        # torch keeps the step count on the CPU unless the optimizer is fused or capturable.
        on_device = any(optimizer.defaults.get(kind) for kind in ("fused", "capturable"))
        for name, parameter in _parameters_and_buffers(trainer).items():
            if name in states:
                optimizer.state[parameter] = {
                    slot: tensor if slot == "step" and not on_device else _placed_like(parameter, tensor)
                    for slot, tensor in states[name].items()
                }
        if trainer.average is not None:
            averages = load_file(self.path / "average.safetensors")
            trainer.average.num_updates = self.num_averaged
            for name, parameter in _parameters_and_buffers(trainer).items():
                if name in averages:
                    trainer.average.averages[parameter] = _placed_like(parameter, averages[name])


def find_checkpoint(accelerator: Accelerator, plan: Plan) -> Checkpoint | None:
    """The checkpoint that `--resume_from_checkpoint` names; None for a fresh start.

    Raises:
        UsageError: no checkpoint at that path, or one of a run with another seed, batch size or data.
    """
    wanted = plan.config.resume_from_checkpoint
    if wanted is None:
        return None
    if wanted == "latest":
        found = _checkpoints(plan)
        if not found:
            accelerator.print(f"no checkpoint in {plan.config.output_dir}: a fresh start")
            return None
        path = found[-1]
    else:
        path = Path(wanted)
    if not (path / "state.json").exists():
        raise UsageError(f"--resume_from_checkpoint {wanted}: no checkpoint there; type latest or a path to one")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UsageError("resuming under DeepSpeed is not there yet: type --config_file accelerate_configs/ddp.yaml")
    state = json.loads((path / "state.json").read_text())
    for name, value in _identity(plan).items():
        if state["identity"][name] != value:
            raise UsageError(f"{path} was made with {name} {state['identity'][name]}, this run has {value}")
    return Checkpoint(path, state["step"], state["num_averaged"])


def save_checkpoint(trainer: Trainer, step: int) -> None:
    """Writes `checkpoints/step_<steps taken>`, aside first, and removes the oldest beyond `--keep_checkpoints`.

    The main process gathers and writes everything.
    """
    plan, accelerator = trainer.plan, trainer.accelerator
    folder = Path(plan.config.output_dir) / "checkpoints"
    files = {
        "model": full_weights(trainer),
        "optimizer": _gather(trainer, _optimizer_state(trainer)),
        "average": _gather(trainer, _averages(trainer)),
    }
    if accelerator.is_main_process:
        aside = folder / "unfinished"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for name, tensors in files.items():
            save_file(tensors, aside / f"{name}.safetensors")
        num_averaged = 0 if trainer.average is None else trainer.average.num_updates
        state = {"step": step + 1, "num_averaged": num_averaged, "identity": _identity(plan)}
        (aside / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        final = folder / f"step_{step + 1:08d}"
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        for old in _checkpoints(plan)[: -plan.config.keep_checkpoints]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def export_model(trainer: Trainer, folder: Path) -> None:
    """Writes the weights, float32, under the module's own names: `<folder>/model.safetensors`; and
    `config.json` of a transformers model, so that `from_pretrained(folder)` loads it."""
    weights = full_weights(trainer)
    if trainer.accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})  # transformers asks for it
        if hasattr(config := getattr(trainer.module, "config", None), "save_pretrained"):
            config.save_pretrained(folder)
    trainer.accelerator.wait_for_everyone()


def load_exported(output_dir: str | Path) -> dict[str, Tensor]:
    """{name: tensor} of the model that `export_model` wrote."""
    return load_file(Path(output_dir) / "model" / "model.safetensors")


def full_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and saved buffers, whole and on the CPU, in the main process.

    All processes must call it together; the others gather and get nothing.
    """
    return _gather(trainer, _parameters_and_buffers(trainer))


def _gather(trainer: Trainer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    gathered = {}
    if trainer.pipeline is not None:
        tensors = trainer.pipeline.gather(tensors)
    for name, tensor in tensors.items():
        tensor = _whole(trainer, tensor)
        if trainer.accelerator.is_main_process:
            # A copy of its own: safetensors takes no tensors that share memory, as tied weights do.
            gathered[name] = tensor.detach().cpu().contiguous().clone()
    return gathered


def _parameters_and_buffers(trainer: Trainer) -> dict[str, Tensor]:
    """What is saved of the module, as the optimizer knows it."""
    # Not named_parameters: after an evaluation FSDP2 shows gathered weights there, whose memory it
    # frees when it shards again, as it does before a state_dict.
    return trainer.module.state_dict(keep_vars=True)


def _whole(trainer: Trainer, tensor: Tensor) -> Tensor:
    if hasattr(tensor, "full_tensor"):  # DTensor, whose import takes 0.7 s
        return tensor.full_tensor()
    if trainer.uses_deepspeed and isinstance(tensor, nn.Parameter):
        import deepspeed

        if tensor.requires_grad:
            return deepspeed.utils.safe_get_full_fp32_param(tensor)
        with deepspeed.zero.GatheredParameters([tensor]):  # no float32 original is kept of a frozen one
            return tensor.detach().float().clone()
    return tensor


def _optimizer_state(trainer: Trainer) -> dict[str, Tensor]:
    """{"<name of the weight>.<slot>": tensor}"""
    state = trainer.optimizer.optimizer.state
    weights = _parameters_and_buffers(trainer).items()
    return {f"{name}.{slot}": value for name, weight in weights for slot, value in state.get(weight, {}).items()}


def _averages(trainer: Trainer) -> dict[str, Tensor]:
    averages = {} if trainer.average is None else trainer.average.averages
    weights = _parameters_and_buffers(trainer).items()
    return {name: averages[weight] for name, weight in weights if weight in averages}


def _placed_like(parameter: Tensor, value: Tensor) -> Tensor:
    """What this process holds of `value`, which is whole, if it is divided as `parameter` is."""
    if not hasattr(parameter, "placements") or value.shape != parameter.shape:
        return value.to(parameter.device)
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    local = value
    # From the last dimension of the mesh to the first, as tensor parallelism divided before FSDP2 did;
    # torch's distribute_tensor cannot do that for one dimension that both divided.
    for dimension in reversed(range(mesh.ndim)):
        if placements[dimension].is_shard() or hasattr(placements[dimension], "split_factor"):
            along, index = placements[dimension].dim, mesh.get_local_rank(dimension)
            chunks = local.chunk(mesh.size(dimension), along)
            local = chunks[index] if index < len(chunks) else local.narrow(along, 0, 0)
    local = local.contiguous().to(parameter.device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


def _checkpoints(plan: Plan) -> list[Path]:
    folder = Path(plan.config.output_dir) / "checkpoints"
    return sorted(path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name))


def _identity(plan: Plan) -> dict[str, Any]:
    """What must be the same for a run to go on as itself."""
    config = asdict(plan.config)
    return {name: config[name] for name in ("seed", "batch_size", "data", "ema_decay")} | {
        "num_samples": plan.num_samples
    }
