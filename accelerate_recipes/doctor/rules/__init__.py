"""The rules about the machine, and about what a run cannot see: keys that Accelerate ignores, or reads differently. A
rule is a function that yields findings; a module lists its rules in RULES."""

from accelerate_recipes.doctor.rules import keys, launching, sections, this_machine

MACHINE = (this_machine.unusable_gpu, this_machine.shared_memory)
MACHINE_WITHOUT_CONFIG = (this_machine.unasked_config,)  # with a named one, Accelerate does not read its default file
CONFIG = (*keys.RULES, *launching.RULES, *sections.RULES, *this_machine.RULES)
RECIPE = (this_machine.shared_memory_of_workers,)
