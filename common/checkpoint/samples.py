"""What the data of a run are, by a few of their samples: a run that resumes must draw the same."""

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import RunConfig
from ..cpu_group import CpuGroup
from ..data.batches import batches
from ..data.sets import MapDataset
from ..plan import Plan
from ..seeds import CPU, restore_generators

NUM_SAMPLES = 16
NUM_OF_EVALUATION = 4
NUM_PARTS = 8
# Of the root mean square: machines and versions of packages round differently, and another sample differs by far more.
TOLERANCE = 1e-3

Fact = str | list[float]  # a digest of what is exact, such as tokens; else the root mean square, and means of parts
Facts = dict[str, dict[str, Fact]]  # {sample id: {name of a tensor or text: what it is}}


def training_facts(plan: Plan, train_set: MapDataset, group: CpuGroup) -> Facts:
    """Facts about 16 samples that the run draws, with its transforms, its random numbers and those of its
    `collate_fn`. The same in all processes. A collective."""
    return group.broadcast(_facts(train_set, known_by(plan), plan.config))


def known_by(plan: Plan) -> list[int]:
    """The ids of the training samples that `training_facts` reads."""
    drawn = range(plan.num_samples) if plan.sampler is None else plan.epoch_order(0).tolist()
    return _some(drawn, NUM_SAMPLES)


def evaluation_facts(plan: Plan, eval_sets: Mapping[str, MapDataset], group: CpuGroup) -> dict[str, Facts]:
    """{name of an evaluation set: what four of its samples are}; a collective."""
    some = {name: _some(range(len(each)), NUM_OF_EVALUATION) for name, each in eval_sets.items()}
    return group.broadcast({name: _facts(eval_sets[name], ids, plan.config) for name, ids in some.items()})


def other_sample(here: Facts, there: Facts) -> tuple[str, str] | None:
    """(id, name) of the first value in which samples differ; None if none does. Samples that one of the two lacks, as
    they could not be read, are not compared."""
    for sample in [sample for sample in here if sample in there]:
        ours, theirs = here[sample], there[sample]
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs or not _is_same(ours[name], theirs[name]):
                return sample, name
    return None


def _some(drawn: Sequence[int], number: int) -> list[int]:
    return sorted({drawn[len(drawn) * part // number] for part in range(number)})


def _facts(dataset: MapDataset, ids: list[int], config: RunConfig) -> Facts:
    """What these samples are. Generators are afterwards as before. What cannot be read has no facts: the step that
    needs it says why. A resumed run reads twice, and leaves out what then is something else, such as random numbers
    that nobody seeds."""
    with restore_generators(CPU):
        facts = dict(_read(dataset, ids, config))
        if config.resume_from_checkpoint is not None:
            again = dict(_read(dataset, ids, config))
            facts = {key: fact for key, fact in facts.items() if other_sample({key: fact}, again) is None}
    return facts


def _read(dataset: MapDataset, ids: list[int], config: RunConfig) -> Iterator[tuple[str, dict[str, Fact]]]:
    """(id, what the sample is) of each. With workers one of them reads: a dataset may open its files at its first
    sample, and processes that share an open file read each other's bytes."""
    config = copy.copy(config)
    config.num_workers = min(config.num_workers, 1)
    stream = batches(dataset, [(0, torch.tensor([index])) for index in ids], CPU, config)
    try:
        for index, batch in zip(ids, stream):
            yield str(index), {name: _fact(value) for name, value in batch.items()}
    except Exception:
        return


def _fact(value: Any) -> Fact:
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex() or value.dtype == torch.uint8):
        parts = torch.view_as_real(value) if value.is_complex() else value
        numbers = parts.double().flatten().nan_to_num(0.0, 1.0, -1.0)
        means = [float(part.mean()) for part in numbers.tensor_split(NUM_PARTS) if len(part)]
        return [float(f"{number:.9g}") for number in (len(numbers), math.sqrt(numbers.square().mean()), *means)]
    exact = (tuple(value.shape), value.long().numpy().tobytes()) if isinstance(value, Tensor) else value
    return hashlib.sha256(repr(exact).encode()).hexdigest()[:16]


def _is_same(here: Fact, there: Fact) -> bool:
    if isinstance(here, str) or isinstance(there, str) or len(here) != len(there):
        return here == there
    return here[0] == there[0] and all(abs(one - other) <= TOLERANCE * here[1] for one, other in zip(here, there))
