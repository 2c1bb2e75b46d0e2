// EngineState: whether this rank's engine can be called. It cannot after its first failure, once it was shut down, and
// in a forked child; here is what each call raises then.
//
// It owns the first failure, with when it came and what data connections have yet to be told of it, which `mutex_`
// guards. The flags are atomic, for those that look at them often; `failed_` and `closed_` change under the mutex.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "call.hpp"
#include "engine_options.hpp"
#include "errors.hpp"
#include "notice.hpp"
#include "wait.hpp"

namespace multiring {

class EngineState {
  public:
    explicit EngineState(const EngineOptions& options) : options_(options) {}

    void check_owned() const;   // throws if this is a forked child's copy
    void check_open() const;    // or was shut down
    void check_usable() const;  // or failed
    void check_can_start(const Call& call) const;

    bool is_disowned() const { return disowned_.load(std::memory_order_relaxed); }
    bool is_closed() const { return closed_.load(std::memory_order_acquire); }
    bool has_failed() const { return failed_.load(std::memory_order_acquire); }
    std::optional<Failure> failure() const;
    Clock::time_point failed_since() const;

    // Returns the notice for other ranks; nothing if an earlier failure stands and this one adds nothing to it.
    std::optional<Notice> fail(Failure failure);
    std::optional<Notice> take_untold();  // what those that wait for us have not been told

    void count_as_raised() const { raised_.store(true, std::memory_order_relaxed); }
    Failure failure_of(const Call& call) const;      // the engine's failure as this call sees it
    [[noreturn]] void raise(Failure failure) const;  // to a caller

    bool close();  // calls are refused from now on; false if it was closed before
    // A mismatch that nobody has heard of yet: a call that has completed here was another one elsewhere.
    std::optional<Failure> unheard() const;
    void end();  // what is still pending fails: the engine was shut down

    void lock_for_fork() { mutex_.lock(); }
    void unlock_after_fork() { mutex_.unlock(); }
    void disown() noexcept { disowned_.store(true, std::memory_order_relaxed); }

  private:
    Failure raised() const;  // the failure, which somebody hears of now

    const EngineOptions& options_;
    mutable std::mutex mutex_;
    std::optional<Failure> failure_;
    Clock::time_point failed_since_{};
    std::optional<Notice> untold_;  // what ranks that wait for us are still to be told of the failure
    std::atomic<bool> disowned_{false};
    std::atomic<bool> failed_{false};
    mutable std::atomic<bool> raised_{false};  // the failure, to a caller
    std::atomic<bool> closed_{false};
};

[[noreturn]] void throw_shut_down();

}  // namespace multiring
