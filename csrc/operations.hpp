// Operations: the calls of this rank. A synchronous one is driven by its own thread, for as long as its patience lasts;
// everything else is a work that the progress thread drives.
//
// It owns the works and what calls on devices need. `mutex_` guards what callers leave for the progress thread and take
// from it: new works, questions, owners. `devices_mutex_` guards devices and queues and is held while a call on a
// device is numbered and queued. The works themselves are the progress thread's.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cores.hpp"
#include "doorbell.hpp"
#include "engine_options.hpp"
#include "engine_state.hpp"
#include "executor.hpp"
#include "failure_detector.hpp"
#include "peers.hpp"
#include "team.hpp"
#include "work.hpp"

namespace multiring {

class Operations {
  public:
    // Called ten times a second while nothing happens; what it throws fails the engine.
    using CheckSignals = std::function<void()>;
    using OnDone = std::function<void(const std::optional<Failure>&)>;

    Operations(const EngineOptions& options, EngineState& state, std::shared_ptr<Arena> arena, Executor& executor,
               Cores& cores, Doorbell& doorbell, Peers& peers, const FailureDetector& detector);

    void run(Call call, const CheckSignals& check_signals);
    std::shared_ptr<Work> start(Call call, void* owner, OnDone on_done);
    std::shared_ptr<Work> start_on_device(Call call, const DeviceBuffer& buffer, void* owner);
    std::shared_ptr<Work> start_point(std::uint32_t communicator, int other, Call call, void* owner);
    void wait(const std::shared_ptr<Work>& work, std::optional<double> timeout, const CheckSignals& check_signals);
    bool poll(const Work& work);  // true if it is done
    // True if it is this thread, which begins a call, that makes the rank's calls: not one that only listens beside it.
    bool makes_most_calls(bool is_message) const;
    void close_devices_of(std::uint32_t communicator);
    std::vector<void*> take_owners();  // owners of works that are done
    bool has_owners() const { return has_owners_.load(std::memory_order_relaxed); }
    double seconds_in_calls() const { return 1e-9 * static_cast<double>(in_calls_.load()); }
    Counts counts();  // the progress thread's, at a beat
    double seconds_waiting() const { return 1e-9 * static_cast<double>(waiting_.load()); }

    // The progress thread's.
    const Works& works() const { return works_; }
    void take_new();
    bool advance();   // true if anything was done
    void fail_all();  // after a failure of the engine
    void check_deadlines();
    void begin_idling();
    void end_idling();
    bool needs_polling() const;  // a device rings no bell
    std::optional<Clock::duration> longest_sleep_for_device() const;
    bool let_go_of_devices();
    void drain_devices();

    // The shutdown's: refuse more; once the progress thread has ended, wait for callers and give everything back.
    void close();
    void release();

    void lock_for_fork() { mutex_.lock(); }
    void unlock_after_fork() { mutex_.unlock(); }
    void disown() noexcept { has_owners_.store(false, std::memory_order_relaxed); }

  private:
    // A caller inside the engine: counted, because shutdown waits for callers.
    class CallGuard {
      public:
        explicit CallGuard(Operations& operations) : operations_(operations) { operations_.callers_.fetch_add(1); }
        ~CallGuard() { operations_.callers_.fetch_sub(1); }
        CallGuard(const CallGuard&) = delete;
        CallGuard& operator=(const CallGuard&) = delete;

      private:
        Operations& operations_;
    };
    class Caller;
    class TimedCall;

    enum class DriveEnd { finished, out_of_patience, failed };
    DriveEnd drive(Lane& lane, Spinner& spinner);
    void hand_over(std::shared_ptr<Work> work);
    void wait_until_done(Work& work, const CheckSignals& check_signals);
    std::optional<Failure> ask(const std::shared_ptr<Work>& work);
    void check_can_start(const Call& call);  // a collective
    void remember_caller(pid_t thread);
    void remember_beginning();
    void leave(Clock::time_point end);
    std::int64_t ran_since(std::int64_t before);
    void pass_main_thread(std::uint64_t passages);
    void count_main_thread(std::int64_t ran);
    void end_polls();
    void count_wait(Transport* holder, Clock::time_point begin, Clock::time_point end);
    void finish(Work& work, std::optional<Failure> failure);
    void fail_if_departed(const Work& work);
    void forgive_stopped_time(Work& work);

    // device_calls.cpp: buffers on devices
    std::shared_ptr<DeviceQueue> queue_of(const Call& call, int ordinal, std::size_t slot_bytes);
    void gather_team();
    void close_devices() noexcept;

    const EngineOptions& options_;
    EngineState& state_;
    const std::shared_ptr<Arena> arena_;
    Executor& executor_;
    Cores& cores_;
    Doorbell& doorbell_;
    Peers& peers_;
    const FailureDetector& detector_;

    std::mutex mutex_;  // the next four
    bool closed_ = false;
    Works new_works_;
    std::vector<std::shared_ptr<WaitQuery>> questions_;
    std::vector<void*> owners_;
    std::atomic<bool> has_owners_{false};
    std::atomic<int> callers_{0};                         // threads inside a call
    std::atomic<std::int64_t> in_calls_{0}, waiting_{0};  // nanoseconds, by all callers
    std::atomic<std::uint64_t> entries_{0};               // number of callers that waited
    std::atomic<std::int64_t> held_up_{0};          // part of in_calls_ in which no other caller came in meanwhile
    std::atomic<std::int64_t> ran_{0};              // and on a core between their calls
    std::atomic<std::uint64_t> main_passages_{0};   // times that the main thread began or left one: odd within
    std::atomic<std::int64_t> main_ran_{0};         // part of ran_ that is known of it since its last call
    static constexpr std::size_t most_callers = 4;  // such as a program's own, and those that wait for works
    std::array<std::atomic<pid_t>, most_callers> caller_threads_{};  // that called lately; 0: none
    static constexpr std::size_t most_beginnings = 16;
    std::array<std::atomic<const void*>, most_beginnings> beginnings_{};  // threads of the last collectives
    std::atomic<std::size_t> next_beginning_{0};
    const Clock::time_point began_{Clock::now()};

    std::mutex devices_mutex_;  // the next four, and the order of calls on devices
    std::map<int, std::shared_ptr<Device>> devices_;
    std::map<std::pair<std::uint32_t, int>, std::shared_ptr<DeviceQueue>>
        queues_;                                         // indexed by communicator and device
    std::vector<std::shared_ptr<DeviceQueue>> retired_;  // with calls that go on
    std::unique_ptr<Team> team_;                         // made with the first device

    // the progress thread's own
    Works works_;
    std::vector<std::pair<std::shared_ptr<DeviceTransfer>, void*>>
        leaving_;  // transfers of failed calls, with their owners
    std::optional<Clock::time_point> idle_since_;
    Transport* held_up_by_ = nullptr;  // while it idles
    Clock::time_point looked_at_deadlines_{Clock::now()};
    struct Queued {
        pid_t thread = 0;
        std::int64_t so_far = 0;  // nanoseconds
    };
    std::array<Queued, most_callers + 1> queued_before_{};  // threads' time without a core at the last look
    struct MainThread {
        std::int64_t ran = -1;  // nanoseconds; negative: not known
        std::uint64_t passages = 0, calls = 0;
    } main_before_;                                 // at the last look
    double queued_ = 0;                             // seconds, of all that were looked at
    Clock::time_point away_since_{}, came_back_{};  // the last time that the process was stopped, or starved
};

}  // namespace multiring
