// Mailbox: a ring buffer of descriptors from one rank to one other of the same host, and the count of those that it has
// read of the other's. Each side writes only its own memory:
//
//     rank a's arena                    rank b's arena
//     Mailbox for b: slots    ------>   read by b
//                    drained  <------   Mailbox for a: drained       (b's count of a's slots that it has read)
//
// A descriptor's `lap` counts from 1, through all laps of the buffer, and is stored last; the reader knows which it
// expects.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "descriptor.hpp"
#include "memory.hpp"
#include "transport.hpp"

namespace multiring {

inline constexpr std::uint32_t mailbox_slots = 64;

struct alignas(cache_line) Mailbox {
    Frame slots[mailbox_slots];
    alignas(cache_line) std::uint32_t drained;
};

// A rank of this host (or, in process, another engine).
class LocalTransport final : public Transport {
  public:
    // Makes our mailbox for the peer known in our arena.
    LocalTransport(int peer, int self, Receiver& receiver, std::shared_ptr<Arena> mine,
                   std::unique_ptr<PeerArena> theirs, Descriptor doorbell);

    bool shares_memory() const override { return true; }
    void post(const Frame& frame, const std::byte* payload) override;
    void notify() override;
    bool drain() override;
    void give_back(Payload payload, std::size_t bytes) override;
    bool is_given_up() const override { return theirs_->is_given_up(); }
    bool flush() override;
    void disown() noexcept override;
    Traffic traffic() const override;

    const PeerArena& arena() const { return *theirs_; }

  private:
    static constexpr int tokens_per_frame = 14;
    struct ReleaseFrame {
        std::uint32_t lap;
        FrameType type;
        std::uint8_t unused;
        std::uint16_t token_count;
        std::uint32_t tokens[tokens_per_frame];
    };
    static_assert(sizeof(ReleaseFrame) == sizeof(Frame));

    void put(const Frame& frame);  // the next slot, or the queue behind it
    bool put_in_slot(const Frame& frame);
    void put_releases();
    const Mailbox* incoming();

    Receiver& receiver_;
    const int self_;
    std::shared_ptr<Arena> mine_;
    std::unique_ptr<PeerArena> theirs_;
    Descriptor doorbell_;
    Mailbox* outgoing_;
    std::atomic<const Mailbox*> incoming_{nullptr};

    // sending
    alignas(cache_line) mutable std::mutex send_mutex_;
    std::uint32_t posted_ = 0;
    std::uint32_t read_by_peer_ = 0;  // the last count of `drained` that we looked at
    std::deque<Frame> queued_;        // what found the mailbox full
    ReleaseFrame releases_{};
    std::atomic<bool> held_back_{false};  // queued_ or releases_ has something
    std::uint64_t messages_sent_ = 0, bytes_sent_ = 0;

    // receiving
    alignas(cache_line) std::mutex receive_mutex_;
    std::uint32_t drained_ = 0;
    std::atomic<std::uint64_t> messages_received_{0}, bytes_received_{0};
};

}  // namespace multiring
