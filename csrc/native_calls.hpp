// The calls of a communicator: each is checked here, given its plan, and run or started. Python makes all its
// collectives by them; so do multiring.h and XLA's handlers, which name a communicator by the number under which Python
// has published it.
//
// Python chooses the plans: each is asked for once, when its size is first met, and found here afterwards without the
// GIL; where plans are tried, with all calls of a rung at once.
#pragma once

#include <concepts>
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
std::size_t bytes_of(const Call& call, int size);  // bytes of all blocks together, over `size` ranks
void check_op(Op op, Dtype dtype);                 // std::invalid_argument if it is not defined for the type
void check_op(const Call& call);                   // the same, if its collective reduces
bool may_be_narrow(const Call& call);              // whether narrow wires concern it
void check_has_residual(const Call& call);         // std::invalid_argument if that is so, and it has none

// Each call names its collective, buffer, op, root, label and timeout. What is wrong with op or root is
// std::invalid_argument, and so is a sum of float32 without a residual where these sums `need_residual`.
class NativeCalls {
  public:
    NativeCalls(std::shared_ptr<Engine> engine, int rank, int size, double timeout, ChoosePlan choose_plan,
                bool need_residual);

    void run(Call call, const Engine::CheckSignals& check_signals);
    std::shared_ptr<Work> start(Call call, void* owner, const Engine::CheckSignals& check_signals,
                                std::function<void(const std::optional<Failure>&)> on_done = {});
    std::shared_ptr<Work> start_on_device(Call call, const DeviceBuffer& buffer, void* owner,
                                          const Engine::CheckSignals& check_signals);

    const std::shared_ptr<Engine> engine;
    const int rank, size;
    const double timeout;  // the communicator's

  private:
    struct AssignedPlan {  // the plan of one call; a trial has a number
        std::uint32_t handle;
        std::shared_ptr<Trials> trials;
        std::size_t number = 0;
    };
    AssignedPlan prepare(Call& call);
    AssignedPlan assigned_plan(const Call& call);
    std::shared_ptr<Work> start(const AssignedPlan& plan, const Engine::CheckSignals& check_signals,
                                std::invocable auto&& start_work);

    const ChoosePlan choose_plan_;
    const bool need_residual_;
    std::mutex mutex_;
    std::map<std::tuple<Collective, int, std::uint32_t>, Chosen> chosen_;  // indexed by collective, bits of size, root
};

void publish(std::uint32_t communicator, std::shared_ptr<NativeCalls> calls);
void withdraw(const Engine& engine, std::uint32_t communicator);     // unless another engine's has taken its number
void withdraw(const Engine& engine);                                 // all of it
std::shared_ptr<NativeCalls> published(std::uint32_t communicator);  // std::runtime_error if there is none

// The class of multiring.errors, and its message: "PeerLost: rank 1 ..."
std::string error_text(const Failure& failure);

// A program that is told of an engine's error otherwise than by Python may end at once. `step` is what runs before, in
// a thread of its own: it may need the GIL, whose holder may wait for the one that is told. nullptr: nothing does.
void set_step_before_errors(void (*step)());
void take_step_before_error() noexcept;  // returns when it is done, after 0.5 s in any case

}  // namespace multiring
