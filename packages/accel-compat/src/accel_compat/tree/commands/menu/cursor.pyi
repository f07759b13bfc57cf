from accel_compat.absent import CursorInfo as CursorInfo
from accel_compat.absent import hide as hide
from accel_compat.absent import hide_cursor as hide_cursor
from accel_compat.absent import show_cursor as show_cursor
