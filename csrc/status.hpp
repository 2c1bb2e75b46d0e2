// Status: what a rank tells of itself, or others tell of it: that it lives, what it last did, what it waits for.
//
// A rank publishes its own in its arena's header, several times a second, from the progress thread. The lowest ranks of
// the hosts pass them on over the control connections, while somebody waits, and publish what they hear for the ranks
// of their host.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "types.hpp"

namespace multiring {

// A call in flight: the wait state of the rank that made it.
struct Waiting {
    static constexpr std::size_t most_ranks = 16;  // enough to find a culprit; a late rank is waited for by itself

    std::uint64_t number = 0, tag = 0;
    std::uint64_t bytes = 0;  // part of the buffer that is not yet done
    std::uint32_t communicator = 0;
    std::int32_t other = -1;  // a message's other end, a rank
    float seconds = 0;        // since it was called
    Collective collective{};
    std::uint8_t is_blocked = 0;  // a caller does nothing else until it is done
    std::uint8_t rank_count = 0;
    std::uint8_t unused = 0;
    std::int32_t ranks[most_ranks] = {};  // those that it waits for

    bool is_point() const { return collective == Collective::send || collective == Collective::recv; }
};

// Counts of a rank since it joined, in seconds: differences tell who is slow, and why (slow_ranks.hpp).
struct Counts {
    std::uint64_t calls = 0;  // collectives and messages
    double seconds = 0;       // on its own clock
    double in_calls = 0;      // while a caller was in the engine, and no other came in
    double ran = 0;           // on a core, between calls that are further apart than a millisecond
    double queued = 0;        // while callers were ready to run and had no core; negative if the system does not tell
};

// Rates at which a rank sent to other hosts and received from them in the last window (slow_links.hpp).
struct NetworkRates {
    static constexpr std::size_t most_levels = 3;  // hosts, racks, sites
    struct Busy {
        std::int32_t peer = -1;
        float rate = 0;  // bytes a second
        float busy = 0;  // part of the time
    };
    struct Heard {
        std::int32_t peer = -1;
        float part = 0;  // that part of the time its data came
    };
    float sent[most_levels] = {}, received[most_levels] = {};  // bytes a second, by the outermost link that they passed
    Busy busiest[2];                                           // connections, those first that were busy longest
    Heard heard[2];                                            // ranks of other hosts, those first that sent longest
};

struct Status {
    static constexpr std::size_t most_waiting = 4;

    std::uint64_t beats = 0;  // counts up while the rank lives; 0: nothing is known of it
    std::uint64_t last_number = 0;
    std::uint64_t begun = 0;  // the collectives of `begun_in` with lower numbers were called
    std::int32_t rank = -1;
    std::uint32_t last_communicator = 0;
    float idle = 0;    // seconds since it last called something
    float silent = 0;  // seconds without a beat, as seen by who tells it
    Collective last_collective{};
    std::uint8_t has_called = 0;  // the `last_` are valid
    std::uint8_t waiting_count = 0;
    std::uint8_t has_more = 0;   // calls in flight than are told
    std::uint32_t begun_in = 0;  // the communicator of the last collective
    Counts counts;
    NetworkRates network;
    Waiting waiting[most_waiting] = {};

    std::size_t bytes() const { return offsetof(Status, waiting) + waiting_count * sizeof(Waiting); }
};
static_assert(std::is_trivially_copyable_v<Status> && sizeof(Status) % sizeof(std::uint64_t) == 0);

// A status in shared memory: one writer; readers notice when it is written while they read.
class StatusSlot {
  public:
    void publish(const Status& status) {
        std::array<std::uint64_t, word_count> words;
        std::memcpy(words.data(), &status, sizeof status);
        const std::uint32_t sequence = __atomic_load_n(&sequence_, __ATOMIC_RELAXED);
        __atomic_store_n(&sequence_, sequence + 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        for (std::size_t i = 0; i < word_count; ++i) __atomic_store_n(&words_[i], words[i], __ATOMIC_RELAXED);
        __atomic_store_n(&sequence_, sequence + 2, __ATOMIC_RELEASE);
    }
    // False if it is being written (by a rank that was stopped meanwhile, perhaps), or was never.
    bool read(Status& status) const {
        std::array<std::uint64_t, word_count> words;
        const std::uint32_t sequence = __atomic_load_n(&sequence_, __ATOMIC_ACQUIRE);
        if (sequence == 0 || sequence % 2 == 1) return false;
        for (std::size_t i = 0; i < word_count; ++i) words[i] = __atomic_load_n(&words_[i], __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (__atomic_load_n(&sequence_, __ATOMIC_RELAXED) != sequence) return false;
        std::memcpy(static_cast<void*>(&status), words.data(), sizeof status);
        return true;
    }

  private:
    static constexpr std::size_t word_count = sizeof(Status) / sizeof(std::uint64_t);
    std::uint32_t sequence_ = 0;  // odd while it is written
    [[maybe_unused]] std::uint32_t padding_ = 0;
    std::uint64_t words_[word_count] = {};
};

}  // namespace multiring
