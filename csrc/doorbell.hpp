// Doorbell: what the progress thread sleeps on, and what wakes it.
//
// It owns three descriptors: the bell, which peers and other threads write; the epoll that the progress thread polls;
// and the epoll of the data connections, which is part of it while the progress thread has work. There is no lock: the
// two flags are atomic, and the descriptors stay until `close`, after the progress thread has ended.
#pragma once

#include <atomic>
#include <cstdint>

#include "descriptor.hpp"

namespace multiring {

// What the progress thread's epoll tells of, and whose it is.
enum class Watched : std::uint64_t { control, doorbell, data, hangup };
inline std::uint64_t key_of(Watched what, int peer) {
    return static_cast<std::uint64_t>(what) << 32 | static_cast<std::uint32_t>(peer);
}

class Doorbell {
  public:
    Doorbell();

    int descriptor() const { return bell_.get(); }
    int epoll() const { return epoll_.get(); }
    int data_epoll() const { return data_epoll_.get(); }

    // Under the lock that guards it: there is something new for the progress thread. Then ring.
    void announce() { news_.store(true, std::memory_order_release); }
    void ring() const;  // if the progress thread sleeps

    // The progress thread's.
    bool has_news() const { return news_.load(std::memory_order_acquire); }
    void forget_news() { news_.exchange(false, std::memory_order_acq_rel); }  // before it is taken
    void set_asleep(bool asleep) { asleep_.store(asleep, std::memory_order_relaxed); }
    void take_rings() const;

    void close() noexcept;

  private:
    Descriptor bell_, epoll_, data_epoll_;
    std::atomic<bool> asleep_{false};
    std::atomic<bool> news_{false};
};

}  // namespace multiring
