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
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "call.hpp"
#include "endpoint.hpp"
#include "lane.hpp"

namespace multiring {

class Communicator final : public CommunicatorBase {
  public:
    Communicator(std::uint32_t id, std::uint16_t incarnation, std::vector<int> members, int self, Endpoint& endpoint);

    void give_number(Call& call);       // collectives
    Lane* try_begin(const Call& call);  // nullptr while its lane is taken or it is not its turn
    Lane* begin_point(Call& call);      // send, recv: numbers it too; nullptr if it has to wait for its turn
    void end(Lane& lane, bool completed);
    // Number of collectives, from the first on, that were completed here.
    std::uint64_t completed() const;
    void deliver(const Delivery& delivery);
    std::vector<Delivery> take_parked();                             // what nobody will call for any more
    std::optional<Signature> signature(std::uint64_t number) const;  // what the call of that number was, if known
    void refuse(Call& call);                                         // note what it would have been, and number it
    bool is_busy() const;                                            // something was called and has not ended
    bool is_read_from() const;                                       // peers still read its staging

  private:
    struct Tagged {  // the messages of one direction with the same tag
        bool receives;
        std::uint32_t member;
        std::uint64_t tag;
        auto operator<=>(const Tagged&) const = default;
    };
    using TaggedNumber = std::pair<Tagged, std::uint64_t>;  // and the number among them

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

    Endpoint& endpoint_;
    Installed unmatched_;  // what receives have while they wait for their turn
    // The schedule of a send to, or receive from, each member; made when first needed.
    std::map<std::pair<Collective, std::uint32_t>, std::unique_ptr<Installed>> point_schedules_;

    std::array<std::unique_ptr<Lane>, lanes_of_communicator> lanes_;
    std::array<std::uint64_t, lanes_of_communicator> next_in_lane_;
    struct Entered {
        std::uint64_t number;
        Signature signature;
    };
    std::array<Entered, lanes_of_communicator> entered_{};  // the latest collectives, begun in a lane or not yet
    std::uint64_t next_number_ = 0;                         // the next collective that is called here gets it
    std::optional<Entered> refused_;                        // the first collective after a failure, which never began
    std::uint64_t ended_ = 0;                               // collectives
    std::uint64_t first_failed_ = no_number;
    std::vector<Delivery> parked_;

    std::vector<std::unique_ptr<Lane>> point_lanes_;
    std::map<Tagged, std::uint64_t> next_point_;
    std::map<TaggedNumber, Lane*> points_;  // in flight
    std::map<TaggedNumber, Parked> parked_points_;
    std::uint64_t parked_so_far_ = 0;
    // A receive from any member, and those called after it, which may not take its message; by tag.
    std::map<std::uint64_t, std::deque<Call>> queued_;
    std::uint64_t next_queue_number_ = 0;
    std::map<std::uint64_t, Lane*> served_;  // indexed by queue number, until `try_begin`
};

// The communicator that a call was made of.
inline Communicator& communicator_of(const Call& call) {
    return static_cast<Communicator&>(*call.installed->communicator);
}

}  // namespace multiring
