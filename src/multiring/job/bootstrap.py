"""Identity of this process in its job, and the job's meeting point: read from the environment of a launcher."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from multiring import env
from multiring.errors import RendezvousError, ResourceError
from multiring.job import hints, pet, reports
from multiring.job.hostlist import expand
from multiring.job.store import Client, JobStore, Server, TorchStore
from multiring.net import interfaces, listen
from multiring.net.membership import Membership

SLURM_PORTS = range(20000, 30000)
"""The ports on which rank 0 of a Slurm step may serve the store if MULTIRING_PORTS does not say."""

SLURM_CHOICES = 8
"""Most ports that are tried, chosen by the number of the Slurm step: other jobs of the host may have some of them."""

LOOPBACKS = {"localhost", "127.0.0.1", "::1"}
"""Names of this host, of which one or the other may stand for nothing."""

BY_HAND = "RANK and WORLD_SIZE"
"""Name of the launcher where these are set and torchrun did not set them."""

DRAIN_SECONDS = 10.0
MIN_SECRET = 16
SECRET_SECONDS = 10.0
"""Time in which whoever gives a secret through a pipe closes it."""

_log = logging.getLogger("multiring")

NO_RANK = (
    "A process that a rank has started is no rank, though it has a rank's variables: init(rank=0, world_size=1) makes "
    "it a world of one"
)


@dataclass(frozen=True)
class _Taken:
    """A secret that was read from a descriptor, which can be read once, while init may be called again."""

    descriptor: int
    file: tuple[int, int]
    """Device and inode that the descriptor's number has had since then."""
    job: tuple[str, tuple[str, ...]]
    secret: bytes


_taken: _Taken | None = None


@dataclass(frozen=True)
class JobMeeting:
    """A store that the whole job shares, and the job's secret (None: rank 0 draws one and shares it in the store)."""

    store: JobStore
    secret: bytes | None
    lasting: bool = False
    """True if processes come and go at the store: how often this one was there says nothing about the others."""


@dataclass(frozen=True)
class RankIdentity:
    """Rank, size and identity of a job, as its launcher tells them; ``meet`` opens the meeting."""

    rank: int
    world_size: int
    launcher: str
    meet: Callable[[env.Settings], AbstractContextManager[JobMeeting]]
    job: str = ""
    restart: int = 0
    """Number of earlier starts of all ranks: data of an earlier start are refused."""
    replacement: int = 0
    """Above 0: this process takes the place of a rank that was lost, and is to be admitted by the others."""
    gathers: bool = False
    """True if ranks that are lost before all have met once are started again, so that all gather anew."""
    membership: Membership | None = None
    """Members of a job that goes on; None: the job starts."""

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= env.MOST_RANKS:
            raise ValueError(
                f"the environment of {self.launcher} says a world of {self.world_size}: a job has 1 to "
                f"{env.MOST_RANKS} ranks"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"the environment of {self.launcher} says rank {self.rank} in a world of {self.world_size}: ranks are "
                f"0 to {self.world_size - 1}, so correct the rank or the size"
            )

    @property
    def present(self) -> Membership:
        """The membership of the generation that this rank is of."""
        return Membership.at_start(self.world_size) if self.membership is None else self.membership


class _Filled(Mapping[str, str]):
    """The variables that are not empty, as empty settings count as not set.

    Each is asked for by its name: that of a standby which has yet to become a rank waits then (launch/standby.py).
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __getitem__(self, name: str) -> str:
        if text := self._environ[name]:
            return text
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._environ if self._environ[name])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def rank_identity(environ: Mapping[str, str] | None = None) -> RankIdentity:
    """Return the identity of this process by the first launcher that set its variables; a world of one if none did.

    ValueError where variables of a launcher say that there are other processes, and nothing says which one this is.
    """
    environ = os.environ if environ is None else environ
    environ = _Filled(environ)
    launch = env.read(env.Launch, environ)
    for launcher in (_multiring_run, _torchrun, _mpi, _slurm, _kubeflow):
        found = launcher(environ, launch)
        if found:
            if found.launcher == BY_HAND and found.world_size == 1:
                hints.refuse_beside_one(environ)
            return replace(found, restart=restarts(environ, launch))
    _refuse_half(environ)
    return RankIdentity(0, 1, "no launcher", no_meeting)


def _refuse_half(environ: Mapping[str, str]) -> None:
    """Variables that speak of several ranks, and not of this one's: whoever set them did not mean a world of one."""
    rank, size = environ.get("RANK"), environ.get("WORLD_SIZE")
    if (rank is None) != (size is None) and size != "1":
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={size}: set both, and MASTER_ADDR and MASTER_PORT, or neither (this process "
            "is then alone), or start by `multiring run`, which does"
        )
    hints.refuse_any(environ)
    if environ.get("MULTIRING_STORE"):
        raise ValueError(
            f"MULTIRING_STORE={environ['MULTIRING_STORE']} is where a job meets, and nothing says which of its ranks "
            "this process is: set MULTIRING_RANK and MULTIRING_WORLD_SIZE too, or give init() rank= and world_size=; "
            "unset it for a process that is alone"
        )


def _multiring_run(environ: Mapping[str, str], launch: env.Launch) -> RankIdentity | None:
    if launch.rank is None and launch.world_size is None:
        return None
    if launch.rank is None or launch.world_size is None:
        raise ValueError(
            f"MULTIRING_RANK={launch.rank} and MULTIRING_WORLD_SIZE={launch.world_size}: set both, or start by "
            "`multiring run`, which does"
        )
    return _at_launchers_store("multiring run", launch.rank, launch.world_size, launch)


def restarts(environ: Mapping[str, str], launch: env.Launch) -> int:
    """Return the number of earlier starts of all ranks: MULTIRING_RESTART, even if that is 0, or else what torchrun
    counts. A store that outlives a restart still holds what was written before it."""
    if environ.get("MULTIRING_RESTART"):
        return launch.restart
    return _number(environ, "TORCHELASTIC_RESTART_COUNT") if environ.get("TORCHELASTIC_RESTART_COUNT") else 0


def _torchrun(environ: Mapping[str, str], launch: env.Launch) -> RankIdentity | None:
    if not {"RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = master(environ, "torchrun")
        return RankIdentity(rank, size, "torchrun", lambda s: _at_torch_store(address, launch, s), run)
    return _at_rank_zero("torchrun" if run else BY_HAND, rank, size, environ, launch)


def _mpi(environ: Mapping[str, str], launch: env.Launch) -> RankIdentity | None:
    for name, size_name in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if name in environ and not (name == "PMI_RANK" and _pmi_is_sruns(environ)):
            rank, size = _number(environ, name), _number(environ, size_name)
            break
    else:
        if "PMIX_RANK" not in environ or "SLURM_PROCID" in environ:
            return None
        if not _importable("mpi4py"):
            raise RendezvousError(
                f"PMIX_RANK={environ['PMIX_RANK']} but nothing says how many ranks there are: install mpi4py, or set "
                "MULTIRING_RANK, MULTIRING_WORLD_SIZE and MULTIRING_STORE"
            )
        world = _mpi_world()
        rank, size = world.Get_rank(), world.Get_size()
    if launch.store:
        return _at_launchers_store("mpirun", rank, size, launch)
    if "MASTER_ADDR" in environ or size == 1:
        return _at_rank_zero("mpirun", rank, size, environ, launch)
    if not _importable("mpi4py"):
        raise RendezvousError(
            f"mpirun started rank {rank} of {size}, but nothing says where the ranks meet: install mpi4py, or pass "
            "on MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port there) to all ranks"
        )
    return RankIdentity(rank, size, "mpirun", lambda settings: _at_mpi(rank, size, launch, settings), launch.job)


def _pmi_is_sruns(environ: Mapping[str, str]) -> bool:
    """True if PMI_RANK is from `srun --mpi=pmi2`; an mpirun in an allocation starts by srun too, and adds a mark."""
    step = environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS")
    return (environ["PMI_RANK"], environ.get("PMI_SIZE")) == step and "MPI_LOCALRANKID" not in environ


def _slurm(environ: Mapping[str, str], launch: env.Launch) -> RankIdentity | None:
    # A batch script has SLURM_PROCID too, but no step: it is one process.
    if not {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environ.keys():
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, size_name)
    if launch.store:
        return _at_launchers_store("srun", rank, size, launch)
    if "MASTER_ADDR" in environ:
        return _at_rank_zero("srun", rank, size, environ, launch)
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    hosts = step_hosts(environ["SLURM_STEP_NODELIST"])
    anywhere = environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") or "SLURM_HET_SIZE" in environ
    hosts = hosts if anywhere else hosts[:1]  # those of which one has rank 0

    def meet(settings: env.Settings) -> AbstractContextManager[JobMeeting]:
        ports = slurm_ports(settings.ports or SLURM_PORTS, 16 * job + step)
        named = ", ".join(map(str, ports))
        origin = f"each of the ports {named}, which the number of the Slurm step chose from MULTIRING_PORTS,"
        remedy = "set other MULTIRING_PORTS for all ranks"
        return _served_by_rank_zero(rank, hosts, ports, f"slurm {job}.{step}", launch, settings, origin, remedy)

    return RankIdentity(rank, size, "srun", meet, f"slurm {job}.{step}")


def slurm_ports(ports: range, number: int) -> range:
    """Return the ports of ``ports`` for the step of this number; spread, as ranks take the first ones for data."""
    stride = max(len(ports) // SLURM_CHOICES, 1)
    return ports[number % stride :: stride][:SLURM_CHOICES]


def step_hosts(listed: str) -> list[str]:
    """The hosts of a Slurm host list, in its order: "n1", "n2" and "m7" of "n[1-2],m7"."""
    try:
        return expand(listed)
    except ValueError as error:
        raise ValueError(f"SLURM_STEP_NODELIST={listed!r}: {error}") from None


def _at_launchers_store(launcher: str, rank: int, size: int, launch: env.Launch) -> RankIdentity:
    def meet(settings: env.Settings) -> AbstractContextManager[JobMeeting]:
        secret = given_secret(launch)
        if not launch.store or secret is None:
            missing = "MULTIRING_STORE" if not launch.store else "MULTIRING_SECRET_FILE"
            raise RendezvousError(f"rank {rank} of {size}: {missing} is not set; start by `multiring run`, which does")
        return _client(rank, list(map(env.split_address, launch.store)), secret, launch.job, settings)

    gathers = launch.max_replacements > 0
    return RankIdentity(rank, size, launcher, meet, launch.job, replacement=launch.replacement, gathers=gathers)


def _kubeflow(environ: Mapping[str, str], launch: env.Launch) -> RankIdentity | None:
    """The identity of the only rank of a pod; those of several are made by `multiring run` or torchrun."""
    pod = pet.read(environ)  # which names what is no number there
    if pod.ranks_per_host != 1 or not pod.address or not pod.port or pod.hosts is None or pod.host_index is None:
        return None
    return _at_rank_zero("Kubeflow", pod.host_index, pod.hosts, environ, launch, prefix="PET_")


def _at_rank_zero(
    launcher: str, rank: int, size: int, environ: Mapping[str, str], launch: env.Launch, prefix: str = ""
) -> RankIdentity:
    """``prefix`` is that of the variables MASTER_ADDR and MASTER_PORT."""
    if size == 1:
        return RankIdentity(rank, size, launcher, no_meeting)
    address = master(environ, launcher, prefix)
    job = env.join_address(*address)

    def meet(settings: env.Settings) -> AbstractContextManager[JobMeeting]:
        remedy = "choose another for all ranks (or two processes have rank 0)"
        host, port = address
        if rank == 0:  # in a thread: a name server may take long to answer, and rank 0 itself needs no name
            threading.Thread(target=_tell_unknown, args=(f"{prefix}MASTER_ADDR", host), daemon=True).start()
        ports = range(port, port + 1)
        return _served_by_rank_zero(rank, [host], ports, job, launch, settings, f"{prefix}MASTER_PORT={port}", remedy)

    return RankIdentity(rank, size, launcher, meet, job)


def _tell_unknown(name: str, host: str) -> None:
    """Warn of an address that this host cannot resolve: no error, as other hosts may know it, or all may later."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        _log.warning(
            "%s=%s: the host of rank 0 does not know this name (%s), and ranks to which it is unknown too will not "
            "arrive: correct it for all ranks",
            name,
            host,
            reason,
        )


def at_lasting_store(
    rank: int, addresses: list[tuple[str, int]], secret: bytes, job: str
) -> Callable[[env.Settings], AbstractContextManager[JobMeeting]]:
    """Opens the meeting of ranks whose processes join one job after another; ``job`` is that of the store."""
    return lambda settings: _client(rank, addresses, secret, job, settings, lasting=True)


@contextlib.contextmanager
def no_meeting(settings: env.Settings) -> Iterator[JobMeeting]:
    """The meeting of a world of one, and of ranks that have met before: RendezvousError, as they need none."""
    raise RendezvousError("there is no store in which to meet")
    yield


@contextlib.contextmanager
def _client(
    rank: int,
    addresses: list[tuple[str, int]],
    secret: bytes,
    job: str,
    settings: env.Settings,
    *,
    sought: bool = False,
    served_by: int = -1,
    lasting: bool = False,
) -> Iterator[JobMeeting]:
    client = Client(
        addresses,
        secret,
        job=job,
        timeout=settings.init_timeout,
        sought=sought,
        served_by=served_by,
        encrypt=settings.encrypt,
        rank=rank,
    )
    try:
        yield JobMeeting(client, secret, lasting)
    finally:
        client.close()


@contextlib.contextmanager
def _server(server: Server, settings: env.Settings) -> Iterator[None]:
    try:
        yield
    finally:
        server.close(drain=DRAIN_SECONDS)


@contextlib.contextmanager
def _served_by_rank_zero(
    rank: int,
    hosts: list[str],
    ports: range,
    job: str,
    launch: env.Launch,
    settings: env.Settings,
    origin: str,
    remedy: str,
) -> Iterator[JobMeeting]:
    """Without a given secret one is derived from the job's name: that keeps out strays and scanners only.

    Rank 0 is on one of ``hosts`` and takes the first of ``ports`` that is free. ``origin`` and ``remedy`` say where the
    ports are from, and what helps if none can be had.
    """
    given = given_secret(launch)
    check_secret(settings, given, "here it follows from the job's address, which is no secret")
    secret = given or hashlib.sha256(f"multiring {job}".encode()).digest()
    with contextlib.ExitStack() as stack:
        if rank == 0:
            try:
                server = Server(secret, job=job, ports=ports, encrypt=settings.encrypt, rank=0)
            except listen.NoFreePort as error:
                why = "not allowed to this user" if error.forbidden else "occupied"
                raise ResourceError(f"{origin} is {why} on this host: {remedy}") from None
            stack.enter_context(_server(server, settings))
            hosts, ports = interfaces.loopbacks(), range(server.port, server.port + 1)
        elif set(hosts) <= LOOPBACKS:  # this host may have the other one only
            hosts = interfaces.loopbacks()
        addresses = [(host, port) for port in ports for host in hosts]
        yield stack.enter_context(_client(rank, addresses, secret, job, settings, sought=len(ports) > 1, served_by=0))


@contextlib.contextmanager
def _at_torch_store(address: tuple[str, int], launch: env.Launch, settings: env.Settings) -> Iterator[JobMeeting]:
    if not _importable("torch"):
        raise RendezvousError(
            f"torchrun keeps its store at {env.join_address(*address)}, and torch, which speaks to it, cannot be "
            "imported here: install torch, or start by `multiring run`"
        )
    distributed = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(*address, is_master=False, timeout=timedelta(seconds=settings.init_timeout))
    yield JobMeeting(TorchStore(store, patience=settings.init_timeout), given_secret(launch))


@contextlib.contextmanager
def _at_mpi(rank: int, size: int, launch: env.Launch, settings: env.Settings) -> Iterator[JobMeeting]:
    given = given_secret(launch)
    check_secret(settings, given, "MPI would pass it on in clear")
    world = mpi_world("mpirun", rank, size)
    with contextlib.ExitStack() as stack:
        told: tuple[tuple[str, ...], bytes] | None = None
        if rank == 0:
            drawn = b"" if given else secrets.token_bytes(32)
            server = Server(
                given or drawn,
                job=launch.job,
                ports=settings.ports,
                interface=settings.interface,
                encrypt=settings.encrypt,
                rank=0,
            )
            stack.enter_context(_server(server, settings))
            told = server.addresses, drawn
        addresses, drawn = world.bcast(told, root=0)
        secret = given or drawn
        found = list(map(env.split_address, addresses))
        yield stack.enter_context(_client(rank, found, secret, launch.job, settings, served_by=0))


def _mpi_world() -> Any:
    try:
        return importlib.import_module("mpi4py.MPI").COMM_WORLD
    except (ImportError, RuntimeError) as error:  # the library that it loads
        reason = " ".join(str(error).split())
        raise RendezvousError(
            f"an MPI launcher has started this process, and mpi4py cannot load its library ({reason}): install the MPI "
            "whose mpirun that was, or let mpi4py find it by MPI4PY_LIBMPI=PATH; unset PMI_RANK, PMIX_RANK and "
            "OMPI_COMM_WORLD_RANK for a process that is alone"
        ) from None


def mpi_world(launcher: str, rank: int, size: int) -> Any:
    """The ranks that MPI knows of; RendezvousError if they are not those that ``launcher`` started."""
    world = _mpi_world()
    if (world.Get_rank(), world.Get_size()) == (rank, size):
        return world
    library = importlib.import_module("mpi4py.MPI").Get_library_version().partition("\n")[0].strip(" \0")
    remedies = {
        "mpirun": "use the mpirun of that library, or let mpi4py load the other by MPI4PY_LIBMPI=PATH",
        "srun": "let srun start MPI too, by --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI), or start the ranks by mpirun",
    }
    remedy = remedies.get(launcher, "start the ranks by mpirun, or by multiring run --launcher mpirun")
    known = f"{world.Get_size()}" if world.Get_size() != size else f"this process as rank {world.Get_rank()}"
    raise RendezvousError(
        f"{launcher} started rank {rank} of {size}, but the MPI library that mpi4py has loaded ({library}) knows of "
        f"{known}: {remedy}"
    )


_MPI_RANKS = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}


def mpi_that_moves_data(identity: RankIdentity) -> Any:
    """The same for MULTIRING_ENGINE=mpi, where MPI itself has to be able to."""
    if not _importable("mpi4py"):
        raise RendezvousError("MULTIRING_ENGINE=mpi needs mpi4py: pip install 'multiring[mpi]'")
    if identity.launcher not in ("mpirun", "srun") and not any(map(os.environ.get, _MPI_RANKS)):
        # MPI would start for this process alone, and leave shared memory behind where the launcher ends it.
        raise RendezvousError(
            f"{identity.launcher} started rank {identity.rank} of {identity.world_size} without MPI, which "
            "MULTIRING_ENGINE=mpi needs: start the ranks by mpirun, or by multiring run --launcher mpirun"
        )
    world = mpi_world(identity.launcher, identity.rank, identity.world_size)
    mpi = importlib.import_module("mpi4py.MPI")
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise RendezvousError(
            "MULTIRING_ENGINE=mpi calls MPI from several threads, and MPI was initialised without MPI_THREAD_MULTIPLE: "
            "leave mpi4py.rc.thread_level at its default, or use an MPI that supports it"
        )
    return world


def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def master(environ: Mapping[str, str], launcher: str, prefix: str = "") -> tuple[str, int]:
    """Host and port at which ranks that ``launcher`` started meet; ValueError or RendezvousError for what is none.

    ``prefix`` is that of the variables MASTER_ADDR and MASTER_PORT.
    """
    host_name, port_name = f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT"
    host, port = environ.get(host_name), environ.get(port_name)
    if not host or not port:
        raise RendezvousError(
            f"{launcher} came with {host_name}={host} and {port_name}={port}: set both (the host of rank 0, a free "
            "port there) for all ranks, or start by `multiring run`"
        )
    if not re.fullmatch(r"[^\s:/\[\]]+", host) and not env.is_ipv6(host.strip("[]")):
        raise ValueError(
            f"{host_name}={host!r}: expected the name or address of rank 0's host alone, such as node1 or 10.0.0.1; "
            f"its port is {port_name}"
        )
    return host.strip("[]"), _number(environ, port_name, 1, 65535)


def _number(environ: Mapping[str, str], name: str, least: int = 0, most: int = env.MOST_BYTES) -> int:
    if name not in environ:
        raise ValueError(f"{name} is not set, and others of its launcher are: set it too, or unset those")
    return env.named_number(name, environ.get(name, ""), least, most)


def check_secret(settings: env.Settings, secret: bytes | None, reason: str) -> None:
    """RendezvousError if the job encrypts and nobody gave it a secret; ``reason`` says why there is none without."""
    if settings.encrypt and secret is None:
        raise RendezvousError(
            f"MULTIRING_ENCRYPT=1 needs a secret that nobody else knows, and {reason}: give all ranks the same "
            "MULTIRING_SECRET_FILE"
        )


def given_secret(launch: env.Launch) -> bytes | None:
    """The secret that a launcher or the user gave, None if neither did; RendezvousError if it cannot be read."""
    if launch.secret_fd is not None:
        origin = f"MULTIRING_SECRET_FD={launch.secret_fd}"
        return _from_descriptor(launch.secret_fd, (launch.job, launch.store), origin)
    if not launch.secret_file:
        return None
    origin = f"MULTIRING_SECRET_FILE={launch.secret_file}"
    try:
        with open(launch.secret_file, "rb") as file:
            secret = file.read().strip()
    except OSError as error:
        raise RendezvousError(f"{origin}: {error.strerror}") from None
    if len(secret) < MIN_SECRET:
        raise RendezvousError(f"{origin} yields {len(secret)} bytes: a secret has {MIN_SECRET} or more")
    return secret


def report(
    blames: int | None,
    account: Mapping[str, Any] | None = None,
    disputed: Mapping[str, Any] | None = None,
    *,
    is_final: bool = False,
) -> None:
    """Tell the launcher, if it asked, because of which other rank this one fails (None: it does not), and what it did.

    ``disputed``, after a Mismatch, has the line of the error as ``message``, as ``call`` what `_native.Engine.disputed`
    gives, and the ``size`` of its communicator. ``is_final``: no rank can go on after its failure. What was told before
    is forgotten.
    """
    descriptor = reports.memory()
    if descriptor is not None:
        said = {"blames": blames, "account": account, "disputed": disputed, "is_final": is_final}
        reports.write(descriptor, reports.REPORT, said)


def _from_descriptor(descriptor: int, job: tuple[str, tuple[str, ...]], origin: str) -> bytes:
    """The secret that a descriptor yields, or yielded before if it still is the same one."""
    global _taken
    known = _taken if _taken is not None and _taken.descriptor == descriptor else None
    try:
        if known is not None and _file(descriptor) == known.file:
            return known.secret
        if not os.get_inheritable(descriptor):  # what a process inherits is, and what Python opens is not
            raise OSError(errno.EBADF, "it was not inherited, this process has opened it itself")
        secret = _drain(descriptor)
    except OSError as error:
        if known is not None and known.job == job:  # the program has closed it
            return known.secret
        raise RendezvousError(f"{origin}: {error.strerror}; a launcher must let it be inherited. {NO_RANK}") from None
    if len(secret) < MIN_SECRET:  # perhaps a file of the program, which is left as it is
        raise RendezvousError(f"{origin} yields {len(secret)} bytes: a secret has {MIN_SECRET} or more. {NO_RANK}")
    if _taken is not None and known is None:
        with contextlib.suppress(OSError):  # the program has closed it
            if _file(_taken.descriptor) == _taken.file:
                os.close(_taken.descriptor)
    _taken = _Taken(descriptor, _hold(descriptor), job, secret)
    return secret


def _drain(descriptor: int) -> bytes:
    """Return all that can be read until the end; OSError if the end does not come."""
    content = b""
    until = time.monotonic() + SECRET_SECONDS
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while poll.poll(max(0, until - time.monotonic()) * 1000):
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return content.strip()
        content += piece
    raise OSError(errno.ETIMEDOUT, f"nobody has closed its other end within {SECRET_SECONDS:.0f} s")


def _hold(descriptor: int) -> tuple[int, int]:
    """Put an empty file in the descriptor's place, lest the number come to stand for something else unnoticed."""
    empty = os.memfd_create("multiring-secret-taken")
    try:
        os.dup2(empty, descriptor, inheritable=False)
    finally:
        os.close(empty)
    return _file(descriptor)


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
