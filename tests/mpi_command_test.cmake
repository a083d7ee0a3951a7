# The command under mpirun against the same ranks in one process: files equal to the last bit, checks
# passed, one error said once by all.
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})

# code: the expected status. TEXT: output and errors together, left in `text`.
function(call code)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${WORK} RESULT_VARIABLE result
    OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 120)
  if(NOT result EQUAL ${code})
    list(JOIN ARGN " " line)
    message(FATAL_ERROR "${line}\nexpected status ${code}, got ${result}:\n${output}")
  endif()
  set(text "${output}" PARENT_SCOPE)
endfunction()

# `words` once in `text`.
function(expect_once words)
  string(REGEX MATCHALL "${words}" found "${text}")
  list(LENGTH found count)
  if(NOT count EQUAL 1)
    message(FATAL_ERROR "expected '${words}' once, got it ${count} times in:\n${text}")
  endif()
endfunction()

call(0 ${GDN} make in.safetensors --docs 700,0,65,1,300 --heads 2,4 --dim 64 --initial-state
     --dfinal-state --gate-in-kernel --seed 3)
foreach(world 2 3 4)
  foreach(layout contiguous zigzag zigzag_per_document)
    foreach(exchange allgather a2a)
      set(options --layout ${layout} --exchange ${exchange})
      call(0 ${GDN} run in.safetensors -o threads --ranks ${world} ${options})
      call(0 ${MPIRUN} ${world} ${GDN} run in.safetensors -o mpi ${options})
      expect_once("mpi: 5 documents")
      call(0 ${CMAKE_COMMAND} -E compare_files threads mpi)
    endforeach()
  endforeach()
endforeach()
# Where cuts are multiples of the tile, also the bits of one rank (the files differ in their metadata).
call(0 ${MPIRUN} 2 ${GDN} check in.safetensors --tile 64 --against-one-rank
     --fragments 0:0:128,0:640:60,2:0:64,4:0:300/1:0:0,0:128:512,2:64:1,3:0:1)
expect_once("passed")
if(text MATCHES "differ")
  message(FATAL_ERROR "expected the bits of one rank:\n${text}")
endif()
call(0 ${MPIRUN} 3 ${GDN} check --docs 300,40 --heads 1,2 --dim 32 --recompute)

call(2 ${MPIRUN} 3 ${GDN} run none -o out)
expect_once("none: cannot open")
call(2 ${MPIRUN} 3 ${GDN} run in.safetensors -o out --ranks 4)
expect_once("--ranks: expected 3, as mpirun started, got 4")
call(2 ${MPIRUN} 3 ${GDN} run in.safetensors -o out --fragments 0:0:700,2:0:65,3:0:1/4:0:300)
expect_once("--fragments: expected 3 ranks, as mpirun started, got 2")
# A rank that has something else than the others.
set(other "test $OMPI_COMM_WORLD_RANK = 1")
call(2 ${MPIRUN} 3 sh -c "${GDN} run $(${other} && echo none || echo in.safetensors) -o out")
expect_once("rank 1: none: cannot open")
call(2 ${MPIRUN} 3 sh -c "${GDN} run in.safetensors -o out $(${other} && echo --norm)")
expect_once("options \\(norm.*\\): differs between rank 0 and rank 1")
call(2 ${MPIRUN} 3 sh -c "${GDN} run in.safetensors -o out $(${other} && echo --layout zigzag)")
expect_once("partition: differs between rank 0 and rank 1")
if(EXISTS ${WORK}/out)
  message(FATAL_ERROR "an error left an output")
endif()
