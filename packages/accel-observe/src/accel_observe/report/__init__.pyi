from accel_observe.report.history import History as History
from accel_observe.report.history import find_run as find_run
from accel_observe.report.history import read_history as read_history
from accel_observe.report.page import page_of as page_of
from accel_observe.report.plots import plots_of as plots_of
