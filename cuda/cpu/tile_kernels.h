// The tile kernels for one instruction set. Included once per translation unit, which sets MOK_ISA (a namespace
// name), MOK_LANES (f32 lanes of a vector register) and MOK_ROWS (rows of the register tile).
#pragma once

#include <cstring>
#include <type_traits>

#include "tile.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace mok::cpu::MOK_ISA {

constexpr int kLanes = MOK_LANES;
constexpr int kRows = MOK_ROWS;          // register tile: kRows x kCols accumulators
constexpr int kCols = 2 * kLanes;
constexpr int64_t kDepth = 256;          // K per pass: a B panel of kDepth x kCols stays in L1
constexpr int64_t kMaxRows = 120;        // rows of a tile
static_assert(kScratchRowMultiple % kRows == 0 && kScratchColMultiple % kCols == 0);

typedef float Vec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

using bf16 = uint16_t;

inline float from_bits(uint32_t b) { float f; std::memcpy(&f, &b, 4); return f; }
inline uint32_t to_bits(float f) { uint32_t b; std::memcpy(&b, &f, 4); return b; }

inline float load(bf16 v) { return from_bits(uint32_t{v} << 16); }
inline float load(float v) { return v; }

template <class T> T round_to(float v);
template <> inline float round_to<float>(float v) { return v; }
template <> inline bf16 round_to<bf16>(float v) {  // nearest even; NaN stays NaN
  const uint32_t b = to_bits(v);
  const uint32_t rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  return bf16((b & 0x7fffffff) > 0x7f800000 ? (b >> 16) | 0x40 : rounded);
}

// e^x to about 1 ulp: x = n ln2 + r, a polynomial on |r| <= ln2 / 2, 2^n in two factors so that neither end of the
// range overflows early. Branch-free, so loops over it vectorise; NaN stays NaN.
inline float exp_f32(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const float t = x * 1.44269504f + shifter;
  const float n = t - shifter;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t i = to_bits(t) - to_bits(shifter);
  const uint32_t half = (i + (i >> 31)) >> 1 | (i & 0x80000000u);  // i / 2, arithmetic
  return p * from_bits((half + 127) << 23) * from_bits((i - half + 127) << 23);
}

inline float sigmoid(float g) { return 1.0f / (1.0f + exp_f32(-g)); }

template <class T>
void to_f32(const T* in, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = load(in[i]);
}

#if defined(__AVX2__)
inline void transpose8(const float* in, int64_t ld, float* out, int64_t ldo) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(in + i * ld);
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * ldo, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * ldo, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#else
inline void transpose8(const float* in, int64_t ld, float* out, int64_t ldo) {
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) out[j * ldo + i] = in[i * ld + j];
}
#endif

// B panel: k x kCols of b, columns [n0, n0 + n), as f32 rows; missing columns are zeros.
template <class T>
void pack_b(Operand b, int64_t k0, int64_t k, int64_t n0, int64_t n, float* out) {
  const T* p = static_cast<const T*>(b.p) + k0 * b.row + n0 * b.col;
  if (b.col == 1) {
    if (n == kCols) {
      for (int64_t i = 0; i < k; ++i)
        for (int j = 0; j < kCols; ++j) out[i * kCols + j] = load(p[i * b.row + j]);
    } else {
      for (int64_t i = 0; i < k; ++i)
        for (int64_t j = 0; j < kCols; ++j) out[i * kCols + j] = j < n ? load(p[i * b.row + j]) : 0.0f;
    }
    return;
  }
  // Columns are contiguous along k: convert eight of them at a time and transpose.
  alignas(64) float line[8][kDepth + 8];
  for (int64_t j0 = 0; j0 < kCols; j0 += 8) {
    for (int64_t j = 0; j < 8; ++j) {
      if (j0 + j < n) {
        const T* src = p + (j0 + j) * b.col;
        if (b.row == 1) to_f32(src, k, line[j]);
        else for (int64_t i = 0; i < k; ++i) line[j][i] = load(src[i * b.row]);
      } else {
        std::memset(line[j], 0, size_t(k) * sizeof(float));
      }
    }
    int64_t i = 0;
    for (; i + 8 <= k; i += 8) transpose8(&line[0][i], kDepth + 8, out + i * kCols + j0, kCols);
    for (; i < k; ++i)
      for (int64_t j = 0; j < 8; ++j) out[i * kCols + j0 + j] = line[j][i];
  }
}

// A block: m x k of a as f32, rows padded with zeros to a multiple of kRows. Row-major operands stay [row][k],
// transposed ones become [k][row]; the register kernel reads either.
template <class T>
void pack_a(Operand a, int64_t k0, int64_t k, int64_t m, int64_t padded, float* out) {
  const T* p = static_cast<const T*>(a.p) + k0 * a.col;
  if (a.col == 1) {
    for (int64_t i = 0; i < m; ++i) to_f32(p + i * a.row, k, out + i * kDepth);
    for (int64_t i = m; i < padded; ++i) std::memset(out + i * kDepth, 0, size_t(k) * sizeof(float));
  } else {
    for (int64_t i = 0; i < k; ++i) {
      float* row = out + i * padded;
      if (a.row == 1) to_f32(p + i * a.col, m, row);
      else for (int64_t j = 0; j < m; ++j) row[j] = load(p[j * a.row + i * a.col]);
      for (int64_t j = m; j < padded; ++j) row[j] = 0.0f;
    }
  }
}

// The register kernel: kRows x kCols of c += a b over k. Always the same code, full tile or edge.
template <bool kRowMajorA>
inline void micro(int64_t k, const float* a, int64_t step, const float* b, float* c, int64_t ldc, bool accumulate) {
  Vec acc[kRows][2];
#pragma GCC unroll 24
  for (int i = 0; i < kRows; ++i) {
    acc[i][0] = accumulate ? *reinterpret_cast<const Vec*>(c + i * ldc) : Vec{};
    acc[i][1] = accumulate ? *reinterpret_cast<const Vec*>(c + i * ldc + kLanes) : Vec{};
  }
  for (int64_t j = 0; j < k; ++j) {
    const Vec b0 = *reinterpret_cast<const Vec*>(b + j * kCols);
    const Vec b1 = *reinterpret_cast<const Vec*>(b + j * kCols + kLanes);
#pragma GCC unroll 24
    for (int i = 0; i < kRows; ++i) {
      const float s = kRowMajorA ? a[i * kDepth + j] : a[j * step + i];
      acc[i][0] += s * b0;
      acc[i][1] += s * b1;
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < kRows; ++i) {
    *reinterpret_cast<Vec*>(c + i * ldc) = acc[i][0];
    *reinterpret_cast<Vec*>(c + i * ldc + kLanes) = acc[i][1];
  }
}

template <class T>
void gemm(int64_t m, int64_t n, int64_t k, Operand a, Operand b, float* c, int64_t ldc, bool accumulate) {
  alignas(64) static thread_local float a_pack[(kMaxRows + kRows) * kDepth];
  alignas(64) static thread_local float b_pack[kDepth * kCols];
  const int64_t padded = (m + kRows - 1) / kRows * kRows;
  if (k == 0 && !accumulate)
    for (int64_t i = 0; i < padded; ++i) std::memset(c + i * ldc, 0, size_t(n) * sizeof(float));
  for (int64_t k0 = 0; k0 < k; k0 += kDepth) {
    const int64_t depth = k - k0 < kDepth ? k - k0 : kDepth;
    pack_a<T>(a, k0, depth, m, padded, a_pack);
    for (int64_t n0 = 0; n0 < n; n0 += kCols) {
      pack_b<T>(b, k0, depth, n0, n - n0 < kCols ? n - n0 : kCols, b_pack);
      for (int64_t i = 0; i < padded; i += kRows) {
        const bool add = accumulate || k0 > 0;
        if (a.col == 1) micro<true>(depth, a_pack + i * kDepth, 0, b_pack, c + i * ldc + n0, ldc, add);
        else micro<false>(depth, a_pack + i, padded, b_pack, c + i * ldc + n0, ldc, add);
      }
    }
  }
}

template <class T>
void store(int64_t m, int64_t n, const float* c, int64_t ldc, void* out, int64_t ld) {
  for (int64_t i = 0; i < m; ++i) {
    T* row = static_cast<T*>(out) + i * ld;
    for (int64_t j = 0; j < n; ++j) row[j] = round_to<T>(c[i * ldc + j]);
  }
}

template <class T>
void swiglu(int64_t m, int64_t n, const float* g, const float* u, int64_t ldc, void* h, void* gate, void* up,
            int64_t ld) {
  for (int64_t i = 0; i < m; ++i) {
    const float *gi = g + i * ldc, *ui = u + i * ldc;
    if (h != nullptr) {
      T* row = static_cast<T*>(h) + i * ld;
      for (int64_t j = 0; j < n; ++j) row[j] = round_to<T>(gi[j] * sigmoid(gi[j]) * ui[j]);
    }
    if (gate != nullptr) {
      store<T>(1, n, gi, 0, static_cast<T*>(gate) + i * ld, 0);
      store<T>(1, n, ui, 0, static_cast<T*>(up) + i * ld, 0);
    }
  }
}

template <class T>
void swiglu_grad(int64_t m, int64_t n, const float* dhu, int64_t ldc, const float* weight, const void* gate,
                 const void* up, void* d_gate, void* d_up, void* hw, int64_t ld, float* dot) {
  constexpr int kPartials = 16;  // of the dot product, whatever the instruction set
  for (int64_t i = 0; i < m; ++i) {
    const T *g = static_cast<const T*>(gate) + i * ld, *u = static_cast<const T*>(up) + i * ld;
    T *dg = static_cast<T*>(d_gate) + i * ld, *du = static_cast<T*>(d_up) + i * ld, *h = static_cast<T*>(hw) + i * ld;
    const float *d = dhu + i * ldc, w = weight == nullptr ? 1.0f : weight[i];
    float sum[kPartials] = {};
    // Through local arrays: the compiler sees that nothing aliases and vectorises. Missing columns are zeros.
    auto chunk = [&](int64_t j0, auto lanes) {
      T gate_in[kPartials] = {}, up_in[kPartials] = {}, out[3][kPartials];
      float d_in[kPartials] = {};
      std::memcpy(gate_in, g + j0, size_t(lanes) * sizeof(T));
      std::memcpy(up_in, u + j0, size_t(lanes) * sizeof(T));
      std::memcpy(d_in, d + j0, size_t(lanes) * sizeof(float));
      for (int lane = 0; lane < kPartials; ++lane) {
        const float gj = load(gate_in[lane]), uj = load(up_in[lane]), s = sigmoid(gj), silu = gj * s;
        const float hj = silu * uj, dh = w * d_in[lane];
        sum[lane] += d_in[lane] * hj;
        out[0][lane] = round_to<T>(dh * uj * (s + silu * (1.0f - s)));
        out[1][lane] = round_to<T>(dh * silu);
        out[2][lane] = round_to<T>(w * hj);
      }
      std::memcpy(dg + j0, out[0], size_t(lanes) * sizeof(T));
      std::memcpy(du + j0, out[1], size_t(lanes) * sizeof(T));
      std::memcpy(h + j0, out[2], size_t(lanes) * sizeof(T));
    };
    const int64_t whole = n / kPartials * kPartials;
    for (int64_t j0 = 0; j0 < whole; j0 += kPartials) chunk(j0, std::integral_constant<int64_t, kPartials>{});
    if (whole < n) chunk(whole, n - whole);
    for (int step = kPartials / 2; step > 0; step /= 2)
      for (int lane = 0; lane < step; ++lane) sum[lane] += sum[lane + step];
    dot[i] = sum[0];
  }
}

template <class T>
void add_scaled(int64_t n, float weight, const void* row, float* acc) {
  const T* r = static_cast<const T*>(row);
  for (int64_t i = 0; i < n; ++i) acc[i] += weight * load(r[i]);
}

template <class T>
constexpr TileOps make_ops(const char* isa) {
  return {isa, gemm<T>, store<T>, swiglu<T>, swiglu_grad<T>, add_scaled<T>};
}

}  // namespace mok::cpu::MOK_ISA
