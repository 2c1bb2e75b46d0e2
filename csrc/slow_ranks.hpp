// SlowRanks: which rank enters its collectives later than the others, for how long now, and what keeps it.
//
// All ranks of a collective leave it at about the same time. Whoever enters it later than the others therefore spends
// less of its time in calls than they do. Each rank counts that time, and what its caller does between calls; statuses
// carry these counts to all ranks (status.hpp). They are compared at the end of each window of some seconds. A rank is
// named once it was late in several windows one after the other, by a tenth of the time or more in each. Others are
// named with it that were late in the same windows by half as much or more.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine_options.hpp"
#include "slow.hpp"
#include "status.hpp"
#include "wait.hpp"

namespace multiring {

struct SlowRank {
    enum class Reason : std::uint8_t {
        computes,     // its caller ran for longer between calls
        has_no_core,  // its caller was ready to run, and others had its core
        sleeps,       // its caller did not run: it waited for something else
        unknown,      // it did not run, and this system does not tell why
    };

    std::vector<int> ranks;  // none if nobody is slow
    std::string host;        // that of the latest of them
    double share = 0;        // part of the last window for which the others waited for it
    double seconds = 0;      // how long it has been late
    Clock::time_point began{};
    Reason reason = Reason::unknown;
};

class SlowRanks {
  public:
    explicit SlowRanks(const EngineOptions& options);

    // The progress thread's, at each beat: `statuses` by rank. Lines for the log: who is slow now, who no longer. While
    // a link is known for which all wait, no rank is named.
    std::vector<std::string> observe(std::span<const Status> statuses, Clock::time_point now, bool link_is_slow);

    // Any thread's: the slow rank, once it was named and until it is slow no longer.
    std::optional<SlowRank> slowest() const { return named_.now(); }
    // All that were named so far, the latest ones of very many, in the order of time.
    std::vector<SlowRank> so_far() const { return named_.so_far(); }
    // True if this rank has been named since this was asked last.
    bool take_named_here() {
        return named_here_.load(std::memory_order_relaxed) && named_here_.exchange(false, std::memory_order_relaxed);
    }
    void lock_for_fork() { named_.lock_for_fork(); }
    void unlock_after_fork() { named_.unlock_after_fork(); }

  private:
    bool are_several(const std::vector<int>& ranks) const;  // and not all of one host
    std::string names(const std::vector<int>& ranks) const;
    std::string describe(const SlowRank& slow) const;
    void name(const SlowRank& slow, bool is_new);

    const EngineOptions& options_;
    CountWindows counts_;
    std::vector<int> suspects_;       // ranks that were late in each of the last windows
    Clock::time_point late_since_{};  // when the first of these windows began
    int windows_ = 0;                 // their number
    std::array<int, 4> reasons_{};    // windows that told each, since the ranks were named
    int clear_ = 0;                   // consecutive windows in which none of those that were named was late

    std::atomic<bool> named_here_{false};
    NamedSlow<SlowRank> named_;
};

}  // namespace multiring
