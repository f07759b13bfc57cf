"""Contract suite of backends: each contract is trained with the results of one process, or refused by name."""

from accel_testing.contracts.case import Case as Case
from accel_testing.contracts.cases import CASES as CASES
from accel_testing.contracts.checking import LAYOUTS as LAYOUTS
from accel_testing.contracts.checking import check_case as check_case
from accel_testing.contracts.driver import Driver as Driver
from accel_testing.contracts.outcome import Outcome as Outcome

__all__ = ["CASES", "Case", "Driver", "LAYOUTS", "Outcome", "check_case"]
