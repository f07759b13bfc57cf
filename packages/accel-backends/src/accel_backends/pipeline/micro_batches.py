"""Division of the arguments of a model's call into those of equal micro-batches."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_backends.parallel.pipeline.schedules import ScheduleKind, runs_with
from accel_state.errors import BackendError
from accel_state.pytree.operations import map_leaves

# A dim of as many tokens as there are samples would be taken for the samples.
_OF_THE_BATCH = frozenset({"cache_position"})
IGNORED = -100
"""Label of tokens that have no loss in transformers."""


def named_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by the names of the model's parameters, without those that are None.

    Raises:
        BackendError: an argument whose result is on other stages.
    """
    names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
    found = {**dict(zip(names, args, strict=False)), **kwargs}
    for option in ("output_hidden_states", "output_attentions", "past_key_values"):
        if found.get(option):
            raise BackendError(
                f"{option} was given to a model whose layers are on several ranks of a pipeline; nearest: leave it out"
            )
    return {
        name: value
        for name, value in found.items()
        if value is not None and name not in ("use_cache", "return_dict", "output_hidden_states", "output_attentions")
    }


def batch_shape(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Samples and tokens of a batch.

    Raises:
        BackendError: neither token ids nor their embeddings were given.
    """
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        raise BackendError(
            f"a pipeline needs input_ids or inputs_embeds of shape (samples, tokens), and got {', '.join(inputs)}"
        )
    return tokens.shape[0], tokens.shape[1]


def without_labels(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Labels of a batch (int64, samples x tokens) none of whose tokens has one."""
    samples, tokens = batch_shape(inputs)
    device = inputs.get("input_ids", inputs.get("inputs_embeds")).device
    return torch.full((samples, tokens), IGNORED, device=device)


def check_divisible(samples: int, count: int) -> None:
    """Refuses a batch that does not divide into the micro-batches.

    Raises:
        BackendError: with the nearest numbers that work.
    """
    if samples % count:
        nearest = largest_divisor(samples, count)
        more = -(-samples // count) * count
        raise BackendError(
            f"a batch of {samples} samples does not divide into {count} micro-batches; nearest: batches of {more} "
            f"samples (drop_last=True, if it is the last one), or num_microbatches={nearest}"
        )


def largest_divisor(samples: int, most: int, kind: ScheduleKind | None = None, num_ranks: int = 1) -> int:
    """Largest number of equal micro-batches, ``most`` at most, with which the schedule runs."""
    return next(
        count
        for count in range(min(most, samples), 0, -1)
        if samples % count == 0 and (kind is None or runs_with(kind, count, num_ranks))
    )


def split_batch(inputs: Mapping[str, Any], samples: int, count: int) -> list[dict[str, Any]]:
    """Splits every tensor with one row for each sample; other values go to every micro-batch."""
    size = samples // count

    def rows(value: Any, number: int) -> Any:
        def part(leaf: torch.Tensor) -> torch.Tensor:
            return leaf[number * size : (number + 1) * size] if leaf.ndim and leaf.shape[0] == samples else leaf

        return map_leaves(lambda leaf: part(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)

    return [
        {name: value if name in _OF_THE_BATCH else rows(value, number) for name, value in inputs.items()}
        for number in range(count)
    ]


def token_weights(parts: Sequence[Mapping[str, Any]]) -> list[float]:
    """Shares of the micro-batches in the mean loss over all tokens with a label, which transformers' models compute.

    With ``num_items_in_batch`` the loss of each micro-batch is a sum, divided by that number.
    """
    if "num_items_in_batch" in parts[0]:
        return [1.0] * len(parts)
    counts = []
    for part in parts:
        labels = part["shift_labels"] if "shift_labels" in part else part["labels"][..., 1:]
        counts.append((labels != part.get("ignore_index", IGNORED)).sum())
    numbers: list[int] = torch.stack(counts).tolist()  # read at once, because each read waits for the device
    return [number / max(sum(numbers), 1) for number in numbers]
