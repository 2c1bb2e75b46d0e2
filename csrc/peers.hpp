// Peers: the other ranks as this one reaches them. It attaches transports and control connections, keeps account of who
// has left, reads what arrives, and passes on failures, complaints and farewells.
//
// It owns the control connections, the epoll of the data connections, which is part of the progress thread's while that
// has work, and the lists of transports (the transports themselves are the executor's). `mutex_` guards the lists, who
// has left, and what has come for the progress thread: notices and suspicions. The control connections have a lock of
// their own.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control.hpp"
#include "cores.hpp"
#include "doorbell.hpp"
#include "engine_options.hpp"
#include "engine_state.hpp"
#include "executor.hpp"
#include "mailbox.hpp"
#include "pool.hpp"
#include "socket_threads.hpp"
#include "tcp.hpp"
#include "wait.hpp"

namespace multiring {

class Peers;

// Mailbox in which other engines of this process leave notices; it outlives the engine.
struct InprocMailbox {
    std::mutex mutex;
    Peers* owner = nullptr;
};

class Peers {
  public:
    using TakeBeat = std::function<void(int edge, std::span<const std::byte> statuses)>;
    // The pool outlives the transports.
    Peers(const EngineOptions& options, EngineState& state, std::shared_ptr<Arena> arena, Executor& executor,
          Cores& cores, Doorbell& doorbell, Pool& pool, TakeBeat take_beat);

    // These own the descriptors, also where they throw.
    void attach_local(int peer, int memory_fd, int doorbell_fd, int socket_fd);
    void attach_in_process(int peer, const Peers& other);
    // Records for each socket, or none.
    void attach_tcp(int peer, const std::vector<int>& sockets, std::vector<Records> records);
    void attach_control(int peer, int socket_fd, std::optional<Records> records);
    bool attached(int peer) const;
    bool departed(int peer) const;  // it has said farewell, and nothing of it is on its way

    // This engine fails, and all others hear of it.
    void fail(Failure failure);      // a mismatch in a moment
    void fail_now(Failure failure);  // and others have told of it
    // The same, of the rank's loss, unless a better reason comes within a moment.
    void suspect(int rank, const std::string& reason);
    void leave_notice(Notice notice);  // also from another engine of this process

    // Take in what has come on the data connections; true if there was anything.
    bool drain_sockets();
    std::vector<std::pair<int, Traffic>> traffic() const;

    bool has_departures() const { return someone_departed_.load(std::memory_order_acquire); }
    // Returns the ranks among `ranks` that have left, in their order.
    std::vector<int> departed_of(std::vector<int> ranks) const;
    std::vector<bool> departures() const;  // indexed by rank
    std::vector<const LocalTransport*> local_transports() const;
    void map_staging() const;  // that the ranks of this host have before any call
    std::vector<TcpTransport*> tcp_transports() const;
    std::vector<TcpTransport*> tcp_transports_of_those_here() const;
    std::vector<ConnectionCounts> connection_counts() const;  // what these have counted
    std::vector<int> edges() const { return control_.edges(); }
    void send_beat(int edge, std::span<const std::byte> statuses) { control_.send_beat(edge, statuses); }
    void send_complaint(const Notice& complaint);

    // The progress thread's.
    std::vector<Notice> take_notices();  // who says farewell in them has departed
    void pass_on_farewell(const Notice& farewell) { control_.pass_on_farewell(farewell.from, farewell.rank); }
    bool has_suspicions() const;
    bool has_due_suspicions() const;
    void fail_for_suspicions(Clock::time_point until);  // those that are due by then
    void tell_waiters();
    bool drain();  // true if anything came, or could not be looked at because a caller is at it
    bool flush();  // true if nothing is held back
    void watch_data(bool wanted);
    void poll(Clock::duration at_most);
    Clock::time_point last_poll() const { return last_poll_; }

    // The shutdown's, in this order.
    void say_farewell(Clock::time_point deadline);
    void linger(Clock::time_point until);
    void close_mailbox();
    void release();

    void lock_for_fork();
    void unlock_after_fork();
    void disown() noexcept;

  private:
    Control::Events control_events(TakeBeat take_beat);
    void check_peer(int peer) const;
    void fail_for_record(int peer, const std::string& connection, std::uint64_t number);
    void add_transport(std::unique_ptr<LocalTransport> transport);
    bool is_unread() const;
    void leave_in_process(const Notice& notice);

    const EngineOptions& options_;
    EngineState& state_;
    const std::shared_ptr<Arena> arena_;
    Executor& executor_;
    Cores& cores_;
    Doorbell& doorbell_;
    Pool& pool_;
    Descriptor data_epoll_;
    Control control_;
    SocketThreads socket_threads_;
    const std::shared_ptr<InprocMailbox> mailbox_;

    mutable std::mutex mutex_;  // everything down to the atomics
    std::vector<const LocalTransport*> local_transports_;
    std::vector<TcpTransport*> tcp_transports_;
    std::vector<std::shared_ptr<InprocMailbox>> in_process_peers_;
    std::vector<bool> departed_;   // which ranks have said farewell
    std::vector<bool> connected_;  // which ranks have data connections
    std::vector<Notice> notices_;
    std::vector<std::pair<Clock::time_point, Failure>> suspicions_;  // true unless there is another failure by then
    std::atomic<bool> someone_departed_{false};
    std::atomic<bool> has_sockets_{false};

    // the progress thread's own
    Clock::time_point last_poll_{};
    bool watches_data_ = false;
};

}  // namespace multiring
