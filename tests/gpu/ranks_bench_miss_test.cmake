# A layout further from one rank than its bar: FAIL, times that are not claimed, exit status 1.
execute_process(COMMAND ${BENCH} --gpus 2 --shrink 64 --groups 1 --warm-up 0 --calls 1 --bar 1e-9 N
  RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text TIMEOUT 280)
if(NOT result EQUAL 1)
  message(FATAL_ERROR "expected exit status 1, got ${result}:\n${text}")
endif()
foreach(line "N CP1    \\| fwd [^\n]*, none\n"
             "N CP2 Z against one rank, bar 1e-09: [^\n]* FAIL\n"
             "N CP2 Z  \\| fwd [^\n]* \\| not claimed: [1-9].[0-9]e-0[34] from one rank, bar 1e-09\n")
  if(NOT text MATCHES "${line}")
    message(FATAL_ERROR "expected a line like '${line}' in:\n${text}")
  endif()
endforeach()
