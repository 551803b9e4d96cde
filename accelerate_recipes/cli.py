"""The command `accelerate-recipes`: its subcommands and their flags.

Each subcommand imports what it needs when it runs, so that the others start fast.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from accelerate_recipes.common.errors import RunError, UsageError
from accelerate_recipes.common.streams import Output

app = typer.Typer(
    name="accelerate-recipes",
    help="Recipes for Accelerate: find one, copy it, prove that its result does not depend on the config.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_Misuse: Any = typer.BadParameter.__mro__[1]  # UsageError of click, which newer versions of typer contain as a copy
Dtype = StrEnum("Dtype", ["auto", "float32", "bfloat16", "float16"])
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def _both(flag: str) -> tuple[str, str]:
    """A flag with underscores, as Accelerate and the recipes write it, and with dashes."""
    return f"--{flag}", f"--{flag.replace('_', '-')}"


def main() -> None:
    """Runs the command line. A mistake gets one line and exit code 2."""
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)
    try:
        sys.exit(app(prog_name="accelerate-recipes", standalone_mode=False))
    except _Misuse as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(_refused(error.format_message()))
        command = error.ctx.command_path if error.ctx else "accelerate-recipes"
        sys.exit(_refused(f"{error.format_message().rstrip('.')}: run {command} --help"))
    except RunError as error:
        _refused(str(error))
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)


def _refused(line: str) -> int:
    print(line, file=sys.stderr)
    return 2


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the recipes and the configs, and how each config runs on this machine.

    Example: accelerate-recipes list
    """
    from accelerate_recipes.catalog import show

    show(as_json)


@app.command()
def new(
    recipe: Annotated[str, typer.Argument(help="name of a recipe, such as mnist")],
    folder: Annotated[Path, typer.Argument(help="the folder to make; it must be empty or absent")],
    config: Annotated[
        list[str] | None, typer.Option(help="config to include, by name or path; repeatable (default: ddp)")
    ] = None,
    own_loop: Annotated[
        bool, typer.Option(*_both("own_loop"), help="also write the loop as loop.py, for you to change")
    ] = False,
    single_file: Annotated[
        bool, typer.Option(*_both("single_file"), help="write one script on Accelerate alone, without this package")
    ] = False,
    vendor: Annotated[bool, typer.Option("--vendor", help="also copy the package, for you to change")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a project of your own from a recipe: the recipe, configs and a test. It imports the rest.

    Example: accelerate-recipes new mnist my_project --config ddp --config fsdp2
    """
    from accelerate_recipes.project import make

    make(recipe, folder, config, own_loop, single_file, vendor, as_json)


@app.command()
def data(
    recipe: Annotated[Path, typer.Argument(help="a recipe")],
    flags: Annotated[list[str] | None, typer.Argument(help="after --: flags for the recipe")] = None,
    samples: Annotated[int, typer.Option(help="how many samples of the first step to show", min=0, max=1000)] = 4,
    output: Annotated[Path | None, typer.Option(help="an HTML page, with the images")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what the model gets of the data: sizes, lengths, what is left out, the first samples. Trains nothing.

    Example: accelerate-recipes data recipes/finetune.py --output data.html -- --data chats.jsonl
    """
    from accelerate_recipes.data import data

    data(recipe, flags or [], samples, output, as_json)


@app.command()
def verify(
    script: Annotated[Path, typer.Argument(help="a recipe")],
    flags: Annotated[list[str] | None, typer.Argument(help="after --: flags for the recipe")] = None,
    steps: Annotated[
        int | None, typer.Option(help="optimizer steps of each run (default: 20)", min=4, max=10_000)
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help="config by name or path; repeatable (default: all that this machine runs)"),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="folder of a checkpoint: only check the next steps of its run, under its config"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="folder for certificate.json and certificate.md (default: verified/<script>)")
    ] = None,
    accelerate: Annotated[
        bool, typer.Option("--accelerate", help="a script on plain Accelerate, watched from outside")
    ] = False,
    split_batches: Annotated[
        bool,
        typer.Option("--split_batches", help="with --accelerate: loaders divide each batch, in an order from the seed"),
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="only write the first steps of one process to this file, to compare later")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="only compare one process with this record or certificate.json"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a recipe gives one result under every config, or say what makes the difference.

    Example: accelerate-recipes verify recipes/mnist.py --config ddp --config fsdp2 -- --model mlp
    """
    from accelerate_recipes.verify import against as single
    from accelerate_recipes.verify import checkpoint as of_run
    from accelerate_recipes.verify import run

    if split_batches and (not accelerate or checkpoint or against or record):
        raise UsageError("--split_batches needs --accelerate, and no --record, --against, --checkpoint: remove it")
    if checkpoint is not None:
        if accelerate or against or record or output or steps:
            raise UsageError("--checkpoint takes --config, --json and flags of the recipe: remove the others")
        sys.exit(of_run.run(script, flags or [], checkpoint, config, as_json))
    if against is not None:
        if accelerate or config or flags or output or record:
            raise UsageError("--against runs one process, with the flags of the record: remove all but --json")
        sys.exit(single.run(script, against, as_json))
    if record is not None:
        if config or output:
            raise UsageError("--record runs one process: remove --config and --output")
        sys.exit(single.record(script, flags or [], steps or 20, record, accelerate, as_json))
    sys.exit(run(script, flags or [], steps or 20, config, output, accelerate, as_json, split_batches))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="a config file of Accelerate")] = None,
    recipe: Annotated[Path | None, typer.Argument(help="the recipe to run with it")] = None,
    flags: Annotated[list[str] | None, typer.Argument(help="after --: flags for the recipe")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="write a corrected copy of the config beside it")] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine, a config, and whether a recipe runs with it. Exit code 1 with findings.

    Example: accelerate-recipes doctor accelerate_configs/ddp.yaml recipes/mnist.py
    """
    from accelerate_recipes.doctor import check

    sys.exit(check(config, recipe, as_json, flags or [], fix))


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="a recipe")],
    flags: Annotated[list[str] | None, typer.Argument(help="after --: flags for the recipe")] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="config by name or path; repeatable (default: a table of all configs)")
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option(*_both("num_processes"), help="GPUs on all machines (default: the config's)", min=1)
    ] = None,
    num_machines: Annotated[
        int | None, typer.Option(*_both("num_machines"), help="machines (default: the config's)", min=1)
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE for the config, such as mixed_precision=bf16")
    ] = None,
    gpu: Annotated[str, typer.Option(help="a name in hardware.json: h100, h200, a100, ...")] = "h100",
    memory: Annotated[float | None, typer.Option(help="memory of a GPU in GB (default: the GPU's)")] = None,
    hardware: Annotated[Path | None, typer.Option(help="JSON file with the rates of your machines")] = None,
    scaling: Annotated[bool, typer.Option("--scaling", help="also with more GPUs, up to 8,192")] = False,
    plot: Annotated[Path | None, typer.Option(help="with --scaling: an HTML page with the curves")] = None,
    hours: Annotated[float | None, typer.Option(help="name the cheapest that ends within this many hours")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run will take on a cluster: batch, memory, traffic, time. Exit code 1 if it does not fit.

    Example: accelerate-recipes plan recipes/transformer.py --config fsdp2 --num_processes 2 --gpu h100
    """
    from accelerate_recipes.plan import plan
    from accelerate_recipes.plan.hardware import read

    where = config or [], num_processes, num_machines, settings or [], read(gpu, memory, hardware)
    sys.exit(plan(recipe, flags or [], *where, scaling, hours, plot, as_json))


@app.command()
def push(
    output_dir: Annotated[Path, typer.Argument(help="output folder of a run that is done")],
    name: Annotated[str, typer.Argument(help="repository on the Hugging Face Hub; a new one is private")],
    as_json: AsJson = False,
) -> None:
    """Upload the model of a run, with a model card, to the Hugging Face Hub. Exit code 1 if that fails.

    Example: accelerate-recipes push outputs/mnist your_name/digits
    """
    from accelerate_recipes.push import push

    sys.exit(push(output_dir, name, as_json))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="folder of a checkpoint; or of a run, for its newest one")],
    folder: Annotated[Path, typer.Argument(help="the folder to make; it must be empty or absent")],
    dtype: Annotated[Dtype, typer.Option(help="type of the weights; auto: as the run exports them")] = Dtype.auto,
    as_json: AsJson = False,
) -> None:
    """Make a model of a checkpoint, such as the run writes at its end, in one process.

    Example: accelerate-recipes export outputs/mnist/checkpoints/step_00000100 mnist_100
    """
    from accelerate_recipes.export import export

    sys.exit(export(checkpoint, folder, dtype.value, as_json))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="output folders of runs")],
    output: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about one or several runs: curves, differences, failures, commands.

    Example: accelerate-recipes report outputs/mnist outputs/mnist_sgd --output report.html
    """
    from accelerate_recipes.report import write

    write(runs, output, as_json)
