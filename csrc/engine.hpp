// Engine: one rank's end of everything. It owns the arena, the executor, the connections and the progress thread, and
// it decides who drives an operation: a synchronous call its own thread, for as long as its patience lasts; everything
// else the progress thread.
//
// The first failure, here or announced by a peer, fails the engine: everything pending raises it, and so does every
// later call.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "blame.hpp"
#include "control.hpp"
#include "executor.hpp"
#include "liveness.hpp"
#include "mailbox.hpp"
#include "pool.hpp"
#include "tcp.hpp"
#include "wait.hpp"

namespace multiring {

class Engine;

// An operation that the progress thread drives.
struct Work {
    Call call{};
    Lane* lane = nullptr;  // once it has begun
    Event done;
    Clock::time_point ended{};                                   // valid once done
    std::optional<Failure> failure;                              // valid once done
    std::optional<Failure> refused;                              // at the call, by a card: to be raised there
    int other = any_source;                                      // of a message that is done: the rank at its other end
    bool told = false;                                           // those that it waits for what it is
    std::atomic<int> waiters{0};                                 // callers that do nothing else until it is done
    std::atomic<Clock::rep> waited_since{0};                     // when the first of these came
    double next_report = 0;                                      // age in seconds at which to tell whom it waits for
    std::function<void(const std::optional<Failure>&)> on_done;  // called by the progress thread; must be short
    void* owner = nullptr;  // kept alive until done: a Python object, given back through Engine::take_owners
};

// What a work waits for, asked of the progress thread, which alone may look.
struct WaitQuery {
    std::shared_ptr<Work> work;
    Failure answer;
    Event answered;
};

// What the progress thread's epoll tells of, and whose it is.
enum class Watched : std::uint64_t { control, doorbell, data, hangup };
inline std::uint64_t key_of(Watched what, int peer) {
    return static_cast<std::uint64_t>(what) << 32 | static_cast<std::uint32_t>(peer);
}

// Where other engines of this process leave notices; outlives the engine.
struct InprocMailbox {
    std::mutex mutex;
    Engine* engine = nullptr;
};

// Where the blocks of a call's buffer lie on a card: what is read there, what is written, if anything; and the stream
// of the caller's on which they are ready.
struct CardBuffer {
    int device = 0;
    cuda::Stream stream = nullptr;
    std::optional<CardBlocks> out, in;
};

struct EngineOptions {
    int rank = 0;
    int world_size = 1;
    std::uint16_t generation = 0;
    std::vector<std::string> hosts;  // by rank; empty if unknown
    std::size_t arena_bytes = 0;
    std::optional<double> spin_seconds;
    bool in_process = false;
    double heartbeat_timeout = 30;         // seconds of silence after which a rank is lost
    double late_seconds = 30;              // that a call waits before a line says for whom
    bool trace = false;                    // keep what happened when
    std::optional<std::size_t> helpers{};  // threads that sum for calls on cards
};

class Engine final : public Surroundings {
  public:
    explicit Engine(EngineOptions options);
    ~Engine();

    int memory_fd() const { return arena_->fd(); }
    int doorbell_fd() const { return doorbell_; }
    std::shared_ptr<Arena> shared_arena() const { return arena_; }

    // These own the descriptors, also where they throw.
    void attach_local(int peer, int memory_fd, int doorbell_fd, int socket_fd);
    void attach_in_process(int peer, Engine& other);
    void attach_tcp(int peer, const std::vector<int>& sockets);
    void attach_control(int peer, int socket_fd);
    bool attached(int peer) const;
    bool departed(int peer) const;  // it has said farewell, and nothing of it is on its way

    void add_communicator(std::uint32_t id, std::vector<int> members, std::uint16_t incarnation);
    void forget(std::uint32_t id);
    std::uint64_t completed(std::uint32_t communicator) const;  // collectives, from the first on
    std::uint32_t install(std::uint32_t communicator, std::span<const std::int64_t> table,
                          std::span<const std::int32_t> peers, int blocks, std::size_t segment_bytes,
                          std::uint32_t window, std::uint64_t plan);
    Installed& installed(std::uint32_t handle);

    // `check_signals` is called ten times a second while nothing happens; what it throws fails the engine. It should
    // also log what `take_reports` returns.
    using CheckSignals = std::function<void()>;
    void run(Call call, const CheckSignals& check_signals);
    std::shared_ptr<Work> start(Call call, void* owner,
                                std::function<void(const std::optional<Failure>&)> on_done = {});
    // The same with a buffer on a card: begins after what the caller's stream has queued, and is done when the card is.
    std::shared_ptr<Work> start_on_card(Call call, const CardBuffer& buffer, void* owner);
    // A message to or from a rank, or from any_source; `call` says which collective (send, recv), buffer, tag and
    // timeout.
    std::shared_ptr<Work> start_point(std::uint32_t communicator, int other, Call call, void* owner);
    void wait(const std::shared_ptr<Work>& work, std::optional<double> timeout, const CheckSignals& check_signals);

    void fail(Failure failure) override;
    void fail_from_python(Failure failure);
    std::optional<Failure> failure() const;
    void leave_notice(Notice notice);  // from another engine of this process
    // A mismatch that nobody has heard of yet: a call that has completed here was another one elsewhere.
    std::optional<Failure> shutdown(double timeout);
    std::vector<std::string> take_reports();  // lines for the log: who is silent, who is late
    bool has_reports() const { return has_reports_.load(std::memory_order_relaxed); }
    std::vector<void*> take_owners();  // of works that are done
    bool has_owners() const { return has_owners_.load(std::memory_order_relaxed); }

    struct Statistics {
        std::uint64_t operations, segments, arena_allocated, arena_committed;
        double seconds_in_calls;  // that callers spent in run and wait
        double seconds_waiting;   // of these, with nothing to do
        std::vector<std::pair<int, Traffic>> peers;
    };
    Statistics statistics() const;
    // What was traced, once the engine is shut down; nothing if it was not asked for.
    std::vector<Trace::Thread> traced() const;
    pid_t progress_thread() const { return progress_thread_.load(); }

    // fork.cpp. A disowned engine is a forked child's copy: every call raises, and it is never destroyed.
    void lock_for_fork();
    void unlock_after_fork();
    void disown() noexcept;
    void check_owned() const;   // throws if it is disowned
    void check_usable() const;  // throws if it is disowned, was shut down or failed
    bool is_disowned() const { return disowned_.load(std::memory_order_relaxed); }

  private:
    // A caller inside the engine: counted, because shutdown waits for callers.
    class CallGuard {
      public:
        explicit CallGuard(Engine& engine) : engine_(engine) { engine_.callers_.fetch_add(1); }
        ~CallGuard() { engine_.callers_.fetch_sub(1); }
        CallGuard(const CallGuard&) = delete;
        CallGuard& operator=(const CallGuard&) = delete;

      private:
        Engine& engine_;
    };

    void suspect(int rank, const std::string& reason) override;
    void wake_progress() override;
    std::string rank_name(int rank) const override;
    const std::string& host(int rank) const override;

    void check_can_start(const Call& call) const;
    void check_peer(int peer) const;
    void add_link(std::unique_ptr<LocalLink> link);
    void linger(Clock::time_point until);
    bool is_unread() const;
    void release_descriptors();
    bool drain_sockets();
    void divide_cores();
    Failure raised() const;  // the failure, which somebody hears of now
    Failure failure_of(const Call& call) const;
    [[noreturn]] void raise(Failure failure) const;  // to a caller
    std::optional<Failure> ask(const std::shared_ptr<Work>& work);
    void hand_over(std::shared_ptr<Work> work);
    void wait_until_done(Work& work, const CheckSignals& check_signals);
    enum class Outcome { finished, out_of_patience, failed };
    Outcome drive(Lane& lane, Spinner& spinner);
    void count_wait(Link* holder, Clock::time_point begin, Clock::time_point end);
    class TimedCall;
    void fail_if_departed(const Work& work);

    // cards.cpp: buffers on cards
    std::shared_ptr<DeviceQueue> queue_of(const Call& call, int ordinal, std::size_t slot_bytes);
    bool let_go_of_cards();
    void drain_cards();
    bool needs_polling() const;
    void gather_team();
    void close_cards() noexcept;
    void close_cards_of(std::uint32_t communicator);

    // progress.cpp: the progress thread
    void progress();
    bool advance_works();
    bool drain_links();
    void finish(Work& work, std::optional<Failure> failure);
    void fail_works();
    void tell_waiters();
    void begin_idling();
    void end_idling();
    void take_inbox();
    void sleep();
    void poll_connections(Clock::duration at_most);
    void watch_data(bool wanted);
    void check_deadlines();
    void forgive_stopped_time(Work& work);
    void check_suspicions();
    Clock::duration sleep_at_most();

    // alive.cpp: the progress thread's watch over the other ranks
    void beat();
    void publish_status();
    void check_silence();
    void look_at_links();
    void name_apart(int rank, double seconds);
    int leader_of(int rank) const;  // the lowest rank of its host
    void complain(int rank, double seconds, Complaint why);
    void hear_complaint(const Notice& complaint);
    void check_complaints();
    bool is_complaint(int by_host, int of_host) const;
    Failure verdict() const;
    Failure missed(const Notice& complaint) const;
    std::map<int, std::set<int>> hosts_apart() const;
    Failure silence_of(int rank, double silent) const;
    std::string silence_text(int rank, double silent) const;
    Failure told_by(const Notice& notice) const;
    Failure mismatch_told_by(const Notice& notice) const;
    void report_lateness();
    void report(std::string line);
    static double age_of(const Call& call);  // seconds
    Waiting waiting_of(const Work& work) const;
    Blame blame_of(const Work& work) const;
    std::string describe(const Blame& blame) const;
    Failure timeout_of(const Work& work, const std::string& limit) const;

    const EngineOptions options_;
    const std::string no_host_;
    int doorbell_ = -1;
    int epoll_ = -1;       // what the progress thread sleeps on
    int data_epoll_ = -1;  // the data connections; part of epoll_ while the progress thread has work
    Pool pool_;            // outlives the links
    std::shared_ptr<Arena> arena_;
    std::shared_ptr<InprocMailbox> letterbox_;
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<Control> control_;

    mutable std::mutex mutex_;  // everything down to the atomics
    std::vector<const LocalLink*> local_links_;
    std::vector<TcpLink*> tcp_links_;
    std::vector<std::shared_ptr<InprocMailbox>> in_process_peers_;
    std::optional<Failure> failure_;
    Clock::time_point failed_since_{};
    std::optional<Notice> untold_;  // of the failure, to those who wait for us
    std::vector<bool> departed_;    // by rank: has said farewell
    std::vector<bool> linked_;      // by rank: has data connections
    std::vector<std::shared_ptr<Work>> new_works_;
    std::vector<Notice> notices_;
    std::vector<std::pair<Clock::time_point, Notice>> suspicions_;  // true unless there is another failure by then
    std::vector<std::shared_ptr<WaitQuery>> questions_;
    std::vector<void*> owners_;
    std::vector<std::string> reports_;

    std::mutex cards_mutex_;  // the next three, and the order of calls on cards
    std::map<int, std::shared_ptr<Device>> devices_;
    std::map<std::pair<std::uint32_t, int>, std::shared_ptr<DeviceQueue>> queues_;  // by communicator and device
    std::vector<std::shared_ptr<DeviceQueue>> retired_;                             // with calls that go on

    std::unique_ptr<Team> team_;  // made with the first device
    std::atomic<double> cores_of_a_rank_{1};

    Patience patience_;
    std::atomic<bool> disowned_{false};
    std::atomic<bool> failed_{false};
    mutable std::atomic<bool> raised_{false};  // the failure, to a caller
    std::atomic<bool> closed_{false};
    std::atomic<bool> stopping_{false};
    std::atomic<bool> asleep_{false};
    std::atomic<bool> inbox_{false};  // there is something new in the above
    std::atomic<bool> someone_departed_{false};
    std::atomic<bool> has_sockets_{false};
    std::atomic<bool> has_owners_{false};
    std::atomic<bool> has_reports_{false};
    std::atomic<pid_t> progress_thread_{0};
    std::atomic<int> callers_{0};                         // threads inside a call
    std::atomic<std::int64_t> in_calls_{0}, waiting_{0};  // nanoseconds, by all callers

    // the progress thread's own
    std::vector<std::shared_ptr<Work>> works_;
    std::vector<std::pair<std::shared_ptr<DeviceTransfer>, void*>> leaving_;  // of failed calls, with their owners
    Clock::time_point last_poll_{};
    bool watches_data_ = false;
    std::optional<Clock::time_point> idle_since_;
    Link* held_up_by_ = nullptr;  // while it idles
    Liveness liveness_;
    Clock::time_point next_beat_{}, next_publishing_{}, last_call_{Clock::now()};
    Clock::time_point looked_at_deadlines_{Clock::now()};
    Clock::time_point away_since_{}, came_back_{};  // the last time that the process was stopped, or starved
    std::uint64_t beats_ = 0, looks_ = 0, own_calls_ = 0;
    std::vector<bool> named_;         // by rank: reported as silent
    std::vector<bool> named_apart_;   // by rank: reported as out of reach
    std::vector<Notice> complaints_;  // one of each kind between two hosts
    Clock::time_point verdict_at_{};  // on these
    std::thread thread_;
};

}  // namespace multiring
