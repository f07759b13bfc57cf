"""GradientState: accumulation and active loaders, shared by all instances."""

import os
import weakref
from typing import Any

from accel_compat.state.shared import SharedAttributes


class SharedGradientState(SharedAttributes):
    """Gradient accumulation as Accelerate's ``GradientState`` presents it: one state for all instances.

    Attributes:
        sync_gradients: whether the gradients of the current micro-batch are reduced, and optimizers step.
        plugin_kwargs: options of the accumulation plugin that differ from their defaults.
    """

    _shared_state: dict[str, Any] = {}
    _shown = "GradientState"

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        super().__init__()
        if not self.initialized:
            self.sync_gradients = True
            self._dataloader_references_ref: list[Any] = [None]
            self.plugin_kwargs = _options(gradient_accumulation_plugin)
            self._is_xla_gradients_synced = False
        if gradient_accumulation_plugin is not None and self.plugin_kwargs != _options(gradient_accumulation_plugin):
            self.plugin_kwargs = _options(gradient_accumulation_plugin)

    @property
    def num_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return int(self.plugin_kwargs.get("num_steps", 1))

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers count the micro-batches between two steps."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a window ends with its loader."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def initialized(self) -> bool:
        """Whether the state exists."""
        return self._shared_state != {}

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has delivered its last batch."""
        return self.in_dataloader and bool(self.active_dataloader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Samples of the active loader's last global batch that are not repeated; -1 outside of a loop."""
        return int(self.active_dataloader.remainder) if self.in_dataloader else -1

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether gradients on XLA devices have been reduced."""
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes"):
            return True
        return self._is_xla_gradients_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, synced: bool) -> None:
        self._is_xla_gradients_synced = synced

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def dataloader_references(self) -> list[Any]:
        """Loaders that are being iterated, outermost first, after a None."""
        return [reference() if reference is not None else None for reference in self._dataloader_references_ref]

    @dataloader_references.setter
    def dataloader_references(self, loaders: list[Any]) -> None:
        self._dataloader_references_ref = [None if loader is None else weakref.ref(loader) for loader in loaders]

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader that is being iterated, or None."""
        return self.dataloader_references[-1]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    def _add_dataloader(self, dataloader: Any) -> None:
        self.dataloader_references = [*self.dataloader_references, dataloader]

    def _remove_dataloader(self, dataloader: Any) -> None:
        self.dataloader_references = [
            one for position, one in enumerate(self.dataloader_references) if position == 0 or one is not dataloader
        ]

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    @staticmethod
    def _reset_state() -> None:
        """Forgets the state."""
        SharedGradientState._shared_state.clear()


def _options(plugin: Any) -> dict[str, Any]:
    return plugin.to_kwargs() if plugin is not None else {}
