#include "communicator.hpp"

#include <algorithm>
#include <utility>

namespace multiring {

Communicator::Communicator(std::uint32_t id, std::uint16_t incarnation, std::vector<int> members, int self,
                           Endpoint& endpoint)
    : CommunicatorBase(id, incarnation, std::move(members), self), endpoint_(endpoint) {
    unmatched_.communicator = this;
    for (std::uint64_t i = 0; i < lanes_of_communicator; ++i) {
        lanes_[i] = std::make_unique<Lane>(endpoint);
        next_in_lane_[i] = i;
    }
}

void Communicator::give_number(Call& call) {
    call.number = next_number_++;
    entered_[call.number % lanes_of_communicator] = {call.number, signature_of(call, endpoint_.generation)};
}

Lane* Communicator::try_begin(const Call& call) {
    if (call.is_point()) {
        const auto served = served_.find(call.queue_number);
        if (served == served_.end()) return nullptr;
        Lane* lane = served->second;
        served_.erase(served);
        return lane;
    }
    Lane& lane = *lanes_[call.number % lanes_of_communicator];
    if (lane.is_active() || next_in_lane_[call.number % lanes_of_communicator] != call.number) return nullptr;
    lane.begin(call);
    if (!parked_.empty())
        std::erase_if(parked_, [&](const Delivery& delivery) {
            if (delivery.frame.number != call.number) return false;
            lane.accept(delivery);
            return true;
        });
    return &lane;
}

Lane* Communicator::begin_point(Call& call) {
    if (call.collective == Collective::recv && (call.other == any_member || queued_.count(call.tag) != 0)) {
        call.installed = &unmatched_;
        call.number = no_number;
        call.queue_number = next_queue_number_++;
        queued_[call.tag].push_back(call);
        serve(call.tag);
        return try_begin(call);
    }
    return &start_point(call);
}

Lane& Communicator::start_point(Call call) {
    auto& installed = point_schedules_[{call.collective, call.other}];
    if (!installed) installed = endpoint_.make_point_schedule(*this, call.collective, call.other);
    call.installed = installed.get();
    Lane& lane = free_point_lane();
    call.number = next_point_[tagged(call)]++;
    if (endpoint_.recorder) endpoint_.recorder->has_number(call);
    lane.begin(call);
    const TaggedNumber point{tagged(call), call.number};
    points_[point] = &lane;
    if (const auto parked = parked_points_.find(point); parked != parked_points_.end()) {
        for (const Delivery& delivery : parked->second.deliveries) lane.accept(delivery);
        parked_points_.erase(parked);
    }
    return lane;
}

// Begin those of the queued receives whose turn it is.
void Communicator::serve(std::uint64_t tag) {
    const auto found = queued_.find(tag);
    if (found == queued_.end()) return;
    auto& queue = found->second;
    while (!queue.empty()) {
        Call call = queue.front();
        if (call.other == any_member) call.other = first_sender(tag);
        if (call.other == any_member) return;
        queue.pop_front();
        served_[call.queue_number] = &start_point(call);
    }
    queued_.erase(found);
}

// The sender whose message arrived first, among those that are next from their senders; any_member if there is none.
std::uint32_t Communicator::first_sender(std::uint64_t tag) const {
    std::uint32_t sender = any_member;
    std::uint64_t arrived = ~std::uint64_t{0};
    for (const auto& [point, parked] : parked_points_) {
        const auto& [tagged, number] = point;
        if (!tagged.receives || tagged.tag != tag || parked.arrived >= arrived) continue;
        const auto next = next_point_.find(tagged);
        if (number != (next == next_point_.end() ? 0 : next->second)) continue;
        sender = tagged.member;
        arrived = parked.arrived;
    }
    return sender;
}

Lane& Communicator::free_point_lane() {
    const auto found = std::find_if(point_lanes_.begin(), point_lanes_.end(),
                                    [](const auto& lane) { return !lane->is_active() && !lane->outstanding(); });
    if (found != point_lanes_.end()) return **found;
    return *point_lanes_.emplace_back(std::make_unique<Lane>(endpoint_));
}

void Communicator::end(Lane& lane, bool completed) {
    const Call& call = lane.call();
    if (call.is_point()) {
        points_.erase({tagged(call), call.number});
    } else {
        next_in_lane_[call.number % lanes_of_communicator] += lanes_of_communicator;
        ++ended_;
        if (!completed) first_failed_ = std::min(first_failed_, call.number);
    }
    lane.end();
}

// A lane's next collective is the first of it that has not ended.
std::uint64_t Communicator::completed() const {
    return std::min(first_failed_, *std::min_element(next_in_lane_.begin(), next_in_lane_.end()));
}

void Communicator::deliver(const Delivery& delivery) {
    const Frame& frame = delivery.frame;
    if (frame.collective == Collective::send) {
        deliver_point(delivery);
        return;
    }
    Lane& lane = *lanes_[frame.number % lanes_of_communicator];
    if (lane.is_active() && lane.call().number == frame.number) {
        lane.accept(delivery);
    } else if (frame.number >= next_in_lane_[frame.number % lanes_of_communicator]) {
        parked_.push_back(delivery);
    } else if (lane.call().number == frame.number && lane.signature() != frame.signature()) {
        endpoint_.mismatch(delivery, &lane.signature(), 0);
    } else if (frame.type == FrameType::data) {
        endpoint_.mismatch(delivery, nullptr, 0);
    }  // else a grant of something that was sent on credit, or what is waited for is on its way
}

void Communicator::deliver_point(const Delivery& delivery) {
    const Frame& frame = delivery.frame;
    const Tagged tagged{frame.is_to_receiver(), static_cast<std::uint32_t>(member_of(delivery.from->peer)), frame.plan};
    const TaggedNumber point{tagged, frame.number};
    if (const auto found = points_.find(point); found != points_.end()) {
        found->second->accept(delivery);
        return;
    }
    const auto next = next_point_.find(tagged);
    if (next == next_point_.end() || frame.number >= next->second) {
        const auto [parked, is_new] = parked_points_.try_emplace(point, Parked{parked_so_far_, {}});
        if (is_new) ++parked_so_far_;
        parked->second.deliveries.push_back(delivery);
        if (!tagged.receives || queued_.count(frame.plan) == 0) return;
        try {
            serve(frame.plan);
        } catch (const EngineError& error) {
            endpoint_.surroundings.fail(error.failure);
        }
        endpoint_.surroundings.wake_progress();
    } else if (frame.type == FrameType::data) {
        endpoint_.garbage(delivery.from->peer, "a message that was received already");
    }
}

std::vector<Delivery> Communicator::take_parked() {
    std::vector<Delivery> taken;
    taken.swap(parked_);
    for (auto& [point, parked] : parked_points_)
        taken.insert(taken.end(), parked.deliveries.begin(), parked.deliveries.end());
    parked_points_.clear();
    return taken;
}

std::optional<Signature> Communicator::signature(std::uint64_t number) const {
    if (refused_ && refused_->number == number) return refused_->signature;
    const Entered& latest = entered_[number % lanes_of_communicator];
    if (number >= next_number_ || latest.number != number) return {};
    return latest.signature;
}

void Communicator::refuse(Call& call) {
    if (refused_) return;
    call.number = next_number_;
    refused_ = Entered{call.number, signature_of(call, endpoint_.generation)};
    if (endpoint_.recorder && !is_internal()) endpoint_.recorder->enter(call, *this);
}

bool Communicator::is_busy() const {
    return ended_ != next_number_ || !points_.empty() || !queued_.empty();
}

bool Communicator::is_read_from() const {
    const auto outstanding = [](const auto& lane) { return lane->outstanding(); };
    return std::any_of(lanes_.begin(), lanes_.end(), outstanding) ||
           std::any_of(point_lanes_.begin(), point_lanes_.end(), outstanding);
}

}  // namespace multiring
