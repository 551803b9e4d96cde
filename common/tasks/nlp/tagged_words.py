"""Words with a tag each, in CoNLL files, in a table or on the Hub; and the entities that tags make."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...data.facts import printable, say
from ...data.sets import ListDataset
from ...errors import UsageError
from ..models.causal_lm import IGNORED
from ..reading.labelled import Labelled, check_differ, flatten, in_order, say_classes
from ..reading.rows import Table
from ..reading.sources import TABLES, divide, files_of_folder, load_tables, walk
from ..reading.text_files import Place, ending_of, local_path, open_text

CONLL = dict.fromkeys((".conll", ".conllu", ".bio", ".iob", ".iob2", ".txt", ".tsv"), "CoNLL")
ADVICE = f"use --data stdlib, a .jsonl or .parquet file, or one with a word per line: {', '.join(CONLL)}"
COMMENT = re.compile(r"# ?(id\s|[\w.]+ ?=)")  # such as "# sent_id = 12", before a sentence
MARK = re.compile("[BILUES]-.")  # of a tag: where in an entity the word is

Sentence = tuple[list[str], list[str]]  # words, and the tag of each


class EncodedWords(ListDataset):
    """Samples {"input_ids", "labels": int64 of shape (length,); "weight": float32, 0-dim}. The first token of a word
    has its tag as label, all others `IGNORED`. The weight is the number of words. A sample without words is left out.

    Args:
        source: words, and tuples of the numbers of their tags.
        tokenizer: a transformers tokenizer that knows which token belongs to which word.
        max_length: tokens beyond this number are left out. Prints how many words that affects.
    """

    def __init__(self, source: Labelled, tokenizer: Any, max_length: int):
        if not tokenizer.is_fast:
            raise UsageError("its tokenizer does not map tokens to words: use a model with tokenizer.json")
        encoded = tokenizer([*source.samples], is_split_into_words=True, truncation=True, max_length=max_length)
        self.samples, lost = [], 0
        for row, tags in enumerate(source.labels):
            words = encoded.word_ids(row)
            pairs = zip([None, *words], words)  # of each token, and of the one before it
            labels = [IGNORED if word is None or word == before else tags[word] for before, word in pairs]
            number = len({*words} - {None})
            lost += len(tags) - number
            if number:
                sample = {"input_ids": encoded["input_ids"][row], "labels": labels, "weight": float(number)}
                self.samples.append({name: torch.tensor(value) for name, value in sample.items()})
        if lost:
            say(f"{lost:,} of {len(flatten(source.labels)):,} words have no token up to --max_length: left out")
        if not self.samples:
            raise UsageError("no sentence has a word with a token: look at the columns that the flags name")


class Entities:
    """Counts the entities that tags make, as seqeval does: B-X and I-X (BIO), or with L- and U- (BILOU), or E- and S-.

    An entity ends where its type changes. An I- without a B- before it begins one. A tag without a mark is an entity
    of one word, O is no entity. `classes` are the tags in the order of their numbers, `types` the types of entities."""

    def __init__(self, classes: list[str]):
        marks, kinds = zip(*[(name[0], name[2:]) if MARK.match(name) else ("S", name) for name in classes])
        self.types = sorted({*kinds} - {"O"})
        numbers = {"O": 0} | {kind: number for number, kind in enumerate(self.types, start=1)}
        self.kinds = torch.tensor([numbers[kind] for kind in kinds])
        self.opens, self.continues = (torch.tensor([mark in some for mark in marks]) for some in ("BI", "ILE"))

    def count(self, predicted: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """{"entities", "predicted_entities", "right_entities": int64 of shape (batch, types)}. Both arguments hold
        numbers of tags, of shape (batch, length); a label `IGNORED` means no word."""
        beyond, order = (labels == IGNORED).int().sort(dim=1, stable=True)  # the words first, in their order
        real, ours = (self._find(tags.gather(1, order).clamp(min=0), beyond) for tags in (labels, predicted))
        right = real[0] * (real == ours).all(0)
        return {
            name: F.one_hot(kinds, 1 + len(self.types)).sum(1)[:, 1:]
            for name, kinds in (("entities", real[0]), ("predicted_entities", ours[0]), ("right_entities", right))
        }

    def _find(self, tags: Tensor, beyond: Tensor) -> Tensor:
        """(the type of the entity that begins at each place, or 0; where the entity at each place ends), stacked."""
        kinds, opens, continues = (each.to(tags.device)[tags] for each in (self.kinds, self.opens, self.continues))
        kinds = kinds.masked_fill(beyond > 0, 0)
        goes_on = opens[:, :-1] & continues[:, 1:] & (kinds[:, :-1] == kinds[:, 1:])
        begins = kinds * ~F.pad(goes_on, (1, 0))
        places = torch.arange(tags.shape[1], device=tags.device).expand_as(tags)
        ends = places.masked_fill(F.pad(goes_on, (0, 1)), tags.shape[1])
        return torch.stack([begins, ends.flip(1).cummin(1).values.flip(1)])

    def measures(self, examples: dict[str, Tensor]) -> dict[str, float]:
        """For `examples` of `fit`: precision, recall and F1 of all entities, and F1 of each type."""
        real, ours, right = (examples[f"{what}entities"].sum(0).double() for what in ("", "predicted_", "right_"))
        each = dict(zip(self.types, (2 * right / (real + ours).clamp(min=1)).tolist()))
        found = {"precision": right.sum() / ours.sum().clamp(min=1), "recall": right.sum() / real.sum().clamp(min=1)}
        found["f1"] = 2 * right.sum() / (real + ours).sum().clamp(min=1)
        return {name: float(value) for name, value in found.items()} | {f"f1_{kind}": f1 for kind, f1 in each.items()}


def load_tagged_words(
    data: str, word_column: str, tag_column: str, embedded: Callable[[], list[Sentence]]
) -> tuple[Labelled, Labelled]:
    """(training sentences, evaluation sentences): lists of words, and a tuple with the number of each word's tag. If
    the source has only one part, one in ten is held out. Raises UsageError for data that it cannot use.

    Args:
        data: "stdlib", for what `embedded` gives; a CoNLL file, or a folder of such files; or what `load_tables` takes.
        word_column, tag_column: names of columns with lists, or with texts that white space divides. The columns of
            CoNLL files are called 1, 2, ...; without such names the first one has the words, the last one the tags.
    """
    names: list[str] = []
    if data == "stdlib":
        parts = [embedded()]
    elif files := _conll_files(data):
        columns = word_column, tag_column
        parts = [[sentence for place in places for sentence in _sentences(place, *columns)] for places in files]
    else:
        tables = load_tables(data, ADVICE, is_labelled=lambda table: table.has_classes(tag_column))
        parts = [_rows(table, word_column, tag_column) for table in tables]
        names = getattr(getattr(tables[0].kinds.get(tag_column), "feature", None), "names", names)
    parts = divide(parts)
    if not all(parts):
        raise UsageError(f"--data {data}: expected two sentences or more, in CoNLL files with an empty line after each")
    classes = names or in_order(tag for part in parts for _, tags in part for tag in tags)
    train, evaluation = (
        Labelled([words for words, _ in part], [tuple(map(classes.index, tags)) for _, tags in part], classes)
        for part in parts
    )
    say_classes(data, (train, evaluation), "sentence")
    check_differ(data, (tag for part in parts for _, tags in part for tag in tags), "tags")
    if "O" not in classes:
        say(f"--data {data}: no tag is O: precision, recall and F1 count each word")
    return train, evaluation


def _conll_files(data: str) -> list[list[Place]]:
    """The files with one word per line of each split; empty if the data are rows of tables. Raises UsageError."""
    path = local_path(data)
    if ending_of(path) in CONLL and not path.exists():  # no Hub id
        raise UsageError(f"--data {data}: no such file; {ADVICE}")
    if path.is_dir() and not {ending_of(name) for name in walk(path)[0]} & {*TABLES} - {*CONLL}:
        return [*files_of_folder(data, path, CONLL, ADVICE).values()][:2]
    return [[path]] if path.is_file() and ending_of(path) in CONLL else []


def _sentences(place: Place, word_column: str, tag_column: str) -> Iterator[Sentence]:
    """The sentences of a CoNLL file: one word per line, an empty line after each; columns by tabs or spaces."""
    with open_text(place, None) as file:
        lines = [line.rstrip("\n") for line in file]
    first = next((line for line in lines if line.strip() and not line.startswith(("#", "-DOCSTART-"))), "")
    split: Any = partial(str.split, sep="\t") if "\t" in first else re.compile(r"[^ \t]+").findall
    cells = split(first)
    if has_header := {word_column, tag_column} <= {*cells}:
        lines[lines.index(first)] = ""
    names = cells if has_header else [str(number + 1) for number in range(len(cells))]
    at = [names.index(name) if name in names else default for name, default in ((word_column, 0), (tag_column, -1))]
    if len(names) < 2:
        raise UsageError(f"{place}: expected a word and its tag in a line, found {first.strip()[:40]!r}")
    if not {word_column, tag_column} <= {*names}:
        taken = [(name, names[column]) for name, column in zip((word_column, tag_column), at) if name not in names]
        say(f"{place}: {', '.join(f'no column is called {name}: column {there} is used' for name, there in taken)}")
    tag, every = cells[at[1]], [split(line)[at[1] :][:1] for line in lines]
    if not has_header and every.count([tag]) == 1 and tag != "O" and not MARK.match(tag):
        flags = f"--word_column {cells[at[0]]} --tag_column {tag}"
        say(f"{place}: only the first line has the tag {tag}: if this line names the columns, use {flags}")
    words, tags = list[str](), list[str]()
    for number, line in enumerate([*lines, ""], start=1):
        cells = split(line)
        is_text = re.match(r"\d+[-.]\d+\t", line) and ending_of(place) == ".conllu"  # of several words, or none
        is_comment = line[:1] == "#" and (len(cells) != len(names) or (not words and COMMENT.match(line)))
        if line.startswith("-DOCSTART-") or is_text or is_comment:
            continue
        if line.strip() and len(cells) != len(names):
            raise UsageError(f"{place}, line {number} has {len(cells)} columns: expected {len(names)} as in the others")
        if line.strip() and not (cells[at[0]].strip() and cells[at[1]].strip()):
            raise UsageError(f"{place}, line {number} has no word or no tag: {printable(line[:40])}")
        if line.strip():
            words.append(cells[at[0]])
            tags.append(cells[at[1]])
        elif words:
            yield words, tags
            words, tags = [], []


def _rows(table: Table, word_column: str, tag_column: str) -> list[Sentence]:
    """The words and tags of each row that has some. Raises UsageError."""
    table.check_columns({"--word_column": word_column, "--tag_column": tag_column})
    found = list[Sentence]()
    for row, (words, tags) in enumerate(zip(table.lists(word_column), table.lists(tag_column)), start=1):
        if len(words) != len(tags) or not all(tags):
            what = f"{len([*filter(None, tags)])} tags in {tag_column}: expected one for each"
            raise UsageError(f"--data {table.name}, row {row}: {len(words)} words in column {word_column}, and {what}")
        found += [(words, tags)] * bool(words)
    if len(found) < len(table):
        say(f"--data {table.name}: {len(table) - len(found):,} of {len(table):,} rows have no words: left out")
    if len(found) > 1 and all(len(words) == 1 for words, _ in found):
        form = "a CoNLL file, with a word and its tag in each line, and an empty line after each sentence"
        raise UsageError(f"--data {table.name}: each row has a single word: expected a sentence; or use {form}")
    return found
