"""Memory and time of a text that stays in a file, beside one in memory.

    python benchmarks/large_text.py

Makes texts of each size and loads them with `load_tokens`, each time in a new process: once when the text was never
tokenised, and once again. The columns: the seconds of `load_tokens`; the anonymous memory (RssAnon of
/proc/self/status) that it added, after 2,200 batches of 12 blocks were read; and the microseconds of a block in these
batches, while the system holds the file in its cache. "in memory" is the way that small texts take, for the first size.
The tokens are bytes, or those of a byte-pair encoding that is trained on the standard library.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

CONTEXT, BATCH_SIZE, NUM_BATCHES = 256, 12, 2000


def anonymous_mb() -> float:
    """The anonymous memory of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1000


def tokenizer_of(kind: str, folder: Path) -> Any:
    """A byte tokenizer, or a byte-pair encoding with 8,000 tokens, trained once."""
    from transformers import PreTrainedTokenizerFast

    from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer

    if kind == "bytes":
        return byte_tokenizer()
    path = folder / "tokenizer.json"
    if not path.exists():
        from tokenizers import ByteLevelBPETokenizer

        trained = ByteLevelBPETokenizer()
        trained.train([str(file) for file in library()], vocab_size=8000, show_progress=False)
        trained.save(str(path))
    return PreTrainedTokenizerFast(tokenizer_file=str(path))


def library() -> list[Path]:
    """The modules of Python's standard library."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def write_text(path: Path, num_bytes: int) -> None:
    """Writes the standard library, again and again. A number before each line makes the lines different."""
    lines = [line for file in library() for line in file.read_bytes().splitlines()]
    written = 0
    with path.open("wb") as file:
        while written < num_bytes:
            for number, line in enumerate(lines):
                written += file.write(b"%d %d %s\n" % (written % 997, number, line))
                if written >= num_bytes:
                    break


def measure(text: str, tokenizer_kind: str, folder: Path, in_memory: bool) -> dict[str, float]:
    """Loads a text and reads blocks of it in this process."""
    import datasets  # noqa: F401  # its memory is not the corpus's
    import torch

    import accelerate_recipes.common.tasks.nlp.text
    from accelerate_recipes.common.tasks.nlp.text import load_tokens

    if in_memory:
        accelerate_recipes.common.tasks.nlp.text.MAX_BYTES_IN_MEMORY = sys.maxsize
    tokenizer = tokenizer_of(tokenizer_kind, folder)
    tokenizer("one two three")
    before, started = anonymous_mb(), time.perf_counter()
    train_set, _ = load_tokens(text, tokenizer, CONTEXT)
    seconds = time.perf_counter() - started
    batches = torch.randint(len(train_set), (NUM_BATCHES, BATCH_SIZE), generator=torch.Generator().manual_seed(0))
    for ids in batches[: NUM_BATCHES // 10]:
        train_set.transform(train_set.rows(ids))
    started = time.perf_counter()
    for ids in batches:
        train_set.transform(train_set.rows(ids))
    micros = (time.perf_counter() - started) * 1e6 / batches.numel()
    return {
        "tokens": len(train_set) * CONTEXT,
        "seconds": seconds,
        "anonymous_mb": anonymous_mb() - before,
        "micros_per_block": micros,
    }


def in_new_process(text: Path, tokenizer: str, folder: Path, in_memory: bool = False) -> dict[str, float]:
    """What `measure` returns in a process of its own, with a cache in `folder`."""
    command = [sys.executable, __file__, "--measure", str(text), "--tokenizers", tokenizer, "--folder", str(folder)]
    env = os.environ | {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *["--in_memory"] * in_memory], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measurements(sizes: list[int], tokenizers: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """What `measure` returns for each tokenizer, size and way."""
    for kind in tokenizers:
        tokenizer_of(kind, folder)  # trains it
        for size in sizes:
            text = folder / f"{size}.txt"
            if not text.exists():
                write_text(text, size * 1_000_000)
            text.touch()  # as a new text
            for way in ["file, first start", "file, second start", *["in memory"] * (size == sizes[0])]:
                found = in_new_process(text, kind, folder, way == "in memory")
                yield {"tokenizer": kind, "megabytes": size, "way": way} | found


def print_table(rows: Iterator[dict[str, Any]]) -> None:
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, context {CONTEXT}\n")
    print("| tokens | text | million tokens | way | seconds to load | anonymous memory, MB | µs per block |")
    print("| --- | ---: | ---: | --- | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['tokenizer']} | {row['megabytes']} MB | {row['tokens'] / 1e6:.1f} | {row['way']} "
            f"| {row['seconds']:.2f} | {row['anonymous_mb']:.0f} | {row['micros_per_block']:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 200], help="megabytes of text")
    parser.add_argument("--tokenizers", nargs="+", choices=("bytes", "bpe"), default=["bytes", "bpe"])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="for texts and the cache; by default a temporary folder")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each row")
    parser.add_argument("--in_memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        found = measure(arguments.measure, arguments.tokenizers[0], arguments.folder, arguments.in_memory)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as temporary:
        rows = measurements(arguments.sizes, arguments.tokenizers, arguments.folder or Path(temporary))
        if arguments.json:
            for row in rows:
                print(json.dumps(row), flush=True)
        else:
            print_table(rows)


if __name__ == "__main__":
    main()
