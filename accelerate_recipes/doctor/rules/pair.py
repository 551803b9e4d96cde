"""Rules about a config together with a recipe: what `fit` would refuse, before a process starts."""

from collections.abc import Iterator
from typing import Any

from accelerate_recipes.doctor.config import Config
from accelerate_recipes.doctor.finding import Finding
from accelerate_recipes.doctor.recipe import Recipe
from accelerate_recipes.doctor.rules.deepspeed import content

# As in common/parallel.
STYLES = ("colwise", "rowwise", "colwise_rep", "colwise_gather_output", "rowwise_rep", "embedding_rowwise")
PREFETCHED = 2  # batches that each worker of torch's DataLoader holds ready


def data_parallel_size(config: Config, recipe: Recipe) -> int | None:
    """The number of data-parallel ranks; None if it is unknown, or if the sizes do not divide."""
    num_processes, group = config.num_processes, config.non_data_parallel_size * recipe.pipeline_stages
    return None if num_processes is None or num_processes % group else num_processes // group


def split(config: Config, recipe: Recipe) -> tuple[int, int] | None:
    """(samples per forward pass per process, forward passes per step); None if they do not divide."""
    ranks, stages = data_parallel_size(config, recipe), recipe.pipeline_stages
    if ranks is None or recipe.batch_size % ranks:
        return None
    own = recipe.batch_size // ranks
    micro = recipe.micro_batch_size
    if micro is None:
        micro = max(size for size in range(1, max(1, own // stages) + 1) if own % size == 0)
    return None if own % micro else (micro, own // micro)


def batch_size(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """A batch that the data-parallel ranks cannot share equally."""
    ranks = data_parallel_size(config, recipe)
    if ranks is None or recipe.batch_size % ranks == 0:
        return
    below = recipe.batch_size // ranks * ranks
    yield Finding(
        f"--batch_size {recipe.batch_size} is not divisible by {ranks} data-parallel ranks",
        "the recipe refuses it: each rank takes an equal share of a batch",
        f"--batch_size {f'{below} or {below + ranks}' if below else ranks}",
    )


def micro_batch_size(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """A micro-batch that does not divide a rank's share of the batch."""
    ranks, micro = data_parallel_size(config, recipe), recipe.micro_batch_size
    if ranks is None or micro is None or recipe.batch_size % ranks:
        return
    own = recipe.batch_size // ranks
    if own % micro:
        sizes = [size for size in range(1, own + 1) if own % size == 0]
        below, above = max(size for size in sizes if size < micro), [size for size in sizes if size > micro][:1]
        yield Finding(
            f"--micro_batch_size {micro} does not divide the {own} samples per process of --batch_size "
            f"{recipe.batch_size}",
            "the recipe refuses it: the micro-batches of a step must be equally large",
            f"--micro_batch_size {' or '.join(map(str, [below, *above]))}",
        )


def num_samples(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """A training set that is smaller than a batch."""
    ranks = data_parallel_size(config, recipe)
    if ranks is None or recipe.num_samples >= recipe.batch_size:
        return
    smaller = recipe.num_samples // ranks * ranks
    yield Finding(
        f"{recipe.num_samples} training samples are fewer than --batch_size {recipe.batch_size}",
        "the recipe refuses it: a step needs a whole batch",
        f"--batch_size {smaller} or less" if smaller else "more data, or fewer processes",
    )


def wrap_classes(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """A class of layers to gather at a time that the model does not have."""
    named = str(config.section("fsdp_config").get("fsdp_transformer_layer_cls_to_wrap") or "")
    missing = [name for name in named.split(",") if name and name not in recipe.classes]
    if config.kind == "FSDP" and missing:
        yield Finding(
            f"fsdp_transformer_layer_cls_to_wrap names {', '.join(missing)}, which {recipe.model} does not have",
            f"the recipe refuses it; the layers of the model are {', '.join(recipe.classes)}",
            "remove the key: then the model's own list counts, _no_split_modules",
        )


def tensor_parallel_plan(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """A model without a plan for tensor parallelism, or with one that does not fit it."""
    if config.sizes["tp_size"] == 1:
        return
    if not recipe.has_plan:
        yield Finding(
            f"{recipe.model} has no tp_plan, which tensor parallelism needs",
            "the recipe refuses it: nothing says how to divide the layers",
            "--config_file accelerate_configs/fsdp2.yaml; or give the model a tp_plan, as the MLP of recipes/mnist.py "
            "has (--model mlp)",
        )
    why = "the recipe refuses it: tensor parallelism would not divide what the plan says"
    for pattern, near in recipe.strange_patterns.items():
        yield Finding(f"tp_plan: {pattern} names no module of {recipe.model}", why, near)
    for layer in recipe.layers:
        what = f"tp_plan: {layer.name}"
        if layer.style not in STYLES:
            yield Finding(f"{what} has the style {layer.style}", why, f"one of {', '.join(STYLES)}")
        if layer.kind not in ("Linear", "Embedding"):
            yield Finding(f"{what} is {layer.kind}", why, "a Linear or an Embedding, or leave it out")
        if layer.shares_with:
            yield Finding(f"{what} shares its weight with {layer.shares_with}", why, "leave both out, or untie them")


def heads(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """Attention heads that tensor parallelism cannot divide."""
    size = config.sizes["tp_size"]
    for name, number in recipe.heads.items():
        if number % size:
            yield Finding(
                f"{name} is {number}, which is not divisible by tp_size {size}",
                "the recipe refuses it: each process takes whole heads",
                f"a multiple of {size} heads, or another parallelism_config_tp_size",
            )


def widths(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """Layers whose width tensor parallelism cannot divide."""
    size = config.sizes["tp_size"]
    for layer in recipe.layers:
        if size == 1 or layer.kind not in ("Linear", "Embedding"):
            continue
        outputs, inputs = layer.shape
        width = inputs if layer.style.startswith("rowwise") else outputs
        if width % size:
            yield Finding(
                f"tp_plan: {layer.name} is {width} wide, which is not divisible by tp_size {size}",
                "the recipe refuses it: each process takes an equal part",
                f"a width that is a multiple of {size}, or another parallelism_config_tp_size",
            )


def pipeline(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """Pipeline stages that the config or the batch does not allow."""
    stages = recipe.pipeline_stages
    if stages == 1:
        return
    if config.num_processes is not None and config.num_processes % stages:
        yield Finding(
            f"--pipeline_stages {stages} does not divide {config.num_processes} processes",
            "the recipe refuses it: each stage is a process",
            f"--num_processes {stages} after accelerate launch",
        )
    is_plain = config.kind.startswith("MULTI_") and not config.section("parallelism_config")
    if not is_plain or config.precision == "fp16":
        yield Finding(
            f"--pipeline_stages {stages} with distributed_type: {config.kind}, mixed_precision: {config.precision}",
            "the recipe refuses it: a pipeline needs a config without sharding, in float32 or bf16",
            "--config_file accelerate_configs/pipeline_parallel.yaml",
        )
    batch = split(config, recipe)
    if batch is not None and batch[1] < stages:
        own = batch[0] * batch[1]
        yield Finding(
            f"the micro-batches per step are {batch[1]}, fewer than --pipeline_stages {stages}",
            "the recipe refuses it: some stages would never work",
            f"--micro_batch_size {max(1, own // stages)}, or a larger --batch_size",
        )


def pipeline_layers(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """Pipeline stages that the model cannot be cut into."""
    stages = recipe.pipeline_stages
    if stages == 1:
        return
    if recipe.num_layers is None:
        yield Finding(
            f"{recipe.model} cannot be cut into stages",
            "the recipe refuses it: a pipeline needs a causal model of transformers with a pipeline plan",
            "remove --pipeline_stages, or use a model as in recipes/transformer.py",
        )
    elif recipe.num_layers < stages:
        yield Finding(
            f"{recipe.num_layers} layers are fewer than --pipeline_stages {stages}",
            "the recipe refuses it: each stage holds at least one layer",
            f"--pipeline_stages {recipe.num_layers} or less",
        )


def weights(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """Weights that FSDP or DeepSpeed cannot shard, or would cast without a message."""
    if config.kind not in ("FSDP", "DEEPSPEED"):
        return
    for name, (size, kind, num_dimensions) in recipe.weights.items():
        what = f"{name} of {recipe.model}"
        if num_dimensions == 0:
            yield Finding(f"{what} has no dimension to shard", "the recipe refuses it", "give it the shape (1,)")
        elif size == 0:
            yield Finding(f"{what} has no elements", "the recipe refuses it", "remove it from the model")
        elif config.kind == "DEEPSPEED" or config.precision != "no":
            yield Finding(
                f"{what} is {kind}, which this config casts to float32 or lower",
                "the recipe refuses it: the result would be another one",
                "--config_file accelerate_configs/ddp.yaml, or make it float32",
            )


def deepspeed_values(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """Values in DeepSpeed's section or file that the flags of the recipe make different."""
    batch = split(config, recipe)
    if config.kind != "DEEPSPEED" or batch is None:
        return
    section: dict[str, Any] = {**(content(config) or {}), **config.section("deepspeed_config")}
    decided: dict[str, tuple[float, str]] = {
        "train_micro_batch_size_per_gpu": (batch[0], "--micro_batch_size"),
        "gradient_accumulation_steps": (batch[1], "--batch_size and --micro_batch_size"),
        "train_batch_size": (recipe.batch_size, "--batch_size"),
        "gradient_clipping": (recipe.max_grad_norm, "--max_grad_norm"),
    }
    for key, (value, flag) in decided.items():
        given = section.get(key, "auto")
        if given not in ("auto", value):
            yield Finding(
                f"{key} is {given}, but {value} by {flag}",
                "the recipe refuses it: the command line decides, so that no config changes the mathematics",
                f"remove {key}",
            )


def moving_average(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """A moving average of the weights, which the recipes do not have under DeepSpeed."""
    if config.kind == "DEEPSPEED" and recipe.ema_decay:
        yield Finding(
            f"--ema_decay {recipe.ema_decay} under DeepSpeed",
            "the recipe refuses it: DeepSpeed trains its own flat copy of the weights",
            "--config_file accelerate_configs/fsdp2.yaml",
        )


def shared_memory_of_workers(config: Config, recipe: Recipe) -> Iterator[Finding]:
    """Less shared memory than the batches take that data-loading processes hold ready."""
    batch, size = split(config, recipe), config.machine.shared_memory
    if batch is None or size is None or config.num_local_processes is None:
        return
    num_batches = config.num_local_processes * recipe.num_workers * PREFETCHED
    needed = num_batches * batch[0] * recipe.sample_bytes
    if needed > size:
        yield Finding(
            f"/dev/shm has {size // 2**20} MiB, but --num_workers {recipe.num_workers} holds {needed // 2**20} MiB of "
            "batches ready",
            "a full /dev/shm kills the workers: Bus error",
            "docker run --shm-size=8g ..., or a smaller --num_workers or --micro_batch_size",
        )


RULES = (
    batch_size,
    micro_batch_size,
    num_samples,
    wrap_classes,
    tensor_parallel_plan,
    heads,
    widths,
    pipeline,
    pipeline_layers,
    weights,
    deepspeed_values,
    moving_average,
    shared_memory_of_workers,
)
