#include "tests/sim/scenario.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <type_traits>
#include <utility>

#include "base/strings.h"

namespace saccade::sim {
namespace {

constexpr size_t kMaxBytes = size_t{16} << 20;
constexpr size_t kMaxLines = 200'000;
constexpr size_t kMaxOfAKind = 256;
constexpr uint32_t kMaxSessions = 512;

bool IsName(std::string_view word) {
  return !word.empty() && word.size() <= 40 && std::all_of(word.begin(), word.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  });
}

// A plain decimal number and nothing else; no inf, no nan, no hex.
bool ParseDouble(std::string_view word, double& value) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  return error == std::errc() && end == word.data() + word.size() && std::isfinite(value);
}
bool ParseWhole(std::string_view word, uint64_t& value) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  return error == std::errc() && end == word.data() + word.size();
}

// Takes key=value words into the fields that have these names.
class FieldReader {
 public:
  explicit FieldReader(std::span<const std::string_view> words) {
    for (const std::string_view word : words) {
      const size_t equals = word.find('=');
      if (equals == std::string_view::npos) {
        Fail("'", word, "' is not KEY=VALUE");
        return;
      }
      const std::string_view key = word.substr(0, equals);
      if (std::any_of(pairs_.begin(), pairs_.end(),
                      [key](const Pair& pair) { return pair.key == key; })) {
        Fail("'", key, "' is there twice");
        return;
      }
      pairs_.push_back({key, word.substr(equals + 1)});
    }
  }

  template <class T>
  void Number(const char* key, T& place, double least, double most) {
    const std::string_view* const text = Take(key);
    if (text == nullptr) return;
    double value = 0;
    uint64_t whole = 0;
    if constexpr (std::is_floating_point_v<T>) {
      if (!ParseDouble(*text, value)) return Fail("'", key, "' is not a number");
    } else {
      if (!ParseWhole(*text, whole)) return Fail("'", key, "' is not a whole number");
      value = static_cast<double>(whole);
    }
    if (value < least || value > most) {
      return Fail("'", key, "' must be ", least, " to ", most);
    }
    if constexpr (std::is_floating_point_v<T>) {
      place = value;
    } else {
      place = static_cast<T>(whole);
    }
  }
  void Numbers(const char* key, std::vector<uint64_t>& place, size_t most) {
    const std::string_view* const text = Take(key);
    if (text == nullptr) return;
    place.clear();
    for (size_t begin = 0; begin <= text->size();) {
      const size_t comma = std::min(text->find(',', begin), text->size());
      uint64_t value = 0;
      if (place.size() == most || !ParseWhole(text->substr(begin, comma - begin), value)) {
        return Fail("'", key, "' is not a list of at most ", most, " whole numbers");
      }
      place.push_back(value);
      begin = comma + 1;
    }
  }
  void Text(const char* key, std::string& place) {
    const std::string_view* const text = Take(key);
    if (text == nullptr) return;
    if (!IsName(*text)) return Fail("'", key, "' is not a name");
    place = *text;
  }
  void Word(const char* key, uint32_t& place, std::initializer_list<const char*> words) {
    const std::string_view* const text = Take(key);
    if (text == nullptr) return;
    const auto found = std::find(words.begin(), words.end(), *text);
    if (found == words.end()) return Fail("'", key, "' cannot be '", *text, "'");
    place = static_cast<uint32_t>(found - words.begin());
  }

  // The first fault; empty: none, and every word was taken.
  std::string fault() const {
    if (!fault_.empty()) return fault_;
    for (const Pair& pair : pairs_) {
      if (!pair.taken) return StrCat("unknown key '", pair.key, "'");
    }
    return "";
  }

 private:
  struct Pair {
    std::string_view key;
    std::string_view value;
    bool taken = false;
  };
  template <class... Parts>
  void Fail(const Parts&... parts) {
    if (fault_.empty()) fault_ = StrCat(parts...);
  }
  const std::string_view* Take(std::string_view key) {
    for (Pair& pair : pairs_) {
      if (pair.key != key) continue;
      pair.taken = true;
      return &pair.value;
    }
    return nullptr;
  }

  std::vector<Pair> pairs_;
  std::string fault_;
};

// The shortest text that reads back as the same value.
std::string Shortest(double value) {
  char text[64];
  const auto [end, error] = std::to_chars(text, text + sizeof text, value);
  return error == std::errc() ? std::string(text, end) : std::string();
}

// Prints the fields that differ from those of `Line()`.
class FieldPrinter {
 public:
  // First pass: what the defaults print as; second pass: what differs.
  template <class Line>
  static std::string Print(const Line& line) {
    FieldPrinter defaults;
    Line().Fields(defaults);
    FieldPrinter actual;
    Line copy = line;
    copy.Fields(actual);
    std::string out;
    for (size_t i = 0; i < actual.words_.size(); ++i) {
      if (actual.words_[i] != defaults.words_[i]) StrAppend(&out, " ", actual.words_[i]);
    }
    return out;
  }
  template <class T>
  void Number(const char* key, T& place, double, double) {
    if constexpr (std::is_floating_point_v<T>) {
      words_.push_back(StrCat(key, "=", Shortest(place)));
    } else {
      words_.push_back(StrCat(key, "=", place));
    }
  }
  void Numbers(const char* key, std::vector<uint64_t>& place, size_t) {
    std::string text;
    for (const uint64_t value : place) StrAppend(&text, text.empty() ? "" : ",", value);
    words_.push_back(StrCat(key, "=", text));
  }
  void Text(const char* key, std::string& place) { words_.push_back(StrCat(key, "=", place)); }
  void Word(const char* key, uint32_t& place, std::initializer_list<const char*> words) {
    words_.push_back(StrCat(key, "=", *(words.begin() + place)));
  }

 private:
  std::vector<std::string> words_;
};

class Parser {
 public:
  absl::StatusOr<Scenario> Run(std::string_view text) {
    if (text.size() > kMaxBytes) return absl::InvalidArgumentError("scenario: too long");
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      if (++line_ > kMaxLines) return absl::InvalidArgumentError("scenario: too many lines");
      const std::string fault = ParseLine(text.substr(begin, end - begin));
      if (!fault.empty()) {
        return absl::InvalidArgumentError(StrCat("scenario, line ", line_, ": ", fault));
      }
      begin = end + 1;
    }
    const std::string fault = Check();
    if (!fault.empty()) return absl::InvalidArgumentError(StrCat("scenario: ", fault));
    return std::move(s_);
  }

 private:
  using Words = std::vector<std::string_view>;

  static Words Split(std::string_view line) {
    Words words;
    line = line.substr(0, line.find('#'));
    size_t begin = 0;
    while ((begin = line.find_first_not_of(" \t\r", begin)) != std::string_view::npos) {
      const size_t end = std::min(line.find_first_of(" \t\r", begin), line.size());
      words.push_back(line.substr(begin, end - begin));
      begin = end;
    }
    return words;
  }

  template <class Line>
  static std::string Fill(Line& line, std::span<const std::string_view> words) {
    FieldReader reader(words);
    line.Fields(reader);
    return reader.fault();
  }
  template <class Line>
  static std::string Append(std::vector<Line>& lines, Line line,
                            std::span<const std::string_view> words, size_t most = kMaxOfAKind) {
    if (lines.size() == most) return "too many lines of this kind";
    lines.push_back(std::move(line));
    return Fill(lines.back(), words);
  }
  static std::string Value(const Words& words, double least, double most, double& place) {
    double value = 0;
    if (words.size() != 2 || !ParseDouble(words[1], value) || value < least || value > most) {
      return StrCat("expected a number from ", least, " to ", most);
    }
    place = value;
    return "";
  }

  std::string ParseLine(std::string_view line) {
    const Words words = Split(line);
    if (words.empty()) return "";
    const std::string_view kind = words[0];
    const std::span<const std::string_view> rest = std::span(words).subspan(1);
    double number = 0;
    if (kind == "name") {
      if (words.size() != 2 || !IsName(words[1])) return "expected a name";
      s_.name = words[1];
      return "";
    }
    if (kind == "seed") {
      return words.size() == 2 && ParseWhole(words[1], s_.seed) ? "" : "expected a whole number";
    }
    if (kind == "seconds") return Value(words, 0.001, 86'400, s_.seconds);
    if (kind == "warmup") return Value(words, 0, 3600, s_.warmup);
    if (kind == "load") return Value(words, 0, 10, s_.load);
    if (kind == "verify") {
      std::string fault = Value(words, 0, 1, number);
      s_.verify = number != 0;
      return fault;
    }
    if (kind == "repeat") {
      std::string fault = Value(words, 1, 1000, number);
      s_.repeat = static_cast<uint32_t>(number);
      return fault;
    }
    if (kind == "scheduler") return Fill(s_.scheduler, rest);
    if (kind == "lane") return Append(s_.lanes, LaneLine(), rest, 16);
    if (kind == "costs") return Append(s_.costs, CostsLine(), rest, 8);
    if (kind == "class" || kind == "client") {
      if (rest.empty() || !IsName(rest[0])) return "expected a name";
      const std::string name(rest[0]);
      if (kind == "client") {
        ClientLine client;
        client.name = name;
        return Append(s_.clients, std::move(client), rest.subspan(1));
      }
      ClassLine klass;
      klass.name = name;
      return Append(s_.classes, std::move(klass), rest.subspan(1), 32);
    }
    if (kind == "at") return ParseAt(rest);
    if (kind == "expect") return ParseExpect(rest);
    if (kind == "t") return ParseRecorded(rest);
    return StrCat("unknown word '", kind, "'");
  }

  std::string ParseAt(std::span<const std::string_view> words) {
    double at = 0;
    if (words.size() < 2 || !ParseDouble(words[0], at) || at < 0 || at > 86'400) {
      return "expected: at SECONDS WHAT";
    }
    if (words[1] == "costs") {
      CostChange change;
      change.at = at;
      return Append(s_.changes, std::move(change), words.subspan(2));
    }
    for (uint32_t kind = 0; kind < std::size(EventLine::kKinds); ++kind) {
      if (words[1] == EventLine::kKinds[kind]) {
        EventLine event;
        event.at = at;
        event.kind = kind;
        return Append(s_.events, std::move(event), words.subspan(2));
      }
    }
    return StrCat("nothing of the name '", words[1], "' happens");
  }

  // expect METRIC [NAME] >=|<= VALUE [after SECONDS]
  std::string ParseExpect(std::span<const std::string_view> words) {
    constexpr const char* kForm = "expected: expect METRIC [NAME] >=|<= VALUE [after SECONDS]";
    ExpectLine line;
    size_t i = 0;
    const auto is_order = [&] { return words[i] == ">=" || words[i] == "<="; };
    if (words.size() < 3) return kForm;
    line.metric = words[i++];
    if (std::find(std::begin(kMetrics), std::end(kMetrics), line.metric) == std::end(kMetrics)) {
      return StrCat("unknown metric '", line.metric, "'");
    }
    if (!is_order()) line.of = words[i++];
    if (!is_order()) return kForm;
    line.at_least = words[i++] == ">=";
    if (i >= words.size() || !ParseDouble(words[i++], line.value)) return kForm;
    if (i < words.size()) {
      if (words.size() != i + 2 || words[i] != "after" || !ParseDouble(words[i + 1], line.after) ||
          line.after < 0) {
        return kForm;
      }
    }
    if (s_.expects.size() == kMaxOfAKind) return "too many lines of this kind";
    s_.expects.push_back(std::move(line));
    return "";
  }

  template <class Line>
  static Line At(uint64_t us) {
    Line line;
    line.us = us;
    return line;
  }

  // t MICROSECONDS arrive|gone|step ...
  std::string ParseRecorded(std::span<const std::string_view> words) {
    uint64_t us = 0;
    if (words.size() < 2 || !ParseWhole(words[0], us) || us > 86'400'000'000) {
      return "expected: t MICROSECONDS WHAT";
    }
    if (us < last_us_) return "recorded times go back";
    last_us_ = us;
    const auto fields = words.subspan(2);
    if (words[1] == "arrive") return Append(s_.arrivals, At<ArriveLine>(us), fields, kMaxLines);
    if (words[1] == "gone") return Append(s_.gone, At<GoneLine>(us), fields, kMaxLines);
    if (words[1] == "step") return Append(s_.steps, At<StepLine>(us), fields, kMaxLines);
    return StrCat("nothing of the name '", words[1], "' is recorded");
  }

  // What no single line can tell.
  std::string Check() const {
    if (s_.classes.empty()) return "no class";
    if (s_.lanes.empty()) return "no lane";
    const auto is_class = [&](const std::string& name) {
      return std::any_of(s_.classes.begin(), s_.classes.end(),
                         [&](const ClassLine& c) { return c.name == name; });
    };
    const auto is_model = [&](uint32_t model) {
      return std::any_of(s_.lanes.begin(), s_.lanes.end(),
                         [&](const LaneLine& lane) { return lane.model == model; });
    };
    std::vector<std::string> names;
    for (const ClassLine& c : s_.classes) names.push_back(c.name);
    uint32_t sessions = 0;
    for (const ClientLine& c : s_.clients) {
      if (!is_class(c.klass)) return StrCat("clients ", c.name, " name no class");
      if (!is_model(c.model)) return StrCat("clients ", c.name, " name no lane's model");
      sessions += c.count;
      names.push_back(c.name);
    }
    if (sessions > kMaxSessions) return "too many sessions";
    for (size_t i = 0; i < s_.lanes.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (s_.lanes[i].model == s_.lanes[j].model && s_.lanes[i].worker == s_.lanes[j].worker) {
          return "a model is twice on a worker";
        }
      }
    }
    for (const ExpectLine& e : s_.expects) {
      if (!e.of.empty() && std::find(names.begin(), names.end(), e.of) == names.end()) {
        return StrCat("nothing of the name '", e.of, "' to expect anything of");
      }
    }
    std::sort(names.begin(), names.end());
    if (std::adjacent_find(names.begin(), names.end()) != names.end()) {
      return "two classes or clients have one name";
    }
    for (const ArriveLine& a : s_.arrivals) {
      if (!is_class(a.klass)) return StrCat("request ", a.id, " names no class");
      if (!is_model(a.model)) return StrCat("request ", a.id, " names no lane's model");
      if (a.frames.empty() && a.text == 0) return StrCat("request ", a.id, " is empty");
    }
    return "";
  }

  Scenario s_;
  size_t line_ = 0;
  uint64_t last_us_ = 0;
};

}  // namespace

absl::StatusOr<Scenario> ParseScenario(std::string_view text) { return Parser().Run(text); }

absl::StatusOr<Scenario> ReadScenario(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(StrCat("cannot read ", path));
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return ParseScenario(text);
}

std::string PrintScenario(const Scenario& s) {
  std::string out = StrCat("name ", s.name, "\nseed ", s.seed, "\nseconds ", Shortest(s.seconds),
                           "\nwarmup ", Shortest(s.warmup), "\n");
  if (s.load > 0) StrAppend(&out, "load ", Shortest(s.load), "\n");
  if (!s.verify) StrAppend(&out, "verify 0\n");
  if (s.repeat != 1) StrAppend(&out, "repeat ", s.repeat, "\n");
  StrAppend(&out, "scheduler", FieldPrinter::Print(s.scheduler), "\n");
  for (const ClassLine& c : s.classes) {
    StrAppend(&out, "class ", c.name, FieldPrinter::Print(c), "\n");
  }
  for (const LaneLine& lane : s.lanes) StrAppend(&out, "lane", FieldPrinter::Print(lane), "\n");
  for (const CostsLine& c : s.costs) StrAppend(&out, "costs", FieldPrinter::Print(c), "\n");
  for (const ClientLine& c : s.clients) {
    StrAppend(&out, "client ", c.name, FieldPrinter::Print(c), "\n");
  }
  for (const EventLine& e : s.events) {
    StrAppend(&out, "at ", Shortest(e.at), " ", EventLine::kKinds[e.kind], FieldPrinter::Print(e),
              "\n");
  }
  for (const CostChange& c : s.changes) {
    StrAppend(&out, "at ", Shortest(c.at), " costs", FieldPrinter::Print(c), "\n");
  }
  for (const ExpectLine& e : s.expects) {
    StrAppend(&out, "expect ", e.metric, e.of.empty() ? "" : " ", e.of,
              e.at_least ? " >= " : " <= ", Shortest(e.value));
    if (e.after > 0) StrAppend(&out, " after ", Shortest(e.after));
    StrAppend(&out, "\n");
  }
  // Recorded lines in order of time; at one time, as a server would write them.
  std::vector<std::pair<uint64_t, std::string>> recorded;
  for (const ArriveLine& a : s.arrivals) {
    recorded.emplace_back(a.us, StrCat("arrive", FieldPrinter::Print(a)));
  }
  for (const GoneLine& g : s.gone) {
    recorded.emplace_back(g.us, StrCat("gone", FieldPrinter::Print(g)));
  }
  for (const StepLine& step : s.steps) {
    recorded.emplace_back(step.us, StrCat("step", FieldPrinter::Print(step)));
  }
  std::stable_sort(recorded.begin(), recorded.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [us, text] : recorded) StrAppend(&out, "t ", us, " ", text, "\n");
  return out;
}

}  // namespace saccade::sim
