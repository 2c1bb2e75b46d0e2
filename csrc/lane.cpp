#include "lane.hpp"

#include <algorithm>
#include <utility>

namespace multiring {
namespace {

constexpr std::uint32_t most_unread = 1 << 16;  // a token has 16 bits for the lane and 16 for the message
constexpr std::size_t most_eager_bytes = std::size_t{64} << 10;  // a larger operation waits for grants
// A small arena buffer is copied all the same: that is quicker than to wait until peers have read it.
constexpr std::size_t fewest_bytes_in_place = std::size_t{32} << 10;
// Fewer are read in less time than it takes to look at the clock before and after.
constexpr std::size_t fewest_bytes_timed = 1024;
// Buffers that do not stay in the cache anyway: what is stored goes past it. What is summed is in it, to be read.
constexpr std::size_t streaming_bytes = std::size_t{4} << 20;
// The team has it a microsecond after it was posted, in which a core sums a few kilobytes.
constexpr std::size_t fewest_bytes_shared = std::size_t{64} << 10;
// A lane whose calls are small stays small.
constexpr std::size_t most_times_needed = 64;

}  // namespace

Lane::Lane(Endpoint& endpoint) : endpoint_(endpoint), id_(endpoint.register_lane(*this)) {
    if (endpoint.trace) tracer_ = std::make_unique<LaneTracer>(*endpoint.trace, id_);
}

Lane::~Lane() {
    endpoint_.unregister_lane(id_);
    release_staging();
}

void Lane::begin(const Call& call) {
    call_ = call;
    schedule_ = call.installed->schedule;
    signature_ = signature_of(call, endpoint_.generation);
    itemsize_ = itemsize(call.dtype);
    slice_ = schedule_->slice_elements(itemsize_);
    segment_count_ = static_cast<std::uint32_t>(std::max<std::size_t>(1, (call.count + slice_ - 1) / slice_));
    const std::size_t last_slice = call.count - (segment_count_ - 1) * slice_;
    last_layout_ = schedule_->layout(last_slice, itemsize_);
    full_layout_ = segment_count_ == 1 ? last_layout_ : schedule_->layout(slice_, itemsize_);
    reduction_ = find_reduction(call.dtype, call.op);
    narrows_ = schedule_->narrows && call.dtype == Dtype::float32 && (call.op == Op::sum || call.op == Op::avg);

    const std::size_t bytes = static_cast<std::size_t>(schedule_->blocks) * call.count * itemsize_;
    std::size_t rows = schedule_->window;
    if (schedule_->departure_count != 0)
        rows = std::clamp<std::size_t>(most_unread / schedule_->departure_count, 1, rows);
    rows_in_use_ = static_cast<std::uint32_t>(std::min<std::size_t>(rows, segment_count_));
    in_arena_ = bytes >= fewest_bytes_in_place && (call.transfer || endpoint_.arena->contains(call.pointer, bytes));
    streaming_ = bytes >= streaming_bytes;

    const std::size_t arrivals = 2 * std::size_t{rows_in_use_} * schedule_->arrival_count;
    if (arrivals > arrival_capacity_) {
        arrivals_ = std::make_unique<Arrival[]>(arrivals);
        arrival_capacity_ = arrivals;
    }
    rows_.assign(rows_in_use_, Row{});
    team_ = call.transfer ? endpoint_.team.load(std::memory_order_acquire) : nullptr;
    if (team_ != nullptr && rows_in_use_ > shared_capacity_) {
        shared_ = std::make_unique<Shared[]>(rows_in_use_);
        shared_capacity_ = rows_in_use_;
    }
    held_.clear();
    base_ = next_ = 0;
    limit_.store(2 * rows_in_use_, std::memory_order_relaxed);
    prepared_ = spoilt_ = false;
    const bool is_empty = call.count == 0;  // a message without bytes is a frame that asks
    if (call.collective == Collective::send)
        opened_ = is_empty || call.installed->any_direct;
    else
        opened_ = !(is_empty && call.collective == Collective::recv);
    heard_.store(false, std::memory_order_relaxed);
    eager_ = false;
    if (call.installed->any_direct || call.is_point()) {
        const std::size_t transports = call.installed->transports.size();
        if (transports > granted_capacity_) {
            granted_ = std::make_unique<std::atomic<std::uint32_t>[]>(transports);
            granted_capacity_ = transports;
        }
        for (std::size_t i = 0; i < transports; ++i) granted_[i].store(0, std::memory_order_relaxed);
        asked_.assign(transports, false);
        announced_ = 0;
        bulk_ = bytes > most_eager_bytes;
    }
    if (tracer_) tracer_->begin(call, bytes, schedule_->plan, rows_in_use_);
    active_ = true;
    began_ = Clock::now();
}

void Lane::end() {
    if (shared_count_ != 0) wait_for_team();  // the call has failed
    if (finished()) {
        const auto took = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began_);
        const auto count = [&](Record& record) {
            record.operations.fetch_add(1, std::memory_order_relaxed);
            record.bytes.fetch_add(schedule_->blocks * call_.count * itemsize_, std::memory_order_relaxed);
            record.nanoseconds.fetch_add(static_cast<std::uint64_t>(took.count()), std::memory_order_relaxed);
        };
        count(call_.installed->record);
        if (!call_.installed->communicator->is_internal())
            count(endpoint_.done[static_cast<std::size_t>(call_.collective)]);
    }
    if (tracer_) tracer_->end(began_, finished());
    active_ = false;
    call_.transfer.reset();
    driven_by_progress.store(false, std::memory_order_relaxed);
    if (!call_.installed->communicator->is_internal())
        endpoint_.segments.fetch_add(segment_count_, std::memory_order_relaxed);
}

// Readers must be done with the lane's previous collective before its staging changes shape.
bool Lane::prepare() {
    if (outstanding()) return false;
    const std::size_t departures = std::size_t{rows_in_use_} * schedule_->departure_count;
    if (departures > unread_capacity_) {
        unread_ = std::make_unique<ReaderMark[]>(departures);
        unread_capacity_ = departures;
    }
    const bool stages = narrows_ || (call_.installed->any_shared && (!in_arena_ || schedule_->exchanges));
    // The last segment is shorter and may yet need a line more: cuts are rounded down.
    slot_bytes_ = std::max(full_layout_->staging_bytes, last_layout_->staging_bytes);
    if (stages && slot_bytes_ != 0) take_slots();
    return prepared_ = true;
}

// More than the rows need, and these go around from call to call: a line that is written while a peer's nearest caches
// still have it must be taken away from there first. Slots that fill these caches between them are quicker.
void Lane::take_slots() {
    const std::size_t needed = rows_in_use_ * slot_bytes_;
    // Not for the job's own calls, which are few, nor in the lanes of messages, which are as many as these.
    const bool is_own = call_.installed->communicator->is_internal();
    const bool goes_around = call_.installed->any_shared && !is_own && !call_.is_point();
    const std::size_t most = goes_around ? endpoint_.spare_staging.of_a_lane() : 0;
    const std::size_t wanted = spare_refused_ ? 0 : std::min(most, most_times_needed * needed);
    if (std::max(needed, wanted) > staging_bytes_) grow_staging(needed, wanted);
    slots_ = std::max(needed, std::min(most, staging_bytes_)) / slot_bytes_;
    first_slot_ = (next_slot_at_ + slot_bytes_ - 1) / slot_bytes_ % slots_;
    next_slot_at_ = slot(segment_count_) * slot_bytes_;
}

// `needed` bytes are required; `wanted` only adds speed.
void Lane::grow_staging(std::size_t needed, std::size_t wanted) {
    if (wanted > std::max(needed, staging_bytes_) && grow_for_speed(needed, wanted)) return;
    if (needed <= staging_bytes_) return;
    release_staging();
    stage_in(endpoint_.arena->allocate(needed, Arena::Purpose::mapped), needed, 0);
}

bool Lane::grow_for_speed(std::size_t needed, std::size_t wanted) {
    const std::size_t spare = wanted - needed, more = spare > spare_bytes_ ? spare - spare_bytes_ : 0;
    const bool has_room = endpoint_.arena->allocated_bytes() < endpoint_.arena->size() / 2;
    if (more > 0 && !(has_room && endpoint_.spare_staging.take(more))) return false;
    void* grown = nullptr;
    try {
        grown = endpoint_.arena->allocate(wanted, Arena::Purpose::mapped);
    } catch (const EngineError&) {  // no hole is as large, or the machine's memory is full
        endpoint_.spare_staging.give_back(more);
        spare_refused_ = true;  // to try again in every call would take longer than what it is for
        return false;
    }
    spare_bytes_ = spare_bytes_ + more - spare;  // what is not needed beside the new
    release_staging();
    stage_in(grown, wanted, spare);
    return true;
}

void Lane::stage_in(void* memory, std::size_t bytes, std::size_t spare) {
    staging_ = static_cast<std::byte*>(memory);
    staging_bytes_ = bytes;
    spare_bytes_ = spare;
}

void Lane::release_staging() {
    if (staging_ != nullptr) endpoint_.arena->release(std::exchange(staging_, nullptr));
    staging_bytes_ = 0;
    endpoint_.spare_staging.give_back(std::exchange(spare_bytes_, 0));
}

bool Lane::advance() {
    bool progressed = false;
    if (!call_.installed->granted_sources.empty()) announce_window();
    if (!held_.empty()) progressed |= post_held();
    if (call_.count == 0 && call_.collective == Collective::send) ask(0);
    if (!opened_ && !open()) return progressed;
    if (!prepared_) {
        if (!prepare()) return false;
        progressed = true;
    }
    if (has_early_.load(std::memory_order_acquire)) take_early();
    for (std::uint32_t segment = base_; segment != next_; ++segment) progressed |= step(segment);
    retire_rows();
    while (next_ != segment_count_ && next_ - base_ < rows_in_use_ && row_is_clear(next_) && is_here(next_)) {
        rows_[next_ % rows_in_use_] = {next_, 0, false, false};
        if (tracer_) tracer_->start(next_ % rows_in_use_, next_);
        step(next_++);
        retire_rows();
        progressed = true;
    }
    if (gave_back_) {
        gave_back_ = false;
        flush();
    }
    return progressed;
}

void Lane::retire_rows() {
    const std::uint32_t before = base_;
    while (base_ != next_ && rows_[base_ % rows_in_use_].done) ++base_;
    if (base_ == before) return;
    limit_.store(base_ + 2 * rows_in_use_, std::memory_order_release);
    if (call_.transfer) call_.transfer->complete_below(base_);
}

bool Lane::row_is_clear(std::uint32_t segment) const {
    if (!outstanding()) return true;
    const auto* first = &unread_[(segment % rows_in_use_) * schedule_->departure_count];
    return std::none_of(first, first + schedule_->departure_count,
                        [](const auto& unread) { return unread.load(std::memory_order_acquire) != 0; });
}

// Run one segment's list as far as it goes.
bool Lane::step(std::uint32_t segment) {
    Row& row = rows_[segment % rows_in_use_];
    if (row.done || spoilt_) return false;
    const auto& instructions = schedule_->instructions;
    const std::uint32_t before = row.next;
    for (; row.next < instructions.size(); ++row.next) {
        const Instruction& in = instructions[row.next];
        const Extent& extent = layout(segment).extents[row.next];
        if (extent.count == 0) continue;  // neither side has this message
        const bool sends = in.kind == InstructionKind::send;
        if (!sends && !in.waits() && residual(row, in, extent) == nullptr) continue;
        if (tracer_) tracer_->enter(segment % rows_in_use_, in.phase);
        if (sends) {
            send(row, in, extent);
        } else if (!in.waits()) {
            if (!ready(row, in)) break;
            settle(row, in, extent);
        } else if (row.shared) {
            const Shared& shared = shared_[segment % rows_in_use_];
            if (!shared.task.is_done()) break;
            row.shared = false;
            --shared_count_;
            if (!has_read_what_was_sent(row, in)) return false;
            give_back(row, in, extent, shared.took);
        } else {
            if (!ready(row, in)) break;
            if (tracer_) tracer_->go_on(segment % rows_in_use_);
            if (share(row, in, extent)) return true;
            const Clock::duration took = combine(row, in, extent, sources_);
            if (!has_read_what_was_sent(row, in)) return false;
            give_back(row, in, extent, took);
        }
    }
    row.done = row.next == instructions.size() && has_left(row);
    if (tracer_) trace_progress(row);
    return row.done || row.next != before;
}

bool Lane::is_leaving(const Row& row, const Instruction& in) const {
    if (in.kind != InstructionKind::send) return false;
    const bool staged = is_staged(in);
    if (is_narrow(in) || (staged && !call_.installed->send_is_direct[in.send_index])) return false;
    Transport* const* transports = call_.installed->message_transports.data() + in.first_message;
    const auto its = messages(in);
    for (std::size_t i = 0; i < its.size(); ++i) {
        // Peers in shared memory read the staged copy; waiting for them would deadlock two ranks that exchange.
        if (staged && transports[i]->shares_memory()) continue;
        if (unread(row.segment, its[i]).load(std::memory_order_acquire) != 0) return true;
    }
    return false;
}

// True if all spans sent in place may be overwritten.
bool Lane::has_left(const Row& row) const {
    if (!outstanding()) return true;
    const auto& all = schedule_->instructions;
    return std::none_of(all.begin(), all.end(), [&](const Instruction& in) { return is_leaving(row, in); });
}

bool Lane::ready(const Row& row, const Instruction& in) const {
    for (const Message& message : messages(in))
        if (arrived(row.segment, message).load(std::memory_order_acquire) == nullptr) return false;
    if (!outstanding()) return true;
    for (std::uint32_t b = in.first_blocker; b < in.first_blocker + in.blocker_count; ++b)
        if (is_leaving(row, schedule_->instructions[schedule_->blockers[b]])) return false;
    return true;
}

void Lane::send(const Row& row, const Instruction& in, const Extent& extent) {
    const std::byte* data = address(row, in, extent);
    const std::size_t bytes = message_bytes(in, extent);
    Frame frame = frame_of(FrameType::data);
    frame.segment = row.segment;
    frame.bytes = static_cast<std::uint32_t>(bytes);
    const bool is_shared = call_.installed->send_is_shared[in.send_index];
    const std::byte* read_at = data;
    if (is_staged(in)) {
        std::byte* staged = staging_ + slot(row.segment) * slot_bytes_ + extent.staging;
        if (is_narrow(in)) {
            narrow(in.wire, staged, reinterpret_cast<const float*>(data), extent.count);
        } else {
            Transport& reader = *call_.installed->message_transports[in.first_message];
            copy_paced(staged, data, bytes,
                       bytes < reader.staging.fewest_bytes() ? reader.staging_small : reader.staging);
        }
        read_at = staged;
    }
    if (is_shared) frame.argument = endpoint_.arena->offset(read_at);
    if (is_narrow(in)) data = read_at;
    outstanding_.fetch_add(in.message_count, std::memory_order_relaxed);
    Transport* const* transports = call_.installed->message_transports.data() + in.first_message;
    const auto its = messages(in);
    for (std::size_t i = 0; i < its.size(); ++i) {
        ReaderMark& mark = unread(row.segment, its[i]);
        mark.store(static_cast<std::uint32_t>(transports[i]->peer) + 1, std::memory_order_relaxed);
        frame.ordinal = its[i].ordinal;
        frame.token = id_ << 16 | static_cast<std::uint32_t>(&mark - unread_.get());
        if (transports[i]->shares_memory()) {
            transports[i]->post(frame, data);
        } else {
            Held message{frame, data, transports[i], call_.installed->message_peers[in.first_message + i]};
            if (!post(message)) held_.push_back(message);
        }
    }
    for (std::size_t i = 0; i < its.size(); ++i) transports[i]->notify();
}

void Lane::copy_paced(std::byte* destination, const std::byte* source, std::size_t bytes, StreamingStoreTuner& tuner) {
    const bool streams = bytes >= tuner.fewest_bytes() && tuner.streams();
    const auto write = streams ? copy_streaming : copy;
    if (bytes < tuner.fewest_bytes() || !tuner.is_due()) return write(destination, source, bytes);
    const auto start = Clock::now();
    write(destination, source, bytes);
    tuner.note(streams, bytes, Clock::now() - start);
}

Frame Lane::frame_of(FrameType type) const {
    Frame frame;
    frame.type = type;
    frame.sign(signature_);
    frame.communicator = call_.installed->communicator->id;
    frame.incarnation = call_.installed->communicator->incarnation;
    frame.number = call_.number;
    return frame;
}

// Send a message to a peer of another host if it is granted or there is credit.
bool Lane::post(Held& message) {
    const bool granted = message.frame.segment < granted_[message.peer].load(std::memory_order_acquire);
    if (!granted && (bulk_ || !message.to->take_credit(message.frame.bytes))) {
        if (!bulk_ || call_.is_point()) ask(message.peer);
        return false;
    }
    message.frame.argument = granted ? 0 : 1;
    message.to->post(message.frame, message.payload);
    return true;
}

void Lane::ask(std::uint32_t peer) {
    if (asked_[peer]) return;
    asked_[peer] = true;
    Transport* transport = call_.installed->transports[peer];
    transport->post(frame_of(FrameType::ask), nullptr);
    transport->notify();
}

// A send within the host fills its staging only when the receiver has a use for it, or at most the eager credit.
bool Lane::open() {
    if (call_.collective == Collective::recv) return opened_ = heard_.load(std::memory_order_acquire);
    Transport* transport = call_.installed->transports.front();
    const std::size_t bytes = call_.count * itemsize_;
    if (granted_[0].load(std::memory_order_acquire) != 0)
        opened_ = true;
    else if (!bulk_)
        opened_ = eager_ = transport->take_credit(bytes);
    if (!opened_) ask(0);
    return opened_;
}

bool Lane::post_held() {
    return std::erase_if(held_, [&](Held& message) { return post(message); }) != 0;
}

// Let those that send to us know how far they may go, some time before they get there.
void Lane::announce_window() {
    if (!bulk_ || announced_ == segment_count_) return;
    const std::uint32_t end = std::min(segment_count_, base_ + rows_in_use_);
    if (announced_ != 0 && end != segment_count_ && end - announced_ < (rows_in_use_ + 1) / 2) return;
    announced_ = end;
    Frame grant = frame_of(FrameType::grant);
    grant.segment = end;
    for (Transport* source : call_.installed->granted_sources) {
        source->post(grant, nullptr);
        source->notify();
    }
}

Lane::Arrival& Lane::arrival_of(const Row& row, const Instruction& in, std::uint32_t i) const {
    return arrival(row.segment, schedule_->messages[in.first_message + i].index);
}

// The residual of a span's elements; nullptr where the call has none, or nothing of it is rounded.
float* Lane::residual(const Row& row, const Instruction& in, const Extent& extent) const {
    return narrows_ && call_.residual != nullptr ? call_.residual + place(row, in, extent) : nullptr;
}

// Round the values of a contribution that travel, once and in place: nothing is lost on the way after it.
void Lane::settle(const Row& row, const Instruction& in, const Extent& extent) {
    auto* values = reinterpret_cast<float*>(address(row, in, extent));
    if (in.kind == InstructionKind::repay)
        repay(values, residual(row, in, extent), extent.count);
    else
        round(in.wire, values, residual(row, in, extent), extent.count);
}

// Sum or keep what has arrived. A thread of the team may do it, for several rows at once.
Clock::duration Lane::combine(const Row& row, const Instruction& in, const Extent& extent, Sources& sources) {
    std::byte* destination = address(row, in, extent);
    const std::size_t bytes = message_bytes(in, extent);
    std::optional<Clock::time_point> start;
    if (bytes >= fewest_bytes_timed) start = Clock::now();
    const auto data_of = [&](std::uint32_t i) { return arrival_of(row, in, i).data.load(std::memory_order_relaxed); };
    Transport& first = *arrival_of(row, in, 0).from;
    if (in.kind == InstructionKind::store) {
        const std::byte* data = data_of(0);
        if (is_narrow(in)) {
            widen(in.wire, reinterpret_cast<float*>(destination), data, extent.count);
        } else if (streaming_ && !in.sent_on) {
            copy_streaming(destination, data, bytes);
        } else if (in_arena_ && !in.sent_on && first.shares_memory()) {
            copy_paced(destination, data, bytes, first.storing);
        } else {
            copy(destination, data, bytes);
        }
    } else {
        sources.clear();
        for (std::uint32_t i = 0; i < in.message_count; ++i) {
            if (in.has_own && i == in.own_place) sources.push_back(destination);
            sources.push_back(data_of(i));
        }
        if (in.has_own && in.own_place == in.message_count) sources.push_back(destination);
        const bool is_plain = !is_narrow(in) && in.rounded == Wire::same;
        if (in_arena_ && !streaming_ && is_plain && bytes >= StreamingStoreTuner::sums.fewest_bytes &&
            first.shares_memory())
            reduce_paced(in, destination, extent.count, sources, first.summing);
        else
            reduce(in, destination, extent.count, sources, in.keeps ? residual(row, in, extent) : nullptr);
    }
    return start ? Clock::now() - *start : Clock::duration{};
}

// A peer whose call has failed may overwrite what it sent while it is read, and a rank that is stopped may read it much
// later. So after reading, the sender's mark is checked before the result is passed on.
bool Lane::has_read_what_was_sent(const Row& row, const Instruction& in) {
    for (std::uint32_t i = 0; i < in.message_count; ++i) {
        const Transport& from = *arrival_of(row, in, i).from;
        if (!from.is_given_up()) continue;
        spoilt_ = true;
        endpoint_.surroundings.suspect(
            from.peer, endpoint_.surroundings.rank_name(from.peer) + " has given up a call, and has not told why");
        return false;
    }
    return true;
}

// Give payloads that were read back to their senders.
void Lane::give_back(const Row& row, const Instruction& in, const Extent& extent, Clock::duration took) {
    const std::size_t bytes = message_bytes(in, extent);
    took /= std::max<std::uint32_t>(in.message_count, 1);
    for (std::uint32_t i = 0; i < in.message_count; ++i) {
        Arrival& read = arrival_of(row, in, i);
        if (took.count() != 0 && read.from->shares_memory()) read.from->count_busy(took);
        const Payload payload{read.data.load(std::memory_order_relaxed), read.token};
        read.data.store(nullptr, std::memory_order_release);
        read.from->give_back(payload, bytes);
    }
    gave_back_ = true;
}

// Let the team do it, if that pays; the row goes on when it has. What came over a socket lies in the caches of the core
// that read it, and what is made of it is sent by the same core.
bool Lane::share(Row& row, const Instruction& in, const Extent& extent) {
    if (team_ == nullptr || message_bytes(in, extent) < fewest_bytes_shared) return false;
    if (!arrival_of(row, in, 0).from->shares_memory()) return false;
    Shared& shared = shared_[row.segment % rows_in_use_];
    shared.task.run = [this, &row, &in, &extent, &shared] { shared.took = combine(row, in, extent, shared.sources); };
    row.shared = true;
    ++shared_count_;
    team_->post(shared.task);
    return true;
}

void Lane::wait_for_team() {
    for (const Row& row : rows_)
        while (row.shared && !shared_[row.segment % rows_in_use_].task.is_done()) pause();
    shared_count_ = 0;
}

double Lane::divisor(const Instruction& in) const {
    return in.final && call_.op == Op::avg ? static_cast<double>(call_.installed->communicator->members.size()) : 1.0;
}

void Lane::reduce(const Instruction& in, void* destination, std::size_t count, const Sources& sources,
                  float* residual) {
    if (narrows_ && (is_narrow(in) || in.rounded != Wire::same))
        reduce_narrow(reduction_, static_cast<float*>(destination), sources, count, divisor(in), in.wire, in.rounded,
                      residual);
    else
        reduction_(destination, sources.data(), static_cast<int>(sources.size()), count, divisor(in));
}

void Lane::reduce_paced(const Instruction& in, std::byte* destination, std::size_t count, Sources& sources,
                        StreamingStoreTuner& tuner) {
    const bool streams = tuner.streams();
    const auto start = Clock::now();
    if (!streams) {
        reduce(in, destination, count, sources);
    } else {
        alignas(64) std::byte sums[4096];  // stay in the nearest cache
        const std::size_t most = sizeof sums / itemsize_;
        for (std::size_t first = 0; first < count; first += most) {
            const std::size_t some = std::min(most, count - first);
            reduction_(sums, sources.data(), static_cast<int>(sources.size()), some, divisor(in));
            copy_streaming(destination + first * itemsize_, sums, some * itemsize_);
            for (const void*& source : sources) source = static_cast<const std::byte*>(source) + some * itemsize_;
        }
    }
    tuner.note(streams, sources.size() * count * itemsize_, Clock::now() - start);
}

bool Lane::flush() {
    bool clear = true;
    for (Transport* transport : call_.installed->transports) clear &= transport->flush();
    return clear;
}

void Lane::accept(const Delivery& delivery) {
    const Frame& frame = delivery.frame;
    if (frame.signature() != signature_) {
        endpoint_.mismatch(delivery, &signature_, std::max(age_of(call_), 1e-9));
        return;
    }
    if (frame.type == FrameType::waits) return;  // we agree
    if (frame.type == FrameType::data) {
        accept_data(delivery);
    } else if (frame.type == FrameType::ask && call_.count == 0) {
        heard_.store(true, std::memory_order_release);
    } else if (frame.type == FrameType::ask) {
        if (bulk_) return;  // it is granted as it goes on
        Frame grant = frame_of(FrameType::grant);
        grant.segment = segment_count_;
        delivery.from->post(grant, nullptr);
        delivery.from->notify();
    } else {
        const auto& transports = call_.installed->transports;
        const auto transport = std::find(transports.begin(), transports.end(), delivery.from);
        if (transport == transports.end() || !(call_.installed->any_direct || call_.is_point())) {
            endpoint_.garbage(delivery.from->peer, "a grant to a rank that sends it nothing");
            return;
        }
        // Over several connections grants may overtake each other.
        auto& granted = granted_[static_cast<std::size_t>(transport - transports.begin())];
        std::uint32_t before = granted.load(std::memory_order_relaxed);
        while (before < frame.segment &&
               !granted.compare_exchange_weak(before, frame.segment, std::memory_order_release)) {
        }
    }
    if (driven_by_progress.load(std::memory_order_relaxed)) endpoint_.surroundings.wake_progress();
}

void Lane::accept_data(const Delivery& delivery) {
    const Frame& frame = delivery.frame;
    if (frame.segment >= limit_.load(std::memory_order_acquire) && frame.segment < segment_count_) {
        early_.push_back(delivery);
        has_early_.store(true, std::memory_order_release);
        return;
    }
    const int member = call_.installed->communicator->member_of(delivery.from->peer);
    const std::uint32_t index = schedule_->arrival_of(static_cast<std::uint32_t>(member), frame.ordinal);
    if (frame.segment >= segment_count_ || index == Schedule::no_arrival ||
        arrival_bytes(frame.segment, index) != frame.bytes || delivery.payload.data == nullptr) {
        endpoint_.garbage(delivery.from->peer, "message " + std::to_string(frame.ordinal) + " of segment " +
                                                   std::to_string(frame.segment) + ", " + std::to_string(frame.bytes) +
                                                   " bytes, is not in the schedule of " + describe(call_));
        return;
    }
    Arrival& awaited = arrival(frame.segment, index);
    if (awaited.data.load(std::memory_order_relaxed) != nullptr) {
        endpoint_.garbage(delivery.from->peer, "message " + std::to_string(frame.ordinal) + " of segment " +
                                                   std::to_string(frame.segment) + " of " + describe(call_) + " twice");
        return;
    }
    awaited.from = delivery.from;
    awaited.token = delivery.payload.token;
    awaited.data.store(delivery.payload.data, std::memory_order_release);
}

void Lane::take_early() {
    const std::lock_guard lock(call_.installed->communicator->mutex);
    has_early_.store(false, std::memory_order_relaxed);
    std::vector<Delivery> again;
    again.swap(early_);
    for (const Delivery& delivery : again) accept(delivery);
}

bool Lane::released(int peer, std::uint32_t index) {
    std::uint32_t reader = static_cast<std::uint32_t>(peer) + 1;
    if (index >= unread_capacity_ || !unread_[index].compare_exchange_strong(reader, 0, std::memory_order_acq_rel))
        return false;
    if (eager_) call_.installed->transports.front()->return_credit(call_.count * itemsize_);
    outstanding_.fetch_sub(1, std::memory_order_acq_rel);
    if (driven_by_progress.load(std::memory_order_relaxed)) endpoint_.surroundings.wake_progress();
    return true;
}

// The ranks that a segment waits for: the receiver that has not called yet; those that still read an earlier call of
// this lane, or this row's earlier segment; or whose messages are to arrive; or else that have yet to read; and at the
// end those that have not granted the last messages.
template <class Visit>
void Lane::visit_missing(std::uint32_t segment, const Visit& visit) const {
    if (!opened_) return visit(call_.installed->transports.front()->peer);
    if (!prepared_ && outstanding()) return visit_readers(0, unread_capacity_, visit);
    if (segment == segment_count_) {
        for (const Held& message : held_) visit(message.to->peer);
        return;
    }
    const bool has_begun = segment != next_;
    if (!has_begun && !is_here(segment)) return;  // this rank's own device
    const std::size_t departures = schedule_->departure_count;
    if (!has_begun && !row_is_clear(segment))
        return visit_readers(segment % rows_in_use_ * departures, departures, visit);
    const auto& all = schedule_->instructions;
    const auto& members = call_.installed->communicator->members;
    std::size_t at = has_begun ? rows_[segment % rows_in_use_].next : 0;
    while (at < all.size() && !all[at].waits()) ++at;
    bool found = false;
    if (at < all.size())
        for (const Message& message : messages(all[at]))
            if (arrived(segment, message).load(std::memory_order_relaxed) == nullptr)
                found = true, visit(members[message.member]);
    if (found || !has_begun) return;
    for (const Instruction& in : all)
        if (is_leaving(rows_[segment % rows_in_use_], in))
            for (const Message& message : messages(in))
                if (unread(segment, message).load(std::memory_order_relaxed) != 0) visit(members[message.member]);
}

template <class Visit>
void Lane::visit_readers(std::size_t first, std::size_t count, const Visit& visit) const {
    for (std::size_t i = first; i < first + count; ++i)
        if (const std::uint32_t reader = unread_[i].load(std::memory_order_relaxed); reader != 0)
            visit(static_cast<int>(reader) - 1);
}

Transport* Lane::held_up_by(std::uint32_t segment) const {
    int first = -1;
    visit_missing(segment, [&](int rank) {
        if (first < 0) first = rank;
    });
    return first < 0 ? nullptr : endpoint_.transport(first);
}

void Lane::trace_progress(const Row& row) {
    if (row.done) {
        tracer_->finish(row.segment % rows_in_use_);
    } else {
        const Transport* by = held_up_by(row.segment);
        tracer_->hold_up(row.segment % rows_in_use_, by == nullptr ? -1 : by->peer);
    }
}

std::vector<int> Lane::waited_for() const {
    std::vector<int> ranks;
    visit_missing(base_, [&](int rank) { ranks.push_back(rank); });
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
}

void Lane::tell_waiting() const {
    Frame frame = frame_of(FrameType::waits);
    frame.argument = call_.collective == Collective::recv ? 1 : 0;
    const std::vector<int> ranks = waited_for();
    for (Transport* transport : call_.installed->transports) {
        if (!std::binary_search(ranks.begin(), ranks.end(), transport->peer)) continue;
        transport->post(frame, nullptr);
        transport->notify();
    }
}

}  // namespace multiring
