"""What the parity check costs: seconds beside those of plain steps, and the peak memory of each process.

    python benchmarks/parity_check.py
    python benchmarks/parity_check.py --size 134m --config fsdp2

Trains a Llama of benchmarks/llama.py with random weights, AdamW, float32, a batch of 8 × 32 tokens, for four steps on
two processes, with the check and without it. A plain step is the fastest one. The memory is the most that a process
held, without that of mapped files. Without a GPU both processes share the memory of the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
STEPS = 4


class Peaks(threading.Thread):
    """{rank: the most GB that the process held} of the children of this process, in a `with` block."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.gigabytes: dict[str, float] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.05):
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    memory = child.memory_info()
                    rank = child.environ().get("RANK", "launcher")
                    self.gigabytes[rank] = max(self.gigabytes.get(rank, 0.0), (memory.rss - memory.shared) / 1e9)

    def __enter__(self) -> "Peaks":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self.join()


def trained(size: str, config: str, check_steps: int) -> tuple[dict, float, dict[str, float], str]:
    """(the run card, seconds of the fastest step, the peaks, what the run printed)"""
    with tempfile.TemporaryDirectory() as folder, Peaks() as peaks:
        command = ["accelerate", "launch", "--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml")]
        command += [str(ROOT / "benchmarks" / "llama.py"), "--size", size, "--context", "32", "--batch_size", "8"]
        command += ["--max_steps", str(STEPS), "--log_every", "1", "--output_dir", folder]
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        run = subprocess.run(
            [*command, "--check_steps", str(check_steps)], capture_output=True, text=True, env=environment
        )
        if run.returncode:
            sys.exit(run.stdout + run.stderr)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        rates = [record["samples_per_second"] for record in map(json.loads, lines) if "samples_per_second" in record]
        card = json.loads((Path(folder) / "run.json").read_text())
    return card, 8 / max(rates), peaks.gigabytes, run.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", help="of the model: sizes of llama.py")
    parser.add_argument("--config", action="append", help="with two processes")
    options = parser.parse_args()
    print("| weights | config | plain step | check of 2 steps | in plain steps | memory of processes | unchecked |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for size in options.size or ["134m", "300m", "1b"]:
        for config in options.config or ["ddp", "fsdp2"]:
            _, seconds, without, _ = trained(size, config, 0)
            card, _, peaks, printed = trained(size, config, 2)
            check = card.get("check_seconds")
            why = next((line for line in printed.splitlines() if "are not checked" in line), "")
            columns = [
                size,
                config,
                f"{seconds:.1f} s",
                why if check is None else f"{check:.1f} s",
                "" if check is None else f"{check / seconds:.1f}",
                *(f"{found.get('0', 0):.2f}, {found.get('1', 0):.2f} GB" for found in (peaks, without)),
            ]
            print(f"| {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
