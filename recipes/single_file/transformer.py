"""Train a small language model, a Llama of 0.8 M weights, on Accelerate alone: one file to copy and change.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/single_file/transformer.py

The config file says on how many processes the script runs and what they share; the result is that of one process. Six
rules make it so. People get them wrong, so each is marked where it stands.

Data: the first megabyte of the source code of Python's standard library. Tokens are bytes.
Expect: a perplexity of 4.1 after a few minutes on two CPU cores; the losses of recipes/transformer.py to 1e-5, also
after `--resume_from_checkpoint`. With `--output_dir`, AutoModelForCausalLM.from_pretrained reads the trained model.
Verified on CPU processes, not on GPUs, under single.yaml, ddp.yaml, fsdp2.yaml and deepspeed_zero2.yaml.
"""

import argparse
import math
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group forever
from accelerate import Accelerator, DistributedType, PartialState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 64  # tokens per sample
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
IGNORED = -100  # the label of padding


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The training set, and the last tenth of the text for evaluation; samples are (tokens, labels)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)[:1_000_000]
    tokens = torch.tensor(list(text.encode()))
    start = len(tokens) * 9 // 10
    num_full = (start - 1) // CONTEXT  # training leaves out a last block that is not full
    return blocks(tokens[: num_full * CONTEXT + 1]), blocks(tokens[start:])


def blocks(tokens: Tensor) -> TensorDataset:
    """Blocks of a text: tokens and, as their labels, the tokens that follow them, each of shape (CONTEXT,)."""
    padding = 0, -(len(tokens) - 1) % CONTEXT
    labels = F.pad(tokens[1:], padding, value=IGNORED)
    return TensorDataset(F.pad(tokens[:-1], padding).view(-1, CONTEXT), labels.view(-1, CONTEXT))


def make_model() -> LlamaForCausalLM:
    """A Llama. Its `_no_split_modules` names the layers that FSDP gathers one at a time."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **sizes, **special))


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; gains of norms and embeddings do not."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    decaying = [weight for weight in model.parameters() if weight.ndim >= 2 and weight not in embeddings]
    others = [weight for weight in model.parameters() if weight.ndim < 2 or weight in embeddings]
    return [{"params": decaying, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def start(args: argparse.Namespace) -> Accelerator:
    """Joins the other processes. Without a GPU for each, they rehearse the run on the CPU."""
    kinds = DistributedType.FSDP, DistributedType.DEEPSPEED
    asked = next((kind for kind in kinds if os.environ.get(f"ACCELERATE_USE_{kind.value}") == "true"), None)
    on_cpu = torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if on_cpu:
        os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    if on_cpu and asked:
        # Left alone, Accelerate runs DDP instead of FSDP on a CPU, and DeepSpeed on a backend that does not exist.
        PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=on_cpu and not asked)
    got = accelerator.distributed_type
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1)) or asked not in (None, got):
        raise SystemExit(f"Accelerate runs {got} on {accelerator.num_processes} processes, not what the config says")
    accelerator.gradient_accumulation_steps = args.accumulation
    if asked == DistributedType.DEEPSPEED:
        accelerator.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": args.micro_batch_size,
            "gradient_accumulation_steps": args.accumulation,
            "gradient_clipping": MAX_GRAD_NORM,  # DeepSpeed clips by itself: see rule 5
        }
    return accelerator


def sample_ids(num_samples: int, args: argparse.Namespace) -> Tensor:
    """The samples of each step, shape (max_steps, batch_size)."""
    # Rule 1 of 6: they depend on the seed and the step alone. Each epoch has its own order, without a smaller batch.
    steps_per_epoch, ids = num_samples // args.batch_size, []
    for epoch in range(args.max_steps // steps_per_epoch + 1):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
        ids.append(torch.randperm(num_samples, generator=generator)[: steps_per_epoch * args.batch_size])
    return torch.cat(ids).view(-1, args.batch_size)[: args.max_steps]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """A linear rise over `--warmup_steps`, then a fall along a cosine."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / (args.warmup_steps + 1)
    progress = (step - args.warmup_steps) / (args.max_steps - args.warmup_steps)
    return args.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def token_losses(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The loss of each token, of the shape of the labels; 0 for padding."""
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def train(
    args: argparse.Namespace, accelerator: Accelerator, train_set: TensorDataset, eval_set: TensorDataset
) -> None:
    """Trains, evaluates and saves; each process runs this."""
    torch.manual_seed(args.seed)  # all processes start with the same weights
    model = make_model()
    optimizer = torch.optim.AdamW(parameter_groups(model), betas=(0.9, 0.99))
    model, optimizer = accelerator.prepare(model, optimizer)
    first_step = 0
    if args.resume_from_checkpoint is not None:
        accelerator.load_state(args.resume_from_checkpoint)
        accelerator.step = 0  # counts micro-batches, of which a step may have another number now
        first_step = int(args.resume_from_checkpoint.name.removeprefix("step_"))
    # Rule 2 of 6: of the micro-batches of a step, each process takes every num_processes-th.
    shape = args.max_steps, args.accumulation, accelerator.num_processes, args.micro_batch_size
    own_ids = sample_ids(len(train_set), args).view(shape)[:, :, accelerator.process_index]
    for step in range(first_step, args.max_steps):
        micro_batches = [[part.to(accelerator.device) for part in train_set[ids]] for ids in own_ids[step]]
        # Rule 3 of 6: the learning rate depends on the step alone. A prepared scheduler advances num_processes times.
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        # Rule 4 of 6: the loss is the mean over all tokens of the batch. Micro-batches may hold padding, so that the
        # mean of their means would not do.
        num_tokens = accelerator.reduce(sum((labels != IGNORED).sum() for _, labels in micro_batches), "sum")
        total = torch.zeros((), device=accelerator.device)
        for tokens, labels in micro_batches:
            with accelerator.accumulate(model):
                loss = token_losses(model, tokens, labels).sum() / num_tokens
                # `backward` divides by the number of micro-batches, DDP by that of processes.
                accelerator.backward(loss * (args.accumulation * accelerator.num_processes))
                # Rule 5 of 6: clip to the norm of the whole gradient, once a step. DeepSpeed ignores this line: it
                # clips by itself, at 1 unless its config says otherwise. On a CPU, torch adds up the norm in float32:
                # it is off by 1e-5 for a tensor of a million weights, by 1e-3 for 30 million.
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        accelerator.print(f"step {step + 1}  loss {accelerator.reduce(total, 'sum').item():.7f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            accelerator.save_state(args.output_dir / f"step_{step + 1}")
    evaluate(accelerator, model, accelerator.prepare(DataLoader(eval_set, args.micro_batch_size)))
    if args.output_dir is not None:
        state = accelerator.get_state_dict(model)  # from all processes
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=state)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> None:
    """Prints the loss and perplexity over all tokens."""
    model.eval()
    parts = []
    for tokens, labels in loader:
        values = token_losses(model, tokens, labels).sum(1), (labels != IGNORED).sum(1)
        # Rule 6 of 6: each sample counts once. A prepared loader repeats samples until all processes have equally many
        # batches; gather_for_metrics leaves the repeated ones out, gather keeps them.
        parts.append(accelerator.gather_for_metrics(torch.stack(values, dim=1)))
    loss, num_tokens = torch.cat(parts).sum(0).tolist()
    accelerator.print(f"evaluation  loss {loss / num_tokens:.7f}  perplexity {math.exp(loss / num_tokens):.7f}")


def main() -> None:
    train_set, eval_set = load_data()
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=12, help="samples per optimizer step, over all processes")
    parser.add_argument("--micro_batch_size", type=int, help="samples per forward pass per process; default: all")
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="at its peak, after --warmup_steps")
    parser.add_argument("--warmup_steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, help="for checkpoints and the model; default: keep none")
    parser.add_argument("--save_every", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--resume_from_checkpoint", type=Path, help="such as OUTPUT_DIR/step_1000")
    args, num_processes = parser.parse_args(), int(os.environ.get("WORLD_SIZE", 1))
    # Rule 2 of 6: processes and accumulation only divide the batch of a step. Accumulation follows from the sizes.
    args.micro_batch_size = args.micro_batch_size or max(1, args.batch_size // num_processes)
    args.accumulation, rest = divmod(args.batch_size, num_processes * args.micro_batch_size)
    if rest or args.accumulation < 1 or args.batch_size > len(train_set):
        factors = f"{num_processes} processes x --micro_batch_size {args.micro_batch_size}"
        parser.error(f"--batch_size {args.batch_size}: use a multiple of {factors}, at most {len(train_set)}")
    if args.save_every and args.output_dir is None:
        parser.error("--save_every needs --output_dir")
    checkpoint = args.resume_from_checkpoint
    if checkpoint is not None and not (checkpoint.is_dir() and checkpoint.name.startswith("step_")):
        parser.error(f"--resume_from_checkpoint {checkpoint}: use the path of a checkpoint, OUTPUT_DIR/step_N")
    accelerator = start(args)
    train(args, accelerator, train_set, eval_set)
    accelerator.free_memory()  # the accelerator holds the model, and the model gloo's threads
    accelerator.end_training()


if __name__ == "__main__":
    main()
