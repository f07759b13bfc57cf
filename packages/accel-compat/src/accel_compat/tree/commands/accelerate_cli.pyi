from accel_compat.absent import main as main
