// TCP: a rank of another host, over one or several connections.
//
// A frame is the header of its payload. Payloads are sent straight from the caller's buffer and received into the pool.
// The receiver never stops reading, because what may come is bounded before it is sent:
//
//   credit   a standing allowance for small operations, so that they wait for nobody. It is returned as their
//            messages are consumed.
//   grant    the receiver has started an operation and takes its segments up to this one. Large operations wait for
//            it, and so do small ones when the credit is used up: then the sender asks.
//
// A granted message is always consumed, so no order of arrival can deadlock.
//
// Records (records.hpp) carry all of this where the job encrypts or sums. Either is the copy out of the caller's
// buffer, decrypting the copy into the pool.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "descriptor.hpp"
#include "notice.hpp"
#include "pool.hpp"
#include "records.hpp"
#include "socket_threads.hpp"
#include "transport.hpp"

namespace multiring {

class TcpTransport final : public Transport {
  public:
    struct StreamEvents {
        std::function<void(int peer)> farewell;
        std::function<void(int peer, const std::string& reason)> lost;
        std::function<void(const Notice& notice)> notice;
        std::function<void(int peer)> unreachable;  // the kernel has given up the connection
        // A record that came is not what the peer sent.
        std::function<void(int peer, std::size_t stream, std::uint64_t record)> altered;
    };
    // `data_epoll` watches the sockets for data and for room, `hangup_epoll` for their end, under `hangup_key`. There
    // are records for each socket, or none.
    TcpTransport(int peer, std::vector<Descriptor> sockets, std::vector<Records> records, std::uint16_t generation,
                 Receiver& receiver, Pool& pool, SocketThreads& threads, int data_epoll, int hangup_epoll,
                 std::uint64_t hangup_key, StreamEvents events);
    ~TcpTransport() override;

    bool shares_memory() const override { return false; }
    void post(const Frame& frame, const std::byte* payload) override;
    bool drain() override;
    void drain_all() override;
    void give_back(Payload payload, std::size_t bytes) override;
    bool flush() override;
    void abandon() override;
    void disown() noexcept override;
    bool may_be_unread() const override { return unanswered_.load(std::memory_order_relaxed); }
    Traffic traffic() const override;

    void send_farewell();
    // Queues a notice without its text, last.
    void send_complaint(const Notice& notice);
    // A look of the progress thread, `elapsed` seconds after the one before: for how long the peer's machine has
    // acknowledged nothing of what ours has sent. If the peer is waited for, something is sent.
    double look(float elapsed, bool is_waited_for);
    void forget_looks();  // nobody looked for a while
    ConnectionCounts connection_counts() const;
    struct Backlog {
        std::uint64_t unsent = 0, unread = 0;  // bytes
    };
    Backlog held() const;  // what the kernel has, of ours and of the peer's
    // Nothing but the rest of what is queued goes before it; a stream that was left in mid-message cannot carry it.
    void send_notice(const Notice& notice);

  private:
    struct Outgoing {
        Frame frame;
        const std::byte* payload;
        std::uint32_t token;
        std::size_t sent;                           // bytes of header and payload together
        std::shared_ptr<const std::string> text{};  // a notice's text, into which the payload points
    };
    // The part of a stream that carries records: both directions', then the sender's buffer, then the receiver's.
    struct Sealing {
        explicit Sealing(Records records);

        Records records;
        std::unique_ptr<std::byte[]> outgoing;  // bytes [sent, filled) of a record are still to be sent
        std::size_t sent = 0, filled = 0;
        std::unique_ptr<std::byte[]> incoming;  // bytes [begin, end) are not decrypted yet
        std::size_t begin = 0, end = 0;
    };
    struct Stream final : Served {
        Stream(TcpTransport& transport, std::size_t index, Descriptor socket, std::unique_ptr<Sealing> sealing);
        void serve() override { transport.serve(*this); }
        bool has_queued() const override {
            return busy.load(std::memory_order_relaxed) && !wants_room.load(std::memory_order_relaxed) &&
                   !is_broken.load(std::memory_order_relaxed);
        }

        TcpTransport& transport;
        const std::size_t index;
        std::atomic<SocketThread*> thread{nullptr};  // that serves it; nullptr: whoever drains the transport
        std::atomic<bool> is_settled{false};         // whether one does, once and for all
        Descriptor socket;
        const std::unique_ptr<Sealing> sealing;  // nullptr: in clear
        // sending
        std::mutex send_mutex;                // the socket's way out
        std::mutex queue_mutex;               // the next three; under it no other lock is taken
        std::deque<Outgoing> queue;           // only who has `send_mutex` takes from it
        Clock::time_point busy_since{};       // from when the queue has had something
        std::atomic<bool> busy{false};        // the queue has something, or a record is still to be sent
        bool is_torn = false;                 // abandoned in the middle of a message
        std::atomic<bool> wants_room{false};  // epoll tells when there is room again
        std::atomic<bool> is_broken{false};   // the socket takes nothing any more
        // receiving
        std::mutex receive_mutex;
        std::unique_ptr<std::byte[]> buffer;  // bytes [begin, end) are not interpreted yet
        std::size_t begin = 0, end = 0;
        Frame frame;                   // header of the payload that is coming in
        std::byte* payload = nullptr;  // where it goes, nullptr between messages
        std::size_t received = 0;
        Clock::time_point heard_at{};         // when something last came
        std::atomic<std::uint64_t> heard{0};  // nanoseconds in which something came, without gaps
        bool farewell = false, closed = false;
        // looking
        std::uint64_t acknowledged = 0;  // bytes, at the last look
        double stalled = 0;              // seconds since that rose, in looks that found something unacknowledged
    };

    void enqueue(Stream& stream, const Frame& frame, const std::byte* payload, std::uint32_t token);
    bool push(Stream& stream, Outgoing outgoing);                              // false if nothing is sent any more
    void write(Stream& stream);                                                // as much as the socket takes
    ssize_t send(Stream& stream, const iovec* parts, std::size_t part_count);  // -1 after it has seen to the error
    void write_records(Stream& stream);
    std::size_t gather(Stream& stream, iovec* parts, std::size_t most) const;
    void account(Stream& stream, std::size_t sent);
    void serve(Stream& stream);
    void settle(Stream& stream);  // who serves it
    void watch_for_room(Stream& stream, bool wanted);
    bool read(Stream& stream);
    std::size_t read_some(Stream& stream);
    std::size_t read_records(Stream& stream);
    std::size_t receive(Stream& stream, const iovec* parts, int part_count);  // 0 if nothing has come, or all is over
    bool open_record(Stream& stream);                                         // a record; false if there is no more
    void take_in(Stream& stream, std::size_t of_payload, std::size_t after_it);
    void interpret(Stream& stream);
    void take_frame(Stream& stream, const Frame& frame);
    void finish_payload(Stream& stream);
    void lose(Stream& stream, const std::string& reason);
    void lose(Stream& stream, int error);
    void close(Stream& stream);
    double unacknowledged() const;  // seconds, the mean of the streams
    Stream& stream_of(const Frame& frame) { return *streams_[(frame.segment + frame.ordinal) % streams_.size()]; }

    Receiver& receiver_;
    Pool& pool_;
    SocketThreads& threads_;
    const std::uint16_t generation_;
    const int data_epoll_, hangup_epoll_;
    const StreamEvents events_;
    std::vector<std::unique_ptr<Stream>> streams_;
    std::atomic<std::size_t> farewells_{0};  // streams that have brought one; two threads may each be reading one
    std::atomic<bool> abandoned_{false};
    std::atomic<bool> unanswered_{false};  // nothing came since we sent something
    std::atomic<std::uint64_t> owed_{0};   // credit to be returned to the peer
    double last_unacknowledged_ = 0;       // when the sockets were let go
    std::atomic<std::uint64_t> messages_sent_{0}, bytes_sent_{0}, messages_received_{0}, bytes_received_{0};
};

}  // namespace multiring
