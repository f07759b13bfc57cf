"""Notices that a machine is about to be taken back, as clouds give them: asked for at an address."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

_NOTHING = frozenset({"", "0", "false", "none", "null", "no", "[]", "{}"})
_NONE: Mapping[str, str] = MappingProxyType({})


def notice_at(url: str, *, headers: Mapping[str, str] | None = None, timeout: float = 2.0) -> Callable[[], str | None]:
    """A ``check`` for ``Accelerator.on_preemption``: asks ``url`` each time, and gives what it says as the reason.

    There is no notice where the answer is an error, like the 404 that one cloud gives until there is something to
    tell, or says no in a word: nothing at all, FALSE, NONE, 0. An address that cannot be reached within ``timeout``
    seconds gives none either. Proxies are not asked, as such an address belongs to the machine itself.

    Raises:
        ConfigError: ``url`` does not begin with http:// or https://.
    """
    from accel_state.errors import ConfigError

    if not url.lower().startswith(("http://", "https://")):
        raise ConfigError(f"notice_at takes an address that begins with http:// or https://, not {url!r}")

    def ask() -> str | None:
        from http.client import HTTPException
        from urllib.request import ProxyHandler, Request, build_opener

        try:
            request = Request(url, headers=dict(headers or _NONE))
            with build_opener(ProxyHandler({})).open(request, timeout=timeout) as answer:
                said = answer.read(4096).decode(errors="replace").strip()
        except (OSError, HTTPException):  # an answer that is an error is one of these too
            return None
        return None if said.lower() in _NOTHING else f"{url} says {said[:200]}"

    return ask
