"""Methods of the Accelerator for trackers."""

from typing import Any

from accel_compat.helpers import tracking


class TrackingMethods:
    """Trackers of an Accelerator."""

    def init_trackers(
        self: Any, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Makes and starts the trackers, and stores ``config`` in them."""
        for tracker in self.log_with:
            if isinstance(tracker, tracking.GeneralTracker):
                self.trackers.append(tracker)
                continue
            kind = tracking.LOGGER_TYPE_TO_CLASS[str(tracker)]
            options = (init_kwargs or {}).get(str(tracker), {})
            if kind.main_process_only and not self.is_main_process:
                continue
            if kind.requires_logging_directory:
                self.trackers.append(kind(project_name, self.logging_dir, **options))
            else:
                self.trackers.append(kind(project_name, **options))
        for tracker in self.trackers:
            tracker.start()
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(config)

    def get_tracker(self: Any, name: str, unwrap: bool = False) -> Any:
        """The tracker with this name, or with ``unwrap`` the object of its library.

        Raises:
            ValueError: there are trackers, and none of that name.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if self.trackers:
            raise ValueError(f"{name} is not an available tracker stored inside the `Accelerator`.")
        return tracking.GeneralTracker(_blank=True)

    def log(
        self: Any, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Records values in all trackers."""
        for tracker in self.trackers:
            tracker.log(tracking.logged_values(tracker, values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self: Any) -> None:
        """Finishes the trackers, and closes the process group."""
        for tracker in self.trackers:
            tracker.finish()
        self.state.destroy_process_group()
