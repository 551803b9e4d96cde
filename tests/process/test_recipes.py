"""Promise: each recipe reaches the result in its docstring, and so does its exported model."""

import json
import re
import runpy
import shutil
from pathlib import Path

import nbformat
import numpy
import pytest
import torch
from nbclient import NotebookClient

from support.launching import TIMEOUT_S, environment, fork
from support.recipes import LINEAR
from support.runs import ROOT, Run


def closing_line(run: Run) -> tuple[float, float]:
    """(R² of the closed form, distance of the exported weights from it)"""
    r2, distance = re.search(r"closed form: R² (\S+); the trained weights differ by (\S+)%", run.stdout).groups()
    return float(r2), float(distance) / 100


@pytest.mark.parametrize("config", ["ddp", pytest.param("deepspeed_zero3", marks=pytest.mark.full)])
def test_linear_regression_reaches_the_least_squares_optimum(tmp_path: Path, config: str) -> None:
    from sklearn.datasets import load_diabetes
    from sklearn.linear_model import LinearRegression

    run = fork(tmp_path / "run", config, LINEAR)
    features, target = load_diabetes(return_X_y=True)
    expected = LinearRegression().fit(features, target).score(features, target)
    best, distance = closing_line(run)
    assert best == pytest.approx(expected, abs=1e-6)
    assert run.column("eval/r2")[-1] == pytest.approx(expected, abs=1e-3)
    # The exported weights are the evaluated weights.
    standardised = (features - features.mean(0)) / features.std(0)
    fitted = standardised @ run.weights["weight"][0].double().numpy() + run.weights["bias"].item()
    residuals = (target - target.mean()) / target.std() - fitted
    assert 1 - (residuals**2).mean() == pytest.approx(run.column("eval/r2")[-1], abs=1e-5)
    assert distance < 0.1


def test_linear_regression_finds_known_weights(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", LINEAR, "--data synthetic --num_features 3 --batch_size 20 --epochs 60")
    assert run.weights["weight"][0].tolist() == pytest.approx([1, 2, 3], abs=1e-3)
    assert run.weights["bias"].item() == pytest.approx(1, abs=1e-3)


def test_introductory_example_prints_one_line_an_epoch(tmp_path: Path) -> None:
    arguments = "--data synthetic --num_samples 100 --num_features 10 --batch_size 100 --epochs 5 --log_every 1"
    arguments += " --learning_rate 0.01 --momentum 0 --lr_schedule constant"
    run = fork(tmp_path / "run", "ddp", LINEAR, arguments)
    assert len(re.findall(r"^step [1-5]/5  loss ", run.stdout, re.MULTILINE)) == 5
    assert run.column("epoch") == [1, 2, 3, 4, 5]
    # Gradient descent by hand on the weights 1 to 10 and the bias 1, in float64.
    table = runpy.run_path(str(ROOT / LINEAR))["make_linear"](100, 10)
    features = numpy.hstack([table.features.double().numpy(), numpy.ones((100, 1))])
    target = table.target.double().numpy()
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 1)
    weights = numpy.append(model.weight[0].detach().numpy(), model.bias.item()).astype(float)
    for loss in run.column("train/loss"):
        residuals = features @ weights - target
        assert loss == pytest.approx((residuals**2).mean(), rel=1e-5)
        weights -= 0.01 * 2 * features.T @ residuals / 100


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_linear_regression_on_a_table_of_ones_own(tmp_path: Path, separator: str) -> None:
    rows = [(x, x * x, 5, 3 * x - x * x / 10) for x in range(40)]  # a constant column does no harm
    lines = [("a", "b", "constant", "price"), *rows]
    (tmp_path / "file.csv").write_text("\n".join(separator.join(map(str, line)) for line in lines))
    arguments = f"--data {tmp_path / 'file.csv'} --target price --batch_size 8"
    run = fork(tmp_path / "run", "ddp", LINEAR, arguments)
    assert closing_line(run)[0] == pytest.approx(1)
    assert run.column("eval/r2")[-1] > 0.9


def outputs_of(notebook: nbformat.NotebookNode, folder: Path) -> list[str]:
    """Runs a notebook beside a copy of the recipes. Returns what each code cell printed."""
    for recipe in (ROOT / "recipes").glob("*.py"):
        shutil.copy(recipe, folder)
    client = NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment())
    return ["".join(part.get("text", "") for part in cell.outputs) for cell in notebook.cells if "outputs" in cell]


@pytest.mark.full
@pytest.mark.parametrize(
    "recipe",
    [
        *("linear_regression", "transformer", "text_classification", "embeddings", "finetune", "diffusion"),
        *("token_classification", "masked_lm", "preferences", "image_classification", "vision_language"),
        *("question_answering", "translation", "segmentation", "detection", "distillation", "speech"),
    ],
)
def test_notebook_trains_another_recipe_by_one_other_import(tmp_path: Path, recipe: str) -> None:
    notebook = nbformat.read(ROOT / "recipes" / "notebook.ipynb", as_version=4)
    launch = next(cell for cell in notebook.cells if cell.cell_type == "code")
    for known, other in (("from mnist import", f"from {recipe} import"), ("epochs=4", "max_steps=4")):
        assert known in launch.source
        launch.source = launch.source.replace(known, other)
    notebook.cells = [launch]
    assert "2 processes on 1 machine, DDP" in outputs_of(notebook, tmp_path)[0]
    card = json.loads((tmp_path / "outputs" / "notebook" / "run.json").read_text())
    assert (card["status"], card["num_processes"], card["last_metrics"]["step"]) == ("done", 2, 4)


def test_notebook_trains_on_two_processes(tmp_path: Path) -> None:
    output = outputs_of(nbformat.read(ROOT / "recipes" / "notebook.ipynb", as_version=4), tmp_path)
    assert "2 processes on 1 machine, DDP" in output[0]
    card = json.loads((tmp_path / "outputs" / "notebook" / "run.json").read_text())
    assert (card["status"], card["num_processes"]) == ("done", 2)
    assert f"accuracy {card['last_metrics']['eval/accuracy']:.4f}" in output[1].splitlines()[-1]
    predicted, labels = (json.loads(line[line.index("[") :]) for line in output[2].splitlines()[-2:])
    assert len(labels) == 20 and sum(p == label for p, label in zip(predicted, labels)) >= 18
