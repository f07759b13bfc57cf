"""Commands of ``accel`` that need the planner, the report or the Accelerator."""
