# A rank of three dies, stops or exits: the job ends within the time limit, not with success, and says
# which rank. mpirun itself notices a death; with --enable-recovery (whose own status is then 0), and
# for a rank that only stays away, it is the communicator's time limit of 2 s that ends the others.
set(limit 30)  # seconds: MPI's start, 2 s of waiting and the end, on a busy machine
function(expect words)
  cmake_parse_arguments(ARG "ANY_STATUS" "" "FLAGS;HOW" ${ARGN})
  string(TIMESTAMP before %s)
  execute_process(COMMAND ${MPIEXEC} ${FLAGS} ${ARG_FLAGS} ${PROGRAM} ${ARG_HOW}
    RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text TIMEOUT ${limit})
  string(TIMESTAMP after %s)
  math(EXPR seconds "${after} - ${before}")
  message("${ARG_HOW} ${ARG_FLAGS}: status ${code} after ${seconds} s")
  if(code MATCHES "timeout" OR NOT text MATCHES "${words}" OR (code EQUAL 0 AND NOT ARG_ANY_STATUS))
    message(FATAL_ERROR "expected a failure that says '${words}', got status ${code}:\n${text}")
  endif()
endfunction()

expect("rank 1.*signal 9" HOW kill)
expect("process rank 1|Process name: .*,1\\]" HOW exit)
expect("rank [02] after 5 rounds: rank 1 did not arrive within 2000 ms"
       HOW kill FLAGS --enable-recovery ANY_STATUS)
expect("rank [02] after 5 rounds: rank 1 did not arrive within 2000 ms" HOW stop)
