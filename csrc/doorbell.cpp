#include "doorbell.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "errors.hpp"

namespace multiring {

Doorbell::Doorbell() : bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = key;
    if (!bell_.is_open() || !epoll_.is_open() || epoll_ctl(epoll(), EPOLL_CTL_ADD, descriptor(), &event) != 0)
        throw_resource_error(system_message("cannot create a descriptor to sleep on", errno));
}

void Doorbell::ring() const {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!asleep_.load(std::memory_order_relaxed)) return;
    const std::uint64_t one = 1;
    // A full counter (EAGAIN) wakes it as well.
    [[maybe_unused]] const auto written = write(descriptor(), &one, sizeof one);
}

void Doorbell::take_rings() const {
    std::uint64_t rings;
    [[maybe_unused]] const auto taken = read(descriptor(), &rings, sizeof rings);
}

void Doorbell::close() noexcept {
    bell_.reset();
    epoll_.reset();
}

}  // namespace multiring
