"""Execution of a plan on several nodes: torch elastic's agent with our own processes and rendezvous."""

import logging
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.api import SignalException

from accel_launch.launch.checks import is_elastic
from accel_launch.launch.launch_plan import LaunchPlan, ProcessPlan
from accel_launch.launch.multi_node.rendezvous import Meeting, MeetingPoint
from accel_launch.launch.supervisor.child_processes import Workers
from accel_launch.launch.supervisor.failure import report
from accel_launch.launch.supervisor.interrupts import FOR_PROCESSES, Interrupts
from accel_launch.launch.supervisor.orphan_reaper import Guard
from accel_launch.launch.supervisor.output import say
from accel_launch.launch.supervisor.supervisor import attempt_env, interrupted, output_of, preempted

_ROLE = "accel"
_NO_PAUSE = 0.001
_SOON = 0.1


def run_machine(plan: LaunchPlan) -> int:
    """Runs this node's part of ``plan`` in step with the other nodes and returns the exit status.

    When processes fail on one node, all nodes end their processes and meet again for the next attempt, or end the job
    together if no restarts are left.

    Raises:
        LaunchError: the nodes do not find each other or were given contradicting settings.
    """
    _quieten("torch.distributed.elastic")
    with Interrupts(FOR_PROCESSES) as interrupts, Guard() as guard:
        try:
            return _run_agent(plan, interrupts, guard)
        except SignalException:
            return interrupted(interrupts.received[0], len(plan.processes))


def _run_agent(plan: LaunchPlan, interrupts: Interrupts, guard: Guard) -> int:
    with _meeting(plan, interrupts) as meeting:
        agent = MachineAgent(plan, meeting=meeting, interrupts=interrupts, guard=guard)
        try:
            agent.run()
        except SignalException:
            if agent.preempted:
                meeting.await_done(plan.config.grace_period.total_seconds())
                return preempted(len(plan.processes))
            raise
        return agent.status


def _meeting(plan: LaunchPlan, interrupts: Interrupts) -> MeetingPoint:
    if not is_elastic(plan.config):
        return Meeting(plan, interrupts)
    from accel_launch.launch.multi_node.elastic import ElasticMeeting

    return ElasticMeeting(plan, interrupts)


@final
class MachineAgent(SimpleElasticAgent):
    """Torch elastic's loop of attempts, with processes that accel starts, watches and ends.

    Torch's own supervision detects exits within tenths of a second and records errors in full seconds, which is too
    coarse to distinguish the first failure from those that follow it.
    """

    def __init__(self, plan: LaunchPlan, *, meeting: MeetingPoint, interrupts: Interrupts, guard: Guard) -> None:
        config = plan.config
        super().__init__(
            WorkerSpec(
                role=_ROLE,
                local_world_size=len(plan.processes),
                rdzv_handler=meeting,
                entrypoint=plan.processes[0].argv[0],
                max_restarts=config.max_restarts,
                # _monitor_workers waits itself, and returns at once when a process ends.
                monitor_interval=_NO_PAUSE,
            )
        )
        self.status = 0
        self.preempted = False
        self._plan = plan
        self._meeting = meeting
        self._interrupts = interrupts
        self._guard = guard
        self._workers: Workers | None = None
        self._num_processes = plan.num_processes
        self._grace = config.grace_period.total_seconds()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = self._meeting.round - 1
        folder = self._guard.folder / str(attempt)
        folder.mkdir(parents=True)
        env = attempt_env(self._plan, attempt, self._meeting.get_run_id())
        self._workers = Workers(
            folder=folder, output=output_of(self._plan, attempt), interrupts=self._interrupts, guard=self._guard
        )
        processes = placed(self._plan.processes, worker_group)
        self._num_processes = worker_group.workers[0].world_size
        self._workers.start(processes, env | {"MASTER_PORT": str(worker_group.master_port)})
        pids = self._workers.pids
        return {process.local_rank: pids[process.rank] for process in processes}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            if workers.running:
                workers.stop(death_sig, self._grace)
            self.preempted = workers.preempted
            workers.close()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        workers = self._workers
        assert workers is not None
        interval = self._plan.config.monitor_interval
        workers.wait(interval if workers.running else min(interval, _SOON))  # the others may be waiting for this node
        if self._interrupts.received:
            raise SignalException("its launcher was asked to end", self._interrupts.received[0])
        if workers.failed or workers.stuck(self._grace):
            return self._failed(workers)
        reason = self._meeting.given_up()
        if reason is not None:
            _say(f"{reason}; ending the processes of this machine")
            return self._end(1)
        if workers.running:
            return RunResult(state=WorkerState.HEALTHY)
        # Nodes end together: until then, a node whose processes have ended still takes part in a restart.
        if not self._meeting.all_done():
            return RunResult(state=WorkerState.HEALTHY)
        if workers.preempted:
            # Not as a success, at which torch's agents wait for one another: one that was preempted itself has left.
            return self._end(preempted(len(self._plan.processes)))
        ranks = (worker.global_rank for worker in worker_group.workers)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    def _failed(self, workers: Workers) -> RunResult:
        if workers.running:
            workers.stop(signal.SIGTERM, self._grace)
        failures = workers.failures()
        config = self._plan.config
        left = self._meeting.restarts_left(config.max_restarts)
        if left <= 0 or not config.quiet:
            told = report(failures, self._num_processes, quiet=config.quiet)
            say(told)
        if left <= 0:
            self._meeting.give_up(f"rank {failures[0].exit.rank} failed on machine {config.machine_rank}")
            return self._end(failures[0].status or 1)
        if not config.quiet:
            again = config.max_restarts - left + 1
            _say(f"starting all processes on all machines again (restart {again} of {config.max_restarts})")
        self._remaining_restarts = left
        return RunResult(state=WorkerState.FAILED)

    def _end(self, status: int) -> RunResult:
        self.status = status
        self._remaining_restarts = 0
        return RunResult(state=WorkerState.FAILED)


def placed(processes: Sequence[ProcessPlan], group: WorkerGroup) -> list[ProcessPlan]:
    """The planned processes with the ranks that this round of the rendezvous assigned."""
    made = []
    for process, worker in zip(processes, group.workers, strict=True):
        place = {
            "RANK": str(worker.global_rank),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
        }
        made.append(replace(process, rank=worker.global_rank, env={**process.env, **place}))
    return made


def _say(text: str) -> None:
    say(f"accel launch: {text}")


def _quieten(prefix: str) -> None:
    # Each of these loggers has its own level, so the parent's level has no effect. accel prints shorter messages
    # instead.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(prefix):
            logging.getLogger(name).setLevel(logging.CRITICAL)
