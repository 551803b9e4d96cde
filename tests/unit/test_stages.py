"""Promise: the stages of a pipeline have about the same number of layers, and each layer is in one of them."""

import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_recipes.common.parallel.chain import cut_chain, find_chain, layer_bounds
from accelerate_recipes.common.parallel.schedules import SCHEDULES, cost, shortest
from accelerate_recipes.common.parallel.stages import Cut, Stage


@pytest.mark.parametrize("num_layers", range(1, 12))
def test_stages_differ_by_one_layer_at_most(num_layers: int) -> None:
    for num_stages in range(1, num_layers + 1):
        bounds = layer_bounds(num_layers, num_stages)
        lengths = [end - start for start, end in pairwise(bounds)]
        assert bounds[0] == 0 and bounds[-1] == num_layers and len(lengths) == num_stages
        assert max(lengths) - min(lengths) <= 1 and lengths[-1] == min(lengths)


CPU = torch.device("cpu")


def tiny() -> LlamaForCausalLM:
    """With tied embeddings and a buffer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=3, **sizes))
    model.register_buffer("scale", torch.ones(1))
    return model


def run(model: nn.Module) -> Any:
    return model(torch.arange(4).unsqueeze(0), use_cache=False).logits


def stage_of(index: int) -> tuple[Stage, Cut]:
    """A stage of two, and the cut of the model."""
    chain, _ = find_chain(tiny(), run, lambda: None)
    cut, _ = cut_chain(tiny(), chain, 2, run)
    stage = Stage(tiny(), cut, index, CPU)
    stage.run = run
    return stage, cut


def test_stages_hold_what_they_use_and_compute_what_the_model_does() -> None:
    (first, cut), (last, _) = stage_of(0), stage_of(1)
    whole = LlamaForCausalLM(first.model.config)
    names = [{*stage.model.state_dict()} for stage in (first, last)]
    assert names[0] & names[1] == {"model.embed_tokens.weight", "lm_head.weight"}  # which are tied
    assert names[0] | names[1] == {*whole.state_dict(), "scale"} and "scale" in names[0]
    assert cut.stages_of["lm_head.weight"] == {0, 1}
    whole.load_state_dict({**first.model.state_dict(), **last.model.state_dict()}, strict=False)
    for stage in (first, last):
        stage.name_all()
    with torch.no_grad():
        hidden = first(torch.empty(0))
        assert last(hidden).equal(last.run(whole)) and not last(hidden + 1).equal(last.run(whole))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_cost_of_schedules_is_that_of_torchs_lists_of_actions(name: str, size: int) -> None:
    for number in (*range(size, 2 * size + 1), 3 * size, 8 * size):
        if name != "interleaved" or number % (number // size) == 0:
            idle, live = replayed(actions(name, size, number), size, SCHEDULES[name].per_process)
            assert cost(name, size, number).idle == pytest.approx(idle) and cost(name, size, number).live == live
            first, more = shortest(name, size, number)  # which `plan` takes in place of all
            assert cost(name, size, first).live == cost(name, size, more).live == live
            assert first == number or (number - first) % (more - first) == 0
        else:
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                actions(name, size, number)


def actions(name: str, size: int, number: int) -> list[list[Any]]:
    """(F, B, I or W; stage; micro-batch) of each process, in their order."""
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.ERROR)
    facts = {"group_size": size, "group_rank": 0, "num_stages": size * SCHEDULES[name].per_process}
    stages: Any = [
        SimpleNamespace(
            stage_index=stage, is_first=stage == 0, is_last=False, submod=nn.Identity(), has_backward=True, **facts
        )
        for stage, process in SCHEDULES[name].places(size).items()
        if process == 0
    ]
    if name == "1f1b":  # torch's list of it is for display, and leaves out micro-batch 0
        order = [one_forward_one_backward(process, size, number) for process in range(size)]
    else:
        lists = getattr(pipelining, SCHEDULES[name].kind)(stages, number, loss_fn=lambda *_: None).pipeline_order
        order = [[part for each in lists[process] if each for part in each.sub_actions or [each]] for process in lists]
        order = [[(each.computation_type.value, *each[::2]) for each in own] for own in order]
    return [[each for each in own if each[0] in "FBIW"] for own in order]


def one_forward_one_backward(process: int, size: int, number: int) -> list[Any]:
    ahead = size - process
    forward, backward = ([(kind, process, index) for index in range(number)] for kind in "FB")
    pairs = [each for pair in zip(backward, forward[ahead:]) for each in pair]
    return [*forward[:ahead], *pairs, *backward[number - ahead :]]


def replayed(queues: list[list[Any]], size: int, per_process: int) -> tuple[float, list[float]]:
    """(idle share of the busiest process, micro-batches live at most in each), where B takes 2 and all others 1."""
    last, done, ready, busy, live, most = size * per_process - 1, {}, *([0.0] * size for _ in range(4))
    while any(queues):
        for process, queue in enumerate(queues):
            while queue:
                kind, stage, index = queue[0]
                needs = [("F", stage, index)] if kind != "F" else [("F", stage - 1, index)] * (stage > 0)
                needs += [("I", stage + 1, index)] * (kind in "BI" and stage < last)
                needs += [("I", stage, index)] * (kind == "W")
                if any(need not in done for need in needs):
                    break
                spent = (1 + (kind == "B")) / per_process
                ready[process] = max([ready[process], *(done[need] for need in needs)]) + spent
                done["I" if kind == "B" else kind, stage, index] = ready[process]
                busy[process] += spent
                live[process] += {"F": 1, "I": 0}.get(kind, -1) / per_process
                most[process] = max(most[process], live[process])
                del queue[0]
    return 1 - max(busy) / max(ready), most
