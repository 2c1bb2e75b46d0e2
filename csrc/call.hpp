// Call: what was asked of a communicator, and what all that run it read: who the members are, and the schedule with the
// transports that it uses.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "device.hpp"
#include "schedule.hpp"
#include "transport.hpp"
#include "wait.hpp"

namespace multiring {

// Communicators from this number on are for the library's own calls, each beside the one whose number is so much less.
inline constexpr std::uint32_t first_internal = std::uint32_t{1} << 31;

// Identity of a communicator: its number, its members, and this rank's index among them.
class CommunicatorBase {
  public:
    CommunicatorBase(const CommunicatorBase&) = delete;
    CommunicatorBase& operator=(const CommunicatorBase&) = delete;

    bool is_internal() const { return id >= first_internal; }
    int member_of(int world_rank) const;  // -1 if it is none; needs no mutex

    const std::uint32_t id;
    const std::uint16_t incarnation;  // counts those that have had this id
    const std::vector<int> members;   // world ranks
    const int self;                   // our index among them
    std::mutex mutex;                 // guards what the communicator holds

  protected:
    CommunicatorBase(std::uint32_t id, std::uint16_t incarnation, std::vector<int> members, int self);
    ~CommunicatorBase() = default;

  private:
    std::unordered_map<int, int> member_of_;
};

struct Delivery {
    Transport* from;
    Frame frame;
    Payload payload;

    void give_back() const {
        if (frame.type == FrameType::data && payload.data != nullptr) from->give_back(payload, frame.bytes);
    }
};

// Work of a schedule here so far.
struct Record {
    std::atomic<std::uint64_t> operations{0}, bytes{0}, nanoseconds{0};  // from the start of each to its end
};

// A schedule with the transports that it uses.
struct Installed {
    CommunicatorBase* communicator = nullptr;
    std::shared_ptr<const Schedule> schedule;
    std::vector<Transport*> transports;          // indexed as Schedule::peers; empty until all are attached
    std::vector<Transport*> message_transports;  // indexed as Schedule::messages
    std::vector<std::uint32_t> message_peers;    // indexed as Schedule::messages: index into `transports`
    std::vector<bool> send_is_shared;            // indexed by send: some peer reads it from the arena
    std::vector<bool> send_is_direct;            // indexed by send: some peer is sent it from where it lies
    std::vector<Transport*> shared_transports;   // those that share memory
    std::vector<Transport*> granted_sources;     // those that send to us when they have our grant
    bool any_shared = false, any_direct = false;
    Record record;
};

struct Call {
    Installed* installed = nullptr;
    Collective collective{};
    std::byte* pointer = nullptr;
    std::size_t count = 0;  // elements per block
    Dtype dtype{};
    Op op{};
    std::uint32_t root = 0;
    std::uint32_t label = 0;    // 0: none
    double timeout = 0;         // seconds
    float* residual = nullptr;  // what this rank owes from calls before, in an element for each of the buffer's
    std::uint32_t other = 0;    // send, recv: the member at the other end
    std::uint64_t tag = 0;
    Collective part_of = Collective::send;  // send, recv: the collective that the message belongs to, if it is another
    std::uint64_t number = 0;
    std::uint64_t queue_number = 0;  // recv: position among those that wait for their turn
    std::uint64_t record_index = 0;  // position among the recorded calls, from 1; 0: none
    Clock::time_point deadline{};
    std::shared_ptr<DeviceTransfer> transfer{};  // if the buffer lies on a device; `pointer` is none then

    bool is_point() const { return collective == Collective::send || collective == Collective::recv; }
    std::string_view called() const {  // what the user called
        return name(is_point() && part_of != Collective::send ? part_of : collective);
    }
};
std::string describe(const Call& call);  // "all_reduce number 7 of communicator 0"
double age_of(const Call& call);         // seconds
Signature signature_of(const Call& call, std::uint16_t generation);

inline constexpr std::uint32_t any_member = ~std::uint32_t{0};  // the `other` of a receive from whoever sends first
inline constexpr std::uint64_t no_number = ~std::uint64_t{0};   // a receive that waits for its turn has none

}  // namespace multiring
