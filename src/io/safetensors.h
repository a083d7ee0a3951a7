// Tensors in files, in the safetensors format: what the command reads and writes, and what any
// framework can read too. A file is validated whole before a tensor is; every error (kIo) names the
// file and, where it is about one, the tensor, what was expected and what was found.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/host_tensor.h"
#include "gdn/status.h"
#include "io/file.h"
#include "io/safetensors_header.h"

namespace gdn {

class SafetensorsFile {
 public:
  // Reads and checks the header; no tensor yet.
  static Result<SafetensorsFile> open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const SafetensorsHeader& header() const { return header_; }
  const SafetensorsEntry* find(const std::string& name) const;  // null: not in the file

  // The tensor in memory of its own. BF16, F32, F64, I32, I64 of rank 1 to 4.
  Result<HostTensor> load(const std::string& name) const;

 private:
  SafetensorsFile(InputFile file, SafetensorsHeader header, int64_t data_begin)
      : file_(std::move(file)), header_(std::move(header)), data_begin_(data_begin) {}

  InputFile file_;
  SafetensorsHeader header_;
  int64_t data_begin_ = 0;  // 8 + header length
};

struct NamedTensor {
  std::string name;
  TensorView view;  // host memory, row-major, rank 1 to 4
};

// Complete or not at all (io/file.h). Tensors are laid out by falling element size, then by name,
// so that each is aligned to its elements.
Status write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                         const std::map<std::string, std::string>& metadata = {});

// The format's name of a dtype, and back.
const char* safetensors_dtype(DType dtype);

}  // namespace gdn
