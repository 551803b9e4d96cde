"""The rules about the machine, and about keys that Accelerate ignores or reads differently: a run cannot see them. A
rule is a function that yields findings; a module lists its rules in RULES."""

from accelerate_recipes.doctor.rules import keys, launching, sections, this_machine

MACHINE = (this_machine.unusable_gpu, this_machine.shared_memory)
MACHINE_WITHOUT_CONFIG = (this_machine.unasked_config,)  # Accelerate reads its default file only if no config is named
CONFIG = (*keys.RULES, *launching.RULES, *sections.RULES, *this_machine.RULES)
RECIPE = (this_machine.shared_memory_of_workers,)
