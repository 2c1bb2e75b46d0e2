// Waiting: a one-shot event, and how long a thread that has nothing to do stays on its core.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace multiring {

using Clock = std::chrono::steady_clock;

constexpr double forever = 1e8;  // seconds: three years, since a clock's numbers end and deadlines are sums

inline Clock::duration seconds(double s) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(s, forever)));
}

// A word that threads sleep on (futex). `set` wakes all; it stays set until `reset`.
class Event {
  public:
    void set();
    void reset() { word_.store(0, std::memory_order_relaxed); }
    bool is_set() const { return word_.load(std::memory_order_acquire) != 0; }
    // Returns true if it was set before the time was up; may return early without that.
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

// Policy for the first moments of a wait, before a thread sleeps: it keeps the core for as long as `spin`, then yields
// it time and again. A thread that yields to another rank is back in a moment. One that yields to a computation loses a
// slice of the scheduler, where one that sleeps gets the core back at once. After such a slice no thread yields for a
// while, and for twice as long if the next slice comes soon.
class Patience {
  public:
    void set_spin(Clock::duration spin) { spin_.store(spin, std::memory_order_relaxed); }
    Clock::duration spin() const { return spin_.load(std::memory_order_relaxed); }
    // False, at once, while yielding does not pay.
    bool yield();

  private:
    std::atomic<Clock::duration> spin_{};
    std::atomic<Clock::time_point> yields_again_{Clock::time_point{}};
    std::atomic<Clock::duration> pause_{};  // the last
};

class Spinner {
  public:
    explicit Spinner(Patience& patience) : patience_(patience) {}
    bool is_waiting() const { return rounds_ != 0; }
    Clock::time_point start() const { return start_; }  // when the wait began
    Clock::duration waited() const { return waited_; }  // in all
    // End the wait, if there is one; return the time now, or the last start.
    Clock::time_point restart() {
        if (rounds_ == 0) return start_;
        const auto now = Clock::now();
        waited_ += now - start_;
        rounds_ = 0;
        return now;
    }
    // One moment of waiting; false when it is time to sleep.
    bool wait() {
        if (rounds_ == 0) {
            start_ = Clock::now();
            spins_ = patience_.spin() > Clock::duration{};
        }
        ++rounds_;
        if (!spins_) return Clock::now() - start_ < patience_.spin() + yielding_budget && patience_.yield();
        for (int i = 0; i < 4; ++i) pause();
        if (rounds_ % 16 == 0) spins_ = Clock::now() - start_ < patience_.spin();
        return true;
    }

  private:
    // Longest time to yield: a thread that yields keeps one that wakes off the core.
    static constexpr auto yielding_budget = std::chrono::microseconds(300);

    Patience& patience_;
    std::uint32_t rounds_ = 0;
    bool spins_ = false;
    Clock::time_point start_{};
    Clock::duration waited_{};
};

}  // namespace multiring
