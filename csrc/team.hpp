// Team: threads beside the progress thread that sum and copy for it. One core sums from memory slower than a device's
// link brings data (benchmarks/results/2026-11-28-constants.md, Engine); where calls move tensors on devices, the cores
// of a rank have little else to do.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace multiring {

// Something to do once. Who posts it may post it again when it is done.
class TeamTask {
  public:
    std::function<void()> run;
    bool is_done() const { return done_.load(std::memory_order_acquire); }

  private:
    friend class Team;
    std::atomic<bool> done_{true};
};

class Team {
  public:
    explicit Team(std::size_t threads);
    ~Team();  // after what was posted is done
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    void post(TeamTask& task);
    std::size_t size() const { return threads_.size(); }

  private:
    void work();
    bool has_come();

    std::mutex mutex_;
    std::condition_variable posted_;
    std::deque<TeamTask*> tasks_;
    std::atomic<std::size_t> waiting_{0};  // tasks that nobody has taken
    std::atomic<bool> ends_{false};
    std::vector<std::thread> threads_;
};

}  // namespace multiring
