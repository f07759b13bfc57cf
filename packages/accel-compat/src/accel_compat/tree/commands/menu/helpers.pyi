from accel_compat.absent import clear_line as clear_line
from accel_compat.absent import CURSOR_TO_CHAR as CURSOR_TO_CHAR
from accel_compat.absent import Direction as Direction
from accel_compat.absent import forceWrite as forceWrite
from accel_compat.absent import linebreak as linebreak
from accel_compat.absent import move_cursor as move_cursor
from accel_compat.absent import reset_cursor as reset_cursor
from accel_compat.absent import writeColor as writeColor
