"""Causal language models of transformers whose processes share the tokens of each sample (common/parallel/sequence.py).

The model runs on this process's slice. In attention, each process has all tokens for some of the heads, so that
transformers' own function and mask for them are used.
"""

import copy
import inspect
import math
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import and_masks, packed_sequence_mask_function

from ...errors import UsageError
from ...parallel.sequence import SequenceGroup
from ...step.refusals import sizes_that_divide


class LongSequences:
    """Divides the samples of a causal model of `with_losses`, which calls `slices` and `total`."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.group: SequenceGroup | None = None  # the processes that share the tokens; until `divide`
        self._length = 0
        self._documents: Tensor | None = None
        self._attend: Any = None  # the model's own functions, from `divide` on
        self._mask: Any = None

    def check(self, size: int) -> None:
        """Raises UsageError if `size` processes cannot share the tokens of a sample."""
        config, name = self._config, type(self.model).__name__
        if config.num_attention_heads % size:
            raise UsageError(
                f"{name} has {config.num_attention_heads} attention heads, not divisible by {size} processes",
                f"use sp_size {sizes_that_divide(config.num_attention_heads)} in the config file",
            )
        takes = inspect.signature(type(self.model).forward).parameters
        if not self.model._supports_attention_backend or "position_ids" not in takes:
            raise UsageError(
                f"{name}'s attention cannot divide sequences", "use --config_file accelerate_configs/fsdp2.yaml"
            )
        if config._attn_implementation not in AttentionInterface():
            raise UsageError(f"attention {config._attn_implementation} cannot divide sequences", "use --attention sdpa")

    def divide(self, group: SequenceGroup) -> None:
        """Makes the model compute on slices."""
        self.group, name = group, self._config._attn_implementation
        self._attend, self._mask = AttentionInterface()[name], AttentionMaskInterface().get(name)
        own = f"{name}_on_slices_{id(self)}"  # the stages of a pipeline are several models
        AttentionInterface.register(own, self._attend_to_all)
        if self._mask is not None:
            AttentionMaskInterface.register(own, self._mask_of_all)
        self._config._attn_implementation = own

    @property
    def _config(self) -> Any:
        return self.model.config.get_text_config()

    def slices(
        self, tokens: Tensor, labels: Tensor, positions: Tensor | None, ignored: int
    ) -> tuple[Tensor, Tensor, dict]:
        """This process's slice of tokens, of labels, and of the model's other inputs. All are int64 of shape
        (batch, context); the positions of each document start at 0."""
        assert self.group is not None
        self._length, self._documents = self.group.padded_length(tokens.shape[1]), None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        else:
            padded = torch.nn.functional.pad(positions, (0, self._length - positions.shape[1]))
            self._documents = (padded.diff(prepend=padded[:, :1]) != 1).cumsum(1)
        own, own_labels = self.group.slice(tokens, 0), self.group.slice(labels, ignored)
        # With a mask, transformers does not look for documents in the positions; it sees only a slice of them.
        return own, own_labels, {"position_ids": self.group.slice(positions, 0), "attention_mask": torch.ones_like(own)}

    def _mask_of_all(self, *, mask_function: Any, allow_is_causal_skip: bool = True, **given: Any) -> Any:
        """The mask for all tokens, from what transformers asks for a slice."""
        if self._documents is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(self._documents))
            allow_is_causal_skip = False
        given |= {"q_length": self._length, "kv_length": self._length, "attention_mask": None}
        return self._mask(mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **given)

    def _attend_to_all(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        """Attention of a slice, each of shape (batch, heads, slice, width), to all tokens."""
        assert self.group is not None
        size, num_groups = self.group.size, getattr(module, "num_key_value_groups", 1)
        repeats = size // math.gcd(key.shape[1], size)  # fewer key-value heads than processes: several hold the same
        if repeats > 1:
            key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
            module = copy.copy(module)
            module.num_key_value_groups = num_groups // repeats
        query, key, value = map(self.group.exchange, (query, key, value))
        given.pop("position_ids", None)  # of the slice
        output, _ = self._attend(module, query, key, value, attention_mask, **given)
        return self.group.exchange(output), None
