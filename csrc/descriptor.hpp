// Descriptor: a file descriptor that is closed with its owner.
#pragma once

#include <unistd.h>

#include <utility>

namespace multiring {

class Descriptor {
  public:
    explicit Descriptor(int fd = -1) : fd_(fd) {}
    ~Descriptor() { reset(); }
    Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }

    int get() const { return fd_; }  // -1 if there is none
    bool is_open() const { return fd_ >= 0; }
    void reset() noexcept {
        if (fd_ >= 0) close(std::exchange(fd_, -1));
    }

  private:
    int fd_;
};

}  // namespace multiring
