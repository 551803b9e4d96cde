"""Promise: the code uses the field's words, which CONTRIBUTING.md explains."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from support.runs import ROOT

# What they replaced: parity check, strategy, main strategy, fallback, running sums, lazy parameters, dp_replicate;
# image, except in flags, files and keys of JSON.
REPLACED = (
    r"FirstSteps|first_steps\.py|Unrecorded|wrapper_of|kinds_of|KINDS|\bKind\b|is_asked|num_sharing|Unread|held_whole"
)
REPLACED += r"|made_up|layout\.(?:replicas|shards|tensor|sequence|stages|experts|kinds)\b"
REPLACED += r'|(?<!num_)(?:[Pp]icture|PICTURE)(?!s"|s\.png)|[Pp]hoto(?!metric)'
# Phrases that read like a translation, and what replaced them.
TRANSLATED = {
    r"at other places": "at different points",
    r"another content": "changes, or differs",
    r"\bmend(?:s|ed|ing)?\b": "correct, fix",
    r"want a gradient": "with requires_grad",
    r"for want of": "because ... ran out",
    r"\bset back\b": "restore",
    r"gave? back what (?:it|they) held": "restore",
    r"hands? (?:it|the \w+|the one)? ?on\b": "pass on",
    r"the one before it gave": "the output of the one before",
    r"workers? of the loader": "DataLoader worker",
    r"\bare others than\b": "differ from",
    r"(?<!there )is no (?:folder|file of|safetensors)": "is not a",
    r"(?:run|script|stage) (?:goes|went|go) on\b": "continues",
    r"starts? anew": "starts from scratch",
    r"for ever\b": "forever",
    r"weighs the": "weights the",
    r"steps also alone": "repeats its steps on one process",
    r"[Nn]othing is argued": "the check measures",
    r"[Ww]ho doubts": "to check a running run",
    r"What has another": "if ... differs",
    r"has other padding": "padding depends on",
    r"which may go\b": "you can delete",
    r"are behind each promise": "end-to-end tests cover",
    r"what processes hold that": "replicas of the same shard",
    r"is trained to have none": "learns that there is no answer",
    r"had their turn": "ran",
    r"at the speed of the bus": "copies slow training down",
    r"judged by the": "... decides",
    r"attention crosses it": "a token can attend to earlier documents",
    r"count as unchanged|counts as unchanged": "is not converted again",
    r"Raises \w+ for no\b": "for missing ..., or if there is no ...",
    r"(?:\"\"\"|\. )Notes (?:the|what|all|that|where|how)\b": "records",
    r"# as that\b": "repeat the words",
    r"new number makes new ones": "a new number makes new files",
    r"\bof another model\b": "holds a different model",
    r"\bcan be learnt\b": "the model learns",
    r"\b(?:is|are) taken (?:for|as)\b": "counts as",
    r"\bwhat varies\b": "parts that vary",
    r"\b[Aa] line (?:says|names|counts|tells)\b": "the run says, names, warns",
    r"\bafresh\b": "from scratch",
    r"report says how": "see the report",
    r"did not get to\b": "... failed",
}
# Constructions that read like a translation, whatever the words, and how to write it instead. Pages and code have none
# of them; recipes have none of the first two.
GENERAL = {
    r"(?<=[.;:] )Who(?:se|m)?\b(?![^.|]{0,150}\?)": "begin with the subject: you, the run, a process",
    r"\b(?:is|are|was|were|be) said\b": "a line says, the run says",
    r"(?<=\. )What (?!\w+ (?:is|are|does|do)\b[^.|]*\?)(?![^.|]{0,150}\?)": "begin with the subject",
    r"\bso many (?!of\b)[a-z]+": "that many, or the number",
    r"\bof (?:its|their|his) own\b(?! [a-z])": "its own ..., before the noun",
    r"\b(?:an)?other (?:\w+ ){1,3}than\b": "differs from, or different from",
    r"\b(?:is|are) none of\b": "is not a",
    r"\b(?:of|from) which (?:each|some|one|it|an?|the)\b": "with, or two sentences",
    r"\bas (?:it|they) stands?\b": "as in the file, unchanged",
    r"\b(?:no|some)body\b": "name the person or process, or use the passive",
    r"\b(?:go|goes|going|went) on\b": "continues",
}
# Functions and methods are named by verbs, or by what they return.
PARTICIPLE = r"^(?:def |    def (?=\w+\((?:self|cls)))_?((?!speed)[a-z]+ed|kept|cut|sent|drawn|shown|grown|written)\("


def test_replaced_words_stay_out() -> None:
    texts = [*ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "common").rglob("*.py")]
    assert not [path for path in texts if "check of the first steps" in path.read_text()]
    files = [path for folder in ("common", "accelerate_recipes", "recipes") for path in ROOT.glob(f"{folder}/**/*.py")]
    assert len(files) > 150
    found = [(path.name, word) for path in files for word in re.findall(REPLACED, path.read_text())]
    assert not found


def find(patterns: dict[str, str], paths: Iterable[Path]) -> list[str]:
    """The places where texts match, each with what to write instead. Of a page, what is not in a block of code."""
    texts = {
        path: " ".join(re.sub(r"```.*?```" if path.suffix == ".md" else "$^", "", path.read_text(), flags=re.S).split())
        for path in paths
    }
    return [
        f'{path.relative_to(ROOT)}: "{text[max(0, match.start() - 30) : match.end() + 30]}": {better}'
        for path, text in texts.items()
        for pattern, better in patterns.items()
        for match in re.finditer(pattern, text)
    ]


def test_translated_phrases_stay_out() -> None:
    pages = {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/recipes/*.md")}
    pages -= {ROOT / "docs" / "verified.md"}  # quotes what earlier runs printed
    files = [path for folder in ("common", "accelerate_recipes", "recipes") for path in ROOT.glob(f"{folder}/**/*.py")]
    assert len(pages) > 30
    assert not find(TRANSLATED, [*pages, *files])
    quoting = {ROOT / "docs" / "architecture.md", ROOT / "CHANGELOG.md"}  # docstrings, and what was written then
    assert not find(GENERAL, pages - quoting)
    assert not find(GENERAL, [path for path in files if not path.is_relative_to(ROOT / "recipes")])
    assert not find(dict([*GENERAL.items()][:2]), files)


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("It is fast. Who doubts a run can ask.", False),
        ("It is fast. Who wrote it?", True),
        ("It is fast. What has another result ends there.", False),
        ("It is fast. What does it cost?", True),
        ("In one line it is said which.", False),
        ("The layer has a generator of its own.", False),
        ("The layer has its own generator.", True),
        ("A run with another batch size than before.", False),
        ("Weights, of which each process has some.", False),
        ("The text is read as it stands.", False),
    ],
)
def test_general_patterns(text: str, is_plain: bool) -> None:
    assert any(re.search(pattern, text) for pattern in GENERAL) != is_plain


def test_functions_are_no_participles() -> None:
    rooms = (
        "common/data",
        "common/tasks",
        "accelerate_recipes/data",
        "accelerate_recipes/plan",
        "accelerate_recipes/report",
    )
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 50
    assert not [found for path in files for found in re.findall(PARTICIPLE, path.read_text(), re.MULTILINE)]


def test_the_glossary_is_short() -> None:
    glossary = (ROOT / "CONTRIBUTING.md").read_text().partition("## Words")[2]
    assert 10 <= len(re.findall(r"^\| (?!---|word)", glossary, re.MULTILINE)) <= 25
