#include "device.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "errors.hpp"

namespace multiring {
namespace {

constexpr unsigned portable = 1, mapped = 2, non_blocking = 1, no_timing = 2, greater_or_equal = 0;
constexpr std::size_t most_pitch = (std::size_t{1} << 31) - 1;
// A short call is cut all the same, or nothing overlaps.
constexpr std::size_t fewest_chunks = 4, smallest_chunk_bytes = std::size_t{512} << 10;

struct Pending {  // operations on memory that are yet to be queued on a stream
    cuda::Stream stream;
    std::vector<cuda::MemoryOperation> operations;
};

// Streams of closed queues, by context, for the next ones. They are not destroyed: a framework may have noted that
// memory was used on them, and asks them when it frees it.
struct SpareStreams {
    std::mutex mutex;
    std::map<cuda::Context, std::vector<cuda::Stream>> streams;
};

SpareStreams& spare_streams() {
    static SpareStreams* const all = new SpareStreams;  // engines may end after what is static has
    return *all;
}

cuda::Stream take_stream(const Device& device) {
    SpareStreams& spare = spare_streams();
    const std::lock_guard lock(spare.mutex);
    auto& kept = spare.streams[device.context()];
    if (!kept.empty()) {
        cuda::Stream taken = kept.back();
        kept.pop_back();
        return taken;
    }
    const cuda::Driver& driver = device.driver;
    int least = 0, greatest = 0;
    driver.check("for priorities", driver.CtxGetStreamPriorityRange(&least, &greatest));
    // Streams of a high priority share no hardware queue with the usual ones of the caller.
    cuda::Stream made = nullptr;
    driver.check("for a stream", driver.StreamCreateWithPriority(&made, non_blocking, greatest));
    return made;
}

void keep_stream(const Device& device, cuda::Stream stream) {
    if (stream == nullptr) return;
    SpareStreams& spare = spare_streams();
    const std::lock_guard lock(spare.mutex);
    spare.streams[device.context()].push_back(stream);
}

}  // namespace

Device::Device(int ordinal) : driver(cuda::Driver::get()) {
    driver.check(("for device " + std::to_string(ordinal)).c_str(), driver.DeviceGet(&handle_, ordinal));
    driver.check("for the primary context", driver.DevicePrimaryCtxRetain(&context_, handle_));
}

Device::~Device() {
    driver.DevicePrimaryCtxRelease(handle_);
}

PinnedRange::PinnedRange(std::shared_ptr<Device> device, std::shared_ptr<Arena> arena, std::size_t bytes)
    : device_(std::move(device)), arena_(std::move(arena)) {
    begin_ = static_cast<std::byte*>(arena_->allocate(bytes, Arena::Purpose::mapped));
    try {
        const cuda::Driver& driver = device_->driver;
        const cuda::Current current(driver, device_->context());
        driver.check(("to register " + std::to_string(bytes) + " bytes of shared memory").c_str(),
                     driver.MemHostRegister(begin_, bytes, portable | mapped));
        const cuda::ResultCode result = driver.MemHostGetDevicePointer(&address_, begin_, 0);
        if (result != 0) driver.MemHostUnregister(begin_);
        driver.check("where registered memory lies", result);
    } catch (...) {
        arena_->release(begin_);
        throw;
    }
}

PinnedRange::~PinnedRange() {
    try {
        const cuda::Current current(device_->driver, device_->context());
        device_->driver.MemHostUnregister(begin_);
    } catch (const EngineError&) {  // the driver has ended before us, and with it the registration
    }
    arena_->release(begin_);
}

DeviceTransfer::DeviceTransfer(std::shared_ptr<DeviceQueue> of, const Cut& cut) : queue(std::move(of)), cut_(cut) {
    const std::size_t segment_bytes = cut.blocks * cut.slice_bytes, total = cut.blocks * cut.block_bytes;
    const std::size_t wanted = std::clamp(total / fewest_chunks, smallest_chunk_bytes, DeviceQueue::usual_slot_bytes);
    const std::size_t fitting = std::max<std::size_t>(1, std::min(wanted, queue->slot_bytes) / segment_bytes);
    const std::size_t segments = cut.segments();
    segments_per_chunk_ = static_cast<std::uint32_t>(std::min(fitting, segments));
    chunks_ = static_cast<std::uint32_t>((segments + segments_per_chunk_ - 1) / segments_per_chunk_);
    chunk_slice_bytes_ = segments_per_chunk_ * cut.slice_bytes;
}

DeviceTransfer::~DeviceTransfer() {
    const std::unique_lock lock(queue->mutex_, std::try_to_lock);  // in a forked child nobody may give it back
    if (done_ != nullptr && lock) queue->spare_events_.push_back(done_);
}

bool DeviceTransfer::is_filled(std::uint32_t segment) const {
    return !refused && DeviceQueue::has_passed(queue->counters().filled, first_chunk_ + segment / segments_per_chunk_);
}

std::byte* DeviceTransfer::at(std::uint32_t segment, std::uint32_t block) const {
    const std::uint32_t chunk = segment / segments_per_chunk_;
    return queue->slot(first_chunk_ + chunk) + block * chunk_slice_bytes_ +
           (segment - chunk * segments_per_chunk_) * cut_.slice_bytes;
}

void DeviceTransfer::complete_below(std::uint32_t segment) {
    const std::uint32_t chunks = segment >= cut_.segments() ? chunks_ : segment / segments_per_chunk_;
    while (completed_ < chunks) queue->complete(first_chunk_ + completed_++);
}

bool DeviceTransfer::has_left() const {
    return queue->closed_.load(std::memory_order_acquire) ||
           DeviceQueue::has_passed(queue->counters().freed, first_chunk_ + chunks_ - 1);
}

void DeviceTransfer::join(cuda::Stream stream) const {
    const std::lock_guard lock(queue->mutex_);
    if (queue->closed_.load(std::memory_order_relaxed)) return;  // all was done before
    const cuda::Driver& driver = queue->device->driver;
    const cuda::Current current(driver, queue->device->context());
    driver.check("to make a stream wait", driver.StreamWaitEvent(stream, done_, 0));
}

cuda::Stream DeviceTransfer::last_stream() const {
    return queue->in_;
}

DeviceQueue::DeviceQueue(std::shared_ptr<Device> of, std::shared_ptr<Arena> arena, std::size_t wanted_slot_bytes)
    : device(std::move(of)),
      slot_bytes(round_up(std::max(wanted_slot_bytes, usual_slot_bytes), page)),
      memory_(std::make_unique<PinnedRange>(device, std::move(arena), page + slots * slot_bytes)),
      begin_(memory_->begin()) {
    new (begin_) Counters{1, 1, 0};
    const cuda::Current current(device->driver, device->context());
    try {
        make_streams();
    } catch (...) {
        release_streams();
        throw;
    }
}

void DeviceQueue::make_streams() {
    const cuda::Driver& driver = device->driver;
    out_ = take_stream(*device);
    in_ = take_stream(*device);
    driver.check("for an event", driver.EventCreate(&called_, no_timing));
    // Some virtual devices cannot: better said now than in the middle of a call.
    cuda::MemoryOperation write[] = {operation(cuda::write_value_32, counters().freed, 1)};
    driver.check("to write a value to memory when a stream comes to it", driver.StreamBatchMemOp(in_, 1, write, 0));
}

void DeviceQueue::release_streams() noexcept {
    const cuda::Driver& driver = device->driver;
    for (cuda::Event event : events_) driver.EventDestroy(event);
    if (called_ != nullptr) driver.EventDestroy(called_);
    keep_stream(*device, out_);
    keep_stream(*device, in_);
}

// Keep streams, events and memory that the device may still use until the process ends.
DeviceQueue::~DeviceQueue() {
    if (!closed_.load(std::memory_order_relaxed)) static_cast<void>(memory_.release());
}

bool DeviceQueue::close() noexcept {
    const std::lock_guard lock(mutex_);
    if (closed_.load(std::memory_order_relaxed)) return true;
    if (!is_idle()) return false;
    closed_.store(true, std::memory_order_release);
    try {
        const cuda::Current current(device->driver, device->context());
        release_streams();
    } catch (const EngineError&) {  // the driver has ended before us
    }
    memory_.reset();
    return true;
}

cuda::MemoryOperation DeviceQueue::operation(unsigned kind, const std::uint32_t& counter, std::uint64_t value) const {
    const unsigned flags = kind == cuda::wait_value_32 ? greater_or_equal : 0;
    return {kind, memory_->address_of(&counter), static_cast<std::uint32_t>(value), flags, 0, 0};
}

// Counters go around after 2^32 chunks; nothing is ever half as far ahead.
bool DeviceQueue::has_passed(const std::uint32_t& counter, std::uint64_t chunk) {
    const std::uint32_t now = __atomic_load_n(&counter, __ATOMIC_ACQUIRE);
    return static_cast<std::int32_t>(now - static_cast<std::uint32_t>(chunk + 1)) >= 0;
}

bool DeviceQueue::is_idle() const {
    return has_passed(counters().freed, enqueued_.load(std::memory_order_acquire) - 1);
}

// Chunks go back in order, as they are queued on the device; of a later call one may be done before.
void DeviceQueue::complete(std::uint64_t chunk) {
    completed_[chunk % slots] = true;
    while (completed_[ready_ % slots]) completed_[ready_++ % slots] = false;
    __atomic_store_n(&counters().ready, static_cast<std::uint32_t>(ready_), __ATOMIC_RELEASE);
}

bool DeviceQueue::abandon() {
    while (ready_ < enqueued_.load(std::memory_order_acquire) && has_passed(counters().filled, ready_)) {
        if (!completed_[ready_ % slots]) std::memset(slot(ready_), 0xff, slot_bytes);
        complete(ready_);
    }
    return is_idle();
}

cuda::Event DeviceQueue::take_event() {
    const std::lock_guard lock(mutex_);
    if (spare_events_.empty()) {
        cuda::Event made = nullptr;
        device->driver.check("for an event", device->driver.EventCreate(&made, no_timing));
        events_.push_back(made);
        return made;
    }
    cuda::Event taken = spare_events_.back();
    spare_events_.pop_back();
    return taken;
}

// One copy where the blocks' slices lie a usual distance apart, else one for each block.
void DeviceQueue::copy(const DeviceTransfer& transfer, std::uint32_t chunk, const DeviceBlocks& blocks, bool out) {
    const cuda::Driver& driver = device->driver;
    const std::size_t done = chunk * transfer.chunk_slice_bytes_;
    const std::size_t bytes = std::min(transfer.chunk_slice_bytes_, transfer.cut_.block_bytes - done);
    std::byte* host = slot(transfer.first_chunk_ + chunk) + blocks.first * transfer.chunk_slice_bytes_;
    if (blocks.count == 1 || blocks.pitch > most_pitch) {
        for (std::uint32_t i = 0; i < blocks.count; ++i, host += transfer.chunk_slice_bytes_) {
            const cuda::Address at = blocks.at + i * blocks.pitch + done;
            driver.check("for a copy", out ? driver.MemcpyDtoHAsync(host, at, bytes, out_)
                                           : driver.MemcpyHtoDAsync(at, host, bytes, in_));
        }
        return;
    }
    cuda::Copy2D all{};
    const cuda::Address at = blocks.at + done;
    all.source_type = out ? cuda::device_memory : cuda::host_memory;
    all.target_type = out ? cuda::host_memory : cuda::device_memory;
    (out ? all.source_device : all.target_device) = at;
    (out ? all.source_pitch : all.target_pitch) = blocks.pitch;
    (out ? all.target_pitch : all.source_pitch) = transfer.chunk_slice_bytes_;
    if (out)
        all.target_host = host;
    else
        all.source_host = host;
    all.width = bytes;
    all.height = blocks.count;
    driver.check("for a copy", driver.Memcpy2DAsync(&all, out ? out_ : in_));
}

std::shared_ptr<DeviceTransfer> DeviceQueue::enqueue(const Cut& cut, const std::optional<DeviceBlocks>& out,
                                                     const std::optional<DeviceBlocks>& in, cuda::Stream stream) {
    auto transfer = std::make_shared<DeviceTransfer>(shared_from_this(), cut);
    const cuda::Driver& driver = device->driver;
    const cuda::Current current(driver, device->context());
    transfer->done_ = take_event();
    const std::uint64_t first = enqueued_.load(std::memory_order_relaxed);
    transfer->first_chunk_ = first;
    driver.check("to record an event", driver.EventRecord(called_, stream));
    driver.check("to wait for an event", driver.StreamWaitEvent(out_, called_, 0));
    Counters& at = counters();
    // Operations on memory that follow each other on a stream are queued at once.
    Pending leaving{out_, {}}, coming{in_, {}};
    // Once something is refused, nothing is copied, but chunks pass as ever: what is queued is let go of in order.
    const auto attempt = [&](const auto& step) {
        try {
            step();
        } catch (const EngineError& error) {
            if (!transfer->refused) transfer->refused = error.failure;
        }
    };
    const auto add = [&](Pending& on, unsigned kind, const std::uint32_t& counter, std::uint64_t value) {
        on.operations.push_back(operation(kind, counter, value));
    };
    const auto flush = [&](Pending& on) {
        if (on.operations.empty()) return;
        const auto count = static_cast<unsigned>(on.operations.size());
        attempt([&] {
            driver.check("to wait for a value", driver.StreamBatchMemOp(on.stream, count, on.operations.data(), 0));
        });
        on.operations.clear();
    };
    const auto pass = [&](std::uint32_t chunk, const std::optional<DeviceBlocks>& blocks, bool is_out) {
        if (blocks && !transfer->refused) attempt([&] { copy(*transfer, chunk, *blocks, is_out); });
    };
    const auto send_out = [&](std::uint32_t chunk) {
        const std::uint64_t number = first + chunk;
        if (number >= slots) add(leaving, cuda::wait_value_32, at.freed, number - slots + 1);
        flush(leaving);
        pass(chunk, out, true);
        add(leaving, cuda::write_value_32, at.filled, number + 1);
    };
    // Some chunks are sent out ahead. What waits is queued after what it waits for, in any case: so all can be done
    // where the streams share one queue of the hardware.
    const std::uint32_t chunks = transfer->chunks_, ahead = std::min(chunks, slots / 2);
    for (std::uint32_t chunk = 0; chunk < ahead; ++chunk) send_out(chunk);
    for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) {
        if (chunk + ahead >= chunks) flush(leaving);
        add(coming, cuda::wait_value_32, at.ready, first + chunk + 1);
        flush(coming);
        pass(chunk, in, false);
        add(coming, cuda::write_value_32, at.freed, first + chunk + 1);
        if (chunk + ahead < chunks) send_out(chunk + ahead);
    }
    flush(coming);
    attempt([&] { driver.check("to record an event", driver.EventRecord(transfer->done_, in_)); });
    enqueued_.store(first + chunks, std::memory_order_release);
    return transfer;
}

}  // namespace multiring
