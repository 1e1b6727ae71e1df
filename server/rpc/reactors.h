#pragma once
// The gRPC side of the calls: nothing but moving bytes. Everything with a meaning is in the cores.
#include <memory>
#include <string_view>
#include <vector>

#include "rpc/front.h"

namespace grpc {
class ServerContextBase;
class Service;
}  // namespace grpc

namespace saccade {

// The services of the contract; they outlive the gRPC server.
std::vector<std::unique_ptr<grpc::Service>> MakeServices(std::shared_ptr<Front> front);

// Front::Authorize for a call that has just begun.
absl::Status AuthorizeCall(Front& front, const grpc::ServerContextBase& context,
                           std::string_view method);

}  // namespace saccade
