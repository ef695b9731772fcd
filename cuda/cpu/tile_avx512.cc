#define MOK_ISA avx512
#define MOK_LANES 16
#define MOK_ROWS 12
#include "tile_kernels.h"

namespace mok::cpu {
extern const TileOps kTileOps_avx512[2];
const TileOps kTileOps_avx512[2] = {avx512::make_ops<avx512::bf16>("avx512"), avx512::make_ops<float>("avx512")};
}  // namespace mok::cpu
