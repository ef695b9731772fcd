// The C++ side on its own: routing, task stream and whole calls, one thread per rank, no XLA. Sanitizers run this too.
//
//   inputs of the global batch -> run on P ranks in every mode -> same bits as on one rank -> close to the f64 oracle
#include "call_order_test.h"
#include "fault_test.h"
#include "layer_test.h"
#include "routing_test.h"
#include "stream_test.h"

int main() {
  using namespace mok::cpu;
  std::printf("tile kernels: %s\n", tile_ops(4).isa);
  run("routing", test_routing);
  run("layout and protocol", test_layout_and_protocol);
  run("task stream", test_task_stream);
  run("pair stream", test_pair_stream);
  run("backward tasks", test_backward_tasks);
  run("order of calls on GPUs", test_call_order);
  run("layer against oracle", test_layer);
  run("batch invariance", test_batch_invariance);
  run("bad ids", test_bad_ids);
  run("over capacity", test_over_capacity);
  run("shape mismatch", test_shape_mismatch);
  run("late rank", test_late_rank);
  run("very late rank", test_very_late_rank);
  run("exception", test_exception);
  run("late to an exception", test_late_to_exception);
  run("late to a large call", test_late_to_large_call);
  run("many abandoned calls", test_many_abandoned_calls);
  run("crossed calls", test_crossed_calls);
  run("arena growth", test_arena_growth);
  run("registry", test_registry);
  run("many generations", test_many_generations);
  return 0;
}
