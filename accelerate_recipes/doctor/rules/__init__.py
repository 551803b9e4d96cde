"""The rules about the machine, and about what a run cannot see: keys that Accelerate ignores or takes in another way. A
rule is a function that yields findings; the rules of a module stand in its RULES."""

from accelerate_recipes.doctor.rules import deepspeed, hardware, keys, launching, machine, sharding

MACHINE = machine.RULES
MACHINE_WITHOUT_CONFIG = machine.RULES_WITHOUT_CONFIG
CONFIG = (*keys.RULES, *launching.RULES, *sharding.RULES, *deepspeed.RULES, *hardware.RULES)
RECIPE = hardware.RULES_OF_A_RECIPE
