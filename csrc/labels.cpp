#include "labels.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

namespace multiring {
namespace {

constexpr std::string_view named = "label=";
constexpr std::size_t digits = 6;
constexpr std::size_t longest_line = 1000;  // that is shown as it is

struct LabelTable {
    std::mutex mutex;
    std::multimap<std::uint32_t, const std::string*> texts;
};

LabelTable& known() {
    static LabelTable* const all = new LabelTable;  // never destroyed: a thread may still fail while the process ends
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

LabelName::LabelName(std::uint32_t label, std::string text) : label_(label % most_labels), text_(std::move(text)) {
    const std::lock_guard lock(known().mutex);
    known().texts.emplace(label_, &text_);
}

LabelName::~LabelName() {
    const std::lock_guard lock(known().mutex);
    const auto [begin, end] = known().texts.equal_range(label_);
    known().texts.erase(std::find_if(begin, end, [&](const auto& entry) { return entry.second == &text_; }));
}

void explain_labels(std::string& message) {
    const std::lock_guard lock(known().mutex);
    for (const std::string& label : unexplained(message)) {
        const auto text = known().texts.find(static_cast<std::uint32_t>(std::strtoul(label.c_str(), nullptr, 16)));
        if (text != known().texts.end()) message += line_of(label) + *text->second;
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

void contrast_labels(std::string& message) {
    const std::size_t first = message.find('\n');
    const std::size_t second = first == std::string::npos ? first : message.find('\n', first + 1);
    if (second == std::string::npos || message.find('\n', second + 1) != std::string::npos) return;
    const std::string lines[] = {message.substr(first, second - first), message.substr(second)};
    std::size_t head[] = {std::string::npos, std::string::npos};  // after "label 3fa2c1: 12 gradients: "
    for (const int i : {0, 1})
        if (const std::size_t colon = lines[i].find(": ", line_of(std::string(digits, '0')).size());
            colon != std::string::npos)
            head[i] = colon + 2;
    if (head[0] == std::string::npos || head[1] == std::string::npos) return;
    const std::string bodies[] = {lines[0].substr(head[0]), lines[1].substr(head[1])};
    if (std::max(bodies[0].size(), bodies[1].size()) <= longest_line) return;

    const auto alike = [](auto a, auto a_end, auto b, auto b_end) {
        return static_cast<std::size_t>(std::mismatch(a, a_end, b, b_end).first - a);
    };
    std::size_t before = alike(bodies[0].begin(), bodies[0].end(), bodies[1].begin(), bodies[1].end());
    before = before == 0 ? std::string::npos : bodies[0].rfind("), ", before - 1);
    before = before == std::string::npos ? 0 : before + 3;
    std::size_t after = alike(bodies[0].rbegin(), bodies[0].rend() - static_cast<std::ptrdiff_t>(before),
                              bodies[1].rbegin(), bodies[1].rend() - static_cast<std::ptrdiff_t>(before));
    const std::size_t boundary = bodies[0].find("), ", bodies[0].size() - after);
    after = boundary == std::string::npos ? 0 : bodies[0].size() - boundary - 1;
    message.resize(first);
    for (const int i : {0, 1}) {
        std::string differing = bodies[i].substr(before, bodies[i].size() - before - after);
        if (differing.size() > longest_line) differing = differing.substr(0, longest_line) + " ...";
        message += lines[i].substr(0, head[i]) + (before == 0 ? "" : "..., ") + differing + (after == 0 ? "" : ", ...");
    }
}

}  // namespace multiring
