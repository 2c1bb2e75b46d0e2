#include "labels.hpp"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

namespace multiring {
namespace {

constexpr std::string_view named = "label=";
constexpr std::size_t digits = 6;

struct Register {
    std::mutex mutex;
    std::map<std::uint32_t, std::string> texts;
};

Register& known() {
    static Register* const all = new Register;  // never destroyed: a thread may still fail while the process ends
    return *all;
}

std::string line_of(const std::string& label) {
    return "\nlabel " + label + ": ";
}

// The labels that a message names, and does not explain.
std::vector<std::string> unexplained(const std::string& message) {
    std::vector<std::string> found;
    const std::string first_line = message.substr(0, message.find('\n'));
    for (std::size_t at = first_line.find(named); at != std::string::npos; at = first_line.find(named, at + 1)) {
        const std::string label = first_line.substr(at + named.size(), digits);
        if (message.find(line_of(label)) == std::string::npos) found.push_back(label);
    }
    return found;
}

}  // namespace

std::string describe_label(std::uint32_t label) {
    std::array<char, digits + 1> text{};
    std::snprintf(text.data(), text.size(), "%06x", static_cast<unsigned>(label % most_labels));
    return text.data();
}

void name_label(std::uint32_t label, std::string text) {
    const std::lock_guard lock(known().mutex);
    known().texts[label] = std::move(text);
}

void explain_labels(std::string& message) {
    const std::lock_guard lock(known().mutex);
    for (const std::string& label : unexplained(message)) {
        const auto text = known().texts.find(static_cast<std::uint32_t>(std::strtoul(label.c_str(), nullptr, 16)));
        if (text != known().texts.end()) message += line_of(label) + text->second;
    }
}

bool take_over_labels(std::string& message, const std::string& other) {
    bool any = false;
    for (const std::string& label : unexplained(message)) {
        const std::string line = line_of(label);
        const std::size_t begin = other.find(line);
        if (begin == std::string::npos) continue;
        const std::size_t end = other.find('\n', begin + line.size());
        message += other.substr(begin, end == std::string::npos ? end : end - begin);
        any = true;
    }
    return any;
}

bool lacks_labels(const std::string& message) {
    return !unexplained(message).empty();
}

}  // namespace multiring
