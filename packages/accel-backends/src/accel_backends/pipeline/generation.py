"""Greedy decoding with a model whose stages are on the ranks of a pipeline."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

import torch

from accel_state.errors import BackendError

AnyRank = Callable[[bool], bool]
"""Logical or of a value over the ranks whose prompts are decoded together with those of this one."""

NextTokens = Callable[[Mapping[str, Any]], torch.Tensor]
"""Function from the arguments of a model to the most probable token behind each sample, on every rank."""

_GREEDY: Final[Mapping[str, Any]] = {"do_sample": False, "num_beams": 1, "use_cache": False, "num_return_sequences": 1}
"""Options of transformers' ``generate`` that may be given, with the values that decoding here has."""

_CHANGE_GREEDY: Final[Mapping[str, tuple[Any, ...]]] = {
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "bad_words_ids": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
}
"""Options of a ``generation_config`` that change greedy decoding, with the values that do not."""


@final
@dataclass(frozen=True, slots=True)
class Decoding:
    """Options of a decoding: number of new tokens, tokens that end a sequence, and token behind its end."""

    num_tokens: int
    ends: Sequence[int]
    padding: int

    @classmethod
    def of(cls, model: Any, max_new_tokens: int | None, options: Mapping[str, Any]) -> Self:
        """Reads the options, with the defaults of the model's ``generation_config``.

        Raises:
            BackendError: an option that a pipeline does not decode with, or no number of tokens.
        """
        defaults = getattr(model, "generation_config", None)
        given = dict(options)
        ends = given.pop("eos_token_id", getattr(defaults, "eos_token_id", None))
        padding = given.pop("pad_token_id", getattr(defaults, "pad_token_id", None))
        given.setdefault("do_sample", bool(getattr(defaults, "do_sample", False)))
        given.setdefault("num_beams", getattr(defaults, "num_beams", None) or 1)
        for name, value in given.items():
            if name not in _GREEDY or value != _GREEDY[name]:
                able = f"{name}={_GREEDY[name]!r}" if name in _GREEDY else "leave it out"
                raise BackendError(
                    f"generate({name}={value!r}) with a model in a pipeline, which decodes greedily and without a "
                    f"cache; nearest: {able}, or generate with accelerator.save_model's weights in one process"
                )
        for name, without in _CHANGE_GREEDY.items():
            value = getattr(defaults, name, None)
            if value not in without:
                raise BackendError(
                    f"the model's generation_config has {name}={value!r}, with which a model in a pipeline does not "
                    f"decode; nearest: model.generation_config.{name} = {without[-1]!r}, or generate with "
                    "accelerator.save_model's weights in one process"
                )
        if max_new_tokens is None or max_new_tokens < 1:
            raise BackendError(
                f"generate(max_new_tokens={max_new_tokens}) with a model in a pipeline; expected a number of at least 1"
            )
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        return cls(max_new_tokens, ends, padding if padding is not None else ends[0] if ends else 0)


@torch.no_grad()
def decode_greedily(
    next_tokens: NextTokens,
    names: Collection[str],
    tokens: torch.Tensor,
    mask: torch.Tensor | None,
    decoding: Decoding,
    *,
    any_rank: AnyRank = bool,
) -> torch.Tensor:
    """Appends the most probable token to each sample until all have ended, or there are enough new tokens.

    Every token computes the full sequences again, because stages keep no cache.

    Args:
        next_tokens: function that computes them, a collective of the pipeline's ranks.
        names: arguments that the model's forward names.
        tokens: prompts, of shape (samples, tokens), padded on the left.
        mask: 0 where a prompt is padding; None: nowhere.
        decoding: options.
        any_rank: ranks that decode together compute until all of them have their tokens; default: this rank alone.

    Returns:
        Prompts with their new tokens, of shape (samples, tokens + new tokens).
    """
    mask = torch.ones_like(tokens) if mask is None else mask
    ends = torch.tensor(decoding.ends, dtype=tokens.dtype, device=tokens.device)
    open_ = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    left = decoding.num_tokens
    while any_rank(left > 0):
        given = {"input_ids": tokens, "attention_mask": mask}
        if "position_ids" in names:
            given["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        new = next_tokens(given).to(tokens).masked_fill(~open_, decoding.padding)
        if left == 0:
            continue
        tokens = torch.cat([tokens, new[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        open_ = open_ & ~torch.isin(new, ends)
        left = left - 1 if bool(open_.any()) else 0
    return tokens
