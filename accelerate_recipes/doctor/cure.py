"""What to type instead of what the loop or the launcher refuses: the edits that their own words name."""

import re

from accelerate_recipes.doctor.config import Config
from accelerate_recipes.doctor.finding import Edit, Finding
from accelerate_recipes.doctor.rules.keys import SECTIONS, TOP, name_in

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
    subject = next(filter(None, (_place(word, config) for word in re.findall(r"\w+", what))), None)
    edits = []
    if found := KEY_AND_VALUE.match(advice):
        key, value = filter(None, found.groups())
        section = next((section for section, keys in SECTIONS.items() if key in keys), "")
        # Beside DeepSpeed's own file, which has it, Accelerate refuses the key.
        if key != "mixed_precision" or "deepspeed_config_file" not in config.section("deepspeed_config"):
            edits = [Edit(key, int(value) if value.isdecimal() else value, section)]
    elif subject and (found := NONE.match(advice)):
        edits = [subject]
    elif subject and (found := ANOTHER_KEY.match(advice)):
        value = config.section(subject.section)[subject.key]
        edits = [Edit(name_in(subject.section, found[1]) or found[1], value, subject.section), subject]
    elif subject and (found := ANOTHER_VALUE.match(advice)):
        edits = [Edit(subject.key, found[1], subject.section)]
    return edits, advice[found.end() :].lstrip(",; ").removeprefix("and ") if edits and found else advice


def _place(word: str, config: Config) -> Edit | None:
    """The removal of the key that a word names; None if the file has no such key."""
    for section in SECTIONS:
        if (key := name_in(section, word)) and key in config.section(section):
            return Edit(key, None, section)
    return Edit(word) if word in config.values and word in TOP - SECTIONS.keys() else None


def of_the_launcher(line: str) -> Finding:
    """What the launcher refuses, and no rule."""
    cure = "what the file lacks"
    if variable := re.search(r"\$\{?(\w+)", line):
        cure = (
            "a number: Accelerate fills in no variables; the shell does, in a flag after accelerate launch, such as "
            f"--machine_rank ${variable[1]}"
        )
    elif "`--gpu_ids`" in line:
        cure = "gpu_ids: all; or distributed_type: 'NO' for one GPU"
    elif flag := re.search(r"`--(\w+)`", line):
        cure = f"{flag[1]}: with its value, in the file"
    return Finding("accelerate launch refuses the file", line, cure)
