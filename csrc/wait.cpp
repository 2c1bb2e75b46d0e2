#include "wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <fstream>
#include <sstream>
#include <string>

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

namespace {

// The tightest limit from this process's group up to the root of a hierarchy.
template <class Read>
std::optional<double> tightest(const std::string& mount, std::string group, Read read) {
    std::optional<double> tightest;
    for (;;) {
        const std::optional<double> limit = read(mount + group);
        if (limit && (!tightest || *limit < *tightest)) tightest = limit;
        const auto slash = group.rfind('/');
        if (slash == std::string::npos || group.empty()) return tightest;
        group.resize(slash);
    }
}

std::optional<double> read_v2(const std::string& directory) {
    std::ifstream file(directory + "/cpu.max");
    std::string quota;
    double period = 0;
    if (!(file >> quota >> period) || quota == "max" || period <= 0) return {};
    return std::stod(quota) / period;
}

std::optional<double> read_v1(const std::string& directory) {
    std::ifstream quota_file(directory + "/cpu.cfs_quota_us"), period_file(directory + "/cpu.cfs_period_us");
    double quota = 0, period = 0;
    if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return {};
    return quota / period;
}

}  // namespace

std::optional<double> cpu_quota() {
    std::ifstream groups("/proc/self/cgroup");
    std::optional<double> found;
    for (std::string line; std::getline(groups, line);) {  // "hierarchy:controllers:/group"
        const auto first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
        std::optional<double> limit;
        if (controllers.empty()) {
            limit = tightest("/sys/fs/cgroup", group, read_v2);
        } else {
            std::istringstream names(controllers);
            for (std::string name; std::getline(names, name, ',');)
                if (name == "cpu") limit = tightest("/sys/fs/cgroup/cpu", group, read_v1);
        }
        if (limit && (!found || *limit < *found)) found = limit;
    }
    return found;
}

}  // namespace multiring
