"""The error of a run whose first steps differ from one process."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..alone.kept import Changes
from ..layout import Layout
from ..parallel.strategies import main_strategy, strategies_of
from ..step.guards import changing_sample
from ..step.setup import Setup
from .compare import Gap, Key
from .first_difference import FirstDifference
from .first_pass import FirstPass
from .noise import what_does_not_repeat
from .reference import Reference
from .trace import Step

# Where a difference begins, and its likely cause: in the recipe, or in the framework under it.
CAUSES = {
    "loss": "a hook, or {layout}, weights the losses of a process by its own number of tokens, micro-batches or "
    "processes",
    "backward": "a hook or an autograd function depends on the process, or {layout} divides this module wrongly",
    "factor": "a hook, or {layout}, multiplies the gradients by a number of processes or of micro-batches",
    "norm": "{layout} counts some weights more or less than once",
    "eval": "the steps are equal, but something writes weights for the evaluation, as a schedule-free optimizer does, "
    "and {layout} computes with others",
    "": "not all gradients pass through the model that forward_step is given: call model(...), not model.module, one "
    "of its layers or a model from outside; and use no hooks on gradients; if the recipe does neither, {layout} adds "
    "them up wrongly",
}


def verdict(
    gaps: Mapping[Key, Gap], steps: Sequence[Step], search: FirstDifference, setup: Setup, first_pass: FirstPass
) -> str:
    """Names the first of these differences, where it begins, and its likely cause. `steps`: the step of `search` as
    each process took it, the main process first."""
    order, layout = ("value", "eval", "norm", "weight", "replica"), setup.plan.layout
    reference, number = search.reference, search.number
    first = min(gaps, key=lambda key: (order.index(key[0]), key != ("value", "loss")))
    lines = [f"{layout} does not give the result of one process: in step {number + 1}, {gaps[first].text}"]
    where, line = search.find(first[0])
    lines += [f"  {line}"] if line else []
    where = where or "eval" * all(what == "eval" for what, _ in gaps)
    values = where == "forward" or any(what in ("value", "eval") for what, _ in gaps)
    only_weights = not values and not where and ("norm", "") not in gaps
    causes = _causes_in_the_recipe(first_pass, reference.changes, getattr(setup.accelerator, "asked", {}), gaps)
    cause = _cause_in_a_sample(steps, reference.steps[number])
    cause = cause or next((cause for cause, applies in causes.items() if applies), None)
    if cause is None and values and number == min(reference.steps):
        cause = _cause_of_values(where, first_pass.draws, layout)
    elif cause is None:
        main, optimizer = main_strategy(layout), type(setup.optimizer).__name__
        text = main.cause_in_update if only_weights else f"{CAUSES.get(where, CAUSES[''])}: use {{fallback}}"
        cause = text.format(layout=layout, optimizer=optimizer, fallback=main.fallback)
    return "\n".join([*lines, f"  likely cause: {cause}", "  --check_steps 0 trains without this check"])


def not_repeated(reference: Reference) -> str | None:
    """The lines for a first step that one process cannot repeat with the same result: not all of its changes are
    restored, or it draws unseeded random numbers. Then no difference can be called noise. None if it repeats itself."""
    again, expected = reference.again, reference.steps[min(reference.steps)]
    if (why := what_does_not_repeat(again, expected, reference.is_low)) is None:
        return None
    if (cause := _cause_in_a_sample([again], expected)) is None:
        known = ", ".join(reference.changes.all_names()[:3])
        cause = (
            "forward_step, a hook or the optimizer draws without a seed, or keeps something where the check does not "
            f"look, such as a file, or an object of a package{f'; it restored {known}' * bool(known)}: give "
            "forward_step a third argument, step, the number of the optimizer step, and compute from it"
        )
    return (
        f"when one process repeats the first step from the same state, {why}\n  likely cause: {cause}\n"
        "  --check_steps 0 trains without this check"
    )


def lost_at_resume(reference: Reference) -> list[str]:
    """Names of what a step leaves for later steps and a checkpoint does not store, if their result depends on it."""
    forgotten, expected = reference.forgotten, reference.steps[max(reference.steps)]
    depends = forgotten is not None and what_does_not_repeat(forgotten, expected, reference.is_low)
    return reference.changes.all_names() if depends else []


def _cause_in_a_sample(steps: Sequence[Step], expected: Step) -> str | None:
    """Names a sample that a process read differently than the main process; None if there is none."""
    for row, batch in (each for step in steps for each in step.samples.items()):
        for name, sums in batch.items():
            for sample, here, there in zip(expected.ids[row], sums, expected.samples[row].get(name, [])):
                if here != there:
                    return changing_sample(f'"{name}" of sample {sample}')
    return None


def _causes_in_the_recipe(
    first: FirstPass, changes: Changes, asked: Mapping[str, str], gaps: Mapping[Key, Gap]
) -> dict[str, Any]:
    """{cause: whether it applies} of mistakes in the recipe, with what to type; the likeliest first."""
    keeps = first.keeps or first.lost
    written, generator, kept = (next(iter(each), "") for each in (first.written, changes.generators, keeps))
    what, place = next(iter(asked.items()), ("", ""))
    one, other = next((changes.sharing[name] for _, name in gaps if name in changes.sharing), ("", ""))
    asks = (
        f"forward_step calls {what} ({place}): return the values of its own samples; losses and metrics are already "
        "means"
    )
    if not ("gather" in what or "reduce" in what):
        asks = f"the recipe asks for {what} ({place}): remove it; the loss is already the mean"
    return {
        f"the forward pass changes {written}, but each process sees different samples, or with tensor parallelism "
        "different features: do it outside the forward pass": first.written,
        f"forward_step or the model has its own random generator, {generator}: draw from those of torch, numpy or "
        "random, which are seeded for each micro-batch": changes.generators,
        f"{asks} over the samples of all processes": asked,
        f"forward_step, a layer or a hook changes {kept}; each process calls it less often than a single process, and "
        "a pipeline has its own copies of layers: give forward_step a third argument, step, the number of the "
        "optimizer step": keeps,
        f"{one} and {other} share their data, but are two tensors, and the config separates them: make them one "
        "tensor, as in b.weight = a.weight": one,
        f"the weights are {first.low_weights}, and each update is rounded to few bits: make them "
        "float32": first.low_weights,
    }


def _cause_of_values(where: str, draws: bool, layout: Layout) -> str:
    """The likely cause if values differ at once, and what to type. A framework's errors look like the recipe's."""
    fallback = main_strategy(layout).fallback
    for cause in filter(None, [strategy.cause_at_once for strategy in strategies_of(layout)]):
        cause = cause.format(draws="draws random numbers, or " * draws, fallback=fallback)
        cause += ", or set dropout to 0" * draws
        return cause + f"; if nothing does, {layout} divides this module wrongly" * (where == "forward")
    if draws:
        return (
            "the forward pass chooses a random path, as layerdrop does, and a different one under this config: "
            f"set that to 0, or use {fallback}"
        )
    return (
        "forward_step or the model depends on the process, on the number of processes, or on what it did before: "
        "make it a function of the model's weights and the batch"
    )
