#include "slow_ranks.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace multiring {
namespace {

constexpr std::uint64_t least_calls = 6;  // in a window
constexpr double least_share = 0.1;       // part of the time that the others wait
constexpr double comparable = 0.5;        // part of what the latest rank is late by: less is not named beside it
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

// The ranks that were late in a window, and the shares that tell it.
struct Verdict {
    std::vector<int> late;
    std::vector<Shares> all;       // one for each rank
    double in_calls = 0, ran = 0;  // medians
};

// Nothing where that is unknown.
std::optional<Verdict> judge(const CountWindows& counts) {
    Verdict verdict;
    std::vector<Shares>& all = verdict.all;
    for (std::size_t rank = 0; rank < counts.ranks(); ++rank) {
        if (!counts.has_heard_of(rank)) return {};
        all.push_back(shares(counts.before(rank), counts.latest(rank)));
    }
    const double calls = median(all, [](const Shares& each) { return each.calls; });
    verdict.in_calls = median(all, [](const Shares& each) { return each.in_calls; });
    verdict.ran = median(all, [](const Shares& each) { return each.ran; });
    double longest = 0;
    for (const Shares& each : all) {
        const double expected = calls * each.seconds;
        if (std::abs(each.calls * each.seconds - expected) > few_calls + same_rhythm * expected)
            return {};  // they do different things
        longest = std::max(longest, verdict.in_calls - each.in_calls);
    }
    for (std::size_t rank = 0; rank < all.size(); ++rank)
        if (verdict.in_calls - all[rank].in_calls >= std::max(least_share, comparable * longest))
            verdict.late.push_back(static_cast<int>(rank));
    if (2 * verdict.late.size() > all.size()) verdict.late.clear();  // the median is of those that are late
    return verdict;
}

// These ranks as slow, with the share and the reason of the latest of them.
SlowRank slow_by(const Verdict& verdict, const std::vector<int>& ranks, const EngineOptions& options) {
    const auto of = [&](int rank) -> const Shares& { return verdict.all[static_cast<std::size_t>(rank)]; };
    const int latest = *std::min_element(ranks.begin(), ranks.end(),
                                         [&](int one, int other) { return of(one).in_calls < of(other).in_calls; });
    SlowRank slow;
    slow.ranks = ranks;
    slow.host = options.host(latest);
    slow.share = verdict.in_calls - of(latest).in_calls;
    const double ran_longer = of(latest).ran - verdict.ran;
    if (2 * ran_longer >= slow.share)
        slow.reason = SlowRank::Reason::computes;
    else if (!of(latest).knows_queue)
        slow.reason = SlowRank::Reason::unknown;
    else
        slow.reason =
            2 * of(latest).queued >= slow.share - ran_longer ? SlowRank::Reason::has_no_core : SlowRank::Reason::sleeps;
    return slow;
}

std::vector<int> in_both(const std::vector<int>& some, const std::vector<int>& others) {
    std::vector<int> found;
    std::copy_if(some.begin(), some.end(), std::back_inserter(found),
                 [&](int each) { return std::find(others.begin(), others.end(), each) != others.end(); });
    return found;
}

}  // namespace

SlowRanks::SlowRanks(const EngineOptions& options) : options_(options), counts_(options.world_size) {}

std::vector<std::string> SlowRanks::observe(std::span<const Status> statuses, Clock::time_point now,
                                            bool link_is_slow) {
    counts_.take(statuses);
    const auto own = static_cast<std::size_t>(options_.rank);
    if (options_.world_size < 2 || !counts_.is_over(now)) return {};
    if (counts_.latest(own).calls - counts_.before(own).calls < least_calls) return {};  // the window goes on
    const std::optional<Verdict> found = link_is_slow ? Verdict{} : judge(counts_);
    const auto began = now - std::chrono::duration_cast<Clock::duration>(
                                 std::chrono::duration<double>(counts_.next(now, found.has_value())));
    if (counts_.stands_untold()) return {};

    std::vector<std::string> lines;
    const std::optional<SlowRank> named = slowest();
    const std::vector<int> late = found ? found->late : std::vector<int>{};
    const std::vector<int> again = in_both(suspects_, late);
    windows_ = again.empty() ? 1 : windows_ + 1;
    if (again.empty()) late_since_ = began;
    suspects_ = again.empty() ? late : again;
    clear_ = named && in_both(named->ranks, late).empty() ? clear_ + 1 : 0;
    if (named && (clear_ >= CountWindows::to_clear || !found)) {
        lines.push_back(names(named->ranks) + (are_several(named->ranks) ? " no longer keep" : " no longer keeps") +
                        " the others waiting");
        named_.clear();
    }
    if (!suspects_.empty() && windows_ >= CountWindows::to_name) {
        const bool is_new = !slowest() || in_both(named->ranks, suspects_).empty();
        SlowRank slow = slow_by(*found, is_new ? suspects_ : in_both(named->ranks, late), options_);
        if (!is_new) slow.ranks = named->ranks;
        slow.began = is_new ? late_since_ : named->began;
        slow.seconds = std::chrono::duration<double>(now - slow.began).count();
        if (is_new) reasons_ = {};
        ++reasons_[static_cast<std::size_t>(slow.reason)];
        slow.reason =
            static_cast<SlowRank::Reason>(std::max_element(reasons_.begin(), reasons_.end()) - reasons_.begin());
        if (is_new) lines.push_back(describe(slow));
        name(slow, is_new);
    }
    return lines;
}

bool SlowRanks::are_several(const std::vector<int>& ranks) const {
    const std::string host = options_.host(ranks.front());
    return ranks.size() > 1 && (host.empty() || std::any_of(ranks.begin(), ranks.end(),
                                                            [&](int rank) { return options_.host(rank) != host; }));
}

std::string SlowRanks::names(const std::vector<int>& ranks) const {
    std::string text;
    if (ranks.size() == 1 || are_several(ranks)) {
        for (std::size_t i = 0; i < ranks.size(); ++i)
            text += (i == 0 ? "" : i + 1 < ranks.size() ? ", " : " and ") + options_.rank_name(ranks[i]);
        return text;
    }
    for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return "host " + options_.host(ranks.front()) + " (ranks " + text + ")";
}

std::string SlowRanks::describe(const SlowRank& slow) const {
    static const auto percent = [](double share) { return std::to_string(std::lround(100 * share)) + " %"; };
    const bool several = are_several(slow.ranks);
    std::string text = names(slow.ranks) + (several ? " keep" : " keeps") + " the others waiting for " +
                       percent(slow.share) + " of the time, for " + std::to_string(std::lround(slow.seconds)) +
                       " s now: between collectives " + (several ? "the latest of them " : "it ");
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
