"""What to type instead of what the loop or the launcher refuses: the edits that their own words name."""

import re

from accelerate_recipes.doctor.config import Config
from accelerate_recipes.doctor.finding import Edit, Finding
from accelerate_recipes.doctor.rules.keys import SECTIONS, name_in
from accelerate_recipes.doctor.rules.launching import by_hand

KEY_AND_VALUE = re.compile(
    r"(\w+): (\w+) (?:in the config file|there)|--(mixed_precision) (\w+) after accelerate launch"
)
ANOTHER_KEY = re.compile(r"(\w+) instead")
ANOTHER_VALUE = re.compile(r"(\w+)(?=;|$)")
NONE = re.compile("remove (it|it there|the key)(?=[;,]|$)")


def of_the_loop(line: str, config: Config) -> Finding:
    """A refusal of the loop in the three parts of a finding."""
    what, separator, advice = line.partition(": type ")
    if not separator:
        what, _, advice = line.rpartition(": ")
    edits, rest = _edits(what, advice, config)
    return Finding(what, "a run ends with this line", *edits, rest)


def _edits(what: str, advice: str, config: Config) -> tuple[list[Edit], str]:
    """The edits at the start of an advice, and the rest of it. Without edits, all is for the user."""
    subject = next(filter(None, (_place(name, config) for name in re.findall(r"\w+_\w+", what))), None)
    edits = []
    if found := KEY_AND_VALUE.match(advice):
        key, value = filter(None, found.groups())
        section = next((section for section, keys in SECTIONS.items() if key in keys), "")
        edits = [Edit(key, int(value) if value.isdecimal() else value, section)]
    elif subject and (found := NONE.match(advice)):
        edits = [subject]
    elif subject and (found := ANOTHER_KEY.match(advice)):
        value = config.section(subject.section)[subject.key]
        edits = [Edit(name_in(subject.section, found[1]) or found[1], value, subject.section), subject]
    elif subject and (found := ANOTHER_VALUE.match(advice)):
        edits = [Edit(subject.key, found[1], subject.section)]
    return edits, advice[found.end() :].lstrip(",; ").removeprefix("and ") if edits and found else advice


def _place(name: str, config: Config) -> Edit | None:
    """The removal of the key of that name; None if the file has no such key."""
    for section in SECTIONS:
        if (key := name_in(section, name)) in config.section(section):
            return Edit(str(key), None, section)
    return Edit(name) if name in config.values and name not in SECTIONS else None


def of_the_launcher(line: str) -> Finding:
    """What the launcher refuses, and no rule."""
    cure = "what the file lacks"
    if variable := re.search(r"\$\{?\w+\}?", line):
        cure = by_hand("machine_rank", variable[0])  # the only number that no rule reads
    elif "`--gpu_ids`" in line:
        cure = "gpu_ids: all; or distributed_type: 'NO' for one GPU"
    elif flag := re.search(r"`--(\w+)`", line):
        cure = f"{flag[1]}: with its value, in the file; or --{flag[1]} after accelerate launch"
    return Finding("accelerate launch refuses the file", line, cure)
