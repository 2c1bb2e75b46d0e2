// Blame: who is to blame when a call waits.
//
// Every rank's wait states are edges to the ranks that it waits for. Followed to their end they lead to the culprit:
//
//     rank 5 waits for 4, which waits for 3, which is silent           -> 3, silent
//     rank 5 waits for 4, which waits for 3, which called nothing      -> 3, late
//     rank 0 receives from 1, which receives from 0                    -> 0 and 1, in a cycle
//
// Ranks often wait for each other in one and the same call, while bytes are on their way: that is no cycle. Pure.
#pragma once

#include <span>
#include <vector>

#include "status.hpp"

namespace multiring {

enum class Guilt : std::uint8_t {
    unknown,  // nothing is known of these ranks: they are the ones that the call itself waits for
    here,     // in the call, and waiting for nobody
    sent,     // done with the call: its bytes have not arrived
    cycle,    // wait for each other in different calls
    late,     // alive, and waiting for nothing, but not in the call
    silent    // no longer heard of
};

struct Blame {
    Guilt guilt = Guilt::unknown;
    std::vector<int> ranks;  // ascending; in a cycle, in its order
};

// The ranks for which `rank` waits in the end, in its call `waiting`. `statuses` are indexed by rank; a rank is silent
// after `silent_seconds` without a beat.
Blame find_blame(std::span<const Status> statuses, int rank, const Waiting& waiting, double silent_seconds);

}  // namespace multiring
