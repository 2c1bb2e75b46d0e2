// StreamingStoreTuner: whether lines that a peer reads are better left in our caches or written past them.
//
// A line that the peer has read is in its caches, and to write it anew is to take it away from there: fast between
// cores that share a cache, slower than past the caches between others. Measured:
// benchmarks/results/2026-11-28-constants.md, Stores past the caches.
//
// The better way may change while a job runs, as hypervisors move their CPUs. Now and then a few writes are made the
// other way, and their rates compared.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

#include "wait.hpp"

namespace multiring {

struct TuningRule {
    std::size_t fewest_bytes;  // smallest write that is tuned
    std::uint32_t one_in;      // writes for each that is timed, as timing costs
    double worth_it;           // ratio of the rates from which writes go past the caches
};

class StreamingStoreTuner {
  public:
    // The ratios lie between what was measured where caches are better and what was measured elsewhere:
    // benchmarks/results/2026-11-28-constants.md, Stores past the caches.
    //
    // Stores past the caches leave the waiting to the reader: their own rate is higher even where caches are better.
    static constexpr TuningRule copies{std::size_t{16} << 10, 1, 3.5};
    // Staging goes around in some MB. A trial right after small copies past the caches is over before it has: its lines
    // are in no cache, which is slower everywhere. The next trial finds lines that the peer has read.
    static constexpr TuningRule small_copies{std::size_t{2} << 10, 16, 6};
    // A sum is stored to lines that have just been read.
    static constexpr TuningRule sums{std::size_t{16} << 10, 1, 1.3};

    explicit StreamingStoreTuner(const TuningRule& rule) : rule_(rule) {}

    std::size_t fewest_bytes() const { return rule_.fewest_bytes; }

    // True if the next write is to be timed; in a trial every write is timed, so that it is over sooner.
    bool is_due() {
        if (rule_.one_in == 1 || trying_.load(std::memory_order_relaxed)) return true;
        const std::uint32_t written = written_.load(std::memory_order_relaxed);  // roughly, if several lanes count
        written_.store(written + 1, std::memory_order_relaxed);
        return written % rule_.one_in == 0;
    }

    // True if the next write should be streamed past the caches.
    bool streams() const { return streams_.load(std::memory_order_relaxed); }

    // Bytes were written; several lanes may have the same peer.
    void note(bool streamed, std::size_t bytes, Clock::duration took) {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock || streamed != streams()) return;
        rates_[noted_] = static_cast<double>(bytes) / static_cast<double>(std::max<std::int64_t>(took.count(), 1));
        if (++noted_ < sample) return;
        noted_ = 0;
        const bool tried = trying_.load(std::memory_order_relaxed);
        if (tried)
            decide(median());
        else
            go_on(median());
        const bool tries = !tried && left_ <= 0;
        streams_.store(prefers_streaming_ != tries, std::memory_order_relaxed);
        trying_.store(tries, std::memory_order_relaxed);
    }

  private:
    static constexpr std::uint32_t sample = 9;  // copies, of which the median rate counts
    static constexpr double before_first_trial = 4, between_trials = 57, at_most = 16;  // samples, and times

    // Factor by which `other` is slower. A trial that is slower by it comes later by as much, so that trials cost the
    // same share of the time; if the chosen way has become slower by it, the next trial comes sooner by as much.
    static double slowdown(double rate, double other) { return std::clamp(rate / other, 1.0, at_most); }

    void go_on(double rate) {
        left_ -= slowdown(chosen_, rate);
        last_ = rate;
    }

    void decide(double tried) {
        const bool streaming = prefers_streaming_ ? last_ > rule_.worth_it * tried : tried > rule_.worth_it * last_;
        if (streaming != prefers_streaming_) std::swap(last_, tried);
        prefers_streaming_ = streaming;
        chosen_ = last_;
        left_ = between_trials * slowdown(chosen_, tried);
    }

    // Not disturbed by one during which something else ran.
    double median() {
        const auto middle = rates_.begin() + sample / 2;
        std::nth_element(rates_.begin(), middle, rates_.end());
        return *middle;
    }

    const TuningRule rule_;
    std::atomic<std::uint32_t> written_{0};
    std::mutex mutex_;
    std::atomic<bool> streams_{false}, trying_{false};
    bool prefers_streaming_ = false;
    double left_ = before_first_trial;    // samples until the next trial
    double chosen_ = 0, last_ = 0;        // rates of the preferred way: when it was chosen (0: never), and now
    std::array<double, sample> rates_{};  // in bytes per tick of the clock
    std::uint32_t noted_ = 0;
};

}  // namespace multiring
