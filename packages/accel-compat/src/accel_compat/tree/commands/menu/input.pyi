from accel_compat.absent import KeyHandler as KeyHandler
from accel_compat.absent import mark as mark
from accel_compat.absent import mark_multiple as mark_multiple
from accel_compat.absent import register as register
