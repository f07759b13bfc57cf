"""Registry of installed trackers, and selection of those that a run requests."""

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from os import PathLike
from typing import TYPE_CHECKING, Any

from accel_observe.tracking.base import GeneralTracker, TrackingError
from accel_state.entry_points import find_entry_point
from accel_state.enums import LoggerType
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_LOG = logging.getLogger("accel_observe.tracking")
ENTRY_POINTS = "accel.trackers"
OWN = "accel"
ALIASES: Mapping[str, str] = {"csv": OWN, "jsonl": OWN}
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "tensorboard": (
        "tensorboard",
        "tensorboardX",
    ),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "comet_ml": ("comet-ml",),
    "aim": ("aim<4",),
    "mlflow": (
        "mlflow",
        "mlflow-skinny",
    ),
    "clearml": ("clearml",),
    "dvclive": ("dvclive",),
    "swanlab": ("swanlab",),
}
"""Requirements of a tracker, by its name; one of them must be installed."""

LogWith = str | LoggerType | GeneralTracker | Sequence[str | LoggerType | GeneralTracker] | None


def entries() -> dict[str, "EntryPoint"]:
    """Trackers of the entry-point group ``accel.trackers``, by name."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def load_tracker(name: str) -> type[GeneralTracker]:
    """Loads the class of the tracker ``name``; classes registered by hand take precedence over installed ones.

    Raises:
        ConfigError: there is no such tracker, and the message names the known ones; or two packages have one.
        TrackingError: the package's entry point is not a tracker class.
    """
    registered = registered_trackers()
    if name in registered:
        return registered[name]
    entry = find_entry_point(ENTRY_POINTS, name, ConfigError)
    if entry is None:
        raise _unknown(name, [*registered, *entries()])
    found = entry.load()
    if not (isinstance(found, type) and issubclass(found, GeneralTracker)):
        raise TrackingError(f"{entry.value} is no GeneralTracker, which {ENTRY_POINTS} is for")
    return found


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Registers a tracker class under its name, for ``log_with`` in this process.

    Raises:
        ConfigError: it is not a ``GeneralTracker``, or lacks ``name`` or ``requires_logging_directory``.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigError(f"{tracker_class!r} is no subclass of GeneralTracker, so it cannot be registered")
    for attribute in ("name", "requires_logging_directory"):
        if not hasattr(tracker_class, attribute):
            raise ConfigError(f"{tracker_class.__name__} has no `{attribute}`, which every tracker's class sets")
    if tracker_class.name in registered_trackers() or tracker_class.name in entries():
        _LOG.warning("the tracker %r is replaced by %s", tracker_class.name, tracker_class.__name__)
    setattr(GeneralTracker, _REGISTERED, {**registered_trackers(), tracker_class.name: tracker_class})


def unregister_tracker_class(name: str) -> None:
    """Removes a tracker class that ``register_tracker_class`` added; no effect if there is none of that name."""
    setattr(
        GeneralTracker, _REGISTERED, {known: kind for known, kind in registered_trackers().items() if known != name}
    )


def registered_trackers() -> dict[str, type[GeneralTracker]]:
    """Tracker classes that ``register_tracker_class`` added in this process, by name."""
    return dict(getattr(GeneralTracker, _REGISTERED, {}))


_REGISTERED = "_registered_by_hand"


def is_installed(name: str) -> bool:
    """Whether the library of a tracker is installed. True for the run log, and for trackers of other packages."""
    return name not in LIBRARIES or any(_is_met(requirement) for requirement in LIBRARIES[name])


def _is_met(text: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement

    requirement = Requirement(text)
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def get_available_trackers() -> list[LoggerType]:
    """The known trackers whose library is installed."""
    return [LoggerType(name) for name in LIBRARIES if is_installed(name)]


def filter_trackers(
    log_with: LogWith, logging_dir: str | PathLike[str] | None = None
) -> list[LoggerType | str | GeneralTracker]:
    """Usable trackers of ``log_with``: names without duplicates, objects unchanged; ``"all"``: every installed one.

    A known tracker whose library is not installed is left out; so is, with a warning, one whose package fails to
    import.

    Raises:
        ConfigError: an unknown name, or a tracker that needs a folder while none is known.
    """
    given = [] if log_with is None else list(log_with) if isinstance(log_with, list | tuple | set) else [log_with]
    objects = [one for one in given if isinstance(one, GeneralTracker)]
    names = [ALIASES.get(str(one), str(one)) for one in given if not isinstance(one, GeneralTracker)]
    chosen: list[LoggerType | str | GeneralTracker] = list(objects)
    if "all" in names:
        names = [str(one) for one in get_available_trackers()]
    for name in dict.fromkeys(names):
        if name not in LIBRARIES and name != OWN and name not in registered_trackers() and name not in entries():
            raise _unknown(name, [*registered_trackers(), *LIBRARIES, OWN, *entries()])
        if not is_installed(name):
            _LOG.debug("the tracker %s was asked for, and its library is not installed", name)
            continue
        try:
            needs_folder = name != OWN and load_tracker(name).requires_logging_directory
        except (ConfigError, TrackingError):
            raise
        except Exception as error:
            _LOG.warning("tracker %s cannot be loaded, so the run does without: %s", name, error)
            continue
        if needs_folder and logging_dir is None:
            raise ConfigError(
                f"Logging with `{name}` requires a `logging_dir` to be passed in: give Accelerator project_dir=..., or "
                "ProjectConfiguration(logging_dir=...)"
            )
        chosen.append(LoggerType(name) if name in LoggerType else name)
    return chosen


def _unknown(name: str, known: Sequence[str]) -> ConfigError:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(set(known)))}"
    return ConfigError(f"Unsupported logging capability: {name!r}; {hint}")


def construct(name: str, project: str, folder: Any, options: Mapping[str, Any]) -> GeneralTracker:
    """Constructs the tracker ``name`` for a run without starting it. Exceptions of its constructor propagate."""
    tracker_class = load_tracker(name)
    arguments = (project, folder) if tracker_class.requires_logging_directory else (project,)
    return tracker_class(*arguments, **options)
