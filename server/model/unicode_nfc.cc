#include "model/unicode_nfc.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <unordered_map>
#include <vector>

#include "model/unicode_class.h"
#include "model/unicode_nfc_tables.h"

namespace saccade {
namespace {

// Hangul syllables are computed: 19 leading consonants, 21 vowels, 27 trailing consonants or none.
constexpr char32_t kSyllable = 0xAC00;
constexpr char32_t kLeading = 0x1100;
constexpr char32_t kVowel = 0x1161;
constexpr char32_t kTrailing = 0x11A7;  // one before the first
constexpr char32_t kLeadings = 19;
constexpr char32_t kVowels = 21;
constexpr char32_t kTrailings = 28;
constexpr char32_t kSyllables = kLeadings * kVowels * kTrailings;

struct Mark {
  char32_t code = 0;
  uint8_t combining = 0;
};

template <class Row>
const Row* FindRow(const Row* begin, const Row* end, char32_t code) {
  const Row* row =
      std::lower_bound(begin, end, code, [](const Row& r, char32_t c) { return r.code < c; });
  return row != end && row->code == code ? row : nullptr;
}

uint8_t Combining(char32_t code) {
  const auto* const range =
      std::lower_bound(std::begin(kCombining), std::end(kCombining), static_cast<uint32_t>(code),
                       [](const CombiningRange& r, uint32_t c) { return r.last < c; });
  return range != std::end(kCombining) && range->first <= code ? range->combining : uint8_t{0};
}

// Decompositions are a few characters deep.
void Decompose(char32_t code, std::vector<Mark>& out) {
  if (code >= kSyllable && code < kSyllable + kSyllables) {
    const char32_t index = code - kSyllable;
    out.push_back({kLeading + index / (kVowels * kTrailings)});
    out.push_back({kVowel + index / kTrailings % kVowels});
    if (index % kTrailings != 0) out.push_back({kTrailing + index % kTrailings});
  } else if (const Pair* pair = FindRow(std::begin(kPairs), std::end(kPairs), code)) {
    Decompose(pair->first, out);
    Decompose(pair->second, out);
  } else if (const Singleton* one = FindRow(std::begin(kSingletons), std::end(kSingletons), code)) {
    Decompose(one->to, out);
  } else {
    out.push_back({code, Combining(code)});
  }
}

// The one character that `first` and `second` are; 0: none.
char32_t Compose(char32_t first, char32_t second) {
  if (first >= kLeading && first < kLeading + kLeadings && second >= kVowel &&
      second < kVowel + kVowels) {
    return kSyllable + ((first - kLeading) * kVowels + (second - kVowel)) * kTrailings;
  }
  if (first >= kSyllable && first < kSyllable + kSyllables &&
      (first - kSyllable) % kTrailings == 0 && second > kTrailing &&
      second < kTrailing + kTrailings) {
    return first + (second - kTrailing);
  }
  static const auto kComposed = [] {
    std::unordered_map<uint64_t, char32_t> map;
    for (const Pair& pair : kPairs) {
      if (pair.composes != 0) map.emplace(uint64_t{pair.first} << 32 | pair.second, pair.code);
    }
    return map;
  }();
  const auto it = kComposed.find(static_cast<uint64_t>(first) << 32 | second);
  return it == kComposed.end() ? 0 : it->second;
}

// Combining marks in the order of their classes.
void Order(std::vector<Mark>& marks) {
  for (size_t i = 0; i < marks.size(); ++i) {
    if (marks[i].combining == 0) continue;
    size_t end = i + 1;
    while (end < marks.size() && marks[end].combining != 0) ++end;
    std::stable_sort(marks.begin() + static_cast<ptrdiff_t>(i),
                     marks.begin() + static_cast<ptrdiff_t>(end),
                     [](const Mark& a, const Mark& b) { return a.combining < b.combining; });
    i = end - 1;
  }
}

// Puts what composes with the starter before it into that; the rest moves up.
void ComposeAll(std::vector<Mark>& marks) {
  size_t size = 0;
  size_t starter = marks.size();  // none yet
  for (const Mark& mark : marks) {
    if (starter < size) {
      // Not past a mark of the same or a higher class.
      const bool adjacent = starter + 1 == size;
      const bool reachable = adjacent || marks[size - 1].combining < mark.combining;
      const char32_t composed = reachable ? Compose(marks[starter].code, mark.code) : 0;
      if (composed != 0) {
        marks[starter].code = composed;
        continue;
      }
    }
    if (mark.combining == 0) starter = size;
    marks[size++] = mark;
  }
  marks.resize(size);
}

void Append(char32_t code, std::string& out) {
  const auto tail = [&](int shift) {
    out.push_back(static_cast<char>(0x80 | (code >> shift & 0x3F)));
  };
  if (code < 0x80) {
    out.push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out.push_back(static_cast<char>(0xC0 | code >> 6));
    tail(0);
  } else if (code < 0x10000) {
    out.push_back(static_cast<char>(0xE0 | code >> 12));
    tail(6);
    tail(0);
  } else {
    out.push_back(static_cast<char>(0xF0 | code >> 18));
    tail(12);
    tail(6);
    tail(0);
  }
}

}  // namespace

std::string ComposeNfc(std::string_view text) {
  // Below U+0300, whose first byte is CC, nothing combines and all is composed.
  if (std::all_of(text.begin(), text.end(),
                  [](char c) { return static_cast<unsigned char>(c) < 0xCC; })) {
    return std::string(text);
  }
  std::vector<Mark> marks;
  marks.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Character c = CharacterAt(text, i);
    Decompose(c.code, marks);
    i += c.size;
  }
  Order(marks);
  ComposeAll(marks);
  std::string out;
  out.reserve(text.size());
  for (const Mark& mark : marks) Append(mark.code, out);
  return out;
}

}  // namespace saccade
