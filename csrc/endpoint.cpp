#include "endpoint.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace multiring {
namespace {

constexpr std::uint32_t most_lanes = 1 << 16;                        // a token is a lane and an index, 16 bits each
constexpr std::size_t point_segment_bytes = std::size_t{256} << 10;  // bytes of a send's segment
// Its segments in flight: few enough for the cache, enough for a network (benchmarks/results/2026-11-28-constants.md,
// Engine).
constexpr std::uint32_t point_window_in_memory = 4, point_window_on_network = 16;

}  // namespace

Endpoint::Endpoint(int rank, int world_size, std::uint16_t generation, std::shared_ptr<Arena> arena,
                   Surroundings& surroundings, std::unique_ptr<Trace> trace, std::unique_ptr<CallRecorder> recorder)
    : rank(rank),
      generation(generation),
      arena(std::move(arena)),
      surroundings(surroundings),
      trace(std::move(trace)),
      recorder(std::move(recorder)),
      lanes_(std::make_unique<std::atomic<Lane*>[]>(most_lanes)),
      transports_(std::make_unique<std::atomic<Transport*>[]>(static_cast<std::size_t>(world_size))),
      attached_(std::make_unique<std::unique_ptr<Transport>[]>(static_cast<std::size_t>(world_size))) {
    for (std::uint32_t id = most_lanes; id-- > 0;) free_lane_ids_.push_back(id);
}

std::uint32_t Endpoint::register_lane(Lane& lane) {
    const std::lock_guard lock(lanes_mutex_);
    if (free_lane_ids_.empty())
        throw_resource_error("more than " + std::to_string(most_lanes / lanes_of_communicator) +
                             " communicators, or as many times " + std::to_string(lanes_of_communicator) +
                             " messages in flight: forget groups that are no longer used, wait for messages");
    const std::uint32_t id = free_lane_ids_.back();
    free_lane_ids_.pop_back();
    lanes_[id].store(&lane, std::memory_order_release);
    return id;
}

void Endpoint::unregister_lane(std::uint32_t id) {
    const std::lock_guard lock(lanes_mutex_);
    lanes_[id].store(nullptr, std::memory_order_release);
    free_lane_ids_.push_back(id);
}

void Endpoint::attach(std::unique_ptr<Transport> transport) {
    const std::lock_guard lock(transports_mutex_);
    auto& entry = transports_[static_cast<std::size_t>(transport->peer)];
    if (entry.load(std::memory_order_relaxed) != nullptr)
        throw std::invalid_argument("rank " + std::to_string(transport->peer) + " is attached already");
    entry.store(transport.get(), std::memory_order_release);
    const std::size_t count = attached_count_.load(std::memory_order_relaxed);
    attached_[count] = std::move(transport);
    attached_count_.store(count + 1, std::memory_order_release);
}

void Endpoint::resolve(Installed& installed) const {
    const Schedule& schedule = *installed.schedule;
    const auto transport_to = [&](std::uint32_t member) {
        const int peer = installed.communicator->members[member];
        Transport* found = transport(peer);
        if (found == nullptr) throw std::runtime_error(surroundings.rank_name(peer) + " is not attached");
        return found;
    };
    std::vector<Transport*> transports, message_transports;
    for (const std::uint32_t member : schedule.peers) transports.push_back(transport_to(member));
    for (const Message& message : schedule.messages) message_transports.push_back(transport_to(message.member));
    for (Transport* to : transports) (to->shares_memory() ? installed.any_shared : installed.any_direct) = true;
    for (Transport* to : transports)
        if (to->shares_memory()) installed.shared_transports.push_back(to);
    for (const Message& message : schedule.messages) {
        const auto peer = std::lower_bound(schedule.peers.begin(), schedule.peers.end(), message.member);
        installed.message_peers.push_back(static_cast<std::uint32_t>(peer - schedule.peers.begin()));
    }
    installed.send_is_shared.assign(schedule.send_count, false);
    installed.send_is_direct.assign(schedule.send_count, false);
    auto& sources = installed.granted_sources;
    for (const Instruction& in : schedule.instructions)
        for (std::uint32_t m = in.first_message; m < in.first_message + in.message_count; ++m) {
            Transport* other = message_transports[m];
            if (in.kind == InstructionKind::send)
                (other->shares_memory() ? installed.send_is_shared : installed.send_is_direct)[in.send_index] = true;
            else if (!other->shares_memory() && std::find(sources.begin(), sources.end(), other) == sources.end())
                sources.push_back(other);
        }
    installed.transports = std::move(transports);
    installed.message_transports = std::move(message_transports);
}

// One send or store of everything. Within a host, too, the receiver grants: unread messages must not fill the memory.
std::unique_ptr<Installed> Endpoint::make_point_schedule(CommunicatorBase& communicator, Collective collective,
                                                         std::uint32_t other) const {
    const std::int64_t kind = collective == Collective::send ? 0 : 2;
    const std::int64_t row[Schedule::columns] = {kind, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0};
    const std::int32_t peers[] = {static_cast<std::int32_t>(other)};
    const Transport* to = transport(communicator.members[other]);
    const std::uint32_t window =
        to != nullptr && to->shares_memory() ? point_window_in_memory : point_window_on_network;
    auto made = std::make_unique<Installed>();
    made->communicator = &communicator;
    made->schedule =
        std::make_shared<Schedule>(row, peers, communicator.self, static_cast<int>(communicator.members.size()),
                                   PlanFacts{1, point_segment_bytes, window, 0, finest_grain});
    resolve(*made);
    if (collective == Collective::recv) made->granted_sources = made->transports;
    return made;
}

void Endpoint::abandon() {
    arena->give_up();
    for (const auto& transport : attached()) transport->abandon();
}

void Endpoint::disown() noexcept {
    for (const auto& transport : attached()) transport->disown();
}

void Endpoint::mismatch(const Delivery& delivery, const Signature* ours, double waited) {
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
    surroundings.fail({ErrorKind::mismatch,
                       peer,
                       surroundings.host(peer),
                       ours != nullptr ? std::string(name(ours->part_of())) : "",
                       static_cast<std::int64_t>(frame.number),
                       sides[0] + ", " + sides[1] + ": ranks disagree on " + what + " of communicator " +
                           std::to_string(frame.communicator) + generations,
                       waited,
                       rank,
                       {frame.communicator, theirs.is_message() ? no_number : std::uint64_t{frame.number},
                        theirs.fingerprint(), ours != nullptr ? ours->fingerprint() : 0}});
}

void Endpoint::garbage(int peer, const std::string& what) {
    surroundings.fail({ErrorKind::error, peer, surroundings.host(peer), "", -1,
                       surroundings.rank_name(peer) + " sent garbage: " + what});
}

}  // namespace multiring
