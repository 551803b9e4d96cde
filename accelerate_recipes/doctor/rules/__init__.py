"""The rules about the machine, and about what a run cannot see: keys that Accelerate ignores or reads differently. A
rule is a function that yields findings; a module lists its rules in RULES."""

from accelerate_recipes.doctor.rules import hardware, keys, launching, sharding

MACHINE = (hardware.unusable_gpu, hardware.shared_memory)
MACHINE_WITHOUT_CONFIG = (hardware.unasked_config,)  # with a named one, Accelerate does not read its default file
CONFIG = (*keys.RULES, *launching.RULES, *sharding.RULES, *hardware.RULES)
RECIPE = (hardware.shared_memory_of_workers,)
