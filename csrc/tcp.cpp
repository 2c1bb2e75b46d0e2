#include "tcp.hpp"

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "errors.hpp"

namespace multiring {
namespace {

constexpr std::size_t credit_worth_returning = static_cast<std::size_t>(eager_credit) / 4;
constexpr std::size_t buffer_bytes = std::size_t{32} << 10;
constexpr std::size_t longest_read = std::size_t{4} << 20;  // before other transports get their turn
constexpr std::size_t largest_payload = std::size_t{1} << 30;
constexpr std::size_t fewest_bytes_for_a_thread = std::size_t{64} << 10;  // fewer are sent before it has woken
constexpr std::size_t sealed_buffer_bytes = 4 * largest_record;           // that one system call may bring
constexpr std::size_t batch = 16;                                         // messages of one system call
constexpr auto longest_gap = std::chrono::milliseconds(20);               // between reads of what comes all the time
constexpr std::uint32_t eager_token = 1;                                  // marks a payload that used the credit

// The system has no memory to spare: nobody is lost for that, and a moment later there may be some.
constexpr auto pause_for_memory = std::chrono::milliseconds(1);
bool is_shortage(int error) {
    return error == ENOBUFS || error == ENOMEM;
}

// Seconds in which the kernel had bytes that the peer had not acknowledged. It counts in ticks of its own.
double seconds_unacknowledged(int socket) {
    tcp_info info{};
    socklen_t size = sizeof info;  // a kernel that knows less fills less
    return getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) == 0
               ? 1e-6 * static_cast<double>(info.tcpi_busy_time)
               : 0;
}

struct Acknowledgements {
    std::uint64_t bytes;  // acknowledged so far
    bool some_missing;    // something that was sent is not acknowledged; what the peer has no room for is not sent
};

std::optional<Acknowledgements> acknowledgements(int socket) {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};  // a unix socket
    return Acknowledgements{info.tcpi_bytes_acked, info.tcpi_unacked != 0};
}

}  // namespace

TcpTransport::Sealing::Sealing(Records records)
    : records(std::move(records)),
      outgoing(std::make_unique_for_overwrite<std::byte[]>(sealed_buffer_bytes)),
      incoming(std::make_unique_for_overwrite<std::byte[]>(sealed_buffer_bytes)) {}

// Besides the beginning of a header there may be the text of a record.
TcpTransport::Stream::Stream(TcpTransport& transport, std::size_t index, Descriptor socket,
                             std::unique_ptr<Sealing> sealing)
    : transport(transport),
      index(index),
      socket(std::move(socket)),
      sealing(std::move(sealing)),
      buffer(std::make_unique<std::byte[]>(this->sealing ? sizeof(Frame) + largest_text : buffer_bytes)) {}

TcpTransport::TcpTransport(int peer, std::vector<Descriptor> sockets, std::vector<Records> records,
                           std::uint16_t generation, Receiver& receiver, Pool& pool, SocketThreads& threads,
                           int data_epoll, int hangup_epoll, std::uint64_t hangup_key, StreamEvents events)
    : Transport(peer),
      receiver_(receiver),
      pool_(pool),
      threads_(threads),
      generation_(generation),
      data_epoll_(data_epoll),
      hangup_epoll_(hangup_epoll),
      events_(std::move(events)) {
    for (Descriptor& owned : sockets) {
        const int socket = owned.get();
        std::unique_ptr<Sealing> sealing;
        if (!records.empty()) sealing = std::make_unique<Sealing>(std::move(records[streams_.size()]));
        streams_.push_back(std::make_unique<Stream>(*this, streams_.size(), std::move(owned), std::move(sealing)));
        fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
        const int on = 1;
        setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // fails on a unix socket, which needs none
        epoll_event data{}, hangup{};
        data.events = EPOLLIN;
        data.data.u64 = static_cast<std::uint64_t>(peer);
        hangup.events = EPOLLRDHUP;
        hangup.data.u64 = hangup_key;
        if (epoll_ctl(data_epoll_, EPOLL_CTL_ADD, socket, &data) != 0 ||
            epoll_ctl(hangup_epoll_, EPOLL_CTL_ADD, socket, &hangup) != 0)
            throw_resource_error(system_message("cannot watch a connection to rank " + std::to_string(peer), errno));
    }
}

TcpTransport::~TcpTransport() {
    for (const auto& stream : streams_)
        if (stream->payload != nullptr) pool_.give_back(stream->payload, stream->frame.bytes);
}

void TcpTransport::disown() noexcept {
    last_unacknowledged_ = unacknowledged();
    for (const auto& stream : streams_) stream->socket.reset();
}

// ---- sending ------------------------------------------------------------------------------------------------------

void TcpTransport::post(const Frame& frame, const std::byte* payload) {
    if (frame.bytes != 0) {
        messages_sent_.fetch_add(1, std::memory_order_relaxed);
        bytes_sent_.fetch_add(frame.bytes, std::memory_order_relaxed);
        unanswered_.store(true, std::memory_order_relaxed);
    }
    enqueue(stream_of(frame), frame, payload, frame.token);
}

void TcpTransport::enqueue(Stream& stream, const Frame& frame, const std::byte* payload, std::uint32_t token) {
    const bool is_large = frame.bytes >= fewest_bytes_for_a_thread;
    if (is_large) settle(stream);
    SocketThread* const thread = stream.thread.load(std::memory_order_acquire);
    if (thread == nullptr) {
        const std::lock_guard lock(stream.send_mutex);
        const bool is_first = !stream.busy.load(std::memory_order_relaxed);
        if (push(stream, {frame, payload, token, 0}) && is_first) write(stream);
        return;
    }
    if (!push(stream, {frame, payload, token, 0})) return;
    if (!is_large) {
        const std::unique_lock lock(stream.send_mutex, std::try_to_lock);
        if (lock) return write(stream);
    }
    thread->ring();
}

bool TcpTransport::push(Stream& stream, Outgoing outgoing) {
    const std::lock_guard lock(stream.queue_mutex);
    if (abandoned_.load(std::memory_order_relaxed)) return false;
    if (stream.queue.empty()) stream.busy_since = Clock::now();
    stream.queue.push_back(std::move(outgoing));
    stream.busy.store(true, std::memory_order_relaxed);
    return true;
}

// A push meanwhile moves no message that is already in the queue.
void TcpTransport::write(Stream& stream) {
    if (stream.sealing) return write_records(stream);
    iovec parts[2 * batch];
    while (const std::size_t part_count = gather(stream, parts, batch)) {
        const ssize_t n = send(stream, parts, part_count);
        if (n < 0) return;
        account(stream, static_cast<std::size_t>(n));
    }
    watch_for_room(stream, false);
}

void TcpTransport::write_records(Stream& stream) {
    Sealing& sealing = *stream.sealing;
    iovec parts[2 * batch];
    for (;;) {
        if (sealing.sent == sealing.filled) {
            sealing.sent = sealing.filled = 0;
            while (sealed_buffer_bytes - sealing.filled >= largest_record) {
                const std::size_t part_count = gather(stream, parts, batch);
                if (part_count == 0) break;
                const auto sealed =
                    sealing.records.writer.seal({parts, part_count}, sealing.outgoing.get() + sealing.filled);
                sealing.filled += sealed.record;
                account(stream, sealed.text);
            }
            if (sealing.filled == 0) break;
        }
        const iovec rest{sealing.outgoing.get() + sealing.sent, sealing.filled - sealing.sent};
        const ssize_t n = send(stream, &rest, 1);
        if (n < 0) return;
        sealing.sent += static_cast<std::size_t>(n);
    }
    watch_for_room(stream, false);
}

ssize_t TcpTransport::send(Stream& stream, const iovec* parts, std::size_t part_count) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = part_count;
    ssize_t n;
    do n = sendmsg(stream.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n >= 0) return n;
    // On an error the receiving side finds the connection closed and says so.
    const bool is_short = is_shortage(errno);
    const bool is_full = errno == EAGAIN || errno == EWOULDBLOCK || is_short;
    if (is_short) std::this_thread::sleep_for(pause_for_memory);
    if (!is_full) stream.is_broken.store(true, std::memory_order_relaxed);
    watch_for_room(stream, is_full);
    return -1;
}

// The first messages of the queue, as far as they are not sent; 0 when there is none, and then the stream is not busy.
std::size_t TcpTransport::gather(Stream& stream, iovec* parts, std::size_t most) const {
    const std::lock_guard lock(stream.queue_mutex);
    std::size_t part_count = 0;
    for (std::size_t i = 0; i < std::min(most, stream.queue.size()); ++i) {
        Outgoing& out = stream.queue[i];
        if (out.sent < sizeof(Frame))
            parts[part_count++] = {reinterpret_cast<std::byte*>(&out.frame) + out.sent, sizeof(Frame) - out.sent};
        const std::size_t payload_sent = out.sent < sizeof(Frame) ? 0 : out.sent - sizeof(Frame);
        if (payload_sent < out.frame.bytes)
            parts[part_count++] = {const_cast<std::byte*>(out.payload) + payload_sent, out.frame.bytes - payload_sent};
    }
    const bool has_record = stream.sealing && stream.sealing->sent != stream.sealing->filled;
    if (part_count == 0 && !has_record) stream.busy.store(false, std::memory_order_relaxed);
    return part_count;
}

void TcpTransport::account(Stream& stream, std::size_t sent) {
    while (sent > 0) {
        std::uint32_t token;
        {
            const std::lock_guard lock(stream.queue_mutex);
            Outgoing& out = stream.queue.front();
            const std::size_t step = std::min(sent, sizeof(Frame) + out.frame.bytes - out.sent);
            out.sent += step;
            sent -= step;
            if (out.sent < sizeof(Frame) + out.frame.bytes) return;
            token = out.token;
            const bool was_data = out.frame.bytes != 0 && out.frame.type == FrameType::data;
            stream.queue.pop_front();
            if (stream.queue.empty())
                count_busy((Clock::now() - stream.busy_since) / static_cast<int>(streams_.size()));
            if (!was_data) continue;
        }
        receiver_.released(peer, token);
    }
}

void TcpTransport::watch_for_room(Stream& stream, bool wanted) {
    if (stream.wants_room.load(std::memory_order_relaxed) == wanted) return;
    if (const SocketThread* thread = stream.thread.load(std::memory_order_relaxed)) {
        stream.wants_room.store(wanted, std::memory_order_relaxed);
        thread->watch_for_room(stream.socket.get(), stream, wanted);
        if (!wanted && stream.busy.load(std::memory_order_relaxed))
            thread->ring();  // queued since; it looked too early
        return;
    }
    epoll_event event{};
    event.events = EPOLLIN | (wanted ? static_cast<std::uint32_t>(EPOLLOUT) : 0);
    event.data.u64 = static_cast<std::uint64_t>(peer);
    if (epoll_ctl(data_epoll_, EPOLL_CTL_MOD, stream.socket.get(), &event) == 0)
        stream.wants_room.store(wanted, std::memory_order_relaxed);
}

// The first that carries much goes to a thread, if there is one for it.
void TcpTransport::settle(Stream& stream) {
    if (stream.is_settled.load(std::memory_order_acquire)) return;
    SocketThread* const thread = threads_.of(stream.index);
    const std::lock_guard lock(stream.send_mutex);
    if (stream.is_settled.exchange(true, std::memory_order_acq_rel) || thread == nullptr) return;
    if (!thread->serve(stream.socket.get(), stream, stream.wants_room.load(std::memory_order_relaxed))) return;
    stream.thread.store(thread, std::memory_order_release);
    epoll_ctl(data_epoll_, EPOLL_CTL_DEL, stream.socket.get(), nullptr);
}

void TcpTransport::serve(Stream& stream) {
    // A stream that wants room and has nothing queued was abandoned.
    if (stream.busy.load(std::memory_order_relaxed) || stream.wants_room.load(std::memory_order_relaxed)) {
        const std::unique_lock lock(stream.send_mutex, std::try_to_lock);
        if (lock) write(stream);
    }
    const std::unique_lock lock(stream.receive_mutex, std::try_to_lock);
    if (!lock) return;
    read(stream);
    const SocketThread* const thread = stream.thread.load(std::memory_order_acquire);
    if (stream.closed && thread != nullptr)
        thread->forget(stream.socket.get());  // it may have closed before it was ours
}

bool TcpTransport::flush() {
    if (const std::uint64_t owed = owed_.exchange(0, std::memory_order_relaxed); owed != 0) {
        Frame frame;
        frame.type = FrameType::credit;
        frame.generation = generation_;
        frame.count = owed & most_elements;
        enqueue(*streams_.front(), frame, nullptr, 0);
    }
    bool clear = true;
    for (const auto& stream : streams_) {
        if (!stream->busy.load(std::memory_order_relaxed)) continue;
        if (stream->thread.load(std::memory_order_acquire) == nullptr) {
            const std::lock_guard lock(stream->send_mutex);
            write(*stream);
        }
        clear &= !stream->busy.load(std::memory_order_relaxed);
    }
    return clear;
}

void TcpTransport::send_farewell() {
    if (abandoned_.load(std::memory_order_relaxed)) return;  // it would follow half a message
    Frame frame;
    frame.type = FrameType::farewell;
    frame.generation = generation_;
    for (const auto& stream : streams_) {
        enqueue(*stream, frame, nullptr, 0);
        const std::lock_guard lock(stream->send_mutex);  // its thread may end before it comes to it
        write(*stream);
    }
}

void TcpTransport::abandon() {
    abandoned_.store(true, std::memory_order_relaxed);
    for (const auto& stream : streams_) {
        const std::lock_guard lock(stream->send_mutex);  // nothing is being sent
        const std::lock_guard queue_lock(stream->queue_mutex);
        if (!stream->queue.empty() && stream->queue.front().sent != 0 &&
            stream->queue.front().frame.type != FrameType::notice)
            stream->is_torn = true;
        std::erase_if(stream->queue,
                      [&](const Outgoing& out) { return stream->is_torn || out.frame.type != FrameType::notice; });
        const bool has_record = stream->sealing && stream->sealing->sent != stream->sealing->filled;
        stream->busy.store(!stream->queue.empty() || has_record, std::memory_order_relaxed);
    }
}

void TcpTransport::send_notice(const Notice& notice) {
    const auto text = std::make_shared<const std::string>(notice.text);
    const Frame frame = frame_of(notice, generation_);
    for (const auto& stream : streams_) {
        const std::lock_guard lock(stream->send_mutex);
        if (stream->is_torn) continue;
        {
            const std::lock_guard queue_lock(stream->queue_mutex);
            stream->queue.push_back({frame, reinterpret_cast<const std::byte*>(text->data()), 0, 0, text});
            stream->busy.store(true, std::memory_order_relaxed);
        }
        write(*stream);
        return;
    }
}

void TcpTransport::send_complaint(const Notice& notice) {
    enqueue(*streams_.front(), frame_of(notice, generation_), nullptr, 0);
}

// The kernel alone knows whether packets arrive: a peer that sends nothing may be waiting itself, or compute. It
// acknowledges for a process that is stopped, too.
double TcpTransport::look(float elapsed, bool is_waited_for) {
    double longest = 0;
    for (const auto& stream : streams_) {
        const auto found = acknowledgements(stream->socket.get());
        if (!found) continue;
        const bool is_stalled = found->some_missing && found->bytes == stream->acknowledged;
        stream->stalled = is_stalled ? stream->stalled + elapsed : 0;
        stream->acknowledged = found->bytes;
        longest = std::max(longest, stream->stalled);
        if (!is_waited_for || found->some_missing || stream->busy.load(std::memory_order_relaxed)) continue;
        Frame frame;
        frame.type = FrameType::beat;
        frame.generation = generation_;
        enqueue(*stream, frame, nullptr, 0);
    }
    return longest;
}

ConnectionCounts TcpTransport::connection_counts() const {
    ConnectionCounts counts{.peer = peer};
    for (const auto& stream : streams_) {
        tcp_info info{};
        socklen_t size = sizeof info;
        if (getsockopt(stream->socket.get(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;  // a unix socket
        counts.sent += info.tcpi_bytes_acked;
        counts.received += info.tcpi_bytes_received;
        // While a receiver that does not read leaves no room, nothing is wrong with the link.
        counts.busy += 1e-6 * static_cast<double>(info.tcpi_busy_time - info.tcpi_rwnd_limited) /
                       static_cast<double>(streams_.size());
        // Acknowledgements that are late, behind what the peer sends on a slow way back, keep little unsent.
        if (info.tcpi_notsent_bytes != 0)
            counts.held += std::uint64_t{info.tcpi_unacked} * info.tcpi_snd_mss + info.tcpi_notsent_bytes;
        counts.heard =
            std::max(counts.heard, 1e-9 * static_cast<double>(stream->heard.load(std::memory_order_relaxed)));
    }
    return counts;
}

TcpTransport::Backlog TcpTransport::held() const {
    Backlog held;
    for (const auto& stream : streams_) {
        int unsent = 0, unread = 0;  // a socket that is closed has none
        ioctl(stream->socket.get(), SIOCOUTQ, &unsent);
        ioctl(stream->socket.get(), SIOCINQ, &unread);
        held.unsent += static_cast<std::uint64_t>(unsent);
        held.unread += static_cast<std::uint64_t>(unread);
    }
    return held;
}

void TcpTransport::forget_looks() {
    for (const auto& stream : streams_) stream->stalled = 0;
}

// ---- receiving ----------------------------------------------------------------------------------------------------

bool TcpTransport::drain() {
    bool active = false;
    for (const auto& stream : streams_) {
        if (stream->thread.load(std::memory_order_acquire) != nullptr) continue;
        if (stream->busy.load(std::memory_order_relaxed)) {
            const std::unique_lock lock(stream->send_mutex, std::try_to_lock);
            if (lock) write(*stream);
        }
        const std::unique_lock lock(stream->receive_mutex, std::try_to_lock);
        active |= lock ? read(*stream) : true;
    }
    return active;
}

void TcpTransport::drain_all() {
    for (const auto& stream : streams_) {
        if (stream->busy.load(std::memory_order_relaxed)) {
            const std::lock_guard lock(stream->send_mutex);
            write(*stream);
        }
        const std::lock_guard lock(stream->receive_mutex);
        read(*stream);
    }
}

bool TcpTransport::read(Stream& stream) {
    std::size_t total = 0;
    while (!stream.closed && total < longest_read) {
        const std::size_t got = read_some(stream);
        if (got == 0) break;
        total += got;
        interpret(stream);
    }
    if (total == 0) return false;
    const auto now = Clock::now();
    if (now - stream.heard_at < longest_gap)
        stream.heard.fetch_add(static_cast<std::uint64_t>(std::chrono::nanoseconds(now - stream.heard_at).count()),
                               std::memory_order_relaxed);
    stream.heard_at = now;
    return true;
}

// One system call: the rest of the payload, straight to its place, and what follows it.
std::size_t TcpTransport::read_some(Stream& stream) {
    if (stream.sealing) return read_records(stream);
    iovec parts[2];
    int part_count = 0;
    std::size_t missing = 0;
    if (stream.payload != nullptr) {
        missing = stream.frame.bytes - stream.received;
        parts[part_count++] = {stream.payload + stream.received, missing};
    }
    parts[part_count++] = {stream.buffer.get() + stream.end, buffer_bytes - stream.end};
    const std::size_t got = receive(stream, parts, part_count);
    if (got != 0) take_in(stream, std::min(got, missing), got - std::min(got, missing));
    return got;
}

std::size_t TcpTransport::receive(Stream& stream, const iovec* parts, int part_count) {
    ssize_t n;
    do n = readv(stream.socket.get(), parts, part_count);
    while (n < 0 && errno == EINTR);
    if (n > 0) return static_cast<std::size_t>(n);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (n < 0 && is_shortage(errno)) {
        std::this_thread::sleep_for(pause_for_memory);
        return 0;
    }
    if (n == 0)
        lose(stream, "closed its connection");
    else
        lose(stream, errno);
    return 0;
}

void TcpTransport::take_in(Stream& stream, std::size_t of_payload, std::size_t after_it) {
    stream.received += of_payload;
    stream.end += after_it;
    if (stream.payload != nullptr && stream.received == stream.frame.bytes) finish_payload(stream);
}

// One system call, and all records that are whole then.
std::size_t TcpTransport::read_records(Stream& stream) {
    Sealing& sealing = *stream.sealing;
    const iovec room{sealing.incoming.get() + sealing.end, sealed_buffer_bytes - sealing.end};
    const std::size_t got = receive(stream, &room, 1);
    sealing.end += got;
    while (got != 0 && open_record(stream)) interpret(stream);
    if (sealing.begin == sealing.end) {
        sealing.begin = sealing.end = 0;
    } else if (sealed_buffer_bytes - sealing.begin < largest_record) {
        std::memmove(sealing.incoming.get(), sealing.incoming.get() + sealing.begin, sealing.end - sealing.begin);
        sealing.end -= std::exchange(sealing.begin, 0);
    }
    return got;
}

// The text goes straight to its place, but is used only once its tag has proved right.
bool TcpTransport::open_record(Stream& stream) {
    Sealing& sealing = *stream.sealing;
    const std::byte* record = sealing.incoming.get() + sealing.begin;
    if (stream.closed || sealing.end - sealing.begin < record_size_bytes) return false;
    const std::size_t text = RecordReader::text_size(record);
    if (text != 0 && sealing.end - sealing.begin < text + record_overhead) return false;
    const std::size_t missing = stream.payload != nullptr ? stream.frame.bytes - stream.received : 0;
    std::span<std::byte> first;
    if (missing != 0) first = {stream.payload + stream.received, missing};
    const std::uint64_t number = sealing.records.reader.number();
    if (text == 0 || !sealing.records.reader.open(record, first, stream.buffer.get() + stream.end)) {
        close(stream);
        if (!stream.farewell) events_.altered(peer, stream.index, number);
        return false;
    }
    sealing.begin += text + record_overhead;
    take_in(stream, std::min(text, missing), text - std::min(text, missing));
    return true;
}

void TcpTransport::interpret(Stream& stream) {
    while (!stream.closed && stream.payload == nullptr && stream.end - stream.begin >= sizeof(Frame)) {
        Frame frame;
        std::memcpy(static_cast<void*>(&frame), stream.buffer.get() + stream.begin, sizeof frame);
        stream.begin += sizeof frame;
        take_frame(stream, frame);
        if (stream.payload == nullptr) continue;
        const std::size_t here = std::min<std::size_t>(stream.end - stream.begin, frame.bytes);
        std::memcpy(stream.payload, stream.buffer.get() + stream.begin, here);
        stream.begin += here;
        stream.received = here;
        if (here == frame.bytes) finish_payload(stream);
    }
    // The remaining bytes are the beginning of a header.
    std::memmove(stream.buffer.get(), stream.buffer.get() + stream.begin, stream.end - stream.begin);
    stream.end -= stream.begin;
    stream.begin = 0;
}

void TcpTransport::take_frame(Stream& stream, const Frame& frame) {
    if (frame.generation != generation_ || frame.bytes > largest_payload) {
        receiver_.garbage(peer, "a header of generation " + std::to_string(frame.generation) + " and " +
                                    std::to_string(frame.bytes) + " bytes");
        lose(stream, "sent garbage");
        return;
    }
    switch (frame.type) {
        case FrameType::data:
            if (frame.bytes == 0) {
                receiver_.garbage(peer, "an empty message");
                lose(stream, "sent garbage");
                return;
            }
            if (frame.bytes >= fewest_bytes_for_a_thread) settle(stream);
            stream.frame = frame;
            stream.payload = pool_.take(frame.bytes);
            stream.received = 0;
            return;
        case FrameType::notice:
            if (is_notice(frame) && frame.bytes == 0 && frame.ordinal != 0) {
                events_.notice(notice_of(frame, {}, peer));
                return;
            }
            if (!is_notice(frame) || frame.bytes == 0) {
                receiver_.garbage(peer, "a notice of kind " + std::to_string(frame.token) + " and " +
                                            std::to_string(frame.bytes) + " bytes");
                lose(stream, "sent garbage");
                return;
            }
            stream.frame = frame;
            stream.payload = pool_.take(frame.bytes);
            stream.received = 0;
            return;
        case FrameType::grant:
        case FrameType::ask:
        case FrameType::waits: receiver_.deliver(*this, frame, {}); return;
        case FrameType::credit: return_credits(frame.count); return;
        case FrameType::beat: return;  // its acknowledgement was all that was wanted
        case FrameType::farewell:
            if (std::exchange(stream.farewell, true)) return;
            if (farewells_.fetch_add(1, std::memory_order_acq_rel) + 1 == streams_.size()) {
                unanswered_.store(false, std::memory_order_relaxed);
                events_.farewell(peer);
            }
            return;
        default:
            receiver_.garbage(peer, "a frame of type " + std::to_string(static_cast<int>(frame.type)));
            lose(stream, "sent garbage");
    }
}

void TcpTransport::finish_payload(Stream& stream) {
    if (stream.frame.type == FrameType::notice) {
        const std::byte* text = std::exchange(stream.payload, nullptr);
        events_.notice(notice_of(stream.frame, {text, stream.frame.bytes}, peer));
        pool_.give_back(text, stream.frame.bytes);
        return;
    }
    messages_received_.fetch_add(1, std::memory_order_relaxed);
    bytes_received_.fetch_add(stream.frame.bytes, std::memory_order_relaxed);
    unanswered_.store(false, std::memory_order_relaxed);
    const std::byte* payload = std::exchange(stream.payload, nullptr);
    receiver_.deliver(*this, stream.frame, {payload, static_cast<std::uint32_t>(stream.frame.argument)});
}

void TcpTransport::lose(Stream& stream, const std::string& reason) {
    if (stream.closed) return;
    close(stream);
    if (!stream.farewell) events_.lost(peer, reason);
}

void TcpTransport::lose(Stream& stream, int error) {
    if (error != ETIMEDOUT && error != EHOSTUNREACH && error != ENETUNREACH)
        return lose(stream, std::string("lost its connection (") + std::strerror(error) + ")");
    if (stream.closed) return;
    close(stream);
    if (!stream.farewell) events_.unreachable(peer);
}

void TcpTransport::close(Stream& stream) {
    stream.closed = true;
    if (const SocketThread* thread = stream.thread.load(std::memory_order_acquire)) thread->forget(stream.socket.get());
    epoll_ctl(data_epoll_, EPOLL_CTL_DEL, stream.socket.get(), nullptr);
    epoll_ctl(hangup_epoll_, EPOLL_CTL_DEL, stream.socket.get(), nullptr);
    unanswered_.store(false, std::memory_order_relaxed);
}

void TcpTransport::give_back(Payload payload, std::size_t bytes) {
    pool_.give_back(payload.data, bytes);
    if (payload.token != eager_token) return;
    const std::uint64_t owed = owed_.fetch_add(bytes + sizeof(Frame), std::memory_order_relaxed);
    if (owed + bytes >= credit_worth_returning) flush();
}

Traffic TcpTransport::traffic() const {
    Traffic traffic = timed({messages_sent_.load(), bytes_sent_.load(), messages_received_.load(),
                             bytes_received_.load(), static_cast<std::uint32_t>(streams_.size())});
    // Both, since the kernel's ticks are too long for what goes on within a machine.
    traffic.seconds_busy = std::max(traffic.seconds_busy, unacknowledged());
    return traffic;
}

double TcpTransport::unacknowledged() const {
    double sum = 0;
    for (const auto& stream : streams_) sum += seconds_unacknowledged(stream->socket.get());
    return std::max(last_unacknowledged_, sum / static_cast<double>(streams_.size()));
}

}  // namespace multiring
