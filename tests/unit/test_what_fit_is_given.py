"""Promise: what fit cannot take is refused in one line that says what to give instead."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from accelerate_recipes.common.check.parity import mixed_types
from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.data.batches import fetch
from accelerate_recipes.common.data.collate import pad_to_longest
from accelerate_recipes.common.data.sets import Collated, MapDataset, check_datasets
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.loop import fit
from accelerate_recipes.common.norms import clip, norm_of
from accelerate_recipes.common.parallel.deepspeed import check_weights
from accelerate_recipes.common.parallel.strategies import DDP, DEEPSPEED, FSDP2, PIPELINE, TENSOR
from accelerate_recipes.common.plan import Plan
from accelerate_recipes.common.step.batch_loss import put
from accelerate_recipes.common.step.optimizer import step_if_finite
from accelerate_recipes.common.step.refusals import check_given, check_optimizer
from accelerate_recipes.common.step.values import check_metrics
from accelerate_recipes.doctor import asked
from support.config_files import lines_of
from support.runs import ROOT

WEIGHT = nn.Parameter(torch.zeros(3))
QUESTION = ["config.yaml", False, [], True]  # of the doctor


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


class Wrapper:
    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer


class WrapperByName(torch.optim.SGD):
    """A subclass that does not call the constructor of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


class NeedsClosure(torch.optim.SGD):
    """Says that its closure may be left out, and fails without it."""

    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()


class Sam(torch.optim.SGD):
    """As in most copies of SAM (Foret et al. 2021): a closure that may be None, and then an assertion."""

    def first_step(self) -> None: ...
    def second_step(self) -> None: ...
    def step(self, closure: Any = None) -> None:
        assert closure is not None


class NeedsLoss(torch.optim.SGD):
    def step(self, loss: Tensor) -> None:  # type: ignore[override]
        super().step()


class OwnRate(torch.optim.Optimizer):
    def __init__(self, weights: list[nn.Parameter], **defaults: Any):
        super().__init__(weights, defaults)

    def step(self, closure: Any = None) -> None: ...


def prepared(model: nn.Module) -> torch.optim.Optimizer:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare_optimizer(sgd(model))


def marked() -> nn.Module:
    model = nn.Linear(2, 2)
    model._is_accelerate_prepared = True  # as accelerator.prepare does
    return model


class Compiled(nn.Module):
    """As what torch.compile(model) returns, without the import of its compiler."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda model: [sgd(model)],
            "is of the type list: expected one whole torch.optim.Optimizer: type torch.optim.AdamW([{",
        ),
        (lambda model: (sgd(model),), "is of the type tuple: expected one whole"),
        (lambda model: {"all": sgd(model)}, "is of the type dict: expected one whole"),
        (
            lambda model: Wrapper(sgd(model)),
            "is of the type Wrapper: expected one whole torch.optim.Optimizer: give fit the SGD in it",
        ),
        (
            lambda model: WrapperByName(sgd(model)),
            "WrapperByName: expected one whole torch.optim.Optimizer: call super().__init__",
        ),
        (prepared, "AcceleratedOptimizer is already prepared, and fit does this itself: remove accelerator.prepare"),
        (lambda model: torch.optim.lr_scheduler.StepLR(sgd(model), 1), "use --lr_schedule, or schedule="),
        (lambda model: None, "the optimizer is None: expected one whole torch.optim.Optimizer: use, for example"),
        (lambda model: torch.optim.SGD, "the optimizer is the class SGD: expected"),
    ],
)
def test_what_is_no_optimizer(make: Callable[[nn.Module], Any], expected: str) -> None:
    model = nn.Linear(2, 2)
    assert expected in refusal(check_given, model, make(model))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (None, "the model is None: expected one torch.nn.Module"),
        ([nn.Linear(2, 2)], "the model is of the type list"),
        (marked(), "Linear is already prepared"),
        (Compiled(), "give fit the model without torch.compile, and use --compile"),
        (nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), "Sequential is already wrapped for several processes"),
    ],
)
def test_what_is_no_model_or_wrapped(model: Any, expected: str) -> None:
    assert expected in refusal(check_given, model, torch.optim.SGD([WEIGHT], 0.1))


def test_an_accelerator_that_start_did_not_make() -> None:
    from accelerate import Accelerator

    model, given = nn.Linear(2, 2), {"accelerator": Accelerator(cpu=True)}
    assert "use accelerator = start(config)" in refusal(check_given, model, sgd(model), given)


def test_the_doctor_says_the_line_of_the_run() -> None:
    model, step = nn.Linear(2, 2), lambda model, batch: {"loss": model(batch["x"])[:, 0]}
    for optimizer, dataset in (([sgd(model)], ROWS), (sgd(model), DataLoader(ROWS))):
        answer = asked.refusals(QUESTION, None, model, optimizer, step, dataset, ROWS, RunConfig())
        of_run = refusal(lambda: (check_given(model, optimizer), check_datasets(dataset, ROWS, None)))  # noqa: B023
        assert lines_of(answer) == [of_run]


def test_what_torch_compiles_has_the_name_that_is_looked_for() -> None:
    from torch._dynamo.eval_frame import OptimizedModule

    assert "_orig_mod" in inspect.getsource(OptimizedModule.__init__)


def test_optimizers_of_torch_are_taken() -> None:
    model = nn.Linear(2, 2)
    plan = Plan.of(RunConfig(), Layout(), 99)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Rprop", "NAdam", "RAdam", "ASGD", "Adafactor"):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        check_given(model, optimizer)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps its step
        check_optimizer(model, optimizer, plan)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (OwnRate([WEIGHT], rate=0.1), "OwnRate has no learning rate, which fit sets in each step: give it lr=1e-3"),
        (OwnRate([WEIGHT], lr=None, relative_step=True), "with relative_step=False and warmup_init=False"),
    ],
)
def test_what_has_no_learning_rate(optimizer: torch.optim.Optimizer, expected: str) -> None:
    assert expected in refusal(check_optimizer, nn.Linear(2, 2), optimizer, Plan.of(RunConfig(), Layout(), 99))


def test_adafactor_of_transformers_needs_a_rate() -> None:
    from transformers import Adafactor

    model, plan = nn.Linear(2, 2), Plan.of(RunConfig(), Layout(), 99)
    check_optimizer(model, Adafactor(model.parameters(), lr=1e-3, relative_step=False, warmup_init=False), plan)
    assert "relative_step=False" in refusal(check_optimizer, model, Adafactor(model.parameters()), plan)


def test_norm_of_sparse_gradients() -> None:
    """An id that is there twice counts as its sum."""
    gradient = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([[3.0, 0.0], [1.0, 3.0]]), (4, 2))
    dense = gradient.to_dense()
    assert norm_of([torch.ones(2), gradient]) == pytest.approx(float(norm_of([torch.ones(2), dense])))
    clip([gradient], norm_of([gradient]), 1.0)
    assert torch.allclose(gradient.to_dense(), dense / dense.norm())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (NeedsClosure, "NeedsClosure calls the model several times per step, or its step has arguments; fit"),
        (Sam, "Sam calls the model several times per step"),
        (NeedsLoss, "NeedsLoss calls the model several times per step, or its step has arguments"),
        (torch.optim.LBFGS, "LBFGS calls the model several times per step"),
        (torch.optim.AdamW, "AdamW does not take sparse gradients (RuntimeError: "),
    ],
)
def test_optimizers_that_fail_in_their_step(make: Any, expected: str) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    assert expected in refusal(step_if_finite, make(table.parameters(), lr=0.1), None)


def test_own_errors_of_an_optimizer_stay() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        step_if_finite(Broken([WEIGHT], 0.1), None)


def test_weights_of_another_type_than_the_batch() -> None:
    model, batch = nn.Linear(2, 2).bfloat16(), {"y": torch.ones(1).long(), "x": torch.ones(1, 2)}
    with pytest.raises(RuntimeError) as caught:
        model(batch["x"])
    line = mixed_types(caught.value, model, batch)
    assert line is not None and 'is bfloat16, "x" of the batch is float32: use batch["x"].to(torch.bfloat16)' in line
    assert mixed_types(caught.value, nn.Linear(2, 2), batch) is None
    assert mixed_types(ValueError("a type"), model, batch) is None


@pytest.mark.parametrize("name", ["forward_step", "collate_fn", "schedule", "batch_loss"])
def test_what_is_no_function(name: str) -> None:
    model, given = nn.Linear(2, 2), {name: {"loss": 1}}
    expected = f"{name} is of the type dict: give fit the function itself"
    given = given if name == "forward_step" else {"options": given}
    assert expected in refusal(check_given, model, sgd(model), given)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("summary", "fit has no option summary: did you mean summarize?"),
        ("collate", "fit has no option collate: did you mean collate_fn?"),
        ("callbacks", "fit has no option callbacks: use one of summarize, tokens_per_sample, "),
    ],
)
def test_unknown_options_of_fit(name: str, expected: str) -> None:
    """The run refuses them, and so does the doctor."""
    model, told = nn.Linear(2, 2), {name: None}
    given = SimpleNamespace(layout=Layout()), model, sgd(model), check_metrics, ROWS, ROWS, RunConfig()
    line = refusal(partial(fit, *given, **told))
    assert line.startswith(expected)
    assert lines_of(asked.refusals(QUESTION, *given, **told)) == [line]


def test_weights_that_zero_would_train_in_float32() -> None:
    model = nn.Linear(2, 2).bfloat16()
    check_weights(model, sgd(model), Plan.of(RunConfig(), Layout(precision="bf16"), 99))
    line = refusal(check_weights, model, sgd(model), Plan.of(RunConfig(), Layout(), 99))
    assert "weight is bfloat16, and DeepSpeed would cast it: use --config_file accelerate_configs/ddp.yaml" in line


ROWS = [{"x": torch.ones(index + 1), "boxes": torch.ones(index + 1, 4)} for index in range(2)]


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (DataLoader(ROWS), "set is a DataLoader; fit makes batches itself, of --batch_size samples"),
        ("data/train.csv", "set is a path, data/train.csv: give fit the samples there"),
        (Path("data"), "set is a path, data: "),
        ({"train": ROWS, "test": ROWS}, "set is a dict of train, test: expected a single set"),
        (None, "set is None: expected a dataset with len(dataset) and dataset[index]"),
        ([], "list is empty"),
    ],
)
def test_what_is_no_data_set(dataset: Any, expected: str) -> None:
    training = refusal(check_datasets, dataset, ROWS, None)
    evaluation = refusal(check_datasets, ROWS, {"new": dataset}, None)
    assert expected in training and expected in evaluation
    assert evaluation == training.replace("the training set", "the evaluation set")


def graph(size: int) -> dict[str, Tensor]:
    return {"x": torch.ones(size, 3), "edge_index": torch.zeros(2, 3 * size, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("samples", "collate_fn", "expected"),
    [
        (ROWS, None, "pad them to one shape, or use collate_fn=pad_to_longest()"),
        ([graph(3), graph(4)], None, '"edge_index" has shape (2, 9) in one sample and (2, 12) in another: pad them to'),
        ([graph(3), graph(4)], pad_to_longest(), "one shape in the dataset or in a collate_fn, with a mask"),
        (
            [{"x": torch.ones(2).numpy()}, {"x": torch.ones(3).numpy()}],
            None,
            "one shape in the dataset or in a collate",
        ),
        ([Wrapper, Wrapper], None, "samples have the type type: expected dicts"),
        ([{"image": object()}] * 2, None, '"image" of a sample is a object: expected a tensor, number or string: make'),
        ([{"x": [1, 2]}] * 2, None, 'make it a tensor; .with_format("torch") of datasets does this for lists'),
        ([{"x": [1, 2]}, {"x": [1]}], None, '"x" of a sample is a list: expected a tensor'),
        (
            [{"target": row} for row in ROWS],
            None,
            '"target" of a sample is a dict: expected a tensor, number or string',
        ),
        (
            [{"target": [row]} for row in ROWS],
            None,
            "give each tensor in it its own name, and pad parts that vary in",
        ),
        (ROWS, lambda samples: {"target": samples}, '"target" of a batch is a list: expected a tensor'),
        (ROWS, lambda samples: {"x": torch.cat([row["x"] for row in samples])}, "expected (2, ...), a row for each"),
        (ROWS, lambda samples: tuple(samples), "collate_fn returns a tuple: expected a dict of tensors of shape (2,"),
        (ROWS, lambda samples: samples[0]["y"], "collate_fn cannot make a batch of the samples: KeyError: 'y' (test"),
    ],
)
def test_samples_that_make_no_batch(samples: list[Any], collate_fn: Any, expected: str) -> None:
    dataset: MapDataset = samples if collate_fn is None else Collated(samples, collate_fn)
    assert expected in refusal(fetch, dataset, [0, 1])


def test_advice_to_pad_leads_to_a_batch() -> None:
    assert fetch(Collated(ROWS, pad_to_longest()), [0, 1])["boxes"].shape == (2, 2, 4)
    assert fetch(Collated(ROWS, lambda samples: default_collate([{"n": len(row)} for row in samples])), [0, 1])


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (
            "loss",
            (),
            'use reduction="none", or leave out mean(); for a transformers model, take the logits, not its .loss',
        ),
        ("loss", (2, 2), "made (batch, batch); else .flatten(1).mean(1); if some elements are ignored"),
        ("confusion", (2, 2), "else .flatten(1).mean(1); for a metric without a value per example"),
        ("confusion", (3, 3), "keeps the batch dimension; for a metric without a value per example"),
        ("accuracy", (), 'use reduction="none", or leave out mean(); for a metric without a value per example'),
    ],
)
def test_advice_fits_the_value(name: str, shape: tuple[int, ...], expected: str) -> None:
    values = {"loss": torch.ones(2, requires_grad=True)} | {name: torch.ones(shape, requires_grad=True)}
    assert expected in refusal(check_metrics, values, 2, "forward_step")


def test_predictions_may_be_numbers_if_examples_get_them() -> None:
    values = {"loss": torch.ones(2, requires_grad=True), "probability": torch.ones(2, 3)}
    check_metrics(values, 2, "forward_step", has_examples=True)
    assert '"probability" has shape (2, 3)' in refusal(check_metrics, values, 2, "forward_step")
    assert '"loss" has shape (2, 3)' in refusal(check_metrics, {"loss": torch.ones(2, 3)}, 2, "forward_step", True)


def test_predictions_of_different_lengths_are_filled_up() -> None:
    rows: dict[str, torch.Tensor] = {}
    for index, answers in enumerate([[[1, 2]], [[3]], [[4, 5, 6]]]):
        answer = torch.tensor(answers)
        put(rows, index, 3, {"answer": answer, "probability": answer / 8, "is_odd": answer % 2 == 1})
    assert rows["answer"][:, 0].tolist() == [[1, 2, -100], [3, -100, -100], [4, 5, 6]]
    assert rows["probability"][1, 0].tolist() == [0.375, -100, -100]
    assert rows["is_odd"][:, 0].tolist() == [[True, False, False], [True, False, False], [False, True, False]]


def test_output_of_transformers_is_told_of_its_mean() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    output = CausalLMOutput(loss=torch.ones((), requires_grad=True), logits=torch.ones(2, 4, 8))
    assert "take the logits, not its .loss, which is a mean" in refusal(check_metrics, output, 2, "forward_step")


@pytest.mark.parametrize("kind", [DDP, FSDP2, TENSOR, DEEPSPEED, PIPELINE])
def test_advice_names_another_config(kind: Any) -> None:
    """Of a kind that cannot train a model, no config that asks for this kind: for DDP, one process."""
    name = re.search(r"accelerate_configs/\w+\.yaml", kind.fallback)
    assert name is not None
    config = yaml.safe_load((ROOT / name[0]).read_text())
    asks_for = {
        "DDP": config["distributed_type"] == "MULTI_GPU",
        "FSDP2": config["distributed_type"] == "FSDP",
        "DeepSpeed": config["distributed_type"] == "DEEPSPEED",
        "TP": "parallelism_config" in config,
        "pipeline": "--pipeline_stages" not in kind.fallback,
    }
    assert not asks_for[kind.name]
