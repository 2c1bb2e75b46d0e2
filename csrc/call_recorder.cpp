#include "call_recorder.hpp"

#include <algorithm>
#include <chrono>

#include "call.hpp"

namespace multiring {
namespace {

std::int64_t now() {
    const auto since = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

}  // namespace

void CallRecorder::enter(Call& call, const CommunicatorBase& communicator) {
    RecordedCall made{};
    made.called = now();
    made.number = call.number;
    made.tag = call.tag;
    made.count = call.count;
    made.timeout = call.timeout;
    made.communicator = communicator.id;
    made.incarnation = communicator.incarnation;
    made.root = call.root;
    made.label = call.label;
    made.other = call.other;
    made.collective = call.collective;
    made.part_of = call.part_of;
    made.dtype = call.dtype;
    made.op = call.op;
    const std::lock_guard lock(mutex_);
    made.record_index = call.record_index = ++count_;
    if (calls_.size() < most_calls)
        calls_.push_back(made);
    else
        calls_[(made.record_index - 1) % most_calls] = made;
}

RecordedCall* CallRecorder::find(std::uint64_t record_index) {
    if (record_index == 0) return nullptr;
    RecordedCall& found = calls_[(record_index - 1) % most_calls];
    return found.record_index == record_index ? &found : nullptr;  // nullptr: later ones have taken its room
}

void CallRecorder::has_number(const Call& call) {
    const std::lock_guard lock(mutex_);
    if (RecordedCall* found = find(call.record_index)) {
        found->number = call.number;
        found->other = call.other;
    }
}

void CallRecorder::complete(const Call& call) {
    const std::lock_guard lock(mutex_);
    if (RecordedCall* found = find(call.record_index)) found->ended = now();
}

std::vector<RecordedCall> CallRecorder::calls() const {
    const std::lock_guard lock(mutex_);
    std::vector<RecordedCall> result = calls_;
    std::sort(result.begin(), result.end(),
              [](const auto& a, const auto& b) { return a.record_index < b.record_index; });
    return result;
}

}  // namespace multiring
