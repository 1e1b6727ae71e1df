#include <prometheus/exposer.h>

#include <exception>

#include "base/strings.h"
#include "metrics/metrics.h"

namespace saccade {

class MetricsExposer::Server {
 public:
  // Few threads and a short timeout: a peer that connects and sends nothing holds a thread for that
  // long.
  Server(const std::string& address,
         std::vector<std::shared_ptr<prometheus::Collectable>> collectables)
      : collectables_(std::move(collectables)),
        exposer_(std::vector<std::string>{"listening_ports", address, "num_threads", "4",
                                          "request_timeout_ms", "2000"}) {
    for (const auto& collectable : collectables_) exposer_.RegisterCollectable(collectable);
  }
  std::vector<int> ports() const { return exposer_.GetListeningPorts(); }

 private:
  // The exposer keeps only weak references.
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables_;
  prometheus::Exposer exposer_;
};

MetricsExposer::MetricsExposer(std::unique_ptr<Server> server, int port)
    : server_(std::move(server)), port_(port) {}
MetricsExposer::~MetricsExposer() = default;

absl::StatusOr<std::unique_ptr<MetricsExposer>> MetricsExposer::Start(const std::string& address,
                                                                      const Metrics& metrics) {
  try {
    auto server = std::make_unique<Server>(address, metrics.collectables());
    const std::vector<int> ports = server->ports();
    if (ports.empty()) return absl::UnavailableError(StrCat("metrics: cannot listen on ", address));
    return std::unique_ptr<MetricsExposer>(new MetricsExposer(std::move(server), ports.front()));
  } catch (const std::exception& e) {
    return absl::UnavailableError(
        StrCat("metrics: cannot listen on ", address, " (is the port in use?): ", e.what()));
  }
}

}  // namespace saccade
