#include "machine.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace multiring {
namespace {

constexpr std::uint32_t most_lanes = 1 << 16;  // a token is a lane and an index, 16 bits each
constexpr std::uint32_t most_unread = 1 << 16;
// Of the buffer, in flight in a lane: what stays in the cache, and what keeps a network busy.
constexpr std::size_t window_bytes = std::size_t{1} << 20, network_window_bytes = std::size_t{4} << 20;
constexpr std::size_t most_eager_bytes = std::size_t{64} << 10;  // a larger operation waits for grants
constexpr std::size_t fewest_rows = 2, most_rows = 32;
// A small arena buffer is copied all the same: that is quicker than to wait until peers have read it.
constexpr std::size_t fewest_bytes_in_place = std::size_t{32} << 10;
constexpr std::size_t streaming_bytes = std::size_t{4} << 20;  // buffers that do not stay in the cache anyway

std::string quoted(std::uint64_t number) {
    return std::to_string(number);
}

}  // namespace

std::string Signature::describe() const {
    if (collective == Collective::barrier) return "barrier";
    return std::string(name(collective)) + "(count=" + quoted(count) + ", dtype=" + std::string(name(dtype)) +
           ", op=" + std::string(name(op)) + ", root=" + quoted(root) + ", plan=" + quoted(plan) +
           ", generation=" + quoted(generation) + ")";
}

std::string describe(const Call& call) {
    return std::string(name(call.collective)) + " number " + std::to_string(call.number) + " of communicator " +
           std::to_string(call.installed->communicator->id);
}

// ---- Communicator -------------------------------------------------------------------------------------------------

Communicator::Communicator(std::uint32_t id, std::vector<int> members_given, int self, Machine& machine)
    : id(id), members(std::move(members_given)), self(self) {
    for (std::size_t i = 0; i < members.size(); ++i) member_of_[members[i]] = static_cast<int>(i);
    for (std::uint64_t i = 0; i < lane_count; ++i) lanes_.push_back(std::make_unique<Lane>(machine, i));
}

int Communicator::member_of(int world_rank) const {
    const auto found = member_of_.find(world_rank);
    return found == member_of_.end() ? -1 : found->second;
}

// ---- Lane ---------------------------------------------------------------------------------------------------------

Lane::Lane(Machine& machine, std::uint64_t first_number)
    : machine_(machine), id_(machine.register_lane(*this)), next_number_(first_number) {}

Lane::~Lane() {
    machine_.unregister_lane(id_);
    if (staging_ != nullptr) machine_.arena->release(staging_);
}

void Lane::begin(const Call& call) {
    call_ = call;
    schedule_ = call.installed->schedule;
    signature_ = {call.count, schedule_->plan, call.root, call.collective, call.dtype, call.op, machine_.generation};
    itemsize_ = itemsize(call.dtype);
    slice_ = schedule_->slice_elements(itemsize_);
    segment_count_ = static_cast<std::uint32_t>(std::max<std::size_t>(1, (call.count + slice_ - 1) / slice_));
    const std::size_t last_slice = call.count - (segment_count_ - 1) * slice_;
    last_layout_ = schedule_->layout(last_slice, itemsize_);
    full_layout_ = segment_count_ == 1 ? last_layout_ : schedule_->layout(slice_, itemsize_);
    reduction_ = find_reduction(call.dtype, call.op);

    const std::size_t bytes = static_cast<std::size_t>(schedule_->blocks) * call.count * itemsize_;
    const std::size_t segment_bytes = static_cast<std::size_t>(schedule_->blocks) * slice_ * itemsize_;
    const std::size_t window = call.installed->any_direct ? network_window_bytes : window_bytes;
    std::size_t rows = std::clamp(window / segment_bytes, fewest_rows, most_rows);
    if (schedule_->departure_count != 0)
        rows = std::clamp<std::size_t>(most_unread / schedule_->departure_count, 1, rows);
    rows_in_use_ = static_cast<std::uint32_t>(std::min<std::size_t>(rows, segment_count_));
    in_arena_ = bytes >= fewest_bytes_in_place && machine_.arena->contains(call.pointer, bytes);
    streaming_ = bytes >= streaming_bytes;

    const std::size_t arrivals = 2 * std::size_t{rows_in_use_} * schedule_->arrival_count;
    if (arrivals > arrival_capacity_) {
        arrivals_ = std::make_unique<Arrival[]>(arrivals);
        arrival_capacity_ = arrivals;
    }
    rows_.resize(rows_in_use_);
    held_.clear();
    base_ = next_ = 0;
    limit_.store(2 * rows_in_use_, std::memory_order_relaxed);
    prepared_ = false;
    if (call.installed->any_direct) {
        const std::size_t links = call.installed->links.size();
        if (links > granted_capacity_) {
            granted_ = std::make_unique<std::atomic<std::uint32_t>[]>(links);
            granted_capacity_ = links;
        }
        for (std::size_t i = 0; i < links; ++i) granted_[i].store(0, std::memory_order_relaxed);
        asked_.assign(links, false);
        announced_ = 0;
        bulk_ = bytes > most_eager_bytes;
    }
    active_ = true;
    ended_.reset();
}

void Lane::end() {
    active_ = false;
    driven_by_progress.store(false, std::memory_order_relaxed);
    next_number_ = call_.number + Communicator::lane_count;
    machine_.segments.fetch_add(segment_count_, std::memory_order_relaxed);
    ended_.set();
}

// What the lane's previous collective left with its readers must be read before its staging changes shape.
bool Lane::prepare() {
    if (outstanding()) return false;
    const std::size_t departures = std::size_t{rows_in_use_} * schedule_->departure_count;
    if (departures > unread_capacity_) {
        unread_ = std::make_unique<std::atomic<bool>[]>(departures);
        unread_capacity_ = departures;
    }
    const std::size_t staging = rows_in_use_ * full_layout_->staging_bytes;
    if (call_.installed->any_shared && (!in_arena_ || schedule_->exchanges) && staging > staging_bytes_) {
        if (staging_ != nullptr) machine_.arena->release(staging_);
        staging_bytes_ = 0;
        staging_ = static_cast<std::byte*>(machine_.arena->allocate(staging));
        staging_bytes_ = staging;
    }
    return prepared_ = true;
}

bool Lane::advance() {
    bool progressed = false;
    if (call_.installed->any_direct) {
        announce_window();
        if (!held_.empty()) progressed |= post_held();
    }
    if (!prepared_) {
        if (!prepare()) return false;
        progressed = true;
    }
    if (has_early_.load(std::memory_order_acquire)) take_early();
    for (std::uint32_t segment = base_; segment != next_; ++segment) progressed |= step(segment);
    retire_rows();
    while (next_ != segment_count_ && next_ - base_ < rows_in_use_ && row_is_clear(next_)) {
        rows_[next_ % rows_in_use_] = {next_, 0, false};
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
    if (base_ != before) limit_.store(base_ + 2 * rows_in_use_, std::memory_order_release);
}

bool Lane::row_is_clear(std::uint32_t segment) const {
    if (!outstanding()) return true;
    const auto* first = &unread_[(segment % rows_in_use_) * schedule_->departure_count];
    return std::none_of(first, first + schedule_->departure_count,
                        [](const auto& unread) { return unread.load(std::memory_order_acquire); });
}

// Run one segment's list as far as it goes.
bool Lane::step(std::uint32_t segment) {
    Row& row = rows_[segment % rows_in_use_];
    if (row.done) return false;
    const auto& instructions = schedule_->instructions;
    const std::uint32_t before = row.next;
    for (; row.next < instructions.size(); ++row.next) {
        const Instruction& in = instructions[row.next];
        const Extent& extent = layout(segment).extents[row.next];
        if (extent.count == 0) continue;  // neither side has this message
        if (in.kind == Instruction::Kind::send) {
            send(row, in, extent);
        } else {
            if (!ready(row, in)) break;
            receive(row, in, extent);
        }
    }
    row.done = row.next == instructions.size() && has_left(row);
    return row.done || row.next != before;
}

bool Lane::is_leaving(const Row& row, const Instruction& in) const {
    if (in.kind != Instruction::Kind::send) return false;
    if (is_staged(in) && !call_.installed->send_is_direct[in.send_index]) return false;
    const auto its = messages(in);
    return std::any_of(its.begin(), its.end(), [&](const Message& message) {
        return unread(row.segment, message).load(std::memory_order_acquire);
    });
}

// Whether every span that was sent from where it lies is the caller's again.
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
    const std::size_t bytes = extent.count * itemsize_;
    Frame frame = frame_of(FrameType::data);
    frame.segment = row.segment;
    frame.bytes = static_cast<std::uint32_t>(bytes);
    if (call_.installed->send_is_shared[in.send_index]) {
        const std::byte* read_at = data;
        if (is_staged(in)) {
            std::byte* staged = staging_ + (row.segment % rows_in_use_) * full_layout_->staging_bytes + extent.staging;
            copy(staged, data, bytes);
            read_at = staged;
        }
        frame.place = machine_.arena->place(read_at);
    }
    outstanding_.fetch_add(in.message_count, std::memory_order_relaxed);
    Link* const* links = call_.installed->message_links.data() + in.first_message;
    const auto its = messages(in);
    for (std::size_t i = 0; i < its.size(); ++i) {
        std::atomic<bool>& mark = unread(row.segment, its[i]);
        mark.store(true, std::memory_order_relaxed);
        frame.ordinal = its[i].ordinal;
        frame.token = id_ << 16 | static_cast<std::uint32_t>(&mark - unread_.get());
        if (links[i]->shares_memory()) {
            links[i]->post(frame, data);
        } else {
            Held message{frame, data, links[i], call_.installed->message_peers[in.first_message + i]};
            if (!post(message)) held_.push_back(message);
        }
    }
    for (std::size_t i = 0; i < its.size(); ++i) links[i]->notify();
}

Frame Lane::frame_of(FrameType type) const {
    Frame frame;
    frame.type = type;
    frame.sign(signature_);
    frame.communicator = call_.installed->communicator->id;
    frame.number = call_.number;
    return frame;
}

// Send a message to a peer of another host if it is granted or there is credit.
bool Lane::post(Held& message) {
    const bool granted = message.frame.segment < granted_[message.peer].load(std::memory_order_acquire);
    if (!granted && (bulk_ || !message.to->take_credit(message.frame.bytes))) {
        if (!bulk_ && !asked_[message.peer]) {
            asked_[message.peer] = true;
            message.to->post(frame_of(FrameType::ask), nullptr);
        }
        return false;
    }
    message.frame.place = granted ? 0 : 1;
    message.to->post(message.frame, message.payload);
    return true;
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
    for (Link* source : call_.installed->direct_sources) source->post(grant, nullptr);
}

void Lane::receive(const Row& row, const Instruction& in, const Extent& extent) {
    std::byte* destination = address(row, in, extent);
    const std::size_t bytes = extent.count * itemsize_;
    const bool streaming = streaming_ && !in.sent_on;
    const auto arrival_of = [&](std::uint32_t i) -> Arrival& {
        return arrival(row.segment, schedule_->messages[in.first_message + i].index);
    };
    if (in.kind == Instruction::Kind::store) {
        const std::byte* data = arrival_of(0).data.load(std::memory_order_relaxed);
        if (data == destination) {
            // the link put it there
        } else if (streaming) {
            copy_streaming(destination, data, bytes);
        } else {
            copy(destination, data, bytes);
        }
    } else {
        sources_.clear();
        for (std::uint32_t i = 0; i < in.message_count; ++i) {
            if (in.has_own && i == in.own_place) sources_.push_back(destination);
            sources_.push_back(arrival_of(i).data.load(std::memory_order_relaxed));
        }
        if (in.has_own && in.own_place == in.message_count) sources_.push_back(destination);
        const double divisor =
            in.final && call_.op == Op::avg ? static_cast<double>(call_.installed->communicator->members.size()) : 1.0;
        reduction_(destination, sources_.data(), static_cast<int>(sources_.size()), extent.count, divisor, streaming);
    }
    for (std::uint32_t i = 0; i < in.message_count; ++i) {
        Arrival& read = arrival_of(i);
        const Payload payload{read.data.load(std::memory_order_relaxed), read.token};
        read.data.store(nullptr, std::memory_order_release);
        read.from->give_back(payload, bytes);
    }
    gave_back_ = true;
}

bool Lane::flush() {
    bool clear = true;
    for (Link* link : call_.installed->links) clear &= link->flush();
    return clear;
}

void Lane::accept(const Delivery& delivery) {
    const Frame& frame = delivery.frame;
    if (frame.signature() != signature_) {
        machine_.mismatch(delivery, signature_.describe());
        return;
    }
    if (frame.type == FrameType::data) {
        accept_data(delivery);
    } else if (frame.type == FrameType::ask) {
        Frame grant = frame_of(FrameType::grant);
        grant.segment = segment_count_;
        delivery.from->post(grant, nullptr);
    } else {
        const auto& links = call_.installed->links;
        const auto link = std::find(links.begin(), links.end(), delivery.from);
        if (link == links.end() || !call_.installed->any_direct) {
            machine_.garbage(delivery.from->peer, "a grant to a rank that sends it nothing");
            return;
        }
        granted_[static_cast<std::size_t>(link - links.begin())].store(frame.segment, std::memory_order_release);
    }
    if (driven_by_progress.load(std::memory_order_relaxed)) machine_.surroundings.wake_progress();
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
        layout(frame.segment).arrival_bytes[index] != frame.bytes || delivery.payload.data == nullptr) {
        machine_.garbage(delivery.from->peer, "message " + std::to_string(frame.ordinal) + " of segment " +
                                                  std::to_string(frame.segment) + ", " + std::to_string(frame.bytes) +
                                                  " bytes, is not in the schedule of " + describe(call_));
        return;
    }
    Arrival& slot = arrival(frame.segment, index);
    slot.from = delivery.from;
    slot.token = delivery.payload.token;
    slot.data.store(delivery.payload.data, std::memory_order_release);
}

void Lane::take_early() {
    const std::lock_guard lock(call_.installed->communicator->mutex);
    has_early_.store(false, std::memory_order_relaxed);
    std::vector<Delivery> again;
    again.swap(early_);
    for (const Delivery& delivery : again) accept(delivery);
}

bool Lane::released(std::uint32_t index) {
    if (index >= unread_capacity_ || !unread_[index].exchange(false, std::memory_order_acq_rel)) return false;
    outstanding_.fetch_sub(1, std::memory_order_acq_rel);
    if (driven_by_progress.load(std::memory_order_relaxed)) machine_.surroundings.wake_progress();
    return true;
}

std::vector<int> Lane::waited_for() const {
    std::vector<int> ranks;
    const auto wait_for = [&](const Message& message) {
        ranks.push_back(call_.installed->communicator->members[message.member]);
    };
    const std::uint32_t segment = base_;
    const auto& all = schedule_->instructions;
    std::size_t at = base_ == next_ ? 0 : rows_[segment % rows_in_use_].next;
    while (at < all.size() && all[at].kind == Instruction::Kind::send) ++at;
    if (at < all.size())
        for (const Message& message : messages(all[at]))
            if (arrived(segment, message).load(std::memory_order_relaxed) == nullptr) wait_for(message);
    if (ranks.empty() && base_ != next_)
        for (const Instruction& in : all)
            if (is_leaving(rows_[segment % rows_in_use_], in))
                for (const Message& message : messages(in))
                    if (unread(segment, message).load(std::memory_order_relaxed)) wait_for(message);
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
}

// ---- Machine ------------------------------------------------------------------------------------------------------

Machine::Machine(int rank, int world_size, std::uint16_t generation, std::shared_ptr<Arena> arena,
                 Surroundings& surroundings)
    : rank(rank),
      generation(generation),
      arena(std::move(arena)),
      surroundings(surroundings),
      world_size_(world_size),
      lanes_(std::make_unique<std::atomic<Lane*>[]>(most_lanes)),
      links_(std::make_unique<std::atomic<Link*>[]>(static_cast<std::size_t>(world_size))),
      attached_(std::make_unique<std::unique_ptr<Link>[]>(static_cast<std::size_t>(world_size))) {
    for (std::uint32_t id = most_lanes; id-- > 0;) free_lane_ids_.push_back(id);
}

Machine::~Machine() = default;

std::uint32_t Machine::register_lane(Lane& lane) {
    const std::lock_guard lock(lanes_mutex_);
    if (free_lane_ids_.empty())
        throw_resource_error("more than " + std::to_string(most_lanes / Communicator::lane_count) +
                             " communicators: forget those that are no longer used");
    const std::uint32_t id = free_lane_ids_.back();
    free_lane_ids_.pop_back();
    lanes_[id].store(&lane, std::memory_order_release);
    return id;
}

void Machine::unregister_lane(std::uint32_t id) {
    const std::lock_guard lock(lanes_mutex_);
    lanes_[id].store(nullptr, std::memory_order_release);
    free_lane_ids_.push_back(id);
}

void Machine::attach(std::unique_ptr<Link> link) {
    const std::lock_guard lock(mutex_);
    auto& entry = links_[static_cast<std::size_t>(link->peer)];
    if (entry.load(std::memory_order_relaxed) != nullptr)
        throw std::invalid_argument("rank " + std::to_string(link->peer) + " is attached already");
    entry.store(link.get(), std::memory_order_release);
    const std::size_t count = attached_count_.load(std::memory_order_relaxed);
    attached_[count] = std::move(link);
    attached_count_.store(count + 1, std::memory_order_release);
}

void Machine::add_communicator(std::uint32_t id, std::vector<int> members) {
    const auto own = std::find(members.begin(), members.end(), rank);
    if (own == members.end())
        throw std::invalid_argument("rank " + std::to_string(rank) + " is not a member of communicator " +
                                    std::to_string(id));
    for (const int member : members)
        if (member < 0 || member >= world_size_ || std::count(members.begin(), members.end(), member) != 1)
            throw std::invalid_argument("communicator " + std::to_string(id) + ": member " + std::to_string(member) +
                                        " is named twice or not in a world of " + std::to_string(world_size_));
    const std::lock_guard lock(mutex_);
    sweep_forgotten();
    if (communicators_.count(id) != 0)
        throw std::invalid_argument("communicator " + std::to_string(id) + " exists already");
    const int self = static_cast<int>(own - members.begin());
    auto made = std::make_shared<Communicator>(id, std::move(members), self, *this);
    const std::lock_guard its_lock(made->mutex);
    std::erase_if(orphans_, [&](const Delivery& delivery) {
        if (delivery.frame.communicator != id) return false;
        made->parked.push_back(delivery);
        return true;
    });
    communicators_[id] = std::move(made);
}

void Machine::forget(std::uint32_t id) {
    const std::lock_guard lock(mutex_);
    const auto found = communicators_.find(id);
    if (found == communicators_.end()) throw std::invalid_argument("there is no communicator " + std::to_string(id));
    {
        const std::lock_guard its_lock(found->second->mutex);
        if (found->second->completed != found->second->next_number)
            throw std::invalid_argument("communicator " + std::to_string(id) + " has collectives in flight");
    }
    for (auto& installed : installed_)
        if (installed && installed->communicator == found->second) installed.reset();
    forgotten_.push_back(std::move(found->second));
    communicators_.erase(found);
    sweep_forgotten();
}

void Machine::sweep_forgotten() {
    std::erase_if(forgotten_, [&](const std::shared_ptr<Communicator>& communicator) {
        for (const auto& lane : communicator->lanes())
            if (lane->outstanding()) return false;
        return true;
    });
}

std::uint32_t Machine::install(std::uint32_t communicator, std::span<const std::int64_t> table,
                               std::span<const std::int32_t> peers, int blocks, std::size_t segment_bytes,
                               std::uint64_t plan) {
    const std::lock_guard lock(mutex_);
    const auto found = communicators_.find(communicator);
    if (found == communicators_.end())
        throw std::invalid_argument("there is no communicator " + std::to_string(communicator));
    const Communicator& of = *found->second;
    auto made = std::make_unique<Installed>();
    made->communicator = found->second;
    made->schedule = std::make_shared<Schedule>(table, peers, of.self, static_cast<int>(of.members.size()), blocks,
                                                segment_bytes, plan);
    installed_.push_back(std::move(made));
    return static_cast<std::uint32_t>(installed_.size() - 1);
}

Installed& Machine::installed(std::uint32_t handle) {
    const std::lock_guard lock(mutex_);
    if (handle >= installed_.size() || !installed_[handle])
        throw std::invalid_argument("there is no schedule " + std::to_string(handle));
    return *installed_[handle];
}

void Machine::resolve(Installed& installed) {
    const Schedule& schedule = *installed.schedule;
    const auto link_to = [&](std::uint32_t member) {
        const int peer = installed.communicator->members[member];
        Link* found = link(peer);
        if (found == nullptr) throw std::runtime_error(surroundings.rank_name(peer) + " is not attached");
        return found;
    };
    std::vector<Link*> links, message_links;
    for (const std::uint32_t member : schedule.peers) links.push_back(link_to(member));
    for (const Message& message : schedule.messages) message_links.push_back(link_to(message.member));
    for (Link* to : links) (to->shares_memory() ? installed.any_shared : installed.any_direct) = true;
    for (Link* to : links)
        if (to->shares_memory()) installed.shared_links.push_back(to);
    for (const Message& message : schedule.messages) {
        const auto peer = std::lower_bound(schedule.peers.begin(), schedule.peers.end(), message.member);
        installed.message_peers.push_back(static_cast<std::uint32_t>(peer - schedule.peers.begin()));
    }
    installed.send_is_shared.assign(schedule.send_count, false);
    installed.send_is_direct.assign(schedule.send_count, false);
    auto& sources = installed.direct_sources;
    for (const Instruction& in : schedule.instructions)
        for (std::uint32_t m = in.first_message; m < in.first_message + in.message_count; ++m) {
            Link* other = message_links[m];
            if (in.kind == Instruction::Kind::send)
                (other->shares_memory() ? installed.send_is_shared : installed.send_is_direct)[in.send_index] = true;
            else if (!other->shares_memory() && std::find(sources.begin(), sources.end(), other) == sources.end())
                sources.push_back(other);
        }
    installed.links = std::move(links);
    installed.message_links = std::move(message_links);
}

void Machine::enter(Call& call) {
    const Schedule& schedule = *call.installed->schedule;
    Communicator& communicator = *call.installed->communicator;
    const bool reduces = std::any_of(schedule.instructions.begin(), schedule.instructions.end(),
                                     [](const auto& in) { return in.kind == Instruction::Kind::reduce; });
    if (reduces && find_reduction(call.dtype, call.op) == nullptr)
        throw std::invalid_argument("op " + std::string(name(call.op)) + " is not defined for " +
                                    std::string(name(call.dtype)));
    call.deadline = Clock::now() + seconds(call.timeout);
    const std::lock_guard lock(communicator.mutex);
    if (call.installed->links.empty() && !schedule.peers.empty()) resolve(*call.installed);
    call.number = communicator.next_number++;
    collectives.fetch_add(1, std::memory_order_relaxed);
}

Lane* Machine::try_begin(const Call& call) {
    Communicator& communicator = *call.installed->communicator;
    Lane& lane = communicator.lane(call.number);
    const std::lock_guard lock(communicator.mutex);
    if (!lane.is_free_for(call.number)) return nullptr;
    lane.begin(call);
    if (!communicator.parked.empty())
        std::erase_if(communicator.parked, [&](const Delivery& delivery) {
            if (delivery.frame.number != call.number) return false;
            lane.accept(delivery);
            return true;
        });
    return &lane;
}

void Machine::end(Lane& lane) {
    Communicator& communicator = *lane.call().installed->communicator;
    const std::lock_guard lock(communicator.mutex);
    lane.end();
    ++communicator.completed;
}

void Machine::deliver(Link& from, const Frame& frame, Payload payload) {
    const Delivery delivery{&from, frame, payload};
    std::shared_ptr<Communicator> communicator;
    {
        const std::lock_guard lock(mutex_);
        const auto found = communicators_.find(frame.communicator);
        if (found == communicators_.end()) {
            orphans_.push_back(delivery);
            return;
        }
        communicator = found->second;
    }
    if (communicator->member_of(from.peer) < 0) {
        garbage(from.peer,
                "a message for communicator " + std::to_string(frame.communicator) + ", of which it is not a member");
        return;
    }
    const std::lock_guard lock(communicator->mutex);
    Lane& lane = communicator->lane(frame.number);
    if (lane.expects(frame.number))
        lane.accept(delivery);
    else if (lane.is_past(frame.number) && frame.type != FrameType::data)
        return;  // a grant of something that was sent on credit
    else if (lane.is_past(frame.number))
        mismatch(delivery, lane.call().number == frame.number ? lane.signature().describe()
                                                              : "something else, which has completed");
    else
        communicator->parked.push_back(delivery);
}

void Machine::abandon() {
    for (const auto& link : attached()) link->abandon();
}

void Machine::released(int peer, std::uint32_t token) {
    Lane* lane = lanes_[token >> 16].load(std::memory_order_acquire);
    if (lane == nullptr || !lane->released(token & 0xffff)) garbage(peer, "a release of something never sent");
}

void Machine::mismatch(const Delivery& delivery, const std::string& ours) {
    const int peer = delivery.from->peer;
    const Frame& frame = delivery.frame;
    surroundings.fail({ErrorKind::mismatch, peer, surroundings.host(peer), std::string(name(frame.collective)),
                       static_cast<std::int64_t>(frame.number),
                       "ranks disagree on call number " + std::to_string(frame.number) + " of communicator " +
                           std::to_string(frame.communicator) + ": " + surroundings.rank_name(rank) + " called " +
                           ours + ", " + surroundings.rank_name(peer) + " called " + frame.signature().describe()});
}

void Machine::garbage(int peer, const std::string& what) {
    surroundings.fail({ErrorKind::error, peer, surroundings.host(peer), "", -1,
                       surroundings.rank_name(peer) + " sent garbage: " + what});
}

}  // namespace multiring
