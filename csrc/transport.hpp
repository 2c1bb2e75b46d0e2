// Transport: what carries frames and payloads to and from one other rank.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "frame.hpp"
#include "streaming_store_tuner.hpp"
#include "wait.hpp"

namespace multiring {

// Bytes of a span that came in, and how to give them back to where they came from.
struct Payload {
    const std::byte* data = nullptr;
    std::uint32_t token = 0;
};

class Transport;

// Bytes of small messages that a peer takes before it has a use for them.
inline constexpr std::int64_t eager_credit = std::int64_t{1} << 20;

// Receiver of what transports deliver: the executor.
class Receiver {
  public:
    // A frame whose payload, if it has one, can be read until it is given back.
    virtual void deliver(Transport& from, const Frame& frame, Payload payload) = 0;
    // A payload of ours is free again; `token` is what we posted it with.
    virtual void released(int peer, std::uint32_t token) = 0;
    // Called when bytes of the peer make no sense.
    virtual void garbage(int peer, const std::string& what) = 0;

  protected:
    ~Receiver() = default;
};

struct Traffic {
    std::uint64_t messages_sent = 0, bytes_sent = 0, messages_received = 0, bytes_received = 0;
    std::uint32_t connections = 0;
    double seconds_busy = 0;    // that bytes for the peer were on their way, or that its memory was read
    double seconds_waited = 0;  // that callers waited for it
};

// The kernel's counts of the connections to a peer.
struct ConnectionCounts {
    int peer = -1;
    std::uint64_t sent = 0, received = 0;  // bytes, of those sent the acknowledged ones
    double busy = 0;                       // seconds with something unacknowledged for which the peer had room
    std::uint64_t held = 0;                // bytes unacknowledged and unsent now, where some are unsent
    double heard = 0;                      // seconds in which data of the peer's came, without gaps
};

class Transport {
  public:
    explicit Transport(int peer) : peer(peer), credit_(eager_credit) {}
    virtual ~Transport() = default;
    Transport(const Transport&) = delete;
    Transport& operator=(const Transport&) = delete;

    // True if the peer reads payloads out of our arena; otherwise they are sent from where they lie, and what may be on
    // its way is bounded by grants and the eager credit.
    virtual bool shares_memory() const = 0;
    // Hand over a frame; never blocks. The payload must stay until the frame's token comes back.
    virtual void post(const Frame& frame, const std::byte* payload) = 0;
    // Make sure that the peer, if it sleeps, sees what was posted.
    virtual void notify() {}
    // Take this many bytes of the eager credit, if there are as many.
    bool take_credit(std::size_t bytes) {
        const auto wanted = static_cast<std::int64_t>(bytes + sizeof(Frame));
        std::int64_t left = credit_.load(std::memory_order_relaxed);
        while (left >= wanted)
            if (credit_.compare_exchange_weak(left, left - wanted, std::memory_order_relaxed)) return true;
        return false;
    }
    // The payload of such a message was consumed.
    void return_credit(std::size_t bytes) { return_credits(bytes + sizeof(Frame)); }
    void return_credits(std::size_t credits) {
        credit_.fetch_add(static_cast<std::int64_t>(credits), std::memory_order_relaxed);
    }
    // Take in what has arrived; true if there was anything or another thread is at it.
    virtual bool drain() = 0;
    // The same for a rank that leaves: nobody reads after it, so it waits for other threads and does their part, too.
    virtual void drain_all() { drain(); }
    // The payload was read.
    virtual void give_back(Payload payload, std::size_t bytes) = 0;
    // True if bytes read so far may not be what the peer sent: a call has failed there, and its memory is its own.
    virtual bool is_given_up() const { return false; }
    // Send what was held back; true if nothing is left.
    virtual bool flush() = 0;
    // After this returns no caller's memory is read any more; nothing more is sent.
    virtual void abandon() {}
    // True if the peer may not have read all that we sent. Where memory is shared, the lanes know.
    virtual bool may_be_unread() const { return false; }
    // Nothing more is sent or received, or this is a forked child: let go of descriptors and mappings.
    virtual void disown() noexcept = 0;
    virtual Traffic traffic() const = 0;
    void count_busy(Clock::duration time) { count(busy_, time); }
    void count_waited(Clock::duration time) { count(waited_, time); }

    const int peer;  // world rank
    // Copies that the peer reads in our memory, large and small.
    StreamingStoreTuner staging{StreamingStoreTuner::copies};
    StreamingStoreTuner staging_small{StreamingStoreTuner::small_copies};
    // Stores of its data, and sums, to a caller's buffer that it has read in place.
    StreamingStoreTuner storing{StreamingStoreTuner::copies};
    StreamingStoreTuner summing{StreamingStoreTuner::sums};

  protected:
    // A traffic with the times.
    Traffic timed(Traffic traffic) const {
        traffic.seconds_busy = 1e-9 * static_cast<double>(busy_.load(std::memory_order_relaxed));
        traffic.seconds_waited = 1e-9 * static_cast<double>(waited_.load(std::memory_order_relaxed));
        return traffic;
    }

  private:
    static void count(std::atomic<std::int64_t>& sum, Clock::duration time) {
        sum.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count(), std::memory_order_relaxed);
    }

    std::atomic<std::int64_t> credit_;
    std::atomic<std::int64_t> busy_{0}, waited_{0};  // nanoseconds
};

}  // namespace multiring
