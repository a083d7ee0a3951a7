# What was found and what will be built, in a few lines.
message(STATUS "gdn ${PROJECT_VERSION}: ${CMAKE_BUILD_TYPE}, ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
message(STATUS "  CUDA backends: ${GDN_CUDA}   developer targets: ${GDN_DEV}   sanitizers: ${GDN_SANITIZE}   to carry: ${GDN_STATIC}   MPI: ${GDN_WITH_MPI}")
