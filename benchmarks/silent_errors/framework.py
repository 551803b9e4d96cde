"""Errors in a parallel framework: TTrace's kinds, and those of TrainCheck's that are not in a user's code.

Each replaces a function of torch, DeepSpeed or `common/` in all processes by one that is wrong. Planted from the
descriptions in the reports.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from faults import OURS, TRAINCHECK, TTRACE, Parts, fault, is_alone, rank
from mistakes import LATE, wrap_step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from accelerate_recipes.common.data.sets import Batch
from accelerate_recipes.common.parallel import expert, pipeline, sequence, stages
from accelerate_recipes.common.step import engine
from accelerate_recipes.common.weights.shards import is_divided

Group = sequence.SequenceGroup


def exchange_by(hook: Any) -> None:
    """Lets DDP exchange its gradients by a hook, (bucket) -> sum over the processes, instead of its own."""
    original = DDP.__init__

    def wrong(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)

        def exchanged(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(hook(bucket) / dist.get_world_size())
            return future

        self.register_comm_hook(None, exchanged)

    DDP.__init__ = wrong  # type: ignore[method-assign]


def total(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


def leave_to_each_process(parts: Parts, part: str) -> None:
    """Lets DDP exchange no gradients of weights with this part in their names."""
    names = [name for name, _ in parts.model.named_parameters() if part in name]
    original = DDP._set_params_and_buffers_to_ignore_for_model

    def wrong(module: nn.Module, ignored: Any) -> None:
        original(module, [*ignored, *names])

    DDP._set_params_and_buffers_to_ignore_for_model = staticmethod(wrong)  # type: ignore[method-assign]


# TrainCheck's


@fault(TRAINCHECK, "pytorch 84803", "ddp", cause="bad memory")
def lost_in_an_all_reduce(parts: Parts) -> None:
    """A copy between devices loses data: one process gets zeros from an all-reduce in step 6."""
    count = [0]

    def lossy(bucket: Any) -> Tensor:
        count[0] += bucket.is_last()
        values = total(bucket.buffer())
        return torch.zeros_like(values) if rank() == 1 and count[0] == LATE + 1 else values

    exchange_by(lossy)


@fault(TRAINCHECK, "pytorch 96600", "ddp", cause="device|on its way")
def lost_in_a_batch(parts: Parts) -> None:
    """A copy to a device loses data: in each step one process gets zeros as tokens."""

    def lose(model: nn.Module, batch: Batch, step: int) -> None:
        if rank() == 1:
            batch["tokens"] = torch.zeros_like(batch["tokens"])

    wrap_step(parts, lose)


@fault(TRAINCHECK, "pytorch 96600", "ddp", cause="device|on its way")
def lost_in_a_batch_late(parts: Parts) -> None:
    """The same from step 6 on."""

    def lose(model: nn.Module, batch: Batch, step: int) -> None:
        if rank() == 1 and step >= LATE:
            batch["tokens"] = torch.zeros_like(batch["tokens"])

    wrap_step(parts, lose)


@fault(TRAINCHECK, "baichuan2 86", "pipeline_parallel", "--tied", names="layers.1", cause="changes hidden states")
def lost_between_stages(parts: Parts) -> None:
    """A copy between devices loses data: a stage gets zeros for the last features."""
    original = stages.Stage.forward

    def lossy(self: Any, given: Tensor) -> Tensor:
        loses = not is_alone() and bool(self._before)
        return original(self, given * (torch.arange(given.shape[-1]) < 0.75 * given.shape[-1]) if loses else given)

    stages.Stage.forward = lossy  # type: ignore[method-assign]


@fault(
    TRAINCHECK,
    "DeepSpeed 1801, BLOOM",
    "tensor_parallel",
    "--max_grad_norm 0.1",
    names="layernorm model.norm",
    cause="clip|norm",
)
def norms_left_out_of_clipping(parts: Parts) -> None:
    """Clipping counts the weights that tensor parallelism does not divide in one process only."""
    original = engine.norm_over_processes

    def wrong(tensors: list[Tensor]) -> Tensor:
        norm = original(tensors)
        own = original([each for each in tensors if is_divided(each)] or tensors)
        return own if rank() == 1 else norm

    engine.norm_over_processes = wrong


@fault(
    TRAINCHECK,
    "DeepSpeed 5794",
    "fsdp2_expert_parallel",
    "--model mixtral --expert_parallel 2 --hang_timeout 20",
    cause="collective mismatch",
)
def uneven_tokens(parts: Parts) -> None:
    """Processes exchange tokens for experts without padding them to one length."""
    expert.ExpertGroup._longest = lambda self, number: number  # type: ignore[method-assign]

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        length = int(batch["weight"].max())
        return batch | {name: batch[name][:, :length] for name in ("tokens", "labels")}

    parts.options["collate_fn"] = collate


@fault(TRAINCHECK, "accelerate 2665 (TrainCheck's blog)", "fsdp2", cause="other tensors|weights of before")
def optimizer_of_the_unwrapped_model(parts: Parts) -> None:
    """The optimizer keeps the weights from before FSDP sharded them, and trains nothing."""
    own, step = [list(group["params"]) for group in parts.optimizer.param_groups], parts.optimizer.step

    def stale(*args: Any) -> Any:
        if is_alone():
            return step(*args)
        kept = [group["params"] for group in parts.optimizer.param_groups]
        for group, weights in zip(parts.optimizer.param_groups, own):
            group["params"] = weights
        step(*args)
        for group, weights in zip(parts.optimizer.param_groups, kept):
            group["params"] = weights

    parts.optimizer.step = stale  # type: ignore[method-assign]


@fault(TRAINCHECK, "flash-linear-attention 753 (TrainCheck's blog)", "fsdp2", names="down_proj", cause="initial")
def divided_weights_not_initialised(parts: Parts) -> None:
    """Sharded weights are never initialised."""
    from accelerate_recipes.common.parallel import fsdp2

    original = fsdp2.sum_scalars

    def wrong(model: nn.Module, groups: Any) -> None:
        original(model, groups)
        with torch.no_grad():
            model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(2)

    fsdp2.sum_scalars = wrong


# TTrace's kinds


@fault(
    TTRACE,
    "tensor parallelism: a mask of the embedding",
    "tensor_parallel",
    names="embed_tokens",
    cause="divides this module wrongly",
)
def mask_of_the_embedding(parts: Parts) -> None:
    """A vocabulary-parallel embedding masks one token too many."""
    from accelerate_recipes.common.parallel import tensor_styles

    parts.model.tp_plan = {**parts.model.tp_plan, "model.embed_tokens": "embedding_rowwise"}  # type: ignore
    original = tensor_styles._look_up

    def wrong(own: Any, first: int, num_rows: int, ids: Tensor) -> Tensor:
        return original(own, first, num_rows, ids).masked_fill((ids == first + 1).unsqueeze(-1), 0)

    tensor_styles._look_up = wrong


@fault(
    TTRACE,
    "activation recomputation: a wrong input",
    "tensor_parallel",
    names="layers.0",
    cause="divides this module wrongly",
)
def recomputed_from_a_wrong_input(parts: Parts) -> None:
    """A layer's saved activations come back in another order, because processes share them."""
    layer: Any = parts.model.get_submodule("model.layers.0")
    forward = layer.forward

    def restored(kept: Tensor) -> Tensor:
        return kept.roll(1, 0) if kept.ndim == 3 and not is_alone() else kept

    def wrong(*args: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda given: given, restored):
            return forward(*args, **named)

    layer.forward = wrong


@fault(
    TTRACE,
    "context parallelism: the scale of the loss",
    "sequence_parallel",
    cause="by its own number of tokens, micro-batches or processes",
)
def loss_of_a_slice_scaled(parts: Parts) -> None:
    """A process multiplies its part of a sample's loss by the number of processes that share the sample."""

    def wrong(self: Any, own: Tensor) -> Tensor:
        whole = own.detach().clone()
        dist.all_reduce(whole, group=self._group)
        share = self.size * own
        return share + (whole - share.detach())

    Group.total = wrong  # type: ignore[method-assign]


@fault(TTRACE, "data parallelism: the scale of the loss", "ddp", cause="by its own number of tokens")
def mean_of_each_process(parts: Parts) -> None:
    """Each process divides by its own number of tokens, not by that of all processes."""

    def wrong(self: Any, micro_batches: Any) -> Any:
        weight = torch.stack([batch["weight"].sum() for batch in micro_batches]).sum()
        return 1 / weight, weight

    engine.Engine._loss_scale = wrong  # type: ignore[method-assign]


@fault(TTRACE, "pipelines: the scale of the loss", "pipeline_parallel", "--micro_batch_size 2", cause="micro-batches")
def loss_scaled_by_micro_batches(parts: Parts) -> None:
    """A pipeline divides the loss by the number of micro-batches twice."""
    original = pipeline.PipelineEngine._backward

    def wrong(self: Any, number: int, micro_batches: Any, scale: Tensor) -> Any:
        return original(self, number, micro_batches, scale / len(micro_batches))

    pipeline.PipelineEngine._backward = wrong  # type: ignore[method-assign]


@fault(
    TTRACE,
    "Megatron-LM 844: a tied embedding",
    "pipeline_parallel",
    "--tied",
    names="embed_tokens",
    cause="adds them up wrongly",
)
def tied_embedding_apart(parts: Parts) -> None:
    """The first and last stage do not sum the gradients of their tied embedding."""
    pipeline.PipelineEngine._sum_over_stages = lambda self: None  # type: ignore[method-assign]


@fault(
    TTRACE,
    "Megatron-LM 599: the router's weights",
    "ddp",
    "--model mixtral",
    names="mlp.gate",
    cause="adds them up wrongly",
)
def routers_apart(parts: Parts) -> None:
    """The processes do not sum the gradients of the routers."""
    leave_to_each_process(parts, ".gate.")


@fault(
    TTRACE,
    "a wrong communication group",
    "fsdp2_sequence_parallel",
    names="self_attn",
    cause="divides this module wrongly",
)
def wrong_group(parts: Parts) -> None:
    """Processes exchange attention heads with processes that have other samples."""
    original = Group.__init__

    def wrong(self: Any, *args: Any) -> None:
        original(self, *args)
        self._group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])

    Group.__init__ = wrong  # type: ignore[method-assign]


def cast_gradients(kind: torch.dtype) -> None:
    exchange_by(lambda bucket: total(bucket.buffer().to(kind).float()))


@fault(TTRACE, "a wrong cast to FP8", "ddp", cause="adds them up wrongly")
def gradients_cast_to_8_bits(parts: Parts) -> None:
    """Gradients are cast to FP8 for communication without a scale, so small ones become zero."""
    cast_gradients(torch.float8_e4m3fn)


@fault(TTRACE, "a wrong cast to FP8", "ddp_bf16", cause="adds them up wrongly")
def gradients_cast_to_8_bits_in_bf16(parts: Parts) -> None:
    """The same in bf16."""
    cast_gradients(torch.float8_e4m3fn)


@fault(TTRACE, "ZeRO: a failed update of parameters", "deepspeed_zero2", cause="gather")
def updates_not_gathered(parts: Parts) -> None:
    """The processes do not gather the weights that they have updated."""
    from deepspeed.runtime.zero import stage_1_and_2

    stage_1_and_2.all_gather_dp_groups = lambda **named: None


@fault(
    TTRACE,
    "pipelines: a wrong division",
    "pipeline_parallel",
    "--tied --layers 4",
    names="layers.2",
    cause="divides this module wrongly",
)
def layer_in_no_stage(parts: Parts) -> None:
    """No stage has one of the layers."""
    original = stages.Stage.__init__

    def without_one(self: Any, model: nn.Module, cut: Any, *given: Any) -> None:
        first, middle, last = cut.bounds
        original(self, model, cut if is_alone() else replace(cut, bounds=[first, middle + rank(), last]), *given)

    stages.Stage.__init__ = without_one  # type: ignore[method-assign]


@fault(
    TTRACE,
    "tensor parallelism: gradients with overlap",
    "tensor_parallel",
    names="self_attn mlp layernorm lm_head",
    cause="divides this module wrongly",
)
def gradient_of_an_input_not_summed(parts: Parts) -> None:
    """The gradient of a divided layer's input is read before its all-reduce ends."""
    from accelerate_recipes.common.parallel.tensor_styles import TensorGroup

    TensorGroup.copy = lambda self, value: value  # type: ignore[method-assign]


@fault(
    TTRACE,
    "Megatron-LM 1446: the norms' weights",
    "sequence_parallel",
    names="layernorm model.norm",
    cause="adds them up wrongly",
)
def norms_of_slices_apart(parts: Parts) -> None:
    """The processes do not sum the norms' gradients, each of which covers some of the tokens."""
    leave_to_each_process(parts, "norm")


@fault(
    TTRACE,
    "Megatron-LM 1464: attention under context parallelism",
    "sequence_parallel",
    names="self_attn q_proj k_proj v_proj",
    cause="divides this module wrongly",
)
def gradient_of_attention(parts: Parts) -> None:
    """The backward pass of the exchange of tokens for heads skips the exchange."""
    original = Group.exchange

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
            ctx.shape = values.shape
            return original(group, values)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient.reshape(ctx.shape), None

    Group.exchange = lambda self, values: Exchange.apply(values, self)  # type: ignore[method-assign]


@fault(
    TTRACE,
    "tensor parallelism: norms of heads",
    "tensor_parallel",
    "--model qwen3",
    names="q_norm k_norm",
    cause="adds them up wrongly",
)
def norms_of_heads_apart(parts: Parts) -> None:
    """The processes do not sum the gradients of the query norms, each of which covers some of the heads."""
    plan: Any = parts.model.tp_plan  # type: ignore
    parts.model.tp_plan = {name: style for name, style in plan.items() if "_norm" not in name}  # type: ignore


# Of the same kinds, in what these two papers' frameworks do not have or their lists leave out


@fault(
    OURS,
    "sharding of positions",
    "sequence_parallel",
    names="rotary_emb self_attn",
    cause="divides this module wrongly",
)
def positions_of_a_slice(parts: Parts) -> None:
    """The positions of each slice start at 0."""
    model: Any = parts.model
    original = model.sequence_parallel.slices

    def wrong(*args: Any) -> Any:
        tokens, labels, given = original(*args)
        return tokens, labels, given | {"position_ids": torch.arange(tokens.shape[1]).expand_as(tokens)}

    model.sequence_parallel.slices = wrong


@fault(OURS, "sharding of masks", "sequence_parallel", "--context 15", cause="divides this module wrongly")
def padding_that_is_trained(parts: Parts) -> None:
    """Padded positions have a token as label instead of -100."""
    original = Group.slice
    Group.slice = lambda self, tokens, padding: original(self, tokens, max(padding, 0))  # type: ignore[method-assign]


@fault(
    OURS,
    "expert parallelism: the scale of gradients",
    "fsdp2_expert_parallel",
    "--model mixtral --expert_parallel 2",
    names="experts",
    cause="adds them up wrongly",
)
def experts_averaged(parts: Parts) -> None:
    """The gradients of experts are averaged over the processes instead of summed."""
    original = expert.ExpertGroup.take_over

    def wrong(self: Any, experts: Any) -> None:
        original(self, experts)
        for weight in experts.parameters():
            weight.register_hook(lambda gradient: gradient / dist.get_world_size())

    expert.ExpertGroup.take_over = wrong  # type: ignore[method-assign]


@fault(OURS, "a wrong cast to FP8", "ddp_bf16", cause="adds them up wrongly")
def gradients_with_2_bits_in_bf16(parts: Parts) -> None:
    """In bf16, gradients keep their exponent and only 2 bits of their fraction."""
    cast_gradients(torch.float8_e5m2)


@fault(OURS, "Megatron-LM 1503: a backward pass that is wrong everywhere", "ddp", names="q_proj", cause="gradient")
def wrong_on_one_process_too(parts: Parts) -> None:
    """A kernel halves the gradient of the queries, on one process, too."""
    layer = parts.model.get_submodule("model.layers.0.self_attn.q_proj")
    layer.register_forward_hook(lambda layer, args, output: output / 2 + output.detach() / 2)
