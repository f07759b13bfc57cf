"""Options and arguments of the ``accel ckpt`` commands."""

from typing import final

import rich_click as click


@final
class Place(click.ParamType):  # type: ignore[type-arg]
    """Click type of an existing folder, or of a URL, which is not checked here."""

    name = "place"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as it was given."""
        if "://" in value:
            return value
        return str(click.Path(exists=True, file_okay=False).convert(value, param, ctx))


PLACE = Place()
