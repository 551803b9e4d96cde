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
# Functions and methods are named by verbs, or by what they return.
PARTICIPLE = r"^(?:def |    def (?=\w+\((?:self|cls)))_?((?!speed)[a-z]+ed|kept|cut|sent|drawn|shown|grown|written)\("


def test_replaced_words_stay_out() -> None:
    texts = [*ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "common").rglob("*.py")]
    assert not [path for path in texts if "check of the first steps" in path.read_text()]
    files = [path for folder in ("common", "accelerate_recipes", "recipes") for path in ROOT.glob(f"{folder}/**/*.py")]
    assert len(files) > 150
    found = [(path.name, word) for path in files for word in re.findall(REPLACED, path.read_text())]
    assert not found


def test_functions_are_no_participles() -> None:
    files = [path for path in ROOT.glob("*/*/*.py") if path.parent.name in ("data", "plan", "report", "tasks")]
    assert len(files) > 50
    assert not [found for path in files for found in re.findall(PARTICIPLE, path.read_text(), re.MULTILINE)]


def test_the_glossary_is_short() -> None:
    glossary = (ROOT / "CONTRIBUTING.md").read_text().partition("## Words")[2]
    assert 10 <= len(re.findall(r"^\| (?!---|word)", glossary, re.MULTILINE)) <= 25
