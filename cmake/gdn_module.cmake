# gdn_module(NAME SOURCES a.cc b.cc DEPS gdn_base)  a part of the library, as a static archive
# gdn_test(NAME DEPS gdn_plan)                      NAME.cc beside it, a GoogleTest program; part of
#                                                   target and label "sanitized" unless HOST_ONLY
#                                                   (spawns programs) or LABELS long; with LABELS
#                                                   threaded also of target and label "threaded"
# gdn_mpi_test(NAME W TARGET args...)               TARGET as W processes of one mpirun; on few cores too
# gdn_carry(TARGET)                                 with GDN_STATIC: the target's folder is all that
#                                                   another machine needs beside libc
# gdn_library()                                     target gdn: all modules so far in one archive; target
#                                                   gdn_c: the same as a shared object, the C ABI alone

set(GDN_WARNINGS $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wno-unused-parameter>)
if(GDN_DEV)
  list(APPEND GDN_WARNINGS $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()

# Header-only, so that the installed archive needs nothing; compiled under sanitizers, where a source
# with fmt in it takes 15 s instead of 1.5 s.
set(GDN_FMT fmt::fmt-header-only)
if(GDN_SANITIZE)
  set(GDN_FMT fmt::fmt)
endif()

set(GDN_MPIEXEC_FLAGS --oversubscribe --allow-run-as-root --bind-to none CACHE STRING
    "How tests start more MPI processes than cores (OpenMPI)")

set_property(GLOBAL PROPERTY GDN_MODULES "")

function(gdn_flags target)
  target_compile_options(${target} PRIVATE ${GDN_WARNINGS})
  if(GDN_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${GDN_SANITIZE} -fno-omit-frame-pointer
                           -O1 -g1)
    target_link_options(${target} PUBLIC -fsanitize=${GDN_SANITIZE})
  endif()
endfunction()

function(gdn_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PUBLIC ${ARG_DEPS} PRIVATE ${GDN_FMT})
  gdn_flags(${name})
  set_property(GLOBAL APPEND PROPERTY GDN_MODULES ${name})
endfunction()

function(gdn_carry target)
  if(NOT GDN_STATIC)
    return()
  endif()
  target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc)
  get_target_property(kind hwy::hwy TYPE)
  if(NOT kind STREQUAL "STATIC_LIBRARY")  # Debian has it as a shared object alone
    set_target_properties(${target} PROPERTIES BUILD_RPATH "$ORIGIN" INSTALL_RPATH "$ORIGIN")
    add_custom_command(TARGET ${target} POST_BUILD
      COMMAND ${CMAKE_COMMAND} -E copy $<TARGET_SONAME_FILE:hwy::hwy> $<TARGET_FILE_DIR:${target}>
      VERBATIM)
  endif()
endfunction()

function(gdn_test name)
  if(NOT GDN_DEV)
    return()
  endif()
  cmake_parse_arguments(ARG "HOST_ONLY" "TIMEOUT" "DEPS;LABELS" ${ARGN})
  if(NOT ARG_HOST_ONLY AND NOT "long" IN_LIST ARG_LABELS)
    list(APPEND ARG_LABELS sanitized)
  endif()
  foreach(group sanitized threaded)
    if(group IN_LIST ARG_LABELS)
      if(NOT TARGET ${group})
        add_custom_target(${group})
      endif()
      add_dependencies(${group} ${name})
    endif()
  endforeach()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${name}.cc)
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} ${GDN_FMT} GTest::gtest_main)
  gdn_flags(${name})
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
endfunction()

function(gdn_mpi_test name world target)
  add_test(NAME ${name}
    COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${world} ${GDN_MPIEXEC_FLAGS}
            $<TARGET_FILE:${target}> ${ARGN})
  gdn_mpi_properties(${name})
endfunction()

# Containers often forbid reading another process's memory; ranks are many and cores few.
function(gdn_mpi_properties name)
  set_tests_properties(${name} PROPERTIES TIMEOUT 300 LABELS mpi PROCESSORS 2
    ENVIRONMENT "OMPI_MCA_btl_vader_single_copy_mechanism=none;GDN_NUM_THREADS=1")
endfunction()

function(gdn_library)
  get_property(modules GLOBAL PROPERTY GDN_MODULES)
  set(objects "")
  set(links "")
  foreach(module IN LISTS modules)
    list(APPEND objects $<TARGET_OBJECTS:${module}>)
  endforeach()
  add_library(gdn STATIC ${objects})
  add_library(gdn::gdn ALIAS gdn)
  target_include_directories(gdn INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                           $<INSTALL_INTERFACE:include>)
  target_link_libraries(gdn PUBLIC Threads::Threads hwy::hwy ${CMAKE_DL_LIBS})
  if(GDN_CUDA)
    target_link_libraries(gdn PUBLIC CUDA::cudart_static)
  endif()
  target_compile_features(gdn INTERFACE cxx_std_20)  # the headers; callers default to less
  set_target_properties(gdn PROPERTIES LINKER_LANGUAGE CXX)

  add_library(gdn_c SHARED ${objects})
  add_library(gdn::gdn_c ALIAS gdn_c)
  target_include_directories(gdn_c INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                             $<INSTALL_INTERFACE:include>)
  target_link_libraries(gdn_c PRIVATE Threads::Threads hwy::hwy ${CMAKE_DL_LIBS})
  if(GDN_CUDA)
    target_link_libraries(gdn_c PRIVATE CUDA::cudart_static)
  endif()
  set_target_properties(gdn_c PROPERTIES LINKER_LANGUAGE CXX)
  target_link_options(gdn_c PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/gdn_c.map)
  gdn_flags(gdn_c)
  gdn_carry(gdn_c)
endfunction()
