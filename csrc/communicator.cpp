#include "communicator.hpp"

#include <algorithm>
#include <utility>

#include "lane.hpp"
#include "machine.hpp"

namespace multiring {

std::string describe(const Call& call) {
    const Communicator& communicator = *call.installed->communicator;
    std::string text = std::string(name(call.collective)) + " number " + std::to_string(call.number);
    if (call.is_point())
        text += (call.collective == Collective::send ? " to rank " : " from rank ") +
                std::to_string(communicator.members[call.other]) + " with tag " +
                std::to_string(static_cast<std::int64_t>(call.tag));
    return text + " of communicator " + std::to_string(communicator.id);
}

Communicator::Communicator(std::uint32_t id, std::vector<int> members_given, int self, Machine& machine)
    : id(id), members(std::move(members_given)), self(self), machine_(machine) {
    for (std::size_t i = 0; i < members.size(); ++i) member_of_[members[i]] = static_cast<int>(i);
    for (std::uint64_t i = 0; i < lane_count; ++i) {
        lanes_[i] = std::make_unique<Lane>(machine);
        next_in_lane_[i] = i;
    }
}

Communicator::~Communicator() = default;

int Communicator::member_of(int world_rank) const {
    const auto found = member_of_.find(world_rank);
    return found == member_of_.end() ? -1 : found->second;
}

void Communicator::give_number(Call& call) {
    call.number = next_number_++;
}

Lane* Communicator::try_begin(const Call& call) {
    Lane& lane = *lanes_[call.number % lane_count];
    if (lane.is_active() || next_in_lane_[call.number % lane_count] != call.number) return nullptr;
    lane.begin(call);
    if (!parked_.empty())
        std::erase_if(parked_, [&](const Delivery& delivery) {
            if (delivery.frame.number != call.number) return false;
            lane.accept(delivery);
            return true;
        });
    return &lane;
}

Lane& Communicator::begin_point(Call& call) {
    Lane& lane = free_point_lane();
    call.number = next_point_[tagged(call)]++;
    lane.begin(call);
    const Point point{tagged(call), call.number};
    points_[point] = &lane;
    if (const auto parked = parked_points_.find(point); parked != parked_points_.end()) {
        for (const Delivery& delivery : parked->second) lane.accept(delivery);
        parked_points_.erase(parked);
    }
    return lane;
}

Lane& Communicator::free_point_lane() {
    const auto found = std::find_if(point_lanes_.begin(), point_lanes_.end(),
                                    [](const auto& lane) { return !lane->is_active() && !lane->outstanding(); });
    if (found != point_lanes_.end()) return **found;
    return *point_lanes_.emplace_back(std::make_unique<Lane>(machine_));
}

void Communicator::end(Lane& lane) {
    const Call& call = lane.call();
    if (call.is_point()) {
        points_.erase({tagged(call), call.number});
    } else {
        next_in_lane_[call.number % lane_count] += lane_count;
        ++completed_;
    }
    lane.end();
}

void Communicator::deliver(const Delivery& delivery) {
    const Frame& frame = delivery.frame;
    if (frame.collective == Collective::send) {
        deliver_point(delivery);
        return;
    }
    Lane& lane = *lanes_[frame.number % lane_count];
    if (lane.is_active() && lane.call().number == frame.number) {
        lane.accept(delivery);
    } else if (frame.number >= next_in_lane_[frame.number % lane_count]) {
        parked_.push_back(delivery);
    } else if (frame.type == FrameType::data) {
        machine_.mismatch(delivery, lane.call().number == frame.number ? lane.signature().describe()
                                                                       : "something else, which has completed");
    }  // else a grant of something that was sent on credit
}

void Communicator::deliver_point(const Delivery& delivery) {
    const Frame& frame = delivery.frame;
    const bool receives = frame.type != FrameType::grant;
    const Tagged tagged{receives, static_cast<std::uint32_t>(member_of(delivery.from->peer)), frame.plan};
    const Point point{tagged, frame.number};
    if (const auto found = points_.find(point); found != points_.end()) {
        found->second->accept(delivery);
        return;
    }
    const auto next = next_point_.find(tagged);
    if (next == next_point_.end() || frame.number >= next->second)
        parked_points_[point].push_back(delivery);
    else if (frame.type == FrameType::data)
        machine_.garbage(delivery.from->peer, "a message that was received already");
}

bool Communicator::is_busy() const {
    return completed_ != next_number_ || !points_.empty();
}

bool Communicator::is_read_from() const {
    const auto outstanding = [](const auto& lane) { return lane->outstanding(); };
    return std::any_of(lanes_.begin(), lanes_.end(), outstanding) ||
           std::any_of(point_lanes_.begin(), point_lanes_.end(), outstanding);
}

}  // namespace multiring
