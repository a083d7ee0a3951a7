// Test tool: for every line "IN OUT" on standard input, reads the file IN and says on one line "ok"
// or why it is refused; where OUT is not "-", the tensors it can hold are written to OUT.
#include <fmt/format.h>

#include <iostream>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace {

std::string probe(const std::string& in, const std::string& out) {
  const auto file = gdn::SafetensorsFile::open(in);
  if (!file) return file.status().message();
  if (out == "-") return "ok";
  std::vector<gdn::HostTensor> tensors;
  std::vector<gdn::NamedTensor> named;
  for (const auto& entry : file->header().entries) {
    auto tensor = file->load(entry.name);
    if (!tensor) return tensor.status().message();
    named.push_back({entry.name, tensor->view});
    tensors.push_back(std::move(*tensor));
  }
  const gdn::Status status = gdn::write_safetensors(out, named, file->header().metadata);
  return status ? "ok" : status.message();
}

}  // namespace

int main() {
  std::string in, out;
  while (std::cin >> in >> out) std::cout << probe(in, out) << std::endl;
  return 0;
}
