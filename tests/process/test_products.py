"""Promise: a run that divides a model in several ways at once gives the result of one process, or is refused; its
collectives are those of the table in docs/collectives.md."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from accelerate_recipes.verify.differences import distances
from support.launching import fork
from support.recipes import LATEST
from support.runs import Run, largest_difference, refused

SCRIPT = "tests/scripts/products.py"  # in float64
TOLERANCE = 1e-12
STAGES = "--pipeline_stages 2"
INTERLEAVED, ZERO_BUBBLE = (f"{STAGES} --pipeline_schedule {name}" for name in ("interleaved", "zbv"))
EP = "--expert_parallel 2"
HELD = "--fsdp_reshard_after_forward false"
SP, REPLICAS, NO_SHARDS = (
    f"--parallelism_config_{size}" for size in ("sp_size 2", "dp_replicate_size 2", "dp_shard_size 1")
)
NUM_LAYERS = 2
NOT_COUNTED = re.compile("checkpointing|compile|schedule")  # these repeat passes, or cut two stages for a process


@dataclass(frozen=True)
class Product:
    """A run of several processes.

    Attributes:
        title: what the run card says.
        config: a config file.
        num_processes: in all.
        model: flags that the run of one process has, too.
        flags: how the model and the batch are divided.
        options: of accelerate launch.
    """

    title: str
    config: str
    num_processes: int
    model: str
    flags: str = ""
    options: str = ""

    def run(self, folder: Path, more: str = "", succeeds: bool = True) -> Run:
        arguments = f"{self.model} {self.flags} {more}"
        return fork(folder, self.config, SCRIPT, arguments, self.num_processes, self.options, succeeds=succeeds)

    def size(self, axis: str) -> int:
        """Of an axis of the title, such as "TP 2"."""
        found = re.search(rf"{axis} (\d)", self.title)
        return int(found[1]) if found else 1


# Of the embeddings, of lengths, of what is averaged: what one process trains.
FIXED, TIED, UNTIED = "--model tied", "--model tied --lengths --ema_decay 0.9", "--model untied --lengths"
EXPERTS = "--model experts --optimizer sgd --lengths"
FOUR_LAYERS = " --num_layers 4"  # of a schedule with two stages for each process
SHARD_PP = Product("FSDP2 2 × pipeline of 2 stages", "fsdp2_pipeline", 4, TIED, f"{STAGES} --micro_batch_size 2")
SHARD_TP_PP = Product("FSDP2 2 × TP 2 × pipeline of 2 stages", "fsdp2_tensor_pipeline", 8, TIED, STAGES)
TP_SP = Product("FSDP2 × TP 2 × SP 2", "tensor_parallel", 4, TIED, "", SP)
SP_PP = Product("pipeline of 2 stages × SP 2", "sequence_parallel", 4, TIED, f"{STAGES} --micro_batch_size 2")
SHARD_EP = Product("FSDP2 × EP 2", "fsdp2_expert_parallel", 4, EXPERTS, f"{EP} --micro_batch_size 1")
SHARD_PP_EP = Product("FSDP2 2 × pipeline of 2 stages × EP 2", "fsdp2", 4, EXPERTS, f"{STAGES} {EP}")
ONE = Product("no parallelism", "single", 1, TIED)
OFTEN = [
    Product("HSDP 2 × 2", "hsdp", 4, FIXED, "--micro_batch_size 1"),
    Product("DDP 2 × SP 2", "sequence_parallel", 4, UNTIED, "--activation_checkpointing", REPLICAS),
    Product("DDP 2 × pipeline of 2 stages", "pipeline_parallel", 4, FIXED, f"{STAGES} --micro_batch_size 1"),
    Product("FSDP2 2 × TP 2", "fsdp2_tensor_parallel", 4, UNTIED, "--micro_batch_size 2"),
    Product("FSDP2 × SP 2", "fsdp2_sequence_parallel", 4, UNTIED, "--micro_batch_size 2"),
    SHARD_EP,
    TP_SP,
    Product(
        *("TP 2 × pipeline of 2 stages", "tensor_parallel", 4, FIXED + FOUR_LAYERS),
        f"{ZERO_BUBBLE} --activation_checkpointing",
    ),
    SP_PP,
    Product("FSDP2 × SP 2 × EP 2", "fsdp2_sequence_parallel", 2, EXPERTS, EP, NO_SHARDS),
    SHARD_PP_EP,
    Product("FSDP2 2 × TP 2 × EP 2", "fsdp2_tensor_parallel", 4, EXPERTS, EP),
]
RARE = [
    SHARD_PP,  # test_a_killed_run_goes_on_under_another_product begins with it
    Product(SHARD_PP.title, "fsdp2_pipeline", 4, UNTIED, f"{STAGES} --micro_batch_size 1", HELD),
    Product(SHARD_PP.title, "fsdp2_pipeline", 4, UNTIED + FOUR_LAYERS, f"{ZERO_BUBBLE}", HELD),
    Product(SHARD_PP.title, "fsdp2_pipeline", 4, FIXED + FOUR_LAYERS, INTERLEAVED),
    Product(SHARD_PP.title, "fsdp2", 4, FIXED, f"{STAGES} --compile"),
    Product("TP 2 × pipeline of 2 stages", "tensor_parallel", 4, UNTIED, f"{STAGES} --micro_batch_size 2"),
    SHARD_TP_PP,
    Product("HSDP 2 × 2 × TP 2", "hsdp_tensor_parallel", 8, TIED),
    Product("HSDP 2 × 2 × SP 2", "fsdp2_sequence_parallel", 4, UNTIED, "", f"{REPLICAS} {NO_SHARDS}"),
    Product("HSDP 2 × 2 × pipeline of 2 stages", "hsdp", 8, TIED, f"{STAGES} --micro_batch_size 1"),
    Product("HSDP 2 × 2 × EP 2", "hsdp", 4, EXPERTS, EP),
    Product("TP 2 × EP 2", "tensor_parallel", 2, EXPERTS, EP),
    Product("FSDP2 2 × TP 2 × EP 4", "fsdp2_tensor_parallel", 4, EXPERTS, "--expert_parallel 4"),
    Product("FSDP2 2 × TP 2 × pipeline of 2 stages × EP 2", "fsdp2_tensor_pipeline", 8, EXPERTS, f"{STAGES} {EP}"),
    Product("HSDP 2 × 2 × EP 4", "hsdp", 4, EXPERTS, "--expert_parallel 4 --micro_batch_size 1"),
    Product("FSDP2 2 × TP 2 × SP 2", "fsdp2_tensor_parallel", 8, UNTIED, "", SP),
    Product("FSDP2 2 × pipeline of 2 stages × SP 2", "fsdp2_sequence_parallel", 8, TIED, STAGES),
    Product("FSDP2 × SP 2 × EP 2", "fsdp2_sequence_parallel", 4, EXPERTS, EP),
    Product("FSDP2 × TP 2 × pipeline of 2 stages × SP 2", "tensor_parallel", 8, FIXED, STAGES, SP),
    Product("DDP 2 × pipeline of 2 stages × SP 2", "sequence_parallel", 8, UNTIED, STAGES, REPLICAS),
    Product("FSDP2 2 × pipeline of 2 stages × SP 2 × EP 2", "fsdp2_sequence_parallel", 8, EXPERTS, f"{STAGES} {EP}"),
]


def assert_same(run: Run, expected: Run) -> None:
    for name in ("train/loss", "grad_norm", "learning_rate", "eval/loss"):
        assert largest_difference(run.column(name), expected.column(name)) <= TOLERANCE, name
    assert max(distances(run.trace.weights, expected.trace.weights).values()) <= TOLERANCE


def collectives(product: Product, num_micro_batches: int, stage: int) -> Counter[str]:
    """What a process of a stage takes in a step, by the table in docs/collectives.md."""
    stages, tp, sp, ep = (product.size(axis) for axis in ("pipeline of", "TP", "SP", "EP"))
    replicas, is_sharded = product.size("DDP") * product.size("HSDP"), bool(re.search("FSDP2|HSDP", product.title))
    layers, micro, is_tied = NUM_LAYERS // stages, num_micro_batches, "--model tied" in product.model
    is_first, is_last = stage == 0, stage == stages - 1
    found = Counter(all_reduce=2 + ("--lengths" in product.model))  # for signals, the record, the weight of samples
    if is_sharded:
        ends = 0 if is_tied or stages > 1 else 1  # embedding and head are gathered by themselves
        groups, passes = layers + 1 + ends, 1 if stages > 1 and HELD in product.options else micro
        again = 0 if HELD in product.options else layers + ends
        found += Counter(all_gather=passes * (groups + again), reduce_scatter=passes * groups)
        found["all_reduce"] += 1 + 2 * (tp > 1) + groups * (replicas > 1)  # the norm; replicas
    elif stages > 1:
        num_weights = 9 * layers + 1 + is_last  # one embedding or head; the last norm
        found["all_reduce"] += num_weights * ((replicas > 1) + (sp > 1)) + (tp > 1)
    else:
        found["all_reduce"] += 1  # of DDP
    if stages > 1:
        found += Counter(all_gather=1, send=micro + is_tied)
    if tp > 1:
        ends = 0 if is_tied else is_first + is_last
        found += Counter(all_reduce=micro * (4 * layers + ends), all_gather=micro * (is_last and not is_tied))
    if sp > 1:
        found += Counter(all_to_all=8 * layers * micro, all_reduce=micro * is_last)
    if ep > 1:
        holders = product.num_processes // stages // ep
        found += Counter(all_gather=4 * layers * micro, reduce_scatter=3 * layers * micro)
        if tp > 1:  # the tokens of a layer are divided, in place of its experts' features
            found += Counter(all_gather=3 * layers * micro)
            found["all_reduce"] -= 2 * layers * micro
        found["all_reduce"] += layers * micro * (3 if holders > 1 else 1) + 1
    return +found


def marks_of(product: Product) -> list[pytest.MarkDecorator]:
    """Pipelines and products of three axes run in each `make test`: where they break, nothing else shows it."""
    if product in RARE:
        return [pytest.mark.full]
    return [pytest.mark.every_case] * (product.size("pipeline of") > 1 or product.title.count("×") > 1)


@pytest.mark.parametrize(
    "product",
    [
        pytest.param(each, id=f"{number}-{each.title}", marks=marks_of(each))
        for number, each in enumerate([*OFTEN, *RARE])
    ],
)
def test_the_result_of_one_process(tmp_path: Path, reference: Callable[..., Run], product: Product) -> None:
    run, expected = product.run(tmp_path / "run"), reference(SCRIPT, product.model)
    assert run.card["parallelism"] == product.title and run.card["checked_steps"] == 1
    assert min(expected.column("grad_norm")) > 0.5  # it does clip
    assert_same(run, expected)
    if NOT_COUNTED.search(product.flags):
        return
    for rank in range(product.num_processes):
        found = Counter(json.loads((run.output_dir / f"collectives_{rank}.json").read_text()))
        stage = rank // (product.size("TP") * product.size("SP")) % product.size("pipeline of")
        assert found == collectives(product, run.card["gradient_accumulation_steps"], stage), f"process {rank}"


@pytest.mark.full
@pytest.mark.parametrize("flags", [STAGES, ZERO_BUBBLE])
def test_weights_that_are_held_beside_tensor_parallelism(
    tmp_path: Path, reference: Callable[..., Run], flags: str
) -> None:
    """With a tp_size Accelerate passes no flag of FSDP on; the variable says it."""
    env, model = {"FSDP_RESHARD_AFTER_FORWARD": "false"}, UNTIED + FOUR_LAYERS
    run = fork(tmp_path / "run", "fsdp2_tensor_pipeline", SCRIPT, f"{model} {flags}", 8, env=env)
    assert run.card["parallelism"] == SHARD_TP_PP.title
    assert_same(run, reference(SCRIPT, model))


@pytest.mark.parametrize(
    ("killed", "other"),
    [
        (SHARD_PP, SHARD_TP_PP),
        *(
            pytest.param(*pair, marks=pytest.mark.full)
            for pair in [(TP_SP, SP_PP), (SHARD_EP, SHARD_PP_EP), (SHARD_TP_PP, ONE)]
        ),
    ],
)
def test_a_killed_run_goes_on_under_another_product(
    tmp_path: Path, reference: Callable[..., Run], killed: Product, other: Product
) -> None:
    run = killed.run(tmp_path / "run", "--save_every 2 --kill_in 3", succeeds=False)
    assert run.checkpoints == [2] and run.exit_code != 0
    other.run(tmp_path / "run", f"--save_every 2 {LATEST}")
    run = Run(0, "", "", tmp_path / "run")  # the records of both
    assert run.card["parallelism"] == other.title and run.card["attempt"] == 2
    assert_same(run, reference(SCRIPT, other.model))


@pytest.mark.parametrize(
    ("config", "num_processes", "flags", "options", "expected"),
    [
        (
            *("tensor_parallel", 4, "", "--parallelism_config_dp_replicate_size 2"),
            "has a dp_replicate_size of 2 and no dp_shard_size, which Accelerate refuses: use dp_shard_size instead",
        ),
        (
            "ddp",
            2,
            f"{EXPERTS} {EP}",
            "",
            "--expert_parallel 2 needs FSDP2 for the other weights: use --config_file acc",
        ),
        ("deepspeed_zero2", 2, f"{EXPERTS} {EP}", "", "--expert_parallel 2 needs FSDP2 for the other weights"),
        ("fsdp2", 2, STAGES, "", "--pipeline_stages 2 of 2 processes leave FSDP2 nothing to divide: use --num_proce"),
        ("fsdp2_tensor_parallel", 4, STAGES, "", "× --pipeline_stages 2 = 8 processes, but there are 4: use --num_pr"),
        (
            "deepspeed_zero2",
            2,
            STAGES,
            "",
            "pipeline does not combine with DeepSpeed: use a config of",
        ),
        (
            *("fsdp2", 4, STAGES, "--fsdp_cpu_ram_efficient_loading true"),
            "--pipeline_stages does not work with fsdp_cpu_ram_efficient_loading: use false there in the config file",
        ),
        (
            *("fsdp2", 4, ZERO_BUBBLE, ""),
            "--pipeline_schedule zbv loses gradients where FSDP2 frees a layer's weights before the backward pass: use "
            "--fsdp_reshard_after_forward false after accelerate launch, or --pipeline_schedule interleaved",
        ),
        (
            *("fsdp2", 4, f"--num_layers 4 {ZERO_BUBBLE}", HELD),
            "--pipeline_schedule zbv: two stages of one process need model.embed_tokens.weight, and FSDP2 would",
        ),
        (
            *("fsdp2", 6, f"{EXPERTS} {STAGES} {EP} --batch_size 12", ""),
            "--expert_parallel 2 does not divide 3 processes of a stage: use --num_processes 4 after accelerate launch",
        ),
        (
            *("tensor_parallel", 8, "", "--parallelism_config_sp_size 4"),
            "4 attention heads, not divisible by 8 processes: use a smaller sp_size or tp_size in the config file",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, config: str, num_processes: int, flags: str, options: str, expected: str
) -> None:
    run = fork(tmp_path / "run", config, SCRIPT, flags, num_processes, options, succeeds=False)
    assert expected in refused(run)
    assert not (run.output_dir / "metrics.jsonl").exists()
