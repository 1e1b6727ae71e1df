#pragma once
// What the kernel says about this process and the machine it may use. Any thread.
#include <cstdint>
#include <string>
#include <string_view>

namespace saccade {

struct ProcessUse {
  uint64_t resident_bytes = 0;   // VmRSS, clean file pages included
  uint64_t anonymous_bytes = 0;  // RssAnon: what only this process can give back
  double cpu_seconds = 0;        // user and system
  uint64_t open_fds = 0;
  double start_time_seconds = 0;  // since the epoch
};
// Zero where /proc does not say.
ProcessUse ReadProcessUse();

// RssAnon alone, cheaply.
uint64_t AnonymousBytes();

// Bytes this process may use: the least of the memory limits of its control group (v2 or v1, with
// the groups above it) and the host's memory. `root` is where /proc and /sys stand, for tests.
uint64_t UsableMemory(const std::string& root = "");

// Keeps up to 2 MB per arena of what is freed for the next allocation, where the C library begins
// with 128 KB and gives back the rest at once: small camera frames, which come and go, would each
// be made of new pages, and a new page costs up to 50 us in a virtual machine. Before other threads
// start.
void KeepFreedMemory();

// The value of "Key:   123 kB" in a file of such lines, in bytes; 0 without it.
uint64_t BytesOfLine(std::string_view text, std::string_view key);

}  // namespace saccade
