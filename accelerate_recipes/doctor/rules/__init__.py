"""The rules about the machine, and about what a run cannot see: keys that Accelerate ignores or reads differently. A
rule is a function that yields findings; a module lists its rules in RULES."""

from accelerate_recipes.doctor.rules import deepspeed, hardware, keys, launching, machine, sharding

MACHINE = machine.RULES
MACHINE_WITHOUT_CONFIG = machine.RULES_WITHOUT_CONFIG
CONFIG = (*keys.RULES, *launching.RULES, *sharding.RULES, *deepspeed.RULES, *hardware.RULES)
RECIPE = hardware.RULES_OF_A_RECIPE
