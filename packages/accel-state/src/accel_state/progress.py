"""Progress bar that is shown once per node."""

from typing import Any


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Returns ``tqdm.auto.tqdm``, shown on local rank 0 only; on all processes with ``main_process_only=False``.

    Where it is shown, ``disable`` counts as tqdm's own: True hides the bar, None hides it without a terminal.

    Raises:
        ImportError: tqdm is not installed.
        ValueError: the first positional argument is a bool, as an old signature had it.
    """
    if args and isinstance(args[0], bool):
        raise ValueError(
            f"the first argument of tqdm is what to iterate over, not {args[0]!r}; say main_process_only={args[0]}"
        )
    try:
        from tqdm.auto import tqdm as bar
    except ImportError as error:
        raise ImportError("accel_state.tqdm needs the package tqdm: pip install tqdm") from error
    from accel_state.session import current_topology

    hidden = main_process_only and not current_topology().is_local_main
    return bar(*args, **{**kwargs, "disable": hidden or kwargs.get("disable", False)})
