// DeviceQueue: the way of a communicator's calls from a device's memory into the arena and back.
//
//   chunk   a part of a call's buffer that is copied at once: one segment or several, of every block
//   slot    where a chunk lies in the arena while its segments run; chunk c of the queue has slot c mod S
//
// All that the device is to do is queued on two streams of its own when the call is made:
//
//   out     for each chunk: wait until `freed` is more than c - S; copy device to slot; write `filled` = c + 1
//   in      for each chunk: wait until `ready` is more than c;     copy slot to device; write `freed` = c + 1
//
// From then on device and host speak by these counters in the arena alone. The thread that runs the segments never
// calls the driver: another thread of the process may wait in it, with its locks held, for the very collective that
// this one is to complete (cudaFree, the loading of a module and cudaHostRegister were seen to).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda.hpp"
#include "errors.hpp"
#include "memory.hpp"

namespace multiring {

// One CUDA device, and its primary context, which the frameworks use as well.
class Device {
  public:
    explicit Device(int ordinal);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const cuda::Driver& driver;
    cuda::Context context() const { return context_; }

  private:
    int handle_ = 0;
    cuda::Context context_ = nullptr;
};

// Memory of the arena that the device's copy engines may read and write; its pages are the process's until it ends.
class PinnedRange {
  public:
    PinnedRange(std::shared_ptr<Device> device, std::shared_ptr<Arena> arena, std::size_t bytes);
    ~PinnedRange();
    PinnedRange(const PinnedRange&) = delete;
    PinnedRange& operator=(const PinnedRange&) = delete;

    std::byte* begin() const { return begin_; }
    cuda::Address address_of(const void* place) const {
        return address_ + static_cast<cuda::Address>(static_cast<const std::byte*>(place) - begin_);
    }

  private:
    const std::shared_ptr<Device> device_;
    const std::shared_ptr<Arena> arena_;
    std::byte* begin_ = nullptr;
    cuda::Address address_ = 0;
};

// Blocks of a call's buffer that lie on the device: `count` of them from block `first` on, `pitch` bytes apart.
struct DeviceBlocks {
    cuda::Address at = 0;
    std::size_t pitch = 0;
    std::uint32_t first = 0, count = 0;
};

// Division of a call's buffer: `blocks` blocks of `block_bytes`, whose slices of `slice_bytes` are its segments.
struct Cut {
    std::uint32_t blocks = 1;
    std::size_t block_bytes = 0, slice_bytes = 0;
    std::size_t segments() const { return (block_bytes + slice_bytes - 1) / slice_bytes; }
};

class DeviceQueue;

// A call's passage. Made by the caller's thread; from `begin` on the thread's that runs the segments.
class DeviceTransfer {
  public:
    DeviceTransfer(std::shared_ptr<DeviceQueue> queue, const Cut& cut);
    ~DeviceTransfer();
    DeviceTransfer(const DeviceTransfer&) = delete;
    DeviceTransfer& operator=(const DeviceTransfer&) = delete;

    bool is_filled(std::uint32_t segment) const;
    std::byte* at(std::uint32_t segment, std::uint32_t block) const;
    // The segments below are done: their chunks may go back to the device.
    void complete_below(std::uint32_t segment);
    // True if the device has done all that the call asked of it.
    bool has_left() const;
    // Make a stream of the caller's wait until then.
    void join(cuda::Stream stream) const;
    // The stream on which the last of it is queued.
    cuda::Stream last_stream() const;

    const std::shared_ptr<DeviceQueue> queue;
    // Set if the driver refused to queue the call: nothing of it is sent, and its chunks wait to be abandoned.
    std::optional<Failure> refused;

  private:
    friend class DeviceQueue;
    const Cut cut_;
    std::uint32_t segments_per_chunk_ = 1, chunks_ = 1;
    std::size_t chunk_slice_bytes_ = 0;  // slice of one block in a slot
    std::uint64_t first_chunk_ = 0;      // position among the queue's
    std::uint32_t completed_ = 0;        // chunks of ours
    cuda::Event done_ = nullptr;
};

class DeviceQueue : public std::enable_shared_from_this<DeviceQueue> {
  public:
    static constexpr std::uint32_t slots = 8;
    // Fewer bytes a copy leave a device's link idle between copies (benchmarks/results/2026-11-28-constants.md,
    // Engine).
    static constexpr std::size_t usual_slot_bytes = std::size_t{4} << 20;

    DeviceQueue(std::shared_ptr<Device> device, std::shared_ptr<Arena> arena, std::size_t slot_bytes);
    ~DeviceQueue();
    DeviceQueue(const DeviceQueue&) = delete;
    DeviceQueue& operator=(const DeviceQueue&) = delete;

    // Queue a call's copies behind what `stream` has queued so far. Calls are queued in the order of their numbers.
    std::shared_ptr<DeviceTransfer> enqueue(const Cut& cut, const std::optional<DeviceBlocks>& out,
                                            const std::optional<DeviceBlocks>& in, cuda::Stream stream);
    // The job has failed. Until nothing is left: fill what is not done with bytes of ones (NaN, -1) and let it go, so
    // that no stream waits for ever and nobody takes half a sum for a result. True when nothing is left.
    bool abandon();
    bool is_idle() const;
    // Give back what it holds, before the arena's mapping ends; false if the device may still use it.
    bool close() noexcept;

    const std::shared_ptr<Device> device;
    const std::size_t slot_bytes;  // most bytes of a chunk

  private:
    friend class DeviceTransfer;
    struct alignas(cache_line) Counters {
        std::uint32_t filled;                     // written by the device
        alignas(cache_line) std::uint32_t ready;  // written by the host
        alignas(cache_line) std::uint32_t freed;  // written by the device
    };
    Counters& counters() const { return *reinterpret_cast<Counters*>(begin_); }
    std::byte* slot(std::uint64_t chunk) const { return begin_ + page + chunk % slots * slot_bytes; }
    void make_streams();
    void release_streams() noexcept;
    static bool has_passed(const std::uint32_t& counter, std::uint64_t chunk);
    void complete(std::uint64_t chunk);
    void copy(const DeviceTransfer& transfer, std::uint32_t chunk, const DeviceBlocks& blocks, bool out);
    cuda::Event take_event();
    cuda::MemoryOperation operation(unsigned kind, const std::uint32_t& counter, std::uint64_t value) const;

    std::unique_ptr<PinnedRange> memory_;
    std::byte* const begin_;  // start of `memory_`; the progress thread may look there while another closes
    cuda::Stream out_ = nullptr, in_ = nullptr;
    cuda::Event called_ = nullptr;  // what the caller's stream had queued

    std::atomic<bool> closed_{false};
    std::mutex mutex_;  // closing, and the next two
    std::vector<cuda::Event> spare_events_;
    std::vector<cuda::Event> events_;
    std::atomic<std::uint64_t> enqueued_{1};  // chunks, from the first on, which is nobody's: it tries the device
    std::uint64_t ready_ = 1;                 // next chunk that the device will complete
    bool completed_[slots] = {};              // chunks from `ready_` on that are done before those ahead of them
};

}  // namespace multiring
