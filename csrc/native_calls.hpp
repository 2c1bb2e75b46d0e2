// Communicators as native code calls them: Python itself, in one step where a buffer is plain; multiring.h and XLA's
// handlers, which name one by the number under which Python has published it.
//
// Python chooses the plans: each is asked for once, when its size is first met, and found here afterwards without the
// GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "engine.hpp"

namespace multiring {

// The handle of the schedule for a collective, a number of bytes (of all blocks together), a root, and the seconds that
// the call has; nothing where Python makes the call itself, to try a plan.
using ChoosePlan = std::function<std::optional<std::uint32_t>(Collective, std::size_t, std::uint32_t, double)>;

bool is_defined(Op op, Dtype dtype);

class NativeCalls {
  public:
    NativeCalls(std::shared_ptr<Engine> engine, int rank, int size, double timeout, ChoosePlan choose_plan);

    // `count` elements in each block; `timeout` in seconds, the communicator's unless given; nothing where no plan is
    // chosen. What is wrong with dtype, op or root is std::invalid_argument.
    std::optional<Call> call(Collective collective, void* pointer, std::size_t count, Dtype dtype, Op op,
                             std::uint32_t root, std::uint32_t label = 0, std::optional<double> timeout = {});

    const std::shared_ptr<Engine> engine;
    const int rank, size;

  private:
    const double timeout_;
    const ChoosePlan choose_plan_;
    std::mutex mutex_;
    std::map<std::tuple<Collective, int, std::uint32_t>, std::uint32_t> handles_;  // by collective, bits of size, root
};

void publish(std::uint32_t communicator, std::shared_ptr<NativeCalls> calls);
void withdraw(const Engine& engine, std::uint32_t communicator);     // unless another engine's has taken its number
void withdraw(const Engine& engine);                                 // all of it
std::shared_ptr<NativeCalls> published(std::uint32_t communicator);  // std::runtime_error if there is none

// The class of multiring.errors, and its message: "PeerLost: rank 1 ..."
std::string error_text(const Failure& failure);

}  // namespace multiring
