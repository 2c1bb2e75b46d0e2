#include "socket_threads.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <stdexcept>

#include "wait.hpp"

namespace multiring {
namespace {

// Longer than the gap between segments, so that no thread sleeps in it. Measured:
// benchmarks/results/2026-11-28-constants.md, Engine.
constexpr auto longest_spin = std::chrono::microseconds(100);
constexpr double busy_threads = 2;  // the caller and the progress thread
constexpr double most_threads = most_streams - 1;

std::uint32_t events_for(bool wants_room) {
    return EPOLLIN | (wants_room ? static_cast<std::uint32_t>(EPOLLOUT) : 0);
}

}  // namespace

SocketThread::SocketThread() {
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
    if (epoll_ctl(doorbell_.epoll(), EPOLL_CTL_ADD, socket, &event) != 0) return false;
    {
        const std::lock_guard lock(mutex_);
        added_.push_back(&stream);
        doorbell_.announce();
    }
    ring();
    return true;
}

void SocketThread::watch_for_room(int socket, Served& stream, bool wanted) const {
    epoll_event event{};
    event.events = events_for(wanted);
    event.data.ptr = &stream;
    epoll_ctl(doorbell_.epoll(), EPOLL_CTL_MOD, socket, &event);  // fails where the stream is closed
}

void SocketThread::forget(int socket) const {
    epoll_ctl(doorbell_.epoll(), EPOLL_CTL_DEL, socket, nullptr);
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
        doorbell_.set_asleep(true);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        const bool is_awake = ends_.load(std::memory_order_acquire) || doorbell_.has_news() ||
                              std::any_of(streams_.begin(), streams_.end(), [](Served* s) { return s->has_queued(); });
        if (!is_awake) take_events(-1);
        doorbell_.set_asleep(false);
        idle_since = Clock::now();
    }
}

bool SocketThread::take_events(int milliseconds) {
    epoll_event events[64];
    const int count = epoll_wait(doorbell_.epoll(), events, 64, milliseconds);
    for (int i = 0; i < count; ++i) {
        if (events[i].data.u64 == Doorbell::key)
            doorbell_.take_rings();
        else
            static_cast<Served*>(events[i].data.ptr)->serve();
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
    if (!doorbell_.has_news()) return;
    doorbell_.forget_news();
    const std::lock_guard lock(mutex_);
    streams_.insert(streams_.end(), added_.begin(), added_.end());
    added_.clear();
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

void SocketThreads::disown() noexcept {
    for (const auto& thread : threads_) thread->disown();
}

}  // namespace multiring
