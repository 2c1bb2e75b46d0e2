"""
The native engine: peers, communicators, installed schedules, operations.

Ranks are world ranks, except in schedules, whose peers are indices into the communicator's member list.
Errors are raised as the classes of ``multiring.errors``.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray

DTYPES: tuple[str, ...]
"""float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool complex64 complex128 uint16 uint32 uint64, and
float8 as e4m3fn e5m2 e4m3fnuz e5m2fnuz; position = code."""

ITEMSIZES: tuple[int, ...]
"""Bytes of an element, by code of its type."""

OPS: tuple[str, ...]
"""sum avg min max prod band bor bxor; position = code."""

OPS_OF: dict[str, tuple[str, ...]]
"""The reductions that are defined for each type."""

ANY_SOURCE: int
"""The peer of a recv in `Engine.start_message` that takes whoever sends first."""

INTERNAL: int
"""From this number on a communicator is for the library's own calls, beside the one whose number is so much less."""

COLLECTIVES: tuple[str, ...]
"""all_reduce reduce_scatter all_gather broadcast reduce all_to_all barrier send recv gather scatter
new_group; position = code."""

ROOTED: tuple[str, ...]
"""The collectives that have a root."""

WIRES: dict[str, tuple[int, int]]
"""For each format in which float32 travels, in the order of their codes: bits of an element, and how many elements
share a scale (1: there is none)."""

INSTRUCTIONS: tuple[str, ...]
"""The kinds of instructions: send reduce store repay round; position = code."""

INCARNATIONS: int
"""Incarnations of a communicator are told apart by as many numbers, which go around."""

NO_NUMBER: int
"""In the place of the number of a receive that waits for its turn."""

MOST_STREAMS: int = 4

MOST_RECORDED_CALLS: int
"""Most calls that `Engine.recorded` has."""

RECORDED_CALL: Any
"""Layout in memory of a call of `Engine.recorded`, a dict that numpy.dtype takes."""

TRACE_EVENT: Any
"""Layout in memory of an event of `Engine.traced`, a dict that numpy.dtype takes."""

TRACE_EVENTS: tuple[str, ...]
"""The kinds of these events: call segment phase held_up caller idle; position = code."""

def cut(numerator: int, denominator: int, count: int, itemsize: int, grain: int = 64) -> int:
    """
    The element at which a slice of ``count`` elements is cut at a fraction (docs/design.md).
    """

def features() -> dict[str, str]:
    """
    Instruction set chosen for reductions, compiler, transports: for ``doctor``.
    """

class LabelName:
    """
    While it is kept, what a Mismatch says of calls with this label: a number of 24 bits, the
    same on all ranks.
    """

    def __init__(self, label: int, text: str) -> None: ...

def explain_labels(message: str) -> str:
    """
    A message of a Mismatch with a line for each label in it that has a name here.
    """

def call_before_errors(callback: Callable[[], object] | None) -> None:
    """
    Have this called, in place of what was given before, each time that the program is about to hear of an
    engine's error: in the thread in which Python raises it, and where XLA or C is told, in another one, for
    which the one that is told waits for 0.5 s at most.
    """

def exit_with_failure() -> None:
    """
    Make the exit code of this process 1, should it end with 0; for a process whose interpreter is ending.
    """

class SignalCounter:
    """
    Takes a signal, and counts how often it comes, whatever the threads of this process
    do meanwhile. ValueError if there is no such signal.
    """

    def __init__(self, number: int) -> None: ...
    @property
    def count(self) -> int:
        """Number of times that it came, to this counter and those before it."""

    def give_back(self) -> None:
        """
        Let the signal do what it did before, unless somebody else has taken it; may be called twice.
        """

def fill_c(table: int, rank: int, world_size: int) -> None:
    """
    Hand the functions of ``multiring.h`` to the table of libmultiring.so at that address (csrc/c_api.hpp).
    """

def clear_c(table: int) -> None:
    """Take them back."""

def answer_c(table: int, error_class: str, message: str) -> None:
    """Tell it why joining or leaving failed."""

def xla_handler() -> Any:
    """
    A capsule with the handler that XLA calls for collectives (csrc/xla.hpp).
    """

def reduce(
    destination: int,
    sources: Sequence[int],
    count: int,
    dtype: int,
    op: int,
    divisor: float = 1.0,
    wire: int = 0,
    rounded: int = 0,
    residual: int = 0,
) -> None:
    """
    Combine ``count`` elements at the addresses ``sources``, from left to right.

    The ``destination`` may be one of them. float32 may arrive in the format ``wire`` and be ``rounded`` to one,
    as in `Engine.install`; what rounding loses is added to the ``residual``, times ``divisor``.
    """

def repay(values: int, residual: int, count: int) -> None:
    """Add ``residual`` to ``values``, and leave it 0; both float32."""

def round(wire: int, values: int, residual: int, count: int) -> None:
    """
    Round float32 in place to what the format ``wire`` holds, and add to ``residual`` what that loses.

    The residual becomes 0 where what is lost is no finite number.
    """

def copy_strided(
    to: int, to_strides: Sequence[int], from_: int, from_strides: Sequence[int], shape: Sequence[int], itemsize: int
) -> None:
    """
    Copy elements of ``itemsize`` bytes (1, 2, 4, 8 or 16) from one layout to another.

    ``to`` and ``from_`` are the addresses of their first elements; strides are in elements. The two share no
    memory.
    """

def narrow(wire: int, destination: int, source: int, count: int) -> None:
    """Round ``count`` float32 at ``source`` to the format ``wire`` (1 to 3)."""

def widen(wire: int, destination: int, source: int, count: int) -> None:
    """The reverse of `narrow`, exact."""

def narrow_bytes(wire: int, count: int) -> int:
    """Bytes that ``count`` float32 take in the format ``wire``."""

class Description:
    """
    Description of a caller's buffer: NumPy array, buffer object or DLPack tensor.
    """

    @property
    def pointer(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def contiguous(self) -> bool: ...
    @property
    def writable(self) -> bool: ...
    @property
    def device(self) -> str: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

def describe(x: object) -> Description:
    """Describe a buffer without copying it; TypeError if it is none."""

class Work:
    """
    Handle of an operation in flight; keeps ``owner`` alive until it is done.
    """

    def done(self) -> bool:
        """
        True if it has ended. Who asks again and again, every 100 ms at least, is in a call as by `wait`.
        """

    def wait(self, timeout: float | None = None) -> None:
        """
        Block, GIL released, signals seen; raise the operation's error, or CollectiveTimeout when the time is up.
        """

    def join(self, stream: int) -> None:
        """
        Make a stream of a device wait until a call that was started there is done; nothing for other calls.
        """

    @property
    def last_stream(self) -> int:
        """
        The stream of the device on which the last of such a call is queued; 0 for other calls.
        """

    @property
    def other(self) -> int:
        """
        The rank at the other end of a message that is done; ANY_SOURCE before, and for collectives.
        """

    @property
    def ended(self) -> float:
        """Time of its end, in seconds of time.monotonic(); 0 before."""

    def error(self) -> BaseException | None:
        """The error of a call that has failed by now."""

class PlanFacts:
    """
    Numbers that all ranks of a plan have alike.

    ``segment_bytes`` is the slice of one of its ``blocks``, ``window`` how many segments are in
    flight at most, ``plan`` its number; slices are cut at multiples of ``grain`` bytes.
    """

    def __init__(self, blocks: int, segment_bytes: int, window: int, plan: int, grain: int = 64) -> None: ...
    @property
    def blocks(self) -> int: ...
    @property
    def segment_bytes(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def plan(self) -> int: ...
    @property
    def grain(self) -> int: ...

class Call:
    """
    A call: a collective, or a message that is part of one (``part_of``, send for one by itself).

    Collective, type and reduction are codes; ``count`` is elements per block, ``timeout`` in seconds, ``label``
    see `LabelName`. ``residual`` is the address of what this rank has lost by rounding, as many float32 as the
    buffer has, 0 for none. ValueError for unknown codes, for a reduction that is not defined for the type, and
    for a residual where nothing is rounded.
    """

    def __init__(
        self,
        collective: int,
        pointer: int,
        count: int,
        dtype: int,
        timeout: float,
        op: int = 0,
        root: int = 0,
        label: int = 0,
        tag: int = 0,
        part_of: int = 7,
        residual: int = 0,
    ) -> None: ...
    @property
    def collective(self) -> int: ...
    @property
    def pointer(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def dtype(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def op(self) -> int: ...
    @property
    def root(self) -> int: ...
    @property
    def label(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def part_of(self) -> int: ...
    def check_has_residual(self) -> None:
        """ValueError if narrow wires concern it and it has no residual."""

    @property
    def residual(self) -> int: ...
    def nbytes(self, size: int) -> int:
        """Bytes of all blocks together, in a communicator of ``size`` ranks."""

class Trials:
    """
    The calls of a rung, by number: the schedule that each runs, and when it was entered and left,
    or ended.
    """

    def __init__(self, handles: Sequence[int]) -> None: ...
    def take(self) -> int | None:
        """The number of the next call; None once all are taken."""

    def handle(self, number: int) -> int: ...
    def enter(self, number: int) -> None: ...
    def leave(self, number: int) -> None: ...
    def go_on(self, number: int, part: object) -> None:
        """
        The call goes on without its caller: it is left when `complete` finds out that ``part`` has ended.
        """

    def complete(self, timeout: float) -> None:
        """
        Wait until all calls that went on have ended, ``timeout`` seconds at most for all of them; raise what
        they raise.
        """

    @property
    def over(self) -> bool:
        """All are taken."""

    @property
    def stamps(self) -> list[tuple[float, float]]:
        """
        Entered, left; in seconds of time.monotonic(), infinite of calls that have not been left.
        """

class NativeCalls:
    """
    The collectives of one communicator: each call is given its plan, or one to try, and run or started.
    """

    def all_reduce_plain(self, x: object, op: object, timeout: float | None = None, label: int = 0) -> bool:
        """
        True if the call was made: it needs a NumPy array or torch tensor that is contiguous, writable, on the
        CPU and no view that shows other numbers, an ``op`` that its type has, and seconds that are a float
        (None: the communicator's). Anything else is left as it is.
        """

    def barrier(self, timeout: float) -> None:
        """Return when every rank has called it."""

    def run(self, call: Call) -> None:
        """Execute the call's schedule in the calling thread."""

    def start(self, call: Call, owner: object | None) -> Work:
        """
        The same by the progress thread; ``owner`` is kept alive until it is done.
        """

    def start_on_device(
        self,
        call: Call,
        owner: object | None,
        device: int,
        stream: int,
        out: tuple[int, int, int, int] | None,
        into: tuple[int, int, int, int] | None,
    ) -> Work:
        """
        The same on blocks of a CUDA device, read and written at (pointer, bytes from block to block, first
        block, number of blocks), after what ``stream`` has been given; done when the device is. The call's
        pointer is 0.
        """

def load_libcrypto() -> None:
    """
    ResourceError, with the remedy, unless OpenSSL's libcrypto can be used.
    """

def public_key(private_key: bytes) -> bytes:
    """
    Public key of X25519 that belongs to a private one, which is 32 random bytes (RFC 7748).
    """

def shared_key(private_key: bytes, public_key: bytes) -> bytes:
    """
    The secret that both ends get, each from its own private key and the other's public one. ValueError if the
    public key is invalid.
    """

def hkdf_extract(salt: bytes, material: bytes) -> bytes:
    """The first step of HKDF with SHA-256 (RFC 5869): 32 bytes."""

def hkdf_expand(key: bytes, info: bytes, size: int) -> bytes:
    """The second step: ``size`` bytes, at most 8160."""

def gcm_seal(key: bytes, nonce: bytes, additional: bytes, text: bytes) -> bytes:
    """
    AES-128-GCM, as records use it: the text, encrypted, and its tag. For answers that are known elsewhere.
    """

def checksum(text: bytes, by_tables: bool = False) -> bytes:
    """
    Four sums of CRC-32C, as records have them (csrc/checksum.hpp); ``by_tables`` as on processors without an
    instruction for it.
    """

RECORD_SIZE_BYTES: int = 4

RECORD_TAG_BYTES: int = 16

class Records:
    """
    Both directions of a connection that carries records (csrc/records.hpp).
    """

    @overload
    def __init__(self, sends: bytes, receives: bytes) -> None:
        """Encrypted records; 32 secret bytes for each direction."""

    @overload
    def __init__(self) -> None:
        """Records with checksums."""

    def seal(self, text: bytes) -> bytes:
        """The next records to send, as many as the text needs."""

    def open(self, record: bytes) -> bytes | None:
        """
        The text of the next record that was received; None if it is not what was sent.
        """

    @staticmethod
    def text_size(begin: bytes) -> int:
        """
        Bytes of text in a record, by its first RECORD_SIZE_BYTES bytes; 0 if there is no such record.
        """

    @property
    def next_received(self) -> int:
        """The number of the record that is to be received next, from 0."""

class Engine:
    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        generation: int = 0,
        hosts: Sequence[str] | None = None,
        arena_bytes: int = 0,
        spin_seconds: float | None = None,
        inproc: bool = False,
        heartbeat_timeout: float = 30.0,
        late_seconds: float = 30.0,
        trace: bool = False,
        record: bool = False,
        helpers: int | None = None,
        socket_threads: int | None = None,
        when_slow: Callable[[str, bool], None] | None = None,
    ) -> None:
        """
        ``hosts[r]`` is the name of rank r's host, for messages. ``spin_seconds`` None: 5e-6, or 0 (yield) when the
        ranks of this host outnumber its available cores. ``arena_bytes`` bounds the shared memory, 0 by the
        machine's memory; pages are taken as they are needed. A rank that is silent for ``heartbeat_timeout``
        seconds is lost; a call that waits for ``late_seconds`` logs for whom. ``trace``: keep what happens when.
        ``record``: keep the last 2000 calls. ``helpers``: threads that sum for calls on devices, by the cores
        that are left if None. ``socket_threads``: threads that serve connections to a rank beyond the first, the
        same. ``when_slow(reason, is_caller)`` is called in the thread that makes most calls, once this rank
        keeps the others waiting, or for another reason; where compiled code makes all calls, in one that asks for
        `statistics`, with ``is_caller`` False.
        """

    @property
    def memory_fd(self) -> int: ...
    @property
    def doorbell_fd(self) -> int: ...
    def attach_local(self, peer: int, memory_fd: int, doorbell_fd: int, socket_fd: int) -> None:
        """
        A rank of this host. Takes ownership of the three descriptors; the unix socket tells of its death.
        """

    def attach_inproc(self, peer: int, engine: Engine) -> None:
        """A rank that is an engine of this process."""

    def attach_tcp(self, peer: int, sockets: Sequence[int], records: Sequence[Records] = []) -> None:
        """
        A rank elsewhere, over connected and authenticated sockets (data), taken into ownership; with records
        for each, or without.
        """

    def attach_control(self, peer: int, socket: int, records: Records | None = None) -> None:
        """A control connection to the lowest rank of another host."""

    def attached(self, peer: int) -> bool:
        """True if messages can go to ``peer``."""

    def departed(self, peer: int) -> bool:
        """
        True if ``peer`` has said farewell, and nothing that it sent before is on its way.
        """

    def miss_connection(self, peer: int, seconds: float) -> None:
        """
        A call needs a connection to ``peer``, which has been dialled in vain for so many ``seconds``. Once ``peer``
        misses it as well, one of the two counts as lost.
        """

    def expect_links(self, links: Sequence[tuple[Sequence[int], float, float]]) -> None:
        """
        Take the links that plans count on, once: the ranks of each host, rack and site, and the bytes a second up
        and down of its link. From then on a link that keeps all waiting is named.
        """

    def communicator(self, id: int, members: Sequence[int], incarnation: int = 0) -> None:
        """
        Register a communicator; ``id`` is a 32-bit number that all members share, and so is the ``incarnation``
        of 16 bits, one more than that of the last communicator of this number.
        """

    def forget(self, id: int) -> None: ...
    def completed(self, communicator: int) -> int:
        """Number of collectives, from the first on, that were completed here."""

    def install(
        self,
        communicator: int,
        instructions: Annotated[
            NDArray[numpy.int64], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        peers: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        facts: PlanFacts,
    ) -> int:
        """
        Install a schedule and return its handle.

        ``instructions`` has a row (kind, phase, first_peer, peer_count, block, lo_num, lo_den, hi_num, hi_den,
        final, wire, rounded, keeps) per instruction, kind being 0 send, 1 reduce, 2 store, 3 repay, 4 round, wire
        and rounded 0 as it is, 1 bfloat16, 2 float16, 3 int8, 4 int4, 5 int2, 6 float8;
        ``peers[first_peer:first_peer + peer_count]`` are its peers. ValueError for a malformed table.
        """

    def start_message(self, communicator: int, peer: int, call: Call, owner: object | None) -> Work:
        """
        Start sending a message to a rank, or receiving one from it, as the call's collective says: send or
        recv.

        The ``peer`` of a recv may be ANY_SOURCE; ``owner`` is kept alive until the message is done.
        """

    def empty(self, nbytes: int, copy: bool = False) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        A uint8 array of ``nbytes`` in the arena, 64-byte aligned, freed with its last reference.

        One for the ``copy`` of a call's buffer is not in its second half, which arrays and the engine have.
        """

    def fail(self, kind: str, rank: int, message: str) -> None:
        """
        Fail everything pending and tell the other ranks; ``kind`` is the name of an error class, which the caller
        raises itself.
        """

    def failure(self) -> BaseException | None: ...
    def disputed(self) -> tuple[int, int, str, str] | None:
        """
        After a Mismatch, the collective on which ranks disagree: its communicator and number, what this rank called
        or was about to call, in words, and the id of its plan. None if it has called none, or it is about a message.
        """

    def statistics(self) -> dict[str, Any]:
        """
        Counters since the engine was made; the library's own calls are not among its operations.

        ``operations``, ``segments``, ``arena_allocated`` and ``arena_committed`` (bytes), ``seconds_in_calls``
        (that callers spent in run and wait) and ``seconds_waiting`` (of these, with nothing to do);
        ``peers[rank]`` has ``messages_sent``, ``bytes_sent``, ``messages_received``, ``bytes_received``,
        ``connections``, ``seconds_busy`` (that bytes for the peer were on their way or, where it shares memory,
        that its memory was read) and ``seconds_waited`` (that callers waited for it).
        ``collectives`` has for each that completed here ``operations``, ``bytes`` (of all blocks together) and
        ``seconds`` (from the start of each to its end); send and recv with the messages of gather and scatter.
        ``in_flight`` has for the oldest calls, 4 at most, ``collective``, ``seconds`` since the call,
        ``is_blocked`` (whether a caller does nothing else) and the ranks that it ``waits_for``, 16 at most: as of
        the last quarter of a second.
        ``slowest`` is None, or says which ``ranks`` (one, or some of one ``host``) enter collectives later than
        the others, who wait for them for this ``share`` of the time, for how many ``seconds`` now, and for what
        ``reason``: "computes", "has no core", "sleeps" or "does not run", between collectives; it ``began`` at
        this time.monotonic(). ``slow_so_far`` lists all that did, with the seconds that it took in all.
        ``slow_link`` is None, or says that the link ``from`` a host ``to`` a host carries these
        ``bytes_per_second``, where the plan has ``expected`` more, for how many ``seconds`` now; ``both_ways``: the
        one back as well. Where all links that leave or reach a host are slow, the other name is ""; both are one
        host's where all of its links are, and "" where several without a host in common are. ``name`` says it
        in words. ``slow_links_so_far`` lists all that were.
        """

    def recorded(self) -> bytes:
        """
        The last calls, with what has become of them: flight_recorder.py. Empty if they are not kept.
        """

    def traced(self) -> list[tuple[int, bool, int, bytes]]:
        """
        Traced events, once the engine is shut down: trace.py. Empty if tracing was not asked for.
        """

    def calls(
        self,
        rank: int,
        size: int,
        timeout: float,
        choose_plan: Callable[[int, int, int, float], int | Trials],
        need_residual: bool = False,
    ) -> NativeCalls:
        """
        The calls of a communicator of ``size`` ranks, whose usual time limit is ``timeout`` seconds.

        ``choose_plan(collective, nbytes, root, timeout)`` returns the handle of an installed schedule, or
        `Trials` that are not all taken. It is asked once for each size class, and again once all trials are
        taken. Where sums ``need_residual``, an all_reduce of float32 by sum or avg without one is a ValueError.
        """

    def publish(self, communicator: int, calls: NativeCalls) -> None:
        """Let native code call a communicator by its number."""

    def withdraw(self, communicator: int) -> None:
        """End that; `shutdown` does it for all."""

    def installed_record(self, handle: int) -> tuple[int, int, float]:
        """
        Work of an installed schedule here: operations, bytes of their buffers, seconds from start to end.
        """

    def shutdown(self, timeout: float = 5.0) -> None:
        """
        Say farewell, join the progress thread, close everything; pending operations fail. May be called twice.

        Mismatch, when all is closed, if a call that completed here turns out to be another one elsewhere.
        """
