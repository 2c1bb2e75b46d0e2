// The calls of a rung, each of which tries a plan: the schedule that it runs, and when its caller entered it and left
// it. Python makes the rung and reads the times (tuner.py). Callers take the numbers, Python or native code.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
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

    static double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

  private:
    const std::vector<std::uint32_t> handles_;
    std::vector<Stamp> stamps_;
    std::atomic<std::size_t> next_{0};
};

}  // namespace multiring
