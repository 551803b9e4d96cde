"""Pairs of a chosen and a rejected answer, and their log-probabilities under a reference model."""

import re
from collections.abc import Callable, Collection
from math import inf
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from ...checkpoint.identity import known_by
from ...config import RunConfig
from ...cpu_group import CpuGroup
from ...data.mixed import parts_of
from ...data.sets import Batch, CollateFn
from ...environment import print_once
from ...errors import UsageError
from ...evaluation import evaluate_set
from ...launch.start import ObservedAccelerator
from ...layout import Layout
from ...parallel.strategies import check_trainable, prepare
from ...plan import Plan
from ...step.guards import check_same_start, freeze_what_is_not_trained
from ...step.setup import Setup
from ..models.causal_lm import IGNORED, find_trained_places
from ..models.lora import digest_of_weights
from ..streams import cache_folder, write_once
from .chats import Chats, answers_by_rules, by_rules, load_samples, shift
from .conversations import Conversation, as_messages, check_messages, num_shared, options_of

OPPOSITES = {"Larger": "Smaller", "Smaller": "Larger", "After": "Before", "Before": "After"}
LAST_WORD = re.compile(r" ?\S*\Z")
VERSION = 5  # of the files on disk: a new number makes new files


class PairDataset(Dataset):
    """A pair of `load_pairs` per sample, the preferred conversation in column 0, the other one in column 1: {"tokens",
    "labels": int64 of shape (length, 2), "places": of trained labels, int64 of shape (number, 2)}, and with a reference
    "reference_chosen" and "reference_rejected", float32, 0-dim."""

    def __init__(self, pairs: Chats):
        self.rows = pairs.rows
        self.reference: Tensor | None = None  # of both answers, shape (pairs, 2); until `add_reference`

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, labels = zip(*[shift(self.rows[2 * index + side]) for side in (0, 1)])
        places = [find_trained_places(side) for side in labels]
        sample = {"tokens": _columns(tokens, 0), "labels": _columns(labels, IGNORED), "places": _columns(places, -1)}
        names = "reference_chosen", "reference_rejected"
        return sample | ({} if self.reference is None else dict(zip(names, self.reference[index])))


def _columns(tensors: Any, padding: int) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(tensors), padding_value=padding)


def load_pairs(data: str, tokenizer: Any, max_length: int, max_samples: int | None = None) -> tuple[Chats, Chats]:
    """(training pairs, evaluation pairs) of conversations, encoded, whose answers both have a token within the limit,
    and differ. Rows 2i and 2i + 1 are the preferred and the other conversation of pair i. Their common beginning is not
    trained. If the source has only one part, one pair in twenty is held out. Raises UsageError for missing data,
    missing columns, and messages or a template that cannot be used.

    Args:
        data: "rules" (the right answer, and the one to the opposite question); a .jsonl or .parquet file; or a Hub id.
            Its columns are "chosen" and "rejected", and perhaps "prompt", as in TRL: lists of messages, which the
            tokenizer's chat template turns into texts; or texts, which are used unchanged.
        tokenizer, max_length, max_samples: as in `load_chats`.
    """
    needs, lacks = [{"chosen", "rejected"}], "lacks the columns chosen and rejected, and perhaps prompt; it has"
    return load_samples(data, tokenizer, max_length, max_samples, "pair", split_pair, pairs_by_rules, needs, lacks)


def split_pair(row: dict[str, Any]) -> list[Conversation]:
    """[preferred conversation, the other one], as TRL reads a row: texts are used unchanged; without a prompt, their
    common beginning is the prompt. Raises UsageError for anything but lists of messages or texts."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if all(isinstance(text, str) for text in (prompt or "", chosen, rejected)):
        if prompt is None:
            if not (common := chosen[: _num_asked(chosen, rejected)]):
                raise UsageError("its texts begin differently: name the column of their question prompt")
            prompt = common.removesuffix(LAST_WORD.findall(common)[0])  # a word that differs belongs to the answers
        asked, both = as_messages(prompt, "user"), _without(prompt, [chosen, rejected])
        answers = [as_messages(text, "assistant") for text in both]
        return [Conversation(check_messages(asked + answer), 1, is_plain=True) for answer in answers]
    if not (isinstance(chosen, list) and isinstance(rejected, list) and chosen and rejected):
        raise UsageError('expected lists of messages such as {"role": "user", "content": "Why?"}, or texts')
    options, both = options_of(row), [as_messages(chosen), as_messages(rejected)]
    is_repeated = isinstance(prompt, str) and both[0][0]["role"] != "assistant"  # a text, which both begin with
    begins = [] if not prompt or is_repeated else as_messages(prompt, "user")
    first = len(begins) or _num_asked(*both)
    if not begins and any(side[first]["role"] != "assistant" for side in both):
        raise UsageError("its conversations differ before an answer: give both the same question")
    return [Conversation(check_messages(begins + messages), first, options) for messages in _without(begins, both)]


def _without(prompt: Any, answers: list[Any]) -> list[Any]:
    """The answers, texts or messages, without the prompt if both repeat it."""
    repeats = all(answer[: len(prompt)] == prompt and answer != prompt for answer in answers)
    return [answer[len(prompt) :] if repeats else answer for answer in answers]


def _num_asked(chosen: Any, rejected: Any) -> int:
    """The length of the common beginning, in characters or messages; at least one of each is left over."""
    return max(0, min(num_shared(chosen, rejected), len(chosen) - 1, len(rejected) - 1))


def pairs_by_rules() -> list[dict[str, Any]]:
    """1,000 conversations whose last answer follows a rule, or the opposite rule."""
    answers, pairs = answers_by_rules(), []
    for messages in by_rules():
        word, _, rest = messages[-2]["content"].partition(" ")
        wrong = {"role": "assistant", "content": answers[f"{OPPOSITES[word]} {rest}"]}
        pairs.append({"prompt": messages[:-1], "chosen": messages[-1:], "rejected": [wrong]})
    return pairs


def log_probabilities(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the chosen and the rejected answer, their numbers of tokens), each of shape (pairs, 2), of
    a padded batch of a `PairDataset`. The model is one of `with_losses`."""
    tokens, labels, *places = (batch[name].mT.flatten(0, 1) for name in ("tokens", "labels", "places") if name in batch)
    counts = (labels != IGNORED).sum(1)
    losses = model(tokens, labels, **({"places": places[0]} if places else {}))
    return (-losses * counts).unflatten(0, (-1, 2)), counts.unflatten(0, (-1, 2))


def weights_of_losses(
    text: str, known: Collection[str], smoothed: Collection[str], smoothing: float
) -> dict[str, float]:
    """{loss: weight} of `--loss`, such as dpo, or dpo:0.8,hinge:0.2; 1 without a weight. Raises UsageError for an
    unknown or repeated name, a weight that is not a number above 0, or smoothing that no loss supports."""
    pairs = [word.strip().partition(":") for word in text.split(",")]
    try:
        found = {name: float(weight) if colon else 1.0 for name, colon, weight in pairs}
    except ValueError:
        found = {}
    if len(found) < len(pairs) or not found.keys() <= {*known} or not all(0 < w < inf for w in found.values()):
        what = f"expected one of {', '.join(known)}, or a weighted sum of several, such as dpo:0.8,hinge:0.2"
        raise UsageError(f"--loss {text}: {what}")
    if smoothing and not found.keys() & {*smoothed}:
        raise UsageError(f"--label_smoothing is not for --loss {text}: use one of {', '.join(sorted(smoothed))}")
    return found


def add_reference(
    accelerator: ObservedAccelerator,
    model: Any,
    build: Callable[[], nn.Module],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    train_set: Any,
    eval_set: Any,
    config: RunConfig,
    collate_fn: CollateFn,
) -> None:
    """Adds the log-probabilities under the model before training to the pairs that the run uses. Other pairs have no
    numbers, so a step that took them would end the run.

    This happens before the run, not in its steps: only one model is in memory during training, and a resumed run has
    the same values. Pairs on disk keep them for the same weights, pairs and precision. Collective.

    Args:
        model: for a later call of `fit`; perhaps with adapters; this function does not change it.
        build: makes the same model again, with the same weights.
        optimizer_of: makes its optimizer.
        train_set, eval_set: a `PairDataset`, or a `Mixture` of some.
        config, collate_fn: as for `fit`.
    """
    ids = drawn_pairs(config, accelerator.layout, train_set)
    parts = {"train": parts_of(train_set), "eval": parts_of(eval_set)}

    def compute() -> dict[str, Tensor]:
        print_once(f"computing the reference's log-probabilities of {len(ids) + len(eval_set):,} pairs")
        reference, sets = build(), {"train": Subset(train_set, ids), "eval": eval_set}
        optimizer, found = optimizer_of(reference), dict[str, Tensor]()  # not used afterwards, as the reference
        given = accelerator, reference, optimizer, _reference_step, sets["train"], sets, config
        setup = Setup.of(*given, collate_fn=collate_fn)
        check_same_start(reference, setup.train_set, setup.eval_sets, CpuGroup(config.hang_timeout))
        setup = check_trainable(setup)
        freeze_what_is_not_trained(accelerator, reference, optimizer)
        engine = prepare(setup)
        for name, dataset in setup.eval_sets.items():
            results = evaluate_set(engine, dataset, poll=lambda: False, keeps=True)
            assert results is not None
            found[name] = torch.stack([results[1]["chosen"], results[1]["rejected"]], 1).float()
        accelerator.free_memory()
        found["train"] = torch.full((len(train_set), 2), torch.nan).index_copy(0, torch.tensor(ids), found["train"])
        return found

    pair_sets = [pair_set for each in parts.values() for pair_set in each]
    if any(isinstance(pair_set.rows, list) for pair_set in pair_sets):  # embedded
        found = compute()
    else:
        adapter, precision = getattr(model, "peft_adapter", None), accelerator.layout.precision
        weights = adapter.start_digest if adapter else digest_of_weights(model)
        pairs = [pair_set.rows._fingerprint for pair_set in pair_sets]
        folder = cache_folder("reference", VERSION, weights, model.config.to_json_string(), pairs, ids, precision)
        file, group = folder / "reference.safetensors", CpuGroup()
        # The first process reads for all: other machines may have other files.
        found = group.broadcast(load_file(file) if group.rank == 0 and file.is_file() else None)
        if found is None:
            found = compute()
            write_once(folder, "keeping them", lambda folder: save_file(found, folder / file.name))
    for name, each in parts.items():
        for pair_set, values in zip(each, found[name].split([len(pair_set) for pair_set in each])):
            pair_set.reference = values


def drawn_pairs(config: RunConfig, layout: Layout, train_set: Any) -> list[int]:
    """The ids of the training pairs that the steps of a run draw, and of those that identify a checkpoint's data.

    They are in the order of the steps, so that a longer run computes the first ones in the same micro-batches, with the
    same bits. If the steps leave out less than a batch, they are all ids, in order: then runs of any seed share them.
    """
    plan = Plan.of(config, layout, len(train_set), sampler=getattr(train_set, "sampler", None))
    epoch, num_left, found = 0, 1 if config.evaluate_only else plan.num_steps, dict[int, None]()
    while num_left > 0:
        order = plan.epoch_order(epoch)[: min(num_left, plan.steps_per_epoch) * config.batch_size]
        found |= dict.fromkeys(order.tolist())
        epoch, num_left = epoch + 1, num_left - plan.steps_per_epoch
        if len(train_set) - len(found) < config.batch_size:
            return list(range(len(train_set)))
    return list(found | dict.fromkeys(known_by(plan)))


def _reference_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    chosen, rejected = log_probabilities(model, batch)[0].unbind(1)
    return {"loss": -chosen, "chosen": chosen, "rejected": rejected}  # a loss must be there; it is not used
