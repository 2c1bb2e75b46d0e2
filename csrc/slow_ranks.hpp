// SlowRanks: which rank enters its collectives later than the others, for how long now, and what keeps it.
//
// All ranks of a collective leave it at about the same time. Whoever enters it later than the others therefore spends
// less of its time in calls than they do. Each rank counts that time, and what its caller does between calls; statuses
// carry these counts to all ranks (status.hpp). They are compared at the end of each window of a second or a few calls.
// A rank is named once it was late in several windows one after the other, by a tenth of the time or more in each, for
// some steps, and long enough in all that chance is unlikely: where steps are irregular, each rank is late by turns,
// and windows differ much from one another. Others are named with it that were late in the same windows by half as much
// or more. Longer windows find one that is late now and then, as it saves a checkpoint.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine_options.hpp"
#include "rhythm.hpp"
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
    double seconds = 0;      // how long it has been late
    double share = 0;        // part of this time for which the others waited for it
    int steps = 0;           // how many this rank has begun meanwhile
    Clock::time_point began{};
    Reason reason = Reason::unknown;
};

// Ranks that are late in a window, and what the latest of them did, as parts of the time.
struct Lateness {
    SlowRank slow;          // without a reason, which more windows tell
    double ran_longer = 0;  // than the median rank
    double queued_longer = 0;
    bool knows_queue = false;
};

class SlowRanks {
  public:
    explicit SlowRanks(const EngineOptions& options);

    // The progress thread's, at each beat: `statuses` by rank, and the rhythm of this rank's own calls. Lines for the
    // log: who is slow now, who no longer. While a link is known for which all wait, no rank is named.
    std::vector<std::string> observe(std::span<const Status> statuses, const Rhythm& rhythm, Clock::time_point now,
                                     bool link_is_slow);

    // Any thread's: the slow rank, once it was named and until it is slow no longer.
    std::optional<SlowRank> slowest() const { return named_.now(); }
    // All that were named so far, the latest ones of very many, in the order of time.
    std::vector<SlowRank> so_far() const { return named_.so_far(); }
    // True if this rank has been named, or named for another reason, since that was taken last.
    bool is_named_here() const { return named_here_.load(std::memory_order_relaxed); }
    bool take_named_here() { return named_here_.exchange(false, std::memory_order_relaxed); }
    void lock_for_fork() { named_.lock_for_fork(); }
    void unlock_after_fork() { named_.unlock_after_fork(); }

  private:
    // Sums over the windows since some ranks began to be late.
    struct Account {
        Clock::time_point began{};
        int steps_before = 0;
        int late_windows = 0;
        double seconds = 0;        // all late windows together
        double waited = 0;         // part of these, by the median rank for the latest one
        double ran_longer = 0;     // seconds that the latest one ran for longer than the median rank
        double queued_longer = 0;  // and was ready to run and had no core
        bool knows_queue = true;
        void add(const Lateness& late, double seconds);
        SlowRank::Reason reason() const;
    };
    // Difference of ranks' time in calls from window to window, where none begins or ceases to be late.
    class Spread {
      public:
        void take(const std::vector<double>& in_calls);  // shares of a window, by rank
        void pause() { before_.clear(); }                // what ranks did in a window is unknown
        double variance() const;                         // difference of two ranks in a window

      private:
        static constexpr std::size_t most_kept = 32;
        std::vector<double> before_;   // deviations from the mean in the window before, by rank
        std::vector<double> changes_;  // mean squares, of the last windows
    };
    // Windows of one length, and who was late in each of the last ones.
    struct Watch {
        Watch(int world_size, Clock::duration length, std::uint64_t calls)
            : counts(world_size, length), least_calls(calls) {}
        CountWindows counts;
        const std::uint64_t least_calls;  // in a window
        int steps_before = 0;             // the window
        std::vector<int> suspects;
        Account of_suspects;  // their own, which decides whether they are named
        Account of_all;       // with those that are named already, which tells the reason
        Spread spread;
    };
    // Rank that is named now.
    struct Named {
        int rank = 0;
        Watch* namer{};  // its windows tell when the rank is in time
        int clear = 0;   // number of these in a row in which it was
    };
    void look(Watch& watch, std::span<const Status> statuses, const Rhythm& rhythm, Clock::time_point now,
              bool link_is_slow, std::vector<std::string>& lines);
    bool is_enough(const Account& account, const Spread& spread) const;  // to name its ranks
    bool share_a_host(const std::vector<int>& ranks) const;
    bool are_a_host(const std::vector<int>& ranks) const;  // all ranks of one
    bool are_several(const std::vector<int>& ranks) const { return ranks.size() > 1 && !are_a_host(ranks); }
    std::string names(const std::vector<int>& ranks) const;
    std::string describe(const SlowRank& slow) const;
    std::vector<int> named_ranks() const;
    void forget(const std::vector<int>& ranks, Watch& watch, std::vector<std::string>& lines);
    Watch& other(const Watch& watch) { return &watch == &short_ ? long_ : short_; }
    std::string begin(SlowRank slow, Clock::time_point now);
    void go_on(SlowRank slow, Clock::time_point now);
    void look_if_here(const SlowRank& slow);
    void fill(SlowRank& slow, Clock::time_point now) const;

    const EngineOptions& options_;
    Watch short_, long_;
    Rhythm::Gaps gaps_{};       // at the end of the last short window
    int steps_ = 0;             // this rank's, until then
    std::vector<Named> ranks_;  // those that are named, in their order
    Account of_named_;
    Watch* teller_{};  // its windows are summed in this account

    std::atomic<bool> named_here_{false};
    NamedSlow<SlowRank> named_;
};

}  // namespace multiring
