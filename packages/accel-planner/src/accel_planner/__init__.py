"""Predicts memory, communication volume and relative step time of every strategy for a model, and chooses one.

from accel_planner import Hardware, choose, optimizer_facts, plan_all, profile_model
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
