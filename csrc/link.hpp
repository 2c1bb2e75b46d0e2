// Link: what carries frames and payloads to and from one other rank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "frame.hpp"

namespace multiring {

// What came in: a span's bytes and how to give them back to where they came from.
struct Payload {
    const std::byte* data = nullptr;
    std::uint32_t token = 0;
};

class Link;

// What links deliver to: the machine.
class Receiver {
  public:
    // A data frame whose payload can be read until it is given back.
    virtual void deliver(Link& from, const Frame& frame, Payload payload) = 0;
    // A payload of ours was read; `token` is what we sent with it.
    virtual void released(int peer, std::uint32_t token) = 0;

  protected:
    ~Receiver() = default;
};

struct Traffic {
    std::uint64_t messages_sent = 0, bytes_sent = 0, messages_received = 0, bytes_received = 0;
};

class Link {
  public:
    explicit Link(int peer) : peer(peer) {}
    virtual ~Link() = default;
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    // Whether the peer reads payloads out of our arena; otherwise they are sent from where they lie.
    virtual bool shares_memory() const = 0;
    // Hand over a data frame; never blocks. The payload must stay until the frame's token comes back.
    virtual void post(const Frame& frame, const std::byte* payload) = 0;
    // Make sure that the peer, if it sleeps, sees what was posted.
    virtual void notify() = 0;
    // Take in what has arrived; true if there was anything or another thread is at it.
    virtual bool drain() = 0;
    // The payload was read.
    virtual void give_back(Payload payload, std::size_t bytes) = 0;
    // Send what was held back; true if nothing is left.
    virtual bool flush() = 0;
    virtual Traffic traffic() const = 0;

    const int peer;  // world rank
};

}  // namespace multiring
