// Engine: one rank's end of everything, and the one class that others call. It owns the arena, the executor, the peers,
// the operations and the progress thread, starts them, and ends them at the shutdown.
//
// The first failure, here or announced by a peer, fails the engine: everything pending raises it, and so does every
// later call.
//
// The engine has no lock of its own. Those of its parts are taken in this order, some of them or all:
//
//     1. Operations::devices_mutex_, and under it a DeviceQueue's and the Team's; or a transport's for receiving
//     2. Executor::mutex_; Endpoint::transports_mutex_
//     3. a Communicator's, and under it its schedules' (layout_mutex_) and, if it is free, a DeviceQueue's
//     4. the mailbox of another engine of this process
//     5. Operations::mutex_, Peers::mutex_, Control's, EngineState's or FailureDetector's: one alone, but for fork(),
//        which takes the executor's and then all of these in this order, with SocketThreads' after Control's
//     6. SocketThreads::mutex_; a transport's for sending, under which no failure is reported, and under it those of
//        its queues and of a SocketThread; Endpoint::lanes_mutex_, the pool's, the arena's, that of the labels, that of
//        the cores, the call recorder's
//
// With several engines in one process fork() holds the locks of one while it takes those of the next.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cores.hpp"
#include "doorbell.hpp"
#include "engine_options.hpp"
#include "engine_state.hpp"
#include "executor.hpp"
#include "failure_detector.hpp"
#include "fork.hpp"
#include "operations.hpp"
#include "peers.hpp"
#include "pool.hpp"
#include "slow_links.hpp"
#include "slow_ranks.hpp"
#include "status.hpp"
#include "work.hpp"

namespace multiring {

class Engine final : public Surroundings, public Forked {
  public:
    explicit Engine(EngineOptions options);
    ~Engine();

    int memory_fd() const { return arena_->fd(); }
    int doorbell_fd() const { return doorbell_.descriptor(); }
    std::shared_ptr<Arena> shared_arena() const { return arena_; }

    // These own the descriptors, also where they throw.
    void attach_local(int peer, int memory_fd, int doorbell_fd, int socket_fd) {
        peers_.attach_local(peer, memory_fd, doorbell_fd, socket_fd);
    }
    void attach_in_process(int peer, Engine& other) { peers_.attach_in_process(peer, other.peers_); }
    void attach_tcp(int peer, const std::vector<int>& sockets, std::vector<Records> records = {}) {
        peers_.attach_tcp(peer, sockets, std::move(records));
    }
    void attach_control(int peer, int socket_fd, std::optional<Records> records = {}) {
        peers_.attach_control(peer, socket_fd, std::move(records));
    }
    bool attached(int peer) const { return peers_.attached(peer); }
    bool departed(int peer) const { return peers_.departed(peer); }
    void miss_connection(int peer, double seconds) { detector_.miss_connection(peer, seconds); }
    void expect_links(std::vector<PlaceLink> links) { slow_links_.expect(std::move(links)); }

    void add_communicator(std::uint32_t id, std::vector<int> members, std::uint16_t incarnation);
    void forget(std::uint32_t id);
    std::uint64_t completed(std::uint32_t communicator) const;  // collectives, from the first on
    std::uint32_t install(std::uint32_t communicator, std::span<const std::int64_t> table,
                          std::span<const std::int32_t> peers, const PlanFacts& facts);
    Installed& installed(std::uint32_t handle) { return executor_.installed(handle); }

    // `check_signals` is called ten times a second while nothing happens; what it throws fails the engine. It should
    // also log what `take_reports` returns.
    using CheckSignals = Operations::CheckSignals;
    void run(Call call, const CheckSignals& check_signals) { operations_.run(std::move(call), check_signals); }
    std::shared_ptr<Work> start(Call call, void* owner, Operations::OnDone on_done = {}) {
        return operations_.start(std::move(call), owner, std::move(on_done));
    }
    // The same with a buffer on a device: begins after what the caller's stream has queued, is done when the device is.
    std::shared_ptr<Work> start_on_device(Call call, const DeviceBuffer& buffer, void* owner) {
        return operations_.start_on_device(std::move(call), buffer, owner);
    }
    // A message to or from a rank, or from any_source; `call` says which collective (send, recv), buffer, tag and
    // timeout.
    std::shared_ptr<Work> start_point(std::uint32_t communicator, int other, Call call, void* owner) {
        return operations_.start_point(communicator, other, std::move(call), owner);
    }
    void wait(const std::shared_ptr<Work>& work, std::optional<double> timeout, const CheckSignals& check_signals) {
        operations_.wait(work, timeout, check_signals);
    }
    bool poll(const Work& work) { return operations_.poll(work); }  // true if it is done

    void fail(Failure failure) override { peers_.fail(std::move(failure)); }
    void fail_from_python(Failure failure);
    std::optional<Failure> failure() const { return state_.failure(); }
    // After a mismatch: the collective on which ranks disagree, as this one called it, or was about to.
    struct Disputed {
        std::uint32_t communicator;
        std::uint64_t number;
        std::string words, plan;
    };
    std::optional<Disputed> disputed() const;  // nothing if it has not called it, or if it is about a message
    // A mismatch that nobody has heard of yet: a call that has completed here was another one elsewhere.
    std::optional<Failure> shutdown(double timeout);
    // Lines for the log: who is silent, who is late.
    std::vector<std::string> take_reports() { return detector_.take_reports(); }
    bool has_reports() const { return detector_.has_reports(); }
    std::vector<void*> take_owners() { return operations_.take_owners(); }  // owners of works that are done
    bool has_owners() const { return operations_.has_owners(); }

    struct Statistics {
        std::uint64_t operations, segments, arena_allocated, arena_committed;
        double seconds_in_calls;  // time that callers spent in run and wait
        double seconds_waiting;   // part of these with nothing to do
        std::vector<std::pair<int, Traffic>> peers;
        struct Done {
            Collective collective;
            std::uint64_t operations, bytes;
            double seconds;  // from the start of each to its end
        };
        std::vector<Done> collectives;   // that have completed here
        std::vector<Waiting> in_flight;  // the oldest calls, as the progress thread last saw them
    };
    Statistics statistics() const;
    std::optional<SlowRank> slowest() const;    // that keeps the others waiting, call after call
    std::vector<SlowRank> slow_so_far() const;  // all that did
    std::optional<SlowLink> slow_link() const;  // that keeps all waiting
    std::vector<SlowLink> slow_links_so_far() const;
    // Before any call: what is run when this rank keeps the others waiting; `is_caller`: by the thread that makes most
    // calls.
    using WhenSlow = std::function<void(SlowRank::Reason, bool is_caller)>;
    void when_slow(WhenSlow run) { when_slow_ = std::move(run); }
    // At the beginning of a call of the program, in its thread: it is told if it is the one that makes most calls.
    void tell_if_slow(bool is_message);
    // At a look at the statistics: their thread is told if compiled code has made all calls since the look before.
    void tell_if_slow_in_compiled_code();
    // Traced events, once the engine is shut down; empty if tracing was not asked for.
    std::vector<Trace::Thread> traced() const;
    std::vector<RecordedCall> recorded() const;  // the last calls; none if they are not kept
    pid_t progress_thread() const { return progress_thread_.load(); }

    // A disowned engine is a forked child's copy: every call raises, and it is never destroyed.
    void lock_for_fork() override;
    void unlock_after_fork() override;
    void disown() noexcept override;
    void check_owned() const { state_.check_owned(); }    // throws if it is disowned
    void check_usable() const { state_.check_usable(); }  // throws if it is disowned, was shut down or failed
    bool is_disowned() const { return state_.is_disowned(); }

  private:
    void suspect(int rank, const std::string& reason) override { peers_.suspect(rank, reason); }
    void wake_progress() override { doorbell_.ring(); }
    std::string rank_name(int rank) const override { return options_.rank_name(rank); }
    const std::string& host(int rank) const override { return options_.host(rank); }

    // progress.cpp: the progress thread
    void progress();
    void take_inbox();
    void beat();
    void tell_that_slow(bool is_caller);
    void look_for_the_slow();
    void check_suspicions();
    bool drain_transports();
    Clock::duration sleep_at_most();
    void sleep();

    const EngineOptions options_;
    EngineState state_;
    Pool pool_;  // outlives the transports
    const std::shared_ptr<Arena> arena_;
    Executor executor_;
    Cores cores_;
    Doorbell doorbell_;
    Peers peers_;
    FailureDetector detector_;
    SlowRanks slow_ranks_;
    SlowLinks slow_links_;
    WhenSlow when_slow_;
    std::atomic<std::uint64_t> program_calls_{0};                       // threads that meet here may lose one
    std::atomic<std::uint64_t> program_calls_seen_{0}, calls_seen_{0};  // at the last look at the statistics
    Operations operations_;
    std::atomic<bool> stopping_{false};
    std::atomic<pid_t> progress_thread_{0};
    std::thread thread_;
};

}  // namespace multiring
