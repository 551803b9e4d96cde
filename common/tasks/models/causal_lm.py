"""Causal language models of transformers: loading, losses and floating-point operations."""

import math
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface, PreTrainedModel
from transformers.utils import logging

from ...environment import print_once
from ...errors import UsageError
from .long_sequences import LongSequences
from .pretrained import lacking, load, runnable
from .routers import experts_per_token, routes_of

IGNORED = -100  # label of padding; torch's cross-entropy ignores it by default
MEASURED = ("loss", "token_accuracy", "entropy")
CLOSE = 1e-3  # a label that is less probable than the best token by less than this, in nats, is partly right


def load_pretrained(
    name_or_path: str,
    context: int,
    attention: str,
    flag: str = "context",
    kind: Any = AutoModelForCausalLM,
    trust_remote_code: bool = False,
    tokenizer_path: str | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Loads a causal model in float32, and its tokenizer, or the processor that has one. Raises UsageError if there is
    no such model or tokenizer, or the model has fewer positions than `context`.

    Args:
        name_or_path: folder or Hub id.
        context: tokens per sequence.
        attention: transformers' `attn_implementation`: "sdpa" or "eager".
        flag: the recipe's name for `context`.
        kind: a class with `from_pretrained`. Models that see images have a processor.
        trust_remote_code: run code that comes with the model.
        tokenizer_path: a folder of adapters of this model, which may have a tokenizer with a different template.
    """
    is_text = kind is AutoModelForCausalLM
    reads, expected = (AutoTokenizer, "causal model") if is_text else (AutoProcessor, "vision-language model")
    options: dict[str, Any] = {"attn_implementation": attention, "trust_remote_code": trust_remote_code}
    own = "tokenizer_config.json" if is_text else "*processor_config.json"
    if tokenizer_path is not None and any(Path(tokenizer_path).glob(own)):
        options["tokenizer_path"] = tokenizer_path
    model, processor, missing = load(kind, name_or_path, expected, reads, **options)
    if missing:
        raise lacking(name_or_path, model, missing, expected)
    given, name = f"--model_name_or_path {name_or_path}", type(model).__name__
    if not is_text and getattr(model.config, "image_token_id", None) is None:
        advice = "use the path of a model such as SmolVLM, Qwen-VL or Gemma 3"
        raise UsageError(f"{given}: {name} has no token for images: {advice}")
    if _sees_the_future(model):
        raise UsageError(f"{given}: {name} attends to later tokens: use a {expected}, not an encoder")
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest and context > longest:
        raise UsageError(f"{given}: --{flag} {context} exceeds the model's {longest} positions: use --{flag} {longest}")
    return model, processor


def load_trained(folder: Path, kind: Any = AutoModelForCausalLM) -> Any:
    """A causal model that this run has exported, or exported adapters on their base, on the run's device and in its
    precision. If the model comes with code, this run has run it."""
    logging.disable_progress_bar()
    state = AcceleratorState()
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(state.mixed_precision, torch.float32)
    model = kind.from_pretrained(folder, dtype=precision, trust_remote_code=True).to(state.device).eval()
    if (folder / "generation_config.json").is_file():  # adapters would use their base's
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


@torch.no_grad()
def _sees_the_future(model: PreTrainedModel) -> bool:
    """Whether a different last token changes the logits before it."""
    tokens = torch.arange(8).remainder(model.get_input_embeddings().num_embeddings).repeat(2, 1)
    tokens[1, -1] = 1 - tokens[1, -1].clamp(max=1)
    with runnable(model):
        first, second = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return not torch.allclose(first, second, rtol=1e-3, atol=1e-5)


def with_losses(
    model: PreTrainedModel,
    packs: bool = False,
    chunk: int = 0,
    longest: int = 0,
    routes: bool = False,
    sees: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    measures: bool = False,
) -> PreTrainedModel:
    """Makes a causal model's forward return losses.

    forward(tokens, labels, positions=None, places=None), all int64 of shape (batch, context), returns the mean loss of
    each example, shape (batch,), over the labels that are not `IGNORED`. With `places`, of shape (batch, number), from
    `find_trained_places`, the model computes logits only there. Losses are much smaller than logits, so mixed precision
    converts little and sharding gathers little. The parameters keep their names, and the exported model keeps its
    class. Raises UsageError if with `packs` a document sees the one before it, or with `routes` there are no routers.

    Args:
        model: a causal model of transformers.
        packs: samples hold several documents, and the positions of each start at 0. Attention stays inside a document.
        chunk: the most tokens whose logits are in memory at one time; the backward pass computes them again. 0: all.
        longest: the length of the longest sample, if there is a chunk or samples have places. Shorter ones, and those
            with fewer places, take the same number of chunks, as ZeRO needs.
        routes: of a mixture of experts: forward returns what `router_loss` needs, with the losses as "cross_entropy".
        sees: for a model that sees images: makes its arguments from the other tensors of a batch.
        measures: forward returns {name of `MEASURED`: mean of each example over its labels}, each of shape (batch,):
            the loss; the share of labels that are the most probable token; and the entropy of the predictions, in nats.
            It computes them from the logits of the loss.
    """

    def forward(
        self: PreTrainedModel,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        places: Tensor | None = None,
        **others: Tensor,
    ) -> Tensor | dict[str, Tensor]:
        given = ({} if positions is None else {"position_ids": positions}) | (sees(others) if sees else others)
        num_labels, num_tokens = (labels != IGNORED).sum(1), len(labels) * longest
        group = self.sequence_parallel.group if divisible else None
        if group is not None:
            tokens, labels, given = self.sequence_parallel.slices(tokens, labels, positions, IGNORED)
            places, num_tokens = None, len(labels) * group.padded_length(longest) // group.size
        num_chunks = -(-num_tokens // chunk) if chunk else 1
        if divides and not routes and (num_chunks > 1 or places is not None):
            hidden = self.base_model(input_ids=tokens, use_cache=False, **given)[0]
            if places is not None:
                hidden, labels = _at(places, hidden, labels)
            values = _in_chunks(self.get_output_embeddings(), hidden, labels, num_chunks, measures)
        else:
            output = type(self).forward(self, input_ids=tokens, use_cache=False, **given, **asked)
            values = _of_labels(output.logits, labels.flatten(), measures)
        means = values.view(-1, *labels.shape).sum(-1) / num_labels.clamp(min=1)  # these may be a part of the labels
        if routes:
            return {"cross_entropy": means[0]} | routes_of(output.router_logits, labels != IGNORED, num_chosen)
        means = means if group is None else group.total(means)
        return dict(zip(MEASURED, (means[0], *means[1:].detach()))) if measures else means[0]

    num_chosen = experts_per_token(model) if routes else 0
    asked = {"output_router_logits": True} if routes else {}
    if packs:
        _check_documents_are_apart(model)
    elif sees is None:  # an image's tokens may attend to each other
        _attend_without_mask(model)
    divides = longest > 0 and _head_alone_makes_logits(model)
    if chunk and not divides:
        print_once(f"{type(model).__name__} changes its logits after its head: all logits of a batch stay in memory")
    divisible = not routes and sees is None  # routers are summed over whole samples, and an image has no slices
    if divisible:
        model.sequence_parallel = LongSequences(model)
    model.forward = MethodType(forward, model)  # a method: a deep copy of the model then calls its own layers
    return model


def with_logits(model: PreTrainedModel) -> PreTrainedModel:
    """Like `with_losses`, but a forward pass returns logits: (tokens (batch, context), places (batch, number)), both
    int64 -> the logits at the places, shape (batch, number, vocabulary); place -1 gets the logits at 0."""

    def forward(self: PreTrainedModel, tokens: Tensor, places: Tensor) -> Tensor:
        logits: Tensor = type(self).forward(self, input_ids=tokens, use_cache=False).logits
        return logits.gather(1, places.clamp(min=0)[..., None].expand(-1, -1, logits.shape[-1]))

    _attend_without_mask(model)
    model.forward = MethodType(forward, model)
    return model


class _CrossEntropy(torch.autograd.Function):
    """(logits, labels) -> (the loss of each label, the log-probabilities of all tokens, which get no gradient).

    In the backward pass `nll_loss` and `log_softmax` would each make a tensor as large as the logits; this makes one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        predicted = F.log_softmax(logits.float().flatten(0, -2), -1)
        ctx.save_for_backward(predicted, labels)
        ctx.mark_non_differentiable(predicted)
        ctx.set_materialize_grads(False)  # otherwise torch would make zeros for the log-probabilities
        ctx.like = logits.shape, logits.dtype
        return F.nll_loss(predicted, labels, ignore_index=IGNORED, reduction="none"), predicted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None]:
        predicted, labels = ctx.saved_tensors
        gradient = gradient.masked_fill(labels == IGNORED, 0).unsqueeze(1)
        found = predicted.exp().mul_(gradient).scatter_add_(1, labels.clamp(min=0).unsqueeze(1), -gradient)
        shape, dtype = ctx.like
        return found.view(shape).to(dtype), None


def _of_labels(logits: Tensor, labels: Tensor, measures: bool) -> Tensor:
    """The loss of each label, shape (1, labels), or all that is `MEASURED`, shape (3, labels); 0 for `IGNORED`."""
    losses, predicted = _CrossEntropy.apply(logits, labels)
    if not measures:
        return losses.unsqueeze(0)
    del logits  # to have two tensors of this size at once, not three
    with torch.no_grad():
        # A ramp, not a jump from 0 to 1: rounding errors would move some tokens across it, under one config only.
        right = (1 - (losses + predicted.amax(-1)) / CLOSE).clamp(0, 1)
        # In place, because it is as large as the logits. An impossible token adds nothing: 0 * -inf is NaN.
        entropy = -predicted.exp().mul_(predicted).nansum(-1)
        measured = [value.masked_fill(labels == IGNORED, 0) for value in (right, entropy)]
    return torch.stack([losses, *measured])


def find_trained_places(labels: Tensor) -> Tensor:
    """The places of labels that are not `IGNORED`, padded with -1 to a multiple of 16: so there is at least one, and
    shapes vary less. The labels of a sample, shape (context,), are on the CPU: a GPU would stall."""
    places = [place for place, label in enumerate(labels.tolist()) if label != IGNORED]
    return torch.tensor(places + [-1] * (16 - len(places) % 16))


def _at(places: Tensor, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and labels at these places of each sample. The label at place -1 is `IGNORED`."""
    starts = torch.arange(0, labels.numel(), labels.shape[1], device=labels.device).unsqueeze(1)
    rows = (starts + places.clamp(min=0)).flatten()
    labels = labels.flatten().index_select(0, rows).view_as(places).masked_fill(places < 0, IGNORED)
    return hidden.flatten(0, 1).index_select(0, rows).unflatten(0, places.shape), labels


def _in_chunks(head: nn.Module, hidden: Tensor, labels: Tensor, num_chunks: int, measures: bool) -> Tensor:
    """`_of_labels`, with the logits of one chunk in memory at a time."""

    def values(hidden: Tensor, labels: Tensor) -> Tensor:
        return _of_labels(head(hidden), labels, measures)

    if num_chunks == 1:
        return values(hidden.flatten(0, 1), labels.flatten())
    parts = zip(hidden.flatten(0, 1).tensor_split(num_chunks), labels.flatten().tensor_split(num_chunks))
    # The backward pass computes a chunk again, up to the loss; it computes no metric twice.
    return torch.cat([checkpoint(values, *part, use_reentrant=False, preserve_rng_state=False) for part in parts], 1)


@torch.no_grad()
def _head_alone_makes_logits(model: PreTrainedModel) -> bool:
    """Whether the logits are the head's output for the hidden states; some models scale or cap them."""
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None):  # it hardly changes small logits
        return False
    tokens = torch.arange(8).remainder(model.get_input_embeddings().num_embeddings).unsqueeze(0)
    with runnable(model):
        expected = model(input_ids=tokens, use_cache=False).logits
        found = model.get_output_embeddings()(model.base_model(input_ids=tokens, use_cache=False)[0])
    return expected.shape == found.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def _check_documents_are_apart(model: PreTrainedModel) -> None:
    """Raises UsageError if a document has different logits in a packed sample than alone."""
    first, second = torch.arange(14).remainder(model.get_input_embeddings().num_embeddings).split([6, 8])
    positions = torch.cat([torch.arange(len(first)), torch.arange(len(second))])
    pair = torch.stack([torch.cat([first, second]), torch.cat([first.flip(0), second])])
    reason = "lets a conversation attend to the one before it"
    try:
        with runnable(model):
            packed = model(input_ids=pair, position_ids=positions.expand(2, -1), use_cache=False).logits[:, 6:]
            alone = model(input_ids=second.unsqueeze(0), use_cache=False).logits.expand_as(packed)
    except TypeError:
        packed, alone, reason = torch.ones(1), torch.zeros(1), "takes no positions"
    if not torch.allclose(packed, alone, rtol=1e-3, atol=1e-5):
        raise UsageError(f"--packing: {type(model).__name__} {reason}: remove --packing")


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recomputes the activations of layers in the backward pass. Raises UsageError if the model cannot."""
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise UsageError(f"--activation_checkpointing: {error}: remove it") from None


def _attend_without_mask(model: PreTrainedModel) -> None:
    """Lets PyTorch's attention use `is_causal` instead of a mask, which gives the same logits if all layers attend to
    all earlier tokens and samples hold no padding before a label.

    With a mask function, as "sdpa" has, transformers reads from the device in each forward pass; compiled, it builds a
    mask, which rules out flash attention. config.json does not get the name.
    """
    config = model.config.get_text_config()
    if (
        config._attn_implementation == "sdpa"
        and model._supports_attention_backend
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and not any(getattr(config, limit, None) for limit in ("sliding_window", "attention_chunk_size"))
    ):
        AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
        config._attn_implementation = "causal_sdpa"
        if _sees_the_future(model):  # a model with its own use of the mask, for example Doge
            config._attn_implementation = "sdpa"


def with_perplexity(means: dict[str, float]) -> dict[str, float]:
    """For `summarize` of `fit`: adds the perplexity of the trained tokens to the mean metrics of an evaluation."""
    return means | {"perplexity": math.exp(min(means.get("cross_entropy", means["loss"]), 700))}


def flops_per_sample(model: PreTrainedModel, context: int) -> float:
    """Floating-point operations of a training step on one sequence of `context` tokens.

    6 per weight and token, plus attention to all positions, without the causal mask (Chowdhery et al. 2022,
    PaLM, appendix B, which defines MFU). An embedding counts only if it is also the output head.
    """
    head, shape = model.get_output_embeddings().weight, model.config.get_text_config()
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {head}
    num_weights = sum(weight.numel() for weight in model.parameters() if weight not in embeddings)
    return float(context * (6 * num_weights + 12 * shape.num_hidden_layers * shape.hidden_size * context))
