// Cores: how many cores this host has for each of its ranks that are attached; by them threads that wait spin or not,
// and calls have more or less staging to spare.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <mutex>

#include "endpoint.hpp"
#include "engine_options.hpp"
#include "memory.hpp"
#include "wait.hpp"

namespace multiring {

class Cores {
  public:
    Cores(const EngineOptions& options, const Arena& arena, SpareStaging& spare_staging);

    void share(const cpu_set_t& theirs);  // with another rank, which may use these
    Patience& patience() { return patience_; }
    double of_a_rank() const { return of_a_rank_.load(std::memory_order_relaxed); }

  private:
    void divide();

    const EngineOptions& options_;
    const std::size_t most_spare_;
    SpareStaging& spare_staging_;
    Patience patience_;
    std::atomic<double> of_a_rank_{1};

    std::mutex mutex_;  // the next two, and what follows from them
    cpu_set_t all_;     // that the ranks of this host may use
    int ranks_ = 1;
};

}  // namespace multiring
