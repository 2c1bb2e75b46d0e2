#include "native_calls.hpp"

#include <atomic>
#include <bit>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "reduce.hpp"

namespace multiring {
namespace {

struct PublishedCalls {
    std::mutex mutex;
    std::map<std::uint32_t, std::shared_ptr<NativeCalls>> communicators;
};

PublishedCalls& registered() {
    static PublishedCalls* const all =
        new PublishedCalls;  // never destroyed: it holds Python objects, and Python is gone by then
    return *all;
}

}  // namespace

// There is no kernel where a result would not be exact (avg on integers) or has no meaning (complex numbers have no
// order).
bool is_defined(Op op, Dtype dtype) {
    return find_reduction(dtype, op) != nullptr;
}

std::size_t bytes_of(const Call& call, int size) {
    return call.count * itemsize(call.dtype) * (has_blocks(call.collective) ? static_cast<std::size_t>(size) : 1);
}

void check_op(Op op, Dtype dtype) {
    if (is_defined(op, dtype)) return;
    std::string known;
    for (std::size_t code = 0; code < op_names.size(); ++code)
        if (is_defined(static_cast<Op>(code), dtype))
            known += (known.empty() ? "" : ", ") + std::string(op_names[code]);
    throw std::invalid_argument(std::string(name(op)) + " is not defined for " + std::string(name(dtype)) +
                                ": it has " + known);
}

void check_op(const Call& call) {
    if (reduces(call.collective)) check_op(call.op, call.dtype);
}

bool may_be_narrow(const Call& call) {
    return call.collective == Collective::all_reduce && call.dtype == Dtype::float32 &&
           (call.op == Op::sum || call.op == Op::avg);
}

void check_has_residual(const Call& call) {
    if (!may_be_narrow(call) || call.residual != nullptr) return;
    throw std::invalid_argument("all_reduce of float32 by " + std::string(name(call.op)) +
                                " without a residual, over a wire that rounds most elements to 0: give residual= "
                                "(torch: wire_feedback=True), sum in float64, or name another format than int2 in "
                                "MULTIRING_WIRE");
}

NativeCalls::NativeCalls(std::shared_ptr<Engine> engine, int rank, int size, double timeout, ChoosePlan choose_plan,
                         bool need_residual)
    : engine(std::move(engine)),
      rank(rank),
      size(size),
      timeout(timeout),
      choose_plan_(std::move(choose_plan)),
      need_residual_(need_residual) {}

void NativeCalls::run(Call call, const Engine::CheckSignals& check_signals) {
    const AssignedPlan plan = prepare(call);
    if (!plan.trials) return engine->run(call, check_signals);
    plan.trials->enter(plan.number);
    engine->run(call, check_signals);
    plan.trials->leave(plan.number);
}

std::shared_ptr<Work> NativeCalls::start(Call call, void* owner, const Engine::CheckSignals& check_signals,
                                         std::function<void(const std::optional<Failure>&)> on_done) {
    const AssignedPlan plan = prepare(call);
    return start(plan, check_signals, [&] { return engine->start(call, owner, std::move(on_done)); });
}

std::shared_ptr<Work> NativeCalls::start_on_device(Call call, const DeviceBuffer& buffer, void* owner,
                                                   const Engine::CheckSignals& check_signals) {
    const AssignedPlan plan = prepare(call);
    return start(plan, check_signals, [&] { return engine->start_on_device(call, buffer, owner); });
}

std::shared_ptr<Work> NativeCalls::start(const AssignedPlan& plan, const Engine::CheckSignals& check_signals,
                                         std::invocable auto&& start_work) {
    if (!plan.trials) return start_work();
    plan.trials->enter(plan.number);
    const std::shared_ptr<Work> work = start_work();
    plan.trials->go_on(plan.number, [work, check_signals, engine = engine](double seconds) {
        engine->wait(work, seconds, check_signals);
        return Trials::seconds_of(work->ended);
    });
    return work;
}

// Check a call, and give it the schedule that it runs.
NativeCalls::AssignedPlan NativeCalls::prepare(Call& call) {
    engine->check_owned();  // in a forked child somebody who is not there may hold the lock of `assigned_plan`
    check_op(call);
    if (!reduces(call.collective)) call.op = Op::sum;
    if (call.root >= static_cast<std::uint32_t>(size))
        throw std::invalid_argument("root=" + std::to_string(call.root) + ": ranks of this communicator are 0 to " +
                                    std::to_string(size - 1));
    if (need_residual_) check_has_residual(call);
    AssignedPlan found = assigned_plan(call);
    call.installed = &engine->installed(found.handle);
    return found;
}

NativeCalls::AssignedPlan NativeCalls::assigned_plan(const Call& call) {
    const std::size_t bytes = bytes_of(call, size);
    const std::tuple key(call.collective, std::bit_width(bytes), call.root);
    while (true) {
        std::shared_ptr<Trials> trials;
        {
            const std::lock_guard lock(mutex_);
            if (const auto found = chosen_.find(key); found != chosen_.end()) {
                if (const auto* handle = std::get_if<std::uint32_t>(&found->second)) return {*handle, {}};
                trials = std::get<std::shared_ptr<Trials>>(found->second);
            }
        }
        if (trials)
            if (const auto number = trials->take()) return {trials->handle(*number), trials, *number};
        // Not under the lock: Python needs the GIL to choose, and to let go of trials, and its holder may be on its
        // way here.
        Chosen chosen = choose_plan_(call.collective, bytes, call.root, call.timeout);
        const std::lock_guard lock(mutex_);
        std::swap(chosen_[key], chosen);
    }
}

void publish(std::uint32_t communicator, std::shared_ptr<NativeCalls> calls) {
    std::shared_ptr<NativeCalls> previous;  // released after the lock: that may run Python
    {
        const std::lock_guard lock(registered().mutex);
        previous = std::exchange(registered().communicators[communicator], std::move(calls));
    }
}

namespace {

template <class Condition>
void withdraw_where(Condition&& condition) {
    std::vector<std::shared_ptr<NativeCalls>> withdrawn;  // released after the lock: that may run Python
    const std::lock_guard lock(registered().mutex);
    std::erase_if(registered().communicators, [&](auto& entry) {
        if (!condition(entry.first, *entry.second)) return false;
        withdrawn.push_back(std::move(entry.second));
        return true;
    });
}

}  // namespace

void withdraw(const Engine& engine, std::uint32_t communicator) {
    withdraw_where([&](std::uint32_t number, const NativeCalls& calls) {
        return number == communicator && calls.engine.get() == &engine;
    });
}

void withdraw(const Engine& engine) {
    withdraw_where([&](std::uint32_t, const NativeCalls& calls) { return calls.engine.get() == &engine; });
}

std::shared_ptr<NativeCalls> published(std::uint32_t communicator) {
    const std::lock_guard lock(registered().mutex);
    const auto found = registered().communicators.find(communicator);
    if (found != registered().communicators.end()) return found->second;
    throw std::runtime_error(communicator == 0 ? std::string("multiring is not initialised")
                                               : "communicator " + std::to_string(communicator) + " is closed");
}

std::string error_text(const Failure& failure) {
    return std::string(class_name(failure.kind)) + ": " + failure.message;
}

namespace {

// The GIL may be held for longer. A launcher gives the ranks 1 s after the first failure to say what they miss.
constexpr auto longest_step = std::chrono::milliseconds(500);

struct RunningStep {
    Event done;
    const Clock::time_point until = Clock::now() + longest_step;
};

std::atomic<void (*)()> step_before_errors{nullptr};
std::mutex step_mutex;
std::shared_ptr<RunningStep> latest_step;  // guarded by it

}  // namespace

void set_step_before_errors(void (*step)()) {
    step_before_errors.store(step);
}

void take_step_before_error() noexcept try {
    void (*const step)() = step_before_errors.load();
    if (step == nullptr) return;
    std::shared_ptr<RunningStep> running;
    {
        const std::lock_guard lock(step_mutex);
        if (latest_step == nullptr || latest_step->done.is_set()) {
            const auto begun = std::make_shared<RunningStep>();
            std::thread([step, begun] {
                step();
                begun->done.set();
            }).detach();
            latest_step = begun;
        }
        running = latest_step;
    }
    while (!running->done.is_set() && Clock::now() < running->until)
        running->done.wait_for(running->until - Clock::now());
} catch (const std::exception&) {  // no thread or no memory is left: the error is more important
}

}  // namespace multiring
