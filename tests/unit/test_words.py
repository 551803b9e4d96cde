"""Promise: the code uses the field's words, which CONTRIBUTING.md explains."""

import re

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


def test_translated_phrases_stay_out() -> None:
    pages = {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/recipes/*.md")}
    pages -= {ROOT / "docs" / "verified.md"}  # quotes what earlier runs printed
    files = [path for folder in ("common", "accelerate_recipes", "recipes") for path in ROOT.glob(f"{folder}/**/*.py")]
    assert len(pages) > 30
    texts = {path: " ".join(path.read_text().split()) for path in (*pages, *files)}
    found = [
        f'{path.relative_to(ROOT)}: "{match[0]}": {better}'
        for path, text in texts.items()
        for pattern, better in TRANSLATED.items()
        for match in re.finditer(pattern, text)
    ]
    assert not found


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
