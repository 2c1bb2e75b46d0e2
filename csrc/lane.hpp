// Lane: runs one operation's schedule as data arrive, many segments in flight.
//
//   row       a segment in flight; a lane has W rows, segment s uses row s mod W
//   staging   slots for rows' outgoing spans, copied where peers can read them (not needed for arena buffers and TCP)
//
// A lane is driven by one thread at a time (`advance`); what arrives is delivered to it (`accept`) by whichever thread
// drains the transport.
//
// W is the plan's and so the same on all ranks, so a peer is never more than 2 W segments ahead of the row that waits
// for it (it starts segment s when its messages of segment s - W have been read), except for messages that only some
// segments have; these few are kept as `early`.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "call.hpp"
#include "endpoint.hpp"
#include "reduce.hpp"
#include "team.hpp"
#include "trace.hpp"
#include "wait.hpp"

namespace multiring {

class Lane {
  public:
    explicit Lane(Endpoint& endpoint);
    ~Lane();

    // Under the communicator's mutex: take up an operation, and what arrived for it; let go of it.
    void begin(const Call& call);
    void accept(const Delivery& delivery);
    void end();
    bool is_active() const { return active_; }

    // Run what can be run; true if anything was.
    bool advance();
    bool finished() const {
        return base_ == segment_count_ && held_.empty() && (!call_.transfer || call_.transfer->has_left());
    }
    // True if the next event rings no bell: the device's part, or the team's.
    bool needs_polling() const {
        return active_ && call_.transfer && (shared_count_ != 0 || next_ == segment_count_ || !is_here(next_));
    }
    const Call& call() const { return call_; }  // the current or last one
    void postpone(Clock::time_point deadline) { call_.deadline = deadline; }
    const Installed& installed() const { return *call_.installed; }
    bool flush();

    // The ranks that hold it up, ascending.
    std::vector<int> waited_for() const;
    // The first of them in schedule order, by the transport to it; nullptr if there is none.
    Transport* held_up_by() const { return held_up_by(base_); }
    // Tell these ranks which call this is: one that is in another call reports the mismatch.
    void tell_waiting() const;
    std::size_t bytes_left() const {  // bytes of the buffer in segments that are not done
        const std::size_t done = std::min(call_.count, base_ * slice_);
        return static_cast<std::size_t>(schedule_->blocks) * (call_.count - done) * itemsize_;
    }

    const Signature& signature() const { return signature_; }  // that of the current or last operation
    bool released(int peer, std::uint32_t index);  // false if nothing of that index is outstanding at that peer
    bool outstanding() const { return outstanding_.load(std::memory_order_acquire) != 0; }
    std::atomic<bool> driven_by_progress{false};

  private:
    struct Row {
        std::uint32_t segment;
        std::uint32_t next;  // instruction
        bool done;
        bool shared;  // the team is at it
    };
    using Sources = std::vector<const void*>;
    struct Shared {  // what a row shares with the team
        TeamTask task;
        Sources sources;
        Clock::duration took{};
    };
    struct Arrival {
        std::atomic<const std::byte*> data{nullptr};
        Transport* from = nullptr;
        std::uint32_t token = 0;
    };
    struct Held {  // a message that waits for a grant
        Frame frame;
        const std::byte* payload;
        Transport* to;
        std::uint32_t peer;
    };
    using Extent = SliceLayout::Extent;
    using ReaderMark = std::atomic<std::uint32_t>;  // a world rank, plus one; 0 when it has read

    bool prepare();
    void take_slots();
    void grow_staging(std::size_t needed, std::size_t wanted);
    bool grow_for_speed(std::size_t needed, std::size_t wanted);
    void stage_in(void* memory, std::size_t bytes, std::size_t spare);
    void release_staging();
    bool step(std::uint32_t segment);
    bool row_is_clear(std::uint32_t segment) const;
    bool is_here(std::uint32_t segment) const { return !call_.transfer || call_.transfer->is_filled(segment); }
    void retire_rows();
    bool ready(const Row& row, const Instruction& in) const;
    bool has_left(const Row& row) const;
    template <class Visit>
    void visit_missing(std::uint32_t segment, const Visit& visit) const;
    template <class Visit>
    void visit_readers(std::size_t first, std::size_t count, const Visit& visit) const;
    Transport* held_up_by(std::uint32_t segment) const;
    void trace_progress(const Row& row);
    const std::atomic<const std::byte*>& arrived(std::uint32_t segment, const Message& message) const {
        return arrival(segment, message.index).data;
    }
    std::span<const Message> messages(const Instruction& in) const {
        return {schedule_->messages.data() + in.first_message, in.message_count};
    }
    void send(const Row& row, const Instruction& in, const Extent& extent);
    Arrival& arrival_of(const Row& row, const Instruction& in, std::uint32_t i) const;
    float* residual(const Row& row, const Instruction& in, const Extent& extent) const;
    void settle(const Row& row, const Instruction& in, const Extent& extent);
    Clock::duration combine(const Row& row, const Instruction& in, const Extent& extent, Sources& sources);
    bool has_read_what_was_sent(const Row& row, const Instruction& in);
    void give_back(const Row& row, const Instruction& in, const Extent& extent, Clock::duration took);
    bool share(Row& row, const Instruction& in, const Extent& extent);
    void wait_for_team();
    void take_early();
    void accept_data(const Delivery& delivery);
    bool open();
    void ask(std::uint32_t peer);
    bool post(Held& message);  // false if it has to wait
    bool post_held();
    void announce_window();
    Frame frame_of(FrameType type) const;

    const SliceLayout& layout(std::uint32_t segment) const {
        return segment + 1 == segment_count_ ? *last_layout_ : *full_layout_;
    }
    std::size_t place(const Row& row, const Instruction& in, const Extent& extent) const {  // in the buffer
        return in.block * call_.count + row.segment * slice_ + extent.first;
    }
    std::byte* address(const Row& row, const Instruction& in, const Extent& extent) const {
        if (call_.transfer) return call_.transfer->at(row.segment, in.block) + extent.first * itemsize_;
        return call_.pointer + place(row, in, extent) * itemsize_;
    }
    Arrival& arrival(std::uint32_t segment, std::uint32_t index) const {
        return arrivals_[(segment % (2 * rows_in_use_)) * schedule_->arrival_count + index];
    }
    // Slot of its staging. The segment that had it before has been read: it was W segments ago or more, or in another
    // call.
    std::size_t slot(std::uint32_t segment) const { return (first_slot_ + segment) % slots_; }
    ReaderMark& unread(std::uint32_t segment, const Message& message) const {
        return unread_[(segment % rows_in_use_) * schedule_->departure_count + message.index];
    }
    // True if the send's bytes are copied for its readers, so that the caller's are free at once. Two ranks that
    // exchange the same bytes would otherwise both wait for the other to have read before they overwrite. (What a later
    // phase overwrites has been read by then: the new bytes are made of the old ones.)
    bool is_staged(const Instruction& in) const {
        return is_narrow(in) || (call_.installed->send_is_shared[in.send_index] && (!in_arena_ || in.exchanged));
    }
    // True if the messages are narrower than the elements.
    bool is_narrow(const Instruction& in) const { return narrows_ && in.wire != Wire::same; }
    std::size_t message_bytes(const Instruction& in, const Extent& extent) const {
        return is_narrow(in) ? narrow_bytes(in.wire, extent.count) : extent.count * itemsize_;
    }
    std::size_t arrival_bytes(std::uint32_t segment, std::uint32_t index) const {
        const std::size_t bytes = layout(segment).arrival_bytes[index];
        const Wire wire = narrows_ ? schedule_->arrival_wires[index] : Wire::same;
        return wire == Wire::same ? bytes : narrow_bytes(wire, bytes / itemsize_);
    }
    static void copy_paced(std::byte* destination, const std::byte* source, std::size_t bytes,
                           StreamingStoreTuner& tuner);
    void reduce(const Instruction& in, void* destination, std::size_t count, const Sources& sources,
                float* residual = nullptr);
    void reduce_paced(const Instruction& in, std::byte* destination, std::size_t count, Sources& sources,
                      StreamingStoreTuner& tuner);
    double divisor(const Instruction& in) const;
    // True while the send's bytes are read where the caller keeps them.
    bool is_leaving(const Row& row, const Instruction& in) const;

    Endpoint& endpoint_;
    std::uint32_t id_;  // in Executor's table, for tokens

    // the current operation
    bool active_ = false;
    Call call_{};
    Signature signature_{};
    std::shared_ptr<const Schedule> schedule_;
    std::shared_ptr<const SliceLayout> full_layout_, last_layout_;
    Reduction reduction_ = nullptr;
    std::size_t itemsize_ = 1, slice_ = 0;
    std::uint32_t segment_count_ = 0, rows_in_use_ = 1;
    bool in_arena_ = false, streaming_ = false, prepared_ = false, gave_back_ = false;
    bool spoilt_ = false;   // what was read is not what was sent: the call cannot end well
    bool narrows_ = false;  // the schedule's wires hold: float32 is summed
    Clock::time_point began_{};
    std::unique_ptr<LaneTracer> tracer_;  // if the endpoint traces
    std::uint32_t base_ = 0, next_ = 0;   // segments in flight: [base_, next_)
    std::atomic<std::uint32_t> limit_{0};
    std::atomic<bool> has_early_{false};
    std::vector<Delivery> early_;
    Sources sources_;
    Team* team_ = nullptr;              // helps the current operation, if any
    std::unique_ptr<Shared[]> shared_;  // indexed by row
    std::size_t shared_capacity_ = 0;
    std::uint32_t shared_count_ = 0;  // rows that the team is at

    // flow control, where peers do not share memory
    bool bulk_ = false;    // segments wait for grants; otherwise messages use the eager credit
    bool opened_ = false;  // a send within the host: its staging may be filled; an empty receive: it was sent
    std::atomic<bool> heard_{false};                         // an empty receive: the sender's frame is here
    bool eager_ = false;                                     // and it used the eager credit
    std::uint32_t announced_ = 0;                            // segments that we have granted to those that send to us
    std::unique_ptr<std::atomic<std::uint32_t>[]> granted_;  // indexed by transport: segments that it takes
    std::size_t granted_capacity_ = 0;
    std::vector<bool> asked_;  // indexed by transport
    std::vector<Held> held_;

    // kept from operation to operation
    std::vector<Row> rows_;
    std::unique_ptr<Arrival[]> arrivals_;
    std::size_t arrival_capacity_ = 0;
    std::unique_ptr<ReaderMark[]> unread_;  // indexed by (row, departure): who has not read it yet
    std::size_t unread_capacity_ = 0;
    std::atomic<std::uint32_t> outstanding_{0};  // how many are unread
    std::byte* staging_ = nullptr;
    std::size_t staging_bytes_ = 0, spare_bytes_ = 0;  // the second of the endpoint's
    bool spare_refused_ = false;
    std::size_t next_slot_at_ = 0;
    std::size_t slot_bytes_ = 0, slots_ = 1, first_slot_ = 0;  // layout of the current operation
};

}  // namespace multiring
