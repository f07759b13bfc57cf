from accel_compat.absent import ARROW_KEY_FLAG as ARROW_KEY_FLAG
from accel_compat.absent import get_character as get_character
from accel_compat.absent import get_raw_chars as get_raw_chars
from accel_compat.absent import KEYMAP as KEYMAP
from accel_compat.absent import WIN_CH_BUFFER as WIN_CH_BUFFER
from accel_compat.absent import WIN_KEYMAP as WIN_KEYMAP
