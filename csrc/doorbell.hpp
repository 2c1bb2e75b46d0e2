// Doorbell: what a thread of the engine sleeps on, and what wakes it.
//
// It owns two descriptors: the bell, which other threads write, and for the progress thread's peers, too; and the epoll
// that the thread polls, which watches the bell. There is no lock: the two flags are atomic, and the descriptors stay
// until `close`, after the thread has ended.
#pragma once

#include <atomic>
#include <cstdint>

#include "descriptor.hpp"

namespace multiring {

class Doorbell {
  public:
    Doorbell();

    static constexpr std::uint64_t key = ~std::uint64_t{0};  // the epoll tells of the bell under it
    int descriptor() const { return bell_.get(); }
    int epoll() const { return epoll_.get(); }

    // Under the lock that guards it: there is something new for the thread. Then ring.
    void announce() { news_.store(true, std::memory_order_release); }
    void ring() const;  // if the thread sleeps

    // The thread's own.
    bool has_news() const { return news_.load(std::memory_order_acquire); }
    void forget_news() { news_.exchange(false, std::memory_order_acq_rel); }  // before it is taken
    // After the fence that follows, who rings sees that the thread sleeps, or it sees what was done before.
    void set_asleep(bool asleep) { asleep_.store(asleep, std::memory_order_relaxed); }
    void take_rings() const;

    void close() noexcept;

  private:
    Descriptor bell_, epoll_;
    std::atomic<bool> asleep_{false};
    std::atomic<bool> news_{false};
};

}  // namespace multiring
