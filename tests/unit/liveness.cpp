// What two ranks of a host know of another host's ranks: rank 0 hears rank 2, which tells of rank 3, and rank 1 reads
// what rank 0 publishes. Each argument is a look: "+" 2 sends a beat, and tells of 3; "." it sends nothing. Each look
// prints what ranks 0 and 1 know: whether they hear 2 and 3, and the beats of 3.
#include "liveness.hpp"

#include <cstdio>
#include <string>
#include <thread>

using namespace multiring;

namespace {

constexpr int world_size = 4;
constexpr double timeout = 2;

struct Nobody final : Receiver {
    void deliver(Transport&, const Frame&, Payload) override {}
    void released(int, std::uint32_t) override {}
    void garbage(int, const std::string&) override {}
};

std::shared_ptr<Arena> arena_of(int rank) {
    return std::make_shared<Arena>(std::size_t{1} << 20, true, rank, world_size, 0);
}

std::vector<std::byte> told_of(int rank, std::uint64_t beats) {
    Status status;
    status.rank = rank;
    status.beats = beats;
    const auto* bytes = reinterpret_cast<const std::byte*>(&status);
    return {bytes, bytes + status.bytes()};
}

}  // namespace

int main(int count, char** words) {
    Nobody nobody;
    const auto first = arena_of(0), second = arena_of(1);
    first->make_heard();
    LocalTransport to_second(1, 0, nobody, first, std::make_unique<PeerArena>(second), Descriptor());
    LocalTransport to_first(0, 1, nobody, second, std::make_unique<PeerArena>(first), Descriptor());
    const LocalTransport* const of_first[] = {&to_second};
    const LocalTransport* const of_second[] = {&to_first};
    const int edges[] = {2};
    const std::vector<bool> departed(world_size);
    Liveness teller(0, world_size, timeout), follower(1, world_size, timeout);
    for (int look = 1; look < count; ++look) {
        for (Liveness* each : {&teller, &follower}) {
            Status own;
            own.rank = each == &teller ? 0 : 1;
            own.beats = static_cast<std::uint64_t>(look);
            each->set_own(own);
            (each == &teller ? first : second)->header().status.publish(own);
        }
        if (words[look][0] == '+') {
            teller.heard(2);
            teller.take(2, told_of(2, static_cast<std::uint64_t>(look)));
            teller.take(2, told_of(3, static_cast<std::uint64_t>(look)));
        }
        teller.look(of_first, edges, departed, true);
        teller.publish_heard(first->heard());
        follower.look(of_second, {}, departed, true);
        for (const Liveness* each : {&teller, &follower})
            std::printf("%d %d %d ", each->hears(2), each->hears(3), static_cast<int>(each->statuses()[3].beats));
        std::printf("\n");
        std::this_thread::sleep_for(teller.interval());
    }
}
