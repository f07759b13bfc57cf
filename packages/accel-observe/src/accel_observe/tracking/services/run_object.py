"""Base class of trackers whose library makes an object for each run."""

from abc import ABC
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar

from accel_observe.tracking.base import Continuation, GeneralTracker
from accel_observe.tracking.values import as_json


class RunTracker(GeneralTracker, ABC):
    """Base class of trackers whose library makes an object for each run; the defaults fit libraries modelled on W&B.

    Attributes:
        module: the library, imported when the run is started.
        identity: argument of the library that names a run to resume; also the attribute of the run with that name.
        continued: further arguments for a resumed run.
        run: the library's object, once started.
    """

    requires_logging_directory = False
    module: ClassVar[str]
    identity: ClassVar[str] = "id"
    continued: ClassVar[Mapping[str, Any]] = MappingProxyType({"resume": "allow"})

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.run: Any = None
        self._options = dict(kwargs)
        self._library: Any = None

    @property
    def tracker(self) -> Any:
        """The library's object."""
        return self.run

    def start(self) -> None:
        self._library = import_module(self.module)
        self.run = self._begin(self._options)

    def _begin(self, options: Mapping[str, Any]) -> Any:
        """The library's object for a run with these options."""
        return self._library.init(project=self.run_name, **options)

    def state_dict(self) -> dict[str, Any]:
        name = getattr(self.run, self.identity, None)
        return {} if name is None else {self.identity: str(name)}

    def resume(self, run: Continuation) -> None:
        if self.identity in run.state:
            self._options.update({self.identity: run.state[self.identity], **self.continued})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(as_json(values))

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    def finish(self) -> None:
        self.run.finish()
