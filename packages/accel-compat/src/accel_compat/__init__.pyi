from accel_compat._version import __version__ as __version__
from accel_compat.finder import install as install
from accel_compat.finder import is_installed as is_installed
from accel_compat.finder import uninstall as uninstall
