"""Find the answers to questions in texts: a small BERT from scratch, or a pretrained encoder of transformers.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/question_answering.py

Data: questions about functions of Python's standard library; the answers, if any, are in their docstrings and
arguments. Or your own CSV, JSON or parquet file, such as SQuAD's, or a Hub id.
Expect: 63 % exact matches and an F1 of 81 % on held-out functions. Tokens are words.
Time: a minute on two CPU cores.

To train on your own questions, or to continue from a pretrained encoder; and to ask the exported model:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/question_answering.py \\
        --data path/to/squad.json --model_name_or_path path/or/hub-id --max_length 384 --stride 128 --learning_rate 3e-5
    python recipes/question_answering.py --predict "What does it return?" --context path/to/text.txt
"""

import ast
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForQuestionAnswering, BertForQuestionAnswering

from accelerate_recipes import Schedule, UsageError, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch, Examples, ForwardStep, Metrics, pad_to_longest, parts_of
from accelerate_recipes.common.tasks.models.encoder import EncoderFlags, load_encoder, small_bert
from accelerate_recipes.common.tasks.models.pretrained import export_of, exported_model
from accelerate_recipes.common.tasks.nlp.pairs import documented_functions
from accelerate_recipes.common.tasks.nlp.questions import Question, Windows, best_answers, exact_and_f1, load_questions
from accelerate_recipes.common.tasks.reading.mixture import Sources
from accelerate_recipes.common.tasks.reading.text_files import local_path, open_text

INPUTS = ("input_ids", "token_type_ids", "attention_mask")
PADDING = {"places": -1}  # as for tokens that are not part of the text
LOWEST = -1e9


@dataclass(kw_only=True)
class Config(EncoderFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "stdlib"
    epochs: int = 6
    batch_size: int = 32
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "linear"
    weight_decay: float = 0.01
    log_every: int = 50
    max_length: int = flag(96, "tokens of a window: a question and a part of its text", minimum=8)
    stride: int = flag(32, "tokens of a text that a window shares with the next one", minimum=0)
    max_answer_length: int = flag(30, "tokens of the longest answer that the model gives", minimum=1)
    pad_to_max_length: bool = flag(False, "pad each window to --max_length, and let padding count in the loss")
    question_column: str = flag("question", "name of the column with the questions")
    context_column: str = flag("context", "name of the column with the texts")
    answers_column: str = flag("answers", "name of the column with the answers: as in SQuAD, or a text")
    predict: str | None = flag(None, "instead of training, ask the model in --output_dir this question about --context")
    context: str = flag("", "path of the text file that holds the answer to --predict")


def questions_about_functions() -> list[Question]:
    """What a Python function does and returns, and the defaults of its arguments; some questions have no answer."""
    found = list[Question]()
    for node, docstring in documented_functions():
        head = f"{node.name}({ast.unparse(node.args)}): "
        context = head + " ".join(" ".join(docstring.split("\n\n")[:2]).split())
        asked = {
            f"What does {node.name} do?": re.compile(r"(.+?)(?=\. |\.?$)").match(context, len(head)),
            f"What does {node.name} return?": re.search(r"\b[Rr]eturns? (.+?)(?=[.;:] |\.?$)", context),
        }
        # Not about the first argument; about one without a default only if another one has a default.
        for name in (one.arg for one in node.args.args[1:] if node.args.defaults):
            value = re.search(rf"\b{name}(?:: [^=,]+)?\s?=\s?([^,()]*\w[^,()]*)[,)]", head)
            asked[f"What is the default of {name}?"] = value
        for text, match in asked.items():
            found.append(Question(text, context, [(match[1], match.start(1))] if match else []))
    return found


def best_spans(start: Tensor, end: Tensor, places: Tensor, max_length: int) -> dict[str, Tensor]:
    """Each window's best answer of at most `max_length` tokens, by the sum of logits, and the score of no answer."""
    length, row = start.shape[1], torch.arange(len(start), device=start.device)
    is_text = places[..., 0] >= 0
    fits = (is_text[:, :, None] & is_text[:, None, :]).triu().tril(max_length - 1)
    score, place = (start[:, :, None] + end[:, None, :]).masked_fill(~fits, LOWEST).flatten(1).max(1)
    begin, last = places[row, place // length, 0], places[row, place % length, 1]
    return {"score": score, "no_answer": start[:, 0] + end[:, 0], "begin": begin, "end": last}


def make_forward_step(config: Config) -> ForwardStep:
    """`forward_step` for the flags."""

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss of each window: the mean over the answer's two ends. In an evaluation also the model's answer."""
        output = model(**{name: batch[name] for name in INPUTS if name in batch})
        ends = torch.stack([output.start_logits, output.end_logits]).float()
        if not config.pad_to_max_length:  # else padding, which depends on the micro-batch, would count in the loss
            ends = ends.masked_fill(batch["attention_mask"] == 0, LOWEST)
        losses = [F.cross_entropy(*each, reduction="none") for each in zip(ends, (batch["start"], batch["end"]))]
        spans = {} if model.training else best_spans(ends[0], ends[1], batch["places"], config.max_answer_length)
        return {"loss": (losses[0] + losses[1]) / 2, **spans}

    return forward_step


def build(config: Config, parts: list[list[Question]]) -> tuple[Any, Any]:
    """Returns (model, tokenizer). Raises UsageError for wrong sizes or a wrong path."""
    if path := config.model_name_or_path:
        trust = {"trust_remote_code": config.trust_remote_code}
        model, tokenizer = load_encoder(AutoModelForQuestionAnswering, path, config.max_length, **trust)
        head = getattr(model, "qa_outputs", getattr(model, "classifier", None))  # the second in ModernBERT
        if not isinstance(head, nn.Linear) or head.out_features != 2:
            raise UsageError(
                f"{type(model).__name__} does not give two scores for each token: use a BERT or a similar encoder"
            )
    else:
        texts = (text for part in parts for question in part for text in (question.text, question.context))
        model, tokenizer = small_bert(config, BertForQuestionAnswering, texts)
        # It shifts all logits alike, so its gradient nearly cancels out, and Adam would turn rounding into steps.
        model.bert.encoder.layer[-1].output.LayerNorm.bias.requires_grad_(False)
        head = model.qa_outputs
    head.bias.requires_grad_(False)  # for the same reason
    return model, tokenizer


@torch.no_grad()
def predict(config: Config, asked: str) -> None:
    """Prints the exported model's answer."""
    if not config.context:
        raise UsageError("--predict asks about a text: use --context with the path of its file")
    model, tokenizer = exported_model(AutoModelForQuestionAnswering, config.output_dir)
    with open_text(local_path(config.context), None) as file:
        question = Question(asked, file.read())
    longest = min(config.max_length, tokenizer.model_max_length)
    windows = Windows([question], tokenizer, longest, config.stride)
    values = make_forward_step(config)(model, pad_to_longest(PADDING)([windows[row] for row in range(len(windows))]))
    print_once(best_answers([windows], values, may_be_none=True)[question] or "no answer")


def main(config: Config) -> None:
    """Trains the encoder and exports it with its tokenizer, or answers a question."""
    if config.predict is not None:
        return predict(config, config.predict)
    accelerator = start(config)
    columns = config.context_column, config.question_column, config.answers_column
    sources = Sources(config, lambda data: load_questions(data, *columns, questions_about_functions))
    parts = [train for train, _ in sources.parts.values()]
    model, tokenizer = build(config, parts)
    may_be_none = any(not question.answers for part in parts for question in part)

    def measures(examples: Examples) -> Metrics:
        return exact_and_f1(best_answers(parts_of(eval_set), examples, may_be_none), may_be_none)

    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    make = partial(Windows, tokenizer=tokenizer, max_length=config.max_length, stride=config.stride)
    train_set, eval_set = sources.sets(make)
    fit(
        accelerator,
        model,
        optimizer,
        make_forward_step(config),
        train_set,
        eval_set,
        config,
        summarize=lambda means: {name: mean for name, mean in means.items() if "loss" in name},
        examples=measures,
        collate_fn=pad_to_longest(
            PADDING | {"input_ids": tokenizer.pad_token_id},
            multiple_of=config.max_length if config.pad_to_max_length else 1,
        ),
        export=export_of(model, tokenizer),
    )


if __name__ == "__main__":
    run(main, Config)
