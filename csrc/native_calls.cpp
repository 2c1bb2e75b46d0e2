#include "native_calls.hpp"

#include <bit>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

namespace multiring {
namespace {

struct Register {
    std::mutex mutex;
    std::map<std::uint32_t, std::shared_ptr<NativeCalls>> communicators;
};

Register& registered() {
    static Register* const all = new Register;  // never destroyed: it holds Python objects, and Python ends before
    return *all;
}

}  // namespace

// avg would not be exact on integers, and complex numbers have no order.
bool is_defined(Op op, Dtype dtype) {
    const std::string_view type = name(dtype);
    if (type.starts_with("complex")) return op == Op::sum || op == Op::avg;
    return type.starts_with("float") || type.starts_with("bfloat") ? op <= Op::prod : op != Op::avg;
}

NativeCalls::NativeCalls(std::shared_ptr<Engine> engine, int rank, int size, double timeout, ChoosePlan choose_plan)
    : engine(std::move(engine)), rank(rank), size(size), timeout_(timeout), choose_plan_(std::move(choose_plan)) {}

void NativeCalls::run(Collective collective, void* pointer, std::size_t count, Dtype dtype, Op op, std::uint32_t root,
                      const Engine::CheckSignals& check_signals, std::uint32_t label, std::optional<double> timeout) {
    const Prepared prepared = prepare(collective, pointer, count, dtype, op, root, label, timeout);
    if (!prepared.turn.trials) return engine->run(prepared.call, check_signals);
    Trials::Stamp& stamp = prepared.turn.trials->stamp(prepared.turn.number);
    stamp.entered = Trials::now();
    engine->run(prepared.call, check_signals);
    stamp.left = Trials::now();
}

Call NativeCalls::call(Collective collective, void* pointer, std::size_t count, Dtype dtype, Op op,
                       std::uint32_t root) {
    const Prepared prepared = prepare(collective, pointer, count, dtype, op, root, 0, {});
    if (prepared.turn.trials) throw std::logic_error("a call that tries a plan is started");
    return prepared.call;
}

NativeCalls::Prepared NativeCalls::prepare(Collective collective, void* pointer, std::size_t count, Dtype dtype, Op op,
                                           std::uint32_t root, std::uint32_t label, std::optional<double> timeout) {
    engine->check_owned();  // in a forked child somebody who is not there may hold the lock of `turn`
    const double seconds = timeout.value_or(timeout_);
    const bool reduces = collective == Collective::all_reduce || collective == Collective::reduce_scatter;
    if (reduces && !is_defined(op, dtype))
        throw std::invalid_argument(std::string(name(op)) + " is not defined for " + std::string(name(dtype)));
    if (root >= static_cast<std::uint32_t>(size))
        throw std::invalid_argument("root=" + std::to_string(root) + ": ranks of this communicator are 0 to " +
                                    std::to_string(size - 1));
    const bool blocked = collective == Collective::all_gather || collective == Collective::reduce_scatter ||
                         collective == Collective::all_to_all;
    const std::size_t bytes = count * itemsize(dtype) * (blocked ? static_cast<std::size_t>(size) : 1);
    Prepared prepared{{}, turn(collective, bytes, root, seconds)};
    Call& call = prepared.call;
    call.installed = &engine->installed(prepared.turn.handle);
    call.collective = collective;
    call.pointer = static_cast<std::byte*>(pointer);
    call.count = count;
    call.dtype = dtype;
    call.op = reduces ? op : Op::sum;
    call.root = root;
    call.label = label;
    call.timeout = seconds;
    return prepared;
}

NativeCalls::Turn NativeCalls::turn(Collective collective, std::size_t bytes, std::uint32_t root, double seconds) {
    const std::tuple key(collective, std::bit_width(bytes), root);
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
        Chosen chosen = choose_plan_(collective, bytes, root, seconds);
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

}  // namespace multiring
