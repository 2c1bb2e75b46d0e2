#include "team.hpp"

#include "wait.hpp"

namespace multiring {
namespace {

// Longer than the gap between a call's tasks, so that no thread sleeps in it. Measured:
// benchmarks/results/2026-11-28-constants.md, Engine.
constexpr auto longest_spin = std::chrono::microseconds(100);

}  // namespace

Team::Team(std::size_t threads) {
    for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
}

Team::~Team() {
    {
        const std::lock_guard lock(mutex_);
        ends_.store(true, std::memory_order_release);
    }
    posted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Team::post(TeamTask& task) {
    task.done_.store(false, std::memory_order_relaxed);
    {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(&task);
        waiting_.store(tasks_.size(), std::memory_order_release);
    }
    posted_.notify_one();
}

// True if work came within `longest_spin`.
bool Team::has_come() {
    const auto until = Clock::now() + longest_spin;
    while (Clock::now() < until) {
        if (waiting_.load(std::memory_order_acquire) != 0) return true;
        for (int i = 0; i < 16; ++i) pause();
    }
    return false;
}

void Team::work() {
    while (true) {
        if (!has_come()) {
            std::unique_lock lock(mutex_);
            posted_.wait(lock, [this] { return !tasks_.empty() || ends_.load(std::memory_order_relaxed); });
            if (tasks_.empty()) return;
        }
        TeamTask* task = nullptr;
        {
            const std::lock_guard lock(mutex_);
            if (tasks_.empty()) continue;
            task = tasks_.front();
            tasks_.pop_front();
            waiting_.store(tasks_.size(), std::memory_order_release);
        }
        task->run();
        task->done_.store(true, std::memory_order_release);
    }
}

}  // namespace multiring
