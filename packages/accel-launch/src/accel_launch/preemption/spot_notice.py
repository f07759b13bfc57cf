"""Preemption notices of clouds, polled at a URL."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

_NOTHING = frozenset({"", "0", "false", "none", "null", "no", "[]", "{}"})
_NONE: Mapping[str, str] = MappingProxyType({})


def notice_at(url: str, *, headers: Mapping[str, str] | None = None, timeout: float = 2.0) -> Callable[[], str | None]:
    """A ``check`` for ``Accelerator.on_preemption``: polls ``url``, and returns its answer as the reason.

    There is no notice if the answer is an HTTP error, such as the 404 that one cloud returns until there is a notice,
    or a negative word: empty, FALSE, NONE, 0. A URL that does not answer within ``timeout`` seconds gives no notice
    either. Proxies are not used, because such a URL belongs to the machine itself.

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
        except (OSError, HTTPException):  # includes HTTP errors
            return None
        return None if said.lower() in _NOTHING else f"{url} says {said[:200]}"

    return ask
