#include "executor.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace multiring {
namespace {

constexpr std::uint32_t most_lanes = 1 << 16;                        // a token is a lane and an index, 16 bits each
constexpr std::size_t point_segment_bytes = std::size_t{256} << 10;  // bytes of a send's segment
// Its segments in flight: 1 MB stays in the cache, 4 MB keep a network of 5 Gbit/s busy.
constexpr std::uint32_t point_window_in_memory = 4, point_window_on_network = 16;

// The id that users see: the first 48 of the 63 bits that the engine carries.
std::string plan_id(std::uint64_t number) {
    char text[13];
    std::snprintf(text, sizeof text, "%012llx", static_cast<unsigned long long>(number >> 15 & 0xffffffffffff));
    return text;
}

void check_limits(const Call& call) {
    if (call.label >= most_labels)
        throw std::invalid_argument("label=" + std::to_string(call.label) + ": a label has 24 bits");
    if (call.count > most_elements)
        throw std::invalid_argument("count=" + std::to_string(call.count) + ": a call moves at most " +
                                    std::to_string(most_elements) + " elements; cut it into several");
}

}  // namespace

// Whoever reads it looks for the difference: what is the same on both sides is left out, but where the operations
// differ it says which call of the program this is. A plan differs with a count, a root or a type: alone it is said.
std::string Signature::describe(bool receives, const Signature* other) const {
    const Collective called = part_of();
    if (called == Collective::barrier) return "barrier()";
    const bool is_alike = other != nullptr && other->part_of() == called;
    const Signature& beside = is_alike ? *other : *this;
    std::string arguments;
    const auto add = [&](bool differs, const std::string& argument) {
        if (is_alike && !differs) return;
        arguments += (arguments.empty() ? "" : ", ") + argument;
    };
    add(dtype != beside.dtype, "dtype=" + std::string(name(dtype)));
    add(count != beside.count, "count=" + std::to_string(count));
    if (reduces(called)) add(op != beside.op, "op=" + std::string(name(op)));
    if (has_root(called)) add(root != beside.root, "root=" + std::to_string(root));
    if (called == Collective::send) add(tag() != beside.tag(), "tag=" + std::to_string(tag()));
    if (label != 0) add(label != beside.label, "label=" + describe_label(label));
    if (label == 0 && beside.label != 0) add(true, "no label");
    if (is_alike && arguments.empty() && !is_message()) add(plan != beside.plan, "plan=" + plan_id(plan));
    return std::string(name(called == Collective::send && receives ? Collective::recv : called)) + "(" + arguments +
           ")";
}

// FNV-1a of the description and the plan.
std::uint64_t Signature::fingerprint() const {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : describe(false, nullptr) + std::to_string(plan))
        hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    return hash;
}

Executor::Executor(int rank, int world_size, std::uint16_t generation, std::shared_ptr<Arena> arena,
                   Surroundings& surroundings, std::unique_ptr<Trace> trace, std::unique_ptr<Recorder> recorder)
    : rank(rank),
      generation(generation),
      arena(std::move(arena)),
      surroundings(surroundings),
      trace(std::move(trace)),
      recorder(std::move(recorder)),
      world_size_(world_size),
      lanes_(std::make_unique<std::atomic<Lane*>[]>(most_lanes)),
      links_(std::make_unique<std::atomic<Link*>[]>(static_cast<std::size_t>(world_size))),
      attached_(std::make_unique<std::unique_ptr<Link>[]>(static_cast<std::size_t>(world_size))) {
    for (std::uint32_t id = most_lanes; id-- > 0;) free_lane_ids_.push_back(id);
}

Executor::~Executor() = default;

std::uint32_t Executor::register_lane(Lane& lane) {
    const std::lock_guard lock(lanes_mutex_);
    if (free_lane_ids_.empty())
        throw_resource_error("more than " + std::to_string(most_lanes / Communicator::lane_count) +
                             " communicators, or as many times " + std::to_string(Communicator::lane_count) +
                             " messages in flight: forget groups that are no longer used, wait for messages");
    const std::uint32_t id = free_lane_ids_.back();
    free_lane_ids_.pop_back();
    lanes_[id].store(&lane, std::memory_order_release);
    return id;
}

void Executor::unregister_lane(std::uint32_t id) {
    const std::lock_guard lock(lanes_mutex_);
    lanes_[id].store(nullptr, std::memory_order_release);
    free_lane_ids_.push_back(id);
}

void Executor::attach(std::unique_ptr<Link> link) {
    const std::lock_guard lock(mutex_);
    auto& entry = links_[static_cast<std::size_t>(link->peer)];
    if (entry.load(std::memory_order_relaxed) != nullptr)
        throw std::invalid_argument("rank " + std::to_string(link->peer) + " is attached already");
    entry.store(link.get(), std::memory_order_release);
    const std::size_t count = attached_count_.load(std::memory_order_relaxed);
    attached_[count] = std::move(link);
    attached_count_.store(count + 1, std::memory_order_release);
}

void Executor::add_communicator(std::uint32_t id, std::vector<int> members, std::uint16_t incarnation) {
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
    auto made = std::make_shared<Communicator>(id, incarnation, std::move(members), self, *this);
    const std::lock_guard its_lock(made->mutex);
    std::erase_if(orphans_, [&](const Delivery& delivery) {
        if (delivery.frame.communicator != id || delivery.frame.incarnation != incarnation) return false;
        made->deliver(delivery);
        return true;
    });
    communicators_[id] = std::move(made);
    latest_[id] = incarnation;
}

void Executor::forget(std::uint32_t id) {
    std::vector<Delivery> unread;
    std::unique_lock lock(mutex_);
    const auto found = communicators_.find(id);
    if (found == communicators_.end()) throw std::invalid_argument("there is no communicator " + std::to_string(id));
    {
        const std::lock_guard its_lock(found->second->mutex);
        if (found->second->is_busy())
            throw std::invalid_argument("communicator " + std::to_string(id) + " has operations in flight");
        unread = found->second->take_parked();
    }
    for (auto& installed : installed_)
        if (installed && installed->communicator == found->second.get()) installed.reset();
    forgotten_.push_back(std::move(found->second));
    communicators_.erase(found);
    sweep_forgotten();
    lock.unlock();
    for (const Delivery& delivery : unread) delivery.give_back();
}

// Incarnations go around. One is older than another if less than half of them lie between: a frame would have to be
// late by 2^15 groups of the same number.
bool Executor::is_over(const Frame& frame) const {
    const auto latest = latest_.find(frame.communicator);
    return latest != latest_.end() && static_cast<std::int16_t>(frame.incarnation - latest->second) <= 0;
}

void Executor::sweep_forgotten() {
    std::erase_if(forgotten_, [&](const std::shared_ptr<Communicator>& communicator) {
        const std::lock_guard its_lock(communicator->mutex);
        return !communicator->is_read_from();
    });
}

std::shared_ptr<Communicator> Executor::find(std::uint32_t id) const {
    const auto found = communicators_.find(id);
    if (found == communicators_.end()) throw std::invalid_argument("there is no communicator " + std::to_string(id));
    return found->second;
}

std::uint32_t Executor::install(std::uint32_t communicator, std::span<const std::int64_t> table,
                                std::span<const std::int32_t> peers, const PlanFacts& facts) {
    const std::lock_guard lock(mutex_);
    Communicator& of = *find(communicator);
    auto made = std::make_unique<Installed>();
    made->communicator = &of;
    made->schedule = std::make_shared<Schedule>(table, peers, of.self, static_cast<int>(of.members.size()), facts);
    installed_.push_back(std::move(made));
    return static_cast<std::uint32_t>(installed_.size() - 1);
}

Installed& Executor::installed(std::uint32_t handle) {
    const std::lock_guard lock(mutex_);
    if (handle >= installed_.size() || !installed_[handle])
        throw std::invalid_argument("there is no schedule " + std::to_string(handle));
    return *installed_[handle];
}

void Executor::resolve(Installed& installed) const {
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
    auto& sources = installed.granted_sources;
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

void Executor::enter(Call& call, Clock::time_point now) {
    const Schedule& schedule = *call.installed->schedule;
    Communicator& communicator = *call.installed->communicator;
    const bool reduces = std::any_of(schedule.instructions.begin(), schedule.instructions.end(),
                                     [](const auto& in) { return in.kind == Instruction::Kind::reduce; });
    if (reduces && find_reduction(call.dtype, call.op) == nullptr)
        throw std::invalid_argument("op " + std::string(name(call.op)) + " is not defined for " +
                                    std::string(name(call.dtype)));
    check_limits(call);
    call.deadline = now + seconds(call.timeout);
    const std::lock_guard lock(communicator.mutex);
    if (call.installed->links.empty() && !schedule.peers.empty()) resolve(*call.installed);
    communicator.give_number(call);
    record(call, communicator);
    note(call);
}

void Executor::record(Call& call, const Communicator& communicator) {
    if (recorder && !communicator.is_internal()) recorder->enter(call, communicator);
}

void Executor::note(const Call& call) {
    last_what_.store(std::uint64_t{static_cast<std::uint8_t>(call.collective)} << 32 | call.installed->communicator->id,
                     std::memory_order_relaxed);
    last_number_.store(call.number, std::memory_order_relaxed);
    if (!call.is_point()) {
        begun_in_.store(call.installed->communicator->id, std::memory_order_relaxed);
        begun_.store(call.number + 1, std::memory_order_relaxed);
    }
    calls.fetch_add(1, std::memory_order_relaxed);
    if (!call.installed->communicator->is_internal()) operations.fetch_add(1, std::memory_order_relaxed);
}

Lane* Executor::try_begin(const Call& call) {
    Communicator& communicator = *call.installed->communicator;
    const std::lock_guard lock(communicator.mutex);
    return communicator.try_begin(call);
}

Lane* Executor::begin_point(std::uint32_t id, int other, Call& call) {
    std::shared_ptr<Communicator> communicator;
    {
        const std::lock_guard lock(mutex_);
        communicator = find(id);
    }
    if (other == any_source && call.collective == Collective::recv) {
        call.other = any_member;
        if (communicator->members.size() == 1)
            throw std::invalid_argument("rank " + std::to_string(rank) + " is alone in communicator " +
                                        std::to_string(id) + ": nobody can send to it");
    } else {
        const int member = communicator->member_of(other);
        if (member < 0 || member == communicator->self)
            throw std::invalid_argument("rank " + std::to_string(other) + " is " +
                                        (member < 0 ? "not a member of" : "this rank itself in") + " communicator " +
                                        std::to_string(id));
        call.other = static_cast<std::uint32_t>(member);
    }
    check_limits(call);
    call.deadline = Clock::now() + seconds(call.timeout);
    const std::lock_guard lock(communicator->mutex);
    call.number = no_number;
    record(call, *communicator);
    Lane* lane = communicator->begin_point(call);
    note(lane != nullptr ? lane->call() : call);
    return lane;
}

// One send or store of everything. Within a host, too, the receiver grants: unread messages must not fill the memory.
std::unique_ptr<Installed> Executor::make_point_schedule(Communicator& communicator, Collective collective,
                                                         std::uint32_t other) const {
    const std::int64_t kind = collective == Collective::send ? 0 : 2;
    const std::int64_t row[Schedule::columns] = {kind, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0};
    const std::int32_t peers[] = {static_cast<std::int32_t>(other)};
    const Link* to = link(communicator.members[other]);
    const std::uint32_t window =
        to != nullptr && to->shares_memory() ? point_window_in_memory : point_window_on_network;
    auto made = std::make_unique<Installed>();
    made->communicator = &communicator;
    made->schedule =
        std::make_shared<Schedule>(row, peers, communicator.self, static_cast<int>(communicator.members.size()),
                                   PlanFacts{1, point_segment_bytes, window, 0, finest_grain});
    resolve(*made);
    if (collective == Collective::recv) made->granted_sources = made->links;
    return made;
}

void Executor::end(Lane& lane, bool completed) {
    Communicator& communicator = *lane.call().installed->communicator;
    const std::lock_guard lock(communicator.mutex);
    if (recorder && completed) recorder->complete(lane.call());
    communicator.end(lane, completed);
}

std::uint64_t Executor::completed(std::uint32_t id) const {
    const auto communicator = find(id);
    const std::lock_guard lock(communicator->mutex);
    return communicator->completed();
}

void Executor::deliver(Link& from, const Frame& frame, Payload payload) {
    const Delivery delivery{&from, frame, payload};
    std::shared_ptr<Communicator> communicator;
    {
        const std::lock_guard lock(mutex_);
        const auto found = communicators_.find(frame.communicator);
        if (found != communicators_.end() && found->second->incarnation == frame.incarnation) {
            communicator = found->second;
        } else if (!is_over(frame)) {
            orphans_.push_back(delivery);
            return;
        }
    }
    if (!communicator) {
        delivery.give_back();
        return;
    }
    if (communicator->member_of(from.peer) < 0) {
        garbage(from.peer,
                "a message for communicator " + std::to_string(frame.communicator) + ", of which it is not a member");
        return;
    }
    const std::lock_guard lock(communicator->mutex);
    communicator->deliver(delivery);
}

void Executor::abandon() {
    arena->give_up();
    for (const auto& link : attached()) link->abandon();
}

void Executor::disown() noexcept {
    for (const auto& link : attached()) link->disown();
}

void Executor::released(int peer, std::uint32_t token) {
    Lane* lane = lanes_[token >> 16].load(std::memory_order_acquire);
    if (lane == nullptr || !lane->released(peer, token & 0xffff)) garbage(peer, "a release of something never sent");
}

void Executor::mismatch(const Delivery& delivery, const Signature* ours) {
    const int peer = delivery.from->peer;
    const Frame& frame = delivery.frame;
    const Signature theirs = frame.signature();
    const bool we_receive = frame.is_to_receiver();
    std::string what = "call number " + std::to_string(frame.number);
    if (theirs.is_message())
        what = "message number " + std::to_string(frame.number) +
               (theirs.part_of() == Collective::send ? " with tag " + std::to_string(theirs.tag()) : "") +
               " from rank " + std::to_string(we_receive ? peer : rank) + " to rank " +
               std::to_string(we_receive ? rank : peer);
    std::string generations;
    if (ours != nullptr && ours->generation != theirs.generation)
        generations =
            ", in generations " + std::to_string(ours->generation) + " and " + std::to_string(theirs.generation);
    std::string sides[] = {
        surroundings.rank_name(rank) + " called " +
            (ours != nullptr ? ours->describe(we_receive, &theirs) : "something else, which has completed"),
        surroundings.rank_name(peer) + " called " + theirs.describe(!we_receive, ours)};
    if (peer < rank) std::swap(sides[0], sides[1]);
    surroundings.fail(
        {ErrorKind::mismatch,
         peer,
         surroundings.host(peer),
         ours != nullptr ? std::string(name(ours->part_of())) : "",
         static_cast<std::int64_t>(frame.number),
         sides[0] + ", " + sides[1] + ": ranks disagree on " + what + " of communicator " +
             std::to_string(frame.communicator) + generations,
         0,
         rank,
         {frame.communicator, frame.number, theirs.fingerprint(), ours != nullptr ? ours->fingerprint() : 0}});
}

std::optional<std::uint64_t> Executor::fingerprint(std::uint32_t id, std::uint64_t number) const {
    const std::lock_guard lock(mutex_);
    const auto found = communicators_.find(id);
    if (found == communicators_.end()) return {};
    const std::lock_guard its_lock(found->second->mutex);
    return found->second->fingerprint(number);
}

bool Executor::is_read_from() const {
    const std::lock_guard lock(mutex_);
    const auto read_from = [](const std::shared_ptr<Communicator>& communicator) {
        const std::lock_guard its_lock(communicator->mutex);
        return communicator->is_read_from();
    };
    return std::any_of(communicators_.begin(), communicators_.end(),
                       [&](const auto& entry) { return read_from(entry.second); }) ||
           std::any_of(forgotten_.begin(), forgotten_.end(), read_from);
}

void Executor::garbage(int peer, const std::string& what) {
    surroundings.fail({ErrorKind::error, peer, surroundings.host(peer), "", -1,
                       surroundings.rank_name(peer) + " sent garbage: " + what});
}

}  // namespace multiring
