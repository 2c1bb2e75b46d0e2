// Trace: what this rank did when, kept for people to look at when the job is over, or has failed.
//
// Every thread writes into a buffer of its own, allocated when it first records something: no lock, no allocation after
// that, and the latest events are kept. Times are those of CLOCK_MONOTONIC, which the ranks of a machine share.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <vector>

#include "types.hpp"
#include "wait.hpp"

namespace multiring {

struct Call;

enum class TraceEventKind : std::uint8_t {
    call,     // lane: a collective or message, from its start here to its end
    segment,  // row: a segment, and within it:
    phase,    //   from its first instruction to that of the next
    held_up,  //   waits for `peer`
    caller,   // thread: inside a call that blocks
    idle      // thread: nothing to do until `peer` does its part
};

inline constexpr std::array<std::string_view, 6> trace_event_names{"call",    "segment", "phase",
                                                                   "held_up", "caller",  "idle"};

// One interval. Python reads them as they lie in memory.
struct TraceEvent {
    std::int64_t begin, end;  // nanoseconds
    std::uint64_t number, bytes, plan;
    std::uint32_t communicator, lane, segment;
    std::int32_t peer;  // -1: nobody in particular
    std::uint16_t row, phase;
    TraceEventKind kind;
    Collective collective;
    Dtype dtype;
    bool finished;  // ended by itself, not because of a failure
};
static_assert(sizeof(TraceEvent) == 64 && std::is_trivially_default_constructible_v<TraceEvent>);

class Trace {
  public:
    Trace();
    Trace(const Trace&) = delete;
    Trace& operator=(const Trace&) = delete;

    void record(const TraceEvent& event) {
        if (EventBuffer* buffer = mine()) buffer->events[buffer->count++ % events_per_thread] = event;
    }

    struct Thread {
        pid_t id;
        std::uint64_t lost;  // events that later ones have overwritten
        std::vector<TraceEvent> events;
    };
    // Call it when no thread records any more.
    std::vector<Thread> threads() const;

  private:
    static constexpr std::size_t most_threads = 64, events_per_thread = 1 << 16;

    struct EventBuffer {
        std::atomic<pid_t> thread{0};
        std::uint64_t count = 0;
        std::unique_ptr<TraceEvent[]> events;
    };
    EventBuffer* mine();
    EventBuffer* claim();

    const std::uint64_t serial_;  // no other trace of this process has or had it
    std::array<EventBuffer, most_threads> buffers_;
    std::atomic<std::size_t> claimed_{0};
};

inline std::int64_t nanoseconds_of(Clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

// Follows what one lane does: its call, and in each row the segment, the segment's phases, and the waits in these.
class LaneTracer {
  public:
    LaneTracer(Trace& trace, std::uint32_t lane) : trace_(trace) { template_.lane = lane; }

    void begin(const Call& call, std::uint64_t bytes, std::uint64_t plan, std::size_t rows);
    void end(Clock::time_point began, bool finished);

    void start(std::uint32_t row, std::uint32_t segment);
    void enter(std::uint32_t row, int phase);  // one of its instructions is reached, perhaps not for the first time
    void hold_up(std::uint32_t row, int peer);
    void go_on(std::uint32_t row);
    void finish(std::uint32_t row) { finish(row, true); }

  private:
    struct RowProgress {
        bool running = false;
        std::uint32_t segment = 0;
        int phase = -1, peer = -1;
        std::int64_t began = 0, phase_began = 0, held_up_since = 0;  // 0: it is not
    };
    void finish(std::uint32_t row, bool finished);
    void record(TraceEventKind kind, std::uint32_t row, std::int64_t begin, std::int64_t end, bool finished);

    Trace& trace_;
    TraceEvent template_{};  // what all events of the call have in common
    std::vector<RowProgress> rows_;
};

}  // namespace multiring
