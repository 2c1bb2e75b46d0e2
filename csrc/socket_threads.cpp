#include "socket_threads.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "errors.hpp"
#include "wait.hpp"

namespace multiring {
namespace {

// Segments come some microseconds apart; to wake a thread takes as long as to move a small one.
constexpr auto longest_spin = std::chrono::microseconds(100);
// Beside the caller and the progress thread. More were not measured.
constexpr double busy_threads = 2, most_threads = 3;

std::uint32_t events_for(bool wants_room) {
    return EPOLLIN | (wants_room ? static_cast<std::uint32_t>(EPOLLOUT) : 0);
}

}  // namespace

SocketThread::SocketThread() : bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = nullptr;
    if (!bell_.is_open() || !epoll_.is_open() || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_.get(), &event) != 0)
        throw_resource_error(system_message("cannot create a descriptor to sleep on", errno));
    thread_ = std::thread([this] { run(); });
}

SocketThread::~SocketThread() {
    end();
}

void SocketThread::end() {
    ends_.store(true, std::memory_order_release);
    ring();
    if (thread_.joinable()) thread_.join();
}

bool SocketThread::serve(int socket, Served& stream, bool wants_room) {
    epoll_event event{};
    event.events = events_for(wants_room);
    event.data.ptr = &stream;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event) != 0) return false;
    {
        const std::lock_guard lock(mutex_);
        added_.push_back(&stream);
        has_added_.store(true, std::memory_order_release);
    }
    ring();
    return true;
}

void SocketThread::watch_for_room(int socket, Served& stream, bool wanted) const {
    epoll_event event{};
    event.events = events_for(wanted);
    event.data.ptr = &stream;
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, socket, &event);  // fails where the stream is closed
}

void SocketThread::forget(int socket) const {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket, nullptr);
}

void SocketThread::ring() const {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!asleep_.load(std::memory_order_relaxed)) return;
    const std::uint64_t one = 1;
    // A full counter (EAGAIN) wakes it as well.
    [[maybe_unused]] const auto written = write(bell_.get(), &one, sizeof one);
}

void SocketThread::run() {
    auto idle_since = Clock::now();
    while (!ends_.load(std::memory_order_acquire)) {
        take_added();
        bool active = write_queued();
        active |= take_events(0);
        if (active) {
            idle_since = Clock::now();
            continue;
        }
        if (Clock::now() - idle_since < longest_spin) {
            for (int i = 0; i < 16; ++i) pause();
            continue;
        }
        asleep_.store(true, std::memory_order_relaxed);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);  // who rings sees that we sleep, or we see what was done before
        const bool is_awake = ends_.load(std::memory_order_acquire) || has_added_.load(std::memory_order_acquire) ||
                              std::any_of(streams_.begin(), streams_.end(), [](Served* s) { return s->has_queued(); });
        if (!is_awake) take_events(-1);
        asleep_.store(false, std::memory_order_relaxed);
        idle_since = Clock::now();
    }
}

bool SocketThread::take_events(int milliseconds) {
    epoll_event events[64];
    const int count = epoll_wait(epoll_.get(), events, 64, milliseconds);
    for (int i = 0; i < count; ++i) {
        if (events[i].data.ptr != nullptr) {
            static_cast<Served*>(events[i].data.ptr)->serve();
            continue;
        }
        std::uint64_t rings;
        [[maybe_unused]] const auto taken = read(bell_.get(), &rings, sizeof rings);
    }
    return count > 0;
}

bool SocketThread::write_queued() {
    bool any = false;
    for (Served* stream : streams_) {
        if (!stream->has_queued()) continue;
        stream->serve();
        any = true;
    }
    return any;
}

void SocketThread::take_added() {
    if (!has_added_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    streams_.insert(streams_.end(), added_.begin(), added_.end());
    added_.clear();
    has_added_.store(false, std::memory_order_relaxed);
}

SocketThread* SocketThreads::of(std::size_t stream) {
    if (stream == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    if (!made_) make();
    return threads_.empty() ? nullptr : threads_[(stream - 1) % threads_.size()].get();
}

void SocketThreads::make() {
    made_ = true;
    const double left = std::clamp(cores_.of_a_rank() - busy_threads, 0.0, most_threads);
    const std::size_t count = options_.socket_threads.value_or(static_cast<std::size_t>(left));
    try {
        for (std::size_t i = 0; i < count; ++i) threads_.push_back(std::make_unique<SocketThread>());
    } catch (const std::runtime_error&) {  // as many as the system has room for; calls are served without, too
    }
}

void SocketThreads::stop() {
    std::vector<std::unique_ptr<SocketThread>> ending;  // outside the lock, for which one of them may wait
    {
        const std::lock_guard lock(mutex_);
        made_ = true;
        ending.swap(threads_);
    }
    for (const auto& thread : ending) thread->end();  // all, before any goes: one may ring another
}

}  // namespace multiring
