"""Memory and time of a step with all logits in memory, and with those of some tokens at a time.

    python benchmarks/loss_memory.py

Each cell is a process of its own: a causal model of two small layers and a large vocabulary, a forward and a backward
pass. Memory is the growth of the process's peak resident memory during the passes (on a GPU: of allocated memory).
Time is the median of the passes after the first; the cells alternate.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

BATCH = 8
CHUNKS = (0, 4096, 1024, 256)


def measure(chunk: int, vocabulary: int, context: int) -> dict[str, float]:
    """{"megabytes", "seconds"} with the logits of `chunk` tokens in memory; 0: all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from accelerate_recipes.common.tasks.models.causal_lm import with_losses

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = with_losses(LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes)), chunk=chunk, longest=context)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model.to(device)
    tokens = torch.randint(0, vocabulary, (BATCH, context), device=device)
    model(tokens[:1, :8], tokens[:1, :8]).sum().backward()  # gradients and libraries are in memory before
    before, seconds = _peak(device), []
    for _ in range(3):
        started = time.perf_counter()
        model(tokens, tokens).sum().backward()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"megabytes": (_peak(device) - before) / 1e6, "seconds": statistics.median(seconds[1:])}


def _peak(device: torch.device) -> float:
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunk", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    vocabulary, context = arguments.vocabulary, arguments.context
    if arguments.chunk is not None:
        print(json.dumps(measure(arguments.chunk, vocabulary, context)))
        return
    found: dict[int, list[dict[str, float]]] = {chunk: [] for chunk in CHUNKS}
    for _ in range(arguments.rounds):
        for chunk in CHUNKS:
            command = [sys.executable, __file__, "--chunk", str(chunk)]
            command += ["--vocabulary", str(vocabulary), "--context", str(context)]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            found[chunk].append(json.loads(run.stdout.splitlines()[-1]))
    size = BATCH * context * vocabulary * 4 / 1e6
    print(f"{BATCH} x {context} tokens, vocabulary {vocabulary:,}: all logits are {size:,.0f} MB\n")
    print("| tokens whose logits are in memory | MB | time, of all at once |\n| --- | ---: | ---: |")
    for chunk, runs in found.items():
        ratios = [run["seconds"] / whole["seconds"] for run, whole in zip(runs, found[0])]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {chunk or 'all'} | {statistics.median(run['megabytes'] for run in runs):,.0f} | {spread} |")


if __name__ == "__main__":
    main()
