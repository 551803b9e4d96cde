"""`--exact_dropout`: the masks of dropout do not depend on how processes and micro-batches divide the batch."""

from collections import Counter
from hashlib import blake2b
from types import TracebackType
from typing import NamedTuple, Self

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from common.errors import UsageError
from common.parallel.dropout import Dropout
from common.parallel.dropout_mask import dropped
from common.plan import Plan


class _Call(NamedTuple):
    """A call of dropout: the key of its mask, and the block of the mask that this process needs."""

    key: int
    starts: tuple[int, ...]
    shape: tuple[int, ...]


class ExactDropout(Dropout):
    """Dropout whose masks are the same for every layout.

    A mask is a function of the seed, the step, the sample's position in the global batch, the module that calls, the
    number of the call in it, and the element's coordinates. It expects the samples along the first dimension.

    Activation checkpointing computes a part of the model again in the backward pass, where modules and their order
    differ. But it restores torch's generator. So each call draws a ticket from that generator: a ticket drawn again
    is a call made again.

    Raises:
        UsageError: the model has dropout that this class cannot make equal.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, plan: Plan):
        check_can_be_exact(model, plan)
        super().__init__(accelerator, model, plan)
        self._inside = ""  # the part of the model in which a dropout must be
        if plan.config.pipeline_stages > 1:  # each stage runs the code around the layers
            self._inside = f"{self._names.get(getattr(model, 'base_model', model), '')}.layers.".removeprefix(".")
        self._num_calls: Counter[str] = Counter()
        self._rows: dict[tuple[str, int], int] = {}  # {(module, number of the call): rows per sample}
        self._known: dict[int, _Call] = {}  # {ticket: call} of this step
        self._num_drawn = 0
        self._step, self._first = 0, -1
        self._of_device: list[int] = []

    def at(self, step: int, row: int) -> None:
        self._step, self._first = step, row * self._plan.micro_batch_size
        self._num_calls.clear()
        self._num_drawn = 0
        self._of_device = self._device_state()

    def __enter__(self) -> Self:
        self._first = -1
        self._known.clear()
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        super().__exit__(kind, error, _)
        if error is None:
            self._check_nothing_else_drew()

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0 < p < 1 or self._first < 0:  # before the first pass, a pipeline tries its shapes
            return self._originals["dropout"](input, p, training, inplace)
        call, scale = self._call(input), 1 / (1 - p)
        drops = dropped(*call, p, input.device).view(input.shape)
        return input.mul_(scale).masked_fill_(drops, 0) if inplace else torch.where(drops, 0, input * scale)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """By the reference formula of torch's documentation."""
        if not dropout_p or self._first < 0:
            together = self._originals["scaled_dot_product_attention"]
            return together(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            num_shared = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(num_shared, -3), value.repeat_interleave(num_shared, -3)
        probabilities = attention_probabilities(query, key, attn_mask, is_causal, scale).to(value.dtype)
        return self.dropout(probabilities, dropout_p) @ value

    def _call(self, input: Tensor) -> _Call:
        """Which call this is: a new one, or one that activation checkpointing makes again."""
        ticket = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        if torch._C._current_graph_task_id() == -1:  # not in a backward pass; torch's checkpointing asks so, too
            self._num_drawn += 1
            self._known[ticket] = self._new_call(input)
        elif ticket not in self._known:
            raise UsageError(
                "--exact_dropout needs activation checkpointing that restores random numbers: remove "
                "preserve_rng_state=False"
            )
        return self._known[ticket]

    def _new_call(self, input: Tensor) -> _Call:
        name = self._running[-1] if self._running else ""
        if not name.startswith(self._inside):
            raise UsageError(
                f"--exact_dropout: {name or 'the model'} has dropout outside {self._inside}*, which each stage of a "
                "pipeline would apply: set its probability to 0, or type --pipeline_stages 1"
            )
        number = self._num_calls[name]
        self._num_calls[name] += 1
        shape = self._by_sample(input, name, number)
        starts = [self._first, *(0 for _ in shape[1:])]
        if self._width is not None:
            dimension = self._divided_dimension(shape, name)
            starts[dimension] = self._tensor_rank * shape[dimension]
        text = f"{self._plan.config.seed} {self._step} {name} {number}"
        key = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        return _Call(key, tuple(starts), shape)

    def _by_sample(self, input: Tensor, name: str, number: int) -> tuple[int, ...]:
        """The shape with the samples as the first dimension, also if a model joins it with the next one, as in
        (batch × length, hidden). Raises UsageError if the samples are not first, as far as shapes tell."""
        size, shape = self._plan.micro_batch_size, tuple(input.shape)
        num_rows = len(input) // size if shape else 0
        is_weight = isinstance(input, nn.Parameter)
        is_new = (name, number) not in self._rows
        varies = self._rows.setdefault((name, number), num_rows) != num_rows  # as the tokens of an expert do
        what = f"--exact_dropout: {name or 'the model'} has dropout on a tensor of shape {shape}"
        if not shape or is_weight or varies or len(input) % size:
            raise UsageError(
                f"{what}, whose first dimension is not the {size} samples of a micro-batch: put them there, or remove "
                "the flag"
            )
        if is_new and num_rows != 1 and len(shape) > 2 and shape[1] == size:
            raise UsageError(
                f"{what}, whose second dimension may be the {size} samples of a micro-batch: put them first; if they "
                "are, type another --micro_batch_size"
            )
        return shape if num_rows == 1 and shape[1:] else (size, num_rows, *shape[1:])

    def _divided_dimension(self, shape: tuple[int, ...], name: str) -> int:
        """The dimension of which this tensor-parallel process has a part: the heads of (batch, heads, length, length),
        else the features."""
        if len(shape) == 4:
            return 1
        if shape[-1] == self._width:
            return len(shape) - 1
        raise UsageError(
            f"--exact_dropout: {name or 'the model'} has dropout on a tensor of shape {shape} between divided layers: "
            "expected attention heads or features; set its probability to 0, or remove the flag"
        )

    def _check_nothing_else_drew(self) -> None:
        """Raises UsageError if the last forward pass drew random numbers other than tickets."""
        replay = torch.Generator().manual_seed(torch.initial_seed())
        torch.empty(self._num_drawn, dtype=torch.int64).random_(generator=replay)
        if not torch.equal(replay.get_state(), torch.get_rng_state()) or self._of_device != self._device_state():
            raise UsageError(
                "--exact_dropout: the forward pass draws random numbers elsewhere, such as noise, DropPath, "
                "functional.dropout2d or flash attention's dropout: remove them, or the flag"
            )

    def _device_state(self) -> list[int]:
        """The state of the device's generator, 16 bytes on a GPU; empty on the CPU."""
        if self._device.type == "cpu":
            return []
        return torch.get_device_module(self._device).get_rng_state(self._device).tolist()


def attention_probabilities(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Softmax of the attention scores in float32, of shape (..., queries, keys). The arguments are those of
    `torch.nn.functional.scaled_dot_product_attention`. A query that may attend to nothing gets zeros, as there."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        assert attn_mask is None, "torch allows one of attn_mask and is_causal"
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    elif attn_mask is None:  # ZeRO needs the same operations in all passes, with and without padding
        attn_mask = torch.ones((), dtype=torch.bool, device=scores.device)
    is_bool = attn_mask.dtype == torch.bool
    scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask
    return torch._safe_softmax(scores, -1, dtype=torch.float32)


def check_can_be_exact(model: nn.Module, plan: Plan) -> None:
    """Raises UsageError for what `--exact_dropout` does not support and the model itself shows."""
    if plan.config.compile:
        raise UsageError("--exact_dropout does not work with --compile: remove one of them")
    for name, module in model.named_modules():
        kind = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
            raise UsageError(
                f"--exact_dropout: {kind} has dropout between its layers, which torch does not show: stack layers of "
                "num_layers=1 with nn.Dropout between them, or remove the flag"
            )
        is_other = isinstance(module, nn.modules.dropout._DropoutNd) and not isinstance(module, nn.Dropout)
        if is_other and module.p > 0:
            raise UsageError(f"--exact_dropout does not know the dropout of {kind}: use nn.Dropout, or remove the flag")
        if getattr(module, "batch_first", True) is False:
            raise UsageError(
                f"--exact_dropout needs the samples as the first dimension, but {kind} has them second: build it with "
                "batch_first=True, or remove the flag"
            )
    if plan.config.pipeline_stages > 1:
        once, all_names = model.named_modules(), model.named_modules(remove_duplicate=False)
        if shared := {name for name, _ in all_names} - {name for name, _ in once}:
            raise UsageError(
                f"--exact_dropout: {min(shared)} is a module in two places, and the stages of a pipeline cannot count "
                "its calls: type --pipeline_stages 1"
            )
