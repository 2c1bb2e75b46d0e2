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

constexpr int patience_ms = 1000;  // wait for a peer's full socket buffer: a moment's pause must not lose a notice

std::vector<std::byte> encode(Frame frame, std::span<const std::byte> payload) {
    frame.bytes = static_cast<std::uint32_t>(payload.size());
    std::vector<std::byte> bytes(sizeof frame + payload.size());
    std::memcpy(bytes.data(), &frame, sizeof frame);
    if (!payload.empty()) std::memcpy(bytes.data() + sizeof frame, payload.data(), payload.size());
    return bytes;
}

Frame farewell_of(int rank, std::uint16_t generation) {
    Frame frame;
    frame.type = FrameType::farewell;
    frame.generation = generation;
    frame.root = static_cast<std::uint32_t>(rank);
    return frame;
}

}  // namespace

Control::Control(int epoll, std::uint16_t generation, Events events)
    : epoll_(epoll), generation_(generation), events_(std::move(events)) {}

Control::~Control() {
    close_all();
}

void Control::close_all() noexcept {
    const std::lock_guard lock(mutex_);
    for (Connection& connection : connections_) connection.socket.reset();
}

void Control::attach(int peer, Descriptor socket, bool is_edge, std::optional<Records> records) {
    fcntl(socket.get(), F_SETFL, fcntl(socket.get(), F_GETFL) | O_NONBLOCK);
    const std::lock_guard lock(mutex_);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = static_cast<std::uint64_t>(peer);
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, socket.get(), &event) != 0)
        throw_resource_error(
            system_message("cannot watch the control connection of rank " + std::to_string(peer), errno));
    connections_.push_back({peer, std::move(socket), is_edge, std::move(records), {}, {}, {}});
}

std::vector<int> Control::edges() const {
    const std::lock_guard lock(mutex_);
    std::vector<int> edges;
    for (const Connection& connection : connections_)
        if (connection.is_edge && connection.socket.is_open()) edges.push_back(connection.peer);
    return edges;
}

void Control::read(int peer) {
    Received received;
    std::string reason = "closed its connection";
    bool lost = false;
    std::optional<std::uint64_t> altered;
    {
        const std::lock_guard lock(mutex_);
        const auto found = std::find_if(connections_.begin(), connections_.end(),
                                        [&](const Connection& c) { return c.peer == peer && c.socket.is_open(); });
        if (found == connections_.end() || found->altered) return;
        receive(*found, reason);
        if (found->records) open_records(*found);
        // The socket stays, for the notice of it.
        if (found->altered && found->socket.is_open()) epoll_ctl(epoll_, EPOLL_CTL_DEL, found->socket.get(), nullptr);
        while (take_message(*found, received)) {
        }
        lost = !found->socket.is_open() && !found->farewell;
        if (!found->farewell) altered = found->altered;
    }
    for (const auto& statuses : received.beats) events_.beat(peer, statuses);
    for (const Notice& notice : received.notices) events_.notice(notice);
    for (const int rank : received.farewells) events_.farewell(rank, peer);
    if (altered)
        events_.altered(peer, *altered);
    else if (lost)
        events_.lost(peer, reason);
}

void Control::receive(Connection& connection, std::string& reason) {
    std::byte buffer[4096];
    for (;;) {
        const ssize_t n = recv(connection.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
        if (n > 0) {
            auto& arrived = connection.records ? connection.sealed : connection.received;
            arrived.insert(arrived.end(), buffer, buffer + n);
            continue;
        }
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (n < 0) reason = std::string("lost its connection (") + std::strerror(errno) + ")";
        drop(connection);
        return;
    }
}

// All records that are whole.
void Control::open_records(Connection& connection) {
    auto& sealed = connection.sealed;
    auto& received = connection.received;
    RecordReader& reader = connection.records->reader;
    std::size_t begin = 0;
    while (sealed.size() - begin >= record_size_bytes) {
        const std::size_t text = RecordReader::text_size(sealed.data() + begin);
        if (text != 0 && sealed.size() - begin < text + record_overhead) break;
        const std::uint64_t number = reader.number();
        const std::size_t before = received.size();
        received.resize(before + text);
        if (text == 0 || !reader.open(sealed.data() + begin, {}, received.data() + before)) {
            received.resize(before);
            connection.altered = number;
            break;
        }
        begin += text + record_overhead;
    }
    sealed.erase(sealed.begin(), sealed.begin() + static_cast<std::ptrdiff_t>(begin));
}

bool Control::take_message(Connection& connection, Received& into) {
    Frame frame;
    auto& received = connection.received;
    if (received.size() < sizeof frame) return false;
    std::memcpy(static_cast<void*>(&frame), received.data(), sizeof frame);
    const bool known =
        frame.type == FrameType::beat || frame.type == FrameType::notice || frame.type == FrameType::farewell;
    const bool is_sound = frame.type != FrameType::notice || is_notice(frame);
    if (!known || !is_sound || frame.generation != generation_ || frame.bytes > Notice::longest_text) {
        received.clear();
        if (connection.socket.is_open()) drop(connection);  // not our protocol: as good as lost
        return false;
    }
    if (received.size() < sizeof frame + frame.bytes) return false;
    const auto payload_begin = received.begin() + sizeof frame;
    const auto payload_end = payload_begin + static_cast<std::ptrdiff_t>(frame.bytes);
    if (frame.type == FrameType::farewell) {
        const int rank = static_cast<int>(frame.root);
        if (rank == connection.peer) connection.farewell = true;
        into.farewells.push_back(rank);
    } else if (frame.type == FrameType::beat) {
        into.beats.emplace_back(payload_begin, payload_end);
    } else {
        into.notices.push_back(notice_of(frame, {payload_begin, payload_end}, connection.peer));
    }
    received.erase(received.begin(), payload_end);
    return true;
}

void Control::drop(Connection& connection) {
    epoll_ctl(epoll_, EPOLL_CTL_DEL, connection.socket.get(), nullptr);
    connection.socket.reset();
}

void Control::send(const Notice& notice) {
    const auto bytes = encode(frame_of(notice, generation_), std::as_bytes(std::span(notice.text)));
    const std::lock_guard lock(mutex_);
    for (Connection& connection : connections_)
        if (connection.peer != notice.from) send_to(connection, bytes);
}

void Control::send_farewell(int own) {
    const auto bytes = encode(farewell_of(own, generation_), {});
    const std::lock_guard lock(mutex_);
    left_.insert(own);
    for (Connection& connection : connections_) send_to(connection, bytes);
}

// The ranks of a host hear each other directly. Data connections lead to other hosts, as edges do.
void Control::pass_on_farewell(int from, int rank) {
    const auto bytes = encode(farewell_of(rank, generation_), {});
    const std::lock_guard lock(mutex_);
    if (!left_.insert(rank).second) return;
    const bool from_host = std::any_of(connections_.begin(), connections_.end(),
                                       [&](const Connection& c) { return c.peer == from && !c.is_edge; });
    for (Connection& connection : connections_)
        if (connection.peer != from && (connection.is_edge || !from_host)) send_to(connection, bytes);
}

void Control::send_beat(int edge, std::span<const std::byte> statuses) {
    const std::lock_guard lock(mutex_);
    for (Connection& connection : connections_) {
        if (connection.peer != edge || !connection.is_edge || !connection.socket.is_open()) continue;
        if (!connection.unsent.empty() && !send_some(connection)) return;
        Frame frame;
        frame.type = FrameType::beat;
        frame.generation = generation_;
        queue(connection, encode(frame, statuses));
        send_some(connection);
    }
}

void Control::queue(Connection& connection, const std::vector<std::byte>& bytes) {
    auto& unsent = connection.unsent;
    if (!connection.records) {
        unsent.insert(unsent.end(), bytes.begin(), bytes.end());
        return;
    }
    for (std::size_t begin = 0; begin < bytes.size();) {
        const iovec rest{const_cast<std::byte*>(bytes.data()) + begin, bytes.size() - begin};
        const std::size_t before = unsent.size();
        unsent.resize(before + largest_record);
        const auto sealed = connection.records->writer.seal({&rest, 1}, unsent.data() + before);
        unsent.resize(before + sealed.record);
        begin += sealed.text;
    }
}

// True if nothing is left to send.
bool Control::send_some(Connection& connection) {
    auto& unsent = connection.unsent;
    const ssize_t n = ::send(connection.socket.get(), unsent.data(), unsent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) unsent.erase(unsent.begin(), unsent.begin() + n);
    return unsent.empty();
}

void Control::send_to(Connection& connection, const std::vector<std::byte>& bytes) {
    queue(connection, bytes);  // the rest of a beat goes first
    auto& unsent = connection.unsent;
    while (connection.socket.is_open() && !unsent.empty()) {
        const ssize_t n = ::send(connection.socket.get(), unsent.data(), unsent.size(), MSG_NOSIGNAL);
        if (n >= 0) {
            unsent.erase(unsent.begin(), unsent.begin() + n);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            pollfd writable{connection.socket.get(), POLLOUT, 0};
            if (poll(&writable, 1, patience_ms) == 0) return;  // it does not read: it will see the socket close
        } else if (errno != EINTR) {
            return;  // it is gone; its end of the connection tells us so
        }
    }
}

}  // namespace multiring
