// Work: an operation that the progress thread drives.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "call.hpp"
#include "device.hpp"
#include "errors.hpp"
#include "executor.hpp"
#include "wait.hpp"

namespace multiring {

struct Work {
    Call call{};
    Lane* lane = nullptr;  // once it has begun
    Event done;
    Clock::time_point ended{};                                   // valid once done
    std::optional<Failure> failure;                              // valid once done
    std::optional<Failure> refused;                              // at the call, by a device: to be raised there
    int other = any_source;                                      // the rank at the other end of a message that is done
    bool told = false;                                           // those that it waits for what it is
    std::atomic<int> waiters{0};                                 // callers that do nothing else until it is done
    std::atomic<Clock::rep> waited_since{0};                     // when the first of these came
    double next_report = 0;                                      // age in seconds at which to tell whom it waits for
    std::function<void(const std::optional<Failure>&)> on_done;  // called by the progress thread; must be short
    void* owner = nullptr;  // kept alive until done: a Python object, given back through Engine::take_owners
};
using Works = std::vector<std::shared_ptr<Work>>;

// Asks the progress thread, which alone may look, what a work waits for.
struct WaitQuery {
    std::shared_ptr<Work> work;
    Failure answer;
    Event answered;
};

// Blocks of a call's buffer on a device: those read, those written, if any, and the caller's stream on which they are
// ready.
struct DeviceBuffer {
    int device = 0;
    cuda::Stream stream = nullptr;
    std::optional<DeviceBlocks> out, in;
};

}  // namespace multiring
