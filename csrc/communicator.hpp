// Communicator: members, and the operations that they have called so far, numbered.
//
//   call    what was asked for: a collective, with its number among those of the communicator, or a message to or
//           from one member, with its number among those of the same tag
//   lane    where an operation runs. Collective number q has lane q mod K, once number q - K has completed here; a
//           send or receive takes any lane that is free
//
// A message may come before its operation was called here: it is parked. All members here take the mutex, unless they
// say otherwise.
//
// A receive from any member gets the message of its tag that arrived first, of those that are next from their senders.
// Receives of the same tag called after it wait for it: it is not known yet whose message is whose.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "device.hpp"
#include "link.hpp"
#include "schedule.hpp"
#include "wait.hpp"

namespace multiring {

// Communicators from this number on are for the library's own calls, each beside the one whose number is so much less.
inline constexpr std::uint32_t first_internal = std::uint32_t{1} << 31;

class Communicator;
class Lane;
class Executor;

struct Delivery {
    Link* from;
    Frame frame;
    Payload payload;

    void give_back() const {
        if (frame.type == FrameType::data && payload.data != nullptr) from->give_back(payload, frame.bytes);
    }
};

// What a schedule has done here so far.
struct Record {
    std::atomic<std::uint64_t> operations{0}, bytes{0}, nanoseconds{0};  // from the start of each to its end
};

// A schedule with the links that it uses.
struct Installed {
    Communicator* communicator = nullptr;
    std::shared_ptr<const Schedule> schedule;
    std::vector<Link*> links;                  // indexed as Schedule::peers; empty until all are attached
    std::vector<Link*> message_links;          // indexed as Schedule::messages
    std::vector<std::uint32_t> message_peers;  // indexed as Schedule::messages: index into `links`
    std::vector<bool> send_is_shared;          // indexed by send: some peer reads it from the arena
    std::vector<bool> send_is_direct;          // indexed by send: some peer is sent it from where it lies
    std::vector<Link*> shared_links;           // those that share memory
    std::vector<Link*> granted_sources;        // those that send to us when they have our grant
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

inline constexpr std::uint32_t any_member = ~std::uint32_t{0};  // the `other` of a receive from whoever sends first
inline constexpr std::uint64_t no_number = ~std::uint64_t{0};   // a receive that waits for its turn has none

class Communicator {
  public:
    static constexpr std::uint64_t lane_count = 8;

    Communicator(std::uint32_t id, std::uint16_t incarnation, std::vector<int> members, int self, Executor& executor);
    ~Communicator();

    bool is_internal() const { return id >= first_internal; }
    int member_of(int world_rank) const;  // -1 if it is none; needs no mutex

    void give_number(Call& call);       // collectives
    Lane* try_begin(const Call& call);  // nullptr while its lane is taken or it is not its turn
    Lane* begin_point(Call& call);      // send, recv: numbers it too; nullptr if it has to wait for its turn
    void end(Lane& lane, bool completed);
    // How many collectives, from the first on, were completed here.
    std::uint64_t completed() const;
    void deliver(const Delivery& delivery);
    std::vector<Delivery> take_parked();                                   // what nobody will call for any more
    std::optional<std::uint64_t> fingerprint(std::uint64_t number) const;  // what the call of that number was, if known
    bool is_busy() const;                                                  // something was called and has not ended
    bool is_read_from() const;                                             // peers still read its staging

    const std::uint32_t id;
    const std::uint16_t incarnation;  // counts those that have had this id
    const std::vector<int> members;   // world ranks
    const int self;                   // our index among them
    std::mutex mutex;
    Installed unmatched;  // what receives have while they wait for their turn
    // The schedule of a send to, or receive from, each member; made by the executor when first needed.
    std::map<std::pair<Collective, std::uint32_t>, std::unique_ptr<Installed>> point_schedules;

  private:
    struct Tagged {  // the messages of one direction with the same tag
        bool receives;
        std::uint32_t member;
        std::uint64_t tag;
        auto operator<=>(const Tagged&) const = default;
    };
    using Point = std::pair<Tagged, std::uint64_t>;  // and the number among them

    static Tagged tagged(const Call& call) { return {call.collective == Collective::recv, call.other, call.tag}; }
    struct Parked {
        std::uint64_t arrived;  // which came first
        std::vector<Delivery> deliveries;
    };
    Lane& start_point(Call call);
    Lane& free_point_lane();
    void deliver_point(const Delivery& delivery);
    void serve(std::uint64_t tag);
    std::uint32_t first_sender(std::uint64_t tag) const;

    Executor& executor_;
    std::unordered_map<int, int> member_of_;

    std::array<std::unique_ptr<Lane>, lane_count> lanes_;
    std::array<std::uint64_t, lane_count> next_in_lane_;
    std::uint64_t next_number_ = 0;  // the next collective that is called here gets it
    std::uint64_t ended_ = 0;        // collectives
    std::uint64_t first_failed_ = no_number;
    std::vector<Delivery> parked_;

    std::vector<std::unique_ptr<Lane>> point_lanes_;
    std::map<Tagged, std::uint64_t> next_point_;
    std::map<Point, Lane*> points_;  // in flight
    std::map<Point, Parked> parked_points_;
    std::uint64_t parked_so_far_ = 0;
    // A receive from any member, and those called after it, which may not take its message; by tag.
    std::map<std::uint64_t, std::deque<Call>> queued_;
    std::uint64_t next_queue_number_ = 0;
    std::map<std::uint64_t, Lane*> served_;  // indexed by queue number, until `try_begin`
};

}  // namespace multiring
