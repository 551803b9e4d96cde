"""Promise: words and tags come from files and tables as they stand there, and entities are counted as seqeval does."""

import json
import re
from pathlib import Path

import pytest
import torch

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED
from accelerate_recipes.common.tasks.models.encoder import word_tokenizer
from accelerate_recipes.common.tasks.nlp.tagged_words import EncodedWords, Entities, load_tagged_words
from accelerate_recipes.common.tasks.reading.labelled import Labelled

SENTENCES = [(["EU", "rejects", "German", "calls"], ["B-ORG", "O", "B-MISC", "O"]), (["#", "1"], ["O", "B-DAY"])]
MARKS = {"BIO": "BI", "BIOES": "BIES", "BILOU": "BILU", "of words": ""}


def load(path: Path, word: str = "tokens", tag: str = "ner_tags") -> list[tuple[list[str], list[str]]]:
    """All sentences of a source, and the names of their tags."""
    parts = load_tagged_words(str(path), word, tag, list)
    found = [
        (words, [part.classes[tag] for tag in tags]) for part in parts for words, tags in zip(part.samples, part.labels)
    ]
    return sorted(found, key=lambda sentence: -len(sentence[0]))


@pytest.mark.parametrize("separator", ["\t", " "])
def test_conll_file(tmp_path: Path, separator: str) -> None:
    lines = ["-DOCSTART- -X- O", ""]
    for words, tags in SENTENCES:
        lines += [*(f"{word}{separator}x{tag}{separator}{tag}" for word, tag in zip(words, tags)), "", ""]
    (tmp_path / "a.conll").write_text("\n".join(lines[:-2]))  # the last line of the file ends the last sentence
    assert load(tmp_path / "a.conll") == SENTENCES
    found = [tags for _, tags in load(tmp_path / "a.conll", tag="2")]
    assert found == [[f"x{tag}" for tag in tags] for _, tags in SENTENCES]


@pytest.mark.parametrize("space", ["\u00a0", "\u2028", "\u3000", "\u2009"])
@pytest.mark.parametrize("separator", ["\t", " ", "  "])
def test_other_white_space_is_part_of_a_word(tmp_path: Path, space: str, separator: str) -> None:
    expected = [([f"E{space}U", "is"], ["B-ORG", "O"])] * 2
    lines = [*(f"{word}{separator}{tag}" for word, tag in zip(*expected[0])), ""] * 2
    (tmp_path / "a.conll").write_text("\n".join(lines), encoding="utf-8")
    assert load(tmp_path / "a.conll") == expected


def test_universal_dependencies(tmp_path: Path) -> None:
    text = (
        "# sent_id = 1\n# text = a b c d e f g h\n1\tI\tI\tPRON\n2-3\tdon't\t_\t_\n2\tdo\tdo\tAUX\n3\tn't\tnot\tPART\n"
    )
    (tmp_path / "a.conllu").write_text(f"{text}3.1\t_\t_\t_\n\n1\tNo\tno\tINTJ\n")
    expected = [(["I", "do", "n't"], ["PRON", "AUX", "PART"]), (["No"], ["INTJ"])]
    assert load(tmp_path / "a.conllu", "2", "4") == expected


def test_comments_before_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some have as many columns as the words; a word may be # itself."""
    lines = ["# id 1\tdomain=en", "the _ _ O", "# _ _ B-X", "", "# sent_id = 12", "EU _ _ B-ORG", ""]
    (tmp_path / "a.conll").write_text("\n".join(lines))
    assert load(tmp_path / "a.conll") == [(["the", "#"], ["O", "B-X"]), (["EU"], ["B-ORG"])]
    taken = "no column is called tokens: column 1 is used, no column is called ner_tags: column 4 is used"
    assert taken in capsys.readouterr().out


def test_tags_that_are_numbers_have_their_order(tmp_path: Path) -> None:
    rows = [{"tokens": ["a", "b"], "ner_tags": [number, 12 - number]} for number in range(13)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train, _ = load_tagged_words(str(tmp_path / "a.jsonl"), "tokens", "ner_tags", list)
    assert train.classes == [str(number) for number in range(13)]


def test_folder_with_parts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, (words, tags) in zip(("train", "dev"), SENTENCES):
        (tmp_path / f"{name}.txt").write_text("\n".join(map(" ".join, zip(words, tags))))
    train, evaluation = load_tagged_words(str(tmp_path), "tokens", "ner_tags", list)
    assert (train.samples, evaluation.samples) == ([SENTENCES[0][0]], [SENTENCES[1][0]])
    assert "4 classes: B-DAY 1, B-MISC 1, B-ORG 1, O 3" in capsys.readouterr().out


def test_folder_with_three_parts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, (words, tags) in zip(("train", "valid", "test"), [*SENTENCES, SENTENCES[0]]):
        (tmp_path / f"{name}.txt").write_text("\n".join(map(" ".join, zip(words, tags))))
    train, evaluation = load_tagged_words(str(tmp_path), "tokens", "ner_tags", list)
    assert train.samples == evaluation.samples == [SENTENCES[0][0]]
    assert "1 for train, 1 for test, 1 not read, such as valid.txt" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["lists", "texts", "parquet"])
def test_tables(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [{"tokens": words, "ner_tags": tags} for words, tags in [*SENTENCES, ([], [])]]
    path = tmp_path / "a.jsonl"
    if kind == "parquet":
        from datasets import ClassLabel, Dataset, Features, List, Value

        names = ["O", "B-ORG", "B-MISC", "B-DAY"]
        features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=names))})
        path = path.with_suffix(".parquet")
        Dataset.from_list(rows, features=features).to_parquet(str(path))
        assert load_tagged_words(str(path), "tokens", "ner_tags", list)[0].classes == names  # in their order
    elif kind == "texts":
        rows = [{name: " ".join(cell) for name, cell in row.items()} for row in rows]
    if kind != "parquet":
        path.write_text("\n".join(map(json.dumps, rows)))
    assert load(path) == SENTENCES and "1 of 3 rows have no words: left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.conll", "a O\n\nb\n", "line 3 has 1 columns: expected 2 as in the others"),
        ("a.txt", "Only a text.\n", "expected two sentences or more, in CoNLL files with an empty line"),
        ("a.conll", "a O\nb O\n" * 20, "expected two sentences or more, in CoNLL files with an empty line after each"),
        (
            "a.jsonl",
            '{"tokens": "EU is", "ner_tags": [[0, 2, "ORG"]]}',
            "a.jsonl, row 1, column ner_tags: expected text",
        ),
        ("a.txt", "Word\nword\n", "expected a word and its tag in a line, found 'Word'"),
        ("a.jsonl", '{"words": ["a"]}', "has no column tokens: use --word_column with one of words"),
        ("a.jsonl", '{"tokens": ["a", "b"], "ner_tags": ["O"]}', "row 1: 2 words in column tokens, and 1 tags in"),
        ("a.jsonl", '{"tokens": ["a"], "ner_tags": [null]}', "row 1: 1 words in column tokens, and 0 tags in"),
        ("a.docx", "a O", "its name must end with one of"),
        ("a.conll", "a\tO\nb\t\n\nc\tO\n", "line 2 has no word or no tag: b"),
        ("a.conll", "a\tO\n\tO\n\nc\tO\n", "line 2 has no word or no tag: "),
        ("a.conll", "a\tO\n\nb\tO\n", "all tags are the same (O): expected different ones"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, text: str, line: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=re.escape(line)):
        load(tmp_path / name)


def test_first_token_of_a_word_has_its_tag(capsys: pytest.CaptureFixture) -> None:
    source = Labelled([["go", "12", "\u200b", "go"], ["\u200b"]], [(0, 1, 2, 3), (0,)], ["a", "b", "c", "d"])
    tokenizer = word_tokenizer(["go 1 2 go 1 2"], 16)
    samples = EncodedWords(source, tokenizer, 16)
    assert len(samples) == 2 if tokenizer.tokenize("\u200b") else len(samples) == 1
    assert samples[0]["labels"].tolist()[:4] == [IGNORED, 0, 1, IGNORED]  # [CLS] go 1 2
    cut = EncodedWords(source.part(torch.tensor([0])), tokenizer, 3)
    assert cut[0]["labels"].tolist() == [IGNORED, 0, 1] and cut[0]["weight"] == 2
    assert "2 of 4 words have no token up to --max_length: left out" in capsys.readouterr().out


def spans(tags: list[str]) -> set[tuple[int, int, str]]:
    """(first word, last word, type) of each entity, by the rules of conlleval."""
    found, start = set(), 0
    for place, tag in enumerate(tags):
        mark, _, kind = tag.partition("-") if re.match("[BILUES]-", tag) else ("S", "", tag)
        last = tags[place - 1] if place else "O"
        if not (mark in "ILE" and last[:2] in ("B-", "I-") and last[2:] == kind):
            start = place
        following = tags[place + 1] if place + 1 < len(tags) else "O"
        goes_on = tag[:2] in ("B-", "I-") and following[:2] in ("I-", "L-", "E-") and following[2:] == kind
        if tag != "O" and not goes_on:
            found.add((start, place, kind))
    return found


@pytest.mark.parametrize("scheme", MARKS)
def test_entities_are_those_of_seqeval(scheme: str) -> None:
    """Of any order of tags, well-formed or not; and scikit-learn makes the same measures of them."""
    from sklearn.metrics import precision_recall_fscore_support

    classes = ["O", *(f"{mark}-{kind}" for kind in ("PER", "LOC") for mark in MARKS[scheme])]
    classes = classes if MARKS[scheme] else ["NOUN", "VERB", "ADJ"]
    generator = torch.Generator().manual_seed(0)
    labels, predicted = (torch.randint(len(classes), (200, 12), generator=generator) for _ in range(2))
    predicted = predicted.where(torch.rand(200, 12, generator=generator) < 0.4, labels)
    labels = labels.masked_fill(torch.rand(200, 12, generator=generator) < 0.3, IGNORED)
    words = [
        [[classes[tag] for tag in row[real != IGNORED].tolist()] for row, real in zip(tags, labels)]
        for tags in (labels, predicted)
    ]
    entities = Entities(classes)
    counts = entities.count(predicted, labels)
    ours = entities.measures(counts)
    real, found = ([(number, *span) for number, row in enumerate(rows) for span in spans(row)] for rows in words)
    assert [counts[name].sum() for name in ("entities", "predicted_entities")] == [len(real), len(found)]
    every = sorted({*real, *found})
    both = ([span in {*some} for span in every] for some in (real, found))
    theirs = precision_recall_fscore_support(*both, average="binary")[:3]
    assert [ours[name] for name in ("precision", "recall", "f1")] == pytest.approx(theirs, abs=1e-9)
    if scheme != "of words":
        seqeval = pytest.importorskip("seqeval.metrics")
        as_they_are = [[[tag.replace("L-", "E-").replace("U-", "S-") for tag in row] for row in rows] for rows in words]
        assert ours["f1"] == pytest.approx(seqeval.f1_score(*as_they_are), abs=1e-9)
        assert ours["precision"] == pytest.approx(seqeval.precision_score(*as_they_are), abs=1e-9)


@pytest.mark.parametrize("first", ["-DOCSTART-", "-DOCSTART- O", "-DOCSTART- -X- O O"])
def test_a_first_line_without_words(tmp_path: Path, first: str) -> None:
    file = tmp_path / "a.conll"
    file.write_text(f"{first}\n\n" + "EU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n" * 10)
    train, evaluation = load_tagged_words(str(file), "words", "tags", list)
    assert (len(train.samples), len(evaluation.samples), train.classes) == (9, 1, ["B-ORG", "O"])


def test_a_header_names_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "Sentence\tTag\tWord\n" + "\n".join(f"{row}\tO\tParis\n{row}\tB-LOC\tParis\n" for row in range(10))
    path = tmp_path / "a.tsv"
    path.write_text(rows)
    train, evaluation = load_tagged_words(str(path), "Word", "Tag", list)
    assert len(train.samples) + len(evaluation.samples) == 10
    assert train.samples[0] == ["Paris", "Paris"] and train.classes == ["B-LOC", "O"]
    path.write_text(rows.replace("Tag\tWord", "Word\tTag").replace("O\tParis", "Paris\tO"))
    load_tagged_words(str(path), "tokens", "ner_tags", list)
    line = "only the first line has the tag Tag: if this line names the columns, use --word_column Sentence"
    assert f"{line} --tag_column Tag" in capsys.readouterr().out


def test_a_table_with_a_word_in_each_row_is_refused(tmp_path: Path) -> None:
    words = "Sentence #,Word,Tag\nSentence: 1,London,B-geo\n,calls,O\n,,\nSentence: 2,Paris,B-geo\n"
    (tmp_path / "a.csv").write_text(words.replace(",,\n", ""))
    with pytest.raises(UsageError, match="each row has a single word: expected a sentence; or use"):
        load_tagged_words(str(tmp_path / "a.csv"), "Word", "Tag", list)


def test_a_list_that_became_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("words,tags\n" + "\"['EU', 'is']\",\"['B-ORG', 'O']\"\n" * 10)
    line = r"a cell has a list or dict as text, \['EU', 'is'\]: use a real one, in JSON lines"
    with pytest.raises(UsageError, match=line):
        load_tagged_words(str(tmp_path / "a.csv"), "words", "tags", list)
    (tmp_path / "a.csv").write_text("words,tags\n" + 'a b,"[1, 0]"\n' * 10)
    with pytest.raises(UsageError, match=r"a cell has a list or dict as text, \[1, 0\]"):
        load_tagged_words(str(tmp_path / "a.csv"), "words", "tags", list)
