#include "trace.hpp"

#include <unistd.h>

#include <algorithm>

#include "call.hpp"

namespace multiring {
namespace {

std::atomic<std::uint64_t> traces_made{0};

std::int64_t now() {
    return nanoseconds_of(Clock::now());
}

}  // namespace

Trace::Trace() : serial_(++traces_made) {}

Trace::EventBuffer* Trace::mine() {
    thread_local std::uint64_t serial = 0;
    thread_local EventBuffer* buffer = nullptr;
    if (serial != serial_) {
        buffer = claim();
        serial = serial_;
    }
    return buffer;
}

// This thread's buffer; nullptr, and its events are not kept, where there are too many threads.
Trace::EventBuffer* Trace::claim() {
    const pid_t thread = gettid();
    const std::size_t claimed = std::min(claimed_.load(), most_threads);
    for (std::size_t i = 0; i < claimed; ++i)  // a thread may record in several traces by turns
        if (buffers_[i].thread.load() == thread) return &buffers_[i];
    const std::size_t place = claimed_.fetch_add(1);
    if (place >= most_threads) return nullptr;
    // Not initialised, so that memory is taken only as events come.
    buffers_[place].events.reset(new TraceEvent[events_per_thread]);
    buffers_[place].thread = thread;
    return &buffers_[place];
}

std::vector<Trace::Thread> Trace::threads() const {
    std::vector<Thread> result;
    for (std::size_t i = 0; i < std::min(claimed_.load(), most_threads); ++i) {
        const EventBuffer& buffer = buffers_[i];
        const std::uint64_t kept = std::min<std::uint64_t>(buffer.count, events_per_thread);
        Thread thread{buffer.thread.load(), buffer.count - kept, {}};
        for (std::uint64_t at = buffer.count - kept; at < buffer.count; ++at)
            thread.events.push_back(buffer.events[at % events_per_thread]);
        result.push_back(std::move(thread));
    }
    return result;
}

void LaneTracer::begin(const Call& call, std::uint64_t bytes, std::uint64_t plan, std::size_t rows) {
    template_.number = call.number;
    template_.bytes = bytes;
    template_.plan = plan;
    template_.communicator = call.installed->communicator->id;
    template_.collective = call.is_point() && call.part_of != Collective::send ? call.part_of : call.collective;
    template_.dtype = call.dtype;
    rows_.assign(rows, {});
}

void LaneTracer::end(Clock::time_point began, bool finished) {
    for (std::uint32_t row = 0; row < rows_.size(); ++row) finish(row, false);
    record(TraceEventKind::call, 0, nanoseconds_of(began), now(), finished);
}

void LaneTracer::start(std::uint32_t row, std::uint32_t segment) {
    rows_[row] = {true, segment, -1, -1, now(), 0, 0};
}

void LaneTracer::enter(std::uint32_t row, int phase) {
    RowProgress& its = rows_[row];
    if (its.phase == phase) return;
    const std::int64_t time = now();
    if (its.phase >= 0) record(TraceEventKind::phase, row, its.phase_began, time, true);
    its.phase = phase;
    its.phase_began = time;
}

void LaneTracer::hold_up(std::uint32_t row, int peer) {
    RowProgress& its = rows_[row];
    if (its.held_up_since != 0 && its.peer == peer) return;
    go_on(row);
    its.peer = peer;
    its.held_up_since = now();
}

void LaneTracer::go_on(std::uint32_t row) {
    RowProgress& its = rows_[row];
    if (its.held_up_since == 0) return;
    record(TraceEventKind::held_up, row, its.held_up_since, now(), true);
    its.held_up_since = 0;
    its.peer = -1;
}

void LaneTracer::finish(std::uint32_t row, bool finished) {
    RowProgress& its = rows_[row];
    if (!its.running) return;
    go_on(row);
    const std::int64_t time = now();
    if (its.phase >= 0) record(TraceEventKind::phase, row, its.phase_began, time, finished);
    record(TraceEventKind::segment, row, its.began, time, finished);
    its.running = false;
}

void LaneTracer::record(TraceEventKind kind, std::uint32_t row, std::int64_t begin, std::int64_t end, bool finished) {
    TraceEvent event = template_;
    event.begin = begin;
    event.end = end;
    event.kind = kind;
    event.finished = finished;
    event.row = static_cast<std::uint16_t>(row);
    event.peer = -1;
    if (kind != TraceEventKind::call) {
        event.segment = rows_[row].segment;
        event.phase = static_cast<std::uint16_t>(std::max(rows_[row].phase, 0));
        event.peer = rows_[row].peer;
    }
    trace_.record(event);
}

}  // namespace multiring
