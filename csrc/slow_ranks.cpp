#include "slow_ranks.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <utility>

namespace multiring {
namespace {

constexpr auto window = std::chrono::seconds(1), long_window = std::chrono::seconds(10);
constexpr std::uint64_t least_calls = 4, long_least_calls = 40;  // in a window
constexpr double least_share = 0.1;                              // part of the time that the others wait
constexpr int to_name = 3, to_clear = 3;                         // windows in a row
constexpr int least_steps = 10;                                  // until a rank is named
constexpr double least_waited = 0.45;        // seconds; by then 20 steps of 250 ms have waited a tenth of the time
constexpr double least_waited_for_core = 1;  // other programs come and go
constexpr double unlikely = 5;               // standard errors: benchmarks/results/2026-11-28-constants.md, Engine.
constexpr double comparable = 0.5;           // part of what the latest rank is late by: less is not named beside it
constexpr double same_rhythm = 0.2, few_calls = 2;  // part, and number, of calls by which ranks may differ

// Activities of a rank in a window, each as a part of the time.
struct Shares {
    double seconds = 0;
    double calls = 0;  // per second
    double in_calls = 0, ran = 0, queued = 0;
    bool knows_queue = false;
    // Part of `queued` between calls: the rest of that time at most.
    double queued_between_calls() const { return std::clamp(queued, 0.0, std::max(1 - in_calls - ran, 0.0)); }
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

// The rank in the middle by that value, which is the median then.
template <class Value>
const Shares& middle(const std::vector<Shares>& all, Value value) {
    std::vector<const Shares*> ranks;
    for (const Shares& each : all) ranks.push_back(&each);
    const auto found = ranks.begin() + static_cast<std::ptrdiff_t>(ranks.size() / 2);
    std::nth_element(ranks.begin(), found, ranks.end(),
                     [&](const Shares* one, const Shares* other) { return value(*one) < value(*other); });
    return **found;
}

// The ranks that were late in a window, and the shares that tell it.
struct Verdict {
    std::vector<int> late;
    std::vector<Shares> all;  // one for each rank
    Shares median;            // the rank whose time in calls is the median: its activities make up its time
    std::vector<double> shares_in_calls() const {
        std::vector<double> shares;
        for (const Shares& each : all) shares.push_back(each.in_calls);
        return shares;
    }
};

// Nothing where that is unknown.
std::optional<Verdict> judge(const CountWindows& counts) {
    Verdict verdict;
    std::vector<Shares>& all = verdict.all;
    for (std::size_t rank = 0; rank < counts.ranks(); ++rank) {
        if (!counts.has_heard_of(rank)) return {};
        all.push_back(shares(counts.before(rank), counts.latest(rank)));
    }
    const double calls = middle(all, [](const Shares& each) { return each.calls; }).calls;
    verdict.median = middle(all, [](const Shares& each) { return each.in_calls; });
    double longest = 0;
    for (const Shares& each : all) {
        const double expected = calls * each.seconds;
        if (std::abs(each.calls * each.seconds - expected) > few_calls + same_rhythm * expected)
            return {};  // they do different things
        longest = std::max(longest, verdict.median.in_calls - each.in_calls);
    }
    for (std::size_t rank = 0; rank < all.size(); ++rank)
        if (verdict.median.in_calls - all[rank].in_calls >= std::max(least_share, comparable * longest))
            verdict.late.push_back(static_cast<int>(rank));
    if (2 * verdict.late.size() > all.size()) verdict.late.clear();  // the median is of those that are late
    return verdict;
}

// These ranks as slow, with the share of the latest of them, and what that one did.
Lateness late_by(const Verdict& verdict, const std::vector<int>& ranks, const EngineOptions& options) {
    const auto of = [&](int rank) -> const Shares& { return verdict.all[static_cast<std::size_t>(rank)]; };
    const int latest = *std::min_element(ranks.begin(), ranks.end(),
                                         [&](int one, int other) { return of(one).in_calls < of(other).in_calls; });
    Lateness late;
    late.slow.ranks = ranks;
    late.slow.host = options.host(latest);
    late.slow.share = verdict.median.in_calls - of(latest).in_calls;
    late.ran_longer = of(latest).ran - verdict.median.ran;
    late.queued_longer = of(latest).queued - verdict.median.queued_between_calls();
    late.knows_queue = of(latest).knows_queue;
    return late;
}

std::vector<int> in_both(const std::vector<int>& some, const std::vector<int>& others) {
    std::vector<int> found;
    std::copy_if(some.begin(), some.end(), std::back_inserter(found),
                 [&](int each) { return std::find(others.begin(), others.end(), each) != others.end(); });
    return found;
}

std::vector<int> without(const std::vector<int>& some, const std::vector<int>& others) {
    std::vector<int> found;
    std::copy_if(some.begin(), some.end(), std::back_inserter(found),
                 [&](int each) { return std::find(others.begin(), others.end(), each) == others.end(); });
    return found;
}

}  // namespace

SlowRanks::SlowRanks(const EngineOptions& options)
    : options_(options),
      short_(options.world_size, window, least_calls),
      long_(options.world_size, long_window, long_least_calls) {}

void SlowRanks::Account::add(const Lateness& late, double seconds) {
    ++late_windows;
    this->seconds += seconds;
    waited += late.slow.share * seconds;
    ran_longer += late.ran_longer * seconds;
    queued_longer += late.queued_longer * seconds;
    knows_queue &= late.knows_queue;
}

// Reason for most of the time that the others waited, in all windows together: a window of few steps tells little, and
// a wait for a core is told when it is over.
SlowRank::Reason SlowRanks::Account::reason() const {
    const double computed = std::clamp(ran_longer, 0.0, waited), did_not_run = waited - computed;
    if (!knows_queue) return computed >= did_not_run ? SlowRank::Reason::computes : SlowRank::Reason::unknown;
    const double lacked_core = std::clamp(queued_longer, 0.0, did_not_run), slept = did_not_run - lacked_core;
    if (computed >= std::max(lacked_core, slept)) return SlowRank::Reason::computes;
    return lacked_core >= slept ? SlowRank::Reason::has_no_core : SlowRank::Reason::sleeps;
}

void SlowRanks::Spread::take(const std::vector<double>& in_calls) {
    const auto ranks = static_cast<double>(in_calls.size());
    const double mean = std::accumulate(in_calls.begin(), in_calls.end(), 0.0) / ranks;
    std::vector<double> now;
    for (double each : in_calls) now.push_back(each - mean);
    if (!before_.empty()) {
        double squares = 0;
        for (std::size_t i = 0; i < now.size(); ++i) squares += (now[i] - before_[i]) * (now[i] - before_[i]);
        if (changes_.size() == most_kept) changes_.erase(changes_.begin());
        changes_.push_back(squares / (ranks - 1));
    }
    before_ = std::move(now);
}

// The median, for a rank that begins to be late is a change as well. It tells of the mean by Wilson and Hilferty's
// approximation of sums of squares.
double SlowRanks::Spread::variance() const {
    if (changes_.empty()) return 0;
    std::vector<double> sorted = changes_;
    std::sort(sorted.begin(), sorted.end());
    const auto freedoms = static_cast<double>(before_.size()) - 1;
    return sorted[(sorted.size() - 1) / 2] / std::pow(1 - 2 / (9 * freedoms), 3);
}

bool SlowRanks::is_enough(const Account& account, const Spread& spread) const {
    const double enough = account.reason() == SlowRank::Reason::has_no_core ? least_waited_for_core : least_waited;
    return account.late_windows >= to_name && steps_ - account.steps_before >= least_steps &&
           account.waited >= enough &&
           account.waited >= unlikely * account.seconds * std::sqrt(spread.variance() / account.late_windows);
}

std::vector<std::string> SlowRanks::observe(std::span<const Status> statuses, const Rhythm& rhythm,
                                            Clock::time_point now, bool link_is_slow) {
    std::vector<std::string> lines;
    if (options_.world_size < 2) return lines;
    for (Watch* watch : {&short_, &long_}) look(*watch, statuses, rhythm, now, link_is_slow, lines);
    return lines;
}

void SlowRanks::look(Watch& watch, std::span<const Status> statuses, const Rhythm& rhythm, Clock::time_point now,
                     bool link_is_slow, std::vector<std::string>& lines) {
    CountWindows& counts = watch.counts;
    counts.take(statuses);
    const auto own = static_cast<std::size_t>(options_.rank);
    if (!counts.is_over(now)) return;
    if (counts.latest(own).calls - counts.before(own).calls < watch.least_calls) return;  // the window goes on
    const std::optional<Verdict> found = link_is_slow ? Verdict{} : judge(counts);
    const double seconds = counts.next(now, found.has_value());
    const auto began = now - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    if (&watch == &short_) {  // a pause hides few steps there
        const Rhythm::Gaps gaps = rhythm.gaps();
        steps_ += Rhythm::steps(gaps_, gaps);
        gaps_ = gaps;
    }
    const int steps_before = std::exchange(watch.steps_before, steps_);
    if (found && !found->all.empty())
        watch.spread.take(found->shares_in_calls());
    else
        watch.spread.pause();
    if (counts.stands_untold()) return;

    const std::vector<int> late = found ? found->late : std::vector<int>{};
    std::vector<int> gone;
    for (Named& each : ranks_) {
        if (each.namer != &watch) continue;
        each.clear = std::binary_search(late.begin(), late.end(), each.rank) ? 0 : each.clear + 1;
        if (each.clear >= to_clear || !found) gone.push_back(each.rank);
    }
    const std::vector<int> still = in_both(named_ranks(), late);
    const std::vector<int> others = without(late, still);  // who may be late beside those that are named
    const std::vector<int> again = in_both(watch.suspects, others);
    if (again.empty()) watch.of_suspects = watch.of_all = {began, steps_before};
    watch.suspects = again.empty() ? others : again;
    std::vector<int> all;  // those that are late if the suspects are
    std::merge(still.begin(), still.end(), watch.suspects.begin(), watch.suspects.end(), std::back_inserter(all));
    if (!watch.suspects.empty()) {
        watch.of_suspects.add(late_by(*found, watch.suspects, options_), seconds);
        watch.of_all.add(late_by(*found, all, options_), seconds);
    }

    if (teller_ == &watch && !still.empty()) {
        Lateness late_still = late_by(*found, still, options_);
        of_named_.add(late_still, seconds);
        late_still.slow.ranks = named_ranks();
        go_on(std::move(late_still.slow), now);
    }
    if (!gone.empty()) forget(gone, watch, lines);
    if (is_enough(watch.of_suspects, watch.spread)) {
        of_named_ = watch.of_all;
        teller_ = &watch;
        for (int rank : watch.suspects) ranks_.push_back({rank, &watch});
        std::sort(ranks_.begin(), ranks_.end(), [](const Named& one, const Named& two) { return one.rank < two.rank; });
        SlowRank slow = late_by(*found, all, options_).slow;
        slow.ranks = named_ranks();
        lines.push_back(begin(std::move(slow), now));
        Watch& unaware = other(watch);
        if (!in_both(unaware.suspects, watch.suspects).empty()) unaware.suspects.clear();
        watch.suspects.clear();
    }
}

std::vector<int> SlowRanks::named_ranks() const {
    std::vector<int> ranks;
    for (const Named& each : ranks_) ranks.push_back(each.rank);
    return ranks;
}

// Name these ranks no longer. Others that are named with them stay, as another entry of all that were.
void SlowRanks::forget(const std::vector<int>& ranks, Watch& watch, std::vector<std::string>& lines) {
    lines.push_back(names(ranks) + (are_several(ranks) ? " no longer keep" : " no longer keeps") +
                    " the others waiting");
    std::erase_if(ranks_,
                  [&](const Named& each) { return std::find(ranks.begin(), ranks.end(), each.rank) != ranks.end(); });
    other(watch).suspects.clear();  // what it has seen so far has been told
    if (ranks_.empty()) {
        named_.clear();
        teller_ = nullptr;
        return;
    }
    if (std::none_of(ranks_.begin(), ranks_.end(), [&](const Named& each) { return each.namer == teller_; }))
        teller_ = ranks_.front().namer;
    of_named_ = {teller_->counts.began(), teller_->steps_before};  // as that window will be summed
    SlowRank rest = *slowest();
    rest.ranks = named_ranks();
    rest.host = options_.host(rest.ranks.front());  // until the next window tells the latest
    rest.began = of_named_.began;
    rest.seconds = rest.steps = 0;
    named_.begin(rest);
}

bool SlowRanks::share_a_host(const std::vector<int>& ranks) const {
    const std::string host = options_.host(ranks.front());
    return !host.empty() &&
           std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return options_.host(rank) == host; });
}

bool SlowRanks::are_a_host(const std::vector<int>& ranks) const {
    if (!share_a_host(ranks)) return false;
    const std::string host = options_.host(ranks.front());
    std::size_t here = 0;
    for (int rank = 0; rank < options_.world_size; ++rank) here += options_.host(rank) == host;
    return here == ranks.size();
}

std::string SlowRanks::names(const std::vector<int>& ranks) const {
    std::string text;
    if (ranks.size() == 1 || !share_a_host(ranks)) {
        for (std::size_t i = 0; i < ranks.size(); ++i)
            text += (i == 0 ? "" : i + 1 < ranks.size() ? ", " : " and ") + options_.rank_name(ranks[i]);
        return text;
    }
    for (int rank : ranks) text += (text.empty() ? "ranks " : ", ") + std::to_string(rank);
    const std::string host = "host " + options_.host(ranks.front());
    return are_a_host(ranks) ? host + " (" + text + ")" : text + " (" + host + ")";
}

std::string SlowRanks::describe(const SlowRank& slow) const {
    static const auto percent = [](double share) { return std::to_string(std::lround(100 * share)) + " %"; };
    const bool several = are_several(slow.ranks);
    std::string text = names(slow.ranks) + (several ? " keep" : " keeps") + " the others waiting for " +
                       percent(slow.share) + " of the time, for " + std::to_string(slow.steps) + " steps (" +
                       std::to_string(std::lround(slow.seconds)) + " s) now: between collectives " +
                       (several ? "the latest of them " : "it ");
    switch (slow.reason) {
        case SlowRank::Reason::computes: return text + "computes for longer than they do";
        case SlowRank::Reason::has_no_core: return text + "is ready to run and has no core, as others run there";
        case SlowRank::Reason::sleeps: return text + "sleeps, or waits for data, a lock or another process";
        case SlowRank::Reason::unknown: break;
    }
    return text + "does not run";
}

// Name ranks; the line for the log.
std::string SlowRanks::begin(SlowRank slow, Clock::time_point now) {
    fill(slow, now);
    named_.begin(slow);
    look_if_here(slow);
    return describe(slow);
}

// This rank is to look where it is, if it is one of them.
void SlowRanks::look_if_here(const SlowRank& slow) {
    if (std::find(slow.ranks.begin(), slow.ranks.end(), options_.rank) != slow.ranks.end())
        named_here_.store(true, std::memory_order_relaxed);
}

void SlowRanks::go_on(SlowRank slow, Clock::time_point now) {
    fill(slow, now);
    named_.go_on([&](SlowRank& shown, SlowRank& kept) {
        if (shown.reason != slow.reason) look_if_here(slow);
        shown = kept = slow;
    });
}

void SlowRanks::fill(SlowRank& slow, Clock::time_point now) const {
    slow.began = of_named_.began;
    slow.seconds = std::chrono::duration<double>(now - slow.began).count();
    slow.share = std::min(1.0, of_named_.waited / slow.seconds);  // a call may have begun before
    slow.steps = steps_ - of_named_.steps_before;
    slow.reason = of_named_.reason();
}

}  // namespace multiring
