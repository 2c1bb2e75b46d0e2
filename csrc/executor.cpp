#include "executor.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace multiring {
namespace {

void check_limits(const Call& call) {
    if (call.label >= most_labels)
        throw std::invalid_argument("label=" + std::to_string(call.label) + ": a label has 24 bits");
    if (call.count > most_elements)
        throw std::invalid_argument("count=" + std::to_string(call.count) + ": a call moves at most " +
                                    std::to_string(most_elements) + " elements; cut it into several");
}

}  // namespace

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

void Executor::enter(Call& call, Clock::time_point now) {
    const Schedule& schedule = *call.installed->schedule;
    Communicator& communicator = communicator_of(call);
    const bool reduces = std::any_of(schedule.instructions.begin(), schedule.instructions.end(),
                                     [](const auto& in) { return in.kind == InstructionKind::reduce; });
    if (reduces && find_reduction(call.dtype, call.op) == nullptr)
        throw std::invalid_argument("op " + std::string(name(call.op)) + " is not defined for " +
                                    std::string(name(call.dtype)));
    check_limits(call);
    call.deadline = now + seconds(call.timeout);
    const std::lock_guard lock(communicator.mutex);
    if (call.installed->transports.empty() && !schedule.peers.empty()) resolve(*call.installed);
    communicator.give_number(call);
    record(call, communicator);
    note(call, now);
}

void Executor::record(Call& call, const Communicator& communicator) {
    if (recorder && !communicator.is_internal()) recorder->enter(call, communicator);
}

void Executor::note(const Call& call, Clock::time_point now) {
    last_what_.store(std::uint64_t{static_cast<std::uint8_t>(call.collective)} << 32 | call.installed->communicator->id,
                     std::memory_order_relaxed);
    last_number_.store(call.number, std::memory_order_relaxed);
    if (!call.is_point()) {
        begun_in_.store(call.installed->communicator->id, std::memory_order_relaxed);
        begun_.store(call.number + 1, std::memory_order_relaxed);
    }
    calls.fetch_add(1, std::memory_order_relaxed);
    rhythm.call(now);
    if (!call.installed->communicator->is_internal()) operations.fetch_add(1, std::memory_order_relaxed);
}

Lane* Executor::try_begin(const Call& call) {
    Communicator& communicator = communicator_of(call);
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
    const auto now = Clock::now();
    call.deadline = now + seconds(call.timeout);
    const std::lock_guard lock(communicator->mutex);
    call.number = no_number;
    record(call, *communicator);
    Lane* lane = communicator->begin_point(call);
    note(lane != nullptr ? lane->call() : call, now);
    return lane;
}

void Executor::end(Lane& lane, bool completed) {
    Communicator& communicator = communicator_of(lane.call());
    const std::lock_guard lock(communicator.mutex);
    if (recorder && completed) recorder->complete(lane.call());
    communicator.end(lane, completed);
}

std::uint64_t Executor::completed(std::uint32_t id) const {
    const auto communicator = find(id);
    const std::lock_guard lock(communicator->mutex);
    return communicator->completed();
}

void Executor::deliver(Transport& from, const Frame& frame, Payload payload) {
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

void Executor::released(int peer, std::uint32_t token) {
    Lane* to = lane(token >> 16);
    if (to == nullptr || !to->released(peer, token & 0xffff)) garbage(peer, "a release of something never sent");
}

std::optional<Signature> Executor::signature(std::uint32_t id, std::uint64_t number) const {
    const std::lock_guard lock(mutex_);
    const auto found = communicators_.find(id);
    if (found == communicators_.end()) return {};
    const std::lock_guard its_lock(found->second->mutex);
    return found->second->signature(number);
}

void Executor::refuse(Call call) {
    Communicator& communicator = communicator_of(call);
    const std::lock_guard lock(communicator.mutex);
    communicator.refuse(call);
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

}  // namespace multiring
