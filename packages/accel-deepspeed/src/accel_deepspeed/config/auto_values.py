"""Completion of the values "auto" in a DeepSpeed configuration, by the methods that Transformers' integration calls."""

from collections.abc import Mapping
from typing import Any

from accel_deepspeed.config.ds_json import AUTO, HfDeepSpeedConfig, leaves
from accel_state.errors import ConfigError


class AutoValues:
    """Base of the plugins that hold a DeepSpeed configuration: reads, and completes it in place.

    Attributes:
        hf_ds_config: the configuration, read by dotted keys.
        deepspeed_config: the same as a mapping.
    """

    __slots__ = ()

    hf_ds_config: HfDeepSpeedConfig | Any
    deepspeed_config: Any

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value at a dotted key is "auto"."""
        return bool(self.hf_ds_config.get_value(ds_key_long) == AUTO)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Returns the value at a dotted key."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replaces "auto" by the value in ``kwargs`` (same dotted key), or appends to ``mismatches`` if the two differ.

        Raises:
            ConfigError: the value is "auto", and ``kwargs`` has no such key.
        """
        node, last = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        if node.get(last) == AUTO:
            if ds_key_long not in kwargs:
                raise ConfigError(
                    f"`{ds_key_long}` not found in kwargs. Please specify `{ds_key_long}` without `auto` (set to "
                    "correct value) in the DeepSpeed config file or pass it in kwargs."
                )
            node[last] = kwargs[ds_key_long]
            self.note_filled(ds_key_long)
        elif must_match and ds_key_long in kwargs and node.get(last) is not None:
            if node[last] != kwargs[ds_key_long] and mismatches is not None:
                mismatches.append(f"- ds {ds_key_long}={node[last]} vs arg {ds_key_long}={kwargs[ds_key_long]}")

    def note_filled(self, ds_key_long: str) -> None:
        """Takes note of an "auto" that was replaced. Default: nothing."""

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Calls ``fill_match`` for every key of the configuration.

        Raises:
            ConfigError: lists every value that contradicts ``kwargs``.
        """
        found: list[str] = [] if mismatches is None else mismatches
        for key, _ in list(leaves(self.deepspeed_config if config is None else config, prefix)):
            if key in kwargs or self.is_auto(key):
                self.fill_match(key, found, must_match, **kwargs)
        if found and mismatches is None:
            raise ConfigError(
                "Please correct the following DeepSpeed config values that mismatch kwargs values:\n" + "\n".join(found)
            )
