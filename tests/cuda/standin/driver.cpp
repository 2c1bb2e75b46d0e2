// A stand-in for libcuda.so.1 where there is no device: "its" memory is the process's own, streams are threads, and
// what a real driver would leave undefined ends the process with a message.
//
// Settings, from the environment:
//
//   STANDIN_COPY_SECONDS    what each copy takes
//   STANDIN_FAILING_COPY    the number of the copy, from 1 on, that is refused; the others go on
//   STANDIN_NO_INIT         cuInit fails
//   STANDIN_VERSION         11060 for 11.6
//   STANDIN_NO_REGISTER     memory of the host cannot be registered
//
// With -DWITHOUT_MEMORY_OPERATIONS it has no cuStreamBatchMemOp_v2, as an older driver.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result { success = 0, invalid_value = 1, not_initialized = 3, unknown = 999 };

using Address = std::uint64_t;
// Registered memory has another address for the device, so that a mistaken one is seen.
constexpr Address device_offset = Address{1} << 60;
constexpr auto look_again = std::chrono::microseconds(50);

[[noreturn]] void misuse(const std::string& what) {
    std::fprintf(stderr, "stand-in driver: %s\n", what.c_str());
    std::fflush(stderr);
    std::abort();
}

double setting(const char* name, double otherwise = 0) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::atof(text) : otherwise;
}

struct Range {
    std::uintptr_t begin, end;
    bool holds(Range other) const { return begin <= other.begin && other.end <= end; }
    bool touches(Range other) const { return begin < other.end && other.begin < end; }
};

struct Marker {  // a place in a stream that an event stands for
    bool is_done = true;
};

struct Event {
    std::shared_ptr<Marker> marker = std::make_shared<Marker>();
};

struct Operation {
    std::function<void()> run;
    std::vector<Range> host;  // registered memory that it uses
    bool counts = true;       // a record of an event holds nothing
};

class Stream {
  public:
    Stream() : thread_([this] { work(); }) { thread_.detach(); }

    void queue(Operation operation) {
        const std::lock_guard lock(mutex_);
        operations_.push_back(std::move(operation));
        changed_.notify_all();
    }
    std::size_t pending() {
        const std::lock_guard lock(mutex_);
        std::size_t count = 0;
        for (const Operation& one : operations_) count += one.counts;
        return count;
    }
    bool uses(Range range) {
        const std::lock_guard lock(mutex_);
        for (const Operation& one : operations_)
            for (const Range& used : one.host)
                if (used.touches(range)) return true;
        return false;
    }
    void drain() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return operations_.empty(); });
    }
    // Operations that tests observe: one no longer counts when what it writes is seen.
    void leave() {
        const std::lock_guard lock(mutex_);
        operations_.front().counts = false;
        operations_.front().host.clear();
    }

  private:
    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return !operations_.empty(); });
            const auto run = operations_.front().run;
            lock.unlock();
            run();
            lock.lock();
            operations_.pop_front();
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Operation> operations_;
    std::thread thread_;
};

struct State {
    std::mutex lock;  // the driver's own: one call that waits keeps all others out
    pid_t process = 0;
    int retained = 0;
    int copies = 0;
    std::map<std::uintptr_t, Range> registered;
    std::set<Stream*> streams;
    std::set<Event*> events;
    Stream* usual = nullptr;  // number 0
    std::mutex marker_mutex;
    std::condition_variable marked;
};

State& state() {
    static State* const one = new State;  // threads use it to the end
    return *one;
}

thread_local std::vector<void*> contexts;
int the_context;

std::atomic<double> copy_seconds{setting("STANDIN_COPY_SECONDS")};
std::atomic<long> driver_calls{0};

// What each call of the driver does first.
class Entered {
  public:
    explicit Entered(const char* name, bool needs_context = true) {
        if (state().process != getpid())
            misuse(std::string(name) + (state().process == 0 ? " before cuInit" : " in a forked child"));
        if (needs_context && contexts.empty()) misuse(std::string(name) + ": no context is current in this thread");
        driver_calls.fetch_add(1);
        lock_ = std::unique_lock(state().lock);
    }

  private:
    std::unique_lock<std::mutex> lock_;
};

Stream& known(void* stream, const char* name) {
    if (stream == nullptr) {
        if (state().usual == nullptr) state().usual = new Stream;
        return *state().usual;
    }
    auto* one = static_cast<Stream*>(stream);
    if (state().streams.count(one) == 0) misuse(std::string(name) + ": unknown stream");
    return *one;
}

Event& known_event(void* event, const char* name) {
    auto* one = static_cast<Event*>(event);
    if (state().events.count(one) == 0) misuse(std::string(name) + ": unknown event");
    return *one;
}

Range checked_host(const void* memory, std::size_t bytes, const char* name) {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    const Range range{begin, begin + bytes};
    for (const auto& [at, one] : state().registered)
        if (one.holds(range)) return range;
    misuse(std::string(name) + ": memory of the host that is not registered");
}

void* checked_device(Address address, const char* name) {
    if (address == 0 || (address & device_offset) != 0) misuse(std::string(name) + ": no memory of the device");
    return reinterpret_cast<void*>(address);
}

bool is_refused() {
    return ++state().copies == static_cast<int>(setting("STANDIN_FAILING_COPY"));
}

void rest(double seconds) {
    if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

void queue_copy(Stream& stream, void* target, std::size_t target_pitch, const void* source, std::size_t source_pitch,
                std::size_t width, std::size_t height, Range host) {
    const auto copy = [=] {
        rest(copy_seconds);
        for (std::size_t row = 0; row < height; ++row)
            std::memcpy(static_cast<char*>(target) + row * target_pitch,
                        static_cast<const char*>(source) + row * source_pitch, width);
    };
    stream.queue({copy, {host}});
}

struct MemoryOperation {
    unsigned operation;
    Address address;
    std::uint64_t value;
    unsigned flags;
    Address alias;
    std::uint64_t padding;
};

struct Copy2D {
    std::size_t source_x, source_y;
    unsigned source_type;
    const void* source_host;
    Address source_device;
    void* source_array;
    std::size_t source_pitch;
    std::size_t target_x, target_y;
    unsigned target_type;
    void* target_host;
    Address target_device;
    void* target_array;
    std::size_t target_pitch;
    std::size_t width, height;
};

}  // namespace

extern "C" {

int cuInit(unsigned) {
    if (setting("STANDIN_NO_INIT") != 0) return 100;
    if (state().process == 0) state().process = getpid();
    return success;
}

int cuDriverGetVersion(int* version) {
    *version = static_cast<int>(setting("STANDIN_VERSION", 12040));
    return success;
}

int cuGetErrorString(int result, const char** text) {
    switch (result) {
        case success: *text = "no error"; return success;
        case invalid_value: *text = "invalid argument"; return success;
        case 2: *text = "out of memory"; return success;
        case 100: *text = "no CUDA-capable device is detected"; return success;
        case 101: *text = "invalid device ordinal"; return success;
        default: *text = nullptr; return invalid_value;
    }
}

int cuDeviceGet(int* device, int ordinal) {
    const Entered entered("cuDeviceGet", false);
    if (ordinal != 0) return 101;
    *device = ordinal;
    return success;
}

int cuDevicePrimaryCtxRetain(void** context, int) {
    const Entered entered("cuDevicePrimaryCtxRetain", false);
    ++state().retained;
    *context = &the_context;
    return success;
}

int cuDevicePrimaryCtxRelease_v2(int) {
    const Entered entered("cuDevicePrimaryCtxRelease", false);
    if (--state().retained < 0) misuse("the primary context was released more often than retained");
    return success;
}

int cuCtxPushCurrent_v2(void* context) {
    const Entered entered("cuCtxPushCurrent", false);
    if (context != &the_context || state().retained == 0) misuse("cuCtxPushCurrent: unknown context");
    contexts.push_back(context);
    return success;
}

int cuCtxPopCurrent_v2(void** context) {
    const Entered entered("cuCtxPopCurrent");
    *context = contexts.back();
    contexts.pop_back();
    return success;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    const Entered entered("cuCtxGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return success;
}

int cuMemHostRegister_v2(void* memory, std::size_t bytes, unsigned) {
    const Entered entered("cuMemHostRegister");
    if (setting("STANDIN_NO_REGISTER") != 0) return 2;
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    const Range range{begin, begin + bytes};
    for (const auto& [at, one] : state().registered)
        if (one.touches(range)) misuse("cuMemHostRegister: memory that is registered");
    state().registered[begin] = range;
    return success;
}

int cuMemHostUnregister(void* memory) {
    const Entered entered("cuMemHostUnregister");
    const auto found = state().registered.find(reinterpret_cast<std::uintptr_t>(memory));
    if (found == state().registered.end()) misuse("cuMemHostUnregister: memory that is not registered");
    for (Stream* stream : state().streams)
        if (stream->uses(found->second)) misuse("cuMemHostUnregister: memory with operations pending");
    state().registered.erase(found);
    return success;
}

int cuMemHostGetDevicePointer_v2(Address* address, void* memory, unsigned) {
    const Entered entered("cuMemHostGetDevicePointer");
    checked_host(memory, 1, "cuMemHostGetDevicePointer");
    *address = reinterpret_cast<Address>(memory) + device_offset;
    return success;
}

int cuStreamCreateWithPriority(void** stream, unsigned, int) {
    const Entered entered("cuStreamCreateWithPriority");
    auto* made = new Stream;
    state().streams.insert(made);
    *stream = made;
    return success;
}

int cuStreamDestroy_v2(void* stream) {
    const Entered entered("cuStreamDestroy");
    Stream& one = known(stream, "cuStreamDestroy");
    if (one.pending() != 0) misuse("cuStreamDestroy: a stream with operations pending");
    state().streams.erase(&one);  // its thread goes on to wait
    return success;
}

int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    const Entered entered("cuStreamWaitEvent");
    const auto marker = known_event(event, "cuStreamWaitEvent").marker;
    const auto wait = [marker] {
        std::unique_lock lock(state().marker_mutex);
        state().marked.wait(lock, [&] { return marker->is_done; });
    };
    known(stream, "cuStreamWaitEvent").queue({wait, {}});
    return success;
}

#ifndef WITHOUT_MEMORY_OPERATIONS
int cuStreamBatchMemOp_v2(void* stream, unsigned count, MemoryOperation* operations, unsigned) {
    const Entered entered("cuStreamBatchMemOp");
    Stream& on = known(stream, "cuStreamBatchMemOp");
    for (unsigned i = 0; i < count; ++i) {
        const MemoryOperation& one = operations[i];
        if ((one.address & device_offset) == 0) misuse("cuStreamBatchMemOp: memory that is not registered");
        auto* const at = reinterpret_cast<std::uint32_t*>(one.address & ~device_offset);
        const Range range = checked_host(at, sizeof *at, "cuStreamBatchMemOp");
        const auto value = static_cast<std::uint32_t>(one.value);
        if (one.operation == 1 && one.flags == 0) {
            const auto wait = [at, value] {
                while (static_cast<std::int32_t>(__atomic_load_n(at, __ATOMIC_ACQUIRE) - value) < 0)
                    std::this_thread::sleep_for(look_again);
            };
            on.queue({wait, {range}});
        } else if (one.operation == 2) {
            const auto write = [&on, at, value] {
                on.leave();
                __atomic_store_n(at, value, __ATOMIC_RELEASE);
            };
            on.queue({write, {range}});
        } else {
            misuse("cuStreamBatchMemOp: unknown operation");
        }
    }
    return success;
}
#endif

int cuEventCreate(void** event, unsigned) {
    const Entered entered("cuEventCreate");
    auto* made = new Event;
    state().events.insert(made);
    *event = made;
    return success;
}

int cuEventRecord(void* event, void* stream) {
    const Entered entered("cuEventRecord");
    const auto marker = std::make_shared<Marker>();
    marker->is_done = false;
    known_event(event, "cuEventRecord").marker = marker;
    const auto mark = [marker] {
        const std::lock_guard lock(state().marker_mutex);
        marker->is_done = true;
        state().marked.notify_all();
    };
    known(stream, "cuEventRecord").queue({mark, {}, false});
    return success;
}

int cuEventDestroy_v2(void* event) {
    const Entered entered("cuEventDestroy");
    Event& one = known_event(event, "cuEventDestroy");
    state().events.erase(&one);
    delete &one;
    return success;
}

int cuMemcpyDtoHAsync_v2(void* target, Address source, std::size_t bytes, void* stream) {
    const Entered entered("cuMemcpyDtoHAsync");
    Stream& on = known(stream, "cuMemcpyDtoHAsync");
    const Range host = checked_host(target, bytes, "cuMemcpyDtoHAsync");
    const void* from = checked_device(source, "cuMemcpyDtoHAsync");
    if (is_refused()) return invalid_value;
    queue_copy(on, target, 0, from, 0, bytes, 1, host);
    return success;
}

int cuMemcpyHtoDAsync_v2(Address target, const void* source, std::size_t bytes, void* stream) {
    const Entered entered("cuMemcpyHtoDAsync");
    Stream& on = known(stream, "cuMemcpyHtoDAsync");
    const Range host = checked_host(source, bytes, "cuMemcpyHtoDAsync");
    void* to = checked_device(target, "cuMemcpyHtoDAsync");
    if (is_refused()) return invalid_value;
    queue_copy(on, to, 0, source, 0, bytes, 1, host);
    return success;
}

int cuMemcpy2DAsync_v2(const Copy2D* copy, void* stream) {
    const Entered entered("cuMemcpy2DAsync");
    Stream& on = known(stream, "cuMemcpy2DAsync");
    const bool out = copy->source_type == 2 && copy->target_type == 1;
    if (!out && (copy->source_type != 1 || copy->target_type != 2)) misuse("cuMemcpy2DAsync: neither out nor back");
    for (const std::size_t pitch : {copy->source_pitch, copy->target_pitch})
        if (pitch < copy->width || pitch >> 31 != 0) return invalid_value;
    const std::size_t host_pitch = out ? copy->target_pitch : copy->source_pitch;
    const void* host = out ? copy->target_host : copy->source_host;
    const Range range = checked_host(host, (copy->height - 1) * host_pitch + copy->width, "cuMemcpy2DAsync");
    void* at = checked_device(out ? copy->source_device : copy->target_device, "cuMemcpy2DAsync");
    if (is_refused()) return invalid_value;
    queue_copy(on, out ? copy->target_host : at, copy->target_pitch, out ? at : copy->source_host, copy->source_pitch,
               copy->width, copy->height, range);
    return success;
}

// ---- what a test does as the owner of the device
// -----------------------------------------------------------------------

void* standin_stream() {
    contexts.push_back(&the_context);
    if (state().process == 0) state().process = getpid();
    void* stream = nullptr;
    cuStreamCreateWithPriority(&stream, 0, 0);
    contexts.pop_back();
    return stream;
}

// Whether all that a stream was given is done.
int standin_is_done(void* stream) {
    const std::lock_guard lock(state().lock);
    return known(stream, "standin_is_done").pending() == 0;
}

// Keep a stream busy.
void standin_sleep(void* stream, double seconds) {
    const std::lock_guard lock(state().lock);
    known(stream, "standin_sleep").queue({[seconds] { rest(seconds); }, {}});
}

// Keep it busy until `*gate` is not 0.
void standin_hold(void* stream, const int* gate) {
    const std::lock_guard lock(state().lock);
    const auto wait = [gate] {
        while (__atomic_load_n(gate, __ATOMIC_ACQUIRE) == 0) std::this_thread::sleep_for(look_again);
    };
    known(stream, "standin_hold").queue({wait, {}});
}

// A copy within the device, as a kernel of the caller's.
void standin_copy(void* stream, void* target, const void* source, std::size_t bytes) {
    const std::lock_guard lock(state().lock);
    known(stream, "standin_copy").queue({[=] { std::memcpy(target, source, bytes); }, {}});
}

void standin_synchronize(void* stream) {
    Stream* one;
    {
        const std::lock_guard lock(state().lock);
        one = &known(stream, "standin_synchronize");
    }
    one->drain();
}

// As cudaFree: keeps every other call of the driver out until the stream is done.
void standin_free(void* stream) {
    const std::lock_guard lock(state().lock);
    known(stream, "standin_free").drain();
}

void standin_set_copy_seconds(double seconds) {
    copy_seconds = seconds;
}

// Calls of the driver so far, by all threads.
long standin_calls() {
    return driver_calls;
}

// What is held: registered ranges, streams, events, contexts.
void standin_held(long* held) {
    const std::lock_guard lock(state().lock);
    held[0] = static_cast<long>(state().registered.size());
    held[1] = static_cast<long>(state().streams.size());
    held[2] = static_cast<long>(state().events.size());
    held[3] = state().retained;
}
}
