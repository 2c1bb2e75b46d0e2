#include "signal_counter.hpp"

#include <array>
#include <atomic>
#include <cerrno>
#include <stdexcept>
#include <string>

#include "errors.hpp"

namespace multiring {
namespace {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);  // or a handler could not touch them
std::array<std::atomic<std::uint64_t>, NSIG> counts;

void note(int number) {
    counts[static_cast<std::size_t>(number)].fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

SignalCounter::SignalCounter(int number) : number_(number) {
    struct sigaction action{};
    action.sa_handler = note;
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    if (sigaction(number, &action, &former_) != 0)
        throw std::invalid_argument(system_message("signal " + std::to_string(number), errno));
}

std::uint64_t SignalCounter::count() const {
    return counts[static_cast<std::size_t>(number_)].load(std::memory_order_relaxed);
}

void SignalCounter::give_back() {
    struct sigaction current{};
    if (!is_taken_ || sigaction(number_, nullptr, &current) != 0) return;
    is_taken_ = false;
    if ((current.sa_flags & SA_SIGINFO) == 0 && current.sa_handler == note) sigaction(number_, &former_, nullptr);
}

}  // namespace multiring
