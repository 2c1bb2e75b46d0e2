#include "cores.hpp"

#include <algorithm>

#include "system_files.hpp"

namespace multiring {
namespace {

// Seconds on the core before it is given away: other processes may want it, which nobody here can see. Measured:
// benchmarks/results/2026-11-28-constants.md, Engine.
constexpr double default_spin = 5e-6, longest_spin = 0.1;  // a spinning caller sees no signals
// Bytes for a rank with a core of its own: more than the nearest caches, less than a core's share of the last cache
// where that is 4 MB or more. Measured: benchmarks/results/2026-11-28-constants.md, Engine.
constexpr double spare_staging = 4 << 20;
constexpr std::size_t most_of_arena = 8;  // spare staging takes an eighth of the arena

}  // namespace

Cores::Cores(const EngineOptions& options, const Arena& arena, SpareStaging& spare_staging)
    : options_(options),
      most_spare_(arena.size() / most_of_arena),
      spare_staging_(spare_staging),
      all_(arena.header().cores) {
    divide();
}

void Cores::share(const cpu_set_t& theirs) {
    const std::lock_guard lock(mutex_);
    CPU_OR(&all_, &all_, &theirs);
    ++ranks_;
    divide();
}

void Cores::divide() {
    const double available = std::min<double>(CPU_COUNT(&all_), cpu_quota().value_or(1e9));
    of_a_rank_.store(available / ranks_, std::memory_order_relaxed);
    const double wanted = options_.spin_seconds.value_or(ranks_ <= available ? default_spin : 0);
    patience_.set_spin(seconds(std::min(wanted, longest_spin)));
    const double spare = spare_staging * std::min(1.0, available / ranks_);
    spare_staging_.set_most(std::min(static_cast<std::size_t>(spare), most_spare_));
}

}  // namespace multiring
