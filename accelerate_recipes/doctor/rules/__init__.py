"""The rules about the machine, and about what a run cannot see: keys that Accelerate ignores or reads differently. A
rule is a function that yields findings; a module lists its rules in RULES."""

from accelerate_recipes.doctor.rules import hardware, keys, launching, sharding

MACHINE = hardware.RULES_OF_THE_MACHINE
MACHINE_WITHOUT_CONFIG = hardware.RULES_WITHOUT_CONFIG
CONFIG = (*keys.RULES, *launching.RULES, *sharding.RULES, *hardware.RULES)
RECIPE = hardware.RULES_OF_A_RECIPE
