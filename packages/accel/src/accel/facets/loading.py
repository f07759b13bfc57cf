"""Loading of checkpoints into an Accelerator: all parts, or parts by name."""

import os
from abc import ABC
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from accel.checkpoints.load_report import LoadOptions, LoadReport
from accel.checkpoints.restore import Restoration, restore_local
from accel.checkpoints.run_facts import COMPANIONS_KEY
from accel.checkpoints.train_state import ModelState
from accel.facets.checkpoints import CheckpointFacet
from accel_observe.meters.phases import observed
from accel_state.errors import CheckpointCorruptError, CheckpointError, ConfigError
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from accel_ckpt import Checkpoint
    from accel_ckpt.io.storage import Location

LATEST = "latest"


class LoadingFacet(CheckpointFacet, ABC):
    """Finds a checkpoint, compares it with the run, and loads the requested parts."""

    last_load: LoadReport | None = None
    """Report of the last ``load_state``: loaded, missing and unused entries, and differences between this run and the
    saved one; None before the first load.
    """

    @observed("loaded")
    @recorded("load_state")
    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        parts: str | Iterable[str] | None = None,
        allow_changed_data: bool | None = None,
    ) -> "Location":
        """Restores the state that ``save_state`` saved, on any number of processes; returns the folder that was read.

        ``input_dir`` None or ``"latest"`` takes the newest intact checkpoint of the project's automatic ones. Ranks
        that did not exist at the save derive their random state from the checkpoint. ``strict=False`` tolerates missing
        and unused parameters in models and optimizers; ``last_load`` reports them.

        ``parts`` restricts loading to the parts of these names: ``"model"``, ``"optimizer"``, ``"scheduler"``,
        ``"loader"``, ``"custom"`` (the first of each kind, then ``"model_1"``, ...), ``"scaler"``, ``"clock"`` (with
        the gradients of an open window) and ``"rng"``. The rest of the run is not changed, including random state,
        clock and open windows, and the checkpoint may hold parts that the run has not prepared. Only the bytes that are
        read are verified then.

        Collective: every rank of the group must call this.

        ``allow_changed_data=True`` loads positions of loaders inside an epoch of data that has changed since, with a
        warning in numbers (see ``PreparedLoader.load_state_dict``); False refuses them; None takes the value of
        ``DataLoaderConfiguration(allow_changed_data=...)``.

        Raises:
            ConfigError: no location is given or known, or ``parts`` is empty.
            CheckpointMismatchError: the checkpoint, or the run, has no part of such a name, or a part that does not
                fit.
            CheckpointError: there is no such checkpoint, a file of it is damaged, or it belongs to other objects.
                A mismatch, and a file that is missing or has another size, are found before anything has changed. A
                block whose bytes have changed is found when it is read into the parameters: models and optimizers
                then hold a part of the checkpoint, as the error says, until another ``load_state`` succeeds.
        """
        self._wait_for_save()
        options = self._agreed_options(strict, parts, allow_changed_data)
        checkpoint, restoration = self._loaded(input_dir, options)
        restore_local(checkpoint, self.session, self.backend, self._models, self.clock, options)
        if options.parts is None:
            noted = checkpoint.metadata.get(COMPANIONS_KEY) or {}
            for name, companion in self._companions().items():
                companion.load(noted.get(name))
            self._continue_numbering(checkpoint.path)
        self.last_load = restoration.report(self._run_facts())
        return checkpoint.path

    def _agreed_options(
        self, strict: bool, parts: str | Iterable[str] | None, allow_changed_data: bool | None
    ) -> LoadOptions:
        """Verifies that the options are the same on all ranks, because they decide which collectives the ranks call."""
        from accel_ckpt.rank_group import RankGroup

        def options() -> LoadOptions:
            return LoadOptions.of(strict=strict, parts=parts, allow_changed_data=allow_changed_data)

        told = RankGroup.of(self._ranks()).run_on_all("load_state", options)
        if other := [rank for rank, one in enumerate(told) if one != told[0]]:
            raise CheckpointError(
                f"load_state was called on rank 0 with {told[0]} and on rank {other[0]} with {told[other[0]]}; give "
                "the same on all processes"
            )
        return told[0]

    def _loaded(
        self, input_dir: str | os.PathLike[str] | None, options: LoadOptions
    ) -> "tuple[Checkpoint, Restoration]":
        """Loads the checkpoint that ``input_dir`` names, or the newest intact one.

        Hooks must not see a damaged checkpoint, so if there are hooks, every byte is verified before they are called.
        """
        from accel_ckpt import open_checkpoint

        verify = bool(self._load_hooks)
        damaged: list[str] = []
        restorations: list[Restoration] = []

        def load(checkpoint: "Checkpoint") -> "tuple[Checkpoint, Restoration]":
            with ExitStack() as failing, ExitStack() as files:
                failing.callback(checkpoint.close)
                restoration = self._read(checkpoint, options, files)
                try:
                    restoration.apply()
                except CheckpointCorruptError as error:
                    damaged.append(str(error))
                    raise
                failing.pop_all()
            restorations.append(restoration)
            return checkpoint, restoration

        if input_dir is not None and os.fspath(input_dir) != LATEST:
            from accel_ckpt.io.storage import locate

            return load(open_checkpoint(locate(input_dir), verify=verify, group=self._ranks()))
        series = self._series()
        if series is None:
            raise ConfigError(
                "No input_dir provided and automatic checkpoint naming is disabled; give the checkpoint's folder"
            )
        try:
            latest = series.latest(None if verify else load)
        except Exception as error:
            for text in damaged[-1:]:
                error.add_note(f"before that, a damaged checkpoint was loaded in part: {text}")
            raise
        if latest is None:
            from accel_ckpt.loading.foreign import advice_on_series

            text = f"there is no intact checkpoint in {series.path}{advice_on_series(series.path)}"
            raise CheckpointError("; ".join([text, *damaged[-1:]]))
        return load(latest) if verify else (latest, restorations[-1])

    def _read(self, checkpoint: "Checkpoint", options: LoadOptions, files: ExitStack) -> Restoration:
        """Reads the checkpoint's parts after the hooks, and compares them; ``files`` closes the hooks' files."""
        models = list(self._models)
        folder = str(checkpoint.path)
        if self._load_hooks and not isinstance(checkpoint.path, Path):
            from accel_ckpt.saving.extra_files import download

            folder = files.enter_context(TemporaryDirectory(prefix="accel-load-"))
            download(checkpoint, Path(folder))
        for hook in list(self._load_hooks.values()):
            hook(models, folder)
        dropped = [model for model in self._models if not any(model is kept for kept in models)]
        parts = self._train_state(options)
        ignored = {name for name, part in parts.items() if isinstance(part, ModelState) and part.model in dropped}
        # Without strict, a checkpoint may lack parameters, which would keep the values of a damaged one that was read
        # before.
        in_place = options.strict and self.backend.capabilities.loads_in_place
        return Restoration.read(
            checkpoint, parts, self.session, self._ranks(), options=options, ignored=ignored, in_place=in_place
        )
