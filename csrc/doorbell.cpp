#include "doorbell.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "errors.hpp"

namespace multiring {

Doorbell::Doorbell()
    : bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      data_epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (!bell_.is_open() || !epoll_.is_open() || !data_epoll_.is_open())
        throw_resource_error(system_message("cannot create a descriptor to sleep on", errno));
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = key_of(Watched::doorbell, 0);
    epoll_ctl(epoll(), EPOLL_CTL_ADD, descriptor(), &event);
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
    for (Descriptor* each : {&bell_, &epoll_, &data_epoll_}) each->reset();
}

}  // namespace multiring
