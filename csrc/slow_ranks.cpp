#include "slow_ranks.hpp"

#include <algorithm>
#include <cmath>

namespace multiring {
namespace {

constexpr std::uint64_t least_calls = 6;            // in a window
constexpr double least_share = 0.1;                 // part of the time that the others wait
constexpr double same_rhythm = 0.2, few_calls = 2;  // part, and number, of calls by which ranks may differ

// Activities of a rank in a window, each as a part of the time.
struct Shares {
    double seconds = 0;
    double calls = 0;  // per second
    double in_calls = 0, ran = 0, queued = 0;
    bool knows_queue = false;
};

Shares shares(const Counts& from, const Counts& to) {
    const double time = to.seconds - from.seconds;
    return {time,
            static_cast<double>(to.calls - from.calls) / time,
            (to.in_calls - from.in_calls) / time,
            (to.ran - from.ran) / time,
            (to.queued - from.queued) / time,
            from.queued >= 0 && to.queued >= 0};
}

template <class Value>
double median(const std::vector<Shares>& all, Value value) {
    std::vector<double> values;
    for (const Shares& each : all) values.push_back(value(each));
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

}  // namespace

SlowRanks::SlowRanks(const EngineOptions& options) : options_(options), counts_(options.world_size) {}

std::vector<std::string> SlowRanks::observe(std::span<const Status> statuses, Clock::time_point now,
                                            bool link_is_slow) {
    counts_.take(statuses);
    const auto own = static_cast<std::size_t>(options_.rank);
    if (options_.world_size < 2 || !counts_.is_over(now)) return {};
    if (counts_.latest(own).calls - counts_.before(own).calls < least_calls) return {};  // the window goes on
    const std::optional<SlowRank> found = link_is_slow ? SlowRank{} : judge();
    const double seconds = counts_.next(now, found.has_value());
    if (counts_.stands_untold()) return {};

    std::vector<std::string> lines;
    const std::optional<SlowRank> named = slowest();
    const std::vector<int> suspects = found ? found->ranks : std::vector<int>{};
    windows_ = !suspects.empty() && suspects == suspects_ ? windows_ + 1 : 1;
    late_seconds_ = windows_ > 1 ? late_seconds_ + seconds : seconds;
    suspects_ = suspects;
    clear_ = named && suspects != named->ranks ? clear_ + 1 : 0;
    if (named && (clear_ >= CountWindows::to_clear || !found)) {
        lines.push_back(names(named->ranks) + " no longer keeps the others waiting");
        named_.clear();
    }
    if (!suspects.empty() && windows_ >= CountWindows::to_name) {
        SlowRank slow = *found;
        slow.seconds = late_seconds_;
        slow.began = now - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(late_seconds_));
        const bool is_new = !named || named->ranks != slow.ranks;
        if (is_new) lines.push_back(describe(slow));
        name(slow, is_new);
    }
    return lines;
}

std::optional<SlowRank> SlowRanks::judge() const {
    std::vector<Shares> all;
    for (std::size_t rank = 0; rank < counts_.ranks(); ++rank) {
        if (!counts_.has_heard_of(rank)) return {};
        all.push_back(shares(counts_.before(rank), counts_.latest(rank)));
    }
    const double calls = median(all, [](const Shares& each) { return each.calls; });
    const double in_calls = median(all, [](const Shares& each) { return each.in_calls; });
    const double ran = median(all, [](const Shares& each) { return each.ran; });
    SlowRank slow;
    Shares of_slow;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
        const double expected = calls * all[rank].seconds;
        if (std::abs(all[rank].calls * all[rank].seconds - expected) > few_calls + same_rhythm * expected)
            return {};  // they do different things
        if (in_calls - all[rank].in_calls < least_share) continue;
        if (slow.ranks.empty() || all[rank].in_calls < of_slow.in_calls) of_slow = all[rank];
        slow.ranks.push_back(static_cast<int>(rank));
    }
    if (slow.ranks.empty() || 2 * slow.ranks.size() > all.size()) return SlowRank{};
    const std::string host = options_.host(slow.ranks.front());
    if (slow.ranks.size() > 1 && !std::all_of(slow.ranks.begin(), slow.ranks.end(),
                                              [&](int rank) { return !host.empty() && options_.host(rank) == host; }))
        return SlowRank{};
    slow.host = host;
    slow.share = in_calls - of_slow.in_calls;
    const double ran_longer = of_slow.ran - ran;
    if (2 * ran_longer >= slow.share)
        slow.reason = SlowRank::Reason::computes;
    else if (!of_slow.knows_queue)
        slow.reason = SlowRank::Reason::unknown;
    else
        slow.reason =
            2 * of_slow.queued >= slow.share - ran_longer ? SlowRank::Reason::has_no_core : SlowRank::Reason::sleeps;
    return slow;
}

std::string SlowRanks::names(const std::vector<int>& ranks) const {
    if (ranks.size() == 1) return options_.rank_name(ranks.front());
    std::string text = "host " + options_.host(ranks.front()) + " (ranks ";
    for (std::size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
    return text + ")";
}

std::string SlowRanks::describe(const SlowRank& slow) const {
    static const auto percent = [](double share) { return std::to_string(std::lround(100 * share)) + " %"; };
    std::string text = names(slow.ranks) + " keeps the others waiting for " + percent(slow.share) +
                       " of the time, for " + std::to_string(std::lround(slow.seconds)) +
                       " s now: between collectives it ";
    switch (slow.reason) {
        case SlowRank::Reason::computes: return text + "computes for longer than they do";
        case SlowRank::Reason::has_no_core: return text + "is ready to run and has no core, as others run there";
        case SlowRank::Reason::sleeps: return text + "sleeps, or waits for data, a lock or another process";
        case SlowRank::Reason::unknown: break;
    }
    return text + "does not run";
}

void SlowRanks::name(const SlowRank& slow, bool is_new) {
    if (!is_new) {
        named_.go_on([&](SlowRank& now, SlowRank& kept) {
            const double share = std::max(kept.share, slow.share);
            now = kept = slow;
            kept.share = share;
        });
        return;
    }
    named_.begin(slow);
    if (std::find(slow.ranks.begin(), slow.ranks.end(), options_.rank) != slow.ranks.end())
        named_here_.store(true, std::memory_order_relaxed);
}

}  // namespace multiring
