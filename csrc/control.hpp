// Control: the connections that tell who is alive, and the notices that travel over them.
//
// There is one stream socket to each rank of this host and one to some ranks of other hosts. A connection that closes
// without a farewell means that its rank is lost. A notice (a first failure, with its culprit and reason) is passed on
// to every other connection, so that it reaches all ranks, and so is a farewell: from this host to others, and from
// another host, also where a data connection told of it, to everywhere else. A rank of another host also sends beats,
// and what it knows of the ranks behind it (liveness.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "descriptor.hpp"
#include "notice.hpp"
#include "records.hpp"

namespace multiring {

class Control {
  public:
    struct Events {
        std::function<void(const Notice&)> notice;
        std::function<void(int rank, int from)> farewell;
        std::function<void(int rank, const std::string& reason)> lost;
        std::function<void(int edge, std::span<const std::byte> statuses)> beat;
        std::function<void(int rank, std::uint64_t record)> altered;  // it is not what the rank sent
    };
    Control(int epoll, std::uint16_t generation, Events events);
    ~Control();

    // An edge is a connection to another host: beats go over it. Without records its bytes are as they are.
    void attach(int peer, Descriptor socket, bool is_edge, std::optional<Records> records = {});
    std::vector<int> edges() const;
    // Read what has come on the socket of this peer (from epoll).
    void read(int peer);
    void send(const Notice& notice);
    void send_farewell(int own);
    void pass_on_farewell(int from, int rank);  // from -1: over a data connection
    // Never blocks: a beat is left out while the peer has not taken in what was sent before.
    void send_beat(int edge, std::span<const std::byte> statuses);
    void close_all() noexcept;
    void lock_for_fork() { mutex_.lock(); }
    void unlock_after_fork() { mutex_.unlock(); }
    void disown() noexcept { close_all(); }  // in a forked child

  private:
    struct Connection {
        int peer;
        Descriptor socket;
        bool is_edge;
        std::optional<Records> records;
        std::vector<std::byte> sealed;           // that has come and is not decrypted yet
        std::vector<std::byte> received;         // in clear
        std::vector<std::byte> unsent;           // rest of a beat, as it is sent
        bool farewell = false;                   // the peer has said that it leaves
        std::optional<std::uint64_t> altered{};  // the record after which nothing is read any more
    };
    static void queue(Connection& connection, const std::vector<std::byte>& bytes);
    static void open_records(Connection& connection);
    void send_to(Connection& connection, const std::vector<std::byte>& bytes);
    bool send_some(Connection& connection);
    void receive(Connection& connection, std::string& reason);
    struct Received {
        std::vector<Notice> notices;
        std::vector<std::vector<std::byte>> beats;
        std::vector<int> farewells;  // the ranks that leave
    };
    bool take_message(Connection& connection, Received& into);  // false if it is not complete
    void drop(Connection& connection);

    const int epoll_;
    const std::uint16_t generation_;
    const Events events_;
    mutable std::mutex mutex_;
    std::vector<Connection> connections_;
    std::set<int> left_;  // the ranks whose farewell was said or passed on
};

}  // namespace multiring
