// CallRecorder: the calls that this rank made last, for a look at what everybody did when the job has failed.
//
// A call is in it from the moment it has its number, before anything is sent. What has no end has not come to one. The
// mutex is the last to be taken: a call enters and ends under that of its communicator.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <type_traits>
#include <vector>

#include "types.hpp"

namespace multiring {

class CommunicatorBase;
struct Call;

// Python reads them as they lie in memory (flight_recorder.py).
struct RecordedCall {
    std::uint64_t record_index;  // counts what was recorded, from 1
    std::int64_t called, ended;  // nanoseconds of the system's clock; 0: it has not ended
    std::uint64_t number, tag;   // `number` is `no_number` while a receive waits for its turn
    std::uint64_t count;         // elements, of a block where there are several
    double timeout;              // seconds
    std::uint32_t communicator, root, label;
    std::uint32_t other;  // a message's other end, a member, or `any_member`
    std::uint16_t incarnation;
    Collective collective;
    Collective part_of;
    Dtype dtype;
    Op op;
    std::array<std::uint8_t, 2> unused;
};
static_assert(sizeof(RecordedCall) == 80 && std::is_trivially_copyable_v<RecordedCall>);

class CallRecorder {
  public:
    static constexpr std::size_t most_calls = 2000;  // as many as torch's keeps

    void enter(Call& call, const CommunicatorBase& communicator);  // the call gets its record index here
    void has_number(const Call& call);                             // a message, which is numbered when it begins
    void complete(const Call& call);
    std::vector<RecordedCall> calls() const;  // in the order in which they were made

  private:
    RecordedCall* find(std::uint64_t record_index);

    mutable std::mutex mutex_;
    std::vector<RecordedCall> calls_;
    std::uint64_t count_ = 0;
};

}  // namespace multiring
