#include "slow_links.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace multiring {
namespace {

// A link is slow whose connections are busy for this part of a window. Measured:
// benchmarks/results/2026-11-28-constants.md, Engine.
constexpr double least_busy = 0.5;
constexpr double slow_part = 0.5;        // part of what the plan counts on
constexpr std::uint64_t bulk = 1 << 16;  // bytes; what a smaller message takes is latency
constexpr int looks_for_one_held = 3;    // bulk is on its way in one of so many looks
constexpr double least_blocked = 0.2;    // part of the time that the median rank is in calls
constexpr double least_heard = 0.7;      // part of the longest time in which data came over a slow link

double seconds_between(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
}

std::string rate_text(double bytes_a_second) {
    char text[32];
    const double mega = bytes_a_second / 1e6;
    std::snprintf(text, sizeof text, mega >= 100 ? "%.0f MB/s" : "%.3g MB/s", mega);
    return text;
}

}  // namespace

// ---- places -------------------------------------------------------------------------------------------------------

Places::Places(std::vector<PlaceLink> links, int world_size)
    : links_(std::move(links)), of_(static_cast<std::size_t>(world_size)) {
    for (std::size_t place = 0; place < links_.size(); ++place) {
        if (!(links_[place].up > 0 && links_[place].down > 0))
            throw std::invalid_argument("a link carries more than 0 bytes a second");
        for (const int rank : links_[place].ranks) {
            if (rank < 0 || rank >= world_size)
                throw std::invalid_argument("rank " + std::to_string(rank) + " in a world of " +
                                            std::to_string(world_size));
            of_[static_cast<std::size_t>(rank)].push_back(static_cast<int>(place));
        }
    }
    for (auto& places : of_) {
        if (places.empty() || places.size() > NetworkRates::most_levels)
            throw std::invalid_argument("a rank is in 1 to " + std::to_string(NetworkRates::most_levels) + " places");
        std::sort(places.begin(), places.end(), [this](int one, int other) {
            return (*this)[one].ranks.size() != (*this)[other].ranks.size()
                       ? (*this)[one].ranks.size() < (*this)[other].ranks.size()
                       : one < other;
        });
    }
}

std::size_t Places::left_by(int rank, int other) const {
    const std::vector<int>&mine = of(rank), &theirs = of(other);
    std::size_t left = std::min(mine.size(), theirs.size());
    while (left > 0 && mine[left - 1] == theirs[left - 1]) --left;
    return left;
}

// ---- what a rank measures -----------------------------------------------------------------------------------------

void LinkMeter::look(std::span<const ConnectionCounts> connections, const Places& places, int rank,
                     Clock::time_point now) {
    if (began_ == Clock::time_point{}) began_ = now;
    ++looks_;
    for (const ConnectionCounts& connection : connections) {
        Seen& seen = seen_.try_emplace(connection.peer, Seen{connection, connection}).first->second;
        seen.latest = connection;
        seen.looks_held += connection.held >= bulk ? 1 : 0;
    }
    if (now - began_ < link_window) return;
    const double time = seconds_between(began_, now);
    network_ = {};
    for (auto& [peer, seen] : seen_) {
        const auto sent = static_cast<float>(static_cast<double>(seen.latest.sent - seen.before.sent) / time);
        const auto received =
            static_cast<float>(static_cast<double>(seen.latest.received - seen.before.received) / time);
        const auto busy = static_cast<float>(std::clamp((seen.latest.busy - seen.before.busy) / time, 0.0, 1.0));
        const bool carries_bulk = looks_for_one_held * seen.looks_held >= looks_;
        NetworkRates::Heard heard{peer, static_cast<float>((seen.latest.heard - seen.before.heard) / time)};
        seen.before = seen.latest;
        seen.looks_held = 0;
        const std::size_t left = places.left_by(rank, peer);
        if (left == 0) continue;
        network_.sent[left - 1] += sent;
        network_.received[left - 1] += received;
        for (NetworkRates::Heard& kept : network_.heard)
            if (heard.part > kept.part) std::swap(heard, kept);
        if (!carries_bulk) continue;
        NetworkRates::Busy next{peer, sent, busy};
        for (NetworkRates::Busy& kept : network_.busiest)
            if (next.busy > kept.busy) std::swap(next, kept);
    }
    began_ = now;
    looks_ = 0;
}

// ---- who is slow --------------------------------------------------------------------------------------------------

SlowLinks::SlowLinks(const EngineOptions& options) : options_(options), counts_(options.world_size, link_window) {}

void SlowLinks::expect(std::vector<PlaceLink> links) {
    if (expects()) throw std::invalid_argument("what links carry was said before");
    places_ = Places(std::move(links), options_.world_size);
    expects_.store(true, std::memory_order_release);
}

void SlowLinks::look(std::span<const ConnectionCounts> connections, Clock::time_point now) {
    meter_.look(connections, places_, options_.rank, now);
}

std::vector<std::string> SlowLinks::observe(std::span<const Status> statuses, Clock::time_point now,
                                            bool rank_is_slow) {
    counts_.take(statuses);
    if (!counts_.is_over(now)) return {};
    const std::optional<Window> found = judge(statuses);
    const double seconds = counts_.next(now, found.has_value());
    if (counts_.stands_untold()) return {};

    std::vector<std::string> lines;
    const bool is_slow = found && !found->slow.empty();
    if (is_slow && goes_on(*found)) {
        ++windows_;
        slow_seconds_ += seconds;
    } else {
        suspects_.clear();
        windows_ = is_slow ? 1 : 0;
        slow_seconds_ = is_slow ? seconds : 0;
    }
    if (is_slow)
        for (const auto& [pair, slow] : found->slow) {
            ++suspects_[pair].windows;
            suspects_[pair].heard += slow.heard;
        }
    if (name_) {
        const std::optional<Carried> now_carried = is_slow ? carried(*name_, *found) : std::nullopt;
        clear_ = now_carried ? 0 : clear_ + 1;
        if (now_carried)
            go_on(*now_carried, seconds);
        else if (clear_ >= to_clear || !found)
            lines.push_back(clear());
    }
    if (!name_ && windows_ >= to_name && !rank_is_slow) {
        const Name name = name_of(windows_ / 2 + 1);
        const std::optional<Carried> now_carried = carried(name, *found);
        if (!now_carried) return lines;
        name_ = name;
        clear_ = 0;
        const auto ago = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(slow_seconds_));
        const SlowLink slow{host(name.from),   host(name.to),         name.both_ways, words(name),
                            now_carried->rate, now_carried->expected, slow_seconds_,  now - ago};
        named_.begin(slow);
        lines.push_back(slow.name + (name.is_one() ? " carries " : " carry ") + rate_text(slow.rate) + ", " +
                        std::to_string(std::lround(100 * slow.rate / slow.expected)) + " % of the " +
                        rate_text(slow.expected) + " that the plan counts on, for " +
                        std::to_string(std::lround(slow.seconds)) + " s now");
    }
    return lines;
}

// A link is slow that was busy for long while no place's link on the way carried what it can, all ranks together.
std::optional<SlowLinks::Window> SlowLinks::judge(std::span<const Status> statuses) const {
    std::vector<double> all_blocked;
    Window found;
    for (std::size_t place = 0; place < places_.size(); ++place) {
        found.up.push_back({0, places_[static_cast<int>(place)].up});
        found.down.push_back({0, places_[static_cast<int>(place)].down});
    }
    for (std::size_t rank = 0; rank < counts_.ranks(); ++rank) {
        if (!counts_.has_heard_of(rank)) return {};
        all_blocked.push_back(blocked(rank, statuses[rank]));
        const std::vector<int>& places = places_.of(static_cast<int>(rank));
        const NetworkRates& network = statuses[rank].network;
        for (std::size_t level = 0; level < places.size(); ++level)
            for (std::size_t inner = 0; inner <= level; ++inner) {
                const auto place = static_cast<std::size_t>(places[inner]);
                found.up[place].rate += network.sent[level];
                found.down[place].rate += network.received[level];
            }
    }
    const auto middle = all_blocked.begin() + static_cast<std::ptrdiff_t>(all_blocked.size() / 2);
    std::nth_element(all_blocked.begin(), middle, all_blocked.end());
    if (*middle < least_blocked) return {};  // whatever it is, it keeps nobody
    for (std::size_t rank = 0; rank < counts_.ranks(); ++rank)
        for (const NetworkRates::Busy& busy : statuses[rank].network.busiest) {
            if (busy.peer < 0 || busy.peer >= options_.world_size || busy.busy < least_busy) continue;
            const auto from = static_cast<int>(rank);
            const std::size_t left = places_.left_by(from, busy.peer);
            double expected = 0;
            bool is_used = left == 0;
            const auto pass = [&](const Carried& link) {
                is_used |= link.rate >= slow_part * busy.busy * link.expected;
                expected = expected == 0 ? link.expected : std::min(expected, link.expected);
            };
            for (std::size_t level = 0; level < left; ++level) {
                pass(found.up[static_cast<std::size_t>(places_.of(from)[level])]);
                pass(found.down[static_cast<std::size_t>(places_.of(busy.peer)[level])]);
            }
            if (is_used) continue;
            Slow& slow = found.slow[{places_.of(from)[0], places_.of(busy.peer)[0]}];
            slow.rate += busy.rate / busy.busy;
            slow.expected = expected;
            slow.heard = std::max(slow.heard, std::min(heard(statuses, from, busy.peer) / busy.busy, 1.0));
        }
    return found;
}

// Part of the time in which data of one rank came to another one.
double SlowLinks::heard(std::span<const Status> statuses, int from, int to) const {
    double least = 1;
    for (const NetworkRates::Heard& each : statuses[static_cast<std::size_t>(to)].network.heard) {
        if (each.peer == from) return each.part;
        least = std::min<double>(least, each.part);
    }
    return least;  // at most, where others were heard for longer; a free entry has 0
}

double SlowLinks::blocked(std::size_t rank, const Status& status) const {
    const Counts &before = counts_.before(rank), &latest = counts_.latest(rank);
    const double time = latest.seconds - before.seconds;
    double longest = (latest.in_calls - before.in_calls) / time;
    for (const Waiting& waiting : std::span(status.waiting, status.waiting_count))  // not among the others yet
        if (waiting.is_blocked) longest = std::max(longest, waiting.seconds / time);
    return longest;
}

bool SlowLinks::goes_on(const Window& found) const {
    return std::any_of(found.slow.begin(), found.slow.end(),
                       [&](const auto& each) { return suspects_.contains(each.first); });
}

// Acknowledgements that wait behind a slow way make the way back look busy too, but its data come in bursts: it is not
// named where the data of another slow link come all the time.
SlowLinks::Name SlowLinks::name_of(int least_windows) const {
    double longest = 0;
    for (const auto& [pair, suspect] : suspects_)
        if (suspect.windows >= least_windows) longest = std::max(longest, suspect.mean_heard());
    std::vector<Pair> pairs;
    for (const auto& [pair, suspect] : suspects_)
        if (suspect.windows >= least_windows && suspect.mean_heard() >= least_heard * longest) pairs.push_back(pair);
    if (pairs.empty()) return {};
    const auto [from, to] = pairs.front();
    if (pairs.size() == 1) return {from, to};
    if (pairs.size() == 2 && pairs.back() == Pair{to, from}) return {from, to, true};
    for (const int host : {from, to}) {
        const auto all = [&](auto has) { return std::all_of(pairs.begin(), pairs.end(), has); };
        if (all([&](const Pair& pair) { return pair.first == host; })) return {host, nowhere};
        if (all([&](const Pair& pair) { return pair.second == host; })) return {nowhere, host};
        if (all([&](const Pair& pair) { return pair.first == host || pair.second == host; })) return {host, host};
    }
    return {};
}

// Rate and expected rate of the slowest named link; nullopt if none of them is slow.
std::optional<SlowLinks::Carried> SlowLinks::carried(const Name& name, const Window& found) const {
    std::optional<Carried> least;
    const auto take = [&](const Carried& each) {
        if (!least || each.part() < least->part()) least = each;
    };
    bool leaves = false, arrives = false;
    for (const auto& [pair, each] : found.slow) {
        const bool is_out = pair.first == name.from, is_in = pair.second == name.to;
        if (name.from == nowhere && name.to == nowhere) take(each);
        if (name.from == name.to || name.from == nowhere || name.to == nowhere) {
            leaves |= name.from != nowhere && is_out;
            arrives |= name.to != nowhere && is_in;
        } else if ((is_out && is_in) || (name.both_ways && pair == Pair{name.to, name.from})) {
            take(each);
        }
    }
    if (leaves) take(found.up[static_cast<std::size_t>(name.from)]);
    if (arrives) take(found.down[static_cast<std::size_t>(name.to)]);
    return least;
}

std::string SlowLinks::host(int place) const {
    return place == nowhere ? "" : options_.host(places_[place].ranks.front());
}

std::string SlowLinks::words(const Name& name) const {
    const std::string from = "host " + host(name.from), to = "host " + host(name.to);
    if (name.from == nowhere && name.to == nowhere) return "several links between the hosts";
    if (name.from == name.to) return "the links of " + from;
    if (name.to == nowhere) return "the links from " + from;
    if (name.from == nowhere) return "the links to " + to;
    if (name.both_ways) return "the links between " + from + " and " + to;
    return "the link from " + from + " to " + to;
}

void SlowLinks::go_on(const Carried& carried, double seconds) {
    named_.go_on([&](SlowLink& now, SlowLink& least) {
        now.rate = carried.rate;
        now.expected = carried.expected;
        now.seconds += seconds;
        least.seconds = now.seconds;
        if (carried.part() > least.rate / least.expected) return;
        least.rate = carried.rate;
        least.expected = carried.expected;
    });
}

std::string SlowLinks::clear() {
    std::string line =
        words(*name_) + (name_->is_one() ? " no longer keeps" : " no longer keep") + " the ranks waiting";
    name_.reset();
    named_.clear();
    return line;
}

}  // namespace multiring
