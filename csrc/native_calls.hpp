// Communicators as native code calls them: Python itself, in one step where a buffer is plain; multiring.h and XLA's
// handlers, which name one by the number under which Python has published it.
//
// Python chooses the plans: each is asked for once, when its size is first met, and found here afterwards without the
// GIL; where plans are tried, with all calls of a rung at once.
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
#include <variant>

#include "engine.hpp"
#include "trials.hpp"

namespace multiring {

// The handle of the schedule for a collective, a number of bytes (of all blocks together), a root, and the seconds that
// the call has; or calls that try plans, not all of them taken.
using Chosen = std::variant<std::uint32_t, std::shared_ptr<Trials>>;
using ChoosePlan = std::function<Chosen(Collective, std::size_t, std::uint32_t, double)>;

bool is_defined(Op op, Dtype dtype);

class NativeCalls {
  public:
    NativeCalls(std::shared_ptr<Engine> engine, int rank, int size, double timeout, ChoosePlan choose_plan);

    // `count` elements in each block; `timeout` in seconds, the communicator's unless given. What is wrong with dtype,
    // op or root is std::invalid_argument.
    void run(Collective collective, void* pointer, std::size_t count, Dtype dtype, Op op, std::uint32_t root,
             const Engine::CheckSignals& check_signals, std::uint32_t label = 0, std::optional<double> timeout = {});

    // The same, for the engine to start; std::logic_error where plans are tried, whose times `run` takes.
    Call call(Collective collective, void* pointer, std::size_t count, Dtype dtype, Op op, std::uint32_t root);

    const std::shared_ptr<Engine> engine;
    const int rank, size;

  private:
    struct Turn {  // of a plan: a trial has a number
        std::uint32_t handle;
        std::shared_ptr<Trials> trials;
        std::size_t number = 0;
    };
    struct Prepared {
        Call call;
        Turn turn;
    };
    Prepared prepare(Collective collective, void* pointer, std::size_t count, Dtype dtype, Op op, std::uint32_t root,
                     std::uint32_t label, std::optional<double> timeout);
    Turn turn(Collective collective, std::size_t bytes, std::uint32_t root, double seconds);

    const double timeout_;
    const ChoosePlan choose_plan_;
    std::mutex mutex_;
    std::map<std::tuple<Collective, int, std::uint32_t>, Chosen> chosen_;  // by collective, bits of size, root
};

void publish(std::uint32_t communicator, std::shared_ptr<NativeCalls> calls);
void withdraw(const Engine& engine, std::uint32_t communicator);     // unless another engine's has taken its number
void withdraw(const Engine& engine);                                 // all of it
std::shared_ptr<NativeCalls> published(std::uint32_t communicator);  // std::runtime_error if there is none

// The class of multiring.errors, and its message: "PeerLost: rank 1 ..."
std::string error_text(const Failure& failure);

}  // namespace multiring
