"""One resolved configuration that knows where every value came from.

Names are imported on first use; nothing here imports torch.
"""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel.config.model import DOCUMENT_VARIABLE as DOCUMENT_VARIABLE
    from accel.config.model import FILE_VARIABLE as FILE_VARIABLE
    from accel.config.model import PRECEDENCE as PRECEDENCE
    from accel.config.model import AccelConfig as AccelConfig
    from accel.config.model import Explanation as Explanation
    from accel.config.model import Origin as Origin
    from accel.config.model import settings as settings
    from accel.config.resolve import resolve_config as resolve_config
    from accel.config.resolve import unknown_variables as unknown_variables
    from accel.config.setting import Setting as Setting

_MODULE_OF = {
    "DOCUMENT_VARIABLE": "accel.config.model",
    "FILE_VARIABLE": "accel.config.model",
    "PRECEDENCE": "accel.config.model",
    "AccelConfig": "accel.config.model",
    "Explanation": "accel.config.model",
    "Origin": "accel.config.model",
    "settings": "accel.config.model",
    "resolve_config": "accel.config.resolve",
    "unknown_variables": "accel.config.resolve",
    "Setting": "accel.config.setting",
}
__all__ = sorted(_MODULE_OF)
__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
