// Which vector level runs: the best one that is built and that this CPU has, or the one TXL_CPU_LEVEL names.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu.h"

namespace txl {

#define TXL_DECLARE(level)           \
  namespace level {                  \
  extern const Kernels kernels_f32;  \
  extern const Kernels kernels_f64;  \
  extern const Kernels kernels_bf16; \
  }
TXL_DECLARE(baseline)
TXL_DECLARE(avx2)
TXL_DECLARE(avx512)
TXL_DECLARE(avx512_bf16)
#undef TXL_DECLARE

namespace {

struct Level {
  const char* name;
  bool runs_here;
  const Kernels *f32, *f64, *bf16;
};

// Built levels, best last.
const std::vector<Level>& levels() {
  static const std::vector<Level> built = {
      {"baseline", true, &baseline::kernels_f32, &baseline::kernels_f64, &baseline::kernels_bf16},
#if TXL_HAVE_AVX2
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), &avx2::kernels_f32,
       &avx2::kernels_f64, &avx2::kernels_bf16},
#endif
#if TXL_HAVE_AVX512
      {"avx512",
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"),
       &avx512::kernels_f32, &avx512::kernels_f64, &avx512::kernels_bf16},
#endif
#if TXL_HAVE_AVX512 && TXL_HAVE_AVX512_BF16
      {"avx512_bf16", __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw"),
       &avx512::kernels_f32, &avx512::kernels_f64, &avx512_bf16::kernels_bf16},
#endif
  };
  return built;
}

std::string join(bool only_usable) {
  std::string names;
  for (const Level& level : levels())
    if (level.runs_here || !only_usable) names += (names.empty() ? "" : ",") + std::string(level.name);
  return names;
}

const Level& find_level() {
  const char* wanted = std::getenv("TXL_CPU_LEVEL");
  const Level* best = nullptr;
  for (const Level& level : levels()) {
    if (!level.runs_here) continue;
    if (!wanted || !*wanted || wanted == std::string(level.name)) best = &level;
  }
  if (!best)
    throw std::runtime_error("TXL_CPU_LEVEL is '" + std::string(wanted) +
                             "', but the levels built and supported by this CPU are " + join(true) +
                             "; unset it to use the best of them");
  return *best;
}

// The choice is made once; a wrong name raises at every call until it is mended.
const Level& level() {
  static const Level& chosen = find_level();
  return chosen;
}

const Kernels& of(const Level& level, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return *level.f32;
    case DType::f64:
      return *level.f64;
    case DType::bf16:
      return *level.bf16;
    default:
      throw std::runtime_error("the CPU kernels serve float32, float64 and bfloat16");
  }
}

// The next lower level always has plain arithmetic (only the last level multiplies in pairs), which never
// declines.
const Level& plain_level() { return *(&level() - 1); }

}  // namespace

std::string cpu_level() { return level().name; }
std::string cpu_levels() { return join(true); }

void cpu_forward(DType dtype, const Problem& problem, const Forward& tensors, const Pool& pool) {
  if (!of(level(), dtype).forward(problem, tensors, pool))
    of(plain_level(), dtype).forward(problem, tensors, pool);
}

void cpu_backward(DType dtype, const Problem& problem, const Backward& tensors, const Pool& pool) {
  if (!of(level(), dtype).backward(problem, tensors, pool))
    of(plain_level(), dtype).backward(problem, tensors, pool);
}

void cpu_linear(DType dtype, const Linear& tensors, const Pool& pool) {
  of(level(), dtype).linear(tensors, pool);
}

void cpu_layer(DType dtype, const Layer& tensors, const Pool& pool) {
  of(level(), dtype).layer(tensors, pool);
}

void cpu_dropout(DType dtype, const Elements& tensors, const Pool& pool) {
  of(level(), dtype).dropout(tensors, pool);
}

}  // namespace txl
