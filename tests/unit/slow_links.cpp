// Which link is slow, from what is told on standard input, a line each:
//
//   host NAME RANKS              the next so many ranks are on this host
//   link UP DOWN RANK...         bytes a second of the link of a host, a rack or a site
//   rank RANK BLOCKED SENT RECEIVED [PEER RATE BUSY]...
//                                what a rank tells from now on: parts of the time, bytes a second by all links of its
//                                places
//   heard RANK PEER PART         a rank tells, too, for what part of the time data of another one came
//   window SLOW                  one passes, in which a rank is known as slow (1) or none is; prints the lines for the
//                                log and what is named then
//   flow PEER SENT RECEIVED BUSY HELD HEARD
//                                what the connections of rank 0 have counted
//   look                         at these; prints what it makes known of rank 0
#include "slow_links.hpp"

#include <cstdio>
#include <iostream>
#include <sstream>

#include "told.hpp"

using namespace multiring;

int main() {
    constexpr double window = 1.5, look = 0.25;
    EngineOptions options;
    options.world_size = 0;
    std::vector<PlaceLink> links;
    std::optional<SlowLinks> slow;
    std::vector<Status> statuses;
    std::vector<double> blocked;
    std::map<int, ConnectionCounts> flows;
    Clock::time_point now{}, looked = Clock::now();
    const auto begin = [&] {
        if (slow) return;
        slow.emplace(options);
        slow->expect(links);
        now = Clock::now();
        statuses.resize(static_cast<std::size_t>(options.world_size));
        blocked.resize(statuses.size());
    };
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string what;
        words >> what;
        if (what == "host") {
            add_host(options, words);
        } else if (what == "link") {
            PlaceLink link;
            words >> link.up >> link.down;
            for (int rank; words >> rank;) link.ranks.push_back(rank);
            links.push_back(link);
        } else if (what == "rank") {
            begin();
            std::size_t rank = 0;
            words >> rank;
            NetworkRates& network = statuses.at(rank).network;
            network = {};
            const std::size_t outermost = Places(links, options.world_size).of(static_cast<int>(rank)).size() - 1;
            words >> blocked.at(rank) >> network.sent[outermost] >> network.received[outermost];
            for (NetworkRates::Busy& flow : network.busiest)
                if (!(words >> flow.peer >> flow.rate >> flow.busy)) flow = {};
        } else if (what == "heard") {
            std::size_t rank = 0;
            NetworkRates::Heard heard;
            words >> rank >> heard.peer >> heard.part;
            NetworkRates& network = statuses.at(rank).network;
            network.heard[network.heard[0].peer < 0 ? 0 : 1] = heard;
        } else if (what == "window") {
            begin();
            bool rank_is_slow = false;
            words >> rank_is_slow;
            now += std::chrono::milliseconds(1500);
            for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
                statuses[rank].counts.seconds += window;
                statuses[rank].counts.in_calls += blocked[rank] * window;
            }
            for (const std::string& said : slow->observe(statuses, now, rank_is_slow)) std::puts(said.c_str());
            if (const std::optional<SlowLink> link = slow->slowest())
                std::printf("slow %s %s %.0f %.0f %.1f%s\n", link->from.empty() ? "-" : link->from.c_str(),
                            link->to.empty() ? "-" : link->to.c_str(), link->rate, link->expected, link->seconds,
                            link->both_ways ? (" both ways: " + link->name).c_str() : "");
            else
                std::puts("none");
        } else if (what == "flow") {
            ConnectionCounts flow;
            words >> flow.peer >> flow.sent >> flow.received >> flow.busy >> flow.held >> flow.heard;
            flows[flow.peer] = flow;
        } else if (what == "look") {
            begin();
            std::vector<ConnectionCounts> all;
            for (const auto& [peer, flow] : flows) all.push_back(flow);
            looked += std::chrono::milliseconds(static_cast<int>(1000 * look));
            slow->look(all, looked);
            const NetworkRates& network = slow->network();
            std::printf("%.0f %.0f", network.sent[0], network.received[0]);
            for (const NetworkRates::Busy& flow : network.busiest)
                std::printf(" %d %.0f %.2f", flow.peer, flow.rate, flow.busy);
            for (const NetworkRates::Heard& heard : network.heard) std::printf(" %d %.2f", heard.peer, heard.part);
            std::puts("");
        }
    }
}
