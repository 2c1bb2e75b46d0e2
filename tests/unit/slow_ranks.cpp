// Which rank is slow, from what is told on standard input, a line each:
//
//   host NAME RANKS       the next so many ranks are on this host
//   rank RANK IN_CALLS RAN QUEUED
//                         what a rank does from now on, as parts of the time; it calls 10 times a second
//   window                one passes; prints the lines for the log and what is named then
//   ends                  prints all that were named so far
#include "slow_ranks.hpp"

#include <cstdio>
#include <iostream>
#include <sstream>

#include "told.hpp"

using namespace multiring;

namespace {

void print(const char* what, const SlowRank& slow) {
    std::printf("%s", what);
    for (int rank : slow.ranks) std::printf(" %d", rank);
    std::printf(" %s %.2f %.1f %d\n", slow.host.c_str(), slow.share, slow.seconds, static_cast<int>(slow.reason));
}

}  // namespace

int main() {
    constexpr double window = 1.5;
    EngineOptions options;
    options.world_size = 0;
    std::optional<SlowRanks> slow;
    std::vector<Status> statuses;
    struct Part {
        double in_calls = 0, ran = 0, queued = 0;
    };
    std::vector<Part> parts;
    Clock::time_point now{};
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
        } else if (what == "window") {
            if (!slow) {
                slow.emplace(options);
                now = Clock::now();
                statuses.resize(parts.size());
            }
            now += std::chrono::milliseconds(1500);
            for (std::size_t rank = 0; rank < parts.size(); ++rank) {
                Counts& counts = statuses[rank].counts;
                counts.calls += 15;
                counts.seconds += window;
                counts.in_calls += parts[rank].in_calls * window;
                counts.ran += parts[rank].ran * window;
                counts.queued += parts[rank].queued * window;
            }
            for (const std::string& said : slow->observe(statuses, now, false)) std::puts(said.c_str());
            if (const std::optional<SlowRank> found = slow->slowest())
                print("slow", *found);
            else
                std::puts("none");
        } else if (what == "ends") {
            for (const SlowRank& each : slow->so_far()) print("was", each);
        }
    }
}
