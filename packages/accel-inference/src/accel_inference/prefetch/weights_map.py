"""Mappings of offloaded weights by name, and the prefetcher that reads them for the modules of a model."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_inference.prefetch.prefetcher import Prefetcher
from accel_inference.weights.offload_folder import indexed_weight, read_offload_index
from accel_inference.weights.sources import FileWeight, HostWeight, Source
from accel_state.errors import CheckpointMismatchError


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Weights in host memory (``state_dict``), and in files (an offload folder, or the files that ``index`` names).

    As a mapping it reads one weight at a time. The modules of a dispatched model read through the prefetcher of their
    execution device, of which ``resident_bytes`` is the budget.

    Raises:
        ValueError: neither a state dict nor a folder nor an index is given, or ``resident_bytes`` is no number of
            bytes.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: torch.device | str | int | None = None,
        *,
        resident_bytes: int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("Need either a `state_dict`, a `save_folder` or an `index` containing offloaded weights.")
        if resident_bytes is not None and (not isinstance(resident_bytes, int) or resident_bytes < 0):
            raise ValueError(f"resident_bytes is {resident_bytes!r}; expected a number of bytes from 0, like {2**30}")
        self.state_dict = dict(state_dict or {})
        self.index = dict(index) if index is not None else read_offload_index(save_folder) if save_folder else {}
        self.save_folder = save_folder
        self.device = device
        self.resident_bytes = resident_bytes
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self._aliases: dict[str, str] = {}
        self._headers: dict[str, dict[str, FileWeight]] = {}
        self._prefetchers: dict[torch.device, Prefetcher] = {}

    def __getitem__(self, key: str) -> Tensor:
        tensor = self.source(key).read()
        return tensor if self.device is None or key in self.state_dict else tensor.to(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index or key in self._aliases

    def tie(self, groups: Sequence[Sequence[str]]) -> None:
        """Serves the names of each group that no file has under the name of the group that one has."""
        for group in groups:
            found = next((name for name in group if name in self.state_dict or name in self.index), None)
            if found is not None:
                self._aliases.update({name: found for name in group if name not in self})

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Checks that these weights are here, in the shapes of ``wanted``.

        Raises:
            CheckpointMismatchError: a weight is missing, or has another shape.
            CheckpointError: its file is missing, or does not hold it.
        """
        if lacking := [name for name in wanted if name not in self]:
            raise CheckpointMismatchError(
                f"the offloaded weights lack {', '.join(lacking[:8])}; they have "
                f"{', '.join(sorted(self)[:8]) or 'none'}. If the model is offloaded already, call "
                "remove_hook_from_submodules, which brings its weights back"
            )
        for name, tensor in wanted.items():
            self.source(name, shape=tensor.shape)

    def source(self, name: str, *, shape: Sequence[int] | None = None) -> Source:
        """Where a weight lies, which must have ``shape`` if that is given.

        Raises:
            KeyError: there is no such weight.
            CheckpointError: its file is missing, or does not hold it.
            CheckpointMismatchError: it has another shape.
        """
        found = self._source(self._aliases.get(name, name))
        if shape is not None and tuple(shape) != found.shape:
            raise CheckpointMismatchError(
                f"{name} is {list(found.shape)} among the offloaded weights and {list(shape)} in the model: they are "
                "those of another model"
            )
        return found

    def _source(self, name: str) -> Source:
        if name in self.state_dict:
            return HostWeight(self.state_dict[name])
        return indexed_weight(name, self.index[name], self.save_folder, self._headers)

    def prefetcher(self, device: torch.device) -> Prefetcher:
        """The prefetcher for modules that compute on a device."""
        if device not in self._prefetchers:
            self._prefetchers[device] = Prefetcher(device, budget=self.resident_bytes)
        return self._prefetchers[device]

    def close(self) -> None:
        """Drops what the prefetchers hold; they read again when they are used."""
        for prefetcher in self._prefetchers.values():
            prefetcher.close()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but resident weights and threads, which a copy has of its own."""
        return {**self.__dict__, "_prefetchers": {}}


class PrefixedDataset(Mapping[str, Any]):
    """The entries of a mapping whose names begin with ``prefix``, without it."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self.prefix) for name in self.dataset if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(name.startswith(self.prefix) for name in self.dataset)

    def origin(self) -> tuple[Mapping[str, Any], str]:
        """The innermost mapping, and the prefix of the names there."""
        if not isinstance(self.dataset, PrefixedDataset):
            return self.dataset, self.prefix
        dataset, prefix = self.dataset.origin()
        return dataset, prefix + self.prefix


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Sequence[str]
) -> dict[str, Tensor]:
    """The weights of some submodules, or single weights: their names, or what is below them."""
    return {
        name: weight
        for name, weight in state_dict.items()
        if any(f"{name}.".startswith(f"{wanted}.") or not wanted for wanted in submodule_names)
    }
