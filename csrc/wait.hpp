// Waiting: a one-shot event, and how long a thread that has nothing to do stays on its core.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace multiring {

using Clock = std::chrono::steady_clock;

inline Clock::duration seconds(double s) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

// A word that threads sleep on (futex). `set` wakes all; it stays set until `reset`.
class Event {
  public:
    void set();
    void reset() { word_.store(0, std::memory_order_relaxed); }
    bool is_set() const { return word_.load(std::memory_order_acquire) != 0; }
    // Whether it was set before the time was up; may return early without it.
    bool wait_for(Clock::duration at_most);

  private:
    std::atomic<std::uint32_t> word_{0};
};

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// How to spend the first moments of a wait.
struct Patience {
    bool spins = true;         // stay on the core; otherwise give it away each time
    Clock::duration budget{};  // before sleeping
};

class Spinner {
  public:
    explicit Spinner(Patience patience) : patience_(patience) {}
    bool is_waiting() const { return rounds_ != 0; }
    Clock::time_point start() const { return start_; }  // of the wait
    Clock::duration waited() const { return waited_; }  // in all
    // There is something to do; returns when, if it waits.
    Clock::time_point restart() {
        if (rounds_ == 0) return start_;
        const auto now = Clock::now();
        waited_ += now - start_;
        rounds_ = 0;
        return now;
    }
    // One moment of waiting; false when the budget is spent.
    bool wait() {
        if (rounds_ == 0) start_ = Clock::now();
        ++rounds_;
        if (patience_.spins) {
            for (int i = 0; i < 4; ++i) pause();
            if (rounds_ % 32 != 0) return true;
        } else {
            sched_yield();
        }
        return Clock::now() - start_ < patience_.budget;
    }

  private:
    Patience patience_;
    std::uint32_t rounds_ = 0;
    Clock::time_point start_{};
    Clock::duration waited_{};
};

// Cores that the cgroup's quota allows, if it sets one.
std::optional<double> cpu_quota();

}  // namespace multiring
