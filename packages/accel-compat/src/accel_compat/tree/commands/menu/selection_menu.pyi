from accel_compat.absent import BulletMenu as BulletMenu
