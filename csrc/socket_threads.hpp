// SocketThreads: threads beside the progress thread that read and write streams of TCP transports. One thread moves
// less through sockets than a fast network does or a core sums (benchmarks/results/2026-11-28-constants.md, Engine). A
// transport's first stream stays with the thread that drives the call; the others go to these threads when they first
// carry much.
//
// A thread sleeps on an epoll of its own. What it delivers wakes the progress thread as any delivery does. A stream's
// locks are those of its transport; `mutex_` guards what was added since the thread last looked, and no other lock is
// taken under it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cores.hpp"
#include "doorbell.hpp"
#include "engine_options.hpp"

namespace multiring {

// Most streams between two ranks; more were not measured. The first has no thread of its own.
constexpr int most_streams = 4;

// A stream that one of the threads serves.
class Served {
  public:
    // Write what is queued, read what has come.
    virtual void serve() = 0;
    // True if something is queued that the socket has not refused.
    virtual bool has_queued() const = 0;

  protected:
    ~Served() = default;
};

class SocketThread {
  public:
    SocketThread();
    ~SocketThread();
    SocketThread(const SocketThread&) = delete;
    SocketThread& operator=(const SocketThread&) = delete;

    // It serves the stream from now on, until `forget`; false if the system cannot watch the socket.
    bool serve(int socket, Served& stream, bool wants_room);
    void watch_for_room(int socket, Served& stream, bool wanted) const;
    void forget(int socket) const;
    void ring() const { doorbell_.ring(); }  // something was queued
    void end();                              // when this returns it serves nothing any more
    void disown() noexcept { doorbell_.close(); }

  private:
    void run();
    bool take_events(int milliseconds);  // true if there were any
    bool write_queued();
    void take_added();

    Doorbell doorbell_;
    std::atomic<bool> ends_{false};
    std::mutex mutex_;
    std::vector<Served*> added_;
    std::vector<Served*> streams_;  // the thread's own
    std::thread thread_;
};

class SocketThreads {
  public:
    SocketThreads(const EngineOptions& options, const Cores& cores) : options_(options), cores_(cores) {}

    // The thread of a transport's stream of that index; nullptr if the thread that drives the call serves it. The
    // threads are made when one is first asked for: by then it is known who shares this host's cores.
    SocketThread* of(std::size_t stream);
    void stop();  // before the transports go

    void lock_for_fork() { mutex_.lock(); }
    void unlock_after_fork() { mutex_.unlock(); }
    void disown() noexcept;  // in a forked child, which has none of the threads

  private:
    void make();

    const EngineOptions& options_;
    const Cores& cores_;
    std::mutex mutex_;
    bool made_ = false;
    std::vector<std::unique_ptr<SocketThread>> threads_;
};

}  // namespace multiring
