// Pace: whether lines that a peer reads are better left in our caches or written past them.
//
// A line that the peer has read is in its caches, and to write it anew is to take it away from there. Between cores
// that share a cache that goes at 15 to 40 GB/s, and the peer reads it from the cache. Between others (another cluster
// of cores, another socket) it was seen to go at 2, where stores past the caches went at 20 to 40 and the peer read
// from memory: 64 MB took two ranks 33 ms and 11. Which it is may change while a job runs, as hypervisors move their
// CPUs; so now and then a few are made the other way, and their rates compared.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "wait.hpp"

namespace multiring {

class Pace {
  public:
    static constexpr std::size_t fewest_bytes = std::size_t{16} << 10;  // that are worth a look at the clock

    // Stores past the caches leave the waiting to the reader. Where caches are better their rate in copies was up
    // to 2.9 times the other, elsewhere 3 to 20 times.
    static constexpr double for_copies = 3.5;
    // A sum is stored to lines that have just been read: past the caches at 0.3 to 0.5 times the other rate where these
    // are better, at 1.9 to 2.1 times elsewhere.
    static constexpr double for_sums = 1.3;

    explicit Pace(double worth_it) : worth_it_(worth_it) {}

    // Whether the next should be streamed past the caches.
    bool streams() const { return streams_.load(std::memory_order_relaxed); }

    // Bytes were written; several lanes may have the same peer.
    void note(bool streamed, std::size_t bytes, Clock::duration took) {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock) return;
        if (--left_ < sample)
            rates_[streamed][left_] =
                static_cast<double>(bytes) / static_cast<double>(std::max<std::int64_t>(took.count(), 1));
        if (left_ == 0) turn();
    }

  private:
    static constexpr std::uint32_t before_first_trial = 32, between_trials = 512, sample = 9;
    using Rates = std::array<double, sample>;  // bytes per tick of the clock

    void turn() {
        if (trying_) prefers_streaming_ = median(rates_[true]) > worth_it_ * median(rates_[false]);
        trying_ = !trying_;
        left_ = trying_ ? sample : between_trials;
        streams_.store(prefers_streaming_ != trying_, std::memory_order_relaxed);
    }

    // Not disturbed by one during which something else ran.
    static double median(Rates& rates) {
        const auto middle = rates.begin() + sample / 2;
        std::nth_element(rates.begin(), middle, rates.end());
        return *middle;
    }

    const double worth_it_;
    std::mutex mutex_;
    std::atomic<bool> streams_{false};
    bool prefers_streaming_ = false, trying_ = false;
    std::uint32_t left_ = before_first_trial;  // until that turns
    std::array<Rates, 2> rates_{};             // the last ones left in the caches, and past them
};

}  // namespace multiring
