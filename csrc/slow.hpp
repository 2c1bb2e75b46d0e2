// Parts shared by SlowRanks and SlowLinks: the windows in which they compare counts of ranks, and what they named.
#pragma once

#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "status.hpp"
#include "wait.hpp"

namespace multiring {

// Counts of each rank, at the beginning of a window and now. Only the progress thread uses it.
class CountWindows {
  public:
    CountWindows(int world_size, Clock::duration length)
        : length_(length), latest_(static_cast<std::size_t>(world_size)), before_(latest_.size()) {}

    void take(std::span<const Status> statuses) {  // indexed by rank
        for (std::size_t rank = 0; rank < latest_.size(); ++rank)
            if (statuses[rank].counts.seconds > latest_[rank].seconds) latest_[rank] = statuses[rank].counts;
    }
    bool is_over(Clock::time_point now) const { return now - began_ >= length_; }
    // Begin the next window; seconds that this one took. `is_told`: whether it told anything.
    double next(Clock::time_point now, bool is_told) {
        const double seconds = std::chrono::duration<double>(now - began_).count();
        before_ = latest_;
        began_ = now;
        untold_ = is_told ? 0 : untold_ + 1;
        return seconds;
    }
    // True if the finding still stands, though the last window told nothing.
    bool stands_untold() const { return untold_ > 0 && untold_ < to_forget; }

    Clock::time_point began() const { return began_; }
    std::size_t ranks() const { return latest_.size(); }
    const Counts& latest(std::size_t rank) const { return latest_[rank]; }
    const Counts& before(std::size_t rank) const { return before_[rank]; }
    bool has_heard_of(std::size_t rank) const { return latest_[rank].seconds > before_[rank].seconds; }

  private:
    static constexpr int to_forget = 8;  // windows in a row that tell nothing

    const Clock::duration length_;
    std::vector<Counts> latest_, before_;
    Clock::time_point began_ = Clock::now();
    int untold_ = 0;  // consecutive windows that told nothing
};

// Finding that is named as slow now, and all named so far. The progress thread changes it, any thread reads it.
template <class Slow>
class NamedSlow {
  public:
    std::optional<Slow> now() const {
        const std::lock_guard lock(mutex_);
        return now_;
    }
    std::vector<Slow> so_far() const {  // the latest ones of very many, in the order of time
        const std::lock_guard lock(mutex_);
        return so_far_;
    }
    void begin(const Slow& slow) {
        const std::lock_guard lock(mutex_);
        now_ = slow;
        if (so_far_.size() == most_kept) so_far_.erase(so_far_.begin());
        so_far_.push_back(slow);
    }
    // Keep the name; `change` gets it, and its entry among all so far.
    template <class Change>
    void go_on(const Change& change) {
        const std::lock_guard lock(mutex_);
        change(*now_, so_far_.back());
    }
    void clear() {
        const std::lock_guard lock(mutex_);
        now_.reset();
    }
    void lock_for_fork() { mutex_.lock(); }
    void unlock_after_fork() { mutex_.unlock(); }

  private:
    static constexpr std::size_t most_kept = 16;

    mutable std::mutex mutex_;
    std::optional<Slow> now_;
    std::vector<Slow> so_far_;
};

}  // namespace multiring
