// The calls of a rung, each of which tries a plan: the schedule that it runs, and when its caller entered it and left
// it, or, where it went on without its caller, when it ended. Python makes the rung and reads the times (tuner.py); who
// makes the calls of a communicator takes the numbers (NativeCalls, and MpiCalls in Python).
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "wait.hpp"

namespace multiring {

class Trials {
  public:
    explicit Trials(std::vector<std::uint32_t> handles) : handles_(std::move(handles)), stamps_(handles_.size()) {}

    // The number of the next call; nothing once all are taken.
    std::optional<std::size_t> take() {
        const std::size_t number = next_.fetch_add(1, std::memory_order_relaxed);
        return number < handles_.size() ? std::optional(number) : std::nullopt;
    }

    bool over() const { return next_.load(std::memory_order_relaxed) >= handles_.size(); }

    std::uint32_t handle(std::size_t number) const { return handles_.at(number); }

    struct Stamp {  // seconds of time.monotonic(); a call that raises is never left
        double entered = 0.0, left = std::numeric_limits<double>::infinity();
    };
    Stamp& stamp(std::size_t number) { return stamps_.at(number); }
    const std::vector<Stamp>& stamps() const { return stamps_; }

    void enter(std::size_t number) { stamp(number).entered = now(); }
    void leave(std::size_t number) { stamp(number).left = now(); }

    // Waits until a call has ended, for a number of seconds at most, and tells when that was, in seconds of
    // time.monotonic(); throws what the call threw.
    using End = std::function<double(double)>;

    // The call goes on without its caller, and is left when it ends.
    void go_on(std::size_t number, End end) {
        const std::lock_guard lock(mutex_);
        going_on_.emplace_back(number, std::move(end));
    }

    // Wait until all calls that went on have ended, so many seconds at most for all of them.
    void complete(double seconds) {
        const double until = now() + seconds;
        std::vector<std::pair<std::size_t, End>> going_on;
        {
            const std::lock_guard lock(mutex_);
            going_on = going_on_;
        }
        for (const auto& [number, end] : going_on) stamp(number).left = end(std::max(0.0, until - now()));
    }

    static double seconds_of(Clock::time_point moment) {
        return std::chrono::duration<double>(moment.time_since_epoch()).count();
    }

  private:
    static double now() { return seconds_of(Clock::now()); }

    const std::vector<std::uint32_t> handles_;
    std::vector<Stamp> stamps_;
    std::atomic<std::size_t> next_{0};
    std::mutex mutex_;  // the next
    std::vector<std::pair<std::size_t, End>> going_on_;
};

}  // namespace multiring
