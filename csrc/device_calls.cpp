// Calls on buffers that lie on CUDA devices: how they start, and how they are let go of when the job fails.
#include <algorithm>
#include <thread>

#include "operations.hpp"

namespace multiring {
namespace {

// More do not make sums from memory faster.
constexpr double most_helpers = 4;
// Other ranks that have all they need may end the call well until then. Who reads later sees that it was given up.
constexpr auto abandoning_grace = std::chrono::milliseconds(250);
// At shutdown, after a failure: a stream of the caller's may never come to where a call of ours waits for it.
constexpr auto longest_draining = std::chrono::seconds(5);
// A device cannot wake us: poll at 1/16 of the time waited, at least every 200 us.
constexpr Clock::duration most_sleep_for_device = std::chrono::microseconds(200);
constexpr int part_of_wait_for_device = 16;

}  // namespace

std::shared_ptr<DeviceQueue> Operations::queue_of(const Call& call, int ordinal, std::size_t slot_bytes) {
    const std::pair key{call.installed->communicator->id, ordinal};
    const auto found = queues_.find(key);
    if (found != queues_.end() && slot_bytes <= found->second->slot_bytes) return found->second;
    std::erase_if(retired_, [](const auto& queue) { return queue->close(); });
    auto& device = devices_[ordinal];
    if (!device) device = std::make_shared<Device>(ordinal);
    if (!team_) gather_team();
    auto larger = std::make_shared<DeviceQueue>(device, arena_, slot_bytes);
    if (found != queues_.end() && !found->second->close()) retired_.push_back(found->second);
    return queues_[key] = std::move(larger);
}

// One core runs the segments and one the caller; what a rank has beyond these may help.
void Operations::gather_team() {
    const double left = cores_.of_a_rank() - 2;
    const auto threads = static_cast<std::size_t>(std::clamp(left, 0.0, most_helpers));
    team_ = std::make_unique<Team>(options_.helpers.value_or(threads));
    if (team_->size() != 0) executor_.team.store(team_.get(), std::memory_order_release);
}

std::shared_ptr<Work> Operations::start_on_device(Call call, const DeviceBuffer& buffer, void* owner) {
    const CallGuard inside(*this);
    check_can_start(call);
    const std::size_t item = itemsize(call.dtype), slice = call.installed->schedule->slice_elements(item);
    const bool is_short = slice >= call.count;
    const Cut cut{static_cast<std::uint32_t>(call.installed->schedule->blocks), call.count * item,
                  is_short ? round_up(call.count * item, cache_line) : slice * item};
    // The order of the calls' numbers is that of their copies.
    const std::lock_guard lock(devices_mutex_);
    const auto queue = call.count == 0 ? nullptr : queue_of(call, buffer.device, cut.blocks * cut.slice_bytes);
    executor_.enter(call, Clock::now());
    try {
        if (queue) call.transfer = queue->enqueue(cut, buffer.out, buffer.in, buffer.stream);
    } catch (const EngineError& error) {  // the other ranks count on this call
        peers_.fail(error.failure);
        state_.raise(state_.failure_of(call));
    }
    auto work = std::make_shared<Work>();
    work->call = call;
    work->owner = owner;
    if (call.transfer && call.transfer->refused) {  // the same, but the device may have a part of it
        peers_.fail(*call.transfer->refused);
        work->refused = state_.failure_of(call);
    }
    hand_over(work);
    return work;
}

// After a failure: the owners of what the device has left are given back. True when nothing is left on any device.
bool Operations::let_go_of_devices() {
    if (leaving_.empty()) return true;
    if (Clock::now() < state_.failed_since() + abandoning_grace) return false;
    std::erase_if(leaving_, [&](const auto& left) {
        const auto& [transfer, owner] = left;
        transfer->queue->abandon();
        if (!transfer->has_left()) return false;
        if (owner == nullptr) return true;
        const std::lock_guard lock(mutex_);
        owners_.push_back(owner);
        has_owners_.store(true, std::memory_order_relaxed);
        return true;
    });
    return leaving_.empty();
}

void Operations::drain_devices() {
    const auto until = Clock::now() + longest_draining;
    while (!let_go_of_devices() && Clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

bool Operations::needs_polling() const {
    return std::any_of(works_.begin(), works_.end(),
                       [](const auto& work) { return work->lane != nullptr && work->lane->needs_polling(); }) ||
           !leaving_.empty();
}

std::optional<Clock::duration> Operations::longest_sleep_for_device() const {
    if (!leaving_.empty()) return most_sleep_for_device;
    if (!needs_polling()) return {};
    const auto waited = Clock::now() - idle_since_.value_or(Clock::now());
    return std::min(waited / part_of_wait_for_device, most_sleep_for_device);
}

void Operations::close_devices() noexcept {
    const std::lock_guard lock(devices_mutex_);
    for (const auto& [key, queue] : queues_) queue->close();
    for (const auto& queue : retired_) queue->close();
    queues_.clear();
    retired_.clear();
    devices_.clear();
}

void Operations::close_devices_of(std::uint32_t communicator) {
    const std::lock_guard lock(devices_mutex_);
    std::erase_if(queues_, [&](const auto& entry) {
        if (entry.first.first != communicator) return false;
        if (!entry.second->close()) retired_.push_back(entry.second);
        return true;
    });
}

}  // namespace multiring
