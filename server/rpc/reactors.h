#pragma once
// The gRPC side of the calls: nothing but moving bytes. Everything with a meaning is in the cores.
#include <memory>
#include <vector>

#include "rpc/front.h"

namespace grpc {
class Service;
}

namespace saccade {

// The services of the contract; they outlive the gRPC server.
std::vector<std::unique_ptr<grpc::Service>> MakeServices(std::shared_ptr<Front> front);

}  // namespace saccade
