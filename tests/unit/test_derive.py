"""Promise: a plan of tensor parallelism divides what each process can compute by itself, and nothing else."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import kinds
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.parallel.derive import PACKS, derive
from accelerate_recipes.common.parallel.strategies import TENSOR
from accelerate_recipes.common.plan import Plan
from accelerate_recipes.common.step.setup import Setup
from accelerate_recipes.common.weights.on_disk import on_disk

WIDTH, HEADS = 8, 2


class Attention(nn.Module):
    """Keeps the number of heads in an attribute, and has queries, keys and values in one layer or in three."""

    def __init__(self, is_fused: bool, has_norm: bool = False):
        super().__init__()
        self.num_heads, self.head_dim, self.is_fused = HEADS, WIDTH // HEADS, is_fused
        self.q = nn.Linear(WIDTH, 3 * WIDTH if is_fused else WIDTH)
        if not is_fused:
            self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(self.head_dim) if has_norm else nn.Identity()
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.q(x).chunk(3, -1) if self.is_fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (each.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for each in parts)
        mixed = F.scaled_dot_product_attention(self.norm(q), k, v).transpose(1, 2)
        return x + self.o(mixed.reshape(*x.shape[:2], self.num_heads * self.head_dim))


class Mlp(nn.Module):
    """A residual block of two layers, with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu, width: int = 12):
        super().__init__()
        self.up, self.between, self.down = nn.Linear(WIDTH, width), between, nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.down(self.between(self.up(x))))  # in place: nothing may keep the value of before


class Lowered(nn.Linear):
    """Rounds its weight by the largest element."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().max() / 7
        return F.linear(x, (self.weight / scale).round() * scale, self.bias)


class Centered(nn.Module):
    """Subtracts a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean((0, 1)), 0.5)
        return x - self.mean


def plan_of(model: nn.Module, size: int = 2, packs: tuple[int, ...] = PACKS) -> dict[str, str]:
    x = torch.randn(2, 3, WIDTH)

    def forward() -> Any:
        torch.manual_seed(0)
        with torch.no_grad():
            return {"loss": model(x.clone()).square().mean()}

    return derive(model, forward, size, packs)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **shape))


def samples() -> Any:
    return [{"x": torch.randn(3, WIDTH)} for _ in range(8)]


def test_attention_is_divided_with_its_number_of_heads() -> None:
    columns = dict.fromkeys(["0.q", "0.k", "0.v"], "colwise")
    assert plan_of(nn.Sequential(Attention(is_fused=False))) == {**columns, "0.o": "rowwise", "0.num_heads": "number"}


def test_queries_keys_and_values_of_one_layer_are_divided_each() -> None:
    model = nn.Sequential(Attention(is_fused=True))
    assert plan_of(model) == {"0.q": "packed_colwise_3", "0.o": "rowwise", "0.num_heads": "number"}
    assert plan_of(model, packs=(1,)) == {}


def test_weight_of_a_norm_of_heads_gets_the_sum_of_its_gradients() -> None:
    plan = plan_of(nn.Sequential(Attention(is_fused=False, has_norm=True)))
    assert plan["0.norm"] == "replicated_with_grad_allreduce" and plan["0.o"] == "rowwise"


@pytest.mark.parametrize(
    ("between", "is_divided"),
    [
        (F.gelu, True),
        (lambda x: x * torch.sigmoid(x), True),
        (lambda x: F.layer_norm(x, x.shape[-1:]), False),
        (lambda x: x.softmax(-1), False),
        (lambda x: x - x.mean(-1, keepdim=True), False),
        (lambda x: x.flip(-1), False),
        (lambda x: x.cumsum(-1), False),
        (lambda x: F.dropout(x, 0.5), False),  # each process would draw for its own features
        (lambda x: F.gelu(x) * torch.arange(12), False),
    ],
)
def test_what_mixes_features_is_whole(between: Callable[[Tensor], Tensor], is_divided: bool) -> None:
    expected = {"0.up": "colwise", "0.down": "rowwise"} if is_divided else {}
    assert plan_of(nn.Sequential(Mlp(between))) == expected


def test_layers_that_give_zeros_are_tried_with_others() -> None:
    model = nn.Sequential(Mlp(lambda x: x.softmax(-1) - 1 / x.shape[-1]))
    for weight in model.parameters():
        nn.init.zeros_(weight)
    assert plan_of(model) == {}


def test_layer_is_in_one_pair_alone() -> None:
    layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise([WIDTH, 6, 20, 10, 4, 2])]
    plan = plan_of(nn.Sequential(*layers))
    assert plan == {"0.0": "colwise", "1.0": "rowwise", "2.0": "colwise", "3.0": "rowwise"}


def test_a_pair_behind_one_that_a_norm_keeps_whole_is_divided() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.LayerNorm(12), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2))
    assert plan_of(model) == {"2": "colwise", "4": "rowwise"}


def test_widths_shared_weights_and_passes_of_their_own() -> None:
    assert plan_of(nn.Sequential(Mlp(width=9))) == {}
    assert set(plan_of(nn.Sequential(Mlp(width=12)), size=3)) == {"0.up", "0.down"}
    model = nn.Sequential(Mlp(), Mlp())
    model[1].up.weight = model[0].up.weight
    assert plan_of(model) == {}
    model = nn.Sequential(Mlp(), Mlp())
    model[0].up = Lowered(WIDTH, 12)
    assert set(plan_of(model)) == {"1.up", "1.down"}
    block = Mlp()
    assert set(plan_of(nn.Sequential(block, block))) == {"0.up", "0.down"}  # one layer that is called twice


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.1}, {"use_dora": True}, {"modules_to_save": ["up_proj"]}])
def test_adapters_are_divided_with_their_layers(options: dict[str, Any]) -> None:
    """Of B(A(x)), a layer that is divided by its outputs divides B, and one that is divided by its inputs A. What draws
    random numbers, or computes the norm of a whole weight, stays whole."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "down_proj", "gate_proj"]
    model: Any = get_peft_model(llama(), LoraConfig(target_modules=targets, r=3, **options))
    tokens = torch.arange(6).reshape(2, 3)

    def forward() -> Any:
        torch.manual_seed(0)
        with torch.no_grad():
            return model(input_ids=tokens).logits

    layer = "base_model.model.model.layers.0"
    plan = {name.removeprefix(f"{layer}."): style for name, style in derive(model, forward, 2).items()}
    attention = dict.fromkeys(["q_proj.base_layer", "q_proj.lora_B.default", "k_proj", "v_proj"], "colwise")
    attention = {f"self_attn.{name}": style for name, style in (attention | {"o_proj": "rowwise"}).items()}
    columns = ["gate_proj.base_layer", "gate_proj.lora_B.default"]
    columns += ["up_proj" + ".modules_to_save.default" * ("modules_to_save" in options)]
    mlp = dict.fromkeys(columns, "colwise") | dict.fromkeys(
        ["down_proj.base_layer", "down_proj.lora_A.default"], "rowwise"
    )
    expected = {f"mlp.{name}": style for name, style in mlp.items()} if "lora_dropout" not in options else {}
    assert plan == (attention | expected if "use_dora" not in options else {})


@pytest.mark.parametrize("check_steps", [0, 2])
def test_a_run_says_what_is_divided(capsys: pytest.CaptureFixture[str], check_steps: int) -> None:
    """And if nothing proves it."""
    model, train_set = nn.Sequential(Mlp(), nn.Flatten(), nn.Linear(3 * WIDTH, 1), nn.Flatten(0)), samples()
    plan = Plan.of(RunConfig(batch_size=4, check_steps=check_steps), Layout(num_processes=2, tp=2), len(train_set))
    setup = Setup(
        Accelerator(cpu=True),
        model,
        torch.optim.SGD(model.parameters()),
        lambda model, batch: {"loss": model(batch["x"])},
        plan,
        train_set=train_set,
    )
    assert TENSOR.plan(setup) == {"0.up": "colwise", "0.down": "rowwise"}
    *before, line = capsys.readouterr().out.splitlines()
    assert before == ["--check_steps 0: the parity check does not prove the derived plan"] * (check_steps == 0)
    assert line == (
        "Sequential has no tp_plan: a derived one divides 89% of the weights among 2 processes; these stay whole: 2 "
        "(all features are needed)"
    )


def test_what_a_pass_raises_is_said_and_weights_stay_on_disk() -> None:
    model, train_set = kinds.on_disk(nn.Sequential(Mlp())), samples()

    def forward_step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        raise ValueError(f"loss of shape {tuple(model(batch['x']).shape)}")

    plan = Plan.of(RunConfig(batch_size=4), Layout(num_processes=2, tp=2), len(train_set))
    optimizer = torch.optim.SGD(model.parameters())
    setup = Setup(Accelerator(cpu=True), model, optimizer, forward_step, plan, train_set=train_set)
    with pytest.raises(ValueError, match="loss of shape"):
        TENSOR.plan(setup)
    assert on_disk(model).keys() == dict(model.named_parameters()).keys()


def test_everything_is_afterwards_as_before() -> None:
    model, seen = (
        nn.Sequential(Mlp(), Centered(), nn.BatchNorm1d(3)),
        {"calls": 0, "generator": torch.Generator().manual_seed(3)},
    )
    model.eval()

    def forward_step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        seen["calls"] += 1
        batch["x"] += torch.rand(1, generator=seen["generator"]) * 0
        return {"loss": model(batch["x"] + 0 * torch.rand(1)).flatten(1).mean(1)}

    train_set = samples()
    layout = Layout(num_processes=2, tp=2)
    plan = Plan.of(RunConfig(batch_size=4), layout, len(train_set))
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    states = torch.get_rng_state(), seen["generator"].get_state()
    setup = Setup(Accelerator(cpu=True), model, optimizer, forward_step, plan, train_set=train_set)
    assert TENSOR.plan(setup) == {"0.up": "colwise", "0.down": "rowwise"}
    assert torch.equal(torch.get_rng_state(), states[0]) and torch.equal(seen["generator"].get_state(), states[1])
    assert seen["calls"] == 0 and not model.training and "forward" not in vars(model[0].up)
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is before[name][0] and torch.equal(value, before[name][1])
