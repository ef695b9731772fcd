// The C++ side on its own: routing, task stream and whole calls, ranks in threads and in processes, no XLA. Sanitizers run this too.
//
//   inputs of the global batch -> run on P ranks in every mode -> same bits as on one rank -> close to the f64 oracle
#include "call_order_test.h"
#include "fault_test.h"
#include "layer_test.h"
#include "process_test.h"
#include "routing_test.h"
#include "stream_test.h"

int main(int count, char** arguments) {
  using namespace mok::cpu;
  if (count == 8 && std::strcmp(arguments[1], "--member") == 0) return run_member(arguments + 2);
  std::printf("tile kernels: %s\n", tile_ops(4).isa);
  run("routing", test_routing);
  run("layout and protocol", test_layout_and_protocol);
  run("task stream", test_task_stream);
  run("pair stream", test_pair_stream);
  run("ranks read in turns", test_ranks_read_in_turns);
  run("backward tasks", test_backward_tasks);
  run("order of calls on GPUs", test_call_order);
  run("failures of calls on their way", test_failures_of_calls_on_their_way);
  run("many calls on GPUs", test_many_calls);
  run("order of calls on GPUs of several processes", test_call_order_of_several_processes);
  run("no call before processes agree", test_no_call_starts_before_processes_agree);
  run("processes raise in the same calls", test_processes_raise_in_the_same_calls);
  run("stamps of calls", test_stamps_of_calls);
  run("layer against oracle", test_layer);
  run("f32 weight gradients", test_f32_weight_grads);
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
  run("joining", test_joining);
  run("a rank in two processes", test_a_rank_in_two_processes);
  run("names of runs", test_run_names);
  run("lock of a dead process", test_lock_of_a_dead_process);
  run("shapes across processes", test_changing_shapes_across_processes);
  run("killed processes", test_killed_processes);
  run("stopped, absent processes", test_stopped_and_absent_processes);
  return 0;
}
