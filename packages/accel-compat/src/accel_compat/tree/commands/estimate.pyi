from accel_compat.commands.estimating import check_has_model as check_has_model
from accel_compat.commands.estimating import create_empty_model as create_empty_model
from accel_compat.commands.estimating import estimate_command as estimate_command
from accel_compat.commands.estimating import estimate_command_parser as estimate_command_parser
from accel_compat.commands.estimating import gather_data as gather_data
from accel_compat.commands.command_line import estimate as main
from accel_compat.commands.estimating import verify_on_hub as verify_on_hub
