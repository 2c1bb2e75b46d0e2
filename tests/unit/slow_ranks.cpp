// Which rank is slow, from what is told on standard input, a line each:
//
//   host NAME RANKS       the next so many ranks are on this host
//   rank RANK IN_CALLS RAN QUEUED
//                         what a rank does from now on, as parts of the time
//   steps N               in a second from now on; 10 before
//   calls N               in a step from now on, all but the first a millisecond after the one before; 1 before
//   window [SECONDS]      so much passes, 1 s by default; prints the lines for the log and what is named then
//   ends                  prints all that were named so far
#include "slow_ranks.hpp"

#include <cmath>
#include <cstdio>
#include <iostream>
#include <sstream>

#include "told.hpp"

using namespace multiring;

namespace {

void print(const char* what, const SlowRank& slow) {
    std::printf("%s", what);
    for (int rank : slow.ranks) std::printf(" %d", rank);
    std::printf(" %s %.2f %.1f %d %d\n", slow.host.c_str(), slow.share, slow.seconds, slow.steps,
                static_cast<int>(slow.reason));
}

}  // namespace

int main() {
    EngineOptions options;
    options.world_size = 0;
    std::optional<SlowRanks> slow;
    std::vector<Status> statuses;
    struct Part {
        double in_calls = 0, ran = 0, queued = 0;
    };
    std::vector<Part> parts;
    Clock::time_point now{};
    Rhythm rhythm;
    double steps = 10;
    int calls = 1;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string what;
        words >> what;
        if (what == "host") {
            add_host(options, words);
        } else if (what == "rank") {
            parts.resize(static_cast<std::size_t>(options.world_size));
            std::size_t rank = 0;
            words >> rank;
            Part& part = parts.at(rank);
            words >> part.in_calls >> part.ran >> part.queued;
        } else if (what == "steps") {
            words >> steps;
        } else if (what == "calls") {
            words >> calls;
        } else if (what == "window") {
            double window = 1;
            words >> window;
            if (!slow) {
                slow.emplace(options);
                rhythm.call(now = Clock::now());
                statuses.resize(parts.size());
            }
            const int steps_now = static_cast<int>(std::lround(steps * window));
            for (int step = 1; step <= steps_now; ++step)
                for (int call = 0; call < calls; ++call)
                    rhythm.call(now + seconds(window * step / steps_now - 0.001 * (calls - 1 - call)));
            now += seconds(window);
            for (std::size_t rank = 0; rank < parts.size(); ++rank) {
                Counts& counts = statuses[rank].counts;
                counts.calls += static_cast<std::uint64_t>(steps_now * calls);
                counts.seconds += window;
                counts.in_calls += parts[rank].in_calls * window;
                counts.ran += parts[rank].ran * window;
                counts.queued += parts[rank].queued * window;
            }
            for (const std::string& said : slow->observe(statuses, rhythm, now, false)) std::puts(said.c_str());
            if (const std::optional<SlowRank> found = slow->slowest())
                print("slow", *found);
            else
                std::puts("none");
        } else if (what == "ends") {
            for (const SlowRank& each : slow->so_far()) print("was", each);
        }
    }
}
