"""A recipe that writes how much memory each process takes from before the load of its model to the first step, at
most, and how much of the model it then holds, in bytes. Mapped files do not count."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.pipelining  # its import takes memory
from torch import Tensor, nn
from transformers import LlamaForCausalLM  # noqa: F401  # so does this one

from accelerate_recipes import RunConfig, fit, parameter_groups, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.parallel.absent import Absent
from accelerate_recipes.common.tasks.models.causal_lm import load_pretrained, with_losses
from accelerate_recipes.common.tasks.nlp.text import TokenDataset


@dataclass(kw_only=True)
class Config(RunConfig):
    max_steps: int | None = 2
    batch_size: int = 4
    micro_batch_size: int | None = 1
    check_steps: int = 0
    model: str = ""


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    return int(status.split()[0]) * 1024


def main(config: Config) -> None:
    accelerator = start(config)
    load_pretrained(f"{config.model}_small", 8, "sdpa")  # what the first load takes once
    before, peak, is_done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.001)

    threading.Thread(target=watch, daemon=True).start()
    model = with_losses(load_pretrained(config.model, 8, "sdpa")[0])
    optimizer = torch.optim.SGD(parameter_groups(model, 0.0), 0.01)

    def forward_step(given: nn.Module, batch: Batch) -> dict[str, Tensor]:
        if accelerator.num_processes > 1 and not is_done.is_set():  # not a rehearsal of stages
            is_done.set()
            here = [weight for weight in model.parameters() if not isinstance(weight, Absent)]
            weights = {id(weight): getattr(weight, "_local_tensor", weight).nbytes for weight in here}
            text = f"{peak[0] - before} {sum(weights.values())}"
            (config.output_dir / f"loaded_{accelerator.process_index}.txt").write_text(text)
        return {"loss": given(batch["tokens"], batch["labels"])}

    tokens = TokenDataset(torch.arange(200) % 5, 8, drop_last=True)
    fit(accelerator, model, optimizer, forward_step, tokens, tokens, config)


if __name__ == "__main__":
    run(main, Config)
