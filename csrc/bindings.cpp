// The Python module: marshal, release the GIL, call, translate errors.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>

#include "c_api.hpp"
#include "checksum.hpp"
#include "describe.hpp"
#include "engine.hpp"
#include "gcm.hpp"
#include "libcrypto.hpp"
#include "native_calls.hpp"
#include "records.hpp"
#include "reduce.hpp"
#include "signal_counter.hpp"
#include "socket_threads.hpp"
#include "strided.hpp"
#include "xla.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace multiring {
namespace {

// Text that a peer may have sent: what is not UTF-8 in it is replaced.
nb::object decoded(const std::string& text) {
    return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

nb::object make_error(const Failure& failure) {
    const nb::object type = nb::module_::import_("multiring.errors").attr(class_name(failure.kind));
    nb::object error =
        type(decoded(failure.message), "rank"_a = failure.rank, "host"_a = failure.host,
             "collective"_a = failure.collective, "number"_a = failure.number, "seconds"_a = failure.seconds);
    if (failure.apart >= 0) error.attr("apart") = failure.apart;
    return error;
}

// Callback before a program hears of an engine's error; invalid while there is none.
nb::object& error_callback() {
    static auto* const callback = new nb::object;  // outlives the interpreter, which may be gone when statics end
    return *callback;
}

void call_error_callback() {
    const nb::object callback = error_callback();  // it may be replaced meanwhile
    if (callback.is_valid()) callback();
}

// The same in a thread that has no GIL. Where the interpreter is ending, this call ends the thread by unwinding it,
// which nb::gil_scoped_acquire does not let pass.
void call_error_callback_with_gil() {
    const PyGILState_STATE state = PyGILState_Ensure();
    try {
        call_error_callback();
    } catch (nb::python_error& error) {
        error.discard_as_unraisable("multiring's callback before errors");
    }
    PyGILState_Release(state);
}

void call_before_errors(std::optional<nb::callable> callback) {
    set_step_before_errors(callback ? &call_error_callback_with_gil : nullptr);
    error_callback() = callback ? nb::object(std::move(*callback)) : nb::object();
}

// An interpreter that is already ending has chosen its exit code: what runs after it can still choose another.
void exit_with_failure() {
    const auto end = [](int code, void*) {
        if (code != 0) return;
        std::fflush(nullptr);
        _exit(EXIT_FAILURE);
    };
    if (on_exit(end, nullptr) != 0) throw std::bad_alloc();
}

ErrorKind error_kind(const std::string& name) {
    for (int code = 0; code <= static_cast<int>(last_kind); ++code)
        if (name == class_name(static_cast<ErrorKind>(code))) return static_cast<ErrorKind>(code);
    throw std::invalid_argument("'" + name + "' is not an error class of multiring");
}

void log_reports(Engine& engine) {
    if (!engine.has_reports()) return;
    const nb::object log = nb::module_::import_("logging").attr("getLogger")("multiring");
    for (const std::string& line : engine.take_reports()) log.attr("warning")("%s", line);
}

// Return the duty of a caller that waits: handle signals and log pending reports.
Engine::CheckSignals attending(Engine& engine) {
    return [&engine] {
        const nb::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        log_reports(engine);
    };
}

// Log pending reports and release the Python objects of completed calls.
void settle(Engine& engine) {
    log_reports(engine);
    if (!engine.has_owners()) return;
    for (void* owner : engine.take_owners()) Py_DECREF(static_cast<PyObject*>(owner));
}

// The same at the beginning of a call, whose thread is looked at if the rank keeps the others waiting.
void begin(Engine& engine, bool is_message = false) {
    engine.tell_if_slow(is_message);
    settle(engine);
}

const char* word(SlowRank::Reason reason) {
    switch (reason) {
        case SlowRank::Reason::computes: return "computes";
        case SlowRank::Reason::has_no_core: return "has no core";
        case SlowRank::Reason::sleeps: return "sleeps";
        case SlowRank::Reason::unknown: break;
    }
    return "does not run";
}

template <class Enum, std::size_t n>
Enum code(int value, const std::array<std::string_view, n>&, const char* what) {
    if (value < 0 || value >= static_cast<int>(n))
        throw std::invalid_argument(std::string(what) + " " + std::to_string(value) + " is not one of the " +
                                    std::to_string(n) + " codes");
    return static_cast<Enum>(value);
}

// Build a Call from Python's arguments; NativeCalls and start_message complete it.
void make_call(Call* self, int collective, std::uintptr_t pointer, std::size_t count, int dtype, double timeout, int op,
               std::uint32_t root, std::uint32_t label, std::int64_t tag, int part_of, std::uintptr_t residual) {
    const Call call{.collective = code<Collective>(collective, collective_names, "collective"),
                    .pointer = reinterpret_cast<std::byte*>(pointer),
                    .count = count,
                    .dtype = code<Dtype>(dtype, dtype_names, "dtype"),
                    .op = code<Op>(op, op_names, "op"),
                    .root = root,
                    .label = label,
                    .timeout = timeout,
                    .residual = reinterpret_cast<float*>(residual),
                    .tag = static_cast<std::uint64_t>(tag),
                    .part_of = code<Collective>(part_of, collective_names, "collective")};
    check_op(call);
    if (call.residual != nullptr && !may_be_narrow(call))
        throw std::invalid_argument("residual: an all_reduce of float32 by sum or avg has one, and this is " +
                                    std::string(name(call.collective)) + " of " + std::string(name(call.dtype)) +
                                    " by " + std::string(name(call.op)) + ": leave it out, nothing of it is rounded");
    new (self) Call(call);
}

// The arena's side of `empty`: keeps the memory until the last array over it is gone.
struct Range {
    std::shared_ptr<Arena> arena;
    void* pointer;
};

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

Bytes empty(Engine& engine, std::size_t bytes, bool copy) {
    engine.check_usable();
    auto range = std::make_unique<Range>(Range{engine.shared_arena(), nullptr});
    {
        const nb::gil_scoped_release nogil;
        range->pointer = range->arena->allocate(bytes, copy ? Arena::Purpose::copy : Arena::Purpose::array);
    }
    auto* pointer = static_cast<std::uint8_t*>(range->pointer);
    const nb::capsule owner(range.release(), [](void* p) noexcept {
        const std::unique_ptr<Range> range(static_cast<Range*>(p));
        range->arena->release(range->pointer);
    });
    return {pointer, {bytes}, owner};
}

// A Work with the engine that it needs while it is waited for.
struct WorkHandle {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Work> work;
};

void run(NativeCalls& calls, const Call& call) {
    begin(*calls.engine);
    const nb::gil_scoped_release nogil;
    calls.run(call, attending(*calls.engine));
}

WorkHandle start(NativeCalls& calls, const Call& call, nb::object owner) {
    begin(*calls.engine);
    auto work = calls.start(call, owner.ptr(), attending(*calls.engine));
    owner.release();  // given back through take_owners
    return {calls.engine, std::move(work)};
}

// (address, bytes from block to block, first block, number of blocks)
using Blocks = std::tuple<std::uint64_t, std::size_t, std::uint32_t, std::uint32_t>;

std::optional<DeviceBlocks> device_blocks(const std::optional<Blocks>& given) {
    if (!given) return {};
    const auto& [at, pitch, first, count] = *given;
    return DeviceBlocks{at, pitch, first, count};
}

WorkHandle start_on_device(NativeCalls& calls, const Call& call, nb::object owner, int device, std::uintptr_t stream,
                           const std::optional<Blocks>& out, const std::optional<Blocks>& in) {
    begin(*calls.engine);
    const DeviceBuffer buffer{device, reinterpret_cast<cuda::Stream>(stream), device_blocks(out), device_blocks(in)};
    std::shared_ptr<Work> work;
    {
        const nb::gil_scoped_release nogil;  // the driver may wait for another thread that wants the GIL
        work = calls.start_on_device(call, buffer, owner.ptr(), attending(*calls.engine));
    }
    owner.release();  // given back through take_owners
    if (work->refused) throw EngineError(*work->refused);
    return {calls.engine, std::move(work)};
}

Wire narrow_wire(int value) {
    const Wire wire = code<Wire>(value, wire_names, "wire");
    if (wire == Wire::same) throw std::invalid_argument("wire 0 is no narrower than float32");
    return wire;
}

WorkHandle start_message(std::shared_ptr<Engine> engine, std::uint32_t communicator, int peer, const Call& call,
                         nb::object owner) {
    if (!call.is_point()) throw std::invalid_argument(std::string(name(call.collective)) + " is no message");
    begin(*engine, true);
    auto work = engine->start_point(communicator, peer, call, owner.ptr());
    owner.release();  // given back through take_owners
    return {std::move(engine), std::move(work)};
}

// Seconds of Python's monotonic clock.
double moment(Clock::time_point time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
}

nb::dict described(const SlowRank& slow) {
    nb::dict entry;
    entry["ranks"] = slow.ranks;
    entry["host"] = slow.host;
    entry["share"] = slow.share;
    entry["seconds"] = slow.seconds;
    entry["steps"] = slow.steps;
    entry["reason"] = word(slow.reason);
    entry["began"] = moment(slow.began);
    return entry;
}

nb::dict described(const SlowLink& slow) {
    nb::dict entry;
    entry["from"] = slow.from;
    entry["to"] = slow.to;
    entry["both_ways"] = slow.both_ways;
    entry["name"] = slow.name;
    entry["bytes_per_second"] = slow.rate;
    entry["expected"] = slow.expected;
    entry["seconds"] = slow.seconds;
    entry["began"] = moment(slow.began);
    return entry;
}

template <class Slow>
void add_slow(nb::dict& to, const char* now_key, const std::optional<Slow>& now, const char* so_far_key,
              const std::vector<Slow>& so_far) {
    to[now_key] = now ? nb::object(described(*now)) : nb::none();
    nb::list all;
    for (const Slow& each : so_far) all.append(described(each));
    to[so_far_key] = all;
}

nb::typed<nb::dict, nb::str, nb::any> statistics(Engine& engine) {
    const Engine::Statistics from = engine.statistics();
    engine.tell_if_slow_in_compiled_code();  // those who watch a job ask: nobody else of its program comes by then
    log_reports(engine);
    nb::dict result, peers;
    result["operations"] = from.operations;
    result["segments"] = from.segments;
    result["arena_allocated"] = from.arena_allocated;
    result["arena_committed"] = from.arena_committed;
    result["seconds_in_calls"] = from.seconds_in_calls;
    result["seconds_waiting"] = from.seconds_waiting;
    for (const auto& [peer, traffic] : from.peers) {
        nb::dict entry;
        entry["messages_sent"] = traffic.messages_sent;
        entry["bytes_sent"] = traffic.bytes_sent;
        entry["messages_received"] = traffic.messages_received;
        entry["bytes_received"] = traffic.bytes_received;
        entry["connections"] = traffic.connections;
        entry["seconds_busy"] = traffic.seconds_busy;
        entry["seconds_waited"] = traffic.seconds_waited;
        peers[nb::int_(peer)] = entry;
    }
    result["peers"] = peers;
    nb::dict collectives;
    for (const auto& done : from.collectives) {
        nb::dict entry;
        entry["operations"] = done.operations;
        entry["bytes"] = done.bytes;
        entry["seconds"] = done.seconds;
        const std::string_view called = name(done.collective);
        collectives[nb::str(called.data(), called.size())] = entry;
    }
    result["collectives"] = collectives;
    nb::list in_flight;
    for (const Waiting& call : from.in_flight) {
        nb::dict entry;
        const std::string_view called = name(call.collective);
        entry["collective"] = nb::str(called.data(), called.size());
        entry["seconds"] = call.seconds;
        entry["is_blocked"] = call.is_blocked != 0;
        entry["waits_for"] = std::vector<int>(call.ranks, call.ranks + call.rank_count);
        in_flight.append(entry);
    }
    result["in_flight"] = in_flight;
    add_slow(result, "slowest", engine.slowest(), "slow_so_far", engine.slow_so_far());
    add_slow(result, "slow_link", engine.slow_link(), "slow_links_so_far", engine.slow_links_so_far());
    return result;
}

// Return for each thread that traced: its id, true if it is the progress thread, the number of overwritten events, and
// the others as bytes (trace.py).
std::vector<std::tuple<pid_t, bool, std::uint64_t, nb::bytes>> traced(const Engine& engine) {
    std::vector<std::tuple<pid_t, bool, std::uint64_t, nb::bytes>> result;
    for (const Trace::Thread& thread : engine.traced()) {
        const nb::bytes events(reinterpret_cast<const char*>(thread.events.data()),
                               thread.events.size() * sizeof(TraceEvent));
        result.emplace_back(thread.id, thread.id == engine.progress_thread(), thread.lost, events);
    }
    return result;
}

// The recorded calls as bytes, which flight_recorder.py reads.
nb::bytes recorded(const Engine& engine) {
    const std::vector<RecordedCall> calls = engine.recorded();
    return nb::bytes(reinterpret_cast<const char*>(calls.data()), calls.size() * sizeof(RecordedCall));
}

nb::typed<nb::dict, nb::str, nb::str> features() {
    nb::dict result;
    result["instruction_set"] = nb::str(instruction_set().data(), instruction_set().size());
    result["compiler"] = __VERSION__;
    result["transports"] = "shared memory, tcp, inproc";
    return result;
}

template <std::size_t n>
nb::tuple names(const std::array<std::string_view, n>& from) {
    nb::list list;
    for (const auto name : from) list.append(nb::str(name.data(), name.size()));
    return nb::tuple(list);
}

nb::tuple rooted_collectives() {
    nb::list list;
    for (std::size_t code = 0; code < collective_names.size(); ++code)
        if (has_root(static_cast<Collective>(code)))
            list.append(nb::str(collective_names[code].data(), collective_names[code].size()));
    return nb::tuple(list);
}

nb::dict sizes_of_wires() {
    nb::dict found;
    for (std::size_t wire = 0; wire < wire_names.size(); ++wire)
        found[nb::str(wire_names[wire].data(), wire_names[wire].size())] =
            nb::make_tuple(wire_formats[wire].bits, wire_formats[wire].block);
    return found;
}

// A structure that Python reads as it lies in memory, as numpy.dtype takes it.
class MemoryLayout {
  public:
    template <class Member>
    void add(const char* name, std::size_t offset) {
        const char kind = std::is_floating_point_v<Member> ? 'f' : std::is_signed_v<Member> ? 'i' : 'u';
        names_.append(name);
        formats_.append(std::string(1, kind).append(std::to_string(sizeof(Member))));
        offsets_.append(offset);
    }
    nb::dict described(std::size_t bytes) const {
        nb::dict found;
        found["names"] = names_;
        found["formats"] = formats_;
        found["offsets"] = offsets_;
        found["itemsize"] = bytes;
        return found;
    }

  private:
    nb::list names_, formats_, offsets_;
};
#define ADD(name) layout.add<decltype(Structure::name)>(#name, offsetof(Structure, name))

nb::dict layout_of_trace_event() {
    using Structure = TraceEvent;
    MemoryLayout layout;
    ADD(begin), ADD(end), ADD(number), ADD(bytes), ADD(plan), ADD(communicator), ADD(lane), ADD(segment), ADD(peer);
    ADD(row), ADD(phase), ADD(kind), ADD(collective), ADD(dtype), ADD(finished);
    return layout.described(sizeof(Structure));
}

nb::dict layout_of_recorded_call() {
    using Structure = RecordedCall;
    MemoryLayout layout;
    ADD(record_index), ADD(called), ADD(ended), ADD(number), ADD(tag), ADD(count), ADD(timeout), ADD(communicator);
    ADD(root), ADD(label), ADD(other), ADD(incarnation), ADD(collective), ADD(part_of), ADD(dtype), ADD(op);
    return layout.described(sizeof(Structure));
}
#undef ADD

nb::tuple sizes() {
    nb::list list;
    for (const auto size : dtype_sizes) list.append(size);
    return nb::tuple(list);
}

nb::dict ops_of_types() {
    nb::dict found;
    for (std::size_t type = 0; type < dtype_names.size(); ++type) {
        nb::list ops;
        for (std::size_t op = 0; op < op_names.size(); ++op)
            if (is_defined(static_cast<Op>(op), static_cast<Dtype>(type)))
                ops.append(nb::str(op_names[op].data(), op_names[op].size()));
        found[nb::str(dtype_names[type].data(), dtype_names[type].size())] = nb::tuple(ops);
    }
    return found;
}

using InstructionTable = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using PeerTable = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::uint32_t install(Engine& engine, std::uint32_t communicator, const InstructionTable& table, const PeerTable& peers,
                      const PlanFacts& facts) {
    if (table.shape(1) != Schedule::columns)
        throw std::invalid_argument("instructions have " + std::to_string(table.shape(1)) + " columns, not " +
                                    std::to_string(Schedule::columns));
    return engine.install(communicator, {table.data(), table.size()}, {peers.data(), peers.size()}, facts);
}

// A reference that any thread may copy and let go of, without the GIL.
std::shared_ptr<nb::object> shared_reference(nb::object object) {
    struct WithGil {
        void operator()(nb::object* object) const {
            const nb::gil_scoped_acquire gil;
            delete object;
        }
    };
    return {new nb::object(std::move(object)), WithGil{}};
}

// Python chooses plans: the GIL is taken for it, and an error of it becomes one that native callers understand.
ChoosePlan choose_plan_by(nb::object function) {
    return [shared = shared_reference(std::move(function))](Collective collective, std::size_t bytes,
                                                            std::uint32_t root, double timeout) {
        const nb::gil_scoped_acquire gil;
        const nb::object chosen = (*shared)(static_cast<int>(collective), bytes, root, timeout);
        if (nb::isinstance<Trials>(chosen)) return Chosen(nb::cast<std::shared_ptr<Trials>>(chosen));
        return Chosen(nb::cast<std::uint32_t>(chosen));
    };
}

std::optional<Op> op_named(nb::handle wanted) {
    if (!PyUnicode_Check(wanted.ptr())) return {};
    for (std::size_t code = 0; code < op_names.size(); ++code)
        if (PyUnicode_CompareWithASCIIString(wanted.ptr(), op_names[code].data()) == 0) return static_cast<Op>(code);
    return {};
}

bool all_reduce_plain(NativeCalls& calls, nb::handle x, nb::handle op, nb::handle timeout, std::uint32_t label) {
    double seconds = calls.timeout;
    if (!timeout.is_none()) {
        if (!PyFloat_CheckExact(timeout.ptr())) return false;
        seconds = PyFloat_AsDouble(timeout.ptr());
        if (!(seconds >= 0)) return false;
    }
    const std::optional<PlainBuffer> buffer = plain(x);
    const std::optional<Op> by = op_named(op);
    if (!buffer || !by || !is_defined(*by, buffer->dtype)) return false;
    run(calls, {.collective = Collective::all_reduce,
                .pointer = static_cast<std::byte*>(buffer->pointer),
                .count = buffer->count,
                .dtype = buffer->dtype,
                .op = *by,
                .label = label,
                .timeout = seconds});
    return true;
}

void barrier(NativeCalls& calls, double timeout) {
    std::byte token{};
    run(calls,
        {.collective = Collective::barrier, .pointer = &token, .count = 1, .dtype = Dtype::uint8, .timeout = timeout});
}

void bind_call(nb::module_& m) {
    nb::class_<PlanFacts>(
        m, "PlanFacts",
        "Numbers that all ranks of a plan have alike.\n\n"
        "``segment_bytes`` is the slice of one of its ``blocks``, ``window`` how many segments are in\n"
        "flight at most, ``plan`` its number; slices are cut at multiples of ``grain`` bytes.")
        .def(nb::init<int, std::size_t, std::uint32_t, std::uint64_t, std::size_t>(), "blocks"_a, "segment_bytes"_a,
             "window"_a, "plan"_a, "grain"_a = finest_grain)
        .def_ro("blocks", &PlanFacts::blocks)
        .def_ro("segment_bytes", &PlanFacts::segment_bytes)
        .def_ro("window", &PlanFacts::window)
        .def_ro("plan", &PlanFacts::plan)
        .def_ro("grain", &PlanFacts::grain);
    nb::class_<Call>(
        m, "Call",
        "A call: a collective, or a message that is part of one (``part_of``, send for one by itself).\n\n"
        "Collective, type and reduction are codes; ``count`` is elements per block, ``timeout`` in seconds, ``label``\n"
        "see `LabelName`. ``residual`` is the address of what this rank has lost by rounding, as many float32 as the\n"
        "buffer has, 0 for none. ValueError for unknown codes, for a reduction that is not defined for the type, and\n"
        "for a residual where nothing is rounded.")
        .def("__init__", &make_call, "collective"_a, "pointer"_a, "count"_a, "dtype"_a, "timeout"_a, "op"_a = 0,
             "root"_a = 0, "label"_a = 0, "tag"_a = 0, "part_of"_a = static_cast<int>(Collective::send),
             "residual"_a = 0)
        .def_prop_ro("collective", [](const Call& call) { return static_cast<int>(call.collective); })
        .def_prop_ro("pointer", [](const Call& call) { return reinterpret_cast<std::uintptr_t>(call.pointer); })
        .def_ro("count", &Call::count)
        .def_prop_ro("dtype", [](const Call& call) { return static_cast<int>(call.dtype); })
        .def_ro("timeout", &Call::timeout)
        .def_prop_ro("op", [](const Call& call) { return static_cast<int>(call.op); })
        .def_ro("root", &Call::root)
        .def_ro("label", &Call::label)
        .def_prop_ro("tag", [](const Call& call) { return static_cast<std::int64_t>(call.tag); })
        .def_prop_ro("part_of", [](const Call& call) { return static_cast<int>(call.part_of); })
        .def("check_has_residual", &check_has_residual, "ValueError if narrow wires concern it and it has no residual.")
        .def_prop_ro("residual", [](const Call& call) { return reinterpret_cast<std::uintptr_t>(call.residual); })
        .def("nbytes", &bytes_of, "size"_a, "Bytes of all blocks together, in a communicator of ``size`` ranks.");
}

// The end of a call that Python's own engine started: an object with `wait` and `ended`.
Trials::End end_of(nb::object part) {
    return [shared = shared_reference(std::move(part))](double seconds) {
        const nb::gil_scoped_acquire gil;
        shared->attr("wait")(seconds);
        return nb::cast<double>(shared->attr("ended"));
    };
}

void bind_native_calls(nb::module_& m) {
    nb::class_<Trials>(
        m, "Trials",
        "The calls of a rung, by number: the schedule that each runs, and when it was entered and left,\n"
        "or ended.")
        .def(nb::init<std::vector<std::uint32_t>>(), "handles"_a)
        .def("take", &Trials::take, "The number of the next call; None once all are taken.")
        .def("handle", &Trials::handle, "number"_a)
        .def("enter", &Trials::enter, "number"_a)
        .def("leave", &Trials::leave, "number"_a)
        .def(
            "go_on",
            [](Trials& trials, std::size_t number, nb::object part) { trials.go_on(number, end_of(std::move(part))); },
            "number"_a, "part"_a,
            "The call goes on without its caller: it is left when `complete` finds out that ``part`` has ended.")
        .def("complete", &Trials::complete, "timeout"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Wait until all calls that went on have ended, ``timeout`` seconds at most for all of them; raise what\n"
             "they raise.")
        .def_prop_ro("over", &Trials::over, "All are taken.")
        .def_prop_ro(
            "stamps",
            [](const Trials& trials) {
                std::vector<std::tuple<double, double>> found;
                for (const Trials::Stamp& stamp : trials.stamps()) found.emplace_back(stamp.entered, stamp.left);
                return found;
            },
            "Entered, left; in seconds of time.monotonic(), infinite of calls that have not been left.");
    nb::class_<NativeCalls>(
        m, "NativeCalls",
        "The collectives of one communicator: each call is given its plan, or one to try, and run or started.")
        .def("all_reduce_plain", &all_reduce_plain, "x"_a.none(), "op"_a.none(), "timeout"_a.none() = nb::none(),
             "label"_a = 0,
             nb::sig("def all_reduce_plain(self, x: object, op: object, timeout: float | None = None, label: int = 0) "
                     "-> bool"),
             "True if the call was made: it needs a NumPy array or torch tensor that is contiguous, writable, on the\n"
             "CPU and no view that shows other numbers, an ``op`` that its type has, and seconds that are a float\n"
             "(None: the communicator's). Anything else is left as it is.")
        .def("barrier", &barrier, "timeout"_a, "Return when every rank has called it.")
        .def("run", &run, "call"_a, "Execute the call's schedule in the calling thread.")
        .def("start", &start, "call"_a, "owner"_a.none(),
             "The same by the progress thread; ``owner`` is kept alive until it is done.")
        .def("start_on_device", &start_on_device, "call"_a, "owner"_a.none(), "device"_a, "stream"_a, "out"_a.none(),
             "into"_a.none(),
             "The same on blocks of a CUDA device, read and written at (pointer, bytes from block to block, first\n"
             "block, number of blocks), after what ``stream`` has been given; done when the device is. The call's\n"
             "pointer is 0.");
}

// The arithmetic of an executor outside this library, on memory that it answers for.
void bind_arithmetic(nb::module_& m) {
    m.def(
        "reduce",
        [](std::uintptr_t destination, const std::vector<std::uintptr_t>& addresses, std::size_t count, int dtype,
           int op, double divisor, int wire, int rounded, std::uintptr_t residual) {
            const Dtype type = code<Dtype>(dtype, dtype_names, "dtype");
            const Op by = code<Op>(op, op_names, "op");
            check_op(by, type);
            const Reduction reduction = find_reduction(type, by);
            const bool narrows = wire != 0 || rounded != 0;
            if (narrows && type != Dtype::float32)
                throw std::invalid_argument("narrow wires carry float32, not " + std::string(name(type)));
            std::vector<const void*> sources;
            for (const auto address : addresses) sources.push_back(reinterpret_cast<const void*>(address));
            auto* to = reinterpret_cast<float*>(destination);
            const nb::gil_scoped_release nogil;
            if (narrows)
                reduce_narrow(reduction, to, sources, count, divisor, code<Wire>(wire, wire_names, "wire"),
                              code<Wire>(rounded, wire_names, "wire"), reinterpret_cast<float*>(residual));
            else
                reduction(to, sources.data(), static_cast<int>(sources.size()), count, divisor);
        },
        "destination"_a, "sources"_a, "count"_a, "dtype"_a, "op"_a, "divisor"_a = 1.0, "wire"_a = 0, "rounded"_a = 0,
        "residual"_a = 0,
        "Combine ``count`` elements at the addresses ``sources``, from left to right.\n\n"
        "The ``destination`` may be one of them. float32 may arrive in the format ``wire`` and be ``rounded`` to one,\n"
        "as in `Engine.install`; what rounding loses is added to the ``residual``, times ``divisor``.");
    m.def(
        "repay",
        [](std::uintptr_t values, std::uintptr_t residual, std::size_t count) {
            const nb::gil_scoped_release nogil;
            repay(reinterpret_cast<float*>(values), reinterpret_cast<float*>(residual), count);
        },
        "values"_a, "residual"_a, "count"_a, "Add ``residual`` to ``values``, and leave it 0; both float32.");
    m.def(
        "round",
        [](int wire, std::uintptr_t values, std::uintptr_t residual, std::size_t count) {
            const nb::gil_scoped_release nogil;
            round(narrow_wire(wire), reinterpret_cast<float*>(values), reinterpret_cast<float*>(residual), count);
        },
        "wire"_a, "values"_a, "residual"_a, "count"_a,
        "Round float32 in place to what the format ``wire`` holds, and add to ``residual`` what that loses.\n\n"
        "The residual becomes 0 where what is lost is no finite number.");
    m.def(
        "copy_strided",
        [](std::uintptr_t to, const std::vector<std::ptrdiff_t>& to_strides, std::uintptr_t from,
           const std::vector<std::ptrdiff_t>& from_strides, const std::vector<std::size_t>& shape,
           std::size_t itemsize) {
            if (to_strides.size() != shape.size() || from_strides.size() != shape.size())
                throw std::invalid_argument(std::to_string(shape.size()) + " extents, and " +
                                            std::to_string(to_strides.size()) + " and " +
                                            std::to_string(from_strides.size()) + " strides");
            std::vector<StridedAxis> axes;
            for (std::size_t i = 0; i < shape.size(); ++i) axes.push_back({shape[i], to_strides[i], from_strides[i]});
            const nb::gil_scoped_release nogil;
            copy_strided(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), axes, itemsize);
        },
        "to"_a, "to_strides"_a, "from_"_a, "from_strides"_a, "shape"_a, "itemsize"_a,
        "Copy elements of ``itemsize`` bytes (1, 2, 4, 8 or 16) from one layout to another.\n\n"
        "``to`` and ``from_`` are the addresses of their first elements; strides are in elements. The two share no\n"
        "memory.");
    m.def(
        "narrow",
        [](int wire, std::uintptr_t destination, std::uintptr_t source, std::size_t count) {
            const nb::gil_scoped_release nogil;
            narrow(narrow_wire(wire), reinterpret_cast<void*>(destination), reinterpret_cast<const float*>(source),
                   count);
        },
        "wire"_a, "destination"_a, "source"_a, "count"_a,
        "Round ``count`` float32 at ``source`` to the format ``wire`` (1 to 3).");
    m.def(
        "widen",
        [](int wire, std::uintptr_t destination, std::uintptr_t source, std::size_t count) {
            const nb::gil_scoped_release nogil;
            widen(narrow_wire(wire), reinterpret_cast<float*>(destination), reinterpret_cast<const void*>(source),
                  count);
        },
        "wire"_a, "destination"_a, "source"_a, "count"_a, "The reverse of `narrow`, exact.");
    m.def(
        "narrow_bytes", [](int wire, std::size_t count) { return narrow_bytes(narrow_wire(wire), count); }, "wire"_a,
        "count"_a, "Bytes that ``count`` float32 take in the format ``wire``.");
}

void bind_describe(nb::module_& m) {
    nb::class_<Description>(m, "Description",
                            "Description of a caller's buffer: NumPy array, buffer object or DLPack tensor.")
        .def_ro("pointer", &Description::pointer)
        .def_ro("count", &Description::count)
        .def_ro("contiguous", &Description::contiguous)
        .def_ro("writable", &Description::writable)
        .def_ro("device", &Description::device)
        .def_prop_ro("itemsize", [](const Description& d) { return itemsize(d.dtype); })
        .def_prop_ro("dtype", [](const Description& d) { return nb::str(name(d.dtype).data(), name(d.dtype).size()); })
        .def_prop_ro("shape", [](const Description& d) {
            nb::list shape;
            for (const auto extent : d.shape) shape.append(extent);
            return nb::typed<nb::tuple, int, nb::ellipsis>(nb::tuple(shape));
        });
    m.def(
        "describe", [](nb::handle x) { return describe(x); }, "x"_a.none(),
        nb::sig("def describe(x: object) -> Description"),
        "Describe a buffer without copying it; TypeError if it is none.");
}

void bind_work(nb::module_& m) {
    nb::class_<WorkHandle>(m, "Work", "Handle of an operation in flight; keeps ``owner`` alive until it is done.")
        .def(
            "done", [](const WorkHandle& h) { return h.engine->poll(*h.work); },
            "True if it has ended. Who asks again and again, every 100 ms at least, is in a call as by `wait`.")
        .def(
            "wait",
            [](const WorkHandle& h, std::optional<double> timeout) {
                {
                    const nb::gil_scoped_release nogil;
                    h.engine->wait(h.work, timeout, attending(*h.engine));
                }
                settle(*h.engine);
            },
            "timeout"_a = nb::none(),
            "Block, GIL released, signals seen; raise the operation's error, or CollectiveTimeout when the time is up.")
        .def(
            "join",
            [](const WorkHandle& h, std::uintptr_t stream) {
                h.engine->check_owned();
                const auto& transfer = h.work->call.transfer;
                const nb::gil_scoped_release nogil;
                if (transfer) transfer->join(reinterpret_cast<cuda::Stream>(stream));
            },
            "stream"_a,
            "Make a stream of a device wait until a call that was started there is done; nothing for other calls.")
        .def_prop_ro(
            "last_stream",
            [](const WorkHandle& h) {
                const auto& transfer = h.work->call.transfer;
                return transfer ? reinterpret_cast<std::uintptr_t>(transfer->last_stream()) : 0;
            },
            "The stream of the device on which the last of such a call is queued; 0 for other calls.")
        .def_prop_ro(
            "other", [](const WorkHandle& h) { return h.work->done.is_set() ? h.work->other : any_source; },
            "The rank at the other end of a message that is done; ANY_SOURCE before, and for collectives.")
        .def_prop_ro(
            "ended", [](const WorkHandle& h) { return moment(h.work->ended); },
            "Time of its end, in seconds of time.monotonic(); 0 before.")
        .def(
            "error",
            [](const WorkHandle& h) -> nb::object {
                if (!h.work->done.is_set() || !h.work->failure) return nb::none();
                call_error_callback();
                return make_error(*h.work->failure);
            },
            nb::sig("def error(self) -> BaseException | None"), "The error of a call that has failed by now.");
}

// Both directions of a connection that carries records, until an engine takes them.
class RecordsHandle {
  public:
    RecordsHandle(const nb::bytes& sends, const nb::bytes& receives)
        : records_(
              Records{RecordWriter(encrypting_seal(key_of(sends))), RecordReader(decrypting_seal(key_of(receives)))}) {}
    RecordsHandle() : records_(Records{RecordWriter(summing_seal()), RecordReader(summing_seal())}) {}

    static Key256 key_of(const nb::bytes& given) {
        Key256 key;
        if (given.size() != key.size())
            throw std::invalid_argument("a key has " + std::to_string(key.size()) + " bytes, not " +
                                        std::to_string(given.size()));
        std::memcpy(key.data(), given.c_str(), key.size());
        return key;
    }
    Records take() {
        Records taken = std::move(here());
        records_.reset();
        return taken;
    }
    nb::bytes seal(const nb::bytes& text) {
        std::vector<std::byte> records;
        for (std::size_t begin = 0; begin < text.size();) {
            const iovec rest{const_cast<char*>(text.c_str()) + begin, text.size() - begin};
            const std::size_t before = records.size();
            records.resize(before + largest_record);
            const auto sealed = here().writer.seal({&rest, 1}, records.data() + before);
            records.resize(before + sealed.record);
            begin += sealed.text;
        }
        return nb::bytes(records.data(), records.size());
    }
    std::optional<nb::bytes> open(const nb::bytes& record) {
        const std::size_t text = size_of(record);
        if (record.size() != text + record_overhead)
            throw std::invalid_argument("a record of " + std::to_string(record.size()) + " bytes");
        std::vector<std::byte> opened(text);
        if (!here().reader.open(reinterpret_cast<const std::byte*>(record.c_str()), {}, opened.data())) return {};
        return nb::bytes(opened.data(), opened.size());
    }
    // The bytes of text in a record that begins so.
    static std::size_t size_of(const nb::bytes& begin) {
        if (begin.size() < record_size_bytes) throw std::invalid_argument("a record has a size first");
        return RecordReader::text_size(reinterpret_cast<const std::byte*>(begin.c_str()));
    }
    std::uint64_t next_received() { return here().reader.number(); }

  private:
    Records& here() {
        if (!records_) throw std::invalid_argument("an engine has taken these records");
        return *records_;
    }

    std::optional<Records> records_;
};

nb::bytes bytes_from(std::span<const std::byte> bytes) {
    return nb::bytes(bytes.data(), bytes.size());
}

ByteSpan span_of(const nb::bytes& bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

void bind_records(nb::module_& m) {
    m.def(
        "load_libcrypto", [] { libcrypto::Library::get(); },
        "ResourceError, with the remedy, unless OpenSSL's libcrypto can be used.");
    m.def(
        "public_key", [](const nb::bytes& key) { return bytes_from(public_key(RecordsHandle::key_of(key))); },
        "private_key"_a, "Public key of X25519 that belongs to a private one, which is 32 random bytes (RFC 7748).");
    m.def(
        "shared_key",
        [](const nb::bytes& own, const nb::bytes& other) {
            return bytes_from(shared_key(RecordsHandle::key_of(own), RecordsHandle::key_of(other)));
        },
        "private_key"_a, "public_key"_a,
        "The secret that both ends get, each from its own private key and the other's public one. ValueError if the\n"
        "public key is invalid.");
    m.def(
        "hkdf_extract",
        [](const nb::bytes& salt, const nb::bytes& material) {
            return bytes_from(hkdf_extract(span_of(salt), span_of(material)));
        },
        "salt"_a, "material"_a, "The first step of HKDF with SHA-256 (RFC 5869): 32 bytes.");
    m.def(
        "hkdf_expand",
        [](const nb::bytes& key, const nb::bytes& info, std::size_t size) {
            return bytes_from(hkdf_expand(RecordsHandle::key_of(key), span_of(info), size));
        },
        "key"_a, "info"_a, "size"_a, "The second step: ``size`` bytes, at most 8160.");
    m.def(
        "gcm_seal",
        [](const nb::bytes& key, const nb::bytes& nonce, const nb::bytes& additional, const nb::bytes& text) {
            GcmNonce once;
            if (key.size() != gcm_key_bytes || nonce.size() != once.size())
                throw std::invalid_argument("AES-128-GCM has keys of 16 bytes and nonces of 12");
            std::memcpy(once.data(), nonce.c_str(), once.size());
            Gcm cipher(true);
            cipher.take_key(span_of(key).first<gcm_key_bytes>());
            cipher.begin(once, span_of(additional));
            std::vector<std::byte> sealed(text.size() + gcm_tag_bytes);
            cipher.pass(span_of(text), sealed.data());
            cipher.end(sealed.data() + text.size());
            return bytes_from(sealed);
        },
        "key"_a, "nonce"_a, "additional"_a, "text"_a,
        "AES-128-GCM, as records use it: the text, encrypted, and its tag. For answers that are known elsewhere.");
    m.def(
        "checksum",
        [](const nb::bytes& text, bool by_tables) {
            Checksum checksum = by_tables ? Checksum::by_tables() : Checksum();
            std::vector<std::byte> copy(text.size());
            checksum.begin();
            checksum.pass(span_of(text), copy.data());
            return bytes_from(checksum.end());
        },
        "text"_a, "by_tables"_a = false,
        "Four sums of CRC-32C, as records have them (csrc/checksum.hpp); ``by_tables`` as on processors without an\n"
        "instruction for it.");
    m.attr("RECORD_SIZE_BYTES") = record_size_bytes;
    m.attr("RECORD_TAG_BYTES") = record_tag_bytes;
    nb::class_<RecordsHandle>(m, "Records", "Both directions of a connection that carries records (csrc/records.hpp).")
        .def(nb::init<const nb::bytes&, const nb::bytes&>(), "sends"_a, "receives"_a,
             "Encrypted records; 32 secret bytes for each direction.")
        .def(nb::init<>(), "Records with checksums.")
        .def("seal", &RecordsHandle::seal, "text"_a, "The next records to send, as many as the text needs.")
        .def("open", &RecordsHandle::open, "record"_a,
             "The text of the next record that was received; None if it is not what was sent.")
        .def_static("text_size", &RecordsHandle::size_of, "begin"_a,
                    "Bytes of text in a record, by its first RECORD_SIZE_BYTES bytes; 0 if there is no such record.")
        .def_prop_ro("next_received", &RecordsHandle::next_received,
                     "The number of the record that is to be received next, from 0.");
}

void bind_engine(nb::module_& m) {
    nb::class_<Engine>(m, "Engine")
        .def(nb::new_([](int rank, int world_size, int generation, std::optional<std::vector<std::string>> hosts,
                         std::size_t arena_bytes, std::optional<double> spin_seconds, bool inproc,
                         double heartbeat_timeout, double late_seconds, bool trace, bool record,
                         std::optional<std::size_t> helpers, std::optional<std::size_t> socket_threads,
                         std::optional<nb::typed<nb::callable, void(nb::str, bool)>> when_slow) {
                 auto* engine = new Engine({rank, world_size, static_cast<std::uint16_t>(generation),
                                            hosts.value_or(std::vector<std::string>{}), arena_bytes, spin_seconds,
                                            inproc, heartbeat_timeout, late_seconds, trace, record, helpers,
                                            socket_threads});
                 if (when_slow)
                     engine->when_slow([shared = shared_reference(std::move(*when_slow))](
                                           SlowRank::Reason reason, bool is_caller) { (*shared)(word(reason), is_caller); });
                 return std::shared_ptr<Engine>(engine, [](Engine* e) {
                     if (!e->is_disowned()) delete e;
                 });
             }),
             "rank"_a, "world_size"_a, nb::kw_only(), "generation"_a = 0, "hosts"_a = nb::none(), "arena_bytes"_a = 0,
             "spin_seconds"_a = nb::none(), "inproc"_a = false, "heartbeat_timeout"_a = 30.0, "late_seconds"_a = 30.0,
             "trace"_a = false, "record"_a = false, "helpers"_a = nb::none(), "socket_threads"_a = nb::none(),
             "when_slow"_a = nb::none(),
             "``hosts[r]`` is the name of rank r's host, for messages. ``spin_seconds`` None: 5e-6, or 0 (yield) when "
             "the\n"
             "ranks of this host outnumber its available cores. ``arena_bytes`` bounds the shared memory, 0 by the\n"
             "machine's memory; pages are taken as they are needed. A rank that is silent for ``heartbeat_timeout``\n"
             "seconds is lost; a call that waits for ``late_seconds`` logs for whom. ``trace``: keep what happens "
             "when.\n"
             "``record``: keep the last 2000 calls. ``helpers``: threads that sum for calls on devices, by the cores\n"
             "that are left if None. ``socket_threads``: threads that serve connections to a rank beyond the first, the\n"
             "same. ``when_slow(reason, is_caller)`` is called in the thread that makes most calls, once this rank\n"
             "keeps the others waiting, or for another reason; where compiled code makes all calls, in one that asks for\n"
             "`statistics`, with ``is_caller`` False.")
        .def_prop_ro("memory_fd", &Engine::memory_fd)
        .def_prop_ro("doorbell_fd", &Engine::doorbell_fd)
        .def("attach_local", &Engine::attach_local, "peer"_a, "memory_fd"_a, "doorbell_fd"_a, "socket_fd"_a,
             "A rank of this host. Takes ownership of the three descriptors; the unix socket tells of its death.")
        .def("attach_inproc", &Engine::attach_in_process, "peer"_a, "engine"_a,
             "A rank that is an engine of this process.")
        .def(
            "attach_tcp",
            [](Engine& engine, int peer, const std::vector<int>& sockets, const std::vector<RecordsHandle*>& records) {
                std::vector<Records> taken;
                for (RecordsHandle* each : records) taken.push_back(each->take());
                engine.attach_tcp(peer, sockets, std::move(taken));
            },
            "peer"_a, "sockets"_a, "records"_a = std::vector<RecordsHandle*>{},
            "A rank elsewhere, over connected and authenticated sockets (data), taken into ownership; with records\n"
            "for each, or without.")
        .def(
            "attach_control",
            [](Engine& engine, int peer, int socket, RecordsHandle* records) {
                engine.attach_control(peer, socket,
                                      records ? std::optional(records->take()) : std::optional<Records>{});
            },
            "peer"_a, "socket"_a, "records"_a.none() = nb::none(),
            "A control connection to the lowest rank of another host.")
        .def("attached", &Engine::attached, "peer"_a, "True if messages can go to ``peer``.")
        .def("departed", &Engine::departed, "peer"_a,
             "True if ``peer`` has said farewell, and nothing that it sent before is on its way.")
        .def("miss_connection", &Engine::miss_connection, "peer"_a, "seconds"_a,
             "A call needs a connection to ``peer``, which has been dialled in vain for so many ``seconds``. Once ``peer``\n"
             "misses it as well, one of the two counts as lost.")
        .def(
            "expect_links",
            [](Engine& engine, const std::vector<std::tuple<std::vector<int>, double, double>>& links) {
                std::vector<PlaceLink> expected;
                for (const auto& [ranks, up, down] : links) expected.push_back({ranks, up, down});
                engine.expect_links(std::move(expected));
            },
            "links"_a,
            "Take the links that plans count on, once: the ranks of each host, rack and site, and the bytes a second up\n"
            "and down of its link. From then on a link that keeps all waiting is named.")
        .def(
            "communicator", &Engine::add_communicator, "id"_a, "members"_a, "incarnation"_a = 0,
            "Register a communicator; ``id`` is a 32-bit number that all members share, and so is the ``incarnation``\n"
            "of 16 bits, one more than that of the last communicator of this number.")
        .def("forget", &Engine::forget, "id"_a)
        .def("completed", &Engine::completed, "communicator"_a,
             "Number of collectives, from the first on, that were completed here.")
        .def("install", &install, "communicator"_a, "instructions"_a, "peers"_a, "facts"_a,
             "Install a schedule and return its handle.\n\n"
             "``instructions`` has a row (kind, phase, first_peer, peer_count, block, lo_num, lo_den, hi_num, hi_den,\n"
             "final, wire, rounded, keeps) per instruction, kind being 0 send, 1 reduce, 2 store, 3 repay, 4 round, wire\n"
             "and rounded 0 as it is, 1 bfloat16, 2 float16, 3 int8, 4 int4, 5 int2, 6 float8;\n"
             "``peers[first_peer:first_peer + peer_count]`` are its peers. ValueError for a malformed table.")
        .def("start_message", &start_message, "communicator"_a, "peer"_a, "call"_a, "owner"_a.none(),
             "Start sending a message to a rank, or receiving one from it, as the call's collective says: send or\n"
             "recv.\n\n"
             "The ``peer`` of a recv may be ANY_SOURCE; ``owner`` is kept alive until the message is done.")
        .def("empty", &empty, "nbytes"_a, "copy"_a = false,
             "A uint8 array of ``nbytes`` in the arena, 64-byte aligned, freed with its last reference.\n\n"
             "One for the ``copy`` of a call's buffer is not in its second half, which arrays and the engine have.")
        .def(
            "fail",
            [](Engine& engine, const std::string& kind, int rank, const std::string& message) {
                engine.fail_from_python({error_kind(kind), rank, "", "", -1, message});
                call_error_callback();
            },
            "kind"_a, "rank"_a, "message"_a,
            "Fail everything pending and tell the other ranks; ``kind`` is the name of an error class, which the caller\n"
            "raises itself.")
        .def(
            "failure",
            [](const Engine& engine) -> nb::object {
                const auto failure = engine.failure();
                return failure ? make_error(*failure) : nb::none();
            },
            nb::sig("def failure(self) -> BaseException | None"))
        .def(
            "disputed",
            [](const Engine& engine) -> nb::object {
                const auto own = engine.disputed();
                if (!own) return nb::none();
                return nb::make_tuple(own->communicator, own->number, own->words, own->plan);
            },
            nb::sig("def disputed(self) -> tuple[int, int, str, str] | None"),
            "After a Mismatch, the collective on which ranks disagree: its communicator and number, what this rank called\n"
            "or was about to call, in words, and the id of its plan. None if it has called none, or it is about a message.")
        .def(
            "statistics", &statistics,
            "Counters since the engine was made; the library's own calls are not among its operations.\n\n"
            "``operations``, ``segments``, ``arena_allocated`` and ``arena_committed`` (bytes), ``seconds_in_calls``\n"
            "(that callers spent in run and wait) and ``seconds_waiting`` (of these, with nothing to do);\n"
            "``peers[rank]`` has ``messages_sent``, ``bytes_sent``, ``messages_received``, ``bytes_received``,\n"
            "``connections``, ``seconds_busy`` (that bytes for the peer were on their way or, where it shares memory,\n"
            "that its memory was read) and ``seconds_waited`` (that callers waited for it).\n"
            "``collectives`` has for each that completed here ``operations``, ``bytes`` (of all blocks together) and\n"
            "``seconds`` (from the start of each to its end); send and recv with the messages of gather and scatter.\n"
            "``in_flight`` has for the oldest calls, 4 at most, ``collective``, ``seconds`` since the call,\n"
            "``is_blocked`` (whether a caller does nothing else) and the ranks that it ``waits_for``, 16 at most: as of\n"
            "the last quarter of a second.\n"
            "``slowest`` is None, or says which ``ranks`` (one, or some of one ``host``) enter collectives later than\n"
            "the others, who wait for them for this ``share`` of the time, for how many ``seconds`` now, and for what\n"
            "``reason``: \"computes\", \"has no core\", \"sleeps\" or \"does not run\", between collectives; it "
            "``began`` at\n"
            "this time.monotonic(). ``slow_so_far`` lists all that did, with the seconds that it took in all.\n"
            "``slow_link`` is None, or says that the link ``from`` a host ``to`` a host carries these\n"
            "``bytes_per_second``, where the plan has ``expected`` more, for how many ``seconds`` now; ``both_ways``: the\n"
            "one back as well. Where all links that leave or reach a host are slow, the other name is \"\"; both are one\n"
            "host's where all of its links are, and \"\" where several without a host in common are. ``name`` says it\n"
            "in words. ``slow_links_so_far`` lists all that were.")
        .def("recorded", &recorded,
             "The last calls, with what has become of them: flight_recorder.py. Empty if they are not kept.")
        .def("traced", &traced,
             "Traced events, once the engine is shut down: trace.py. Empty if tracing was not asked for.")
        .def(
            "calls",
            [](std::shared_ptr<Engine> engine, int rank, int size, double timeout, nb::object choose_plan,
               bool need_residual) {
                return std::make_shared<NativeCalls>(std::move(engine), rank, size, timeout,
                                                     choose_plan_by(std::move(choose_plan)), need_residual);
            },
            "rank"_a, "size"_a, "timeout"_a, "choose_plan"_a, "need_residual"_a = false,
            nb::sig("def calls(self, rank: int, size: int, timeout: float, "
                    "choose_plan: collections.abc.Callable[[int, int, int, float], int | Trials], "
                    "need_residual: bool = False) -> NativeCalls"),
            "The calls of a communicator of ``size`` ranks, whose usual time limit is ``timeout`` seconds.\n\n"
            "``choose_plan(collective, nbytes, root, timeout)`` returns the handle of an installed schedule, or\n"
            "`Trials` that are not all taken. It is asked once for each size class, and again once all trials are\n"
            "taken. Where sums ``need_residual``, an all_reduce of float32 by sum or avg without one is a ValueError.")
        .def(
            "publish",
            [](const Engine&, std::uint32_t communicator, std::shared_ptr<NativeCalls> calls) {
                publish(communicator, std::move(calls));
            },
            "communicator"_a, "calls"_a, "Let native code call a communicator by its number.")
        .def(
            "withdraw", [](const Engine& engine, std::uint32_t communicator) { withdraw(engine, communicator); },
            "communicator"_a, "End that; `shutdown` does it for all.")
        .def(
            "installed_record",
            [](Engine& engine, std::uint32_t handle) {
                const Record& record = engine.installed(handle).record;
                return std::tuple(record.operations.load(), record.bytes.load(),
                                  1e-9 * static_cast<double>(record.nanoseconds.load()));
            },
            "handle"_a,
            "Work of an installed schedule here: operations, bytes of their buffers, seconds from start to end.")
        .def(
            "shutdown",
            [](Engine& engine, double timeout) {
                withdraw(engine);
                std::optional<Failure> mismatch;
                {
                    const nb::gil_scoped_release nogil;
                    mismatch = engine.shutdown(timeout);
                }
                settle(engine);
                if (mismatch) throw EngineError(*mismatch);
            },
            "timeout"_a = 5.0,
            "Say farewell, join the progress thread, close everything; pending operations fail. May be called "
            "twice.\n\n"
            "Mismatch, when all is closed, if a call that completed here turns out to be another one elsewhere.");
}

}  // namespace
}  // namespace multiring

NB_MODULE(_native, m) {
    using namespace multiring;
    m.doc() =
        "The native engine: peers, communicators, installed schedules, operations.\n\n"
        "Ranks are world ranks, except in schedules, whose peers are indices into the communicator's member list.\n"
        "Errors are raised as the classes of ``multiring.errors``.";
    nb::set_leak_warnings(false);  // a forked child ends with the engine of its parent, which it may not touch
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const EngineError& error) {
            try {
                const nb::object made = make_error(error.failure);
                call_error_callback();
                PyErr_SetObject(made.type().ptr(), made.ptr());
            } catch (nb::python_error& raised) {  // a signal, whose handler has run meanwhile
                raised.restore();
            }
        }
    });
    m.attr("DTYPES") = names(dtype_names);
    m.attr("ITEMSIZES") = sizes();
    m.attr("OPS") = names(op_names);
    m.attr("OPS_OF") = ops_of_types();
    m.attr("ANY_SOURCE") = any_source;
    m.attr("INTERNAL") = first_internal;
    m.attr("COLLECTIVES") = names(collective_names);
    m.attr("ROOTED") = rooted_collectives();
    m.attr("WIRES") = sizes_of_wires();
    m.attr("INSTRUCTIONS") = names(instruction_names);
    m.attr("INCARNATIONS") = std::uint32_t{std::numeric_limits<decltype(RecordedCall::incarnation)>::max()} + 1;
    m.attr("NO_NUMBER") = no_number;
    m.attr("MOST_STREAMS") = most_streams;
    m.attr("MOST_RECORDED_CALLS") = CallRecorder::most_calls;
    m.attr("RECORDED_CALL") = layout_of_recorded_call();
    m.attr("TRACE_EVENT") = layout_of_trace_event();
    m.attr("TRACE_EVENTS") = names(trace_event_names);
    m.def(
        "cut",
        [](std::uint64_t numerator, std::uint64_t denominator, std::size_t count, std::size_t itemsize,
           std::size_t grain) {
            if (denominator == 0 || numerator > denominator || itemsize == 0 || grain == 0)
                throw std::invalid_argument(
                    "cut needs a fraction between 0 and 1, and an item size and a grain above 0");
            return cut({numerator, denominator}, count, itemsize, grain);
        },
        "numerator"_a, "denominator"_a, "count"_a, "itemsize"_a, "grain"_a = finest_grain,
        "The element at which a slice of ``count`` elements is cut at a fraction (docs/design.md).");
    m.def("features", &features, "Instruction set chosen for reductions, compiler, transports: for ``doctor``.");
    nb::class_<LabelName>(m, "LabelName",
                          "While it is kept, what a Mismatch says of calls with this label: a number of 24 bits, the\n"
                          "same on all ranks.")
        .def(nb::init<std::uint32_t, std::string>(), "label"_a, "text"_a);
    m.def(
        "explain_labels",
        [](std::string message) {
            explain_labels(message);
            contrast_labels(message);
            return message;
        },
        "message"_a, "A message of a Mismatch with a line for each label in it that has a name here.");
    m.def("call_before_errors", &call_before_errors, "callback"_a.none(),
          nb::sig("def call_before_errors(callback: typing.Callable[[], object] | None) -> None"),
          "Have this called, in place of what was given before, each time that the program is about to hear of an\n"
          "engine's error: in the thread in which Python raises it, and where XLA or C is told, in another one, for\n"
          "which the one that is told waits for 0.5 s at most.");
    m.def("exit_with_failure", &exit_with_failure,
          "Make the exit code of this process 1, should it end with 0; for a process whose interpreter is ending.");
    nb::class_<SignalCounter>(m, "SignalCounter",
                              "Takes a signal, and counts how often it comes, whatever the threads of this process\n"
                              "do meanwhile. ValueError if there is no such signal.")
        .def(nb::init<int>(), "number"_a)
        .def_prop_ro("count", &SignalCounter::count,
                     "Number of times that it came, to this counter and those before it.")
        .def("give_back", &SignalCounter::give_back,
             "Let the signal do what it did before, unless somebody else has taken it; may be called twice.");
    const auto table = [](std::uintptr_t address) -> CFunctions& { return *reinterpret_cast<CFunctions*>(address); };
    m.def(
        "fill_c", [=](std::uintptr_t to, int rank, int world_size) { fill_c_functions(table(to), rank, world_size); },
        "table"_a, "rank"_a, "world_size"_a,
        "Hand the functions of ``multiring.h`` to the table of libmultiring.so at that address (csrc/c_api.hpp).");
    m.def("clear_c", [=](std::uintptr_t to) { clear_c_functions(table(to)); }, "table"_a, "Take them back.");
    m.def(
        "answer_c",
        [=](std::uintptr_t to, const std::string& error_class, const std::string& message) {
            tell_c_error(table(to), error_class, message);
        },
        "table"_a, "error_class"_a, "message"_a, "Tell it why joining or leaving failed.");
    m.def(
        "xla_handler", [] { return nb::capsule(reinterpret_cast<void*>(&xla::run_collective)); },
        nb::sig("def xla_handler() -> typing.Any"),
        "A capsule with the handler that XLA calls for collectives (csrc/xla.hpp).");
    bind_arithmetic(m);
    bind_describe(m);
    bind_work(m);
    bind_call(m);
    bind_native_calls(m);
    bind_records(m);
    bind_engine(m);
}
