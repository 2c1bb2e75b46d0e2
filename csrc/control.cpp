#include "control.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "frame.hpp"

namespace multiring {
namespace {

constexpr std::uint32_t longest_text = 1 << 16;
constexpr int patience_ms = 1000;  // for a peer's full socket buffer: a notice must not be lost to a moment's pause

std::vector<std::byte> encode(const Frame& frame, const std::string& text) {
    std::vector<std::byte> bytes(sizeof frame + text.size());
    std::memcpy(bytes.data(), &frame, sizeof frame);
    std::memcpy(bytes.data() + sizeof frame, text.data(), text.size());
    return bytes;
}

}  // namespace

Control::Control(int epoll, std::uint16_t generation, Events events)
    : epoll_(epoll), generation_(generation), events_(std::move(events)) {}

Control::~Control() {
    close_all();
}

void Control::close_all() noexcept {
    const std::lock_guard lock(mutex_);
    for (Connection& connection : connections_)
        if (connection.socket >= 0) close(std::exchange(connection.socket, -1));
}

void Control::attach(int peer, int socket) {
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    const std::lock_guard lock(mutex_);
    connections_.push_back({peer, socket, {}, false});
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = static_cast<std::uint64_t>(peer);
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, socket, &event) != 0)
        throw_resource_error(
            system_message("cannot watch the control connection of rank " + std::to_string(peer), errno));
}

void Control::read(int peer) {
    std::vector<Notice> notices;
    std::string reason = "closed its connection";
    bool left = false, lost = false;
    {
        const std::lock_guard lock(mutex_);
        const auto found = std::find_if(connections_.begin(), connections_.end(),
                                        [&](const Connection& c) { return c.peer == peer && c.socket >= 0; });
        if (found == connections_.end()) return;
        receive(*found, reason);
        while (take_message(*found, notices)) {
        }
        left = found->farewell;
        lost = found->socket < 0 && !left;
    }
    for (const Notice& notice : notices) events_.notice(notice);
    if (left) events_.farewell(peer);
    if (lost) events_.lost(peer, reason);
}

void Control::receive(Connection& connection, std::string& reason) {
    std::byte buffer[4096];
    for (;;) {
        const ssize_t n = recv(connection.socket, buffer, sizeof buffer, MSG_DONTWAIT);
        if (n > 0) {
            connection.received.insert(connection.received.end(), buffer, buffer + n);
            continue;
        }
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (n < 0) reason = std::string("lost its connection (") + std::strerror(errno) + ")";
        drop(connection);
        return;
    }
}

bool Control::take_message(Connection& connection, std::vector<Notice>& notices) {
    Frame frame;
    auto& received = connection.received;
    if (received.size() < sizeof frame) return false;
    std::memcpy(static_cast<void*>(&frame), received.data(), sizeof frame);
    const bool known = frame.type == FrameType::notice || frame.type == FrameType::farewell;
    if (!known || frame.generation != generation_ || frame.bytes > longest_text) {
        received.clear();
        if (connection.socket >= 0) drop(connection);  // not our protocol: as good as lost
        return false;
    }
    if (received.size() < sizeof frame + frame.bytes) return false;
    const std::string text(reinterpret_cast<const char*>(received.data()) + sizeof frame, frame.bytes);
    received.erase(received.begin(), received.begin() + static_cast<std::ptrdiff_t>(sizeof frame + frame.bytes));
    if (frame.type == FrameType::farewell)
        connection.farewell = true;
    else
        notices.push_back({connection.peer, static_cast<ErrorKind>(frame.token), static_cast<int>(frame.root), text});
    return true;
}

void Control::drop(Connection& connection) {
    epoll_ctl(epoll_, EPOLL_CTL_DEL, connection.socket, nullptr);
    close(std::exchange(connection.socket, -1));
}

void Control::send(const Notice& notice) {
    Frame frame;
    frame.type = FrameType::notice;
    frame.generation = generation_;
    frame.token = static_cast<std::uint32_t>(notice.kind);
    frame.root = static_cast<std::uint32_t>(notice.rank);
    const std::string text = notice.text.substr(0, longest_text);
    frame.bytes = static_cast<std::uint32_t>(text.size());
    const auto bytes = encode(frame, text);
    const std::lock_guard lock(mutex_);
    for (Connection& connection : connections_)
        if (connection.peer != notice.from) send_to(connection, bytes);
}

void Control::send_farewell() {
    Frame frame;
    frame.type = FrameType::farewell;
    frame.generation = generation_;
    const auto bytes = encode(frame, "");
    const std::lock_guard lock(mutex_);
    for (Connection& connection : connections_) send_to(connection, bytes);
}

void Control::send_to(Connection& connection, const std::vector<std::byte>& bytes) {
    std::size_t sent = 0;
    while (connection.socket >= 0 && sent < bytes.size()) {
        const ssize_t n = ::send(connection.socket, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
        if (n >= 0) {
            sent += static_cast<std::size_t>(n);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            pollfd writable{connection.socket, POLLOUT, 0};
            if (poll(&writable, 1, patience_ms) == 0) return;  // it does not read: it will see the socket close
        } else if (errno != EINTR) {
            return;  // it is gone; its end of the connection tells us so
        }
    }
}

}  // namespace multiring
