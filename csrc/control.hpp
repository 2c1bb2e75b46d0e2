// Control: the connections that tell who is alive, and the notices that travel over them.
//
// There is one stream socket to each rank of this host and one to some ranks of other hosts. A connection that closes
// without a farewell means that its rank is lost. A notice (a first failure, with its culprit and reason) is passed on
// to every other connection, so that it reaches all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "errors.hpp"

namespace multiring {

struct Notice {
    int from = -1;  // the rank that passed it on
    ErrorKind kind{};
    int rank = -1;  // the culprit
    std::string text;
    bool farewell = false;  // no failure: `rank` leaves on purpose
};

class Control {
  public:
    struct Events {
        std::function<void(const Notice&)> notice;
        std::function<void(int rank)> farewell;
        std::function<void(int rank, const std::string& reason)> lost;
    };
    Control(int epoll, std::uint16_t generation, Events events);
    ~Control();

    void attach(int peer, int socket);  // takes ownership
    // Read what has come on the socket of this peer (from epoll).
    void read(int peer);
    void send(const Notice& notice);
    void send_farewell();
    void close_all() noexcept;
    void lock_for_fork() { mutex_.lock(); }
    void unlock_after_fork() { mutex_.unlock(); }
    void disown() noexcept { close_all(); }  // in a forked child

  private:
    struct Connection {
        int peer;
        int socket;
        std::vector<std::byte> received;
        bool farewell = false;  // the peer has said that it leaves
    };
    void send_to(Connection& connection, const std::vector<std::byte>& bytes);
    void receive(Connection& connection, std::string& reason);
    bool take_message(Connection& connection, std::vector<Notice>& notices);  // false if it is not complete
    void drop(Connection& connection);

    const int epoll_;
    const std::uint16_t generation_;
    const Events events_;
    std::mutex mutex_;
    std::vector<Connection> connections_;
};

}  // namespace multiring
