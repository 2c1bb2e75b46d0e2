"""The launcher: tells the agents what to run, serves the job's store, restarts or ends the ranks, and reports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from multiring import env
from multiring.errors import system_message
from multiring.job import admission
from multiring.job.gatherings import Gatherings
from multiring.job.store import Server
from multiring.launch import LaunchError, lifeline
from multiring.launch.attempt import Agents, Attempt, JobFailure, Replacements, SpareStarts
from multiring.launch.connection import AgentConnection, gather, host_patience
from multiring.launch.forked import ForkedAgent
from multiring.launch.hosts import Assignment, HostEntry
from multiring.launch.join import JoinedAgent
from multiring.launch.messages import Message, to_text
from multiring.launch.output import Output
from multiring.launch.processes import reap_orphans
from multiring.launch.program import module_name, portable, why_no_standby
from multiring.launch.signals import on_signal
from multiring.launch.spares import Spare, Spares
from multiring.launch.ssh import SshAgent
from multiring.launch.stdin import Input
from multiring.launch.summary import summary
from multiring.launch.terminal import Terminal, in_foreground, window_size
from multiring.launch.watch import WatchSocket
from multiring.net import interfaces
from multiring.version import __version__

RELATIVE_IMPORT = "attempted relative import with no known parent package"
"""Python's message for a script that belongs into a package."""

OPEN_PORTS = (
    "if there is a firewall, open ports in it and name them in MULTIRING_PORTS; MULTIRING_INTERFACE chooses a network"
)

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Job:
    """The program of a job and its options; the words of ``program`` are those that were typed."""

    program: tuple[str, ...]
    binding: str = "core"
    max_restarts: int = 0
    log_dir: Path | None = None
    verbose: bool = False
    min_ranks: int | None = None
    """Fewest ranks that go on when others fail; None: all ranks are needed."""
    max_replacements: int = 0
    """Most ranks that are started again, one by one, when they fail while others go on; counted over all restarts."""
    standby: int = 0
    """Processes that each host keeps ready to become such ranks."""
    fork: bool = False
    """True if each host does the script's imports once and forks its ranks there."""
    summary: bool = True
    """True if it ends with three lines about what the ranks did."""


class Launcher:
    """Runs a job on connected agents, of which the first has rank 0."""

    def __init__(self, job: Job, agents: Agents, given_secret: bytes | None, spare_hosts: Sequence[Spare] = ()) -> None:
        """``given_secret`` is the one that the user gave; None: one is made."""
        self._job = job
        self._given_secret = given_secret
        self._agents = agents
        self._spare_hosts = spare_hosts
        connected = [*(agent for _, agent in agents), *(spare.agent for spare in spare_hosts)]
        self._children = {agent.child for agent in connected if agent.child is not None}
        self._standby = min(job.standby, job.max_replacements)  # no more are ever needed
        self._fork = job.fork
        self._lifeline: dict[str, Any] | None = None
        """The way to the store, for agents that ssh has started; None until it is served."""
        self._secret = given_secret or secrets.token_hex(32).encode()
        self._is_local = len(agents) == 1 and not spare_hosts and isinstance(self._first, ForkedAgent)
        self._world_size = sum(assignment.count for assignment, _ in agents)
        self._identity = secrets.token_hex(8)
        self._shown: Attempt | None = None
        """The attempt that those who watch see: the last one."""
        self._restart = 0
        self._watch: WatchSocket | None = None
        self._began = time.monotonic()
        self._unreached = ""
        """From where rank 0's host could not be reached, in words; empty if all others reached it."""
        self._output = Output(job.log_dir, self._world_size, on_broken=lambda: self._interrupt(signal.SIGPIPE))
        self._stdin: Input | None = None
        self._attempt: Attempt | None = None
        self._interrupted = 0
        self._accounts: dict[int, dict[str, Any]] = {}
        self._hosts: Mapping[int, str] = {rank: each.host for each, _ in agents for rank in each.ranks}
        self._returned: list[SshAgent] = []
        """Agents that this one has started on hosts that were lost."""
        self._warm: Callable[[AgentConnection], None] = lambda _: None
        """Lets the agent of a spare host have standbys for the ranks of this attempt."""
        self._spares = Spares(
            spare_hosts, self._prepare_agent, self._reach_again, self._use_returned, self._output.note
        )

    @property
    def _first(self) -> AgentConnection:
        """The agent of rank 0's host."""
        return self._agents[0][1]

    async def run(self) -> int:
        """The exit code of the job: 0, that of the rank that failed of itself, or 128 + the signal that ended it."""
        self._task = asyncio.current_task()
        self._handle_signals()
        self._let_watch()
        code, reason = 1, "it could not be started"
        try:
            code, reason = await self._run()
        finally:
            if self._watch is not None:
                await self._watch.close(code, reason)
            await asyncio.gather(*(agent.close() for agent in self._returned))
        return code

    async def _run(self) -> tuple[int, str]:
        """The exit code of the job, and why it is not 0."""
        failure = None
        try:
            with contextlib.closing(self._serve_store()) as server:
                await self._prepare()
                failure = await self._run_with_restarts(server)
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
        finally:
            await self._spares.close()
            self._output.close()
        code, reason = 0, ""
        if self._interrupted:
            ended = f"ended by {signal.Signals(self._interrupted).name}"
            self._output.note(ended)
            reason = f"host {self._first.host}: {ended}"
            code = 128 + self._interrupted
        elif failure is not None:
            self._report(failure)
            code, reason = failure.code, failure.what
        elif self._job.summary:
            for line in summary(self._accounts, self._hosts):
                self._output.note(line)
        of_spares = [spare.agent for spare in self._spare_hosts]
        for agent in {*(agent for _, agent in self._agents), *of_spares, *self._returned}:
            agent.send("done", code=code, reason=reason)
        return code, reason

    def _let_watch(self) -> None:
        """Open the socket at which the job can be watched; it goes on where there is none to be had."""
        try:
            self._watch = WatchSocket({"who": self._who, "look": self._look}, self._output.note)
        except OSError as error:
            self._output.note(f"multiring top cannot watch this job: {system_message(error)}")

    async def _who(self) -> Message:
        return {
            "kind": "who",
            "process": os.getpid(),
            "job": self._identity,
            "program": self._job.program,
            "ranks": self._world_size,
        }

    async def _look(self) -> Message:
        """Return the view of the job for its watchers."""
        attempt = self._shown
        if attempt is not None:
            await attempt.look()
        unstarted = {"process": None, "state": "starts", "replacement": 0, "age": None, "status": None}
        ranks = [{"rank": rank, "host": host, **unstarted} for rank, host in sorted(self._hosts.items())]
        return {
            **await self._who(),
            "kind": "look",
            "version": __version__,
            "seconds": time.monotonic() - self._began,
            "restart": self._restart,
            "max_restarts": self._job.max_restarts,
            "ranks": ranks if attempt is None else attempt.described(),
            "failure": None if attempt is None else attempt.shown_failure(),
            "output": [[rank, line.decode(errors="replace")] for rank, line in self._output.latest],
        }

    async def _prepare(self) -> None:
        why = why_no_standby(self._job.program)
        if self._standby and why:
            self._output.note(f"--standby {self._job.standby} is of no use: {why}; replacements are started without")
            self._standby = 0
        if self._fork and why:
            self._output.note(f"--fork is of no use: {why}; ranks are started without")
            self._fork = False
        spares = [(self._likely(each.entry), each.agent) for each in self._spare_hosts]
        answers = await gather(self._prepare_agent(*each) for each in [*self._agents, *spares])
        if self._job.verbose:
            for (assignment, _), answer in zip(self._agents, answers[: len(self._agents)], strict=True):
                for rank, share in zip(assignment.ranks, answer["shares"], strict=True):
                    self._output.note(f"rank {rank} on host {assignment.host}: {share}")

    def _likely(self, spare: HostEntry) -> Assignment:
        """The ranks for which a spare host makes ready: those of the largest host that fit there."""
        counts = [assignment.count for assignment, _ in self._agents]
        return Assignment(spare.name, 0, max(count for count in counts if count <= spare.slots))

    async def _reach_again(self, entry: HostEntry, lost: SshAgent) -> SshAgent | None:
        """An agent on a host where one was lost, of whose processes nothing is left; None while ssh gets to no shell.

        LaunchError if the host can be reached, and cannot be used as it is.
        """
        agent = await SshAgent.connect(lost.target, self._children.add)
        try:
            await agent.greet()
            self._check_apart(agent)
            assert lost.process is not None  # it was greeted
            agent.former = [*lost.former, (lost.machine, lost.process)]
            await self._prepare_agent(self._likely(entry), agent)
        except BaseException as error:
            if agent.process is not None:
                lost.former.append((agent.machine, agent.process))
            await agent.close(0.0)  # it has no ranks
            assert agent.child is not None
            self._children.discard(agent.child)
            if isinstance(error, LaunchError) and agent.is_out_of_reach:
                return None
            raise
        self._returned.append(agent)
        return agent

    def _check_apart(self, agent: AgentConnection) -> None:
        """LaunchError if an agent runs on the machine of another host of the job."""
        hosts = self._agents if self._attempt is None else self._attempt.agents
        for other in [*(each for _, each in hosts), *self._spares.agents]:
            if other.machine == agent.machine and other.host != agent.host and not other.gone:
                raise LaunchError(f"host {agent.host} is the machine of host {other.host}, and would be lost with it")

    async def _use_returned(self, spare: Spare) -> None:
        """Use a host that is back: for ranks that are lost, or as a spare one."""
        if self._attempt is not None:
            await self._attempt.use_spare(spare.entry.name)
        if spare.agent in self._spares.agents:
            self._warm(spare.agent)

    async def _prepare_agent(self, assignment: Assignment, agent: AgentConnection) -> Message:
        """Let an agent make ready for these ranks; LaunchError if it cannot."""
        former = agent.former if isinstance(agent, SshAgent) else []
        agent.send(
            "prepare",
            program=self._job.program,
            directory=os.getcwd(),
            environment=portable(os.environ) if isinstance(agent, SshAgent) else {},
            host=assignment.host,
            first=assignment.first,
            count=assignment.count,
            binding=self._job.binding,
            standby=self._standby,
            fork=self._fork,
            former=[process for machine, process in former if machine == agent.machine],
            lifeline=self._lifeline if isinstance(agent, SshAgent) else None,
        )
        return await agent.expect("ready")

    def _serve_store(self) -> Server:
        """Serve the store of the job, and let agents that ssh has started know by it that this host is there."""
        settings = env.read(env.Settings)
        server = Server(
            self._secret,
            job=self._identity,
            bind=interfaces.loopbacks()[:1] if self._is_local else [],
            ports=settings.ports,
            interface=settings.interface,
            encrypt=settings.encrypt,
        )
        self._lifeline = lifeline.described(
            server.addresses,
            self._secret,
            self._identity,
            encrypted=settings.encrypt,
            seconds=host_patience(settings.heartbeat_timeout),
        )
        return server

    async def _run_with_restarts(self, server: Server) -> JobFailure | None:
        job = self._identity
        replacements = Replacements(self._job.max_replacements, lambda number: admission.is_member(server, job, number))
        for restart in range(self._job.max_restarts + 1):
            self._restart, self._shown = restart, None
            address, port = await self._reserve_port()
            variables = {
                "WORLD_SIZE": self._world_size,
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "MULTIRING_WORLD_SIZE": self._world_size,
                "MULTIRING_STORE": ",".join(server.addresses),
                "MULTIRING_JOB": job,
                "MULTIRING_RESTART": restart,
                "MULTIRING_REPLACEMENT": 0,
                "MULTIRING_MAX_REPLACEMENTS": self._job.max_replacements,
            }
            texts = {name: str(value) for name, value in variables.items()}
            is_excluded = partial(admission.is_excluded, server, job, restart)
            has_others = self._job.max_replacements > 0 and self._world_size > 1
            gatherings = Gatherings(server, job, restart) if has_others else None
            attempt = await self._run_once(self._secret, texts, replacements, is_excluded, gatherings)
            failure = attempt.failure
            self._accounts, self._agents, self._hosts = attempt.accounts, attempt.agents, attempt.hosts
            if failure is None or attempt.agent_lost or self._interrupted or restart == self._job.max_restarts:
                break
            self._report(failure)
            self._output.note(f"restart {restart + 1} of {self._job.max_restarts}")
        return failure

    async def _reserve_port(self) -> tuple[str, int]:
        """A free port on rank 0's host, and the first address there that all other hosts reach."""
        self._first.send("listen", everywhere=not self._is_local)
        answer = await self._first.expect("listening")
        port: int = answer["port"]
        if self._is_local:
            return interfaces.loopbacks()[0], port
        addresses: list[str] = answer["addresses"]
        others = [agent for _, agent in self._agents[1:]]
        for agent in others:
            agent.send("reach", addresses=addresses, port=port)
        reached = [set(answer["addresses"]) for answer in await gather(agent.expect("reached") for agent in others)]
        for address in addresses:
            if all(address in seen for seen in reached):
                return address, port
        listed = ", ".join(addresses) or "no address"
        apart = [agent.host for agent, seen in zip(others, reached, strict=True) if seen.isdisjoint(addresses)]
        if apart:
            self._unreached = f"host {self._first.host} ({listed}) could not be reached from host {', '.join(apart)}"
        else:
            self._unreached = f"no address of host {self._first.host} ({listed}) could be reached from all other hosts"
        self._output.note(f"{self._unreached}: {OPEN_PORTS}. Without that init_process_group does not find rank 0")
        return (addresses or [self._first.host])[0], port

    async def _run_once(
        self,
        secret: bytes,
        variables: dict[str, str],
        replacements: Replacements,
        is_excluded: Callable[[int, int], bool],
        gatherings: Gatherings | None,
    ) -> Attempt:
        terminal = Terminal.of_this_process()

        def start(agent: AgentConnection, numbers: Mapping[int, int], left: int) -> None:
            # A socket can be listened to: whoever joined through it has the given secret already.
            told = "" if self._given_secret and isinstance(agent, JoinedAgent) else secret.hex()
            agent.send(
                "start",
                secret=told,
                variables=variables,
                terminal=terminal.as_dict(),
                left=left,
                replacements=list(numbers.items()),
            )

        for _, agent in self._agents:
            start(agent, {}, replacements.left)

        def warm(agent: AgentConnection) -> None:
            if self._standby:
                agent.send("warm", variables=variables, left=replacements.left)

        self._warm = warm
        for agent in self._spares.agents:
            warm(agent)
        if not isinstance(self._first, ForkedAgent) and self._stdin is None:
            self._stdin = Input(lambda data: self._first.send("input", text=to_text(data)))
        self._attempt = self._shown = attempt = Attempt(
            self._agents,
            self._output,
            self._stdin,
            self._job.min_ranks or self._world_size,
            replacements,
            is_excluded,
            gatherings,
            SpareStarts(self._spares, start),
            env.read(env.Settings).heartbeat_timeout,
        )
        await attempt.run()
        self._attempt = None
        return attempt

    def _report(self, failure: JobFailure) -> None:
        lines = [] if failure.rank is None else self._output.take_tail(failure.rank)
        text = failure.what
        if lines:
            text += "; its last lines:" + "".join(f"\n    {line}" for line in lines)
        if any(RELATIVE_IMPORT in line for line in lines) and self._job.program[0].endswith(".py"):
            text += f"\n{self._job.program[0]} is part of a package: start it by -m {module_name(self._job.program[0])}"
        self._output.note(text)
        if self._unreached:
            self._output.note(f"at its start {self._unreached}: {OPEN_PORTS}")

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                loop.add_signal_handler(number, self._interrupt, number)
        for number in _FORWARDED:
            loop.add_signal_handler(number, self._forward, number)
        loop.add_signal_handler(signal.SIGWINCH, self._resize)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        if os.getpid() == 1:  # that of a container, whose orphans come here
            on_signal(signal.SIGCHLD, self._reap_orphans)

    def _interrupt(self, number: int) -> None:
        self._interrupted = self._interrupted or number
        if self._attempt is not None:
            sent = signal.SIGTERM if number == signal.SIGPIPE else number
            self._attempt.interrupt(sent, self._ranks_at_terminal() if number == signal.SIGINT else ())
        elif self._task is not None:
            self._task.cancel()

    def _reap_orphans(self) -> None:
        reap_orphans(self._children)

    def _ranks_at_terminal(self) -> tuple[int, ...]:
        """The ranks that get a Ctrl-C, or a Ctrl-Z, from the terminal itself."""
        return (0,) if isinstance(self._first, ForkedAgent) and in_foreground(0) else ()

    def _forward(self, number: int) -> None:
        if self._attempt is not None:
            self._attempt.signal(number)

    def _resize(self) -> None:
        for stream in (1, 2):
            if os.isatty(stream):
                rows, columns = window_size(stream)
                self._first.send("window", rows=rows, columns=columns)

    def _suspend(self) -> None:
        """Stop with all ranks, and go on with them."""
        if self._attempt is not None:
            self._attempt.signal(signal.SIGSTOP, self._ranks_at_terminal())
        os.kill(os.getpid(), signal.SIGSTOP)
        self._forward(signal.SIGCONT)
