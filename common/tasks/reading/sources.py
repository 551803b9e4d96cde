"""Sources of data: a file, a folder or the Hub; which files a run reads, and the split of each file."""

import glob
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from huggingface_hub import metadata_load
from yaml import YAMLError

from ...data.facts import say, shorten
from ...errors import RunError, UsageError, first_line
from ...files import check_is_pulled
from ...records.run_card import read_card
from ..streams import cache_folder, convert_stream, first_process_first
from .mixture import weights_of
from .rows import Table, table_of, table_of_dataset
from .text_files import Place, ending_of, local_path, strip_packing

# {ending of a file's name: its kind}
TABLES = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
# {name of a split: the names of files and folders that belong to it}, as on the Hub
SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
HELD_OUT = 10  # one sample in this many is for evaluation, if the source has no evaluation part
AROUND = re.compile(r"-(\d{5,}-of-\d{5,}|v\d+(\.\d+)*)$|^\w+-ud-")  # train-00000-of-00003, dev-v2.0, en_ewt-ud-dev
OUTPUT = ("run.json", "metrics.jsonl", "predictions.jsonl", "model", "best", "checkpoints", "previous")  # of a run
# Files of the Hub, and of `datasets`, about data.
ABOUT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
# Options of a builder of `datasets` that do not say how to read a file.
SET_BY_ALL = {"name", "version", "data_dir", "data_files", "description", "features"}
STDLIB = Path(sysconfig.get_path("stdlib"))  # embedded data that every Python has
Files = dict[str, list[Place]]  # {split: its files}
LeftOut = dict[str, list[str]]  # {why: paths}
Row = TypeVar("Row")
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def sklearn_file(name: str) -> Path:
    """Path of a data file in the scikit-learn package: real data, no download, and no import of the package."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0]) / "datasets" / "data" / name


def hold_out(num_samples: int, one_in: int = HELD_OUT) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids of the rest, ids of the held-out samples, one in `one_in`): a random order, the same in each run."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(0))
    num_held_out = max(1, num_samples // one_in)
    return order[num_held_out:], order[:num_held_out]


def divide(parts: list[list[Row]], one_in: int = HELD_OUT) -> list[list[Row]]:
    """[training rows, evaluation rows]; of a single part, the rest and the held-out rows, like `hold_out`, in order."""
    if len(parts) > 1:
        return parts
    return [[parts[0][number] for number in each.sort().values.tolist()] for each in hold_out(len(parts[0]), one_in)]


def load_tables(
    data: str, advice: str, max_samples: int | None = None, is_labelled: Callable[[Table], bool] = lambda table: True
) -> list[Table]:
    """The training split and, if there is one, the evaluation split of a dataset, as the rows of its files. Raises
    UsageError for missing data, no network, no training split, or a split without rows.

    Args:
        data: a .csv, .tsv, .json, .jsonl or .parquet file, perhaps packed; a folder of such files, or that
            `save_to_disk` of `datasets` wrote; or a Hub id.
        advice: end of the error message: what to type instead.
        max_samples: read at most this many rows of each split, without downloading the rest.
        is_labelled: whether a split can be evaluated: takes the first of test and validation that can be.
    """
    files, kinds = table_files(data, advice)
    if all(ending_of(place) == ".parquet" for places in files.values() for place in places):  # or there are none
        names, read = _datasets_of(data, advice, max_samples, files)
    else:
        names = names_of_splits(data, files)

        def read(name: str) -> Table:
            return table_of(f"{data}, {name}" if len(files) > 1 else data, files[name], max_samples, kinds)

    return labelled_splits(data, names, read, is_labelled)


def labelled_splits(data: str, names: list[str], read: Callable[[str], Any], labelled: Callable[[Any], bool]) -> list:
    """The training split, and the first of the others that has labels. Names each one that it skips."""
    found = [read(name) for name in names[:1]]
    for name, following in zip_longest(names[1:], names[2:]):
        if labelled(split := read(name)):
            return [*found, split]
        instead = f"{following} is read in its place" if following else "it is left out"
        say(f"--data {data}: the {name} split has no labels: {instead}")
    return found


def _datasets_of(
    data: str, advice: str, max_samples: int | None, files: Files
) -> tuple[list[str], Callable[[str], Table]]:
    """(the names from `names_of_splits`, a function that reads one) of Parquet files, a saved dataset or a Hub id."""
    import datasets  # not at the top: the import takes seconds

    path, make = local_path(data), partial(_builder_of, data)
    for place in chain(*files.values(), path.rglob("*.arrow") if is_saved(path) else ()):
        check_is_pulled(Path(place))
    if files:  # for `datasets` a path is a pattern
        patterns = {name: [glob.escape(str(place)) for place in places] for name, places in files.items()}
        make = partial(datasets.load_dataset_builder, "parquet", data_files=patterns)
    folder = ""
    with _errors_in_one_line(data, advice):
        if is_saved(path):
            found = datasets.load_from_disk(str(path))
            splits = found if isinstance(found, dict) else {"train": found}
        elif max_samples is None:
            # The first process of each machine downloads and converts. The others then read the cache.
            with first_process_first():
                builder = make()
                builder.download_and_prepare()
            splits = builder.as_dataset()
        else:
            builder = make()
            splits, folder = builder.as_streaming_dataset(), builder.cache_dir

    def read(name: str) -> Table:
        split = splits[name]
        with _errors_in_one_line(data, advice):
            if folder and max_samples:
                split = convert_stream(split, cache_folder(folder, name), max_samples)
            elif max_samples:
                split = split.select(range(min(max_samples, len(split))))
        if len(split) == 0:
            raise UsageError(f"--data {data}: the {name} split has no rows")
        return table_of_dataset(data, split.with_format(None))

    return names_of_splits(data, splits), read


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote a folder."""
    return (folder / "dataset_dict.json").is_file() or any(folder.glob("data-*-of-*.arrow"))


def table_files(data: str, advice: str) -> tuple[Files, dict[str, Any]]:
    """(the files with the rows that `--data` names, {column: its type in `datasets`} if they are declared); no files if
    `datasets` must find them itself, in a Hub id whose files have types. Raises UsageError if there are none."""
    if weights_of(data) is not None:
        raise UsageError(f"--data {data}: this recipe takes one source: use it without a weight")
    path = local_path(data)
    if path.is_dir():
        if is_saved(path):
            return {}, {}
        return _find_files(data, advice) if _has_card(path) else (files_of_folder(data, path, TABLES, advice), {})
    if path.is_file():
        if ending_of(path) not in TABLES:
            raise UsageError(f"--data {data}: its name must end with one of {', '.join(TABLES)}; {advice}")
        return {"train": [path.absolute()]}, {}
    if os.path.lexists(path):
        raise UsageError(f"--data {data} is not a file or folder that can be read; {advice}")
    name, _ = split_name(data)
    if ending_of(path) in (*TABLES, ".txt") or not (HUB_ID.fullmatch(name) or _has_card(local_path(name))):
        raise UsageError(f"--data {data}: no such file or folder; {advice}")
    return _find_files(data, advice)


def split_name(data: str) -> tuple[str, str]:
    """("nyu-mll/glue", "mrpc") of "nyu-mll/glue:mrpc", a Hub id and its configuration; (data, "") without one."""
    name, _, config = data.rpartition(":")
    return (name, config) if name and not local_path(data).exists() else (data, "")


def files_of_folder(data: str, folder: Path, kinds: dict[str, str], advice: str) -> Files:
    """The files of one kind in a folder, by splits, with a line about the files that it does not read.

    A file belongs to a split if its whole name, or the name of a folder on its path, is the split's. Raises UsageError
    for missing files, several kinds of them, or one file twice.

    Args:
        data: of `--data`, for messages.
        folder: where they are.
        kinds: {ending of a file's name: its kind}.
        advice: end of the error message.
    """
    visible, left_out = walk(folder)
    found = [folder / name for name in visible if ending_of(name) in kinds and Path(name).name not in ABOUT_DATA]
    left_out.pop("empty folders", None)
    others = [folder / path for paths in left_out.values() for path in paths]
    others += sorted({folder / name for name in visible} - {*found})
    if not found:
        is_saved_below = any(name.endswith(".arrow") for name in visible)
        advice = "use the folder that save_to_disk wrote, or write to_parquet" if is_saved_below else advice
        raise UsageError(f"--data {data} holds no {', '.join(kinds)} file; {advice}")
    copies: dict[PurePath, Path] = {}
    for path in found:
        is_of_kind = kinds[ending_of(path)] == kinds[ending_of(found[0])]
        other = copies.setdefault(strip_packing(path), path) if is_of_kind else found[0]
        if other is not path:
            what = "use the path of one, or move the other away"
            raise UsageError(f"--data {data} holds {other.name} and {path.name}, which may have the same data: {what}")
    named = [(path.absolute(), split_of(path.relative_to(folder))) for path in found]
    unnamed = "" if any(split == "train" for _, split in named) else "train"  # the split of files without one
    splits: Files = {}
    for path, split in named:
        splits.setdefault(split or unnamed, []).append(path)
    names = names_of_splits(data, splits)
    others += [Path(place) for name in ("", *names[2:]) for place in splits.get(name, ())]
    if len(names) > 1 or others or len(found) > 1:
        read = [f"{len(splits[name]):,} for {name}" for name in names[:2]]
        left = [f"{len(others):,} not read, such as {others[0].name}"] if others else []
        say(f"files of --data {data}, by their names: {', '.join(read + left)}")
    return {name: splits[name] for name in names}


def walk(folder: Path, twice: bool = False) -> tuple[list[str], LeftOut]:
    """(the files in and below a folder, by name, with their paths from there; what is left out). `twice`: also follows
    a link to a folder that it has already read, unless that is above. Raises UsageError for an unreadable folder."""
    files, left_out = list[str](), LeftOut()

    def visit(below: str, known: set[tuple[int, int]]) -> None:
        facts = (folder / below).stat()
        here = facts.st_dev, facts.st_ino
        if here in known:
            left_out.setdefault("links to a folder above", []).append(below)
            return
        known = {*known} if twice else known
        known.add(here)
        with os.scandir(folder / below) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            path = below + entry.name
            if why := _why_not(entry):
                left_out.setdefault(why, []).append(path)
            elif entry.is_dir():
                visit(path + "/", known)
            else:
                files.append(path)
        if below and not entries:
            left_out.setdefault("empty folders", []).append(below)

    try:
        visit("", set())
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from None
    return files, left_out


def _why_not(entry: os.DirEntry[str]) -> str:
    """Why a file or folder is not read; "" if it is."""
    path = Path(entry.path)
    if entry.name.startswith("."):
        return "hidden"
    if entry.is_symlink() and not path.exists():  # or a link to itself
        return "broken links"
    is_output = entry.name in OUTPUT
    if (is_output or entry.is_dir()) and "command" in read_card(path.parent if is_output else path):
        return "output of runs"
    return "" if entry.is_dir() or entry.is_file() else "no ordinary files"  # such as a pipe, where a read would wait


def split_of(path: Path) -> str | None:
    """The split that a file belongs to: its name, or the name of a folder on its path, is the split's name."""
    words = AROUND.sub("", strip_packing(path).stem), *reversed(path.parts[:-1])
    return next((split for word in words for split, names in SPLITS.items() if word.lower() in names), None)


def _has_card(folder: Path) -> bool:
    """Whether a folder has a card of the Hub that says which files belong to which split."""
    with suppress(OSError, ValueError, YAMLError):  # no card, or not a card
        return "configs" in (metadata_load(folder / "README.md") or {})
    return False


def _builder_of(data: str) -> Any:
    """The builder of `datasets` for a Hub id, or for a folder with a card. A colon precedes a configuration or, if
    there is only one, the end of the names of splits, such as train_sft. Raises UsageError if one must be named."""
    import datasets

    name, config = split_name(data)
    path = local_path(name)
    where = str(path.absolute()) if _has_card(path) else name
    try:
        return datasets.load_dataset_builder(where, config or None)
    except ValueError:
        if len(names := datasets.get_dataset_config_names(where)) < 2:
            return datasets.load_dataset_builder(where)
        raise UsageError(f"--data {data} has configurations ({shorten(names)}): use --data {name}:{names[0]}") from None


def _find_files(data: str, advice: str) -> tuple[Files, dict[str, Any]]:
    """Like `table_files` of a Hub id, or a folder with a card: the files whose types `datasets` would guess, if any."""
    with _errors_in_one_line(data, advice):
        builder = _builder_of(data)
    if builder.name not in ("csv", "json"):
        return {}, {}
    own, usual = vars(builder.config), vars(type(builder.config)())
    if any(own[option] != usual[option] for option in usual.keys() - SET_BY_ALL):
        return {}, {}
    files = {str(split): [*map(str, places)] for split, places in builder.config.data_files.items()}
    found = {split: [one if "://" in one else Path(one) for one in places] for split, places in files.items()}
    return found, builder.info.features or {}


def check_not_streamed(data: str, max_samples: int | None) -> None:
    """Raises UsageError if data that are not rows of a table are to be read as a stream."""
    if max_samples is not None:
        raise UsageError(f"--max_samples reads rows of a file or of the Hub, and --data {data} has none: remove it")


def names_of_splits(data: str, splits: Iterable[str]) -> list[str]:
    """The names of the training split and of the evaluation splits, the best first. Raises UsageError."""
    given, (source, end) = {name.lower(): name for name in splits}, split_name(data)
    end = f"_{end.lower()}"
    each = [[word for name in names for word in (name + end, name) if word in given] for names in SPLITS.values()]
    train, *others = ([given[word] for word in words] for words in each)
    if given and not train:
        ends = [name.partition("_")[2] for name in given.values() if name.startswith("train_")]
        advice = f": use --data {source}:{ends[0]} for train_{ends[0]}" if ends else ""
        raise UsageError(f"--data {data}: expected a train split, found {', '.join(given.values())}{advice}")
    return [*train[:1], *chain(*others)]


@contextmanager
def _errors_in_one_line(data: str, advice: str) -> Iterator[None]:
    """Turns what `datasets` raises and logs into one UsageError."""
    import datasets

    datasets.disable_progress_bars()
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # the library and its network stack raise dozens of types
        cause: Any = error.__cause__ or error
        reason = first_line(cause)
        if "BatchSize" in reason:  # Arrow's word
            reason = "a file has no rows: remove it"
        elif isinstance(cause, datasets.table.CastError):
            names = [", ".join(found) for found in (cause.requested_column_names, cause.table_column_names)]
            reason = f"one has the columns {names[0]}, another {names[1]}: give all the same columns"
        if local_path(data).exists():
            raise UsageError(f"--data {data}: the files cannot be read ({reason})") from None
        raise UsageError(f"--data {data}: no such folder; loading from the Hub failed ({reason}); {advice}") from None
    finally:
        datasets.logging.set_verbosity(verbosity)
