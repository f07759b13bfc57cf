"""An Accelerator's loading of checkpoints: everything, or parts of it by name."""

import os
from abc import ABC
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from accel.checkpointing.load_report import LoadOptions, LoadReport
from accel.checkpointing.restore import Restoration, restore_local
from accel.checkpointing.run_facts import COMPANIONS_KEY
from accel.checkpointing.train_state import ModelState
from accel.facets.checkpoints import CheckpointFacet
from accel_ckpt.io.storage import Location, Url, locate
from accel_ckpt.saving.extra_files import download
from accel_observe.meters.phases import observed
from accel_state.errors import CheckpointCorruptError, CheckpointError, ConfigError
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from accel_ckpt import Checkpoint

LATEST = "latest"


class LoadingFacet(CheckpointFacet, ABC):
    """Finds a checkpoint, compares it with the run, and loads what is asked for."""

    last_load: LoadReport | None = None
    """What the last ``load_state`` has loaded, what was missing or left over, and how this run differs from the one
    that saved; None before the first."""

    @observed("loaded")
    @recorded("load_state")
    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        parts: str | Iterable[str] | None = None,
        allow_changed_data: bool | None = None,
    ) -> Location:
        """Puts everything back as ``save_state`` found it, on any number of processes, and returns the folder read.

        ``input_dir`` None or ``"latest"`` takes the newest intact checkpoint of the project's automatic ones. Ranks
        that did not exist when it was saved derive their random state from it. ``strict=False`` tolerates parameters
        that are missing or left over, in models and optimizers; ``last_load`` reports them.

        With ``parts`` only those of these names are loaded, as the checkpoint names them: ``"model"``,
        ``"optimizer"``, ``"scheduler"``, ``"loader"``, ``"custom"`` (the first of each kind, then ``"model_1"``, ...),
        ``"scaler"``, ``"clock"`` (with the gradients of an open window) and ``"rng"``. Everything else of the run
        stays as it is, random state, clock and open windows included, and the checkpoint may hold what the run has
        not prepared. Only the bytes that are read are compared with their digests then.

        ``allow_changed_data=True`` loads the positions of loaders inside an epoch of data that have changed since, with
        a warning in numbers, as ``PreparedLoader.load_state_dict`` says; False refuses them; None leaves it to
        ``DataLoaderConfiguration(allow_changed_data=...)``.

        Raises:
            ConfigError: no place is given or known, or ``parts`` names nothing.
            CheckpointMismatchError: the checkpoint, or the run, has no part of such a name, or another one.
            CheckpointError: there is no such checkpoint, a file of it is damaged, or it belongs to other objects.
                A mismatch, and a file that is missing or of another size, are found before anything has changed. A
                block whose bytes have changed is found when it is read into the parameters: models and optimizers
                hold a part of the checkpoint then, as the error says, until another ``load_state`` succeeds.
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
        """The options, the same on all ranks; otherwise they would enter different collectives."""
        from accel_ckpt.rank_group import RankGroup

        def options() -> LoadOptions:
            return LoadOptions.of(strict=strict, parts=parts, allow_changed_data=allow_changed_data)

        told = RankGroup.of(self._ranks()).together("load_state", options)
        if other := [rank for rank, one in enumerate(told) if one != told[0]]:
            raise CheckpointError(
                f"load_state was called on rank 0 with {told[0]} and on rank {other[0]} with {told[other[0]]}; give "
                "the same on all processes"
            )
        return told[0]

    def _loaded(
        self, input_dir: str | os.PathLike[str] | None, options: LoadOptions
    ) -> "tuple[Checkpoint, Restoration]":
        """The checkpoint that ``input_dir`` names, or the newest intact one, loaded.

        Hooks are shown none that is damaged, so where there are any every byte is compared before they are called.
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
        """The checkpoint's parts, compared with the run's, after the hooks; ``files`` ends what these have read."""
        models = list(self._models)
        folder = str(checkpoint.path)
        if self._load_hooks and isinstance(checkpoint.path, Url):
            folder = files.enter_context(TemporaryDirectory(prefix="accel-load-"))
            download(checkpoint, Path(folder))
        for hook in list(self._load_hooks.values()):
            hook(models, folder)
        dropped = [model for model in self._models if not any(model is kept for kept in models)]
        parts = self._train_state(options)
        ignored = {name for name, part in parts.items() if isinstance(part, ModelState) and part.model in dropped}
        # Without strict a checkpoint may lack parameters, which would keep the values of a damaged one read before.
        in_place = options.strict and self.backend.capabilities.loads_in_place
        return Restoration.read(
            checkpoint, parts, self.session, self._ranks(), options=options, ignored=ignored, in_place=in_place
        )
