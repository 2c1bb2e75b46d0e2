#include "wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace multiring {

void Event::set() {
    word_.store(1, std::memory_order_release);
    syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

bool Event::wait_for(Clock::duration at_most) {
    if (is_set()) return true;
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(at_most).count();
    if (nanoseconds <= 0) return false;
    timespec duration{static_cast<time_t>(nanoseconds / 1000000000), static_cast<long>(nanoseconds % 1000000000)};
    syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, 0, &duration, nullptr, 0);
    return is_set();
}

bool Patience::yield() {
    constexpr auto slice = std::chrono::milliseconds(1);
    constexpr Clock::duration shortest_pause = std::chrono::milliseconds(4), longest_pause = 50 * shortest_pause;
    const auto before = Clock::now();
    const Clock::time_point yields_again = yields_again_.load(std::memory_order_relaxed);
    if (before < yields_again) return false;
    sched_yield();
    const auto now = Clock::now();
    if (now - before >= slice) {
        const auto last_pause = pause_.load(std::memory_order_relaxed);
        const bool is_soon = before - yields_again < last_pause;
        const auto pause = is_soon ? std::min(2 * last_pause, longest_pause) : shortest_pause;
        pause_.store(pause, std::memory_order_relaxed);
        yields_again_.store(now + pause, std::memory_order_relaxed);
    }
    return true;
}

}  // namespace multiring
