"""Preemption notices of clouds, under the path of the guide."""

from accel_launch.preemption.spot_notice import notice_at as notice_at
