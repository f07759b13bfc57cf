"""Megatron-LM's own data sets, as loaders that ``prepare`` shards by data-parallel rank."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

from torch.utils.data import DataLoader, Subset

from accel_megatron.library import require_library
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_megatron.config import MegatronConfig

_DEFAULTS = {
    "data_path": (),
    "split": "969,30,1",
    "seq_length": None,
    "micro_batch_size": 1,
    "train_val_test_num_samples": (None, None, None),
    "seed": 1234,
    "tokenizer": None,
    "data_cache_path": None,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "num_workers": 0,
}
_SAME = {"splits_string": "split"}


@final
class MegatronLMDummyDataLoader:
    """Options of Megatron-LM's data sets, of which ``loaders`` makes loaders.

    Samples come in the order that the data set has shuffled them into, and ``prepare`` gives each data-parallel rank
    its batches. Without ``custom_megatron_datasets_provider_function`` they are megatron-core's ``GPTDataset``.

    Args:
        dataset_kwargs: ``data_path``, a prefix of files with .bin and .idx, or a list of these, or of weights and
            prefixes in turn; ``split``, weights of training, validation and test ("969,30,1"); ``seq_length``;
            ``micro_batch_size`` (1); ``train_val_test_num_samples``, numbers of samples (None: one epoch); ``seed``
            (1234); ``tokenizer``, with ``eod``, ``pad``, ``vocab_size`` and ``unique_identifiers``;
            ``data_cache_path``, of the indices; ``reset_position_ids``, ``reset_attention_mask`` and
            ``eod_mask_loss`` (False); and ``num_workers`` (0) of the loaders.

    Raises:
        ConfigError: an unknown option.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        given = {_SAME.get(name, name): value for name, value in dataset_kwargs.items()}
        unknown = sorted(given.keys() - _DEFAULTS.keys())
        if unknown:
            raise ConfigError(
                f"{unknown[0]}={given[unknown[0]]!r} is no option of Megatron-LM's data sets here; expected some of "
                f"{', '.join(_DEFAULTS)}"
            )
        self.dataset_args: dict[str, Any] = {**_DEFAULTS, **given}

    def loaders(self, plugin: "MegatronConfig") -> tuple[Any, Any, Any]:
        """Returns loaders of the samples of training, validation and test; None for a split that has none.

        A batch has ``micro_batch_size`` times ``num_micro_batches`` of the plugin's samples.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: megatron-core is not installed.
            ConfigError: options that the data sets need are missing.
        """
        require_library()
        sizes = tuple(self.dataset_args["train_val_test_num_samples"])
        provider = plugin.custom_megatron_datasets_provider_function or self._gpt_datasets
        found = tuple(provider(sizes))
        if len(found) != 3:
            raise ConfigError(
                f"custom_megatron_datasets_provider_function returned {len(found)} data sets; expected those of "
                "training, validation and test, None for one that is not there"
            )
        batch_size = self.dataset_args["micro_batch_size"] * plugin.num_micro_batches
        workers = self.dataset_args["num_workers"]
        train, valid, test = (
            None if one is None else DataLoader(_cut(one, size), batch_size=batch_size, num_workers=workers)
            for one, size in zip(found, sizes, strict=True)
        )
        return train, valid, test

    def __iter__(self) -> Iterator[NoReturn]:
        """Refuses: these are options, not batches."""
        raise ConfigError(
            "MegatronLMDummyDataLoader has no batches; nearest: train, valid, test = dummy.loaders(plugin), and "
            "accelerator.prepare(model, optimizer, train)"
        )

    def _gpt_datasets(self, sizes: Sequence[int | None]) -> Sequence[Any]:
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.utils import get_blend_from_list

        args = self.dataset_args
        paths = [args["data_path"]] if isinstance(args["data_path"], str) else list(args["data_path"])
        missing = [name for name in ("data_path", "seq_length", "tokenizer") if not (paths and args[name])]
        if missing:
            raise ConfigError(
                f"MegatronLMDummyDataLoader needs {missing[0]} for a GPTDataset; give it, or "
                "custom_megatron_datasets_provider_function"
            )
        config = GPTDatasetConfig(
            random_seed=args["seed"],
            sequence_length=args["seq_length"],
            blend=get_blend_from_list([str(one) for one in paths]),
            split=args["split"],
            path_to_cache=args["data_cache_path"],
            tokenizer=args["tokenizer"],
            reset_position_ids=args["reset_position_ids"],
            reset_attention_mask=args["reset_attention_mask"],
            eod_mask_loss=args["eod_mask_loss"],
        )
        built: Sequence[Any] = BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, config).build()
        return built


def _cut(dataset: Any, size: int | None) -> Any:
    """Returns the first ``size`` samples; megatron-core builds whole passes over the documents."""
    return dataset if size is None or len(dataset) <= size else Subset(dataset, range(size))
