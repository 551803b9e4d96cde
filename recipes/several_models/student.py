"""Train a small classifier on the predictions of a large one: knowledge distillation (Hinton et al. 2015).

    python recipes/several_models/student.py --width 256 --output_dir outputs/teacher
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/several_models/student.py \
        --teacher outputs/teacher --output_dir outputs/student

Each process has the whole teacher, which a closure captures: it is not part of the model, so no config wraps, shards or
saves it. To resume, pass --teacher again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accelerate_recipes import RunConfig, fit, flag, load_exported, run, start
from accelerate_recipes.common.data import Batch, ForwardStep
from accelerate_recipes.common.tasks.vision.images import load_images


@dataclass(kw_only=True)
class Config(RunConfig):
    data: str = "digits"
    epochs: int = 20
    learning_rate: float = 3e-3
    width: int = flag(16, "width of the hidden layer", minimum=1)
    teacher: str = flag("", "output_dir of the run that trained the teacher; without one, train on the labels alone")
    temperature: float = flag(2.0, "of both predictions in the loss: more than 1 shows the teacher's doubts", above=0)


class Net(nn.Module):
    _no_split_modules = ["Linear"]

    def __init__(self, width: int):
        super().__init__()
        self.hidden = nn.Linear(64, width)
        self.head = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(F.gelu(self.hidden(image.flatten(1))))


def load_teacher(output_dir: str, device: torch.device) -> Net:
    weights = load_exported(output_dir)
    teacher = Net(width=len(weights["hidden.weight"]))
    teacher.load_state_dict(weights)
    return teacher.to(device).eval().requires_grad_(False)


def from_labels(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits = model(batch["image"])
    return {
        "loss": F.cross_entropy(logits, batch["label"], reduction="none"),
        "accuracy": (logits.argmax(-1) == batch["label"]).float(),
    }


def from_teacher(teacher: Net, temperature: float) -> ForwardStep:
    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, wanted = model(batch["image"]), teacher(batch["image"])
        predicted, wanted = (F.log_softmax(values / temperature, -1) for values in (logits, wanted))
        divergence = F.kl_div(predicted, wanted, log_target=True, reduction="none").sum(-1)
        return {
            "loss": temperature**2 * divergence + F.cross_entropy(logits, batch["label"], reduction="none"),
            "accuracy": (logits.argmax(-1) == batch["label"]).float(),
            "agreement": (predicted.argmax(-1) == wanted.argmax(-1)).float(),
        }

    return forward_step


def main(config: Config) -> None:
    accelerator = start(config)
    train_set, eval_set = load_images(config.data)
    model = Net(config.width)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate)
    forward_step: ForwardStep = from_labels
    if config.teacher:
        forward_step = from_teacher(load_teacher(config.teacher, accelerator.device), config.temperature)
    fit(accelerator, model, optimizer, forward_step, train_set, eval_set, config)


if __name__ == "__main__":
    run(main, Config)
